"""The definition: blocks, scale rules, encode and decode in plain torch (elements and packing: ``elements.py``).

Every kernel of the package must match this file bit for bit; tests compare this file with exact arithmetic. All
exponent arithmetic is on the bits of float32 values, never through log2. The code can be traced (torch.compile fuses it
into one loop on CPU), and it allocates little when it runs eagerly on a slice of rows.

Sources: OCP Microscaling Formats (MX) v1.0, sections 5 and 6.3; "Recipes for Pre-training LLMs with MXFP8" (RCEIL);
the NVFP4 two-level scale of Blackwell; TransformerEngine's reference for four over six and row-scaled NVFP4.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.arguments import described
from ..core.names import dtype_name
from ..core.tracing import is_traced
from .cast import Cast
from .elements import (
    ElementFormat,
    ScaleFormat,
    decode_elements,
    decode_packed,
    encode_elements,
    pack,
    round_stochastically,
    uniform,
)
from .formats import (
    E8M0,
    FP32,
    FP32_POW2,
    FULL,
    UE4M3,
    Format,
    Rounding,
    ScaleCalculationMode,
)
from .operand import Operand

FLT_MAX = torch.finfo(torch.float32).max
SOURCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DTYPES_BY_NAME = {dtype_name(dtype): dtype for dtype in SOURCE_DTYPES}


# ---------------------------------------------------------------------------------------------- blocks


def _extent(block: int, dim: int) -> int:
    return max(dim, 1) if block == FULL else block


def split_blocks(x: Tensor, format: Format) -> tuple[Tensor, tuple[int, ...]]:
    """``x`` padded with zeros and viewed as whole blocks, and the dimensions that one block covers in that view."""
    rows, cols = format.block
    if rows == FULL:
        return x, tuple(range(x.dim()))
    cols = _extent(cols, x.shape[-1])
    pad_cols = -x.shape[-1] % cols
    if rows == 1 or x.dim() == 1:
        if pad_cols:
            x = F.pad(x, (0, pad_cols))
        return x.reshape(*x.shape[:-1], -1, cols), (-1,)
    pad_rows = -x.shape[-2] % rows
    if pad_cols or pad_rows:
        x = F.pad(x, (0, pad_cols, 0, pad_rows))
    return x.reshape(*x.shape[:-2], x.shape[-2] // rows, rows, -1, cols), (-3, -1)


def spread(scale: Tensor, dims: tuple[int, ...]) -> Tensor:
    """One value per block, with the shape that broadcasts over the view of ``split_blocks``."""
    if dims == (-1,):
        return scale.unsqueeze(-1)
    if dims == (-3, -1):
        return scale.unsqueeze(-2).unsqueeze(-1)
    return scale


def join_blocks(blocks: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The inverse view of ``split_blocks``, with the padding."""
    if dims == (-1,):
        return blocks.flatten(-2)
    if dims == (-3, -1):
        return blocks.flatten(-2).flatten(-3, -2)
    return blocks


def _stored(x: Tensor) -> Tensor:
    """``x`` itself. as_strided makes inductor compute it once per block and store it, instead of once per element."""
    return x.as_strided(x.shape, x.stride())


def crop(x: Tensor, rows: int | None, cols: int) -> Tensor:
    """``x`` without padding, contiguous.

    as_strided makes inductor store whole blocks before the padding is cut off. If the cut is fused (here, or as a slice
    by the caller), inductor's CPU loop over ``i // block`` leaves out the last, shorter block: ``try_loop_split`` does
    not check that the block divides the extent (seen in torch 2.13).
    """
    x = x.contiguous()
    size = (cols,) if x.dim() == 1 else (*x.shape[:-2], x.shape[-2] if rows is None else rows, cols)
    return x.as_strided(size, x.stride()).contiguous()


# ---------------------------------------------------------------------------------------------- scales


def _exponent_up(bits: Tensor) -> Tensor:
    """Biased exponent of the smallest power of two >= the positive float32 with these bits (2^-127 counts as 0)."""
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    up = torch.where(exponent > 0, mantissa > 0, mantissa > 0x400000)
    return exponent + up.to(torch.int32)


