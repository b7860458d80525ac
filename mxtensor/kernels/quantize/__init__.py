"""Casts: values to codes and scales, to rounded values, and back.

Start with ``select.py`` (one tensor) and ``select_pair.py`` (a tensor and its transpose): tuples of kernels, fastest
first. ``numerics/reference.py`` is the definition, ``reference.py`` here is the kernel that runs it. ``cpu*.py`` launch
C++, ``triton_*.py`` Triton, ``cuda_*.py`` CUDA C++. ``by_group.py`` casts rows in groups, ``hadamard.py`` is the random
Hadamard transform (RHT) of NVFP4 training, ``amax_history.py`` a step of delayed scaling.
"""
