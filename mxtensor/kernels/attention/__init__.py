"""Attention over a KV cache in codes: plain queries and operands in, a plain tensor out.

Start with ``select.py`` and ``by_heads.py`` (the definition). ``values_cpu.py`` and ``values_cuda.py`` have the op for
a KV cache in high precision.
"""
