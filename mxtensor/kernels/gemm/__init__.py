"""Matrix products: ``alpha * a @ b^T + beta * bias``, both operands blocked along the contraction.

Start with ``select.py`` (``gemm`` and the tuples of kernels) and ``spec.py`` (their arguments). ``emulated.py`` is the
definition. The other files are one kernel each, single and grouped, or a part of the kernel whose name they begin with:

- ``scaled_mm.py``, ``scaled_mm_contract.py``: codes and scales by the tensor cores, through torch.
- ``dot_scaled.py``: the same through Triton.
- ``fp8_rows.py``, ``fp8_rows_cache.py``, ``fp8_rows_grouped.py``: MX operands as E4M3 with one scale per row, for FP8
  tensor cores.
- ``cpu_codes.py``: C++ that reads codes.
- ``dequant.py``, ``cublas.py``: decoded values in bfloat16.
- ``global_scales.py``: global scales per row, matrix or group, for any kernel.

Few rows run in ``kernels/small_m/``. ``kernels/expected_time.py`` has the times by which a kernel is chosen.
"""
