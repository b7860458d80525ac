"""torchao: the tensors of its classes MXTensor, NVFP4Tensor and Float8Tensor, in safetensors.

``M.weight`` is stored as ``M._weight_qdata``, ``M._weight_scale`` and, for NVFP4, ``M._weight_per_tensor_scale``. The
metadata has the class and its attributes as JSON under ``M.weight``, and the list ``tensor_names``. Codes of 4 bits are
packed as here, those of 6 bits have a byte each. Scales may be swizzled. A shard has the metadata of all shards before
it too: transformers keeps the list of the last one.

Source: torchao/prototype/safetensors and torchao/prototype/mx_formats of version 0.18.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..core.arguments import described
from ..core.names import dtype_name
from ..numerics.elements import unpack
from ..numerics.formats import FORMATS
from ..recipe.linear_recipe import LinearRecipe
from ..tensor.mxtensor import MXTensor
from .global_scale import multiplies, stored_for
from .layout import Layout, Written, joined, with_others
from .source import Checkpoint, Entry
from .torchao_tensors import CLASSES, ELEMENTS, tensor_of
from .transformers_names import names_in_files

NAME = "torchao"
_OPTIONAL = ("per_tensor_scale",)
STATIC = "act_per_tensor_scale"
"""The scale of a static activation: as ModelOpt's input_scale, amax / 2688, which multiplies."""


def _names(name: str) -> Callable[[str], str]:
    """Name of a component -> name of the stored tensor."""
    module, _, leaf = name.rpartition(".")
    return lambda component: f"{module}._{leaf}_{component}" if module else f"_{leaf}_{component}"


# ---------------------------------------------------------------------------------------------- reading


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


def _stored(checkpoint: Checkpoint) -> list[str]:
    """The names of quantized tensors in the files: ``M.weight`` of ``M._weight_qdata``."""
    found = []
    for module, _, leaf in (name.rpartition(".") for name in checkpoint.tensors):
        if leaf.startswith("_") and leaf.endswith("_qdata"):
            found.append(joined(module, leaf[1:].removesuffix("_qdata")))
    return found


def _builder(kind: str, components: tuple[str, ...], attributes: dict[str, Any]) -> Callable[..., Tensor]:
    def build(*tensors: Tensor) -> Tensor:
        return tensor_of(kind, dict(zip(components, tensors, strict=True)), attributes)

    return build


def _read(checkpoint: Checkpoint) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    every = {name: _described(checkpoint, name, text) for name, text in checkpoint.metadata.items()}
    rest = {name for name in every if every[name] and _names(name)("qdata") not in checkpoint.tensors}
    renamed = names_in_files(checkpoint.config, rest, _stored(checkpoint)) if rest else {}
    for name, fields in every.items():
        if fields is None or (name in rest and renamed.get(name) in every):  # a second name, of the parameter
            continue
        name = renamed.get(name, name)
        stored, names = _names(name), fields["_tensor_data_names"]
        components = ("qdata", "scale", *(other for other in _OPTIONAL if other in names))
        sources = tuple(map(stored, components))
        lacks = [source for source in sources if source not in checkpoint.tensors]
        if lacks:
            raise ValueError(f"{checkpoint.path}, tensor {name}: the checkpoint lacks {', '.join(lacks)}")
        entries[name] = Entry(sources, _builder(fields["_type"], components, fields["_data"]))
        if STATIC in names and stored(STATIC) in checkpoint.tensors:
            entries[f"{name.rpartition('.')[0]}.input_scale"] = Entry((stored(STATIC),), lambda t: t)
    return with_others(checkpoint, entries, ("_qdata",))


def _detect(checkpoint: Checkpoint) -> bool:
    return checkpoint.method == NAME or (not checkpoint.method and "tensor_names" in checkpoint.metadata)


# ---------------------------------------------------------------------------------------------- writing

_ELEMENT_OF = {format: element for element, format in ELEMENTS.items()}
_FLOAT8 = {
    f"float8_{element}_{kind}": block
    for element in ("e4m3", "e5m2")
    for kind, block in (("row", (1, -1)), ("tensor", (-1, -1)), ("1x128", (1, 128)), ("128x128", (128, 128)))
}
"""Format -> values of a block; -1: all of the dimension."""
FORMATS_WRITTEN = (*_ELEMENT_OF, "nvfp4", "nvfp4_single_level", *_FLOAT8)
_AUTO = ("mxfp8_e4m3", "mxfp4_e2m1")
"""MX formats for which torchao has kernels; it refuses the others unless they are emulated."""


def _dtype(name: str) -> dict[str, str]:
    return {"_type": "torch.dtype", "_data": name}


def _named(kind: str, name: str) -> dict[str, str]:
    return {"_type": kind, "_data": name}


def _checked(name: str, t: MXTensor) -> None:
    """Raise NotImplementedError for a tensor that torchao cannot hold."""
    if t.format.name not in FORMATS_WRITTEN:
        raise NotImplementedError(
            f"{name} is {t.format}, and the layout {NAME} holds {', '.join(FORMATS_WRITTEN)}: pass format=, which "
            "quantizes again"
        )
    rows, block = t.format.block
    whole = (block <= 0 or t.shape[-1] % block == 0) and (rows <= 1 or t.shape[-2] % rows == 0)
    if t.rowwise is None or t.dim() not in (2, 3) or "." not in name or not whole:
        raise NotImplementedError(
            f"{name} has the orientation {t.orientation.label} and the shape {tuple(t.shape)}, and the layout {NAME} "
            f"holds rowwise matrices of modules with whole blocks of {max(rows, 1)}x{block} values; skip it, or use "
            "the layout native"
        )


