"""What is computed from a tensor, such as swizzled scales: cached until the tensor is written to or ends.

A captured CUDA graph reads memory, whatever the cache says later. So a result that a graph reads (``captured_value``)
stays, and a write to the tensor makes it again in the same memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.devices import staying
from ..core.tracing import is_captured, is_traced

# -------------------------------------------------------------------------------- the layout of scales for tensor cores

# The swizzled layout in which Blackwell's block-scaled products read scales.
#
# Scales are stored in tiles of 128 rows by 4 columns; row 32 * j + i of a tile starts at byte 16 * i + 4 * j.
#
# Source: the cuBLAS manual, "1D Block Scaling Factors Layout"; PTX ISA, tcgen05.mma ``scale_vec`` layouts.

TILE_ROWS, TILE_COLS = 128, 4
_ATOM = 32
"""A tile consists of four atoms of 32 rows, side by side."""


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not less than ``n``."""
    return -(-n // multiple) * multiple


def swizzled_shape(rows: int, cols: int) -> tuple[int, int]:
    """(rows, cols) of the scales in whole tiles; their product is the length of the swizzled buffer."""
    return round_up(rows, TILE_ROWS), round_up(cols, TILE_COLS)


def swizzle(scale: Tensor) -> Tensor:
    """uint8 (..., R, C) -> (..., roundup(R, 128) * roundup(C, 4)), each matrix in tiles of its own.

    Padding has byte 0. A padding scale multiplies zeros, or a row that is cut off. Byte 0 is 2^-127 (E8M0)
    or 0 (UE4M3), so a zero product stays zero; with the NaN codes 255 and 127 it would not.
    """
    rows, cols = scale.shape[-2:]
    whole_rows, whole_cols = swizzled_shape(rows, cols)
    if whole_rows != rows or whole_cols != cols:
        scale = F.pad(scale, (0, whole_cols - cols, 0, whole_rows - rows))
    tiles = scale.reshape(
        *scale.shape[:-2], whole_rows // TILE_ROWS, TILE_ROWS // _ATOM, _ATOM, whole_cols // TILE_COLS, TILE_COLS
    )
    return tiles.movedim(-2, -4).transpose(-2, -3).flatten(-5)


def unswizzle(buffer: Tensor, rows: int, cols: int) -> Tensor:
    """The inverse: (..., roundup(rows, 128) * roundup(cols, 4)) -> (..., rows, cols).

    Raises ValueError for a buffer of another length.
    """
    whole_rows, whole_cols = swizzled_shape(rows, cols)
    if buffer.shape[-1] != whole_rows * whole_cols:
        raise ValueError(
            f"{rows}x{cols} scales are {whole_rows * whole_cols} bytes when swizzled, got {buffer.shape[-1]}; give the "
            "rows and columns that the buffer was made from"
        )
    tiles = buffer.reshape(
        *buffer.shape[:-1], whole_rows // TILE_ROWS, whole_cols // TILE_COLS, _ATOM, TILE_ROWS // _ATOM, TILE_COLS
    )
    whole = tiles.transpose(-2, -3).movedim(-4, -2).reshape(*buffer.shape[:-1], whole_rows, whole_cols)
    return whole.narrow(-2, 0, rows).narrow(-1, 0, cols)


def swizzle_groups(scale: Tensor, ends: Tensor) -> Tensor:
    """Swizzle scales of rows in groups, uint8 (R, C) -> (P, roundup(C, 4)): every group starts a new row of tiles.

    ``ends``: (G,) ends of the groups, never decreasing. The lengths stay on the device, so P is the largest size that G
    groups of R rows can need. The rows after the last group follow it.
    """
    rows, cols = scale.shape
    length = round_up(rows + (TILE_ROWS - 1) * ends.shape[0], TILE_ROWS)
    starts = F.pad(ends, (1, 0))  # the start of each group, and of the rows after the last one
    whole = (ends - starts.narrow(0, 0, ends.shape[0]) + (TILE_ROWS - 1)) // TILE_ROWS * TILE_ROWS
    moved = F.pad(whole.cumsum(0), (1, 0)) - starts
    row = torch.arange(rows, device=scale.device)
    group = torch.searchsorted(ends, row.to(ends.dtype), right=True)
    target = scale.new_zeros(length, cols)
    target = target.index_copy(0, row + moved.index_select(0, group), scale)
    return swizzle(target).view(length, round_up(cols, TILE_COLS))


# ---------------------------------------------------------------------------------------------- derived

Made = TypeVar("Made")


class _Entry(NamedTuple):
    tensor: weakref.ref[Tensor]
    version: int
    made: dict[Hashable, Any]
    """layout -> the result"""
    remake: dict[Hashable, Callable[[], None]]
    """layout of a result that a graph reads -> makes it again in its memory"""


_cache: dict[int, _Entry] = {}
"""By the id of the tensor; an entry ends with its tensor."""


def _entry_of(t: Tensor) -> _Entry | None:
    """The entry of a tensor that has not been written to since it was made."""
    entry = _cache.get(id(t))
    return entry if entry is not None and entry.tensor() is t and entry.version == t._version else None


def _new_entry(t: Tensor) -> _Entry:
    key = id(t)

    def end(ref: weakref.ref[Tensor]) -> None:
        entry = _cache.get(key)
        if entry is not None and entry.tensor is ref:  # not of a later tensor that got the same id
            del _cache[key]

    before = _cache.get(key)
    entry = _cache[key] = _Entry(weakref.ref(t, end), t._version, {}, {})
    if before is not None and before.tensor() is t:
        _remake(before, entry)
    return entry


def _remake(before: _Entry, after: _Entry) -> None:
    """Make what graphs read again, and let ``after`` have it."""
    for layout, remake in before.remake.items():
        remake()
        after.remake[layout] = remake
        after.made[layout] = before.made[layout]


def known_value(t: Tensor, layout: Hashable) -> Any:
    """What ``cached_value`` would find for a tensor that is known to be neither traced nor an inference tensor, or
    None."""
    entry = _entry_of(t)
    return None if entry is None or is_captured(t) else entry.made.get(layout)


def cached_value(
    t: Tensor, layout: Hashable, make: Callable[[Tensor], Made], may_add: Callable[[Made], bool] | None = None
) -> Made:
    """``make(t)``, or the cached result for the same ``layout`` if ``t`` has not been written to since.

    ``may_add``: asked whether a new result may be cached. Nothing is while tracing, where there is no value yet, for
    inference tensors, which have no version, and in a CUDA graph: a replay must read the tensor as it is then, and the
    graph's memory has no content before a replay.
    """
    if is_traced(t) or t.is_inference() or is_captured(t):
        return make(t)
    entry = _entry_of(t)
    if entry is None and (before := _cache.get(id(t))) is not None and before.remake:
        entry = _new_entry(t)  # with what graphs read, as ``t`` is now
    if entry is not None and layout in entry.made:
        return entry.made[layout]  # type: ignore[no-any-return]
    result = staying(t.device, lambda: make(t))
    if isinstance(result, Tensor) and result.untyped_storage().data_ptr() == t.untyped_storage().data_ptr():
        return result  # a cached view would keep its key alive
    if may_add is None or may_add(result):
        (_entry_of(t) or _new_entry(t)).made[layout] = result
    return result


def captured_value(t: Tensor, layout: Hashable, remake: Callable[[], None] | None) -> Any:
    """What is cached for ``layout``, for a CUDA graph that is captured; None if nothing is.

    With ``remake`` the graph may read it in each replay: ``remake`` makes it again in the same memory. It is called
    after each write of a rule to ``t``, and after a write that torch itself makes at the next look-up outside a graph.
    It must not hold ``t``.
    """
    entry = _entry_of(t)
    if entry is None or layout not in entry.made:
        return None
    if remake is not None:
        entry.remake[layout] = remake
    return entry.made[layout]


def forget(t: Tensor) -> None:
    """Drop what was computed from the memory of ``t``, and make again what graphs read: a rule has written to it, and
    torch counts no such write."""
    memory = t.untyped_storage().data_ptr() if _cache else 0
    for key, entry in [*_cache.items()]:
        tensor = entry.tensor()
        if tensor is not None and tensor.untyped_storage().data_ptr() == memory:
            _cache.pop(key, None)
            if entry.remake:
                _remake(entry, _new_entry(tensor))
