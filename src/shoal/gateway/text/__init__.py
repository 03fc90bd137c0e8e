"""Text in, token ids out, and back: the only package that knows what a token spells.

Owns the tokenizer (`tokenizer`), the chat template (`template`), the text of a stream as it grows (`decode`) and stop
strings in it (`stop`). Must not know: HTTP, engines, requests. Start reading in `tokenizer.py`.
"""
