"""Checks of codes and scales that come from outside: a wrong layout must raise an error, not give wrong numbers.

Users, files and torch's own protocols hand over tensors that a kernel would read by address. ``check_components`` is
the one check of an operand, ``check_outer`` that of the tensor around operands. ``check_sizes`` is the part that is
cheap enough to run at each entry of native code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.names import dtype_name
from ..core.shapes import contiguous_stride, swapped
from ..core.tracing import is_traced
from .formats import Format
from .operand import Operand, Rotated
from .reference import SOURCE_DTYPES

_LARGEST = (1 << 63) - 1


# ---------------------------------------------------------------------------------------------- one tensor


def check_numbers(what: str, numbers: Any) -> tuple[int, ...]:
    """Sizes or strides as a tuple. Raises TypeError unless they are integers (symbols of torch.compile too), ValueError
    for a negative one."""
    if not isinstance(numbers, (tuple, list)) or any(
        type(n) is not int and type(n) is not torch.SymInt for n in numbers
    ):
        raise TypeError(f"{what} must be a tuple of integers, got {_short(numbers)}")
    if any(type(n) is int and not 0 <= n <= _LARGEST for n in numbers):
        raise ValueError(f"{what} must be from 0 to {_LARGEST}, got {_short(tuple(numbers))}")
    return tuple(numbers)


def check_tensor(what: str, t: Any, *dtypes: torch.dtype) -> Tensor:
    """``t`` itself. Raises TypeError unless it is a dense tensor of one of these dtypes."""
    names = " or ".join(dict.fromkeys(map(dtype_name, dtypes)))
    if not isinstance(t, Tensor):
        raise TypeError(f"{what} must be a tensor of {names}, got {_short(t)}")
    if t.dtype not in dtypes:
        raise TypeError(f"{what} must be {names}, got {dtype_name(t.dtype)}")
    if t.layout is not torch.strided:
        raise TypeError(f"{what} must be a dense tensor, got layout {str(t.layout).removeprefix('torch.')}")
    if not torch.compiler.is_dynamo_compiling() and t.is_neg():
        raise TypeError(f"{what} must be a tensor in memory, got a negated view; use resolve_neg()")
    return t


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """The number of entries from the first to the last one of a tensor, both included; 0 for an empty tensor."""
    return 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))


def is_non_overlapping(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether no two entries share memory, by a test that every view made by slices and permutations passes."""
    reach = 1
    for step, n in sorted((step, n) for n, step in zip(size, stride, strict=True) if n > 1):
        if step < reach:
            return False
        reach += (n - 1) * step
    return True


def _holds(t: Tensor) -> bool:
    """``has_memory`` of a contiguous tensor that is not empty."""
    return t.untyped_storage().nbytes() >= (t.storage_offset() + t.numel()) * t.itemsize


def has_memory(t: Tensor) -> bool:
    """Whether the storage holds all entries; FSDP2 frees storages, and a file may name one that is too short."""
    reach = t.storage_offset() + _extent(t.shape, t.stride())
    return reach * t.dtype.itemsize <= t.untyped_storage().nbytes() if t.numel() else True


# ---------------------------------------------------------------------------------------------- an operand


