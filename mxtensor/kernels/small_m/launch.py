"""How products of few rows are launched: cut up by a plan, their activations prepared, their sources compiled.

``cuda/product.cu`` multiplies by one weight or several, or rows in groups by a stack of them; ``cuda/resident.cu`` and
on sm_90 ``cuda/together.cu`` by one or several. Activations come as bfloat16 or float16 and are multiplied as float16
(``cuda/activations.cuh``), cast on the way if the weight wants that: in the same launch where a plan says so, up to 8
rows, else in one before it (``cuda/activations.cu``).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.shapes import as_matrix
from ...numerics.cast import Cast
from ...numerics.formats import ElementFormat, Format
from ..runtime import nvrtc, triton_launch
from .config import (
    ELEMENTS,
    MOST_WEIGHTS,
    TYPES,
    Facts,
    Plan,
    as_taken,
    can_multiply_together,
    cast_constants,
    classes_of,
    constants,
    copy_size,
)
from .heuristics import BY_WARPS, choose_plan, gpu_of
from .shared_memory import Room, clusters, room_of

WEIGHT, OTHERS = "5Q3I0Q", "8Q9I2f0Q"
"""Arguments of a product as ``cuda/stages.cuh`` has them: of each weight, and the others."""
ACTIVATIONS = struct.Struct("5Q7I0Q")
HEADERS = ("machine.cuh", "elements.cuh", "casts.cuh", "activations.cuh")
ACTIVATION_SOURCES = (*HEADERS, "activations.cu")
SOURCES = (*HEADERS, "stages.cuh", "sums.cuh", "result.cuh")
TOGETHER_SOURCES = (*HEADERS, "stages.cuh", "result.cuh", "dequant_words.cuh", "cluster_reduce.cuh", "wgmma.cu")
ACTIVATION_THREADS = {"maxima": 256, "activations": 512}
"""Kernels of activations -> threads of a block."""
ALONE = 16384
"""Activations that every block looks at by itself for their largest magnitude, at most."""
MAXIMA = 128
"""Blocks that look for the largest magnitude of activations, at most."""


class Cut(NamedTuple):
    """What is launched for products of one kind."""

    plan: Plan
    room: Room
    kernel: Any
    blocks: tuple[int, int]
    """along N; along M, or groups"""
    first: tuple[int, ...]
    """tiles before those of each weight"""
    share: tuple[int, int]
    """of a resident plan: tiles of each block, and blocks that have one more"""


@cache
def arguments(weights: int) -> struct.Struct:
    """Of a kernel that takes so many weights."""
    return struct.Struct(weights * WEIGHT + OTHERS)


def kernel_of(plan: Plan) -> str:
    """Its kernel, in the source of that name."""
    return "resident" if plan.resident else "together" if plan.together else "product"


def sources_of(plan: Plan) -> tuple[str, ...]:
    """The sources of its kernel."""
    own = ("small_m_mma.cuh", "warp_activations.cuh", "persistent.cu") if plan.resident else ("product.cu",)
    return TOGETHER_SOURCES if plan.together else (*SOURCES, *own)


@cache
def cut(
    device: torch.device, format: Format, types: tuple[torch.dtype, torch.dtype, torch.dtype],
    sizes: tuple[int, int, int], widths: tuple[int, ...], lie: tuple[int, int, int], cast: Cast | None,
    given: Plan | None,
) -> Cut:  # fmt: skip
    """How products of these types (x, result, bias) and sizes (M, K, groups or 0) with weights of so many rows are cut
    up, or by ``given``.

    ``lie``: of codes, scales and x, what address and bytes of a row leave over from a multiple of 16, or'ed.
    """
    (rows, cols, groups), width, weights = sizes, sum(widths), 1 if len(widths) == 1 else MOST_WEIGHTS
    copies = copy_size(lie[0]), copy_size(lie[1]), copy_size(lie[2], 2 * cols)
    gpu, together = gpu_of(device), can_multiply_together(format, cols, groups, lie)

    def possible(plan: Plan) -> bool:
        if plan.sends and (not plan.together or plan.apart or plan.split < 2 or plan.cols % plan.split):
            return False
        if not plan.together:
            others = plan.whole_x and cast is not None and cast.format.global_scale  # looks for the largest of its rows
            return not (plan.apart or (plan.resident and groups) or (others and (groups or rows > plan.cols)))
        return together and not plan.whole_x

    plan = given or choose_plan(
        device, format, -(-rows // (groups or 1)), width, cols, rows, possible, cast is not None
    )
    tiles = [-(-n // plan.rows) for n in widths] + [0] * (weights - len(widths))
    room = room_of(format, plan, rows, sum(tiles) * plan.rows, cols, gpu)
    if room is None:
        raise RuntimeError(f"a product of {rows}x{width}x{cols} by {plan} has no room on this device")
    whole = cols % plan.depth == 0 and not any(n % plan.rows for n in widths)
    even = plan.together or whole  # which looks at each row by itself
    if not possible(plan):
        raise RuntimeError(f"{plan} is not for {width}x{cols} in {format}, {groups} groups, aligned to {copies} bytes")
    classes = classes_of(format, plan, rows)
    facts = as_taken(Facts(format, *types, *copies, even, cast, classes, weights), plan)
    row = constants(facts, plan)
    grid = plan.split, not plan.apart
    layout = arguments(weights)
    kernel = nvrtc.function(device, sources_of(plan), row, kernel_of(plan), layout, plan.threads, *grid)
    blocks = min(sum(tiles), clusters(plan, gpu)), 1
    if not plan.resident:
        blocks = sum(tiles), groups or -(-rows // plan.cols)
    return Cut(plan, room, kernel, blocks, (0, *accumulate(tiles[:-1])), divmod(sum(tiles), blocks[0]))


@cache
def _activations_kernel(
    device: torch.device, name: str, element: ElementFormat, dtype: torch.dtype, copy: int, cast: Cast | None,
    tiles: int,
) -> Any:  # fmt: skip
    row = (
        ("ELEMENT", ELEMENTS[element]),
        ("X", TYPES[dtype]),
        ("X_COPY", copy),
        ("TILES", tiles),
        *cast_constants(cast),
    )
    return nvrtc.function(device, ACTIVATION_SOURCES, row, name, ACTIVATIONS, ACTIVATION_THREADS[name])


def _prepared(
    x: Tensor, format: Format, cast: Cast | None, plan: Plan, counters: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A matrix, cast, as the kernel of ``plan`` reads it, in the order in which codes of ``format`` are decoded, and
    what scales each row: float16, in rows or in tiles of 64 of each 128 columns.

    What fills the last tile, or as many rows after the last one, nobody has written. ``counters`` become zeros.
    """
    rows, k = x.shape
    step, tiles = max(256, plan.depth) if plan.resident else 256, plan.cols if plan.together else 0
    width = -(-k // step) * step
    shape = (-(-rows // tiles) * tiles, k) if tiles else (rows + plan.cols, width)
    out, blocks = x.new_empty(shape, dtype=torch.float16), 0
    if cast is not None and cast.format.global_scale and rows * k > ALONE:
        blocks = min(MAXIMA, -(-rows * k // (16 * ACTIVATION_THREADS["maxima"])))
    scale = x.new_empty(rows + blocks, dtype=torch.float32)  # and the bits of maxima after them
    zeroed = (0, 0) if counters is None else (counters.data_ptr(), counters.numel())
    kind = format.element, x.dtype, copy_size(x.data_ptr(), 2 * x.stride(0), 2 * k), cast, tiles
    pointers = x.data_ptr(), out.data_ptr(), scale.data_ptr(), zeroed[0], scale.data_ptr() + 4 * rows
    components = -(-width // (8 * ACTIVATION_THREADS["activations"]))
    arguments = (*pointers, k, width, x.stride(0), rows, zeroed[1], blocks, components)
    if blocks:
        _activations_kernel(x.device, "maxima", *kind)(blocks, 1, 4, arguments)
    _activations_kernel(x.device, "activations", *kind)(rows, components, 4, arguments)
    return out, scale


class Weight(NamedTuple):
    """What a product has of its own, where several share their activations."""

    data: Tensor
    scale: Tensor
    global_scale: Tensor | None
    """the global scale"""
    bias: Tensor | None


def _cut_of(
    x: Tensor, weights: Sequence[Weight], format: Format, cols: int, groups: int, out_dtype: torch.dtype,
    cast: Cast | None, plan: Plan | None,
) -> Cut:  # fmt: skip
    """``cut`` of these tensors."""
    codes, scales, bias, widths = 0, 0, out_dtype, []
    for data, scale, _, added in weights:
        *_, width, bytes_a_row = data.shape
        codes |= data.data_ptr() | bytes_a_row
        scales |= scale.data_ptr() | scale.shape[-1] * scale.element_size()
        widths.append(width)
        if added is not None:
            bias = added.dtype
    lie = codes & 15, scales & 15, (x.data_ptr() | 2 * x.stride()[0]) & 15
    sizes = x.shape[0], cols, groups
    return cut(x.device, format, (x.dtype, out_dtype, bias), sizes, tuple(widths), lie, cast, plan)


def _made(
    x: Tensor, weights: Sequence[Weight], format: Format, cols: int, x_global: Tensor | None, ends: Tensor | None,
    alpha: float, beta: float, out_dtype: torch.dtype, cast: Cast | None, given: Plan | None,
) -> list[Tensor]:  # fmt: skip
    """The products with up to ``MOST_WEIGHTS`` weights, whose biases are of one type, in one launch."""
    rows, groups = x.shape[0], 0 if ends is None else weights[0].data.shape[0]
    made = _cut_of(x, weights, format, cols, groups, out_dtype, cast, given)
    plan, blocks = made.plan, made.blocks
    values, x_scale, counters, components = x, None, None, None
    if plan.apart:
        count = blocks[0] * blocks[1]
        counters = x.new_empty(count, dtype=torch.int32)
        components = x.new_empty(count * plan.split * plan.rows * plan.cols, dtype=torch.float32)
    if not plan.whole_x:
        values, x_scale = _prepared(x, format, cast, plan, counters)
    new = x.new_empty if ends is None else x.new_zeros
    results = [new(rows, w.data.shape[-2], dtype=out_dtype) for w in weights]
    others = x_scale, x_global, components, counters
    arguments = _arguments(made, weights, results, values, rows, cols, alpha, beta, ends, *others)
    made.kernel(*blocks, made.room.bytes, arguments)
    return results


def _address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _arguments(
    made: Cut, weights: Sequence[Weight], results: Sequence[Tensor], values: Tensor, rows: int, cols: int,
    alpha: float = 1.0, beta: float = 1.0, ends: Tensor | None = None, x_scale: Tensor | None = None,
    x_global: Tensor | None = None, components: Tensor | None = None, counters: Tensor | None = None,
) -> list[int | float]:  # fmt: skip
    """What a product's kernel is called with, as ``OTHERS`` and ``WEIGHT`` lay it out."""
    (data, scale, _, _), room, tiles = weights[0], made.room, made.first
    (*_, width, bytes_a_row), (*_, scale_rows, scale_cols) = data.shape, scale.shape
    scale_bytes = scale_cols * scale.element_size()
    out: list[int | float] = []
    for w, y, first in zip(weights, results, tiles, strict=False):
        n, bias = w.data.shape[-2], w.bias
        out += (
            w.data.data_ptr(), w.scale.data_ptr(), y.data_ptr(), _address(w.global_scale), _address(bias), n, first,
            n if bias is not None and bias.dim() == 2 else 0,
        )  # fmt: skip
    out += (0, 0, 0, 0, 0, 0, tiles[-1], 0) * (len(tiles) - len(weights))  # there are no others
    out += (
        _address(ends), width * bytes_a_row, scale_rows * scale_bytes, values.data_ptr(), _address(x_scale),
        _address(x_global), _address(components), _address(counters), bytes_a_row, scale_bytes, values.stride()[0],
        rows, cols, room.x_width, room.round, *made.share, alpha, beta,
    )  # fmt: skip
    return out


def launch(
    x: Tensor, weights: Sequence[Weight], format: Format, cols: int, x_global: Tensor | None, ends: Tensor | None,
    alpha: float, beta: float, out_dtype: torch.dtype, cast: Cast | None, plan: Plan | None = None,
) -> list[Tensor]:  # fmt: skip
    """The products as ``small_m`` has them, of one x and each of some weights, cut up by ``plan`` where one is
    given."""
    if x.shape[0] > BY_WARPS and ends is None:
        weights = [w._replace(data=_aligned(w.data), scale=_aligned(w.scale)) for w in weights]
    rest = format, cols, x_global, ends, alpha, beta, out_dtype, cast, plan
    with triton_launch.on(x.device):
        if len(weights) == 1:
            return _made(x, weights, *rest)
        if len({w.bias.dtype for w in weights if w.bias is not None}) > 1:
            weights = [w if w.bias is None else w._replace(bias=w.bias.float()) for w in weights]
        some = (weights[first : first + MOST_WEIGHTS] for first in range(0, len(weights), MOST_WEIGHTS))
        return [y for of_one_launch in some for y in _made(x, of_one_launch, *rest)]


OF_A_WEIGHT, RESULT_AT, X_AT = 8, 2, 3
"""Arguments of each weight; where they have its result; and where those after all weights have the activations."""


class Launch(NamedTuple):
    """The one launch of a product with one weight, for activations of the same shape, dtype and alignment.

    Holds addresses and no tensor.
    """

    kernel: Any
    grid: tuple[int, int, int]
    """blocks, and bytes of shared memory of each"""
    shape: tuple[int, ...]
    arguments: Sequence[int | float]
    x_at: int

    def __call__(self, x: Tensor) -> Tensor:
        out, arguments = x.new_empty(self.shape), [*self.arguments]
        arguments[RESULT_AT], arguments[self.x_at] = out.data_ptr(), x.data_ptr()
        with triton_launch.on(x.device):
            self.kernel(*self.grid, arguments)
        return out


def prepare_launch(x: Tensor, weight: Weight, format: Format, cols: int, cast: Cast | None) -> Launch | None:
    """``launch`` of this weight, with alpha and beta 1, into the type of x (..., K), if one kernel does all of it."""
    rows, n = as_matrix(x), weight.data.shape[-2]
    with triton_launch.on(x.device):
        made = _cut_of(rows, (weight,), format, cols, 0, x.dtype, cast, None)
    if made.plan.apart or not made.plan.whole_x:
        return None
    arguments = _arguments(made, (weight,), (x,), rows, rows.shape[0], cols)  # x in the place of a result
    x_at = OF_A_WEIGHT * len(made.first) + X_AT
    return Launch(made.kernel, (*made.blocks, made.room.bytes), (*x.shape[:-1], n), arguments, x_at)


def _aligned(codes: Tensor) -> Tensor:
    """So many rows are multiplied together or by a detour: worth a copy that is aligned."""
    return codes if codes.data_ptr() % 16 == 0 else codes.clone()
