"""What the host sides of the Triton casts share: the constants of a cast, tiles, matrices of rows, seeds, the amax.

A tile is how much of a matrix one program takes: measured on an H200. With more values a program has fewer loads in
flight than its registers could hold; with fewer it stores its scales in smaller runs.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...core import recording
from ...core.devices import staying
from ...core.kernel import Spec
from ...core.names import dtype_name
from ...core.shapes import as_matrix
from ...numerics.cast import Cast
from ...numerics.formats import FULL, Format, Rounding
from ...numerics.operand import Operand
from ..runtime import triton_launch
from ..runtime.custom_op import exported
from ..runtime.triton_launch import device_code, launch

# ---------------------------------------------------------------------------------------------- compile-time constants


FLOAT8 = {(4, 3): "e4m3", (5, 2): "e5m2"}
"""(exponent bits, mantissa bits) -> the element to which sm_89 and later round in one instruction."""


class CastCode(NamedTuple):
    """``C``, the compile-time argument of the kernels in ``triton_device/``."""

    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    emax: int
    max: float
    inverse_max: float
    nan_code: int
    scale: str
    """e8m0, ue4m3, float32 or float32_pow2"""
    block: int
    """values along the blocked dimension that share a scale; 0: the whole tensor, -1: a whole row"""
    global_scale: bool
    signed_zero: bool
    amax_floor: int
    """the bits of the float32 that a smaller amax counts as"""
    mode: str
    stochastic: bool
    float8: str
    """the element to which the device rounds in one instruction; "": integer arithmetic"""
    pairs: bool
    """whether the device has min and max of words of two 16-bit numbers"""
    reverse: bool
    """whether programs run from the last to the first: a pass for the amax left the last values in the cache"""


@cache
def format_code(format: Format, capability: tuple[int, int], global_scale: bool) -> CastCode:
    """The constants to dequantize a format on devices of this compute capability; (0, 0): integer arithmetic only.

    ``global_scale``: whether values are multiplied by a global scale.
    """
    e = format.element
    return CastCode(
        bits=e.bits,
        exponent_bits=e.exponent_bits,
        mantissa_bits=e.mantissa_bits,
        bias=e.bias,
        emax=e.emax,
        max=e.max,
        inverse_max=1.0 / e.max,
        nan_code=e.nan_code,
        scale=format.scale.name,
        block=0 if format.block[0] == FULL else format.block[1],
        global_scale=global_scale,
        signed_zero=format.signed_zero,
        amax_floor=0,
        mode="",
        stochastic=False,
        float8=FLOAT8.get((e.exponent_bits, e.mantissa_bits), "") if capability >= (8, 9) else "",
        pairs=capability >= (9, 0),
        reverse=False,
    )


@cache
def cast_code(cast: Cast, capability: tuple[int, int]) -> CastCode:
    """The constants of a cast on devices of this compute capability."""
    (floor,) = struct.unpack("<i", struct.pack("<f", cast.amax_epsilon))
    format = cast.format
    return format_code(format, capability, format.global_scale)._replace(
        amax_floor=floor,
        mode=cast.scaling.value if format.scale.significant_bits == 1 else "",
        stochastic=cast.rounding is Rounding.STOCHASTIC,
        reverse=format.global_scale or format.block[0] == FULL,
    )


# ---------------------------------------------------------------------------------------------- tiles


Tile = tuple[int, int, int]
ROW_TILES: dict[int, Tile] = {2: (2, 1024, 2), 4: (2, 512, 2)}
"""Bytes of a source value -> (rows, columns, warps) of a program of the cast with blocks along rows."""
PAIR_TILE: Tile = (2, 1024, 2)
"""(rows, pairs of columns, warps) of a program of the cast from bfloat16 to 4 bits."""
FULL_ROW_TILE: tuple[int, int] = (4096, 8)
"""(columns read at a time, warps) of a program of the cast with one scale per row."""
COLUMN_TILES: dict[str, Tile] = {"": (4, 128, 4), "codes": (4, 64, 4), "values": (4, 64, 4)}
"""What is written for rows too -> (spans of rows, columns, warps) of the cast with blocks along columns."""
WORD_TILES: dict[str, Tile] = {"": (8, 32, 4), "codes": (2, 64, 4), "random codes": (2, 64, 8), "values": (2, 64, 4)}
"""The same from bfloat16 to float8: (spans of rows, pairs of columns, warps). Random numbers take registers."""
EXPONENT_TILE: tuple[int, int] = (64, 2)
"""(pairs of columns, warps) of a program of the pass for the exponents; its rows are those of the cast."""
ROW_SCALED_TILES: dict[str, Tile] = {"": (2, 64, 2), "codes": (2, 64, 4), "random codes": (2, 64, 8)}
"""What is written for rows too -> (spans of rows, pairs of columns, warps) of the cast to row-scaled operands."""
ROWS_FIRST_TILE: tuple[int, dict[bool, int]] = (2048, {False: 512, True: 256})
"""Pairs of columns at a time, and for each warp in rows of fewer and of twice as many or more: of the cast of rows that
finds the exponents of columns."""
ROUND_TILES: dict[bool, Tile] = {False: (2, 512, 2), True: (32, 128, 4)}
"""Whether blocks run along columns (too) -> (rows, pairs of columns, warps) of a program that fake quantizes bfloat16;
not measured."""
TRANSPOSE_TILE: Tile = (32, 64, 4)
"""(groups of four rows, columns, warps) of the cast with one scale per tensor that stores the transpose."""
DECODE_TILES: dict[int, Tile] = {8: (2, 1024, 2), 6: (2, 1024, 2), 4: (2, 1024, 2)}
"""Bits of a code -> (rows, columns, warps) of a program that dequantizes."""
AMAX_TILE: tuple[int, int, int] = (4096, 4, 8)
"""(values read at a time, how many times, warps) of a program of the pass for a tensor's amax."""


