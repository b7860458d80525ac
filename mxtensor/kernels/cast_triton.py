"""Casts on CUDA devices in Triton: one pass over the values, every format (device code: ``device/``).

Eager calls go straight to the kernels; traced ones through the custom ops of ``cast_op.py``, which call these.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..codec import Operand
from ..dispatch import Spec
from ..formats import FULL, Format, Rounding
from ..roles import Cast
from . import triton_host, triton_tiles
from .cast_code import CastCode, cast_code, format_code
from .swizzle import swizzled_shape
from .triton_host import device_code, launch, on

SOURCES = (torch.bfloat16, torch.float16, torch.float32)


def _ceil_div(n: int, size: int) -> int:
    return -(-n // size)


def _rows_of(x: Tensor) -> Tensor:
    """x as a matrix of its rows with unit stride along them; a copy only where no view will do."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _code(cast: Cast, device: torch.device) -> CastCode:
    return cast_code(cast, triton_host.instructions_of(device))


def _seed(cast: Cast, device: torch.device) -> Tensor | None:
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


def _tensor_amax(x: Tensor) -> Tensor:
    """The bits of the largest magnitude of a matrix, int32 (1,)."""
    x = x if x.is_contiguous() else x.contiguous()
    out = _zero(x.device)
    block, rounds, warps = triton_tiles.AMAX
    size = x.numel()
    launch(
        device_code("quantize.amax_of_tensor"), _ceil_div(size, block * rounds), (x, out, size), (block, rounds), warps
    )
    return out


def _needs_amax(format: Format) -> bool:
    return format.global_scale or format.block[0] == FULL


def _in_pairs(x: Tensor) -> bool:
    """Whether a matrix can be read as words of two bfloat16 values."""
    even = x.shape[1] % 2 == 0 and x.stride(0) % 2 == 0 and x.storage_offset() % 2 == 0
    return x.dtype is torch.bfloat16 and even


def _in_words(x: Tensor, code: CastCode) -> bool:
    """Whether columns are cast two by two: bfloat16 to float8, whole fours of rows, offsets of 32 bits in a tile."""
    float8 = code.bits == 8 and code.exponent_bits > 0 and code.block > 0
    return float8 and _in_pairs(x) and x.shape[0] % 4 == 0 and x.stride(0) < 1 << 23


# ---------------------------------------------------------------------------------------------- quantize


