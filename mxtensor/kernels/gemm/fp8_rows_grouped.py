"""Grouped ``fp8_rows``: row-scaled E4M3 through torch's or Triton's grouped product, one for a stack of weights.

For operands that are cast for training, with unlimited range (the glossary of ``numerics/row_scaled.py``): only rows
with values of about 2^63 or more are out of range. There is no exact product of groups that would be written over them,
so that such a row gives NaN. Codes that were stored may have such rows for other reasons, and are left to other
kernels.

A row of the columnwise copies has a scale for each group. Results are bfloat16. E4M3 takes torch's or Triton's
product, whichever is faster; E5M2, and values in bfloat16, take Triton's, whose device code is
``triton_device/row_scaled_products.py``. Both add up 128 columns of FP8 in the tensor cores and the rest in float32.
The host never reads the ends of the groups.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...core import custom_ops
from ...core.devices import multiprocessors
from ...core.kernel import Kernel, Spec
from ...core.repeated import recorded
from ...core.tracing import is_traced
from ...numerics.formats import Format, get_format
from ...numerics.groups import Groups, padded_length
from .. import expected_time
from ..operands import INNER, MAX_GROUPS, FakeQuantized, Form, GemmOperand, RowOperand, Unquantized, has_group_scales
from ..quantize.choose_pair import cast_pair
from ..quantize.to_row_scaled_both import why_not_rows
from ..quantize.triton_common import ceil_div, power_above
from ..runtime import triton_launch
from ..runtime.custom_op import check_argument, check_device, exported
from ..runtime.triton_launch import device_code, launch, on
from . import global_scales
from .fp8_rows import MIN_ROWS
from .scaled_mm import why_not_groups
from .scaled_mm_contract import GROUPED_SCALINGS, Product, Scaling, plan_here
from .scaled_mm_contract import launch as launch_torch
from .spec import GemmArgs

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def _refuses(spec: Spec, a: GemmOperand, b: GemmOperand, count: int, args: GemmArgs) -> str | None:
    """The refusals that both products share."""
    reason = triton_launch.missing(spec) or exported(spec)
    if reason is not None:
        return reason
    for side, format in zip((a, b), spec.formats, strict=True):
        if isinstance(side, RowOperand):
            continue
        if isinstance(side, FakeQuantized) and has_group_scales(side) and side.values.dtype in FLOAT8:
            continue  # float8 codes whose groups, or matrices, have a scale each
        if not isinstance(format, Format) or not isinstance(side, Unquantized):
            return "multiplies operands that are cast for it in training"
        one = side.x if side.x.dim() == 2 else side.x.select(0, 0)
        reason = why_not_rows(one, side.cast)
        if reason is not None:
            return reason
    scaling = scaling_of(spec.device)
    return scaling if isinstance(scaling, str) else why_not_groups(scaling, count, args)


def refuses(spec: Spec, a: GemmOperand, b: GemmOperand, ends: Tensor, args: GemmArgs) -> str | None:
    (rows, inner), (count, width, _) = spec.shapes
    if width % INNER or inner % INNER:
        return f"needs K and N in multiples of {INNER}, got {inner} and {width}"
    if rows < MIN_ROWS * count:
        return f"for at least {MIN_ROWS} rows a group, this product has {rows} in {count} groups"
    return _refuses(spec, a, b, count, args)


def refuses_wgrad(spec: Spec, a: GemmOperand, b: GemmOperand, groups: Groups, args: GemmArgs) -> str | None:
    (height, padded), (width, _) = spec.shapes
    if height % INNER or width % INNER:
        return f"needs K and N in multiples of {INNER}, got {width} and {height}"
    if padded < MIN_ROWS * groups.number:
        return f"for at least {MIN_ROWS} rows a group, this product has {padded} in {groups.number} groups"
    return _refuses(spec, a, b, groups.number, args)


# ---------------------------------------------------------------------------------------------- operands


def row_scaled_side(side: GemmOperand) -> RowOperand:
    """The row-scaled operand of a matrix, or of a stack (G, N, K) with its rows one after the other."""
    if isinstance(side, RowOperand):
        return side
    assert isinstance(side, Unquantized)
    made = cast_pair(side.x, side.cast, Form.ROWS, None, torch.bfloat16)[0]
    assert isinstance(made, RowOperand)
    return made


# ---------------------------------------------------------------------------------------------- products


def scales_of_groups(side: RowOperand, count: int) -> Tensor:
    """float32 (count * rows,): the scales of all rows, group by group."""
    scales = side.row_scale.flatten()
    return scales if side.groups == count else scales.repeat(count)


def _rows(side: GemmOperand) -> tuple[Tensor, Tensor]:
    """(codes, scales of rows) of rows in groups (M, K), or of a stack (G, N, K)."""
    if isinstance(side, FakeQuantized):
        return global_scales.rows_with_scales(side)
    made = row_scaled_side(side)
    codes = made.codes.view(torch.float8_e4m3fn)
    return codes.view(*made.shape[:-1], codes.shape[1]), made.row_scale.flatten()


def _columns(side: GemmOperand, groups: Groups) -> tuple[Tensor, Tensor]:
    """(codes, scales of rows of each group) of the columns of groups."""
    if isinstance(side, FakeQuantized):
        return global_scales.columns_with_scales(side, groups)
    made = row_scaled_side(side)
    return made.codes.view(torch.float8_e4m3fn), scales_of_groups(made, groups.number)


def run(a: GemmOperand, b: GemmOperand, ends: Tensor, args: GemmArgs) -> Tensor:
    return multiply(*_rows(a), *_rows(b), ends, a.shape[0])


def run_wgrad(a: GemmOperand, b: GemmOperand, groups: Groups, args: GemmArgs) -> Tensor:
    return multiply(*_columns(a, groups), *_columns(b, groups), groups.given, groups.rows, groups.block)


class Tile(NamedTuple):
    """The part of the result that one program computes, and how it is launched."""

    m: int
    n: int
    """columns of one piece"""
    split: int
    k: int
    band: int
    """row tiles that are taken before the next column of tiles"""
    warps: int
    stages: int


WIDE, NARROW = Tile(128, 128, 2, 128, 16, 8, 4), Tile(64, 128, 1, 128, 16, 4, 3)
VALUES, FEW_VALUES = Tile(128, 128, 2, 64, 16, 8, 3), Tile(64, 128, 1, 64, 16, 4, 3)
"""For values in bfloat16: on sm90 and sm100, and where a multiprocessor has less memory to share."""
TILES = {"triton wide": WIDE, "triton narrow": NARROW}
"""Tiles for codes, by their names in ``expected_time.py``."""
ZEROS = (16, 512, 4)
"""(rows, columns, warps) of a program that writes zeros."""


def scaling_of(device: torch.device) -> Scaling | str:
    """How torch multiplies groups of E4M3 rows on this device, or why it does not."""
    row = get_format("float8_e4m3_row")
    return plan_here(GROUPED_SCALINGS, row, row, device)


# ---------------------------------------------------------------------------------------------- Triton's product


def _multiplied(t: Tensor) -> Tensor:
    """What the device multiplies; Triton's interpreter takes bfloat16 in a product for integers."""
    return t.to(torch.float32) if t.dtype is torch.bfloat16 and triton_launch.interpreted() else t


