"""The custom ops of small-M products, which traced graphs hold: one weight, or several weights of one input.

The second call of a kind goes straight to its launches, as an eager ``F.linear`` does.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core import custom_ops
from ...core.kernel import Spec
from ...numerics.cast import Cast
from ...numerics.formats import E8M0, UE4M3, Format, Rounding, ScaleCalculationMode, get_format
from ..runtime.check import check_argument, check_codes, check_scalars
from ..runtime.cuda_macros import ELEMENTS, TYPES
from .config import SCALES
from .later_launch import GroupedLaunch, Launch, SharedLaunch, make_launch
from .launch import Weight, launch

HALVES = (torch.bfloat16, torch.float16)


def is_cast_here(cast: Cast, x: Tensor) -> bool:
    """Whether the CUDA sources do this cast: to MX blocks of 32 or to NVFP4 blocks of 16, from a 16-bit dtype.

    ``casts.cuh`` rounds to an even mantissa, which an element without mantissa bits lacks; ELEMENTS are tested.
    """
    f = cast.format
    if cast.rounding is not Rounding.NEAREST or x.dtype not in HALVES or f.element not in ELEMENTS:
        return False
    if cast.why_not_plain is not None:
        return False
    if f.scale is E8M0:
        return f.block == (1, 32)
    return f.scale is UE4M3 and f.block == (1, 16)


def _cast_of(cast: str, scaling: str) -> Cast | None:
    """The cast that an op's two strings name; None for an empty ``cast``."""
    return Cast(get_format(cast), ScaleCalculationMode(scaling)) if cast else None


def check_arguments(
    op: str, x: Tensor, weights: Sequence[Weight], format: Format, cols: int, x_global: Tensor | None,
    ends: Tensor | None, out_dtype: torch.dtype, cast: Cast | None,
) -> None:  # fmt: skip
    """Raise TypeError or ValueError unless the kernels can read these arguments of an op, on whatever device."""
    decoded = format.element in ELEMENTS and (format.scale, format.block[1]) in SCALES and out_dtype in TYPES
    if not decoded or (cast is not None and not is_cast_here(cast, x)):
        raise ValueError(f"{op} cannot multiply {x.dtype} by {format} to {out_dtype} with the cast {cast}")
    check_argument(op, "x", x, HALVES, (None, cols), x.device)
    if not x.is_contiguous() and (x.stride(1) != 1 or x.stride(0) < cols):
        raise ValueError(f"{op}: the rows of x must be contiguous, one after the other, got strides {x.stride()}")
    check_scalars(op, "a global scale", [x_global, *(w.global_scale for w in weights)], x.device)
    for w in weights:
        sizes = (None, None) if ends is None else (None, None, None)
        check_argument(op, "data", w.data, (torch.uint8, format.element.dtype), sizes, x.device)
        check_codes(op, w.data, w.scale, w.global_scale, format, (*w.data.shape[:-1], cols))
        width = w.data.shape[-2]
        if w.bias is not None:
            check_argument(op, "bias", w.bias, tuple(TYPES), (x.shape[0], width)[2 - max(w.bias.dim(), 1) :], x.device)
        if not all(t.is_contiguous() for t in (w.data, w.scale, w.bias) if t is not None):
            raise ValueError(f"{op}: codes, scales and bias must be contiguous; copy them with contiguous()")
    if ends is not None:
        check_argument(op, "ends", ends, (torch.int32,), (weights[0].data.shape[0],), x.device)
        if not ends.is_contiguous():
            raise ValueError(f"{op}: ends must be contiguous; copy them with contiguous()")


# ---------------------------------------------------------------------------------------------- repeated calls


def has_launches(x: Tensor) -> bool:
    """Whether launches of activations on this device can be stored."""
    return x.is_cuda


def _facts(t: Tensor | None) -> Hashable:
    """What launches hold of a tensor of a weight, its address included."""
    return None if t is None else (t.data_ptr(), t.shape, t.dtype, t.is_contiguous())


