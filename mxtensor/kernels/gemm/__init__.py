"""Matrix products: ``alpha * a @ b^T + beta * bias``, both operands blocked along the contraction.

Start with ``select.py`` (``gemm`` and the tuples of kernels) and ``spec.py`` (what an operand may be).
``emulated.py`` is the definition. The other files are one kernel each, or a part of the kernel whose name they begin
with:

- ``scaled_mm*.py``: codes and scales by the tensor cores, through torch.
- ``dot_scaled.py``: the same through Triton.
- ``fp8_rows*.py``: MX operands as E4M3 with one scale per row (``row_operand.py``), for FP8 tensor cores.
- ``cpu_codes.py`` and ``cpu_library.py``: C++ that reads codes.
- ``dequant.py``, ``cublas.py``, ``plain.py``: decoded values in bfloat16.
- ``row_global_scales.py``, ``group_scales.py``: global scales per row or per group, for any kernel.

Few rows run in ``kernels/small_m/``.
"""
