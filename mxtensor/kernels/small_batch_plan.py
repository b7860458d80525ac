"""How a product of few rows is cut up: what its kernel is compiled with, and which cut goes with which shape."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..formats import E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, FP32, FP32_POW2, FULL, INT8, UE4M3, ElementFormat, Format
from ..roles import Cast
from .nvrtc import Constants

ELEMENTS: dict[ElementFormat, str] = {
    E4M3: "E4M3", E5M2: "E5M2", E3M2: "E3M2", E2M3: "E2M3", E2M1: "E2M1", INT8: "INT8",
}  # fmt: skip
SCALES = {(E8M0, 32): "E8M0", (UE4M3, 16): "UE4M3", (FP32, 128): "FLOAT32", (FP32_POW2, 128): "FLOAT32",
          (FP32, FULL): "AT_THE_END", (FP32_POW2, FULL): "AT_THE_END"}  # fmt: skip
"""Scale and columns that share one -> how the kernel takes it."""
TYPES = {torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16", torch.float32: "FLOAT"}


class Plan(NamedTuple):
    """A block of threads and what it makes: see ``cuda/product.cu``."""

    mt: int
    """16 rows of the weight, so many times, a warp"""
    nt: int
    """8 rows of activations, so many times"""
    wr: int
    """rows of warps"""
    wk: int
    """warps that share the columns of a stage"""
    slabs: int
    """of 32 columns of a stage, a warp: 4 or 8"""
    stages: int
    blocks: int
    """that shall fit into one multiprocessor: what bounds the registers of a thread"""
    split: int
    """blocks that share the columns of the product: a cluster"""
    whole_x: bool
    """whether all activations are brought into shared memory before the first stage, cast on the way"""
    together: bool = False
    """whether four warps multiply together, by the matrix instructions of sm_90 that run beside them"""
    ahead: bool = False
    """whether they begin the products of a slab before those of the one before are added up"""

    @property
    def threads(self) -> int:
        return 32 * self.wr * self.wk

    @property
    def rows(self) -> int:
        """Of the weight, a block."""
        return 16 * self.mt * self.wr

    @property
    def cols(self) -> int:
        """Rows of activations a block."""
        return 8 * self.nt

    @property
    def depth(self) -> int:
        """Columns of the contraction, a stage."""
        return 32 * self.slabs * self.wk


PLAN = ("MT", "NT", "WR", "WK", "SLABS", "STAGES", "BLOCKS", "SPLIT", "WHOLE_X", "SPREAD", "AHEAD")
"""The fields of a plan as the sources name them."""


class Facts(NamedTuple):
    """What the kernel is compiled for, beside the plan."""

    format: Format
    x: torch.dtype
    result: torch.dtype
    bias: torch.dtype
    codes_copy: int
    scales_copy: int
    x_copy: int
    even: bool
    """whether rows and columns of the weight are whole blocks and stages"""
    cast: Cast | None = None


def cast_constants(cast: Cast | None) -> Constants:
    """The rounding of activations: to an element under power-of-two scales of 32, or to nvfp4."""
    if cast is None:
        return (("CAST", 0),)
    e = cast.format.element
    return (
        ("CAST", 1 if cast.format.scale is E8M0 else 2),
        ("CAST_GLOBAL", int(cast.format.global_scale)),
        ("CAST_RULE", cast.scaling.name),
        ("CAST_INVERSE_MAX", f"{float(torch.tensor(1.0 / e.max, dtype=torch.float32)).hex()}f"),
        ("CAST_MAX", f"{e.max.hex()}f"),
        ("CAST_EMAX", e.emax),
        ("CAST_MANTISSA", e.mantissa_bits),
        ("CAST_EMIN", f"({0 if e.is_integer else 1 - e.bias})"),
    )


def constants(facts: Facts, plan: Plan) -> Constants:
    """Facts and plan as the sources name them."""
    f, rows = facts.format, facts.format.block[0]
    return (
        ("ELEMENT", ELEMENTS[f.element]),
        ("SCALE", SCALES[f.scale, f.block[1]]),
        ("BLOCK_ROWS", 0 if rows == FULL else rows),
        ("X", TYPES[facts.x]),
        ("RESULT", TYPES[facts.result]),
        ("BIAS", TYPES[facts.bias]),
        ("CODES_COPY", facts.codes_copy),
        ("SCALES_COPY", min(facts.scales_copy, scale_bytes(f, plan) or 1)),
        ("X_COPY", facts.x_copy),
        ("WHOLE_TILES", int(facts.even)),
        *cast_constants(facts.cast),
        *zip(PLAN, map(int, plan), strict=True),
    )  # fmt: skip


def scale_bytes(format: Format, plan: Plan) -> int:
    """Of a row of the weight and a stage."""
    kind = SCALES[format.scale, format.block[1]]
    return {"AT_THE_END": 0, "UE4M3": plan.depth // 16}.get(kind, plan.depth // 32)


def shared_memory(format: Format, plan: Plan, x_rows: int, k: int) -> int:
    """Bytes of shared memory of a block, as ``cuda/product.cu`` lays them out."""
    bits, per_row = format.element.bits, scale_bytes(format, plan)
    codes = plan.depth * bits // 8 + (32 if bits == 8 else 16)
    scales = -(-per_row // 16) * 16 + 16 if per_row else 0
    x = 0 if plan.whole_x else plan.cols * (2 * plan.depth + (0 if plan.together else 64))
    align = 1024 if plan.together else 16
    stage = -(-(plan.rows * (codes + scales) + x) // align) * align
    stages = -(-k // plan.depth)
    sums = 4 * plan.wk * plan.rows * (plan.cols + 2)
    if not plan.whole_x:
        return max(plan.stages * stage, sums)
    most = max((r + 1) * stages // plan.split - r * stages // plan.split for r in range(plan.split))
    return max(plan.stages * stage, sums) + 8 * plan.cols + min(x_rows, plan.cols) * (2 * most * plan.depth + 64)


def copy_size(address: int, *strides: int) -> int:
    """The largest piece, of 16 bytes at most, in which rows of so many bytes from an address on can be read."""
    bits = 16 | address
    for stride in strides:
        bits |= stride
    return bits & -bits