def _repeated(
    op: str, x: Tensor, weights: Sequence[Weight], format: str, cols: int, x_global: Tensor | None,
    ends: Tensor | None, alpha: float, beta: float, out_dtype: torch.dtype, cast: str, scaling: str,
    kind: type[Launch],
) -> Any:  # fmt: skip
    """What the op ``op`` returns: by launches that an earlier call with the same weights stored, if there are any.

    A tensor that got the memory of another one finds that one's launches only if all of the key is equal: then they
    are right.
    """
    key: Hashable = None
    if x_global is None and has_launches(x):
        place = x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15  # kernels read 16 bytes at a time
        tensors = tuple(_facts(t) for weight in weights for t in weight)
        groups = None if ends is None else (ends.shape, ends.dtype, ends.device, ends.is_contiguous())
        key = op, place, tensors, groups, format, cols, alpha, beta, out_dtype, cast, scaling
        seen, stored = custom_ops.launch_of(key)
        if stored is not None:
            return stored(x) if ends is None else stored(x, ends)
        key = None if seen else key
    f, to = get_format(format), _cast_of(cast, scaling)
    check_arguments(op, x, weights, f, cols, x_global, ends, out_dtype, to)
    results = launch(x, weights, f, cols, x_global, ends, alpha, beta, out_dtype, to)
    if key is not None:
        stored = make_launch(x, weights, f, cols, to, alpha, beta, out_dtype, ends, kind)
        spec = Spec(op, (tuple(x.shape), *(tuple(w.data.shape) for w in weights)), (x.dtype, f), out_dtype, x.device)
        custom_ops.cache_launch(key, spec, stored)
    return results if kind is SharedLaunch else results[0]


# ---------------------------------------------------------------------------------------------- the ops


@custom_ops.define("mxtensor::small_m")
def small_m(
    x: Tensor, data: Tensor, scale: Tensor, format: str, cols: int, x_global: Tensor | None,
    global_scale: Tensor | None, bias: Tensor | None, ends: Tensor | None, alpha: float, beta: float,
    out_dtype: torch.dtype, cast: str, scaling: str,
) -> Tensor:  # fmt: skip
    """``alpha * global scales * x @ decode(data, scale)^T + beta * bias`` (M, N), summed in float32 and rounded once.

    x (M, K) is bfloat16 or float16; it is first cast to the format ``cast`` unless that is empty. ``data`` and
    ``scale`` are those of an (N, K) operand of ``format``, and ``cols`` is K. ``bias`` is (N,) or (M, N). With ``ends``
    (G,) the operand is a stack (G, N, K): rows ``ends[g - 1]`` to ``ends[g]`` of x are multiplied by matrix g, and the
    rows after the last end are zeros.
    """
    weights, rest = [Weight(data, scale, global_scale, bias)], (alpha, beta, out_dtype, cast, scaling)
    kind = Launch if ends is None else GroupedLaunch
    return _repeated("mxtensor::small_m", x, weights, format, cols, x_global, ends, *rest, kind)  # type: ignore[no-any-return]


@custom_ops.fake_of(small_m)
def _(x, data, scale, format, cols, x_global, global_scale, bias, ends, alpha, beta, out_dtype, cast, scaling):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], data.shape[-2], dtype=out_dtype)


@custom_ops.define("mxtensor::small_m_shared")
def small_m_shared(
    x: Tensor, data: list[Tensor], scale: list[Tensor], format: str, cols: int, x_global: Tensor | None,
    global_scale: Sequence[Tensor | None], bias: Sequence[Tensor | None], alpha: float, beta: float,
    out_dtype: torch.dtype, cast: str, scaling: str,
) -> list[Tensor]:  # fmt: skip
    """``small_m`` of one x by each of several weights, without groups."""
    if not data or len({*map(len, (data, scale, global_scale, bias))}) > 1:
        raise ValueError("mxtensor::small_m_shared: data, scale, global_scale and bias must have one length, not 0")
    weights, rest = [*map(Weight, data, scale, global_scale, bias)], (alpha, beta, out_dtype, cast, scaling)
    return _repeated("mxtensor::small_m_shared", x, weights, format, cols, x_global, None, *rest, SharedLaunch)  # type: ignore[no-any-return]


@custom_ops.fake_of(small_m_shared)
def _(x, data, scale, format, cols, x_global, global_scale, bias, alpha, beta, out_dtype, cast, scaling):  # type: ignore[no-untyped-def]
    return [x.new_empty(x.shape[0], d.shape[-2], dtype=out_dtype) for d in data]


@custom_ops.define("mxtensor::written")
def written(x: Tensor) -> Tensor:
    """A copy of x by a kernel that does not let the next kernel start early.

    So a product may read the copy without waiting: x and the copy are complete when the product starts.
    """
    return x.clone()


@custom_ops.fake_of(written)
def _(x):  # type: ignore[no-untyped-def]
    return torch.empty_like(x)