def _write(name: str, t: MXTensor) -> dict[str, Tensor]:
    _checked(name, t)
    operand, stored = t.rowwise, _names(name)
    assert operand is not None
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
        "elem_dtype": element if element.startswith("fp6") else _dtype(element),
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
        return {"_type": "QuantizeTensorToMXKwargs", "_data": fields}
    if name in ("nvfp4", "nvfp4_single_level"):
        fields = {"block_size": 16, "is_swizzled_scales": False, "use_triton_kernel": False,
                  "use_dynamic_per_tensor_scale": name == "nvfp4"}  # fmt: skip
        return {"_type": "QuantizeTensorToNVFP4Kwargs", "_data": fields}
    granularity = {"row": {"_type": "PerRow", "_data": {"dim": -1}}, "tensor": {"_type": "PerTensor", "_data": {}}}.get(
        name.rpartition("_")[2]
    )
    if granularity is None:  # torchao's JSON knows no other
        return None
    fields = {
        "float8_dtype": _dtype(dtype_name(cast.format.element.dtype)), "granularity": granularity,
        "mm_config": None, "hp_value_lb": None, "hp_value_ub": None,
        "kernel_preference": _named("KernelPreference", "AUTO"),
    }  # fmt: skip
    return {"_type": "QuantizeTensorToFloat8Kwargs", "_data": fields}


def _attributes(t: MXTensor) -> tuple[str, dict[str, Any]]:
    """torchao's class and its attributes."""
    format, dtype = t.format, _dtype(dtype_name(t.dtype))
    arguments = {"act_quant_kwargs": _activation(t.recipe)}
    if format.name in _ELEMENT_OF:
        return "MXTensor", {**_mx(t.recipe), "orig_dtype": dtype, "is_swizzled_scales": False, **arguments}
    if format.name.startswith("nvfp4"):
        fields = {"block_size": 16, "orig_dtype": dtype, "is_swizzled_scales": False, "use_triton_kernel": False}
        return "NVFP4Tensor", fields | arguments
    rows, columns = _FLOAT8[format.name]
    block = [1] * (t.dim() - 2) + [rows if rows > 0 else t.shape[-2], columns if columns > 0 else t.shape[-1]]
    if rows < 0:
        block = list(t.shape)
    preference = _named("KernelPreference", "AUTO")
    return "Float8Tensor", {"block_size": block, "mm_config": None, "kernel_preference": preference, "dtype": dtype,
                            **arguments}  # fmt: skip


def _metadata(name: str, t: Tensor) -> dict[str, str]:
    if not isinstance(t, MXTensor):
        return {name: json.dumps({"_type": "Tensor"})} if "." in name else {}
    kind, attributes = _attributes(t)
    names = ["per_tensor_scale", "qdata", "scale"] if t.format.global_scale else ["qdata", "scale"]
    return {name: json.dumps({"_type": kind, "_data": attributes, "_tensor_data_names": names})}


def _header(entries: Mapping[str, str]) -> dict[str, str]:
    return {**entries, "tensor_names": json.dumps(list(entries))}


def _default(recipe: LinearRecipe) -> dict[str, Any]:
    """The configuration of ``quantize_`` that torchao would have for a recipe; MX has none without activations."""
    name = recipe.stored.format.name
    if name in _ELEMENT_OF:
        mx = _mx(recipe)
        mode = _named("ScaleCalculationMode", recipe.stored.scaling.name)
        fields = {"block_size": mx["block_size"], "activation_dtype": mx["elem_dtype"],
                  "weight_dtype": mx["elem_dtype"], "kernel_preference": mx["kernel_preference"],
                  "scaling_mode": mode}  # fmt: skip
        return {"_type": "MXDynamicActivationMXWeightConfig", "_version": 1, "_data": fields}
    if name.startswith("nvfp4"):
        fields = {"use_dynamic_per_tensor_scale": name == "nvfp4"}
        if recipe.activation is None:
            return {"_type": "NVFP4WeightOnlyConfig", "_version": 1, "_data": fields}
        fields |= {"use_triton_kernel": False}
        return {"_type": "NVFP4DynamicActivationNVFP4WeightConfig", "_version": 1, "_data": {**fields, "step": None}}
    element = _dtype(dtype_name(recipe.stored.format.element.dtype))
    fields = {"weight_dtype": element, "set_inductor_config": True}
    if recipe.activation is None:
        return {"_type": "Float8WeightOnlyConfig", "_version": 2, "_data": fields}
    fields |= {"activation_dtype": element}
    return {"_type": "Float8DynamicActivationFloat8WeightConfig", "_version": 2, "_data": fields}


def _config(written: Written) -> dict[str, Any]:
    if not written.weights:
        return {}
    quantization = {
        "quant_method": NAME, "quant_type": {"default": _default(next(iter(written.weights.values())))},
        "modules_to_not_convert": written.skipped,
        "include_input_output_embeddings": False, "untie_embedding_weights": False,
    }  # fmt: skip
    return {"config.json": {"quantization_config": quantization}}


TORCHAO = Layout(
    NAME,
    "torchao, transformers' TorchAoConfig, vLLM",
    detect=_detect,
    read=_read,
    write=_write,
    whole=lambda format: (max(format.block[0], 1), max(format.block[1], 1)),
    config=_config,
    operations=(),
    parameter_names=True,
    metadata=_metadata,
    header=_header,
    static_scales=False,
    formats=f"{', '.join(FORMATS_WRITTEN)}; read also: other block sizes",
)
assert set(FORMATS_WRITTEN) <= set(FORMATS)
