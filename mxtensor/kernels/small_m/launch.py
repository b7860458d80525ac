"""Launches of small-M products: resolve the config, prepare the activations, compile the sources, call the kernel.

``resolve`` does what depends on shapes, dtypes and alignments only, and is cached. A config with ``whole_x`` casts the
activations inside the product kernel (up to 8 rows); other configs need one launch of ``cuda/activations.cu`` before,
two where an NVFP4 cast needs the largest magnitude of many values. ``cuda/pipelined.cu`` multiplies by one weight, by
several, or groups of rows by a stack of weights; ``cuda/persistent.cu`` and ``cuda/wgmma.cu`` by one or several.
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
    LaunchConfig,
    can_use_wgmma,
    cast_constants,
    classes_of,
    constants,
    copy_size,
    facts_for,
)
from .heuristics import BY_WARPS, choose_config, gpu_of
from .shared_memory import SharedMemoryLayout, clusters, layout_of

WEIGHT, OTHERS = "5Q3I0Q", "8Q9I2f0Q"
"""``struct`` formats of a product's arguments (``cuda/stages.cuh``): those of each weight, and the others."""
ACTIVATIONS = struct.Struct("5Q7I0Q")
HEADERS = ("machine.cuh", "elements.cuh", "casts.cuh", "activations.cuh")
ACTIVATION_SOURCES = (*HEADERS, "activations.cu")
KERNEL_SOURCES = {
    "pipelined": (*HEADERS, "stages.cuh", "sums.cuh", "result.cuh", "pipelined.cu"),
    "persistent": (
        *HEADERS, "stages.cuh", "sums.cuh", "result.cuh", "small_m_mma.cuh", "warp_activations.cuh", "persistent.cu",
    ),
    "wgmma": (*HEADERS, "stages.cuh", "result.cuh", "dequant_words.cuh", "cluster_reduce.cuh", "wgmma.cu"),
}  # fmt: skip
"""Kind of kernel -> its sources, in order."""
ACTIVATION_THREADS = {"maxima": 256, "activations": 512}
"""Kernels in ``cuda/activations.cu`` -> threads of a block."""
ALONE = 16384
"""Activations up to which every block finds the largest magnitude of all of them by itself."""
MAXIMA = 128
"""Most blocks of the kernel ``maxima``."""


# ---------------------------------------------------------------------------------------------- resolve


class ResolvedLaunch(NamedTuple):
    """A product's kernel and all launch parameters that do not depend on addresses."""

    config: LaunchConfig
    layout: SharedMemoryLayout
    kernel: Any
    blocks: tuple[int, int]
    """along N; along M, or groups"""
    first_tiles: tuple[int, ...]
    """for each weight, the tiles of the weights before it"""
    share: tuple[int, int]
    """persistent: tiles of each block, and blocks that have one more"""


@cache
def argument_struct(weights: int) -> struct.Struct:
    """The C struct of the arguments of a kernel that takes this many weights."""
    return struct.Struct(weights * WEIGHT + OTHERS)