def e8m0_from_amax(amax: Tensor, element: ElementFormat, mode: ScaleCalculationMode) -> Tensor:
    """The int32 E8M0 byte of each block from its finite float32 amax (same shape); its value is 2^(byte - 127)."""
    bits = amax.view(torch.int32)
    if mode is ScaleCalculationMode.RCEIL:
        byte = _exponent_up((amax * (1.0 / element.max)).view(torch.int32))
    elif mode is ScaleCalculationMode.CEIL:
        byte = _exponent_up(bits) - element.emax
    elif mode is ScaleCalculationMode.EVEN:
        byte = ((bits + (1 << (22 - element.mantissa_bits))) >> 23) - element.emax
    else:
        byte = (bits >> 23) - element.emax
    return byte.clamp(0, 254)


def _power_of_two(byte: Tensor) -> Tensor:
    """float32 2^(byte - 127) for int32 bytes 0..254; byte 0 is a subnormal and cannot be shifted into place."""
    return torch.where(byte == 0, 0x00400000, byte << 23).view(torch.float32)


def scale_to_float(scale: Tensor, kind: ScaleFormat) -> Tensor:
    """Stored scales as float32 values, NaN included."""
    if kind is E8M0:
        byte = scale.to(torch.int32)
        return torch.where(byte == 255, float("nan"), _power_of_two(byte))
    return scale.view(kind.view_dtype).to(torch.float32)