# ---------------------------------------------------------------------------------------------- matrices


SOURCES = (torch.bfloat16, torch.float16, torch.float32)


def ceil_div(n: int, size: int) -> int:
    return -(-n // size)


def power(n: int, least: int = 16) -> int:
    """The least power of two that is n or more, and at least ``least``."""
    return max(least, 1 << (n - 1).bit_length())


def power_above(n: int) -> int:
    """The least power of two above n: the size of a block of Triton that takes more than n."""
    return 1 << n.bit_length()


def rows_of(x: Tensor) -> Tensor:
    """x as a matrix with unit stride along its rows; a copy only if no view exists."""
    x = as_matrix(x)
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def code_of(cast: Cast, device: torch.device) -> CastCode:
    """The compile-time constants of the cast on this device."""
    return cast_code(cast, triton_launch.instructions_of(device))


def seed_of(cast: Cast, device: torch.device) -> Tensor | None:
    """The seed of stochastic rounding, int64 (1,) on the device, so that the host does not wait for it; or None."""
    if cast.rounding is not Rounding.STOCHASTIC:
        return None
    if cast.seed is not None:
        return torch.full((1,), cast.seed, dtype=torch.int64, device=device)
    return torch.empty(1, dtype=torch.int64, device=device).random_()


_zeros: dict[torch.device, tuple[Tensor, list[Tensor]]] = {}


def _zero(device: torch.device) -> Tensor:
    """An int32 zero, (1,), that no other kernel uses: one of 1024 that were allocated at once."""
    if (
        device.type != "cuda" or torch.cuda.is_current_stream_capturing()
    ):  # a captured graph runs more than once and has to write the zero itself
        return torch.zeros(1, dtype=torch.int32, device=device)
    left = _zeros[device][1] if device in _zeros else []
    try:
        return left.pop()
    except IndexError:  # asked for first, two threads would both take the last one
        whole = staying(device, lambda: torch.zeros(1024, dtype=torch.int32, device=device))
        torch.cuda.synchronize(device)  # zeros are taken on any stream, and the 1024 before may still be in use
        first, *rest = list[Tensor](whole.split(1))
        _zeros[device] = whole, rest
        return first


def amax_of(x: Tensor) -> Tensor:
    """The bits of the largest magnitude of a matrix, int32 (1,)."""
    x = x if x.is_contiguous() else x.contiguous()
    out = recording.call(_zero, x.device)
    block, rounds, warps = AMAX_TILE
    size = x.numel()
    programs = ceil_div(size, block * rounds)
    launch(device_code("quantize.amax_of_tensor"), programs, (x, out, size), (block, rounds), warps)
    return out


def slow_in_one_pass(cast: Cast) -> bool:
    """Whether columnwise codes, written together with a rowwise copy, take longer in one pass than in two on an H200.

    That is so for packed codes, which are stored in small pieces, and for random numbers in long blocks.
    """
    format = cast.format
    packed = format.element.packed and not format.global_scale
    return packed or (cast.rounding is Rounding.STOCHASTIC and format.block[1] > 32)


def in_pairs(x: Tensor) -> bool:
    """Whether a matrix can be read as words of two bfloat16 values."""
    even = x.shape[1] % 2 == 0 and x.stride(0) % 2 == 0 and x.storage_offset() % 2 == 0
    return x.dtype is torch.bfloat16 and even


def empty(x: Tensor, format: Format, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Memory for the codes, as the bytes that kernels write, and for the scales of values of ``shape``."""
    data = torch.empty(format.data_shape(shape), dtype=torch.uint8, device=x.device)
    return data, torch.empty(format.scale_shape(shape), dtype=format.scale.dtype, device=x.device)


def operand_of(
    components: tuple[Tensor, Tensor], global_scale: Tensor | None, format: Format, shape: tuple[int, ...]
) -> Operand:
    """The operand of what ``empty`` allocated."""
    data = components[0] if format.element.dtype is torch.uint8 else components[0].view(format.element.dtype)
    return Operand(data, components[1], global_scale, format, shape)


def is_transposed_matrix(x: Tensor, format: Format) -> bool:
    """Whether x is the transpose of a row-major matrix, so that its blocks run along columns of that matrix."""
    return x.dim() == 2 and x.stride(0) == 1 and x.stride(1) != 1 and format.block[0] == 1


def refuses(spec: Spec) -> str | None:
    """Why the Triton casts refuse values of this dtype and shape on this device; None if they accept."""
    missing = triton_launch.missing(spec)
    if missing:
        return missing
    if spec.dtype not in SOURCES:
        return f"not for {dtype_name(spec.dtype)}"
    return exported(spec) or ("the tensor is empty" if 0 in spec.shapes[0] else None)
