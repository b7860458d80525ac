"""Launch configs: what a small-M kernel is compiled with, and whether a GPU has the shared memory and registers for it.

A ``LaunchConfig`` says how the threads of a block divide a product of few rows. ``Facts`` are the rest of what a kernel
is compiled for: format, dtypes and alignments. ``constants`` writes both as the macros that the sources in
``kernels/cuda/`` read. ``heuristics.py`` chooses a config for a shape.

``layout_of`` gives the bytes of shared memory that a launch asks for. Its sums are those of ``cuda/stages.cuh``
(pipelined), ``cuda/cluster_reduce.cuh`` (wgmma) and ``cuda/persistent.cu``; change both sides together.

Direct configs are wgmma kernels that read bfloat16 activations as they are, so that no kernel converts them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...numerics.cast import Cast
from ...numerics.formats import (
    E4M3,
    E5M2,
    E8M0,
    FP32,
    FP32_POW2,
    FULL,
    UE4M3,
    Format,
)
from ..runtime.cuda_driver import TensorMap
from ..runtime.nvrtc import ELEMENTS, RESERVED, TYPES, Constants, cast_constants

SCALES = {(E8M0, 32): "E8M0", (UE4M3, 16): "UE4M3", (FP32, 128): "FLOAT32", (FP32_POW2, 128): "FLOAT32",
          (FP32, FULL): "AT_THE_END", (FP32_POW2, FULL): "AT_THE_END"}  # fmt: skip
"""(scale, columns that share one) -> how the kernel applies it."""
MOST_WEIGHTS = 4
"""Weights that one launch takes at most. A kernel is compiled either for one weight or for this many, so that few
kernels serve all layers of a model: code that has not run for a while must be read from memory again."""


# ---------------------------------------------------------------------------------------------- launch configs

KINDS = ("pipelined", "wgmma", "persistent")
"""Kinds of kernels; ``cuda/{kind}.cu`` holds the kernel of that name."""


class Needs(NamedTuple):
    """What decides which configs can run a product."""

    rows: int
    """of activations"""
    groups: int
    """of rows; 0: none"""
    wgmma: bool
    """whether a wgmma kernel reads this weight: ``can_use_wgmma``"""
    direct: bool
    """whether one reads these activations as they are: ``can_be_direct``"""
    amax_of_all: bool
    """whether the cast of the activations needs the largest magnitude of all rows"""


class LaunchConfig(NamedTuple):
    """How a block of threads divides its work.

    Each field is a macro of the sources, by its name in capitals.
    """

    mt: int
    """tiles of 16 weight rows of each warp"""
    nt: int
    """tiles of 8 activation rows of each warp"""
    wr: int
    """warps of a block along the weight rows"""
    wk: int
    """warps of a block along K, the contraction; of a wgmma kernel, groups of warps along K"""
    slabs: int
    """slabs of 32 columns of one stage that a warp multiplies: 4 or 8; a persistent kernel also takes 16"""
    stages: int
    """stages in shared memory; of a wgmma kernel, tiles of activations (64 columns of K each)"""
    blocks: int
    """blocks that must fit on one multiprocessor; this limits the registers of a thread"""
    split: int
    """blocks that split K (split-K); they form a cluster unless ``reduce_global`` is set"""
    whole_x: bool
    """whether a block loads all activations into shared memory before the first stage, and casts them on the way"""
    wgmma: bool = False
    """whether the kernel uses the warpgroup matrix instruction of sm_90 (``wgmma``)"""
    ahead: int = 0
    """wgmma: chunks of 128 weight columns that each thread loads ahead; persistent: stages that a warp requests before
    the activations (0: as many as fit)"""
    persistent: int = 0
    """blocks per multiprocessor of a persistent kernel: each keeps the activations and takes a share of all weight
    rows, and each warp has its own stages. 0: not persistent, one block for each tile"""
    reduce_global: bool = False
    """whether the blocks that split K add their sums through global memory instead of through a cluster"""
    reduce_dsmem: bool = False
    """whether the blocks of a wgmma cluster send their sums through distributed shared memory by the copy engine;
    otherwise each block reads the sums of the others"""
    direct: bool = False
    """whether a wgmma kernel reads bfloat16 activations as they are and decodes codes to bfloat16, so that no kernel
    converts them"""

    @property
    def kind(self) -> str:
        """One of ``KINDS``."""
        return "persistent" if self.persistent else "wgmma" if self.wgmma else "pipelined"

    @property
    def converts(self) -> bool:
        """Whether another kernel converts the activations before."""
        return not (self.whole_x or self.direct)

    def can_run(self, product: Needs) -> bool:
        """Whether a kernel of this config exists and computes such a product."""
        if self.reduce_dsmem and (not self.wgmma or self.reduce_global or self.split < 2 or self.cols % self.split):
            return False
        if self.direct and not (self.wgmma and product.direct and not self.reduce_global):
            return False
        if self.wgmma:
            return product.wgmma and not self.whole_x
        if self.reduce_global or (self.persistent and product.groups):
            return False
        # The kernel finds the largest magnitude of its own rows only.
        return not (self.whole_x and product.amax_of_all) or not (product.groups or product.rows > self.cols)

    @property
    def threads(self) -> int:
        """Threads of a block; a wgmma kernel has four more warps, which load activations."""
        return 32 * (self.wr * self.wk + 4 * self.wgmma)

    @property
    def rows(self) -> int:
        """Weight rows of a tile."""
        return 16 * self.mt * (1 if self.persistent else self.wr)

    @property
    def cols(self) -> int:
        """Activation rows of a block."""
        return 8 * self.nt

    @property
    def depth(self) -> int:
        """Columns of K in a stage."""
        return 32 * self.slabs * (1 if self.persistent else self.wk)


FLAGS = frozenset({"whole_x", "wgmma", "reduce_global", "reduce_dsmem", "direct"})
"""Fields of a config that are True or False."""


def config_of(values: Sequence[int]) -> LaunchConfig:
    """A config from its fields as numbers, in order; missing last fields have their defaults."""
    fields = dict(zip(LaunchConfig._fields, values, strict=False))
    typed: dict[str, Any] = {name: bool(value) if name in FLAGS else value for name, value in fields.items()}
    return LaunchConfig(**typed)


# ---------------------------------------------------------------------------------------------- registers

REGISTER_FILE = 65536
"""32-bit registers of a multiprocessor."""
LEAST_REGISTERS = 24
"""The fewest registers that a thread can have."""


class Registers(NamedTuple):
    """Registers of each thread of a wgmma kernel."""

    at_start: int
    """of every thread when the kernel starts"""
    compute: int
    """of the threads that multiply, after the loading threads have released all but theirs"""
    load: int
    """of the threads that load activations"""


def registers(config: LaunchConfig) -> Registers:
    """How the registers of a multiprocessor are divided, in steps of 8."""
    at_start = REGISTER_FILE // config.blocks // config.threads // 8 * 8
    left = (at_start * config.threads - LEAST_REGISTERS * 128) // (config.threads - 128) // 8 * 8
    return Registers(min(at_start, 255), min(left, 240), LEAST_REGISTERS)


def registers_in_use(config: LaunchConfig, bits: int) -> int:
    """Registers of a thread that multiplies for its sums and for the codes of ``bits`` bits that it loads ahead."""
    return 4 * config.nt + 2 * config.ahead * bits


# ---------------------------------------------------------------------------------------------- facts


class Facts(NamedTuple):
    """What a kernel is compiled for beside its config."""

    format: Format
    x: torch.dtype
    result: torch.dtype
    bias: torch.dtype
    codes_copy: int
    """bytes of codes that one copy instruction moves; ``copy_size``"""
    scales_copy: int
    x_copy: int
    even: bool
    """whether the rows and columns of the weight are whole blocks and stages"""
    cast: Cast | None = None
    classes: int = 1
    """``classes_of`` the product"""
    weights: int = 1
    """weights of one launch: 1 or ``MOST_WEIGHTS``"""


def facts_for(facts: Facts, config: LaunchConfig) -> Facts:
    """The facts of a product as the kernel of this config sees them.

    Unless it reads them as they are, another kernel has cast the activations to float16 before.
    """
    return facts._replace(x=torch.float16, x_copy=16, cast=None) if config.converts else facts


def scale_bytes(format: Format, config: LaunchConfig) -> int:
    """Bytes of scales of one weight row in one stage."""
    kind = SCALES[format.scale, format.block[1]]
    return {"AT_THE_END": 0, "UE4M3": config.depth // 16}.get(kind, config.depth // 32)


def classes_of(format: Format, config: LaunchConfig, x_rows: int) -> int:
    """Weight blocks that one matrix instruction sums in separate columns (``cuda/small_m_mma.cuh``).

    Up to four activation rows leave columns of the instruction free. E5M2 has infinities, which would be multiplied by
    the zeros of the other blocks, so it has one class.
    """
    in_blocks = SCALES[format.scale, format.block[1]] in ("E8M0", "UE4M3")
    if not in_blocks or not config.persistent or config.nt > 1 or x_rows > 4 or format.element is E5M2:
        return 1
    return min(8 // next(r for r in (1, 2, 4) if r >= x_rows), config.depth // format.block[1])


def has_whole_chunks(format: Format, k: int, alignment: Sequence[int], direct: bool = False) -> bool:
    """Whether each row is whole chunks of 128 columns, with scales that a thread of a wgmma kernel loads at once."""
    kind = SCALES[format.scale, format.block[1]]
    size = {"UE4M3": 4 if direct else 2, "E8M0": 4 if direct or format.element.bits == 8 else 1}.get(kind, 1)
    return k % 128 == 0 and alignment[1] % size == 0


def can_use_wgmma(format: Format, k: int, groups: int, alignment: Sequence[int]) -> bool:
    """Whether a wgmma kernel can run: no groups, rows of codes aligned to 16 bytes, no scales of 128 columns.

    ``alignment``: of codes and scales, address and row stride in bytes modulo 16, combined by "or". A thread has whole
    pieces of codes or none, so that K in whole pieces follows from the alignment of the rows.
    """
    if groups or SCALES[format.scale, format.block[1]] == "FLOAT32":
        return False
    piece = {8: 16, 6: 64, 4: 32}[format.element.bits]
    return alignment[0] % 16 == 0 and k % piece == 0


# ---------------------------------------------------------------------------------------------- swizzles

SWIZZLES = {
    (8, 8): (0, 3, 2), (8, 16): (0, 1, 4), (8, 32): (0, 1, 1),
    (6, 8): (0, 3, 2), (6, 16): (0, 7, 1), (6, 32): (0, 3, 2),
    (4, 8): (0, 7, 1), (4, 16): (0, 3, 2), (4, 32): (0, 1, 4),
}  # fmt: skip
"""(element bits, codes per read) -> (shift, mask, pieces): how codes are swizzled in shared memory.

