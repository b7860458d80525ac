"""Attention over a KV cache in codes: plain queries and operands in, a plain tensor out.

Start with ``arguments.py`` and ``choose_attention.py`` (the definition, and the tuple of kernels). ``cpu_attention.py``
and ``triton_attention.py`` also have the op for a KV cache in high precision.
"""
