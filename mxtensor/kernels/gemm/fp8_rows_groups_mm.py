"""Products of codes, or values, with a scale for each row in groups: one op. bfloat16 results.

E4M3 takes torch's or Triton's product, whichever is faster; E5M2, and values in bfloat16, take Triton's, whose device
code is ``triton_device/row_scaled_groups.py``. Both add up 128 columns of FP8 in the tensor cores and the rest in
float32. The host never reads the ends of the groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core import custom_ops
from ...core.devices import multiprocessors
from ...core.tracing import is_traced
from ...numerics.formats import get_format
from ...numerics.groups import padded_length
from ..quantize.triton_common import ceil_div, power_above
from ..runtime import triton_launch
from ..runtime.check import check_argument, check_device
from ..runtime.recorded_op import recorded
from ..runtime.triton_launch import device_code, launch, on
from .fp8_rows_groups_costs import FEW_VALUES, VALUES, Tile, fastest, fastest_triton
from .row_operand import INNER
from .scaled_mm_call import launch as launch_torch
from .scaled_mm_contract import GROUPED_SCALINGS, MAX_GROUPS, Product, Scaling, plan_here

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
            device_code("row_scaled_groups.rows_by_stack"),
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
            device_code("row_scaled_groups.columns_of_groups"),
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
            device_code("row_scaled_groups.zero_after"),
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
            device_code("row_scaled_groups.padded_ends"),
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


LARGE_SHARED_MEMORY = ((9, 0), (10, 0))
"""Compute capabilities on which a tile of VALUES fits."""


def _tile(a: Tensor, b: Tensor, m: int, n: int, k: int) -> Tile | None:
    """The tile for an average group; None for torch's product."""
    if a.dtype is torch.bfloat16:
        return VALUES if triton_launch.instructions_of(a.device) in LARGE_SHARED_MEMORY else FEW_VALUES
    return fastest_triton(m, k) if torch.float8_e5m2 in (a.dtype, b.dtype) else fastest(m, n, k)


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
