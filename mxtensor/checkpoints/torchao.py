"""torchao: the tensors of its classes MXTensor, NVFP4Tensor and Float8Tensor, in safetensors.

``M.weight`` is stored as ``M._weight_qdata``, ``M._weight_scale`` and, for NVFP4, ``M._weight_per_tensor_scale``. The
metadata has the class and its attributes as JSON under ``M.weight``, and the list ``tensor_names``. Codes of 4 bits are
packed as here, those of 6 bits have a byte each. Scales may be swizzled. A shard has the metadata of all shards before
it too: transformers keeps the list of the last one.

``CLASSES`` makes an MXTensor of the components and attributes of a tensor, without torchao. Attributes come from JSON
(``{"_type": "torch.dtype", "_data": "float8_e4m3fn"}``) or from a pickle (a dtype, or an object with fields). ``word``
and ``fields`` read both.

Source: torchao/prototype/safetensors and torchao/prototype/mx_formats of version 0.18.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.arguments import described
from ..core.names import dtype_name
from ..numerics.cast import Cast
from ..numerics.derived import unswizzle
from ..numerics.elements import pack, unpack
from ..numerics.formats import BLOCK_SIZES, FORMATS, Format, ScaleCalculationMode
from ..numerics.reference import DTYPES_BY_NAME
from ..recipe.linear_recipe import LinearRecipe
from ..tensor.mxtensor import MXTensor
from .global_scale import multiplies, stored_for
from .layout import ELEMENTS as FLOAT8
from .layout import Layout, Written, format_of_inputs, rowwise, weight
from .names import names_in_files
from .reading import Checkpoint, Entry

NAME = "torchao"
ELEMENTS = {
    "float8_e4m3fn": "mxfp8_e4m3", "float8_e5m2": "mxfp8_e5m2", "fp6_e2m3": "mxfp6_e2m3", "fp6_e3m2": "mxfp6_e3m2",
    "float4_e2m1fn_x2": "mxfp4_e2m1",
}  # fmt: skip
"""torchao's ``elem_dtype`` -> the format with blocks of 32."""
_ELEMENT_OF = {format: element for element, format in ELEMENTS.items()}
_BLOCKS = {
    f"float8_{element}_{kind}": block
    for element in ("e4m3", "e5m2")
    for kind, block in (("row", (1, -1)), ("tensor", (-1, -1)), ("1x128", (1, 128)), ("128x128", (128, 128)))
}
"""Format of a Float8Tensor -> values of a block; -1: all of the dimension."""
FORMATS_WRITTEN = (*_ELEMENT_OF, "nvfp4", "nvfp4_single_level", *_BLOCKS)
_AUTO = ("mxfp8_e4m3", "mxfp4_e2m1")
"""MX formats for which torchao has kernels; it refuses the others unless they are emulated."""
_FLOAT8_BY_NAME = {dtype_name(dtype): name for dtype, name in FLOAT8.items()}
_OPTIONAL = ("per_tensor_scale",)
STATIC = "act_per_tensor_scale"
"""The scale of a static activation: as ModelOpt's input_scale, amax / 2688, which multiplies."""

# ---------------------------------------------------------------------------------------------- attributes


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


def _mx_tensor(tensors: Mapping[str, Tensor], attributes: Mapping[str, Any]) -> MXTensor:
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
        codes, scale, format, _outer(attributes, "orig_dtype"), activation=_cast_of_inputs(attributes), shape=shape,
        columnwise=transposed,
    )  # fmt: skip


def _nvfp4_tensor(tensors: Mapping[str, Tensor], attributes: Mapping[str, Any]) -> MXTensor:
    if _block(attributes, 16) != 16:
        raise NotImplementedError(f"NVFP4 has blocks of 16 values, got block_size {attributes.get('block_size')}")
    dtype, whole = _outer(attributes, "orig_dtype"), tensors.get("per_tensor_scale")
    format = FORMATS["nvfp4_single_level" if whole is None else "nvfp4"]
    codes, scale, transposed = _operand(tensors, attributes, format, 2)
    if whole is not None:
        if whole.dtype is not torch.float32 or whole.numel() == 0:
            raise ValueError(f"per_tensor_scale must be float32, got {whole.dtype} {tuple(whole.shape)}")
        whole = whole.flatten()[0] if bool((whole == whole.flatten()[0]).all()) else whole
    return weight(codes, scale, format, dtype, _cast_of_inputs(attributes), columnwise=transposed, whole=whole)


