"""An MXTensor of the components and attributes of a tensor of torchao, without torchao.

Attributes come from JSON (``{"_type": "torch.dtype", "_data": "float8_e4m3fn"}``) or from a pickle (a dtype, or an
object with fields). ``word`` and ``fields`` read both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..core.arguments import described
from ..numerics.cast import Cast
from ..numerics.elements import pack
from ..numerics.formats import BLOCK_SIZES, FORMATS, Format, ScaleCalculationMode
from ..numerics.reference import DTYPES_BY_NAME
from ..numerics.swizzle import unswizzle
from ..tensor.mxtensor import MXTensor
from .global_scale import decoded, multiplies, remember
from .layout import weight

ELEMENTS = {
    "float8_e4m3fn": "mxfp8_e4m3", "float8_e5m2": "mxfp8_e5m2", "fp6_e2m3": "mxfp6_e2m3", "fp6_e3m2": "mxfp6_e3m2",
    "float4_e2m1fn_x2": "mxfp4_e2m1",
}  # fmt: skip
"""torchao's ``elem_dtype`` -> the format with blocks of 32."""
_FLOAT8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def word(value: Any) -> str:
    """The name of a dtype or of the member of an enum, in lower case; "" for anything else."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        value = value.get("_data")
    return getattr(value, "value", value).lower() if isinstance(getattr(value, "value", value), str) else ""


def fields(value: Any) -> Mapping[str, Any] | None:
    """The fields of a dataclass; None if it is absent."""
    if isinstance(value, Mapping):
        inner = value.get("_data")
        return inner if isinstance(inner, Mapping) else None
    return None if value is None else vars(value)


def kind_of(value: Any) -> str:
    """The name of the class of a dataclass."""
    return str(value.get("_type")) if isinstance(value, Mapping) else type(value).__name__


def tensor_of(kind: str, tensors: Mapping[str, Tensor], attributes: Mapping[str, Any]) -> MXTensor:
    """The MXTensor of one of torchao's ``CLASSES``.

    ``tensors``: qdata, scale and, for NVFP4, per_tensor_scale. Raises ValueError for tensors and attributes that do not
    fit, NotImplementedError for those without a format here.
    """
    return CLASSES[kind](tensors, attributes)


def _outer(attributes: Mapping[str, Any], name: str) -> torch.dtype:
    found = word(attributes.get(name))
    if found not in DTYPES_BY_NAME:
        raise ValueError(f"{name} must be one of {', '.join(DTYPES_BY_NAME)}, got {described(attributes.get(name))}")
    return DTYPES_BY_NAME[found]


def _block(attributes: Mapping[str, Any], usual: int) -> int:
    block = attributes.get("block_size", usual)
    if type(block) is not int or block not in BLOCK_SIZES:
        raise NotImplementedError(
            f"block_size {described(block)} is not supported; choose one of {', '.join(map(str, BLOCK_SIZES))}"
        )
    return block


def _operand(
    tensors: Mapping[str, Tensor], attributes: Mapping[str, Any], format: Format, per_code: int
) -> tuple[Tensor, Tensor, bool]:
    """Codes and scales blocked along the last dimension, and whether they belong to the transpose.

    ``per_code``: values of an entry of qdata.
    """
    codes, scale = tensors["qdata"], tensors["scale"]
    if codes.dim() not in (2, 3) or scale.dim() < 1:
        raise ValueError(f"qdata {tuple(codes.shape)} and scale {tuple(scale.shape)} are not those of a matrix")
    transposed = not codes.is_contiguous() and codes.stride(-2) < codes.stride(-1)
    if transposed:
        codes, scale = codes.transpose(-2, -1), scale.transpose(-2, -1) if scale.dim() > 1 else scale
    if attributes.get("is_swizzled_scales") is True:
        rows, columns = math.prod(codes.shape[:-1]), codes.shape[-1] * per_code // format.block[-1]
        flat = unswizzle(scale.contiguous().view(torch.uint8).flatten(), rows, columns)
        scale = flat.view(scale.dtype).reshape(*codes.shape[:-1], columns)
    return codes, scale, transposed


def _mx(tensors: Mapping[str, Tensor], attributes: Mapping[str, Any]) -> MXTensor:
    element = word(attributes.get("elem_dtype"))
    if element not in ELEMENTS:
        raise NotImplementedError(
            f"elem_dtype {described(attributes.get('elem_dtype'))} is not supported; choose one of "
            f"{', '.join(ELEMENTS)}"
        )
    base = FORMATS[ELEMENTS[element]]
    format = base.with_block(_block(attributes, 32))
    codes, scale, transposed = _operand(tensors, attributes, format, 2 if element == "float4_e2m1fn_x2" else 1)
    shape = None
    if element.startswith("fp6"):
        if codes.dtype is not torch.uint8 or bool((codes > 63).any()):
            raise ValueError(f"qdata of {element} must be bytes up to 63, one code each")
        shape = tuple(codes.shape)
        codes = pack(codes, format.element)
    return weight(
        codes, scale, format, _outer(attributes, "orig_dtype"), activation=_activation(attributes), shape=shape,
        columnwise=transposed,
    )  # fmt: skip


def _nvfp4(tensors: Mapping[str, Tensor], attributes: Mapping[str, Any]) -> MXTensor:
    if _block(attributes, 16) != 16:
        raise NotImplementedError(f"NVFP4 has blocks of 16 values, got block_size {attributes.get('block_size')}")
    dtype, whole = _outer(attributes, "orig_dtype"), tensors.get("per_tensor_scale")
    format = FORMATS["nvfp4_single_level" if whole is None else "nvfp4"]
    codes, scale, transposed = _operand(tensors, attributes, format, 2)
    if whole is None:
        return weight(codes, scale, format, dtype, activation=_activation(attributes), columnwise=transposed)
    if whole.dtype is not torch.float32 or whole.numel() == 0:
        raise ValueError(f"per_tensor_scale must be float32, got {whole.dtype} {tuple(whole.shape)}")
    if bool((whole != whole.flatten()[0]).any()):
        raise NotImplementedError(
            f"per_tensor_scale {tuple(whole.shape)} has one scale for each expert, and an MXTensor has one for all"
        )
    stored = whole.flatten()[0]
    here = decoded(stored, multiplies, dtype)
    out = weight(codes, scale, format, dtype, here, _activation(attributes), columnwise=transposed)
    return out if transposed else remember(out, multiplies, stored)


def _float8(tensors: Mapping[str, Tensor], attributes: Mapping[str, Any]) -> MXTensor:
    codes, scale = tensors["qdata"], tensors["scale"]
    if codes.dtype not in _FLOAT8 or not scale.is_floating_point() or scale.dtype.itemsize < 2:
        raise ValueError(f"a Float8Tensor has float8 codes and float scales, got {codes.dtype} and {scale.dtype}")
    shape, block = tuple(codes.shape), attributes.get("block_size")
    if len(shape) not in (2, 3) or not isinstance(block, (list, tuple)) or len(block) not in (0, len(shape)):
        raise ValueError(f"qdata {shape} and block_size {described(block)} are not those of a matrix")
    kinds = {shape: "tensor", (): "tensor", (*[1] * (len(shape) - 1), shape[-1]): "row"}
    kinds |= {(*[1] * (len(shape) - 2), *sizes): name for sizes, name in
              (((128, 128), "128x128"), ((1, 128), "1x128"))}  # fmt: skip
    kind = kinds.get(tuple(block))
    if kind is None:
        raise NotImplementedError(
            f"a Float8Tensor with the block_size {described(block)} is not supported; a block is a row, the tensor, or "
            "1x128 or 128x128 values"
        )
    format = FORMATS[f"float8_{_FLOAT8[codes.dtype]}_{kind}"]
    values = scale.to(torch.float32)
    values = values.reshape([1] * len(shape)) if values.numel() == 1 and kind == "tensor" else values
    return weight(codes, values, format, _outer(attributes, "dtype"), activation=_activation(attributes))


def _activation(attributes: Mapping[str, Any]) -> Cast | None:
    """The cast of activations; None leaves them as they are. Raises ValueError for a scale rule that is unknown."""
    arguments = attributes.get("act_quant_kwargs")
    found, kind = fields(arguments), kind_of(arguments)
    if found is None:
        return None
    if kind == "QuantizeTensorToMXKwargs":
        element = word(found.get("elem_dtype")) or "float8_e4m3fn"
        mode = word(found.get("scaling_mode")) or "floor"
        if element in ELEMENTS:
            format = FORMATS[ELEMENTS[element]].with_block(_block(found, 32))
            return Cast(format, ScaleCalculationMode.of(mode))
    if kind == "QuantizeTensorToNVFP4Kwargs":
        single = not found.get("use_dynamic_per_tensor_scale")
        return Cast(FORMATS["nvfp4_single_level" if single else "nvfp4"])
    if kind == "QuantizeTensorToFloat8Kwargs":
        granularity = {"PerRow": "row", "PerTensor": "tensor", "PerBlock": "1x128"}.get(
            kind_of(found.get("granularity"))
        )
        return None if granularity is None else Cast(FORMATS[f"float8_e4m3_{granularity}"])
    raise NotImplementedError(f"act_quant_kwargs {described(arguments)} are not supported")


CLASSES = {"MXTensor": _mx, "NVFP4Tensor": _nvfp4, "Float8Tensor": _float8}
"""torchao's class -> what makes an MXTensor of it."""
