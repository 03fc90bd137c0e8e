"""Kernels of our own for CPUs, in C++: linear layers, paged attention, sampling, on threads of their own.

Compiled on the machine that runs them, when they are first needed (build.py), and called through ctypes with raw
pointers (library.py). They know tensors' memory, not torch. Where they cannot be had the engine computes with torch.
Start reading at library.py; then parallel.h, tiles.h, linear.h, attention.h, sample.h.
"""
