"""Which of ``fp8_rows``, ``small_m`` and ``dequant`` is expected to be fastest: a cost model of Hopper.

All figures are microseconds in a CUDA graph on an H100 80GB HBM3 (torch 2.11, Triton 3.6), fitted to products of 128,
512, 1024 and 4096 rows with weights of 4096x4096, 4096x14336 and 2880x2880 in MXFP8, MXFP4 and MXFP8 by MXFP4, and to
products of 160, 256 and 512 rows with the weights of eight models in MXFP8 (``benchmarks.users layers``). They are
in ``tests/kernels/gemm/test_fp8_rows_costs.py``, beside what the model says: within 35 % with a weight rescaled
before, 19 % with one rescaled each time, 12 % for ``dequant``. Those of ``small_m`` are measured for its launch
configs (``small_m/costs.py``).

A wave is a 128x128 tile of the result for each multiprocessor.
"""

from __future__ import annotations

import math

from ...core.kernel import Spec
from ...core.tracing import is_captured
from ...numerics.formats import Format
from ...numerics.operand import Operand
from ..small_m import kernel as small_m
from ..small_m.heuristics import expected_time, most_rows
from .fp8_rows_by_codes import wants_rows
from .fp8_rows_cache import ON_THE_FLY, is_known
from .spec import GemmArgs, GemmOperand, Unquantized, data_of

MEASURED = (9, 0)
"""The compute capability of the figures."""
TILE = 128
MULTIPROCESSORS = 132
FRESH = ("fprop", "dgrad", "wgrad")
"""Products whose right operand is cast anew in each step, so that no form of it is cached."""
LAUNCH = 2.0
"""The start of a kernel that casts, and that of the exact product, which finds no row to multiply."""
CAST_IN_PLAN = 0.7
"""What a cast adds to the kernel that prepares the activations of ``small_m``."""
TRAINED = 1 / 2.2e6
"""Bytes of a cast for training: both copies of a value from two reads take 6, or 3 for each product; not fitted."""


def _waves(rows: int, width: int) -> float:
    tiles = -(-rows // TILE) * -(-width // TILE)
    return tiles / MULTIPROCESSORS


def _cast(values: int, format: Format) -> float:
    """bfloat16 values to row-scaled codes: 2.8 TB/s for E4M3 elements, 1.9 for others."""
    return LAUNCH + 3 * values / (2.8e6 if format.element.name == "e4m3" else 1.9e6)


def _rescale(values: int, format: Format) -> float:
    """Stored codes to row-scaled codes."""
    return max(9.0, values / 1.22e6) if format.element.bits == 8 else max(14.0, values / 0.99e6)


def fp8_rows(rows: int, width: int, cols: int, left: Format, right: Format, plain: bool, cached: bool) -> float:
    """Microseconds of ``fp8_rows``. ``plain``: the activations are not codes yet; ``cached``: the rescaled weight
    is."""
    # cuBLAS takes a slower kernel for rows that are not whole tiles: 160 rows take longer than 256
    per_weight = 0.088 if rows % TILE == 0 else 0.303
    product = math.ceil(_waves(rows, width)) * (2.5 + 0.00243 * cols) + LAUNCH
    product += 1e-6 * (per_weight * width * cols + 1.25 * rows * width)
    first = _cast(rows * cols, left) if plain else _rescale(rows * cols, left)
    return first + product + (0.0 if cached else _rescale(width * cols, right))


def fp8_rows_in_training(rows: int, width: int, cols: int) -> float:
    """The same of 8-bit elements where both operands are cast in this step, each for two products."""
    product = math.ceil(_waves(rows, width)) * (3 + 0.0026 * cols) + LAUNCH
    return product + 2 * LAUNCH + 3 * (rows + width) * cols * TRAINED


def dequant_in_training(rows: int, width: int, cols: int) -> float:
    """The same of ``dequant``: values are written for one product, codes for the other one, which decodes them."""
    halves = math.ceil(2 * _waves(rows, width)) / 2
    return 2 * LAUNCH + 3.5 * (rows + width) * cols * TRAINED + halves * (1 + 0.0052 * cols)


def dequant(rows: int, width: int, cols: int, right: Format) -> float:
    """Microseconds of ``dequant``: the weight decoded, activations rounded, a product in bfloat16."""
    traffic = width * cols * (2 + right.bits_per_value / 8) + 2 * rows * cols
    halves = math.ceil(2 * _waves(rows, width)) / 2
    return 1 + traffic / 2.8e6 + max(2 * width * cols / 2.2e6, halves * (1 + 0.0052 * cols))


def slower(spec: Spec, a: GemmOperand, b: GemmOperand, args: GemmArgs) -> str | None:
    """Which kernel is expected to be faster than ``fp8_rows`` on Hopper, and the figures; None if none is."""
    rows, (width, cols) = math.prod(spec.shapes[0][:-1]), spec.shapes[1]
    left, right = spec.formats
    assert isinstance(left, Format) and isinstance(right, Format)
    if spec.op in FRESH and wants_rows(a, b):
        ours, theirs = fp8_rows_in_training(rows, width, cols), dequant_in_training(rows, width, cols)
        return None if ours <= theirs else _slower_than("dequant", theirs, ours)
    will_be = rows < ON_THE_FLY if spec.traced else _is_or_will_be_cached(b)
    cached = spec.op not in FRESH and will_be
    ours = fp8_rows(rows, width, cols, left, right, isinstance(a, Unquantized), cached)
    name, theirs = "dequant", dequant(rows, width, cols, right)
    if rows <= most_rows(spec.capability) and small_m.KERNEL.refuses(spec, a, b, args) is None:
        known = expected_time(right, rows, width, cols)
        name, theirs = "small_m", math.inf if known is None else known + CAST_IN_PLAN + 3e-7 * rows * cols
    return _slower_than(name, theirs, ours) if theirs < ours else None


def _is_or_will_be_cached(b: GemmOperand) -> bool:
    return not is_captured(data_of(b)) or (isinstance(b, Operand) and is_known(b))


def _slower_than(name: str, theirs: float, ours: float) -> str:
    return f"{name} is expected to be faster: {theirs:.1f} us, this kernel {ours:.1f} us"
