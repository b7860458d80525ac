"""Both copies of a matrix in one pass in CUDA C++: codes and scales of its rows, codes and scales of its columns.

Device code: ``kernels/cuda/cast_both.cu``. The cast is a direct call in eager code, ``mxtensor::cast_both`` in traced
code.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core import custom_ops
from ...core.devices import device_capability
from ...core.kernel import Kernel, Spec
from ...core.names import dtype_name
from ...core.repeated import recorded
from ...numerics.cast import Cast
from ...numerics.formats import E8M0, UE4M3, Format, Rounding, get_format
from ...numerics.operand import Operand
from ..operands import Form
from ..runtime import nvrtc, triton_launch
from ..runtime.custom_op import check_argument, check_device
from ..runtime.host_calls import launch_steps
from ..runtime.nvrtc import ELEMENTS, RESERVED, TYPES, cast_constants, copy_size, no_cuda_sources
from .triton_common import amax_of, ceil_div, empty, operand_of, rows_of
from .triton_ops import both_operands, fake_operands, tensors_of

SHARED_BYTES = 233472
"""Shared memory of a multiprocessor of sm_90 for blocks."""


class Tile(NamedTuple):
    """Each field is a macro of ``cuda/cast_both.cu``: ``tile_rows`` and so on."""

    rows: int
    cols: int
    threads: int
    blocks: int
    """blocks that must fit on one multiprocessor; this limits the registers of a thread"""
    stages: int
    """tiles in shared memory"""
    strip: int
    """tiles that a block casts, one beside the other"""


TILE = Tile(128, 128, 256, 4, 1, 1)
"""The tile from 16-bit values: the fastest of 13 on an H100, with every format."""
BLOCKS_WANTED = 512
"""A matrix that has fewer blocks than this with whole strips gets shorter strips."""


def tile_for(format: Format, value_bytes: int, rows: int, cols: int) -> Tile:
    """The tile for a matrix; from float32 it has half the columns, so that it takes as much memory."""
    wide = max(TILE.cols * 2 // value_bytes, format.block[1])
    tile = TILE._replace(cols=wide, rows=max(TILE.rows, format.block[1]))
    strip, high = tile.strip, -(-rows // tile.rows)
    while strip > 1 and high * -(-cols // (wide * strip)) < BLOCKS_WANTED:
        strip //= 2
    tile = tile._replace(strip=strip)
    return tile._replace(blocks=min(tile.blocks, SHARED_BYTES // (shared_bytes(tile, format, value_bytes) + RESERVED)))


def shared_bytes(tile: Tile, format: Format, value_bytes: int) -> int:
    """Shared memory of a block: tiles, and the scales of its rows and of the columns of one tile."""
    values = tile.rows * tile.cols
    return tile.stages * values * value_bytes + (tile.strip + 1) * values // format.block[1]


# ---------------------------------------------------------------------------------------------- the cast


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


def refuses(spec: Spec, x: Tensor, cast: Cast, *pair: object) -> str | None:
    """Why the kernel does not make both copies; None if it does. ``pair``: what ``cast_pair`` passes after the cast."""
    if pair and pair[:2] != (Form.CODES, Form.CODES):
        return "casts to codes, both ways"
    if x.dim() != 2:
        return "matrices only"
    if 0 in spec.shapes[0]:
        return "the tensor is empty"
    reason = why_not(cast, spec.dtype) or no_cuda_sources(spec)
    if reason is None and cast.format.has_tensor_scale:
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


def quantize_both(x: Tensor, cast: Cast, *pair: object, given: Tile | None = None) -> tuple[Operand, Operand]:
    """The operands of a matrix and of its transpose in one pass; for a global scale after a pass for the amax.

    ``pair``: what ``cast_pair`` passes after the cast, with two forms of codes. ``given``: the tile, else that of
    ``tile_for``.
    """
    format, size, (rows, cols) = cast.format, x.element_size(), (x.shape[0], x.shape[1])
    (codes, scales), (columns, column_scales) = empty(x, format, (rows, cols)), empty(x, format, (cols, rows))
    tile = given or tile_for(format, size, rows, cols)
    tiles = ceil_div(cols, tile.cols)
    strips = ceil_div(tiles, tile.strip)
    with triton_launch.on(x.device):
        x = rows_of(x)
        stride = x.stride(0) * size
        pieces = (
            copy_size(x.data_ptr() & 15, stride, cols * size),
            copy_size(codes.shape[1]),
            copy_size(scales.shape[1], tile.strip * tile.cols // format.block[1]),
            copy_size(columns.shape[1]),
            copy_size(column_scales.shape[1], tile.rows // format.block[1]),
        )
        even = pieces[0] == 16 and rows % tile.rows == 0 and cols % tile.cols == 0
        amax = amax_of(x) if format.has_tensor_scale else None
        global_scale = x.new_empty((), dtype=torch.float32) if format.global_scale else None
        tensors = x, codes, scales, columns, column_scales, amax, global_scale
        numbers = stride, rows, cols, *(t.shape[1] for t in (codes, scales, columns, column_scales)), tiles, strips
        kernel, grid = _kernel(x.device, cast, x.dtype, tile, even, pieces), (ceil_div(rows, tile.rows) * strips, 1)
        memory = shared_bytes(tile, format, size)
        launch_steps(
            lambda *given: [(kernel, grid, memory, [*(0 if t is None else t.data_ptr() for t in given), *numbers])],
            tensors,
        )
    row = operand_of((codes, scales), global_scale, format, (rows, cols))
    return row, operand_of((columns, column_scales), global_scale, format, (cols, rows))


# ---------------------------------------------------------------------------------------------- custom op and kernels


@custom_ops.define("mxtensor::cast_both")
@recorded
def cast_both_op(x: Tensor, format: str, scaling: str) -> list[Tensor]:
    """``quantize_both`` of a matrix: codes and scales of x, those of its transpose, the global scale."""
    op, cast = "mxtensor::cast_both", Cast.of(format, scaling)
    check_argument(op, "x", x, tuple(TYPES), (None, None), x.device)
    check_device(op, x)
    reason = why_not(cast, x.dtype)
    if reason is not None:
        raise ValueError(f"{op} cannot cast to {cast.format}: {reason}")
    return tensors_of(quantize_both(x, cast))


@custom_ops.fake_of(cast_both_op)
def _(x, format, scaling):  # type: ignore[no-untyped-def]
    return fake_operands(x, get_format(format), [tuple(x.shape), (x.shape[1], x.shape[0])])


def _traced(x: Tensor, cast: Cast, *pair: object) -> tuple[Operand, Operand]:
    return both_operands(cast_both_op(x.detach(), cast.format.name, cast.scaling.value), cast, x.shape)


KERNEL = Kernel("cuda", refuses, quantize_both, "cuda", _traced)
