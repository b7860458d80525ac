"""The shared memory of a block: how the sources lay it out, and whether a GPU has enough.

``layout_of`` gives the bytes that a launch asks for. The sums here are those of ``cuda/stages.cuh`` (pipelined),
``cuda/cluster_reduce.cuh`` (wgmma) and ``cuda/persistent.cu``; change both sides together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ...numerics.formats import Format
from ..runtime.cuda_macros import RESERVED
from .config import LaunchConfig, classes_of, scale_bytes


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


def clusters(config: LaunchConfig, gpu: Gpu) -> int:
    """Clusters of a persistent kernel that run at a time."""
    return config.persistent * gpu.clusters_of(config.split)


def persistent_layout(
    format: Format, config: LaunchConfig, x_rows: int, n: int, k: int, gpu: Gpu
) -> SharedMemoryLayout | None:
    """The layout of ``cuda/persistent.cu``, with the sums of as many weight tiles as fit; None if not even one fits."""
    tiles, stages, at_a_time = -(-n // config.rows), -(-k // config.depth), clusters(config, gpu)
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
