"""The `shoal` command: it parses, calls one function of the package concerned, and says what went wrong.

Owns: options, exit codes (0 done, 1 failed, 2 a bad value), what a terminal shows. Must not know: how anything is done.
Importing it must stay cheap: what needs torch, an HTTP server or a tokenizer is imported inside the commands.
Start reading at `app.py`; `options.py` turns the configuration's fields into options.
"""
