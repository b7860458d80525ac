"""Casts: values to codes and scales, to rounded values, and back.

Start with ``choose_cast.py`` (one tensor) and ``choose_pair.py`` (a tensor and its transpose): tuples of kernels,
fastest first.

| file | casts |
|---|---|
| ``definition.py`` | ``numerics/reference.py`` as a kernel: traced, as one op, or in slices on a CPU |
| ``cpu_casts.py`` | the CPU library, in C++ |
| ``triton_rows.py`` | Triton: blocks along rows, whole rows, square blocks; dequantize |
| ``triton_columns.py`` | Triton: blocks along columns, alone or together with rows |
| ``triton_ops.py``, ``triton_common.py`` | the custom ops of these; tiles and what all Triton casts share |
| ``cuda_both.py`` | CUDA C++: rows and columns in one pass |
| ``to_row_scaled.py``, ``to_row_scaled_both.py`` | Triton: E4M3 with a scale for each row, for FP8 products |
| ``by_group.py`` | rows in groups, and stacks, with a scale for each group |

``hadamard.py`` is the random Hadamard transform (RHT) of NVFP4 training, ``amax_history.py`` a step of delayed scaling.
"""
