"""How a product of few rows is cut up: what its kernel is compiled with, and which cut goes with which shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ...numerics.cast import Cast
from ...numerics.formats import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    E8M0,
    FP32,
    FP32_POW2,
    FULL,
    INT8,
    UE4M3,
    ElementFormat,
    Format,
)
from ..runtime.nvrtc import Constants

ELEMENTS: dict[ElementFormat, str] = {
    E4M3: "E4M3", E5M2: "E5M2", E3M2: "E3M2", E2M3: "E2M3", E2M1: "E2M1", INT8: "INT8",
}  # fmt: skip
SCALES = {(E8M0, 32): "E8M0", (UE4M3, 16): "UE4M3", (FP32, 128): "FLOAT32", (FP32_POW2, 128): "FLOAT32",
          (FP32, FULL): "AT_THE_END", (FP32_POW2, FULL): "AT_THE_END"}  # fmt: skip
"""Scale and columns that share one -> how the kernel takes it."""
TYPES = {torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16", torch.float32: "FLOAT"}


KINDS = ("staged", "together", "resident")
"""Of plans: blocks that fetch stages together, four warps that multiply together, blocks that keep the activations."""


class Plan(NamedTuple):
    """A block of threads and what it makes: see ``cuda/product.cu``."""

    mt: int
    """16 rows of the weight, so many times, a warp"""
    nt: int
    """8 rows of activations, so many times"""
    wr: int
    """rows of warps"""
    wk: int
    """warps that share the columns of a stage, or where four multiply together, groups of warps that do a block's"""
    slabs: int
    """of 32 columns of a stage, a warp: 4, 8, or 16 where it has stages of its own"""
    stages: int
    """that a block has in shared memory, or where four warps multiply together, tiles of activations: half a chunk"""
    blocks: int
    """that shall fit into one multiprocessor: what bounds the registers of a thread"""
    split: int
    """blocks that share the columns of the product: a cluster, if they are not apart"""
    whole_x: bool
    """whether all activations are brought into shared memory before the first stage, cast on the way"""
    together: bool = False
    """whether four warps multiply together, by the matrix instructions of sm_90 that run beside them"""
    ahead: int = 0
    """where they do: chunks of 128 columns of the weight that each thread has under way; of a resident plan: stages
    that are asked for before the activations are, which come after them (0: all there is room for)"""
    resident: int = 0
    """how many blocks, of each multiprocessor, keep the activations and have a share of all rows of the weight, each
    warp with stages of its own; 0: blocks that share their stages, one for each tile"""

    apart: bool = False
    """whether blocks that share the columns bring their sums together in memory, not as a cluster"""
    sends: bool = False
    """whether warps that multiply together send their sums to the other blocks of a cluster, which else read them"""

    @property
    def kind(self) -> str:
        """One of ``KINDS``."""
        return "resident" if self.resident else "together" if self.together else "staged"

    @property
    def threads(self) -> int:
        """Of a block; where four warps multiply together, four more bring activations."""
        return 32 * (self.wr * self.wk + 4 * self.together)

    @property
    def rows(self) -> int:
        """Of the weight, a block."""
        return 16 * self.mt * (1 if self.resident else self.wr)

    @property
    def cols(self) -> int:
        """Rows of activations a block."""
        return 8 * self.nt

    @property
    def depth(self) -> int:
        """Columns of the contraction, a stage."""
        return 32 * self.slabs * (1 if self.resident else self.wk)


def plan_of(values: Sequence[int]) -> Plan:
    """A plan from its fields as numbers; those that are left out are as in most plans."""
    kinds = Plan.__annotations__.items()
    fields = {name: bool(v) if kind in (bool, "bool") else v for v, (name, kind) in zip(values, kinds, strict=False)}
    return Plan(**fields)  # type: ignore[arg-type]


