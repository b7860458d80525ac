"""Launches of small-M products: resolve the config, convert the activations, compile the sources, call the kernel.

``resolve`` does what depends on shapes, dtypes and alignments only, and is cached. A config with ``whole_x`` casts the
activations inside the product kernel (up to 8 rows), and a ``direct`` one reads bfloat16 activations as they are; other
configs need one launch of ``cuda/activations.cu`` before, two where an NVFP4 cast needs the largest magnitude of many
values. ``cuda/pipelined.cu`` multiplies by one weight, by several, or groups of rows by a stack of weights;
``cuda/persistent.cu`` and ``cuda/wgmma.cu`` by one or several.

Scratch memory is one allocation, for the activations that another kernel converts and for split sums:

    float16 activations | float32 scale of each row | maxima of blocks | counters | partial sums

Each part starts at a multiple of ``ALIGNMENT`` bytes. A config with ``whole_x`` or ``direct`` needs none.

``compile_all`` compiles the kernels of many products at once, in one thread per processor: NVRTC takes seconds for
each.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...numerics.cast import Cast
from ...numerics.elements import ElementFormat
from ...numerics.formats import Format
from ..runtime import cuda_driver, nvrtc, triton_launch
from ..runtime.cuda_driver import Argument
from ..runtime.host_calls import KernelCall, launch_steps
from ..runtime.nvrtc import ELEMENTS, TYPES, cast_constants, copy_size
from .config import (
    MOST_WEIGHTS,
    Facts,
    LaunchConfig,
    Needs,
    SharedMemoryLayout,
    can_be_direct,
    can_use_wgmma,
    classes_of,
    constants,
    facts_for,
    has_whole_chunks,
    layout_of,
    map_of_tiles,
)
from .heuristics import BY_WARPS, choose_config, gpu_of, groups_with_rows

ALIGNMENT = 256
ALONE = 16384
"""Activations up to which every block finds the largest magnitude of all of them by itself."""
MAXIMA = 128
"""Most blocks of the kernel ``maxima``."""
ACTIVATION_THREADS = {"maxima": 256, "activations": 512}
"""Kernels in ``cuda/activations.cu`` -> threads of a block."""


class Scratch(NamedTuple):
    """Offsets in bytes, and the sizes that the kernels need."""

    bytes: int
    scale: int
    counters: int
    partial_sums: int
    width: int
    """columns of a row of activations in memory: K rounded up to whole chunks"""
    maxima_blocks: int
    """blocks of the kernel ``maxima``, which runs before for an NVFP4 cast of many values; 0: it does not run"""
    counted: int
    """counters, which the kernel ``activations`` sets to zero"""


@lru_cache(maxsize=4096)
def scratch_of(config: LaunchConfig, rows: int, k: int, cast: Cast | None, blocks: tuple[int, int]) -> Scratch:
    """The scratch memory of a product of (rows, k) activations, cast to ``cast``, by ``blocks`` along N and M."""
    tile_rows = config.cols if config.wgmma else 0
    step = 128 if tile_rows else max(256, config.depth) if config.persistent else 256
    width = -(-k // step) * step
    stored_rows = -(-rows // tile_rows) * tile_rows if tile_rows else rows + config.cols
    maxima = 0
    if cast is not None and cast.format.global_scale and rows * k > ALONE:
        maxima = min(MAXIMA, -(-rows * k // (16 * ACTIVATION_THREADS["maxima"])))
    counted = blocks[0] * blocks[1] if config.reduce_global else 0
    sums = 4 * counted * config.split * config.rows * config.cols
    starts = [0]
    for size in (2 * stored_rows * width, 4 * (rows + maxima), 4 * counted, sums):
        starts.append(starts[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    _, scale, counters, partial_sums, end = starts
    return Scratch(end, scale, counters, partial_sums, width, maxima, counted)


WEIGHT, OTHERS = "5Q3I0Q", "8Q10I2f0Q"
"""``struct`` formats of a product's arguments (``cuda/stages.cuh``): those of each weight, and the others. The map of
the activations comes before those of a direct kernel."""
ACTIVATIONS = struct.Struct("5Q7I0Q")
HEADERS = ("machine.cuh", "elements.cuh", "casts.cuh", "activations.cuh")
ACTIVATION_SOURCES = (*HEADERS, "activations.cu")
KERNEL_SOURCES = {
    "pipelined": (*HEADERS, "stages.cuh", "sums.cuh", "result.cuh", "groups.cuh", "pipelined.cu"),
    "persistent": (
        *HEADERS, "stages.cuh", "sums.cuh", "result.cuh", "small_m_mma.cuh", "warp_activations.cuh", "persistent.cu",
    ),
    "wgmma": (
        *HEADERS, "machine_sm90.cuh", "stages.cuh", "result.cuh", "bfloat16_words.cuh", "dequant_words.cuh",
        "chunks.cuh", "cluster_reduce.cuh", "x_tiles.cuh", "wgmma.cu",
    ),
}  # fmt: skip
"""Kind of kernel -> its sources, in order."""


# ---------------------------------------------------------------------------------------------- resolve


class ResolvedLaunch(NamedTuple):
    """A product's kernel and all launch parameters that do not depend on addresses."""

    config: LaunchConfig
    layout: SharedMemoryLayout
    kernel: Any
    blocks: tuple[int, int]
    """along N; along M, or groups that can have rows"""
    first_tiles: tuple[int, ...]
    """for each weight, the tiles of the weights before it"""
    share: tuple[int, int]
    """persistent: tiles of each block, and blocks that have one more"""


