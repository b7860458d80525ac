"""What the hosts of the Triton casts share: matrices of rows, seeds, the amax of a tensor, memory for what is made."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.kernel import Spec
from ...numerics.cast import Cast
from ...numerics.formats import FULL, Format, Rounding
from ...numerics.operand import Operand
from ..quantize import tiles
from ..runtime import triton_launch
from ..runtime.availability import exported
from ..runtime.triton_launch import device_code, launch
from .device_constants import CastCode, cast_code

SOURCES = (torch.bfloat16, torch.float16, torch.float32)


def ceil_div(n: int, size: int) -> int:
    return -(-n // size)


def rows_of(x: Tensor) -> Tensor:
    """x as a matrix of its rows with unit stride along them; a copy only where no view will do."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def code_of(cast: Cast, device: torch.device) -> CastCode:
    """What the kernels know of the cast when they are compiled for the device."""
    return cast_code(cast, triton_launch.instructions_of(device))


def seed_of(cast: Cast, device: torch.device) -> Tensor | None:
    """The seed of stochastic rounding where the kernel can read it without a host in between."""
    if cast.rounding is not Rounding.STOCHASTIC:
        return None
    if cast.seed is not None:
        return torch.full((1,), cast.seed, dtype=torch.int64, device=device)
    return torch.empty(1, dtype=torch.int64, device=device).random_()


_zeros: dict[torch.device, tuple[Tensor, list[Tensor]]] = {}


def _zero(device: torch.device) -> Tensor:
    """An int32 zero that nobody has used or will use again: one of a thousand that were made at once."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():  # a graph runs more than once
        return torch.zeros(1, dtype=torch.int32, device=device)
    left = _zeros[device][1] if device in _zeros else []
    if not left:
        whole = torch.zeros(1024, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)  # any stream may take one, and may still be reading one of the thousand before
        left = list(whole.split(1))
        _zeros[device] = whole, left
    return left.pop()


def amax_of(x: Tensor) -> Tensor:
    """The bits of the largest magnitude of a matrix, int32 (1,)."""
    x = x if x.is_contiguous() else x.contiguous()
    out = _zero(x.device)
    block, rounds, warps = tiles.AMAX
    size = x.numel()
    programs = ceil_div(size, block * rounds)
    launch(device_code("quantize.amax_of_tensor"), programs, (x, out, size), (block, rounds), warps)
    return out


def needs_amax(format: Format) -> bool:
    """Whether a scale depends on the whole tensor, so that a pass over it has to come first."""
    return format.global_scale or format.block[0] == FULL


def slow_in_one_pass(cast: Cast) -> bool:
    """Whether codes of columns beside anything of rows take longer in one pass than in two, as an H200 has it: packed
    codes, which leave in small pieces, and random numbers for long blocks."""
    format = cast.format
    packed = format.element.packed and not format.global_scale
    return packed or (cast.rounding is Rounding.STOCHASTIC and format.block[1] > 32)


def in_pairs(x: Tensor) -> bool:
    """Whether a matrix can be read as words of two bfloat16 values."""
    even = x.shape[1] % 2 == 0 and x.stride(0) % 2 == 0 and x.storage_offset() % 2 == 0
    return x.dtype is torch.bfloat16 and even


def empty(x: Tensor, format: Format, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Codes as bytes, and scales, for values of ``shape``."""
    data = torch.empty(format.data_shape(shape), dtype=torch.uint8, device=x.device)
    return data, torch.empty(format.scale_shape(shape), dtype=format.scale.dtype, device=x.device)


def operand_of(
    components: tuple[Tensor, Tensor], global_scale: Tensor | None, format: Format, shape: tuple[int, ...]
) -> Operand:
    data = components[0] if format.element.dtype is torch.uint8 else components[0].view(format.element.dtype)
    return Operand(data, components[1], global_scale, format, shape)


def runs_down_columns(x: Tensor, format: Format) -> bool:
    """Whether x is the transpose of a matrix that is stored by rows, so that its blocks lie along columns there."""
    return x.dim() == 2 and x.stride(0) == 1 and x.stride(1) != 1 and format.block[0] == 1


def refuses(spec: Spec) -> str | None:
    """Why no Triton cast takes values of this dtype and shape on this device; None if they do."""
    missing = triton_launch.missing(spec)
    if missing:
        return missing
    if spec.dtype not in SOURCES:
        return f"not for {str(spec.dtype).removeprefix('torch.')}"
    return exported(spec) or ("no values" if 0 in spec.shapes[0] else None)
