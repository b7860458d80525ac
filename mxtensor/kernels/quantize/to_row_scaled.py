"""Operands of ``fp8_rows`` products: row-scaled E4M3, rescaled from codes or cast straight from values.

Host side of ``triton_device/row_scaled.py``; ``numerics/row_scaled.py`` has the definition and a glossary.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.names import dtype_name
from ...core.shapes import as_matrix
from ...numerics.cast import Cast
from ...numerics.derived import round_up
from ...numerics.elements import ElementFormat
from ...numerics.formats import FULL, Rounding
from ...numerics.operand import Operand
from ...numerics.row_scaled import MAX_SCALE_EXPONENT, rescaling_of
from ..operands import INNER
from ..runtime import triton_launch
from ..runtime.triton_launch import device_code, launch, on
from .triton_common import SOURCES, ceil_div, code_of, format_code, rows_of

ROWS = 16
"""Weights are padded to a multiple of so many rows: torch needs it so."""
ROW_GROUP = 128
"""Values that a program looks at as one block where the scale format has larger ones."""


class Tile(NamedTuple):
    """What one program takes: rows of at most ``whole_row`` columns at once; of others ``step`` columns, twice."""

    whole_row: int
    step: int
    values_per_warp: int
    most_warps: int


CAST, OPERAND = Tile(16384, 1024, 1024, 16), Tile(32768, 2048, 1024, 16)
WASTE = 1.4
"""A row is taken at once if its columns, rounded up to a power of two, are at most this many times as many."""


class RowCode(NamedTuple):
    """``R``, the compile-time argument of the kernels."""

    offset: int
    max_range: int
    max_scale_exponent: int
    """the largest exponent of a row scale"""
    half_smallest: float
    """half of the smallest element: larger values have a code that is not zero"""
    float8: bool
    """whether the device rounds to float8 in one instruction"""
    unlimited_range: bool = False
    """whether no row is out of range because of its exponent range"""


@cache
def row_code(element: ElementFormat, capability: tuple[int, int], unlimited_range: bool = False) -> RowCode:
    """The constants of an element on devices of this compute capability; (0, 0): integer arithmetic only."""
    offset, max_range = rescaling_of(element)
    half_smallest = 2.0 ** (-element.bias - element.mantissa_bits)
    return RowCode(offset, max_range, MAX_SCALE_EXPONENT, half_smallest, capability >= (8, 9), unlimited_range)


def _tile(tile: Tile, width: int) -> tuple[int, bool, int]:
    """(columns at a time, whether these are the whole row, warps)."""
    power = max(128, 1 << (width - 1).bit_length())
    whole = power <= tile.whole_row and (power <= WASTE * width or power <= tile.step)
    columns = power if whole else tile.step
    warps = min(tile.most_warps, max(1, columns // tile.values_per_warp))
    return columns, whole, warps


Rows = tuple[Tensor, Tensor, Tensor]
"""Codes, row scales, flags of rows out of range."""


def empty_rows(rows: int, cols: int, device: torch.device) -> Rows:
    """Memory for codes, row scales and flags."""
    codes = torch.empty(rows, round_up(cols, INNER), dtype=torch.uint8, device=device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=device)
    return codes, scale, torch.empty(rows, dtype=torch.uint8, device=device)


# ---------------------------------------------------------------------------------------------- from codes


def matrix_of(operand: Operand) -> Operand:
    """An operand whose rows can be flattened as a matrix with 2-D scales."""
    data, scale = operand.data, operand.scale
    if data.dim() != 2:
        data, scale = as_matrix(data), as_matrix(scale)
    if data.stride(1) != 1:
        data = data.contiguous()
    if scale.stride(1) != 1:
        scale = scale.contiguous()
    return Operand(data, scale, None, operand.format, (data.shape[0], operand.shape[-1]))


def rows_of_operand(operand: Operand, multiple: int, unlimited_range: bool = False, into: Rows | None = None) -> Rows:
    """(codes, row scales, flags) of a matrix, with rows padded to a multiple. ``unlimited_range``: see ``row_scaled``;
    ``into``: memory for them."""
    format, (rows, cols) = operand.format, operand.shape
    data, scale, device = operand.data.view(torch.uint8), operand.scale, operand.data.device
    padded_rows = round_up(rows, multiple)
    codes, row_scale, out_of_range = empty_rows(padded_rows, cols, device) if into is None else into
    code = format_code(format, triton_launch.instructions_of(device), False)
    block_rows, block_cols = (0 if b == FULL else b for b in format.block)
    columns, whole, warps = _tile(OPERAND, codes.shape[1])
    constants = row_code(format.element, triton_launch.instructions_of(device), unlimited_range)
    with on(device):
        launch(
            device_code("row_scaled.operand_to_rows"),
            padded_rows,
            (
                data, scale, codes, row_scale, out_of_range, rows, cols, data.stride(0), scale.stride(0),
                padded_rows, codes.shape[1],
            ),
            (
                code, constants, block_rows, block_cols,
                min(block_cols or ROW_GROUP, ROW_GROUP), 1, columns, whole,
            ),
            warps,
        )  # fmt: skip
    return codes, row_scale, out_of_range


# ---------------------------------------------------------------------------------------------- from values


def why_not_along_rows(x: Tensor, cast: Cast) -> str | None:
    """Why the kernels cannot read these values and blocks; None if they can."""
    format = cast.format
    if format.block[0] != 1 or format.block[1] not in (16, 32, 64, 128):
        return f"casts blocks along rows, not those of {format}"
    if x.dtype not in SOURCES:
        return f"not for {dtype_name(x.dtype)}"
    return None


def why_not_in_one(x: Tensor, cast: Cast) -> str | None:
    """Why values cannot be cast to rows in one kernel; None if they can."""
    reason = why_not_along_rows(x, cast)
    return "rounds to nearest" if reason is None and cast.rounding is not Rounding.NEAREST else reason


Components = tuple[Tensor, Tensor, Tensor, Tensor]
"""Codes, row scales, flags, scales of blocks."""


def rows_of_values(x: Tensor, cast: Cast, unlimited_range: bool = False, into: Components | None = None) -> Components:
    """The components of a matrix: ``rows_of_operand`` of its cast, in one kernel.

    ``unlimited_range``: see ``row_scaled``. ``into``: memory for them.
    """
    x = rows_of(x)
    (rows, cols), format = x.shape, cast.format
    if into is None:
        scale = torch.empty(format.scale_shape((rows, cols)), dtype=format.scale.dtype, device=x.device)
        into = *empty_rows(rows, cols, x.device), scale
    codes, row_scale, out_of_range, scale = into
    width = codes.shape[1]
    columns, whole, warps = _tile(CAST, width)
    even = cols == width and cols % columns == 0
    constants = row_code(format.element, triton_launch.instructions_of(x.device), unlimited_range)
    with on(x.device):
        launch(
            device_code("row_scaled.cast_to_rows"),
            rows,
            (x, codes, row_scale, out_of_range, scale, rows, cols, x.stride(0), width, ceil_div(cols, format.block[1])),
            (code_of(cast, x.device), constants, 1, columns, whole, even),
            warps,
        )
    return codes, row_scale, out_of_range, scale
