"""A sentencepiece-style tokenizer in miniature, as Llama 2, Mistral 7B or Gemma have one: U+2581 for a space, bytes as
`<0x..>` for characters without a token, a BOS, a decoder that drops the first space."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

SPECIAL = ["<unk>", "<s>", "</s>"]
CHARACTERS = [*map(chr, range(0x21, 0x7F)), "\u2581", "\n", *"éüñ海港静かの"]
MERGES = [
    "\u2581 \u2581",
    "\u2581 t",
    "h e",
    "\u2581t he",
    "i n",
    "e r",
    "a n",
    "\u2581 a",
    "\u2581a n",
    "海 港",
    "l l",
]
VOCAB = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *CHARACTERS, *(m.replace(" ", "") for m in MERGES)]
FIRST_BYTE_ID = len(SPECIAL)


def make_tiny_sentencepiece(folder: Path, *, drop_space: bool = True, config: dict[str, Any] | None = None) -> Path:
    """`config` is added to tokenizer_config.json. Without `drop_space` as in Gemma: no space is put in front."""
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    vocab = {token: token_id for token_id, token in enumerate(VOCAB)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    to_mark = normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), to_mark]) if drop_space else to_mark
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if drop_space else steps)
    tokenizer.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(named | (config or {})))
    return folder
