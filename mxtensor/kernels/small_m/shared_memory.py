"""What a block has in shared memory for a product of few rows, as the sources lay it out, and whether there is room."""

from __future__ import annotations

from typing import NamedTuple

from ...numerics.formats import Format
from .config import RESERVED, Gpu, Plan, classes_of, scale_bytes


class Room(NamedTuple):
    """What of a product a block has in shared memory at a time."""

    bytes: int
    x_width: int = 0
    """columns of the activations that stay, of a resident plan"""
    round: int = 0
    """tiles of the weight whose sums are kept, of a resident plan"""


def stage_bytes(format: Format, plan: Plan) -> int:
    """Of the codes and scales of a stage, with activations where these come along, as ``cuda/stages.cuh`` has it."""
    per_row = scale_bytes(format, plan)
    codes = plan.depth * format.element.bits // 8
    scales = -(-per_row // 4) * 4 if plan.resident else -(-per_row // 16) * 16 + 16 if per_row else 0
    x = 0 if plan.whole_x or plan.resident else plan.cols * (2 * plan.depth + 64)
    return -(-(plan.rows * (codes + scales) + x) // 128) * 128


def shared_memory(format: Format, plan: Plan, x_rows: int, k: int) -> int:
    """Bytes of shared memory of a block, as ``cuda/product.cu`` or ``cuda/together.cu`` lays them out."""
    if plan.together:
        tiles, sums = plan.wk * plan.stages * plan.cols * 128, 4 * plan.cols * (plan.rows + 4)  # 64 float16 a row
        others = (plan.wk - 1) * plan.nt * plan.wr * 32 * 16
        bytes = max(tiles, sums + others) + 8 * (plan.wk * (2 * plan.stages + 1) + 1) + 4 * plan.cols + 4
        return -(-bytes // 16) * 16 + (plan.split - 1) * sums // plan.split if plan.sends else bytes
    stages = -(-k // plan.depth)
    ring = max(plan.stages * stage_bytes(format, plan), 4 * plan.wk * plan.rows * (plan.cols + 2))
    if not plan.whole_x:
        return ring
    most = max((r + 1) * stages // plan.split - r * stages // plan.split for r in range(plan.split))
    return ring + 8 * plan.cols + min(x_rows, plan.cols) * (2 * most * plan.depth + 64)


def resident_room(format: Format, plan: Plan, x_rows: int, n: int, k: int, gpu: Gpu) -> Room | None:
    """What a block holds as ``cuda/resident.cu`` lays it out: sums of as many tiles as there is room for."""
    tiles, stages, at_a_time = -(-n // plan.rows), -(-k // plan.depth), clusters(plan, gpu)
    if at_a_time == 0:
        return None
    most = -(-tiles // min(at_a_time, tiles))
    of_a_block = -(-stages // plan.split)
    x_width = -(-of_a_block * plan.depth // 256) * 256
    classes = classes_of(format, plan, x_rows)
    bytes = plan.wr * plan.wk * plan.stages * stage_bytes(format, plan) + 16 + 8 * plan.cols
    bytes += 4 * plan.cols * plan.wk * plan.whole_x
    bytes += x_rows * (2 * x_width + 64) + (2 * plan.depth + 16) * (classes > 1)
    of_a_tile = 4 * plan.wk * x_rows * (plan.rows + 4)
    memory = min(gpu.memory, (gpu.memory + RESERVED) // plan.blocks - RESERVED)
    fits = min(-(-most // plan.wr), (memory - bytes) // (of_a_tile * plan.wr))  # times wr tiles
    if x_rows > plan.cols or fits < 1:
        return None
    round = -(-most // (-(-most // (fits * plan.wr)) * plan.wr)) * plan.wr
    bytes += round * of_a_tile
    if not plan.whole_x:  # no room for another: those of the next product would crowd
        bytes = max(bytes, ((gpu.memory + RESERVED) // (plan.resident + 1) - RESERVED) // 16 * 16 + 16)
    return Room(bytes, x_width, round)


def clusters(plan: Plan, gpu: Gpu) -> int:
    """How many clusters of a resident plan run at a time."""
    return plan.resident * gpu.clusters.get(plan.split, gpu.multiprocessors // plan.split)


def room_of(format: Format, plan: Plan, x_rows: int, n: int, k: int, gpu: Gpu) -> Room | None:
    """What of a product a block of this plan holds at a time, if ``gpu`` has as much memory for it."""
    if plan.split > (k // plan.depth if plan.together else -(-k // plan.depth)):
        return None
    if plan.resident:
        return resident_room(format, plan, x_rows, n, k, gpu)
    if not plan.apart and gpu.clusters.get(plan.split) == 0:
        return None
    bytes = shared_memory(format, plan, x_rows, k)
    return Room(bytes) if bytes <= gpu.memory else None
