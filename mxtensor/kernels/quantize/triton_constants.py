"""A cast as compile-time constants of a Triton kernel: the facts of ``Cast`` and its format as numbers and strings."""

from __future__ import annotations

import struct
from functools import cache
from typing import NamedTuple

from ...numerics.cast import Cast
from ...numerics.formats import FULL, Format, Rounding

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
def cast_code(cast: Cast, capability: tuple[int, int]) -> CastCode:
    """The constants of a cast on devices of this compute capability; (0, 0): integer arithmetic only."""
    (floor,) = struct.unpack("<i", struct.pack("<f", cast.amax_epsilon))
    code = _code(cast.format, cast.scaling.value, cast.rounding is Rounding.STOCHASTIC, capability)
    return code._replace(amax_floor=floor)


@cache
def format_code(format: Format, capability: tuple[int, int], global_scale: bool) -> CastCode:
    """The constants to dequantize a format; ``global_scale``: whether values are multiplied by a global scale."""
    return _code(format, "", False, capability)._replace(global_scale=global_scale, reverse=False)


def _code(format: Format, mode: str, stochastic: bool, capability: tuple[int, int]) -> CastCode:
    e = format.element
    whole_tensor = format.block[0] == FULL
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
        block=0 if whole_tensor else format.block[1],
        global_scale=format.global_scale,
        signed_zero=format.signed_zero,
        amax_floor=0,
        mode=mode if format.scale.significant_bits == 1 else "",
        stochastic=stochastic,
        float8=FLOAT8.get((e.exponent_bits, e.mantissa_bits), "") if capability >= (8, 9) else "",
        pairs=capability >= (9, 0),
        reverse=format.global_scale or whole_tensor,
    )