Row r stores its 16-byte pieces at index xor ``(r >> shift & mask) * pieces``. So the reads of a warp have no bank
conflicts, except 6-bit codes read 8 at a time, which have two-way conflicts."""
NARROW_SWIZZLES = {
    (6, 8, 128): (0, 0, 1), (6, 16, 128): (2, 1, 1), (6, 32, 128): (0, 0, 1),
    (6, 8, 256): (1, 1, 2), (6, 16, 256): (1, 3, 1), (6, 32, 256): (1, 1, 2),
    (4, 8, 128): (1, 3, 1), (4, 16, 128): (1, 1, 2), (4, 32, 128): (0, 0, 1),
}  # fmt: skip
"""The same with the columns of a stage as third key, for stages that are too narrow for ``SWIZZLES``."""


def codes_per_read(format: Format, classes: int) -> int:
    """Consecutive codes of a row that a thread reads before it multiplies them."""
    return 8 if classes == 1 else min(32, format.block[1] * classes // 4)


def swizzle_of_codes(format: Format, classes: int, depth: int) -> tuple[int, int, int]:
    """The swizzle of a stage of ``depth`` columns: see ``SWIZZLES``."""
    case = format.element.bits, codes_per_read(format, classes)
    return NARROW_SWIZZLES.get((*case, depth)) or SWIZZLES[case]


# ---------------------------------------------------------------------------------------------- macros


def wgmma_constants(config: LaunchConfig) -> Constants:
    """Macros of a wgmma kernel: the text and the sums of its matrix instruction (``cuda/machine_sm90.cuh``), and the
    division of the registers."""
    cols, per_thread = config.cols, registers(config)
    sums = ", ".join(f"%{i}" for i in range(cols // 2))
    left = ", ".join(f"%{cols // 2 + i}" for i in range(4))
    right = f"%{cols // 2 + 4}"
    types = "f32.bf16.bf16" if config.direct else "f32.f16.f16"
    text = f"wgmma.mma_async.sync.aligned.m64n{cols}k16.{types} {{{sums}}}, {{{left}}}, {right}, 1, 1, 1, 0;"
    return (
        ("WGMMA_TEXT", f'"{text}"'),
        ("WGMMA_SUMS(d)", ", ".join(f'"+f"(d[{i // 4}][{i % 4}])' for i in range(cols // 2))),
        ("REGISTERS_AT_START", per_thread.at_start),
        ("REGISTERS_COMPUTE", per_thread.compute),
        ("REGISTERS_LOAD", per_thread.load),
    )


def constants(facts: Facts, config: LaunchConfig) -> Constants:
    """Facts and config as macros of the sources."""
    f, rows = facts.format, facts.format.block[0]
    swizzle = swizzle_of_codes(f, facts.classes, config.depth)
    return (
        *(wgmma_constants(config) if config.wgmma else ()),
        ("ELEMENT", ELEMENTS[f.element]),
        ("SCALE", SCALES[f.scale, f.block[1]]),
        ("BLOCK_ROWS", 0 if rows == FULL else rows),
        ("X", TYPES[facts.x]),
        ("RESULT", TYPES[facts.result]),
        ("BIAS", TYPES[facts.bias]),
        ("CODES_COPY", facts.codes_copy),
        ("SCALES_COPY", min(facts.scales_copy, scale_bytes(f, config) or 1)),
        ("X_COPY", facts.x_copy),
        ("WHOLE_TILES", int(facts.even)),
        ("CLASSES", facts.classes),
        ("WEIGHTS", facts.weights),
        *zip(("SWIZZLE_SHIFT", "SWIZZLE_MASK", "SWIZZLE_PIECES"), swizzle, strict=True),
        ("TILE_ROWS", config.cols if config.wgmma else 0),
        *cast_constants(facts.cast),
        *zip(map(str.upper, LaunchConfig._fields), map(int, config), strict=True),
    )  # fmt: skip


class Gpu(NamedTuple):
    """Limits of a GPU that a config must fit."""

    capability: tuple[int, int]
    memory: int
    """bytes of shared memory that one block can have"""
    multiprocessors: int
    clusters: Mapping[int, int]
    """blocks of a cluster -> clusters that run at a time, with one block per multiprocessor"""
    name: str = ""
    """the name under which ``mx.tune`` keeps what it measured"""

    def clusters_of(self, blocks: int) -> int:
        """Clusters of ``blocks`` blocks that run at a time, with one block per multiprocessor."""
        return self.clusters.get(blocks, self.multiprocessors // blocks)


class SharedMemoryLayout(NamedTuple):
    """Shared memory of one block, as its launch needs it."""

    bytes: int
    x_width: int = 0
    """persistent: columns of the activations that a block stores"""
    round: int = 0
    """persistent: weight tiles whose sums a block stores before it writes them"""


def stage_bytes(format: Format, config: LaunchConfig) -> int:
    """Bytes of one stage: codes, scales, and activations unless these are stored whole (``cuda/stages.cuh``)."""
    per_row = scale_bytes(format, config)
    codes = config.depth * format.element.bits // 8
    scales = -(-per_row // 4) * 4 if config.persistent else -(-per_row // 16) * 16 + 16 if per_row else 0
    x = 0 if config.whole_x or config.persistent else config.cols * (2 * config.depth + 64)
    return -(-(config.rows * (codes + scales) + x) // 128) * 128


def wgmma_bytes(config: LaunchConfig) -> int:
    """Bytes of a block of a wgmma kernel: activation tiles (later sums), barriers, and scales of activation rows."""
    tiles, sums = config.wk * config.stages * config.cols * 128, 4 * config.cols * (config.rows + 4)  # 64 float16 a row
    others = (config.wk - 1) * config.nt * config.wr * 32 * 16
    bytes = max(tiles, sums + others) + 8 * (config.wk * (2 * config.stages + 1) + 1) + 4 * config.cols + 4
    return -(-bytes // 16) * 16 + (config.split - 1) * sums // config.split if config.reduce_dsmem else bytes


def pipelined_bytes(format: Format, config: LaunchConfig, x_rows: int, k: int) -> int:
    """Bytes of a block of a pipelined kernel: stages (later sums), and all activations with ``whole_x``."""
    stages = -(-k // config.depth)
    ring = max(config.stages * stage_bytes(format, config), 4 * config.wk * config.rows * (config.cols + 2))
    if not config.whole_x:
        return ring
    most = max((r + 1) * stages // config.split - r * stages // config.split for r in range(config.split))
    return ring + 8 * config.cols + min(x_rows, config.cols) * (2 * most * config.depth + 64)


def persistent_layout(
    format: Format, config: LaunchConfig, x_rows: int, n: int, k: int, gpu: Gpu
) -> SharedMemoryLayout | None:
    """The layout of ``cuda/persistent.cu``, with the sums of as many weight tiles as fit; None if not even one fits."""
    tiles, stages, at_a_time = (
        -(-n // config.rows),
        -(-k // config.depth),
        config.persistent * gpu.clusters_of(config.split),
    )
    if at_a_time == 0:
        return None
    most = -(-tiles // min(at_a_time, tiles))
    stages_per_block = -(-stages // config.split)
    x_width = -(-stages_per_block * config.depth // 256) * 256
    classes = classes_of(format, config, x_rows)
    bytes = config.wr * config.wk * config.stages * stage_bytes(format, config) + 16 + 8 * config.cols
    bytes += 4 * config.cols * config.wk * config.whole_x
    bytes += x_rows * (2 * x_width + 64) + (2 * config.depth + 16) * (classes > 1)
    per_tile = 4 * config.wk * x_rows * (config.rows + 4)
    memory = min(gpu.memory, (gpu.memory + RESERVED) // config.blocks - RESERVED)
    fits = min(-(-most // config.wr), (memory - bytes) // (per_tile * config.wr))  # times wr tiles
    if x_rows > config.cols or fits < 1:
        return None
    round = -(-most // (-(-most // (fits * config.wr)) * config.wr)) * config.wr
    bytes += round * per_tile
    if not config.whole_x:  # fill the multiprocessor, so that no block of the next product starts beside this one
        bytes = max(bytes, ((gpu.memory + RESERVED) // (config.persistent + 1) - RESERVED) // 16 * 16 + 16)
    return SharedMemoryLayout(bytes, x_width, round)


def layout_of(format: Format, config: LaunchConfig, x_rows: int, n: int, k: int, gpu: Gpu) -> SharedMemoryLayout | None:
    """The shared memory of a block for a product of these sizes; None if ``gpu`` cannot run it with this config."""
    if config.split > (-(-k // 128) // config.wk if config.wgmma else -(-k // config.depth)):
        return None
    if config.persistent:
        return persistent_layout(format, config, x_rows, n, k, gpu)
    if not config.reduce_global and gpu.clusters.get(config.split) == 0:
        return None
    bytes = wgmma_bytes(config) if config.wgmma else pipelined_bytes(format, config, x_rows, k)
    return SharedMemoryLayout(bytes) if bytes <= gpu.memory else None


OTHER_REGISTERS = 72
"""Registers of a thread that multiplies, beside its sums and the codes that it loads ahead: with fewer some spill."""


def can_be_direct(format: Format, x: torch.dtype, x_copy: int, cast: Cast | None) -> bool:
    """Whether a wgmma kernel can read these activations as they are: bfloat16 without a cast, rows of whole pieces of
    16 bytes at multiples of 16 bytes (``x_copy``: the most bytes that one copy can move).

    NaNs among codes are looked for only where scales can be applied to sums, which NVFP4's are not.
    """
    special = format.element in (E4M3, E5M2) and format.scale is UE4M3
    return x is torch.bfloat16 and x_copy == 16 and cast is None and not special


def map_of_tiles(x: Tensor, cols: int) -> TensorMap:
    """The tensor map of x (M, K), of which ``cuda/x_tiles.cuh`` copies tiles of ``cols`` rows by 64 columns."""
    rows, k = x.shape
    return TensorMap(x.data_ptr(), (k, rows), 2 * (x.stride(0) if rows > 1 else k), (64, cols))


def has_registers(format: Format, config: LaunchConfig) -> bool:
    """Whether the threads of a direct config have enough registers."""
    return registers_in_use(config, format.element.bits) + OTHER_REGISTERS <= registers(config).compute