PLAN = ("MT", "NT", "WR", "WK", "SLABS", "STAGES", "BLOCKS", "SPLIT", "WHOLE_X", "TOGETHER", "AHEAD", "RESIDENT",
        "APART", "SENDS")  # fmt: skip
"""The fields of a plan as the sources name them."""


LEAST_REGISTERS = 24
"""That a thread can have."""


class Registers(NamedTuple):
    """Of each thread of a plan whose warps multiply together."""

    at_first: int
    """as many as all threads can have"""
    multiplying: int
    """of those that multiply, once the others have kept the least"""


def registers(plan: Plan) -> Registers:
    """How a multiprocessor's 65536 are shared out, in steps of 8."""
    at_first = 65536 // plan.blocks // plan.threads // 8 * 8
    left = (at_first * plan.threads - LEAST_REGISTERS * 128) // (plan.threads - 128) // 8 * 8
    return Registers(min(at_first, 255), min(left, 240))


class Gpu(NamedTuple):
    """What a plan has to fit."""

    capability: tuple[int, int]
    memory: int
    """bytes of shared memory that a block can have"""
    multiprocessors: int
    clusters: Mapping[int, int]
    """blocks of a cluster -> how many such clusters it runs at a time, one block a multiprocessor"""


MOST_WEIGHTS = 4
"""That one launch takes. A kernel is compiled for one or for so many, so that few kernels make all layers of a model:
code that has not run for a while has to come from memory."""
RESERVED = 1024
"""Bytes of shared memory that the system takes of each block."""


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
    classes: int = 1
    """``classes_of`` the product"""
    weights: int = 1
    """that one launch takes: one, or ``MOST_WEIGHTS``"""


def cast_constants(cast: Cast | None) -> Constants:
    """The rounding of activations: to an element under power-of-two scales of 32, or to nvfp4."""
    if cast is None:
        return (("CAST", 0),)
    e = cast.format.element
    inverse = torch.tensor(1.0 / e.max, dtype=torch.float32, device="cpu")
    return (
        ("CAST", 1 if cast.format.scale is E8M0 else 2),
        ("CAST_GLOBAL", int(cast.format.global_scale)),
        ("CAST_RULE", cast.scaling.name),
        ("CAST_INVERSE_MAX", f"{float(inverse).hex()}f"),
        ("CAST_MAX", f"{e.max.hex()}f"),
        ("CAST_EMAX", e.emax),
        ("CAST_MANTISSA", e.mantissa_bits),
        ("CAST_EMIN", f"({0 if e.is_integer else 1 - e.bias})"),
    )


def constants(facts: Facts, plan: Plan) -> Constants:
    """Facts and plan as the sources name them."""
    f, rows = facts.format, facts.format.block[0]
    return (
        *(group_constants(plan) if plan.together else ()),
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
        ("CLASSES", facts.classes),
        ("WEIGHTS", facts.weights),
        *zip(("TURN_SHIFT", "TURN_MASK", "TURN_PIECES"), turn_of_codes(f, facts.classes, plan.depth), strict=True),
        ("TILES", plan.cols if plan.together else 0),
        *cast_constants(facts.cast),
        *zip(PLAN, map(int, plan), strict=True),
    )  # fmt: skip


