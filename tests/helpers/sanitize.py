"""Run every GPU kernel once, on shapes with tails: ``compute-sanitizer python -m tests.helpers.sanitize [FORMAT ...]``.

The sanitizer watches loads and stores, which the tests of values cannot see when they go astray by a little. PyTorch's
caching allocator is off, so that every tensor has an allocation, and so an end, of its own.
"""

import itertools
import os
import sys

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch

import mxtensor as mx
from mxtensor.core.kernel import Spec
from mxtensor.kernels.gemm.select import GEMM, GROUPED
from mxtensor.kernels.gemm.spec import GemmArgs
from mxtensor.kernels.operands import Form, Unquantized
from mxtensor.kernels.quantize import triton_columns, triton_rows
from mxtensor.kernels.quantize.amax_history import advance
from mxtensor.kernels.quantize.choose_pair import PAIR
from mxtensor.numerics.cast import Cast
from mxtensor.numerics.formats import FULL

FORMATS = ["mxfp8", "mxfp8_e5m2", "mxfp6", "mxfp4", "mxint8", "nvfp4", "mxfp8[32x32]", "mxfp4[1x64]", "nvfp4[16x16]"]
FLOAT8 = ["float8_tensor", "float8_row", "float8_1x128", "float8_128x128"]


def casts(name: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = torch.randn(*shape, device="cuda").to(dtype)
    for cast in (Cast.of(name), Cast.of(name, rounding="stochastic", seed=1)):
        triton_rows.dequantize(triton_rows.quantize(x, cast), dtype)
        triton_rows.quantize(x.t(), cast)
        triton_rows.fake_quantize(x, cast, dtype)
        if cast.format.block[0] == 1 and cast.format.block[1] > 0:
            triton_columns.pair(x, cast)
            triton_rows.quantize_swizzled(x, cast)
        pairs(x, cast)


def pairs(x: torch.Tensor, cast: Cast) -> None:
    """Both copies of a matrix in every form that the fused kernels have, and a step of delayed scaling."""
    forms = itertools.product((None, *Form), Form)
    whole = cast.format.block[0] == FULL
    amax = torch.tensor([2.0], device="cuda") if whole else None
    for rowwise, columnwise in forms:
        operands = (x, cast, rowwise, columnwise, x.dtype, amax, amax if amax is None else amax.clone())
        spec = Spec("sanitize", (tuple(x.shape),), (cast.format,), x.dtype, x.device)
        if PAIR[0].refuses(spec, *operands) is None:
            PAIR[0].run(*operands)
    if cast.format.block[0] == 1:
        triton_rows.fake_quantize(x.t(), cast, x.dtype)
    history = torch.rand(100, 3, device="cuda")
    advance(history, history[0].clone(), history[1].clone(), 1.0, False)


def products(name: str) -> None:
    """Each product kernel that accepts, as ``choose`` would ask it."""
    x, w = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((100, 272), (80, 272)))
    stack = torch.randn(3, 80, 272, device="cuda", dtype=torch.bfloat16)
    ends = torch.tensor([40, 40, 97], dtype=torch.int32, device="cuda")
    a, args = Unquantized(x, Cast.of(name)), GemmArgs(torch.bfloat16)
    one, many = mx.quantize(w, name).rowwise, mx.quantize(stack, name).rowwise
    for table, operands in ((GEMM, (a, one, args)), (GROUPED, (a, many, ends, args))):
        for kernel in table:
            spec = Spec("sanitize", (a.shape, operands[1].shape), (a.format, a.format), x.dtype, x.device)
            if kernel.refuses(spec, *operands) is None:
                kernel.run(*operands)


def main(names: list[str]) -> None:
    for name in names or [*FORMATS, *FLOAT8]:
        for dtype in (torch.bfloat16, torch.float32) if name in ("mxfp8", "nvfp4", "mxfp4") else (torch.bfloat16,):
            for shape in ((129, 161), (96, 256)):
                casts(name, dtype, shape)
        products(name)
        torch.cuda.synchronize()
    print("every kernel has run")


if __name__ == "__main__":
    main(sys.argv[1:])
