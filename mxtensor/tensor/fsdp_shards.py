"""MXTensor parameters under FSDP2: shards of whole rows that hold codes, and gathers of codes.

FSDP2 shards a parameter by ``split``, ``new_zeros`` in the padded shape and ``copy_``; here ``new_zeros`` in the shape
of other rows gives an MXTensor that knows its place, and every view and copy of it does. Each part that is held is
gathered along the rows of the facade: of a columnwise copy, which is stored transposed, its transpose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..core.compat import no_torch_function
from ..core.explain import record
from ..core.kernel import Spec
from ..core.shapes import contiguous_stride, swapped
from ..numerics.formats import FULL
from ..numerics.operand import Operand
from .fsdp import Shard, filled_again, hook, padded_to, place_of
from .mxtensor import MXTensor


def why_not_sharded(w: MXTensor, rows: int) -> str | None:
    """Why shards of so many rows cannot hold what ``w`` (rows, columns) holds; None where they can."""
    format = w.format
    if w.dim() != 2:
        return f"it has {w.dim()} dimensions; FSDP2 shards quantized matrices"
    if format.global_scale or format.block[0] == FULL or (w._columnwise is not None and FULL in format.block):
        return f"a scale of {format} is of the whole tensor"
    if FULL in format.block and w.shape[0] % rows:
        return f"{w.shape[0]} rows of {format} are no whole number of shards of {rows}"
    along = format.block[1] if w._columnwise is not None else format.block[0]
    if rows != w.shape[0] and rows % along:
        return f"shards of {rows} of {w.shape[0]} rows cut blocks of {along} rows, held {w.copies.label}"
    return None


def zeros_of_rows(w: MXTensor, rows: int) -> MXTensor:
    """Zeros (rows, columns) in the format of ``w``: the buffer for a shard of it.

    Raises NotImplementedError, on every rank alike, where the shards would cut what is held.
    """
    reason = why_not_sharded(w, rows)
    if reason is not None:
        raise NotImplementedError(
            f"an MXTensor of shape {tuple(w.shape)} cannot be sharded into {rows} rows: {reason}; shard it in high "
            "precision and quantize_ it for training, or hold it rowwise in 1xN blocks"
        )
    size = rows, w.shape[1]

    def zeros(operand: Operand | None, shape: tuple[int, ...]) -> Operand | None:
        if operand is None:
            return None
        format = operand.format
        data = operand.data.new_zeros(format.data_shape(shape), dtype=torch.uint8).view(format.element.dtype)
        fill = 1 if format.scale.dtype is torch.float32 else 0
        return Operand(data, operand.scale.new_full(format.scale_shape(shape), fill), None, format, shape)

    out = w.replace(zeros(w._rowwise, size), zeros(w._columnwise, swapped(size)), size, contiguous_stride(size))
    out._shard = place_of(w._shard, tuple(w.shape), size)
    return out


class FlatValues(Tensor):
    """The values of a shard in one dimension, where blocks that end with each row cannot lie.

    FSDP2 keeps what ``view(-1)`` of a shard gives, and asks for its storage if it is a plain tensor.
    """

    __torch_function__ = no_torch_function  # type: ignore[assignment]


def flat_values(w: MXTensor) -> Tensor:
    """``w.view(-1)``, dequantized."""
    return w.dequantize().reshape(-1).as_subclass(FlatValues)


@dataclass(frozen=True)
class _Whole:
    """What the gathered tensors are, for the hook that puts them together."""

    shape: tuple[int, ...]
    rest: tuple[Tensor, ...]
    """On a single rank the tensors after the first, which torch does not pass on."""


def _rows_first(operand: Operand, columnwise: bool) -> tuple[Tensor, Tensor]:
    """Codes, as bytes, and scales with the facade's rows as their first dimension."""
    data = operand.data.view(torch.uint8) if operand.data.dtype.itemsize == 1 else operand.data
    return (data.t(), operand.scale.t()) if columnwise else (data, operand.scale)


def _rows_of(operand: Operand, columnwise: bool, size: tuple[int, ...]) -> tuple[int, int]:
    """How many rows codes and scales of a facade of ``size`` have in ``_rows_first``."""
    place, shape = (-1, swapped(size)) if columnwise else (0, size)
    return operand.format.data_shape(shape)[place], operand.format.scale_shape(shape)[place]


def _sides(w: MXTensor) -> list[tuple[Operand, bool]]:
    both = ((w._rowwise, False), (w._columnwise, True))
    return [(operand, columnwise) for operand, columnwise in both if operand is not None]


def _pre(w: MXTensor, place: Shard, mesh: Any) -> tuple[tuple[Tensor, ...], _Whole]:
    inputs: list[Tensor] = []
    for operand, columnwise in _sides(w):
        lengths = _rows_of(operand, columnwise, place.padded)
        for part, rows in zip(_rows_first(operand, columnwise), lengths, strict=True):
            inputs.append(padded_to(part, (rows, part.shape[1])))
    record(Spec("all-gather", (place.whole,), (w.format,), w.dtype, w.device), "codes", {})
    return tuple(inputs), _Whole(place.whole, tuple(inputs[1:]) if mesh.size() == 1 else ())


def _refuse(w: MXTensor, *arguments: Any) -> Any:
    raise RuntimeError(
        f"FSDP2 gathers a shard of shape {tuple(w.shape)} that does not know its place in the whole MXTensor; load "
        "state dicts without assign=True"
    )


def _pre_hook(w: MXTensor) -> Callable[..., Any]:
    """What FSDP2 calls for the tensors to gather; with one argument, shards of any length are allowed."""
    place = w._shard
    return hook(_refuse, w) if place is None else hook(_pre, w, place)


def _post(
    w: MXTensor, outputs: tuple[Tensor, ...], gathered: _Whole, dtype: torch.dtype, *, out: Any = None
) -> tuple[MXTensor, tuple[Tensor, ...]] | None:
    """The whole tensor over the gathered parts, and those which FSDP2 is to free and fill between its uses."""
    size, components = gathered.shape, iter((*outputs, *gathered.rest))
    made: dict[bool, Operand] = {}
    for operand, columnwise in _sides(w):
        rows = _rows_of(operand, columnwise, size)
        data, scale = (next(components)[:count] for count in rows)
        data, scale = (data.t(), scale.t()) if columnwise else (data, scale)
        shape = swapped(size) if columnwise else size
        made[columnwise] = replace(operand, data=data.view(operand.data.dtype), scale=scale, shape=shape)
    if out is not None:  # made of these tensors at first, it is filled with them, but for what torch does not know of
        contents: dict[bool, list[Tensor | None]] = {side: [*operand.tensors] for side, operand in made.items()}
        if not gathered.rest:
            contents = {}
        elif made:
            contents[next(iter(made))][0] = None  # the tensor that torch has filled
        out._rowwise = filled_again(out._rowwise, contents.get(False))
        out._columnwise = filled_again(out._columnwise, contents.get(True))
        return None
    return MXTensor(made.get(False), made.get(True), w.recipe, dtype, size), outputs


MXTensor.fsdp_pre_all_gather = property(_pre_hook)  # type: ignore[attr-defined]
MXTensor.fsdp_post_all_gather = _post  # type: ignore[attr-defined]