@cache
def resolve(
    device: torch.device, format: Format, types: tuple[torch.dtype, torch.dtype, torch.dtype],
    sizes: tuple[int, int, int], widths: tuple[int, ...], alignment: tuple[int, int, int], cast: Cast | None,
    given: LaunchConfig | None,
) -> ResolvedLaunch:  # fmt: skip
    """The launch of products of these dtypes (x, result, bias) and sizes (M, K, groups or 0) with weights of ``widths``
    rows, by the config ``given`` or else by the one that ``choose_config`` finds.

    ``alignment``: of codes, scales and x, address and row stride in bytes modulo 16, combined by "or". Raises
    RuntimeError if the config does not fit the device or cannot run this product.
    """
    (rows, cols, groups), width, weights = sizes, sum(widths), 1 if len(widths) == 1 else MOST_WEIGHTS
    copies = copy_size(alignment[0]), copy_size(alignment[1]), copy_size(alignment[2], 2 * cols)
    gpu, wgmma = gpu_of(device), can_use_wgmma(format, cols, groups, alignment)

    def possible(config: LaunchConfig) -> bool:
        if config.reduce_dsmem and (
            not config.wgmma or config.reduce_global or config.split < 2 or config.cols % config.split
        ):
            return False
        if not config.wgmma:
            # The kernel finds the largest magnitude of its own rows only.
            needs_all_rows = config.whole_x and cast is not None and cast.format.global_scale
            return not (
                config.reduce_global
                or (config.persistent and groups)
                or (needs_all_rows and (groups or rows > config.cols))
            )
        return wgmma and not config.whole_x

    config = given or choose_config(
        device, format, -(-rows // (groups or 1)), width, cols, rows, possible, cast is not None
    )
    tiles = [-(-n // config.rows) for n in widths] + [0] * (weights - len(widths))
    layout = layout_of(format, config, rows, sum(tiles) * config.rows, cols, gpu)
    if layout is None:
        raise RuntimeError(
            f"a product of {rows}x{width}x{cols} by {config} does not fit in the shared memory of this device "
            f"({gpu.memory} bytes a block)"
        )
    whole = cols % config.depth == 0 and not any(n % config.rows for n in widths)
    even = config.wgmma or whole  # a wgmma kernel checks each row by itself
    if not possible(config):
        raise RuntimeError(
            f"{config} cannot run {width}x{cols} in {format}, {groups} groups, aligned to {copies} bytes; "
            "leave the config out to have one chosen"
        )
    classes = classes_of(format, config, rows)
    facts = facts_for(Facts(format, *types, *copies, even, cast, classes, weights), config)
    row = constants(facts, config)
    grid = config.split, not config.reduce_global
    packed = argument_struct(weights)
    kernel = nvrtc.function(device, KERNEL_SOURCES[config.kind], row, config.kind, packed, config.threads, *grid)
    blocks = min(sum(tiles), clusters(config, gpu)), 1
    if not config.persistent:
        blocks = sum(tiles), groups or -(-rows // config.cols)
    return ResolvedLaunch(config, layout, kernel, blocks, (0, *accumulate(tiles[:-1])), divmod(sum(tiles), blocks[0]))


# ---------------------------------------------------------------------------------------------- activations


@cache
def _activations_kernel(
    device: torch.device, name: str, element: ElementFormat, dtype: torch.dtype, copy: int, cast: Cast | None,
    tile_rows: int,
) -> Any:  # fmt: skip
    row = (
        ("ELEMENT", ELEMENTS[element]),
        ("X", TYPES[dtype]),
        ("X_COPY", copy),
        ("TILE_ROWS", tile_rows),
        *cast_constants(cast),
    )
    return nvrtc.function(device, ACTIVATION_SOURCES, row, name, ACTIVATIONS, ACTIVATION_THREADS[name])


def _prepared(
    x: Tensor, format: Format, cast: Cast | None, config: LaunchConfig, counters: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Activations x (M, K) as the kernel of ``config`` reads them: cast, in float16, in the order in which codes of
    ``format`` are decoded; and the float32 scale of each row (M,).

    The float16 values are rows (M, K rounded up), or for wgmma tiles of 64 columns. The padding rows are not
    initialized. The kernel also sets ``counters`` to zero.
    """
    rows, k = x.shape
    step, tile_rows = max(256, config.depth) if config.persistent else 256, config.cols if config.wgmma else 0
    width = -(-k // step) * step
    shape = (-(-rows // tile_rows) * tile_rows, k) if tile_rows else (rows + config.cols, width)
    out, blocks = x.new_empty(shape, dtype=torch.float16), 0
    if cast is not None and cast.format.global_scale and rows * k > ALONE:
        blocks = min(MAXIMA, -(-rows * k // (16 * ACTIVATION_THREADS["maxima"])))
    scale = x.new_empty(rows + blocks, dtype=torch.float32)  # followed by the bits of the maxima of the blocks
    zeroed = (0, 0) if counters is None else (counters.data_ptr(), counters.numel())
    kind = format.element, x.dtype, copy_size(x.data_ptr(), 2 * x.stride(0), 2 * k), cast, tile_rows
    pointers = x.data_ptr(), out.data_ptr(), scale.data_ptr(), zeroed[0], scale.data_ptr() + 4 * rows
    blocks_per_row = -(-width // (8 * ACTIVATION_THREADS["activations"]))
    arguments = (*pointers, k, width, x.stride(0), rows, zeroed[1], blocks, blocks_per_row)
    if blocks:
        _activations_kernel(x.device, "maxima", *kind)(blocks, 1, 4, arguments)
    _activations_kernel(x.device, "activations", *kind)(rows, blocks_per_row, 4, arguments)
    return out, scale


# ---------------------------------------------------------------------------------------------- products


class Weight(NamedTuple):
    """One weight of a launch; several weights share the activations."""

    data: Tensor
    scale: Tensor
    global_scale: Tensor | None
    bias: Tensor | None


def _resolved(
    x: Tensor, weights: Sequence[Weight], format: Format, cols: int, groups: int, out_dtype: torch.dtype,
    cast: Cast | None, config: LaunchConfig | None,
) -> ResolvedLaunch:  # fmt: skip
    """``resolve`` for these tensors."""
    codes, scales, bias, widths = 0, 0, out_dtype, []
    for data, scale, _, added in weights:
        *_, width, row_bytes = data.shape
        codes |= data.data_ptr() | row_bytes
        scales |= scale.data_ptr() | scale.shape[-1] * scale.element_size()
        widths.append(width)
        if added is not None:
            bias = added.dtype
    alignment = codes & 15, scales & 15, (x.data_ptr() | 2 * x.stride()[0]) & 15
    sizes = x.shape[0], cols, groups
    return resolve(x.device, format, (x.dtype, out_dtype, bias), sizes, tuple(widths), alignment, cast, config)


def _launch_once(
    x: Tensor, weights: Sequence[Weight], format: Format, cols: int, x_global: Tensor | None, ends: Tensor | None,
    alpha: float, beta: float, out_dtype: torch.dtype, cast: Cast | None, given: LaunchConfig | None,
) -> list[Tensor]:  # fmt: skip
    """The products with at most ``MOST_WEIGHTS`` weights, whose biases have one dtype, by one product kernel."""
    rows, groups = x.shape[0], 0 if ends is None else weights[0].data.shape[0]
    resolved = _resolved(x, weights, format, cols, groups, out_dtype, cast, given)
    config, blocks = resolved.config, resolved.blocks
    values, x_scale, counters, partial_sums = x, None, None, None
    if config.reduce_global:
        count = blocks[0] * blocks[1]
        counters = x.new_empty(count, dtype=torch.int32)
        partial_sums = x.new_empty(count * config.split * config.rows * config.cols, dtype=torch.float32)
    if not config.whole_x:
        values, x_scale = _prepared(x, format, cast, config, counters)
    new = x.new_empty if ends is None else x.new_zeros
    results = [new(rows, w.data.shape[-2], dtype=out_dtype) for w in weights]
    others = x_scale, x_global, partial_sums, counters
    arguments = _arguments(resolved, weights, results, values, rows, cols, alpha, beta, ends, *others)
    resolved.kernel(*blocks, resolved.layout.bytes, arguments)
    return results


def _address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _arguments(
    resolved: ResolvedLaunch, weights: Sequence[Weight], results: Sequence[Tensor], values: Tensor, rows: int,
    cols: int, alpha: float = 1.0, beta: float = 1.0, ends: Tensor | None = None, x_scale: Tensor | None = None,
    x_global: Tensor | None = None, partial_sums: Tensor | None = None, counters: Tensor | None = None,
) -> list[int | float]:  # fmt: skip
    """The arguments of a product's kernel, in the order of ``WEIGHT`` and ``OTHERS``."""
    (data, scale, _, _), layout, first_tiles = weights[0], resolved.layout, resolved.first_tiles
    (*_, width, row_bytes), (*_, scale_rows, scale_cols) = data.shape, scale.shape
    scale_bytes = scale_cols * scale.element_size()
    out: list[int | float] = []
    for w, y, first in zip(weights, results, first_tiles, strict=False):
        n, bias = w.data.shape[-2], w.bias
        out += (
            w.data.data_ptr(), w.scale.data_ptr(), y.data_ptr(), _address(w.global_scale), _address(bias), n, first,
            n if bias is not None and bias.dim() == 2 else 0,
        )  # fmt: skip
    out += (0, 0, 0, 0, 0, 0, first_tiles[-1], 0) * (len(first_tiles) - len(weights))  # unused weights
    out += (
        _address(ends), width * row_bytes, scale_rows * scale_bytes, values.data_ptr(), _address(x_scale),
        _address(x_global), _address(partial_sums), _address(counters), row_bytes, scale_bytes, values.stride()[0],
        rows, cols, layout.x_width, layout.round, *resolved.share, alpha, beta,
    )  # fmt: skip
    return out


def launch(
    x: Tensor, weights: Sequence[Weight], format: Format, cols: int, x_global: Tensor | None, ends: Tensor | None,
    alpha: float, beta: float, out_dtype: torch.dtype, cast: Cast | None, config: LaunchConfig | None = None,
) -> list[Tensor]:  # fmt: skip
    """The products of one x with each weight, as the op ``small_m`` defines them; by ``config`` if one is given.

    Raises RuntimeError if that config cannot run them.
    """
    if x.shape[0] > BY_WARPS and ends is None:
        weights = [w._replace(data=_aligned(w.data), scale=_aligned(w.scale)) for w in weights]
    rest = format, cols, x_global, ends, alpha, beta, out_dtype, cast, config
    with triton_launch.on(x.device):
        if len(weights) == 1:
            return _launch_once(x, weights, *rest)
        if len({w.bias.dtype for w in weights if w.bias is not None}) > 1:
            weights = [w if w.bias is None else w._replace(bias=w.bias.float()) for w in weights]
        batches = (weights[first : first + MOST_WEIGHTS] for first in range(0, len(weights), MOST_WEIGHTS))
        return [y for batch in batches for y in _launch_once(x, batch, *rest)]


def _aligned(codes: Tensor) -> Tensor:
    """The codes at a multiple of 16 bytes: at many rows only wgmma pays off, so that a copy is worth its time."""
    return codes if codes.data_ptr() % 16 == 0 else codes.clone()


# ---------------------------------------------------------------------------------------------- repeated launches

OF_A_WEIGHT, RESULT_AT, X_AT = 8, 2, 3
"""Arguments of each weight; index of the result among them; index of the activations among the other arguments."""


class Launch(NamedTuple):
    """The one launch of a product with one weight, for activations of the same shape, dtype and alignment.

    Stores addresses and no tensor.
    """

    kernel: Any
    grid: tuple[int, int, int]
    """blocks along N and M, and bytes of shared memory of each"""
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
    """``launch`` of this weight with alpha and beta 1 and the dtype of x (..., K); None if it takes several kernels."""
    rows, n = as_matrix(x), weight.data.shape[-2]
    with triton_launch.on(x.device):
        resolved = _resolved(rows, (weight,), format, cols, 0, x.dtype, cast, None)
    if resolved.config.reduce_global or not resolved.config.whole_x:
        return None
    arguments = _arguments(resolved, (weight,), (x,), rows, rows.shape[0], cols)  # x in the place of the result
    x_at = OF_A_WEIGHT * len(resolved.first_tiles) + X_AT
    return Launch(resolved.kernel, (*resolved.blocks, resolved.layout.bytes), (*x.shape[:-1], n), arguments, x_at)