def _float8_tensor(tensors: Mapping[str, Tensor], attributes: Mapping[str, Any]) -> MXTensor:
    codes, scale = tensors["qdata"], tensors["scale"]
    if codes.dtype not in FLOAT8 or not scale.is_floating_point() or scale.dtype.itemsize < 2:
        raise ValueError(f"a Float8Tensor has float8 codes and float scales, got {codes.dtype} and {scale.dtype}")
    shape, block = tuple(codes.shape), attributes.get("block_size")
    if len(shape) not in (2, 3) or not isinstance(block, (list, tuple)) or len(block) not in (0, len(shape)):
        raise ValueError(f"qdata {shape} and block_size {described(block)} are not those of a matrix")
    ones = [1] * (len(shape) - 2)
    tiles = {(*ones, 128, 128): "128x128", (*ones, 1, 128): "1x128"}
    kinds = {shape: "tensor", (): "tensor"} | tiles | {(*ones, 1, shape[-1]): "row"}  # 128 columns: a row
    if _granularity(attributes) == "tensor":
        kinds[shape] = "tensor"
    kind = kinds.get(tuple(block))
    if kind is None:
        raise NotImplementedError(
            f"a Float8Tensor with the block_size {described(block)} is not supported; a block is a row, the tensor, or "
            "1x128 or 128x128 values"
        )
    format = FORMATS[f"float8_{FLOAT8[codes.dtype]}_{kind}"]
    values = scale.to(torch.float32)
    values = values.reshape([1] * len(shape)) if values.numel() == 1 and kind == "tensor" else values
    return weight(codes, values, format, _outer(attributes, "dtype"), activation=_cast_of_inputs(attributes))


def _granularity(attributes: Mapping[str, Any]) -> str | None:
    """What one scale of activations belongs to, in the words of formats; None for weight-only."""
    found = fields(attributes.get("act_quant_kwargs")) or {}
    words = {"PerRow": "row", "PerTensor": "tensor", "PerBlock": "1x128"}
    return words.get(kind_of(found.get("granularity")))


def _cast_of_inputs(attributes: Mapping[str, Any]) -> Cast | None:
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
        granularity = _granularity(attributes)
        named = _FLOAT8_BY_NAME.get(word(found.get("float8_dtype")) or "float8_e4m3fn")
        return None if granularity is None or named is None else Cast(FORMATS[f"float8_{named}_{granularity}"])
    raise NotImplementedError(f"act_quant_kwargs {described(arguments)} are not supported")


CLASSES: dict[str, Callable[[Mapping[str, Tensor], Mapping[str, Any]], MXTensor]] = {
    "MXTensor": _mx_tensor, "NVFP4Tensor": _nvfp4_tensor, "Float8Tensor": _float8_tensor,
}  # fmt: skip
"""torchao's class -> what makes an MXTensor of its tensors (qdata, scale and, for NVFP4, per_tensor_scale) and its
attributes. Raises ValueError for those that do not fit, NotImplementedError for those without a format here."""

# ---------------------------------------------------------------------------------------------- reading


def _names(name: str) -> Callable[[str], str]:
    """Name of a component -> name of the stored tensor."""
    module, _, leaf = name.rpartition(".")
    return lambda component: f"{module}._{leaf}_{component}" if module else f"_{leaf}_{component}"


def _described(checkpoint: Checkpoint, name: str, text: str) -> Any:
    """What the metadata says of a tensor; None for an entry that is not torchao's, and for ordinary tensors.

    Raises ValueError for metadata that is not valid, NotImplementedError for other classes of torchao.
    """
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return None
    kind = fields.get("_type") if isinstance(fields, dict) else None
    if not isinstance(kind, str) or kind == "Tensor":
        return None
    if kind not in CLASSES:
        raise NotImplementedError(
            f"{checkpoint.path}, tensor {name}: torchao's {kind[:40]} is not supported; supported are "
            f"{', '.join(CLASSES)}"
        )
    names = fields.get("_tensor_data_names")
    known = ("qdata", "scale", *_OPTIONAL, STATIC)
    if (
        not isinstance(fields.get("_data"), dict)
        or not isinstance(names, list)
        or not {"qdata", "scale"} <= set(map(str, names)) <= set(known)
    ):
        raise ValueError(f"{checkpoint.path}: the metadata of tensor {name} is not valid: {described(fields)}")
    return fields


