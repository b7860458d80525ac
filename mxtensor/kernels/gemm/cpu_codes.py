"""The kernel row ``cpu_codes``: products of rows with codes on CPU that decode each code in registers, once.

No decoded copy of a weight is written to memory: a product of few rows takes the time of reading its codes. With many
rows, torch's BLAS multiplies slabs of the weight that are decoded into the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.kernel import Kernel, Spec
from ...core.names import dtype_name
from ...core.tracing import is_traced
from ...numerics.cast import Cast
from ...numerics.formats import Format, Rounding
from ...numerics.operand import Operand
from ...numerics.validate import check_sizes
from ..quantize.cpu import BLOCKS, KINDS, MODES, SCALES
from ..quantize.select import fake_quantize
from ..runtime.availability import exported
from .by_codes import as_rows, fits_one_launch, readable_bias
from .cpu_library import ELEMENTS, FEW_ROWS, bind, bound, library, linear, linear_groups, missing
from .spec import (
    FakeQuantized,
    GemmArgs,
    GemmOperand,
    Unquantized,
    not_a_bias_of_groups,
    not_rows_by_matrix,
)


def _refuses(spec: Spec, a: GemmOperand, b: GemmOperand, args: GemmArgs) -> str | None:
    if spec.op.partition(" ")[0] in TRAINING:
        return "training multiplies values in the same way whether codes were saved or not"
    if not isinstance(b, Operand):
        return "needs a quantized right operand, this one has no codes"
    f = b.format
    if f.element not in ELEMENTS or f.scale not in SCALES:
        return f"has no decoder for {f.element.name} with {f.scale.name} scales"
    if f.block not in BLOCKS:
        return f"has no decoder for blocks of {f.block[0]}x{f.block[1]}"
    if isinstance(a, (Operand, FakeQuantized)):
        return "its left operand is cast already: the kernels of other forms of this operand give the same bits"
    x = a.x if isinstance(a, Unquantized) else a
    for dtype in (args.out_dtype, *((x.dtype,) if isinstance(x, Tensor) else ())):
        if dtype not in KINDS:
            return f"computes with float32, bfloat16 and float16, not {dtype_name(dtype)}"
    if 0 in (*spec.shapes[0], *spec.shapes[1]):
        return "no values"
    return exported(spec) or missing()


def refuses(spec: Spec, a: GemmOperand, b: GemmOperand, args: GemmArgs) -> str | None:
    return not_rows_by_matrix(spec, a) or _refuses(spec, a, b, args)


def refuses_grouped(spec: Spec, a: GemmOperand, b: GemmOperand, ends: Tensor, args: GemmArgs) -> str | None:
    reason = not_a_bias_of_groups(args) or _refuses(spec, a, b, args)
    if reason is None and isinstance(b, Operand) and b.scale.shape[0] != b.shape[0]:
        return f"{b.format} has one scale for all groups"
    return reason


TRAINING = frozenset({"fprop", "dgrad", "wgrad", "general_gemm"})
"""Products whose operands are codes in one step and rounded values in another: both take one kernel, for equal bits."""
_NUMBERS = {e.name: i for i, e in enumerate(ELEMENTS)} | {s.name: i for i, s in enumerate(SCALES)}
"""By name, because Dynamo cannot search a tuple of rows."""


def numbers_of(format: Format) -> tuple[int, int, int, int]:
    """A format as the op takes it: element, scale and extents of a block."""
    return _NUMBERS[format.element.name], _NUMBERS[format.scale.name], *format.block


def _is_cast_here(cast: Cast) -> bool:
    """Whether the op does this cast, in the library of the casts."""
    f = cast.format
    known = f.element in ELEMENTS and f.scale in SCALES and f.block in BLOCKS
    return known and cast.rounding is Rounding.NEAREST and cast.why_not_plain is None


def _numbers_of_cast(cast: Cast | None) -> tuple[tuple[int, ...], float]:
    """A cast as the op takes it; empty for none."""
    if cast is None:
        return (), 0.0
    f = cast.format
    return (*numbers_of(f), int(f.global_scale), int(f.signed_zero), MODES[cast.scaling]), cast.amax_epsilon


def _activations(a: GemmOperand) -> tuple[Tensor, Tensor | None, Cast | None]:
    """The activations as plain values, their global scale, and the cast that the op still has to do."""
    if isinstance(a, Unquantized):
        if _is_cast_here(a.cast):
            return a.x, None, a.cast
        return *fake_quantize(a.x, a.cast, _dtype_of(a.format)), None
    assert isinstance(a, Tensor)
    return a, None, None


def _dtype_of(format: Format) -> torch.dtype:
    """The shorter dtype that holds values of a format without the global scale exactly."""
    return torch.bfloat16 if format.exact_in_bfloat16 else torch.float32


def run(a: GemmOperand, b: GemmOperand, args: GemmArgs) -> Tensor:
    assert isinstance(b, Operand)
    if not is_traced(b.data):
        check_sizes(b, strided=True)
    x, x_global, cast = _activations(a)
    shape = (*x.shape[:-1], b.shape[-2])
    out: Tensor = linear(
        as_rows(x, dense=cast is not None), b.data.contiguous(), b.scale.contiguous(), b.global_scale, x_global,
        readable_bias(args, shape, KINDS), numbers_of(b.format), float(args.alpha), float(args.beta), args.out_dtype,
        *_numbers_of_cast(cast),
    )  # fmt: skip
    return out if len(shape) == 2 else out.view(shape)


def run_grouped(a: GemmOperand, b: GemmOperand, ends: Tensor, args: GemmArgs) -> Tensor:
    assert isinstance(b, Operand)
    if not is_traced(b.data):
        check_sizes(b, strided=True)
    x, x_global, cast = _activations(a)
    return linear_groups(  # type: ignore[no-any-return]
        x.contiguous(), b.data.contiguous(), b.scale.contiguous(), b.global_scale, x_global, ends.contiguous(),
        numbers_of(b.format), float(args.alpha), args.out_dtype, *_numbers_of_cast(cast),
    )  # fmt: skip


class BoundProduct:
    """A product with one weight whose addresses the op stores under a number. Stores no tensor."""

    __slots__ = ("_forget", "_number")

    def __init__(self, number: int) -> None:
        found = library()
        assert not isinstance(found, str)
        self._number, self._forget = number, found.forget

    def __call__(self, x: Tensor) -> Tensor:
        return bound(x, self._number)  # type: ignore[no-any-return]

    def __del__(self) -> None:
        self._forget(self._number)


def launch_for(x: Tensor, a: GemmOperand, b: GemmOperand, args: GemmArgs) -> BoundProduct | None:
    """The launch of ``run(a, b, args)`` for any x with this layout; None if the product takes more than one op.

    a is x (..., K) as rows, unquantized or plain.
    """
    assert isinstance(b, Operand)
    cast = a.cast if isinstance(a, Unquantized) else None
    if not isinstance(a, Tensor) and (cast is None or not _is_cast_here(cast)):
        return None
    if not fits_one_launch(x, b, args, KINDS) or x.numel() > FEW_ROWS * x.shape[-1]:
        return None
    check_sizes(b)
    rows, shape = x.reshape(-1, x.shape[-1]), (*x.shape[:-1], b.shape[-2])
    numbers = numbers_of(b.format), *_numbers_of_cast(cast)
    return BoundProduct(bind(rows, b.data, b.scale, b.global_scale, args.bias, *numbers, shape))


KERNEL = Kernel("cpu_codes", refuses, run, "cpu", launch_for=launch_for)
GROUPED = Kernel("cpu_codes", refuses_grouped, run_grouped, "cpu")