def group_constants(plan: Plan) -> Constants:
    """Where warps multiply together: the matrix instruction of four, as ``machine.cuh`` takes it, its text and its
    sums; and how threads share the registers."""
    cols, held = plan.cols, registers(plan)
    sums = ", ".join(f"%{i}" for i in range(cols // 2))
    left = ", ".join(f"%{cols // 2 + i}" for i in range(4))
    right = f"%{cols // 2 + 4}"
    text = f"wgmma.mma_async.sync.aligned.m64n{cols}k16.f32.f16.f16 {{{sums}}}, {{{left}}}, {right}, 1, 1, 1, 0;"
    return (
        ("GROUP_TEXT", f'"{text}"'),
        ("GROUP_SUMS(d)", ", ".join(f'"+f"(d[{i // 4}][{i % 4}])' for i in range(cols // 2))),
        ("AT_FIRST", held.at_first),
        ("REGISTERS", held.multiplying),
        ("LEAST_REGISTERS", LEAST_REGISTERS),
    )


def scale_bytes(format: Format, plan: Plan) -> int:
    """Of a row of the weight and a stage."""
    kind = SCALES[format.scale, format.block[1]]
    return {"AT_THE_END": 0, "UE4M3": plan.depth // 16}.get(kind, plan.depth // 32)


def classes_of(format: Format, plan: Plan, x_rows: int) -> int:
    """Blocks of the weight that are summed in one go, for so many rows of activations: see ``cuda/spread.cuh``.

    An infinity among the codes would meet the zeros of other blocks there.
    """
    in_blocks = SCALES[format.scale, format.block[1]] in ("E8M0", "UE4M3")
    if not in_blocks or not plan.resident or plan.nt > 1 or x_rows > 4 or format.element is E5M2:
        return 1
    return min(8 // next(r for r in (1, 2, 4) if r >= x_rows), plan.depth // format.block[1])


TURNS = {
    (8, 8): (0, 3, 2), (8, 16): (0, 1, 4), (8, 32): (0, 1, 1),
    (6, 8): (0, 3, 2), (6, 16): (0, 7, 1), (6, 32): (0, 3, 2),
    (4, 8): (0, 7, 1), (4, 16): (0, 3, 2), (4, 32): (0, 1, 4),
}  # fmt: skip
"""Bits of an element, codes that a thread reads in one go -> how pieces of 16 bytes change places in a row of codes:
row r has them xor (r >> first & second) * third, so that no two reads meet in a bank, but of 6 bits, 8 at a time,
two"""
NARROW_TURNS = {
    (6, 8, 128): (0, 0, 1), (6, 16, 128): (2, 1, 1), (6, 32, 128): (0, 0, 1),
    (6, 8, 256): (1, 1, 2), (6, 16, 256): (1, 3, 1), (6, 32, 256): (1, 1, 2),
    (4, 8, 128): (1, 3, 1), (4, 16, 128): (1, 1, 2), (4, 32, 128): (0, 0, 1),
}  # fmt: skip
"""The same of stages with so few columns."""


def codes_a_read(format: Format, classes: int) -> int:
    """Of a row, one after the other, that a thread reads before it multiplies them."""
    return 8 if classes == 1 else min(32, format.block[1] * classes // 4)


def turn_of_codes(format: Format, classes: int, depth: int) -> tuple[int, int, int]:
    """Of the rows of a stage of ``depth`` columns in shared memory: see ``TURNS``."""
    case = format.element.bits, codes_a_read(format, classes)
    return NARROW_TURNS.get((*case, depth)) or TURNS[case]


ALIGNED = {8: (16, 4), 6: (16, 1), 4: (16, 1)}
"""Bits of an element -> the bytes of codes and of scales that are read at a time where warps multiply together."""


def can_multiply_together(format: Format, k: int, groups: int, lie: Sequence[int]) -> bool:
    """Whether four warps may: whole chunks of columns. ``lie`` as for ``cut``."""
    kind, (codes, scales) = SCALES[format.scale, format.block[1]], ALIGNED[format.element.bits]
    if groups or k % 128 or kind == "FLOAT32":
        return False
    return lie[0] % codes == 0 and (kind == "AT_THE_END" or lie[1] % (2 if kind == "UE4M3" else scales) == 0)


def as_taken(facts: Facts, plan: Plan) -> Facts:
    """Facts of a product as the kernel of this plan takes them, which another one may prepare its activations for."""
    return facts if plan.whole_x else facts._replace(x=torch.float16, x_copy=16, cast=None)


def copy_size(address: int, *strides: int) -> int:
    """The largest piece, of 16 bytes at most, in which rows of so many bytes from an address on can be read."""
    bits = 16 | address
    for stride in strides:
        bits |= stride
    return bits & -bits
