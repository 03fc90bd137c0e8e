"""One replica: tokens in, tokens out. The only package that imports torch, and only in runner.py and what it uses.

Owns the model, the KV tensors, sampling, and the loop that carries out the scheduler's plans.
Must not know text, HTTP, routing or any other replica; decisions are core's.
Start with runner.py (launch and collect), then batch.py (a plan becomes tensors), model/llama.py, sample.py; transfer/
moves KV beside the steps.
"""
