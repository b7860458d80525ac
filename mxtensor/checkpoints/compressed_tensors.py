"""compressed-tensors, which llm-compressor writes and vLLM reads.

| scheme | tensors of a module |
| --- | --- |
| MXFP4, MXFP6 | weight_packed U8, weight_scale U8 (E8M0) |
| NVFP4 | weight_packed U8, weight_scale F8_E4M3, weight_global_scale F32, which divides |
| MXFP8 | weight F8_E4M3, weight_scale U8 (E8M0) |
| float8 | weight F8_E4M3, weight_scale BF16 or F32: one for a row, the tensor or a tile of 128x128 |

Source: compressed_tensors/compressors and quantization/quant_scheme.py of version 0.20.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.arguments import described
from ..core.names import dtype_name
from ..numerics.formats import FORMATS
from ..tensor.mxtensor import MXTensor
from .global_scale import divides
from .layout import (
    MERGES,
    SPLITS,
    Layout,
    Written,
    beside,
    companions,
    float8_weight,
    format_of_inputs,
    nvfp4_weight,
    tile_size,
    weight,
)
from .reading import Checkpoint, Entry

NAME = "compressed-tensors"
SCALES = ("weight_scale", "weight_global_scale")


class Scheme(NamedTuple):
    """How a format is written."""

    format: str
    """The name of compressed-tensors."""
    weights: dict[str, Any]
    activation: dict[str, Any] | None
    """The casts of activations, of a recipe that has one."""
    data: str = "weight"
    activation_format: str = ""
    """The format that these casts have, the only one with a name there."""


def _args(bits: int, strategy: str, group: int | None, scale: str | None, dynamic: bool | str, **more: Any) -> Any:
    args = {"num_bits": bits, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": dynamic, **more}
    return args | ({"group_size": group} if group else {}) | ({"scale_dtype": scale} if scale else {})


SCHEMES = {
    "mxfp4_e2m1": Scheme(
        "mxfp4-pack-quantized", _args(4, "group", 32, "torch.uint8", False), _args(4, "group", 32, "torch.uint8", True),
        "weight_packed", "mxfp4_e2m1",
    ),
    "mxfp6_e2m3": Scheme(
        "mxfp6-pack-quantized", _args(6, "group", 32, "torch.uint8", False), None, "weight_packed",
    ),
    "mxfp8_e4m3": Scheme(
        "mxfp8-quantized", _args(8, "group", 32, "torch.uint8", False), _args(8, "group", 32, "torch.uint8", True),
        "weight", "mxfp8_e4m3",
    ),
    "nvfp4": Scheme(
        "nvfp4-pack-quantized", _args(4, "tensor_group", 16, "torch.float8_e4m3fn", False), None, "weight_packed"
    ),
    "float8_e4m3_row": Scheme(
        "float-quantized", _args(8, "channel", None, None, False), _args(8, "token", None, None, True),
        activation_format="float8_e4m3_row",
    ),
    "float8_e4m3_128x128": Scheme(
        "float-quantized", _args(8, "block", None, None, False, block_structure=[128, 128]),
        _args(8, "group", 128, None, True), activation_format="float8_e4m3_1x128",
    ),
}  # fmt: skip
"""Format -> how it is written. Formats with one scale per tensor are only read: they need static activation scales."""
ACTIVATIONS = {
    (4, "group", 32): "mxfp4_e2m1", (8, "group", 32): "mxfp8_e4m3", (8, "token", None): "float8_e4m3_row",
    (8, "group", 128): "float8_e4m3_1x128",
}  # fmt: skip
"""(bits, strategy, group) of dynamic activations -> their format."""


_REPEATED_GROUP, _REPETITION = re.compile(r"\)[*+{]"), re.compile(r"[*+{]")
"""Patterns of a file with these could take for ever."""
# ---------------------------------------------------------------------------------------------- reading


def _group_of(checkpoint: Checkpoint, module: str) -> dict[str, Any]:
    """The group of the configuration that a module belongs to; empty if there is none."""
    groups = checkpoint.quantization.get("config_groups")
    for group in (groups if isinstance(groups, dict) else {}).values():
        targets = group.get("targets") if isinstance(group, dict) else None
        if any(_matches(target, module) for target in (targets if isinstance(targets, list) else ())):
            return group  # type: ignore[no-any-return]
    return {}


def activation_of(group: dict[str, Any]) -> str | None:
    """The format to which activations are cast on the fly; None leaves them as they are."""
    args = group.get("input_activations")
    if not isinstance(args, dict) or args.get("dynamic") is not True or args.get("type") != "float":
        return None
    key = args.get("num_bits"), args.get("strategy"), args.get("group_size")
    return ACTIVATIONS.get(key) if all(type(k) in (int, str, type(None)) for k in key) else None  # type: ignore


def _matches(target: object, module: str) -> bool:
    """Whether a target of a group is this module: its class, its name, or a regular expression of its name."""
    if not isinstance(target, str):
        return False
    if target.startswith("re:"):
        if len(target) > 1000 or _REPEATED_GROUP.search(target) or len(_REPETITION.findall(target)) > 3:
            raise ValueError(
                f"the target {described(target)} is too complex a pattern: it may have at most 1000 characters, three "
                "repetitions, and no repeated group"
            )
        try:
            return re.match(target[3:], module) is not None
        except re.error:
            return False
    return target in ("Linear", module)


def _packed(data: Tensor, scale: Tensor, *global_scale: Tensor, dtype: torch.dtype, activation: str | None) -> MXTensor:
    """Packed codes in the format whose codes one scale covers. Raises ValueError if there is none."""
    if data.dtype is not torch.uint8:
        raise NotImplementedError(
            f"weight_packed is {dtype_name(data.dtype)}: packed integers (int4, int8) are not "
            "supported; dequantize them with compressed-tensors"
        )
    if scale.dtype is torch.float8_e4m3fn:
        return nvfp4_weight(data, scale, global_scale, "weight_global_scale", divides, dtype, activation)
    columns = data.shape[-1] if data.dim() else 0
    groups = max(scale.shape[-1], 1) if scale.dim() else 1
    for format in ("mxfp4_e2m1", "mxfp6_e2m3"):
        if columns == groups * 4 * FORMATS[format].element.bits:
            return weight(data, scale, format, dtype, activation)
    raise ValueError(
        f"weight_packed {tuple(data.shape)} and weight_scale {tuple(scale.shape)} are neither MXFP4 nor MXFP6: a scale "
        "covers 16 or 24 bytes"
    )


def _read(checkpoint: Checkpoint) -> dict[str, Entry]:
    entries, dtype = {}, checkpoint.dtype
    for module, names in companions(checkpoint, "weight_packed", *SCALES):
        activation = activation_of(_group_of(checkpoint, module))
        entries[names[0].removesuffix("_packed")] = Entry(names, partial(_packed, dtype=dtype, activation=activation))
    for module, names in companions(checkpoint, "weight", "weight_scale"):
        group = _group_of(checkpoint, module)
        casts = group.get("weights")
        block = tile_size(casts.get("block_structure")) if isinstance(casts, dict) else None
        build = partial(float8_weight, dtype=dtype, activation=activation_of(group), block=block)
        entries[names[0]] = Entry(names, build)
    for name in checkpoint.tensors:
        module = name.removesuffix("weight_packed")
        if name.rpartition(".")[2] != "weight_packed":
            continue
        if f"{module}weight" not in entries:
            raise ValueError(f"{checkpoint.place(name)}: the checkpoint lacks {module}weight_scale")
        if f"{module}weight_zero_point" in checkpoint.tensors:
            raise NotImplementedError(f"{checkpoint.place(name)} has a zero point, which is not supported")
    return entries


# ---------------------------------------------------------------------------------------------- writing


def _write(name: str, t: MXTensor) -> dict[str, Tensor]:
    out = beside(name, t, COMPRESSED_TENSORS, SCHEMES, "weight", *SCALES)
    codes, scale, *second = out
    if second:
        out[second[0]] = out[second[0]].reshape(1)
    elif out[scale].dtype is torch.float32:
        narrow = out[scale].to(t.dtype)  # the dtype in which compressed-tensors makes them
        if torch.equal(narrow.to(torch.float32), out[scale]):
            out[scale] = narrow
    return {name.removesuffix("weight") + SCHEMES[t.format.name].data: out.pop(codes), **out}


def _config(written: Written) -> dict[str, Any]:
    kinds: dict[tuple[str, str | None], list[str]] = {}
    for name, recipe in written.weights.items():
        kinds.setdefault((recipe.stored.format.name, format_of_inputs(recipe)), []).append(name)
    groups = {}
    for i, ((format, activation), names) in enumerate(kinds.items()):
        scheme = SCHEMES[format]
        groups[f"group_{i}"] = {
            "targets": ["Linear"] if len(kinds) == 1 else written.modules(names), "weights": scheme.weights,
            "input_activations": scheme.activation if activation == scheme.activation_format else None,
            "output_activations": None, "format": scheme.format,
        }  # fmt: skip
    formats = {SCHEMES[format].format for format, _ in kinds}
    quantization = {
        "quant_method": NAME, "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed", "global_compression_ratio": None, "kv_cache_scheme": None,
        "config_groups": groups,
        "ignore": [*written.skipped, *(f"re:{re.escape(module)}\\..*" for module in written.modules(written.stacks))],
    }  # fmt: skip
    return {"config.json": {"quantization_config": quantization}}


COMPRESSED_TENSORS = Layout(
    NAME,
    "llm-compressor, vLLM, transformers",
    detect=lambda checkpoint: checkpoint.method == NAME,
    read=_read,
    write=_write,
    whole=lambda format: (1, max(format.block[-1], 1)) if format.block[0] == 1 else (1, 1),
    config=_config,
    operations=MERGES,
    stacks_scales=False,  # CompressedTensorsDequantize of transformers 5.23 reads no weight_global_scale of experts
    shared=False,
    row_operations=SPLITS,
    activation=lambda recipe, every: (
        found if (found := format_of_inputs(recipe)) == SCHEMES[recipe.stored.format.name].activation_format else None
    ),
    combine=divides,
    scales=SCALES,
    formats=", ".join(SCHEMES),
    exact="codes and scales; the global scale of NVFP4 is a reciprocal, exact if it was loaded from this layout, "
    "otherwise to one float32 step",
)