def triton_rows(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, ends: Tensor, tile: Tile) -> Tensor:
    """Rows of a (M, K) times the matrix of their group, b (G, N, K): (M, N), zeros after the last end. Scales are
    float32 (M,) and (G * N,)."""
    (rows, inner), (groups, width, _) = a.shape, b.shape
    out = torch.empty(rows, width, dtype=torch.bfloat16, device=a.device)
    a, b = _multiplied(a), _multiplied(b)
    with on(a.device):
        launch(
            device_code("row_scaled_products.rows_by_stack"),
            (rows // tile.m + groups + 1) * ceil_div(width, tile.n * tile.split),
            (a, scale_a, b, scale_b, ends, out, groups, rows, width, inner),
            (tile.m, tile.n, tile.k, tile.split, tile.band, inner % tile.k == 0, power_above(groups)),
            tile.warps,
            tile.stages,
        )
    return out


def triton_columns(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, ends: Tensor, rows: int, block: int, tile: Tile
) -> Tensor:
    """The products over the columns of each group: a (N, P) by b (K, P), (G, N, K). ``ends``: of groups of ``rows``
    rows, padded to ``block``; scales float32 (G * N,) and (G * K,)."""
    (height, length), width, groups = a.shape, b.shape[0], ends.shape[0]
    out = torch.empty(groups, height, width, dtype=torch.bfloat16, device=a.device)
    a, b = _multiplied(a), _multiplied(b)
    with on(a.device):
        launch(
            device_code("row_scaled_products.columns_of_groups"),
            groups * ceil_div(height, tile.m) * ceil_div(width, tile.n * tile.split),
            (a, scale_a, b, scale_b, ends, out, groups, rows, height, width, length),
            (tile.m, tile.n, tile.k, tile.split, tile.band, block, power_above(groups)),
            tile.warps,
            tile.stages,
        )
    return out


# ---------------------------------------------------------------------------------------------- torch's product


def zero_after(out: Tensor, ends: Tensor) -> Tensor:
    """``out`` (M, N), with zeros written to the rows after the last end: torch leaves them as they are."""
    (rows, width), (high, wide, warps) = out.shape, ZEROS
    with on(out.device):
        launch(
            device_code("row_scaled_products.zero_after"),
            2 * multiprocessors(out.device),
            (out, ends, ends.shape[0], rows, width),
            (high, wide),
            warps,
        )
    return out


def padded_ends(ends: Tensor, rows: int, block: int) -> Tensor:
    """``Groups.padded_ends`` in one launch."""
    groups = ends.shape[0]
    out = torch.empty_like(ends)
    blocks = padded_length(rows, groups, block) // block
    with on(ends.device):
        launch(
            device_code("row_scaled_products.padded_ends"),
            1,
            (ends, out, groups, rows, blocks),
            (block, power_above(groups)),
            4,
        )
    return out


def torch_rows(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, ends: Tensor) -> Tensor:
    """``triton_rows`` by torch."""
    scaling = scaling_of(a.device)
    assert isinstance(scaling, Scaling)
    scales = scale_a.unsqueeze(1), scale_b.view(b.shape[:2])
    inside = ends.clamp(0, a.shape[0])
    return zero_after(launch_torch(Product(scaling, a, b, *scales, [], None, torch.bfloat16, inside)), ends)


def torch_columns(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, ends: Tensor, rows: int, block: int
) -> Tensor:
    """``triton_columns`` by torch."""
    scaling = scaling_of(a.device)
    assert isinstance(scaling, Scaling)
    padded = padded_ends(ends, rows, block)
    return launch_torch(Product(scaling, a, b, scale_a, scale_b, [], None, torch.bfloat16, padded))


# ---------------------------------------------------------------------------------------------- one op


MEASURED = (9, 0)
"""The compute capability whose times are taken for all others too."""
LARGE_SHARED_MEMORY = ((9, 0), (10, 0))
"""Compute capabilities on which a tile of VALUES fits."""


def _tile(a: Tensor, b: Tensor, m: int, n: int, k: int) -> Tile | None:
    """The tile for an average group; None for torch's product."""
    if a.dtype is torch.bfloat16:
        return VALUES if triton_launch.instructions_of(a.device) in LARGE_SHARED_MEMORY else FEW_VALUES
    products = ("torch", *TILES) if torch.float8_e5m2 not in (a.dtype, b.dtype) else tuple(TILES)
    figures = expected_time.figures_of(MEASURED)
    assert figures is not None
    return TILES.get(min(products, key=lambda product: expected_time.grouped(figures, product, m, n, k)))


def _multiply(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, ends: Tensor, rows: int, block: int) -> Tensor:
    groups = ends.shape[0]
    if block == 0:
        tile = _tile(a, b, rows // groups, b.shape[1], a.shape[1])
        given = a, scale_a, b, scale_b, ends
        return torch_rows(*given) if tile is None else triton_rows(*given, tile)
    tile = _tile(a, b, a.shape[0], b.shape[0], a.shape[1] // groups)
    columns = a, scale_a, b, scale_b, ends, rows, block
    return torch_columns(*columns) if tile is None else triton_columns(*columns, tile)


@custom_ops.define("mxtensor::fp8_rows_grouped_mm")
@recorded
def fp8_rows_grouped_mm(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, ends: Tensor, rows: int, block: int
) -> Tensor:
    """Products of float8 codes, or of bfloat16 values, in groups of ``rows`` rows, of which ``ends`` are the ends.

    ``block`` 0: a (rows, K) by b (G, N, K). Otherwise a (N, P) by b (K, P), groups of columns padded to ``block``.
    """
    op, device = "mxtensor::fp8_rows_grouped_mm", a.device
    dtypes = (a.dtype,) if a.dtype is torch.bfloat16 else (torch.float8_e4m3fn, torch.float8_e5m2)
    check_argument(op, "ends", ends, (torch.int32,), (None,), device)
    groups = ends.shape[0]
    if not 0 < groups <= MAX_GROUPS or block % INNER or rows < 0:
        raise ValueError(
            f"{op} needs 1 to {MAX_GROUPS} groups and a block of multiples of {INNER}; got {groups}, {block}"
        )
    inner = padded_length(rows, groups, block) if block else a.shape[-1]
    check_argument(op, "a", a, dtypes, (None, inner) if block else (rows, inner), device)
    check_argument(op, "b", b, dtypes, (None, inner) if block else (groups, None, inner), device)
    sizes = (groups * a.shape[0], groups * b.shape[0]) if block else (rows, groups * b.shape[1])
    for name, scale, size in zip(("scales of a", "scales of b"), (scale_a, scale_b), sizes, strict=True):
        check_argument(op, name, scale, (torch.float32,), (size,), device)
    check_device(op, a)
    widths = (inner, b.shape[0] if block else b.shape[1])
    if any(n % INNER or not n for n in widths) or not all(t.is_contiguous() for t in (a, b, scale_a, scale_b)):
        raise ValueError(f"{op} needs contiguous tensors, K and N in multiples of {INNER}; got {widths}")
    return _multiply(a, scale_a, b, scale_b, ends.contiguous(), rows, block)


@custom_ops.fake_of(fp8_rows_grouped_mm)
def _(a, scale_a, b, scale_b, ends, rows, block):  # type: ignore[no-untyped-def]
    shape = (ends.shape[0], a.shape[0], b.shape[0]) if block else (rows, b.shape[1])
    return a.new_empty(shape, dtype=torch.bfloat16)


def multiply(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, ends: Tensor, rows: int, block: int = 0) -> Tensor:
    """``fp8_rows_grouped_mm`` of arguments that fit; one op while being traced."""
    if is_traced(a, b, ends):
        return fp8_rows_grouped_mm(a, scale_a, b, scale_b, ends, rows, block)  # type: ignore[no-any-return]
    return _multiply(a, scale_a, b, scale_b, ends.contiguous(), rows, block)


GROUPED = Kernel("fp8_rows", refuses, run, "cuda")
GROUPED_WGRAD = Kernel("fp8_rows", refuses_wgrad, run_wgrad, "cuda")
