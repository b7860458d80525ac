"""Direct configs: wgmma kernels that read bfloat16 activations as they are, so that no kernel converts them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...numerics.cast import Cast
from ...numerics.formats import E4M3, E5M2, UE4M3, Format
from ..runtime.tensor_map import TensorMap
from .config import LaunchConfig, registers, registers_in_use

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