def _scale_e8m0(amax: Tensor, cast: Cast, tensor_amax: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    finite = amax.isfinite()
    byte = e8m0_from_amax(amax, cast.format.element, cast.scaling)
    return torch.where(finite, byte, 255).to(torch.uint8), _power_of_two(254 - byte), None


def global_scales(tensor_amax: Tensor, cast: Cast) -> tuple[Tensor, Tensor]:
    """(S, global scale) of NVFP4 from the amax of a tensor, or of each row: values are multiplied by S before their
    block scales, and the global scale is 1 / S but for rounding."""
    four = cast.four_over_six
    # A tensor, because float / tensor is rounded twice (reciprocal, product), and on CUDA tensor / float is too.
    largest = torch.full_like(tensor_amax, (448.0 if four is None else four.largest_scale) * cast.format.element.max)
    wanted = (largest / tensor_amax).clamp(max=FLT_MAX)
    usable = (tensor_amax > 0) & (wanted > 0)
    encode = torch.where(usable, wanted, torch.ones_like(tensor_amax))
    global_scale = torch.where(usable, tensor_amax / largest, 1.0)
    return encode, global_scale


def _scale_nvfp4(
    amax: Tensor, cast: Cast, tensor_amax: Tensor, multiple: float = 1.0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``multiple``: of the scale that maps the amax of a block to the largest element, for four over six."""
    encode, global_scale = torch.ones_like(tensor_amax), None
    if cast.format.global_scale:
        encode, global_scale = global_scales(tensor_amax, cast)
    if cast.four_over_six is None:
        scaled = amax * (encode * (1.0 / cast.format.element.max))
    else:  # TransformerEngine divides here
        scaled = amax / torch.full_like(amax, cast.format.element.max) * encode * multiple
    scaled = scaled.clamp(-448.0, 448.0)
    scale = torch.where(amax.isfinite(), scaled, float("nan")).to(torch.float8_e4m3fn)
    multiplier = (1.0 / (scale.to(torch.float32) * (1.0 / encode))).clamp(max=FLT_MAX)
    return scale.view(torch.uint8), multiplier, global_scale


def _floored(amax: Tensor, cast: Cast) -> Tensor:
    """The amax, at least ``amax_epsilon``; NaN stays."""
    return amax.clamp(min=cast.amax_epsilon) if cast.amax_epsilon else amax


def _scale_float32(amax: Tensor, cast: Cast, tensor_amax: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    amax = _floored(amax, cast)
    # TransformerEngine's arithmetic: two divisions, each rounded once. A tensor is divided: see _scale_nvfp4.
    multiplier = (torch.full_like(amax, cast.format.element.max) / amax).clamp(max=FLT_MAX)
    multiplier = torch.where(amax > 0, multiplier, torch.ones_like(multiplier))
    return torch.where(amax.isfinite(), 1.0 / multiplier, float("nan")), multiplier, None


def _scale_float32_pow2(amax: Tensor, cast: Cast, tensor_amax: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    amax = _floored(amax, cast)
    # From 2^-127, whose reciprocal is the largest power of two of float32. At the upper end no block reaches 2^126.
    byte = e8m0_from_amax(amax, cast.format.element, cast.scaling).clamp(max=253)
    byte = torch.where(amax > 0, byte, 127)
    scale = torch.where(amax.isfinite(), _power_of_two(byte), float("nan"))
    return scale, _power_of_two(254 - byte), None


SCALE_RULES = {E8M0: _scale_e8m0, UE4M3: _scale_nvfp4, FP32: _scale_float32, FP32_POW2: _scale_float32_pow2}
"""Scale format -> (amax of blocks, cast, amax of the tensor) -> (stored scale, float32 multiplier, global scale)."""


# ---------------------------------------------------------------------------------------------- four over six

LARGEST_OVER_NEXT = 1.5
"""6 / 4: the two largest elements of E2M1."""


def least_error(candidates: Iterable[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Of each block the tensors of the candidate with the least error, which comes first; of equals the first one's.

    The tensors of a candidate broadcast with the errors of the blocks.
    """
    best: tuple[Tensor, ...] | None = None
    for new in candidates:
        if best is not None:
            better = new[0] < best[0]
            new = tuple(torch.where(better, a, b) for a, b in zip(new, best, strict=True))
        best = new
    assert best is not None
    return best


def _error(
    blocks: Tensor, dims: tuple[int, ...], scales: tuple[Tensor, Tensor], cast: Cast, tensor_amax: Tensor
) -> Tensor:
    """The float32 error of each block under one candidate, with TransformerEngine's roundings and order of sums: the
    columns of a row one after the other, then the rows in halves."""
    four, element = cast.four_over_six, cast.format.element
    assert four is not None
    scale, multiplier = scales
    codes = encode_elements(blocks * spread(multiplier, dims), element)
    amax = spread(tensor_amax, dims) if tensor_amax.dim() else tensor_amax
    values = decode_elements(codes, element) * spread(scale_to_float(scale, cast.format.scale), dims) * amax
    difference = values / torch.full_like(values, element.max * four.largest_scale) - blocks
    errors = difference * difference if four.squares else difference.abs()
    first, *others = errors.unbind(-1)
    for error in others:
        first = first + error
    while dims == (-3, -1) and first.shape[-2] > 1:
        upper, lower = first.chunk(2, -2)
        first = upper + lower
    return first.squeeze(-2) if dims == (-3, -1) else first


def _four_or_six(
    blocks: Tensor, dims: tuple[int, ...], amax: Tensor, cast: Cast, tensor_amax: Tensor
) -> tuple[Tensor, Tensor]:
    """The stored scale and the multiplier of each block: those of 6, or those of 4 if their error is smaller.

    Source: TransformerEngine, ``common/cast/nvfp4/quantize_4over6_nvfp4.cuh``.
    """
    candidates = (_scale_nvfp4(amax, cast, tensor_amax, multiple)[:2] for multiple in (1.0, LARGEST_OVER_NEXT))
    return least_error((_error(blocks, dims, each, cast, tensor_amax), *each) for each in candidates)[1:]  # type: ignore[return-value]


# ---------------------------------------------------------------------------------------------- encode and decode


def check_source(x: Tensor) -> None:
    """Raise TypeError for a dtype that cannot be quantized, ValueError for a tensor without dimensions."""
    if x.dtype not in SOURCE_DTYPES:
        names = ", ".join(dtype_name(d) for d in SOURCE_DTYPES)
        raise TypeError(f"cannot quantize a tensor of dtype {dtype_name(x.dtype)}; convert it first to one of {names}")
    if not torch.compiler.is_dynamo_compiling() and x.layout is not torch.strided:  # Dynamo cannot ask it
        raise TypeError(f"cannot quantize {described(x)}; convert it with .to_dense()")
    if x.dim() == 0:
        raise ValueError("cannot quantize a 0-dimensional tensor: blocks need a dimension; use x.reshape(1)")


def tensor_amax(x: Tensor) -> Tensor:
    """The largest magnitude of the whole tensor in float32, NaN if any value is; 0 for an empty tensor."""
    return x.detach().abs().amax().to(torch.float32) if x.numel() else x.new_zeros((), dtype=torch.float32)


def _whole_amax(amax: Tensor, format: Format, ndim: int) -> Tensor:
    """The amax that scales depend on beside that of a block: of each row, of each matrix of a stack, or of all."""
    if format.row_scaled:
        return amax.amax(-1, keepdim=True)
    if format.scales_matrices and ndim > 2:
        return amax.amax((-2, -1), keepdim=True)
    return amax.amax()


def encode(x: Tensor, cast: Cast, whole_amax: Tensor | None = None) -> Operand:
    """Quantize ``x`` (float32, bfloat16, float16 or float64; 1-D or more; any strides) along its last dimension.

    In a row-scaled format each row is cast as if it were a tensor of its own: the global scale is (..., rows, 1). Where
    another format has a global scale (NVFP4), so is each matrix of a stack: it is (..., 1, 1).
    ``whole_amax`` replaces the amax of ``x`` in scales that depend on the whole tensor (NVFP4, per-tensor float8), for
    callers that pass only a part of it. With dimensions, it is the amax of parts of ``x`` and broadcasts to its blocks
    (to its values, if one block is the tensor); so do the scales then (``groups.py``). Raises TypeError for other
    dtypes, ValueError for a 0-dimensional tensor.
    """
    check_source(x)
    format, element, shape = cast.format, cast.format.element, tuple(x.shape)
    if x.numel() == 0:
        data = x.new_zeros(format.data_shape(shape), dtype=element.dtype)
        scale = x.new_zeros(format.scale_shape(shape), dtype=format.scale.dtype)
        ones = x.new_ones(format.global_scale_shape(shape), dtype=torch.float32) if format.global_scale else None
        return Operand(data, scale, ones, format, shape)
    blocks, dims = split_blocks(x.detach().to(torch.float32), format)
    magnitudes = blocks.abs()
    amax = magnitudes.amax(dims, keepdim=True) if format.block[0] == FULL else magnitudes.amax(dims)
    if whole_amax is None:
        whole_amax = _whole_amax(amax, format, len(shape))
    elif format.block[0] == FULL:
        amax = whole_amax if whole_amax.dim() else whole_amax.expand_as(amax)
    scale, multiplier, global_scale = SCALE_RULES[format.scale](amax, cast, whole_amax)
    if cast.four_over_six is not None:
        scale, multiplier = _four_or_six(blocks, dims, amax, cast, whole_amax)
    finite = amax.isfinite()
    multiplier = _stored(torch.where(finite, multiplier, float("nan")))
    y = blocks * spread(multiplier, dims)
    if cast.rounding is Rounding.STOCHASTIC:
        noise = None
        if cast.seed is not None:  # by the index in x, before padding
            noise = split_blocks(uniform(cast.seed, x), format)[0]
        y = round_stochastically(y, element, noise)
    if not format.signed_zero:  # on the bits: a compiler may take adding 0.0 for no operation
        y = torch.where(y == 0, 0, y.view(torch.int32)).view(torch.float32)
    codes = encode_elements(y, element).view(torch.uint8)
    # On other devices than the CPU, reading the values costs more than the work; a traced tensor has none.
    if x.device.type != "cpu" or is_traced(x) or not finite.all():
        # The sign of NaN is cleared, because eager and inductor set it differently; a format without NaN gets 0.
        codes &= spread(_stored(torch.where(finite, 0xFF, element.nan_code).to(torch.uint8)), dims)
    data = crop(
        pack(join_blocks(codes, dims), element), shape[-2] if dims == (-3, -1) else None, element.data_cols(shape[-1])
    )
    return Operand(data.view(element.dtype), scale, global_scale, format, shape)


def decode(operand: Operand, dtype: torch.dtype) -> Tensor:
    """float32(element) * scale (* global scale), then one rounding to ``dtype``. Contiguous, ``operand.shape``."""
    value = decode_local(operand)
    if operand.global_scale is not None:
        value = value * operand.global_scale
    return value.to(dtype)


def decode_local(operand: Operand) -> Tensor:
    """The float32 values without the global scale."""
    format, shape = operand.format, operand.shape
    if 0 in shape:
        return operand.data.new_zeros(shape, dtype=torch.float32)
    if format.element.packed:
        elements = decode_packed(operand.data, format.element).narrow(-1, 0, shape[-1]).to(torch.float32)
    else:
        elements = decode_elements(operand.data, format.element)
    blocks, dims = split_blocks(elements, format)
    value = join_blocks(blocks * spread(scale_to_float(operand.scale, format.scale), dims), dims)
    return crop(value, shape[-2] if dims == (-3, -1) else None, shape[-1])