def _built(kind: str, components: tuple[str, ...], attributes: dict[str, Any], *tensors: Tensor) -> MXTensor:
    return CLASSES[kind](dict(zip(components, tensors, strict=True)), attributes)


def _read(checkpoint: Checkpoint) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    every = {name: _described(checkpoint, name, text) for name, text in checkpoint.metadata.items()}
    lost = {name for name in every if every[name] and _names(name)("qdata") not in checkpoint.tensors}
    split = {name: name.rpartition(".")[2] for name in checkpoint.tensors}
    codes = {name: leaf for name, leaf in split.items() if leaf.startswith("_") and leaf.endswith("_qdata")}
    stored = [name.removesuffix(leaf) + leaf[1:].removesuffix("_qdata") for name, leaf in codes.items()]  # M.weight
    renamed = names_in_files(checkpoint.config, lost, stored)
    for name, fields in every.items():
        if fields is None or (name in lost and renamed.get(name) in every):  # a second name, of the parameter
            continue
        name = renamed.get(name, name)
        component, names = _names(name), fields["_tensor_data_names"]
        components = ("qdata", "scale", *(other for other in _OPTIONAL if other in names))
        sources = tuple(map(component, components))
        lacks = [source for source in sources if source not in checkpoint.tensors]
        if lacks:
            raise ValueError(f"{checkpoint.path}, tensor {name}: the checkpoint lacks {', '.join(lacks)}")
        entries[name] = Entry(sources, partial(_built, fields["_type"], components, fields["_data"]))
        if STATIC in names and component(STATIC) in checkpoint.tensors:
            entries[f"{name.rpartition('.')[0]}.input_scale"] = Entry((component(STATIC),))
    return entries


# ---------------------------------------------------------------------------------------------- writing


def _named(kind: str, data: Any) -> dict[str, Any]:
    """torchao's JSON of a dtype, of the member of an enum or of a dataclass."""
    return {"_type": kind, "_data": data}


def _write(name: str, t: MXTensor) -> dict[str, Tensor]:
    operand, stored = rowwise(name, t, TORCHAO, FORMATS_WRITTEN, dims=(2, 3), any_name=True), _names(name)
    if "." not in name:
        raise NotImplementedError(
            f"{name} belongs to no module, and the layout {NAME} holds matrices of modules; rename it, or use the "
            "layout native"
        )
    codes = operand.data
    if operand.format.element.packing == (4, 3):
        codes = torch.stack(unpack(codes, operand.format.element), -1).flatten(-2)[..., : t.shape[-1]].contiguous()
    out = {stored("qdata"): codes, stored("scale"): operand.scale_view}
    if operand.global_scale is not None:
        out[stored("per_tensor_scale")] = stored_for(t, multiplies)
    return out


def _mx(recipe: LinearRecipe) -> dict[str, Any]:
    """Attributes that MXTensor and the arguments of its activations share."""
    format = recipe.stored.format
    element = _ELEMENT_OF[format.name]
    preference = "AUTO" if format.name in _AUTO else "EMULATED"
    return {
        "elem_dtype": element if element.startswith("fp6") else _named("torch.dtype", element),
        "block_size": format.block[-1],
        "kernel_preference": _named("KernelPreference", preference),
    }


def _activation(recipe: LinearRecipe) -> dict[str, Any] | None:
    """The arguments by which torchao casts activations; None leaves them as they are."""
    cast = recipe.activation
    if cast is None:
        return None
    name = cast.format.name
    if name in _ELEMENT_OF:
        shared = _mx(LinearRecipe.inference(cast))
        mode = _named("ScaleCalculationMode", cast.scaling.name)
        fields = {**shared, "scaling_mode": mode, "is_swizzled_scales": False}
        return _named("QuantizeTensorToMXKwargs", fields)
    if name in ("nvfp4", "nvfp4_single_level"):
        fields = {"block_size": 16, "is_swizzled_scales": False, "use_triton_kernel": False,
                  "use_dynamic_per_tensor_scale": name == "nvfp4"}  # fmt: skip
        return _named("QuantizeTensorToNVFP4Kwargs", fields)
    granularities = {"row": _named("PerRow", {"dim": -1}), "tensor": _named("PerTensor", {})}
    granularity = granularities.get(name.rpartition("_")[2])
    if granularity is None:  # torchao's JSON knows no other
        return None
    fields = {
        "float8_dtype": _named("torch.dtype", dtype_name(cast.format.element.dtype)), "granularity": granularity,
        "mm_config": None, "hp_value_lb": None, "hp_value_ub": None,
        "kernel_preference": _named("KernelPreference", "AUTO"),
    }  # fmt: skip
    return _named("QuantizeTensorToFloat8Kwargs", fields)


