"""Copies of whole KV blocks beside the steps, on threads of their own: between the device and main memory, to and from
the disk, and between engines.

It moves what it is told to, and knows neither requests nor tokens. Start reading at copier.py; for the disk at disk.py;
for other engines at lend.py, fetch.py and, for the ways between them, transport.py.
"""