@cache
def argument_struct(weights: int, direct: bool = False) -> struct.Struct:
    """The C struct of the arguments of a kernel that takes this many weights; one object of each, because
    ``nvrtc.function`` is cached by it."""
    fields = weights * WEIGHT + OTHERS
    if not direct:
        return struct.Struct(fields)
    return struct.Struct(f"{cuda_driver.BYTES}s{fields}{-struct.calcsize(fields) % cuda_driver.ALIGNMENT}x")


class Choice(NamedTuple):
    """What a product's kernel is compiled from, before it is compiled."""

    config: LaunchConfig
    layout: SharedMemoryLayout
    constants: nvrtc.Constants
    tiles: tuple[int, ...]
    """tiles of weight rows of each weight"""


def choose(
    device: torch.device, format: Format, types: tuple[torch.dtype, torch.dtype, torch.dtype],
    sizes: tuple[int, int, int], widths: tuple[int, ...], alignment: tuple[int, int, int], cast: Cast | None,
    given: LaunchConfig | None,
) -> Choice:  # fmt: skip
    """The config and constants of products of these dtypes (x, result, bias) and sizes (M, K, groups or 0) with weights
    of ``widths`` rows, by the config ``given`` or else by the one that ``choose_config`` finds.

    ``alignment``: of codes, scales and x, address and row stride in bytes modulo 16, combined by "or". Raises
    RuntimeError if the config does not fit the device or cannot run this product.
    """
    (rows, cols, groups), width, weights = sizes, sum(widths), 1 if len(widths) == 1 else MOST_WEIGHTS
    copies = copy_size(alignment[0]), copy_size(alignment[1]), copy_size(alignment[2], 2 * cols)
    gpu, amax_of_all = gpu_of(device), cast is not None and bool(cast.format.global_scale)
    direct = can_be_direct(format, types[0], copies[2], cast)
    needs = Needs(rows, groups, can_use_wgmma(format, cols, groups, alignment), direct, amax_of_all)
    possible = partial(LaunchConfig.can_run, product=needs)
    busy, each = (1, rows) if groups == 0 else groups_with_rows(rows, groups)
    config = given or choose_config(device, format, each, busy * width, cols, rows, possible, cast is not None)
    tiles = [-(-n // config.rows) for n in widths] + [0] * (weights - len(widths))
    layout = layout_of(format, config, rows, sum(tiles) * config.rows, cols, gpu)
    if layout is None:
        raise RuntimeError(
            f"a product of {rows}x{width}x{cols} by {config} does not fit in the shared memory of this device "
            f"({gpu.memory} bytes per block)"
        )
    whole = cols % config.depth == 0 and not any(n % config.rows for n in widths)
    even = has_whole_chunks(format, cols, alignment, config.direct) if config.wgmma else whole
    if not possible(config):
        raise RuntimeError(
            f"{config} cannot run {width}x{cols} in {format}, {groups} groups, aligned to {copies} bytes; "
            "leave the config out to have one chosen"
        )
    classes = classes_of(format, config, rows)
    facts = facts_for(Facts(format, *types, *copies, even, cast, classes, weights), config)
    return Choice(config, layout, constants(facts, config), tuple(tiles))


@cache
def resolve(
    device: torch.device, format: Format, types: tuple[torch.dtype, torch.dtype, torch.dtype],
    sizes: tuple[int, int, int], widths: tuple[int, ...], alignment: tuple[int, int, int], cast: Cast | None,
    given: LaunchConfig | None,
) -> ResolvedLaunch:  # fmt: skip
    """The launch of what ``choose`` chooses. Raises what it raises."""
    config, layout, row, tiles = choose(device, format, types, sizes, widths, alignment, cast, given)
    (rows, _, groups), packed = sizes, argument_struct(len(tiles), config.direct)
    grid = config.split, not config.reduce_global
    kernel = nvrtc.function(device, KERNEL_SOURCES[config.kind], row, config.kind, packed, config.threads, *grid)
    blocks = min(sum(tiles), config.persistent * gpu_of(device).clusters_of(config.split)), 1
    if not config.persistent:
        blocks = sum(tiles), min(groups, rows) or -(-rows // config.cols)
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


def activation_steps(
    x: Tensor, format: Format, cast: Cast | None, config: LaunchConfig, scratch: Scratch, base: int
) -> list[KernelCall]:
    """The launches that write activations x (M, K) as the kernel of ``config`` reads them to the scratch memory at
    ``base``: cast, in float16, in the order in which codes of ``format`` are decoded, with the float32 scale of each
    row. They also set the counters to zero.

    The activations are rows (M, K rounded up), or for wgmma tiles of 64 columns. Padding rows are not initialized.
    """
    (rows, k), address, stride, width = x.shape, x.data_ptr(), x.stride(0), scratch.width
    kind = format.element, x.dtype, copy_size(address, 2 * stride, 2 * k), cast, config.cols if config.wgmma else 0
    scale = base + scratch.scale
    pointers = address, base, scale, base + scratch.counters if scratch.counted else 0, scale + 4 * rows
    blocks_per_row = -(-width // (8 * ACTIVATION_THREADS["activations"]))
    arguments = (*pointers, k, width, stride, rows, scratch.counted, scratch.maxima_blocks, blocks_per_row)
    grids = {"maxima": (scratch.maxima_blocks, 1), "activations": (rows, blocks_per_row)}
    names = ("maxima", "activations") if scratch.maxima_blocks else ("activations",)
    return [(_activations_kernel(x.device, name, *kind), grids[name], 4, arguments) for name in names]


# ---------------------------------------------------------------------------------------------- products


class Weight(NamedTuple):
    """One weight of a launch; several weights share the activations."""

    data: Tensor
    scale: Tensor
    global_scale: Tensor | None
    bias: Tensor | None


def _launch_once(
    x: Tensor, weights: Sequence[Weight], format: Format, cols: int, x_global: Tensor | None, ends: Tensor | None,
    alpha: float, beta: float, out_dtype: torch.dtype, cast: Cast | None, given: LaunchConfig | None,
) -> list[Tensor]:  # fmt: skip
    """The products with at most ``MOST_WEIGHTS`` weights, whose biases have one dtype, by one product kernel."""
    rows, groups = x.shape[0], 0 if ends is None else weights[0].data.shape[0]
    codes, scales, bias_dtype, widths = 0, 0, out_dtype, []
    for data, scale, _, bias in weights:
        *_, width, row_bytes = data.shape
        codes |= data.data_ptr() | row_bytes
        scales |= scale.data_ptr() | scale.shape[-1] * scale.element_size()
        widths.append(width)
        bias_dtype = bias_dtype if bias is None else bias.dtype
    alignment = codes & 15, scales & 15, (x.data_ptr() | 2 * x.stride()[0]) & 15
    types, sizes = (x.dtype, out_dtype, bias_dtype), (rows, cols, groups)
    resolved = resolve(x.device, format, types, sizes, tuple(widths), alignment, cast, given)
    results = [x.new_empty(rows, width, dtype=out_dtype) for width in widths]
    scratch, memory = None, None
    if resolved.config.converts:
        scratch = scratch_of(resolved.config, rows, x.shape[1], cast, resolved.blocks)
        memory = x.new_empty(scratch.bytes, dtype=torch.uint8)
    tensors = [x, memory, ends, x_global, *results, *(t for w in weights for t in w)]

    def steps(x: Any, memory: Any, ends: Any, x_global: Any, *rest: Any) -> list[KernelCall]:
        y, components = rest[: len(weights)], rest[len(weights) :]
        all_of = [Weight(*components[i : i + 4]) for i in range(0, len(components), 4)]
        return steps_of(x, all_of, y, format, cast, resolved, scratch, _address(memory), alpha, beta, ends, x_global)

    launch_steps(steps, tensors)
    return results


def _address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def steps_of(
    x: Tensor, weights: Sequence[Weight], results: Sequence[Tensor], format: Format, cast: Cast | None,
    resolved: ResolvedLaunch, scratch: Scratch | None, base: int, alpha: float = 1.0, beta: float = 1.0,
    ends: Tensor | None = None, x_global: Tensor | None = None,
) -> list[KernelCall]:  # fmt: skip
    """The launches of a product, in order; ``base``: the address of its scratch memory.

    The arguments of the product's kernel are in the order of ``WEIGHT`` and ``OTHERS``.
    """
    (data, scale, _, _), layout, first_tiles = weights[0], resolved.layout, resolved.first_tiles
    (*_, width, row_bytes), (*_, scale_rows, scale_cols) = data.shape, scale.shape
    scale_bytes = scale_cols * scale.element_size()
    out: list[Argument] = [map_of_tiles(x, resolved.config.cols)] if resolved.config.direct else []
    for w, y, first in zip(weights, results, first_tiles, strict=False):
        n, bias = w.data.shape[-2], w.bias
        out += (
            w.data.data_ptr(), w.scale.data_ptr(), y.data_ptr(), _address(w.global_scale), _address(bias), n, first,
            n if bias is not None and bias.dim() == 2 else 0,
        )  # fmt: skip
    out += (0, 0, 0, 0, 0, 0, first_tiles[-1], 0) * (len(first_tiles) - len(weights))  # unused weights
    before: list[KernelCall] = []
    values = (x.data_ptr(), 0, 0, 0, x.stride()[0])
    if scratch is not None:
        before = activation_steps(x, format, cast, resolved.config, scratch, base)
        sums = (base + scratch.partial_sums, base + scratch.counters) if scratch.counted else (0, 0)
        values = (base, base + scratch.scale, *sums, scratch.width)
    address, x_scale, partial_sums, counters, stride = values
    out += (
        _address(ends), width * row_bytes, scale_rows * scale_bytes, address, x_scale, _address(x_global),
        partial_sums, counters, row_bytes, scale_bytes, stride, *x.shape, 0 if ends is None else data.shape[0],
        layout.x_width, layout.round, *resolved.share, alpha, beta,
    )  # fmt: skip
    return [*before, (resolved.kernel, resolved.blocks, layout.bytes, out)]


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


Product = tuple[int, int, int, LaunchConfig, Cast | None]
"""(M, N, K), the config, and the cast of the activations."""


def kernels_of(device: torch.device, format: Format, products: Iterable[Product]) -> set[tuple[str, nvrtc.Constants]]:
    """(kind, constants) of the kernels of these bfloat16 products, each once; none for a config that does not fit."""
    half, found = (torch.bfloat16,) * 3, set()
    for m, n, k, config, cast in products:
        alignment = (k * format.element.bits // 8) & 15, (k // format.block[1]) & 15, 2 * k & 15
        try:
            chosen = choose(device, format, half, (m, k, 0), (n,), alignment, cast, config)
        except RuntimeError:  # it does not fit, and will not be launched either
            continue
        found.add((config.kind, chosen.constants))
    return found


def compile_all(format: Format, products: Iterable[Product]) -> int:
    """Compile the kernels of these products for the current CUDA device; how many there are."""
    kernels = kernels_of(torch.device("cuda", torch.cuda.current_device()), format, products)
    capability = torch.cuda.get_device_capability()
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda kernel: nvrtc.compiled(KERNEL_SOURCES[kernel[0]], kernel[1], capability), kernels))
    return len(kernels)
