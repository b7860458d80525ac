"""How products of few rows are launched: cut up by a plan, their activations prepared, their sources compiled.

``cuda/product.cu`` multiplies, by one weight or, rows in groups, by a stack of them; ``cuda/resident.cu`` and, on
sm_90, ``cuda/together.cu`` by one. Activations come as bfloat16 or float16 and are multiplied as float16
(``cuda/activations.cuh``), cast on the way if the weight wants that: in the same launch where a plan says so, mostly
for one row, else in one before it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formats import ElementFormat, Format
from ..roles import Cast
from . import nvrtc, triton_host
from .small_batch_plan import (
    ELEMENTS,
    TYPES,
    Facts,
    Plan,
    Room,
    can_multiply_together,
    cast_constants,
    classes_of,
    clusters,
    constants,
    copy_size,
    room_of,
)
from .small_batch_table import BY_WARPS, choose_plan, gpu_of

PRODUCT = struct.Struct("11Q8I2Q2I2f")
ACTIVATIONS = struct.Struct("5Q6I")
HEADERS = ("machine.cuh", "elements.cuh", "activations.cuh")
SOURCES = (*HEADERS, "stages.cuh", "sums.cuh", "result.cuh")
TOGETHER_SOURCES = (*HEADERS, "stages.cuh", "result.cuh", "words.cuh", "together.cu")
ACTIVATION_THREADS = {"maxima": 256, "activations": 512}
"""Kernels of activations -> threads of a block."""
ALONE = 16384
"""Activations that every block looks at by itself for their largest magnitude, at most."""
MAXIMA = 128
"""Blocks that look for the largest magnitude of activations, at most."""

IN_TURN, FIRST, FOLLOWS = range(3)
"""How a launch goes with those before and after it: ``cuda/stages.cuh``."""


class Cut(NamedTuple):
    """What is launched for products of one kind."""

    plan: Plan
    room: Room
    kernel: Any
    blocks: tuple[int, int]
    """along N; along M, or groups"""


def kernel_of(plan: Plan) -> str:
    """Its kernel, in the source of that name."""
    return "resident" if plan.resident else "together" if plan.together else "product"


def sources_of(plan: Plan) -> tuple[str, ...]:
    """The sources of its kernel."""
    own = ("spread.cuh", "resident.cu") if plan.resident else ("product.cu",)
    return TOGETHER_SOURCES if plan.together else (*SOURCES, *own)


@cache
def cut(
    device: torch.device, format: Format, types: tuple[torch.dtype, torch.dtype, torch.dtype],
    sizes: tuple[int, int, int, int], lie: tuple[int, int, int], cast: Cast | None, given: Plan | None,
) -> Cut:  # fmt: skip
    """How products of these types (x, result, bias) and sizes (M, N, K, groups or 0) are cut up, or by ``given``.

    ``lie``: of codes, scales and x, what address and bytes of a row leave over from a multiple of 16, or'ed.
    """
    rows, width, cols, groups = sizes
    copies = copy_size(lie[0]), copy_size(lie[1]), copy_size(lie[2])
    gpu, together = gpu_of(device), can_multiply_together(format, cols, groups, lie)

    def possible(plan: Plan) -> bool:
        if not plan.together:
            return not (plan.apart or (plan.resident and groups))
        return together and not plan.whole_x

    plan = given or choose_plan(device, format, -(-rows // (groups or 1)), width, cols, rows, possible)
    room = room_of(format, plan, rows, width, cols, gpu)
    if room is None:
        raise RuntimeError(f"a product of {rows}x{width}x{cols} by {plan} has no room on this device")
    even = plan.together or (width % plan.rows == 0 and cols % plan.depth == 0)  # which looks at each row by itself
    if not possible(plan):
        raise RuntimeError(f"{plan} is not for {width}x{cols} in {format}, {groups} groups, aligned to {copies} bytes")
    classes = classes_of(format, plan, rows)
    if plan.whole_x:
        facts = Facts(format, types[0], types[1], types[2], *copies, even, cast, classes)
    else:
        facts = Facts(format, torch.float16, types[1], types[2], copies[0], copies[1], 16, even, None, classes)
    row = constants(facts, plan)
    grid = plan.split, not plan.apart
    kernel = nvrtc.function(device, sources_of(plan), row, kernel_of(plan), PRODUCT, plan.threads, *grid)
    tiles, columns = -(-width // plan.rows), groups or -(-rows // plan.cols)
    return Cut(plan, room, kernel, (min(tiles, clusters(plan, gpu)), 1) if plan.resident else (tiles, columns))


@cache
def _activations_kernel(
    device: torch.device,
    name: str,
    element: ElementFormat,
    dtype: torch.dtype,
    copy: int,
    cast: Cast | None,
    tiles: int,
) -> Any:
    row = (
        ("ELEMENT", ELEMENTS[element]),
        ("X", TYPES[dtype]),
        ("X_COPY", copy),
        ("TILES", tiles),
        *cast_constants(cast),
    )
    return nvrtc.function(device, HEADERS, row, name, ACTIVATIONS, ACTIVATION_THREADS[name])


class Prepared(NamedTuple):
    """A matrix, cast, as a kernel reads it, in the order in which codes of a format are decoded."""

    values: Tensor
    """float16, in rows or in tiles of 64 of each 128 columns; what fills the last tile, or as many rows after the last
    one, nobody has written"""
    scale: Tensor
    """what scales each row"""


def _layout(plan: Plan, k: int) -> tuple[int, int, int]:
    """Of ``Prepared`` for k columns: rows of a tile (0: no tiles), columns looked at, and rows after the last one."""
    step = max(256, plan.depth) if plan.resident else 256
    width = -(-k // step) * step
    return (plan.cols, width, 0) if plan.together else (0, width, plan.cols)


def _prepared(
    x: Tensor, format: Format, cast: Cast | None, layout: tuple[int, int, int], counters: Tensor | None
) -> Prepared:
    """``x`` for a weight in ``format``; ``counters`` become zeros."""
    (rows, k), (tiles, width, more) = x.shape, layout
    shape = (-(-rows // tiles) * tiles, k) if tiles else (rows + more, width)
    out, blocks = x.new_empty(shape, dtype=torch.float16), 0
    if cast is not None and cast.format.global_scale and rows * k > ALONE:
        blocks = min(MAXIMA, -(-rows * k // (16 * ACTIVATION_THREADS["maxima"])))
    scale = x.new_empty(rows + blocks, dtype=torch.float32)  # and the bits of maxima after them
    zeroed = (0, 0) if counters is None else (counters.data_ptr(), counters.numel())
    kind = format.element, x.dtype, copy_size(x.data_ptr(), 2 * x.stride(0)), cast, tiles
    pointers = x.data_ptr(), out.data_ptr(), scale.data_ptr(), zeroed[0], scale.data_ptr() + 4 * rows
    arguments = (*pointers, k, width, x.stride(0), rows, zeroed[1], blocks)
    if blocks:
        _activations_kernel(x.device, "maxima", *kind)(blocks, 1, 4, arguments)
    _activations_kernel(x.device, "activations", *kind)(rows, 1, 4, arguments)
    return Prepared(out, scale)


class Weight(NamedTuple):
    """What a product has of its own, where several share their activations."""

    data: Tensor
    scale: Tensor
    last: Tensor | None
    """the global scale"""
    bias: Tensor | None


def _cut_of(
    x: Tensor, w: Weight, format: Format, cols: int, groups: int, out_dtype: torch.dtype, cast: Cast | None,
    plan: Plan | None = None,
) -> Cut:  # fmt: skip
    """``cut`` of these tensors."""
    data, scale, _, bias = w
    (*_, width, bytes_a_row), scale_cols = data.shape, scale.shape[-1]
    codes, scales = data.data_ptr() | bytes_a_row, scale.data_ptr() | scale_cols * scale.element_size()
    lie = codes & 15, scales & 15, (x.data_ptr() | 2 * x.stride()[0]) & 15
    types = (x.dtype, out_dtype, out_dtype if bias is None else bias.dtype)
    return cut(x.device, format, types, (x.shape[0], width, cols, groups), lie, cast, plan)


def _counters(x: Tensor, cuts: Sequence[Cut]) -> tuple[Tensor | None, list[Tensor | None]]:
    """Counters of blocks whose sums come together in memory: of all products, and of each."""
    counts = [made.blocks[0] * made.blocks[1] if made.plan.apart else 0 for made in cuts]
    if not any(counts):
        return None, [None] * len(cuts)
    counters = x.new_empty(sum(counts), dtype=torch.int32)
    return counters, [own if len(own) else None for own in counters.split(counts)]


def _run(
    x: Tensor, w: Weight, format: Format, cols: int, x_global: Tensor | None, ends: Tensor | None, alpha: float,
    beta: float, out_dtype: torch.dtype, made: Cut, prepared: Prepared | None, counters: Tensor | None, order: int,
) -> Tensor:  # fmt: skip
    """The product, its activations prepared where its kernel does not read ``x`` itself."""
    (plan, room, kernel, blocks), (data, scale, last, bias), rows = made, w, x.shape[0]
    (*_, width, bytes_a_row), (*_, scale_rows, scale_cols) = data.shape, scale.shape
    out = (x.new_empty if ends is None else x.new_zeros)(rows, width, dtype=out_dtype)
    scale_bytes = scale_cols * scale.element_size()
    parts = None
    if plan.apart:
        parts = x.new_empty(blocks[0] * blocks[1] * plan.split * plan.rows * plan.cols, dtype=torch.float32)
    if prepared is not None:
        x = prepared.values
    kernel(
        *blocks, room.bytes,
        (
            data.data_ptr(), scale.data_ptr(), x.data_ptr(), out.data_ptr(),
            0 if prepared is None else prepared.scale.data_ptr(), 0 if last is None else last.data_ptr(),
            0 if x_global is None else x_global.data_ptr(),
            0 if bias is None else bias.data_ptr(), 0 if ends is None else ends.data_ptr(),
            width * bytes_a_row, scale_rows * scale_bytes, bytes_a_row, scale_bytes,
            x.stride()[0], rows, width, cols, width if bias is not None and bias.dim() == 2 else 0, order,
            0 if parts is None else parts.data_ptr(), 0 if counters is None else counters.data_ptr(),
            room.x_width, room.round, alpha, beta,
        ),
    )  # fmt: skip
    return out


def launch(
    x: Tensor, data: Tensor, scale: Tensor, format: Format, cols: int, x_global: Tensor | None,
    last: Tensor | None, bias: Tensor | None, ends: Tensor | None, alpha: float, beta: float,
    out_dtype: torch.dtype, cast: Cast | None, plan: Plan | None = None,
) -> Tensor:  # fmt: skip
    """The product as ``small_batch`` has it, cut up by ``plan`` where one is given."""
    if x.shape[0] > BY_WARPS and ends is None:
        data, scale = _aligned(data), _aligned(scale)
    w, groups = Weight(data, scale, last, bias), 0 if ends is None else data.shape[0]
    with triton_host.on(x.device):
        made = _cut_of(x, w, format, cols, groups, out_dtype, cast, plan)
        counters = _counters(x, (made,))[0] if made.plan.apart else None
        prepared = None
        if not made.plan.whole_x:
            prepared = _prepared(x, format, cast, _layout(made.plan, x.shape[1]), counters)
        return _run(x, w, format, cols, x_global, ends, alpha, beta, out_dtype, made, prepared, counters, IN_TURN)


def _aligned(codes: Tensor) -> Tensor:
    """So many rows are multiplied together or by a detour: worth a copy that is aligned."""
    return codes if codes.data_ptr() % 16 == 0 else codes.clone()


def launch_shared(
    x: Tensor, weights: Sequence[Weight], format: Format, cols: int, x_global: Tensor | None, alpha: float,
    beta: float, out_dtype: torch.dtype, cast: Cast | None,
) -> list[Tensor]:  # fmt: skip
    """Products of one x and several weights: where their kernels read x themselves, they do not wait for each other,
    and where one prepares it, it does so once."""
    if x.shape[0] > BY_WARPS:
        weights = [w._replace(data=_aligned(w.data), scale=_aligned(w.scale)) for w in weights]
    with triton_host.on(x.device):
        cuts = [_cut_of(x, w, format, cols, 0, out_dtype, cast) for w in weights]
        counters, own = _counters(x, cuts)
        layouts = [None if made.plan.whole_x else _layout(made.plan, x.shape[1]) for made in cuts]
        prepared: dict[Any, Prepared | None] = {None: None}
        for layout in layouts:
            if layout is not None and layout not in prepared:
                prepared[layout] = _prepared(x, format, cast, layout, counters if len(prepared) == 1 else None)
        early = x_global is None and all(made.plan.resident and made.plan.whole_x for made in cuts)  # read as x is
        orders = [FIRST, *[FOLLOWS] * (len(cuts) - 1)] if early else [IN_TURN] * len(cuts)
        return [
            _run(x, w, format, cols, x_global, None, alpha, beta, out_dtype, made, prepared[layout], mine, order)
            for w, made, layout, mine, order in zip(weights, cuts, layouts, own, orders, strict=True)
        ]
