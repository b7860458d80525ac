"""Both copies of a matrix in one pass in CUDA C++: codes and scales of its rows, codes and scales of its columns.

Device code: ``kernels/cuda/cast_both.cu``. Kernels of the tuples and the op of traced code: ``cuda_both_ops.py``.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...core.devices import device_capability
from ...core.kernel import Spec
from ...core.names import dtype_name
from ...numerics.cast import Cast
from ...numerics.formats import E8M0, UE4M3, Rounding
from ...numerics.operand import Operand
from ..runtime import nvrtc, triton_launch
from ..runtime.availability import no_cuda_sources
from ..runtime.cuda_launch import launch
from ..runtime.cuda_macros import ELEMENTS, TYPES, cast_constants, copy_size
from .cuda_tiles import Tile, shared_bytes, tile_for
from .triton_common import amax_of, ceil_div, empty, needs_amax, operand_of, rows_of

SOURCES = ("machine.cuh", "elements.cuh", "casts.cuh", "codes.cuh", "cast_tile.cuh", "cast_both.cu")
ARGUMENTS = struct.Struct("8Q8I")
BLOCKS = (16, 32, 64, 128)
"""Values along the blocked dimension that may share a scale."""
CONVERSIONS = (8, 9)
"""The lowest compute capability with instructions that round to float8."""


def why_not(cast: Cast, dtype: torch.dtype) -> str | None:
    """Why the device code has no such cast from this dtype; None if it has."""
    f = cast.format
    if f.element not in ELEMENTS or f.scale not in (E8M0, UE4M3):
        return f"has no code for elements of {f.element.name} with {f.scale.name} scales"
    if f.block[0] != 1 or f.block[1] not in BLOCKS:
        return f"has no code for blocks of {f.block[0]}x{f.block[1]}"
    if cast.rounding is not Rounding.NEAREST:
        return "rounds to nearest only"
    if dtype not in TYPES:
        return f"not for {dtype_name(dtype)}"
    return cast.why_not_plain


def refuses(spec: Spec, x: Tensor, cast: Cast) -> str | None:
    """Why the kernel does not make both copies; None if it does."""
    if x.dim() != 2:
        return "matrices only"
    if 0 in spec.shapes[0]:
        return "the tensor is empty"
    reason = why_not(cast, spec.dtype) or no_cuda_sources(spec)
    if reason is None and needs_amax(cast.format):
        reason = triton_launch.missing(spec)  # a pass of Triton for the amax comes first
    return reason


def constants(
    cast: Cast, dtype: torch.dtype, tile: Tile, even: bool, pieces: tuple[int, int, int, int, int], conversions: bool
) -> nvrtc.Constants:
    """Macros of the sources. ``pieces``: bytes of a copy of x, of a store of codes, of scales, of both of columns."""
    names = ("X_COPY", "CODES_PIECE", "SCALES_PIECE", "COLUMN_CODES_PIECE", "COLUMN_SCALES_PIECE")
    return (
        ("ELEMENT", ELEMENTS[cast.format.element]),
        ("X", TYPES[dtype]),
        *cast_constants(cast),
        ("CAST_SIGNED_ZERO", int(cast.format.signed_zero)),
        ("BLOCK", cast.format.block[1]),
        ("CONVERSIONS", int(conversions)),
        ("WHOLE_TILES", int(even)),
        *zip(names, pieces, strict=True),
        ("TILE_ROWS", tile.rows),
        ("TILE_COLS", tile.cols),
        *((name.upper(), getattr(tile, name)) for name in ("threads", "blocks", "stages", "strip")),
    )


@cache
def _kernel(
    device: torch.device, cast: Cast, dtype: torch.dtype, tile: Tile, even: bool, pieces: tuple[int, ...]
) -> Any:
    row = constants(cast, dtype, tile, even, pieces, device_capability(device) >= CONVERSIONS)  # type: ignore[arg-type]
    return nvrtc.function(device, SOURCES, row, "cast_both", ARGUMENTS, tile.threads)


def _cast_both(
    x: Tensor, cast: Cast, rowwise: tuple[Tensor, Tensor], columnwise: tuple[Tensor, Tensor], given: Tile | None
) -> Tensor | None:
    """Write codes and scales of the rows of a matrix with unit stride along its rows, and of its columns, transposed.

    Returns the global scale or None.
    """
    format, size, (rows, cols) = cast.format, x.element_size(), x.shape
    tile = given or tile_for(format, size, rows, cols)
    (codes, scales), (columns, column_scales) = rowwise, columnwise
    tiles = ceil_div(cols, tile.cols)
    strips = ceil_div(tiles, tile.strip)
    stride = x.stride(0) * size
    pieces = (
        copy_size(x.data_ptr() & 15, stride, cols * size),
        copy_size(codes.shape[1]),
        copy_size(scales.shape[1], tile.strip * tile.cols // format.block[1]),
        copy_size(columns.shape[1]),
        copy_size(column_scales.shape[1], tile.rows // format.block[1]),
    )
    even = pieces[0] == 16 and rows % tile.rows == 0 and cols % tile.cols == 0
    amax = amax_of(x) if needs_amax(format) else None
    global_scale = x.new_empty((), dtype=torch.float32) if format.global_scale else None
    widths = (t.shape[1] for t in (codes, scales, columns, column_scales))
    launch(
        _kernel(x.device, cast, x.dtype, tile, even, pieces),
        ceil_div(rows, tile.rows) * strips,
        shared_bytes(tile, format, size),
        (x, codes, scales, columns, column_scales, amax, global_scale, stride, rows, cols, *widths, tiles, strips),
    )
    return global_scale


def quantize_both(x: Tensor, cast: Cast, given: Tile | None = None) -> tuple[Operand, Operand]:
    """The operands of a matrix and of its transpose in one pass; for a global scale after a pass for the amax.

    ``given``: the tile, else that of ``cuda_tiles``.
    """
    format, shape = cast.format, (x.shape[0], x.shape[1])
    transposed = shape[::-1]
    rowwise, columnwise = empty(x, format, shape), empty(x, format, transposed)
    with triton_launch.on(x.device):
        global_scale = _cast_both(rows_of(x), cast, rowwise, columnwise, given)
    return operand_of(rowwise, global_scale, format, shape), operand_of(columnwise, global_scale, format, transposed)
