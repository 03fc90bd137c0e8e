"""Copies of whole KV blocks beside the steps: between the device and main memory, on a thread of their own.

It moves what plans tell it to, and knows neither requests nor tokens. Start reading at copier.py.
"""