def check_components(
    data: Tensor,
    scale: Tensor,
    format: Format,
    shape: tuple[int, ...] | None,
    global_scale: Tensor | None,
    no_overlap: bool = False,
) -> Operand:
    """An operand of these tensors, as aliases of them: a later ``set_`` of an argument does not change it.

    ``no_overlap``: no two entries of a tensor may share memory, as in a file. Raises TypeError for a wrong type, dtype
    or layout, ValueError for a wrong shape or device.
    """
    element = format.element
    check_tensor(f"{format}: data", data, element.dtype, torch.uint8)
    check_tensor(f"{format}: scale", scale, format.scale.dtype, format.scale.view_dtype)
    if shape is None:
        values, size = element.packing
        shape = (*data.shape[:-1], data.shape[-1] // size * values) if data.dim() else ()
    shape = check_numbers(f"{format}: shape", shape)
    if all(type(n) is int for n in shape) and math.prod([max(n, 1) for n in shape]) > _LARGEST // 8:
        raise ValueError(f"{format}: a shape of {shape} has too many values for torch")
    if len(shape) == 0 or tuple(data.shape) != format.data_shape(shape):
        expected = f"shape {format.data_shape(shape)}" if len(shape) else "at least one dimension"
        raise ValueError(f"{format} of shape {tuple(shape)}: data must have {expected}, got {tuple(data.shape)}")
    if tuple(scale.shape) != format.scale_shape(shape):
        raise ValueError(
            f"{format} of shape {tuple(shape)}: scale must have shape {format.scale_shape(shape)} (one for a block of "
            f"{'x'.join('all' if b < 0 else str(b) for b in format.block)}), got {tuple(scale.shape)}"
        )
    _check_global_scale(format, global_scale, shape)
    _check_memory(format, {"data": data, "scale": scale, "global_scale": global_scale}, no_overlap)
    data, scale = data.detach().view(element.dtype), scale.detach().view(format.scale.dtype)
    return Operand(data, scale, _of_matrices(global_scale, format, shape), format, shape)


def _of_matrices(global_scale: Tensor | None, format: Format, shape: tuple[int, ...]) -> Tensor | None:
    """A checked global scale with one entry for each matrix."""
    if global_scale is None:
        return None
    wanted, global_scale = format.global_scale_shape(shape) if format.scales_matrices else (), global_scale.detach()
    if tuple(global_scale.shape) == wanted:
        return global_scale
    one = global_scale.numel() == 1 and math.prod(wanted) != 1
    return global_scale.reshape(()).expand(wanted).contiguous() if one else global_scale.reshape(wanted)


def _check_global_scale(format: Format, global_scale: Any, shape: tuple[int, ...]) -> None:
    """Raise unless it is one float32, or one for each matrix of a stack, for a format that has a global scale, and None
    for the others."""
    if format.global_scale != (global_scale is not None):
        need = "needs a float32 global_scale" if format.global_scale else "has no global_scale"
        raise ValueError(f"{format} {need}")
    if global_scale is None:
        return
    numbers = global_scale.numel() if isinstance(global_scale, Tensor) else 0
    of_stack = format.scales_matrices and len(shape) > 2 and numbers == math.prod(shape[:-2])
    if not isinstance(global_scale, Tensor) or global_scale.dtype != torch.float32 or not (numbers == 1 or of_stack):
        got = _short(global_scale)
        if isinstance(global_scale, Tensor):
            got = f"{dtype_name(global_scale.dtype)} {tuple(global_scale.shape)}"
        if len(shape) > 2:
            each = math.prod(shape[:-2])
            raise TypeError(
                f"{format}: global_scale must be one float32, or {each} for the matrices of the stack, got {got}"
            )
        raise TypeError(f"{format}: global_scale must be one float32, got {got}")
    check_tensor(f"{format}: global_scale", global_scale, torch.float32)


def _check_memory(format: Format, tensors: Mapping[str, Tensor | None], no_overlap: bool) -> None:
    """Raise ValueError unless all are on one device and their storages hold them. ``no_overlap``: see
    ``check_components``."""
    present = {name: t for name, t in tensors.items() if t is not None}
    device = present["data"].device
    for name, t in present.items():
        if t.device != device:
            raise ValueError(f"{format}: data is on {device}, {name} on {t.device}")
    if is_traced(*present.values()):
        return
    for name, t in present.items():
        if not has_memory(t):
            raise ValueError(f"{format}: the storage of {name} {tuple(t.shape)} was freed or is too short")
        if no_overlap and not is_non_overlapping(t.shape, t.stride()):
            raise ValueError(
                f"{format}: entries of {name} share memory (shape {tuple(t.shape)}, strides {t.stride()}); clone it"
            )


def check_operand(what: str, operand: Any, no_overlap: bool) -> Operand:
    """``check_components`` of the tensors of an operand."""
    if not isinstance(operand, Operand):
        raise TypeError(f"{what} must be an Operand or None, got {_short(operand)}")
    if not isinstance(operand.format, Format):
        raise TypeError(f"{what}: format must be a Format, got {_short(operand.format)}; see mx.get_format")
    if operand.shape is None:
        raise TypeError(f"{what}: shape must be a tuple of integers, got None")
    return check_components(
        operand.data, operand.scale, operand.format, operand.shape, operand.global_scale, no_overlap
    )


def _fits(global_scale: Tensor, format: Format, shape: tuple[int, ...]) -> bool:
    one = global_scale.numel() == 1 or global_scale.shape == format.global_scale_shape(shape)
    return one and global_scale.dtype is torch.float32


def check_sizes(operand: Operand, strided: bool = False) -> None:
    """Raise ValueError unless native code can read the whole operand at its addresses; ``strided``: by its strides.

    The short form of ``check_components``, for each entry of native code: dtypes follow from the format, and memory is
    compared through the sizes.
    """
    data, scale, global_scale, format, shape = (
        operand.data, operand.scale, operand.global_scale, operand.format, operand.shape,
    )  # fmt: skip
    if (
        len(shape) > 0
        and data.shape == format.data_shape(shape)
        and scale.shape == format.scale_shape(shape)
        and data.dtype.itemsize == 1
        and scale.dtype is format.scale.dtype
        and data.device == scale.device
        and (global_scale is None or _fits(global_scale, format, shape))
        and (global_scale is None or global_scale.device == data.device)
        and min(shape) >= 0
        and (0 in shape or all(map(has_memory if strided else _holds, (data, scale))))
    ):
        return
    whole = None if global_scale is None and format.global_scale else format  # kernels may get the global scale apart
    if whole is not None:
        check_components(data, scale, format, shape, global_scale)
    raise ValueError(
        f"{format} of shape {shape}: data {tuple(data.shape)} {dtype_name(data.dtype)} on {data.device} and scale "
        f"{tuple(scale.shape)} {dtype_name(scale.dtype)} on {scale.device} are not those of an operand of this shape"
    )


# ---------------------------------------------------------------------------------------------- the outer tensor


def check_outer_dtype(dtype: Any) -> None:
    """Raise TypeError for a dtype whose values cannot be quantized."""
    if not isinstance(dtype, torch.dtype) or dtype not in SOURCE_DTYPES:
        names = ", ".join(map(dtype_name, SOURCE_DTYPES))
        raise TypeError(f"a quantized tensor stands for values in one of {names}, not in {_short(dtype)}")


def check_outer(
    rowwise: Operand | None,
    columnwise: Operand | None,
    format: Format,
    dtype: Any,
    size: Any,
    stride: Any,
    offset: Any = 0,
    no_overlap: bool = False,
    any_stride: bool = False,
    rotated: Rotated | None = None,
) -> tuple[Operand | None, Operand | None, tuple[int, ...], tuple[int, ...]]:
    """Checked operands, size and strides of a quantized tensor, which ``MXTensor`` has as arguments.

    ``no_overlap``: as in ``check_components``. ``any_stride``: strides may reach further than the codes, or to one
    value twice, as those of an expanded tensor do. ``rotated``: a checked copy beside the others, or the only one.
    Raises TypeError for a wrong type or dtype, ValueError for operands, sizes and strides that do not fit each other.
    """
    check_outer_dtype(dtype)
    if rowwise is None and columnwise is None and rotated is None:
        raise ValueError("a quantized tensor needs a rowwise or a columnwise operand, got neither")
    row = None if rowwise is None else check_operand("rowwise", rowwise, no_overlap)
    column = None if columnwise is None else check_operand("columnwise", columnwise, no_overlap)
    if column is not None and len(column.shape) < 2:
        raise ValueError(f"a columnwise operand needs two dimensions, got shape {column.shape}")
    if size is None:
        size = row.shape if row is not None else swapped(column.shape)  # type: ignore[union-attr]
    size = check_numbers("size", size)
    for name, operand in (("rowwise", row), ("columnwise", column)):
        if operand is None:
            continue
        if operand.format != format:
            raise ValueError(f"the {name} operand is {operand.format}, the recipe stores {format}")
        expected = size if operand is row else swapped(size) if len(size) > 1 else ()
        if operand.shape != expected:
            raise ValueError(
                f"the {name} operand of a tensor of shape {size} has shape {expected}, not {operand.shape}"
            )
    beside = None if rotated is None else rotated.operand
    for name, operand in (("columnwise", column), ("rotated", beside)):
        if row is not None and operand is not None and row.data.device != operand.data.device:
            raise ValueError(f"the rowwise operand is on {row.data.device}, the {name} one on {operand.data.device}")
    stride = contiguous_stride(size) if stride is None else check_numbers("strides", stride)
    if len(stride) != len(size):
        raise ValueError(f"a tensor of shape {size} has {len(size)} strides, got {_short(stride)}")
    if type(offset) is not int or not 0 <= offset <= _LARGEST:
        raise ValueError(f"the storage offset must be an integer that is not negative, got {_short(offset)}")
    if not any_stride and not fits_outside(size, stride, row, column, beside):
        raise ValueError(
            f"strides {stride} of a tensor of shape {size} share memory or reach beyond the values that are stored"
        )
    return row, column, size, stride


def fits_outside(size: tuple[int, ...], stride: tuple[int, ...], *operands: Operand | None) -> bool:
    """Whether an outer tensor with these strides counts each value once, and no more values than are stored.

    The strides are not those of the codes. A slice has the strides of the whole tensor, whose codes are in the storage.
    """
    if any(type(n) is not int for n in (*size, *stride)):
        return True  # symbols of torch.compile
    most = math.prod(size)
    for operand in operands:
        if operand is not None and not is_traced(operand.data):
            values, entries = operand.format.element.packing
            most = max(most, operand.data.untyped_storage().nbytes() // entries * values)
    return is_non_overlapping(size, stride) and _extent(size, stride) <= most


def known_size(inner: Mapping[str, Tensor], outer: Sequence[int]) -> tuple[int, ...]:
    """``outer``, the size of an outer tensor, as plain integers if the sizes of its inner tensors are plain integers.

    torch.compile gives the outer and the inner sizes separate symbols, as if one could change without the other.
    """
    known = all(type(n) is int for t in inner.values() for n in t.shape)
    return tuple(map(int, outer)) if known else tuple(outer)
