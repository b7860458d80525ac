"""What the host sides of the Triton casts share: matrices of rows, seeds, the amax of a tensor, memory for results."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core import recording
from ...core.kernel import Spec
from ...core.names import dtype_name
from ...numerics.cast import Cast
from ...numerics.formats import Format, Rounding
from ...numerics.operand import Operand
from ..runtime import triton_launch
from ..runtime.availability import exported
from ..runtime.triton_launch import device_code, launch
from . import triton_tiles as tiles
from .triton_constants import CastCode, cast_code

SOURCES = (torch.bfloat16, torch.float16, torch.float32)


def ceil_div(n: int, size: int) -> int:
    return -(-n // size)


def power_above(n: int) -> int:
    """The least power of two above n: the size of a block of Triton that takes more than n."""
    return 1 << n.bit_length()


def rows_of(x: Tensor) -> Tensor:
    """x as a matrix with unit stride along its rows; a copy only if no view exists."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
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
    if not left:
        whole = torch.zeros(1024, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)  # zeros are taken on any stream, and the 1024 before may still be in use
        left = list(whole.split(1))
        _zeros[device] = whole, left
    return left.pop()


def amax_of(x: Tensor) -> Tensor:
    """The bits of the largest magnitude of a matrix, int32 (1,)."""
    x = x if x.is_contiguous() else x.contiguous()
    out = recording.call(_zero, x.device)
    block, rounds, warps = tiles.AMAX
    size = x.numel()
    programs = ceil_div(size, block * rounds)
    launch(device_code("quantize.amax_of_tensor"), programs, (x, out, size), (block, rounds), warps)
    return out


def needs_amax(format: Format) -> bool:
    """Whether a scale depends on the whole tensor, so that a pass over it has to come first."""
    return format.has_tensor_scale


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