def _metadata(name: str, t: Tensor) -> dict[str, str]:
    """torchao's class of a tensor, and its attributes."""
    if not isinstance(t, MXTensor):
        return {name: json.dumps({"_type": "Tensor"})} if "." in name else {}
    format, dtype = t.format, _named("torch.dtype", dtype_name(t.dtype))
    fields: dict[str, Any] = {"act_quant_kwargs": _activation(t.recipe)}
    if format.name in _ELEMENT_OF:
        kind = "MXTensor"
        fields |= {**_mx(t.recipe), "orig_dtype": dtype, "is_swizzled_scales": False}
    elif format.name.startswith("nvfp4"):
        kind = "NVFP4Tensor"
        fields |= {"block_size": 16, "orig_dtype": dtype, "is_swizzled_scales": False, "use_triton_kernel": False}
    else:
        kind = "Float8Tensor"
        rows, columns = _BLOCKS[format.name]
        block = [1] * (t.dim() - 2) + [rows if rows > 0 else t.shape[-2], columns if columns > 0 else t.shape[-1]]
        fields |= {
            "block_size": list(t.shape) if rows < 0 else block, "mm_config": None,
            "kernel_preference": _named("KernelPreference", "AUTO"), "dtype": dtype,
        }  # fmt: skip
    names = ["per_tensor_scale", "qdata", "scale"] if format.global_scale else ["qdata", "scale"]
    return {name: json.dumps({**_named(kind, fields), "_tensor_data_names": names})}


def _config(written: Written) -> dict[str, Any]:
    """The configuration of ``quantize_`` that torchao would have for the first weight; MX always casts activations."""
    recipe = next(iter(written.weights.values()))
    name, version = recipe.stored.format.name, 1
    if name in _ELEMENT_OF:
        mx = _mx(recipe)
        kinds = ("MXDynamicActivationMXWeightConfig",) * 2
        fields = {"block_size": mx["block_size"], "activation_dtype": mx["elem_dtype"],
                  "weight_dtype": mx["elem_dtype"], "kernel_preference": mx["kernel_preference"],
                  "scaling_mode": _named("ScaleCalculationMode", recipe.stored.scaling.name)}  # fmt: skip
        more: dict[str, Any] = {}
    elif name.startswith("nvfp4"):
        kinds = "NVFP4WeightOnlyConfig", "NVFP4DynamicActivationNVFP4WeightConfig"
        fields, more = {"use_dynamic_per_tensor_scale": name == "nvfp4"}, {"use_triton_kernel": False, "step": None}
    else:
        kinds, version = ("Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig"), 2
        element = _named("torch.dtype", dtype_name(recipe.stored.format.element.dtype))
        fields, more = {"weight_dtype": element, "set_inductor_config": True}, {"activation_dtype": element}
    casts = recipe.activation is not None
    default = {"_type": kinds[casts], "_version": version, "_data": fields | (more if casts else {})}
    quantization = {
        "quant_method": NAME, "quant_type": {"default": default},
        "modules_to_not_convert": written.skipped,
        "include_input_output_embeddings": False, "untie_embedding_weights": False,
    }  # fmt: skip
    return {"config.json": {"quantization_config": quantization}}


TORCHAO = Layout(
    NAME,
    "torchao, transformers' TorchAoConfig, vLLM",
    detect=lambda checkpoint: (
        checkpoint.method == NAME or (not checkpoint.method and "tensor_names" in checkpoint.metadata)
    ),
    read=_read,
    scales=(),
    write=_write,
    whole=lambda format: (max(format.block[0], 1), max(format.block[1], 1)),
    config=_config,
    operations=(),
    parameter_names=True,
    metadata=_metadata,
    header=lambda entries: {**entries, "tensor_names": json.dumps(list(entries))},
    static_scales=False,
    activation=lambda recipe, every: format_of_inputs(recipe) if _activation(recipe) else None,
    combine=multiplies,
    orphans=("_qdata",),
    own_dtypes=True,
    formats=f"{', '.join(FORMATS_WRITTEN)}; read also: other block sizes",
)
assert set(FORMATS_WRITTEN) <= set(FORMATS)
