"""Macros that the sources in ``kernels/cuda/`` share, whichever kernel they are part of."""

from __future__ import annotations

import torch

from ...numerics.cast import Cast
from ...numerics.element_format import ElementFormat
from ...numerics.formats import E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, INT8
from .nvrtc import Constants

ELEMENTS: dict[ElementFormat, str] = {
    E4M3: "E4M3", E5M2: "E5M2", E3M2: "E3M2", E2M3: "E2M3", E2M1: "E2M1", INT8: "INT8",
}  # fmt: skip
"""Elements that the sources encode and decode -> their names there."""
TYPES = {torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16", torch.float32: "FLOAT"}
"""Dtypes of values -> their names in the sources."""
RESERVED = 1024
"""Bytes of shared memory of each block that the system takes."""


def copy_size(address: int, *strides: int) -> int:
    """The most bytes, at most 16, that one copy can move from rows of these strides (bytes) at this address."""
    bits = 16 | address
    for stride in strides:
        bits |= stride
    return bits & -bits


def cast_constants(cast: Cast | None) -> Constants:
    """Macros of a cast (``casts.cuh``): to an element with power-of-two scales, or to NVFP4."""
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
