"""The offline class: files of requests that are answered when there is room, in the shape of OpenAI's batches.

Owns: uploaded files, batches and the results of their lines, in one private folder. Must not know: how a request is
answered; it is handed a function for that. Start reading at `runner.py`; `store.py` says what survives a restart.
"""
