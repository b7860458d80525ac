"""Kernels of casts, products, attention and permutations. They take operands and plain tensors, never an MXTensor.

Each of ``gemm/``, ``quantize/``, ``attention/`` and ``permute/`` has a ``select.py`` with its kernels, fastest first.
``small_m/`` has the products of few rows. ``cuda/``, ``triton_device/`` and ``cpu/`` have device sources, ``runtime/``
compiles, caches and launches them.
"""