def encode_matrix(x: Tensor, cast: Cast, out: Tensor, scale: Tensor, swizzled: bool, values: bool) -> Tensor | None:
    """Cast a matrix with unit stride along its rows into ``out`` and ``scale``; the global scale or None.

    With ``values``, ``out`` takes the rounded values, in its dtype, instead of codes, and ``scale`` nothing.
    """
    format, (rows, cols) = cast.format, x.shape
    code, seed = _code(cast, x.device), _seed(cast, x.device)
    amax = _tensor_amax(x) if _needs_amax(format) else None
    last = x.new_empty((), dtype=torch.float32) if format.global_scale else None
    stride, data_stride = x.stride(0), out.shape[-1]
    if code.block == -1:
        span, warps = triton_tiles.FULL_ROWS
        width = min(span * 4, max(128, 1 << (cols - 1).bit_length()))
        whole = width >= cols
        width, warps = (width, min(warps, max(1, width // 512))) if whole else (span, warps)
        launch(
            device_code("quantize.quantize_full_rows"),
            rows,
            (x, out, scale, seed, rows, cols, stride, data_stride),
            (code, 1, width, cols % width == 0, whole, values),
            warps,
        )
    elif format.rows_are_blocked and code.block:
        wide = max(1, 128 // code.block)
        launch(
            device_code("quantize.quantize_tiles"),
            _ceil_div(rows, code.block) * _ceil_div(cols, wide * code.block),
            (x, out, scale, amax, last, seed, rows, cols, stride, data_stride, scale.shape[-1]),
            (code, wide, rows % code.block == 0 and cols % (wide * code.block) == 0, values),
            4 if code.block < 128 else 8,
        )
    elif code.bits == 4 and not values and seed is None and _in_pairs(x):
        high, wide, warps = triton_tiles.PAIRS
        words = cols // 2
        launch(
            device_code("quantize_fp4.quantize_rows_fp4"),
            _ceil_div(rows, high) * _ceil_div(words, wide),
            (x, out, scale, amax, last, rows, words, stride // 2, data_stride, _ceil_div(cols, code.block)),
            (code, high, wide, rows % high == 0 and words % wide == 0, swizzled),
            warps,
        )
    else:
        high, wide, warps = triton_tiles.ROWS[x.element_size()]
        launch(
            device_code("quantize.quantize_rows"),
            _ceil_div(rows, high) * _ceil_div(cols, wide),
            (x, out, scale, amax, last, seed, rows, cols, stride, data_stride, _ceil_div(cols, max(code.block, 1))),
            (code, high, wide, rows % high == 0 and cols % wide == 0, swizzled, values),
            warps,
        )
    return last


def encode_columns(
    x: Tensor, cast: Cast, rowwise: tuple[Tensor, Tensor] | None, columnwise: tuple[Tensor, Tensor], swizzled: bool
) -> Tensor | None:
    """Cast the columns of a matrix (and its rows) into (codes, scales); the columnwise ones are stored transposed."""
    (rows, cols), format = x.shape, cast.format
    code, seed = _code(cast, x.device), _seed(cast, x.device)
    amax = _tensor_amax(x) if _needs_amax(format) else None
    if code.block == -1:
        amax = torch.linalg.vector_norm(x, float("inf"), dim=0).to(torch.float32).view(torch.int32)
    last = x.new_empty((), dtype=torch.float32) if format.global_scale else None
    data, scale = (None, None) if rowwise is None else rowwise
    tdata, tscale = columnwise
    both, data_stride = data is not None, 0 if data is None else data.shape[-1]
    block = 32 if code.block == -1 else code.block
    spans = block // 32
    if seed is None and _in_words(x, code):
        groups, wide, warps = triton_tiles.WORDS[both]
        groups, wide, words = max(groups, spans), max(wide, code.block // 2), cols // 2
        high = groups * min(code.block, 32)
        launch(
            device_code("quantize_columns_words.quantize_columns_words"),
            _ceil_div(rows, high) * _ceil_div(words, wide),
            (
                x, data, scale, tdata, tscale, rows, words, x.stride(0) // 2, data_stride // 2,
                _ceil_div(cols, code.block), _ceil_div(rows, code.block), rows // 4,
            ),
            (code, groups, wide, both, rows % high == 0 and words % wide == 0, swizzled),
            warps,
        )  # fmt: skip
        return last
    groups, wide, warps = triton_tiles.COLUMNS[both]
    groups, wide = max(groups, spans), max(wide, block)
    high = groups * min(block, 32)
    launch(
        device_code("quantize_columns.quantize_columns"),
        _ceil_div(rows, high) * _ceil_div(cols, wide),
        (
            x, data, scale, tdata, tscale, amax, last, seed, rows, cols, x.stride(0), data_stride,
            _ceil_div(cols, block), tdata.shape[-1], _ceil_div(rows, block), rows // 4,
        ),
        (code, groups, wide, both, rows % high == 0 and cols % wide == 0, swizzled, rows % 4 == 0),
        warps,
    )  # fmt: skip
    return last


def _empty(x: Tensor, format: Format, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Codes as bytes, and scales, for values of ``shape``."""
    data = torch.empty(format.data_shape(shape), dtype=torch.uint8, device=x.device)
    return data, torch.empty(format.scale_shape(shape), dtype=format.scale.dtype, device=x.device)


def _operand(parts: tuple[Tensor, Tensor], last: Tensor | None, format: Format, shape: tuple[int, ...]) -> Operand:
    data = parts[0] if format.element.dtype is torch.uint8 else parts[0].view(format.element.dtype)
    return Operand(data, parts[1], last, format, shape)


def _runs_down_columns(x: Tensor, format: Format) -> bool:
    """Whether x is the transpose of a matrix that is stored by rows, so that its blocks lie along columns there."""
    return x.dim() == 2 and x.stride(0) == 1 and x.stride(1) != 1 and format.block[0] == 1


def _matrices(x: Tensor, format: Format) -> bool:
    """Whether the matrices of a stack must be cast one by one: tiles that would reach from one into the next."""
    tiles = format.rows_are_blocked and format.block[0] != FULL
    return x.dim() > 2 and tiles and x.shape[-2] % format.block[0] != 0


def quantize(x: Tensor, cast: Cast) -> Operand:
    """``codec.encode`` of a CUDA tensor."""
    format, shape = cast.format, tuple(x.shape)
    parts = _empty(x, format, shape)
    with on(x.device):
        if _runs_down_columns(x, format):
            last = encode_columns(x.t(), cast, None, parts, False)
        elif _matrices(x, format):
            last = None
            for matrix, data, scale in zip(*(t.flatten(0, -3) for t in (x, *parts)), strict=True):
                encode_matrix(_rows_of(matrix), cast, data, scale, False, False)
        else:
            rows = _rows_of(x)
            data = parts[0] if rows is x else parts[0].view(rows.shape[0], -1)
            last = encode_matrix(rows, cast, data, parts[1], False, False)
    return _operand(parts, last, format, shape)


def quantize_both(x: Tensor, cast: Cast) -> tuple[Operand, Operand]:
    """The operand of a matrix and that of its transpose, of one pass."""
    format, shape = cast.format, tuple(x.shape)
    turned = (shape[1], shape[0])
    rowwise, columnwise = _empty(x, format, shape), _empty(x, format, turned)
    with on(x.device):
        last = encode_columns(_rows_of(x), cast, rowwise, columnwise, False)
    return _operand(rowwise, last, format, shape), _operand(columnwise, last, format, turned)


def quantize_swizzled(x: Tensor, cast: Cast) -> tuple[Tensor, Tensor, Tensor | None]:
    """A matrix as (codes, scales in the 128x4 layout, global scale): blocks along rows, padding scales zero."""
    format, shape = cast.format, tuple(x.shape)
    data = torch.empty(format.data_shape(shape), dtype=torch.uint8, device=x.device)
    scale_cols = _ceil_div(shape[1], format.block[1])
    whole = swizzled_shape(shape[0], scale_cols)
    make = torch.empty if whole == (shape[0], scale_cols) else torch.zeros
    scale = make(math.prod(whole), dtype=torch.uint8, device=x.device)
    with on(x.device):
        last = encode_matrix(_rows_of(x), cast, data, scale, True, False)
    return data, scale, last


def round_trip(x: Tensor, cast: Cast, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The values that x has in the format, without the global scale, and that scale."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    unused = torch.empty(1, dtype=cast.format.scale.dtype, device=x.device)
    with on(x.device):
        if _matrices(x, cast.format):
            for matrix, target in zip(x.flatten(0, -3), out.flatten(0, -3), strict=True):
                encode_matrix(_rows_of(matrix), cast, target, unused, False, True)
            return out, None
        rows = _rows_of(x)
        return out, encode_matrix(rows, cast, out.view(rows.shape), unused, False, True)


# ---------------------------------------------------------------------------------------------- dequantize


def dequantize(operand: Operand, dtype: torch.dtype) -> Tensor:
    """``codec.decode`` of operands on a CUDA device."""
    format, shape, last = operand.format, operand.shape, operand.global_scale
    code = format_code(format, triton_host.instructions_of(operand.data.device), last is not None)
    out = torch.empty(shape, dtype=dtype, device=operand.data.device)
    data, scale = operand.data.view(torch.uint8), operand.scale
    high, wide, warps = triton_tiles.DECODE[code.bits]
    block_rows, block_cols = (0 if b == FULL else b for b in format.block)

    def decode(data: Tensor, scale: Tensor, out: Tensor) -> None:
        rows, cols = out.shape
        launch(
            device_code("dequantize.dequantize_tiles"),
            _ceil_div(rows, high) * _ceil_div(cols, wide),
            (data, scale, last, out, rows, cols, data.stride(0), scale.stride(0) if scale.dim() > 1 else 0),
            (code, block_rows, block_cols, high, wide, rows % high == 0 and cols % wide == 0),
            warps,
        )

    with on(out.device):
        if _matrices(out, format):
            for part in zip(*(t.flatten(0, -3) for t in (data, scale, out)), strict=True):
                decode(*map(_rows_of, part))
        else:
            scale = scale if block_rows == 0 else _rows_of(scale)
            decode(_rows_of(data), scale, out.view(-1, shape[-1]))
    return out


# ---------------------------------------------------------------------------------------------- what is refused


def _refuses(spec: Spec) -> str | None:
    missing = triton_host.missing(spec)
    if missing:
        return missing
    if spec.dtype not in SOURCES:
        return f"not for {str(spec.dtype).removeprefix('torch.')}"
    if spec.traced and torch.compiler.is_exporting():
        return "an exported program holds aten ops only"
    return "no values" if 0 in spec.shapes[0] else None


def refuses_quantize(spec: Spec, x: Tensor, cast: Cast) -> str | None:
    return _refuses(spec)


def refuses_both(spec: Spec, x: Tensor, cast: Cast) -> str | None:
    rows, cols = cast.format.block
    if rows != 1 or cols == FULL:
        return "only blocks along rows have two copies to make at once"
    if x.dim() != 2:
        return "matrices only"
    return _refuses(spec)


def refuses_round_trip(spec: Spec, x: Tensor, cast: Cast, dtype: torch.dtype) -> str | None:
    if dtype not in SOURCES:
        return f"not for {str(dtype).removeprefix('torch.')}"
    return _refuses(spec)


def refuses_dequantize(spec: Spec, operand: Operand, dtype: torch.dtype) -> str | None:
    return _refuses(spec)
