"""Kernels of casts, products, attention and permutations. They take operands and plain tensors, never an MXTensor.

``quantize/choose_cast.py``, ``attention/choose_attention.py``, ``permute/choose_permutation.py`` and ``gemm/select.py``
have the kernels, fastest first. ``operands.py`` has the operands that casts write and products read.
``small_m/`` has the products of few rows. ``cuda/``, ``triton_device/`` and ``cpu/`` have device sources, ``runtime/``
compiles, caches and launches them.
"""
