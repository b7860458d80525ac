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

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.arguments import described
from ..core.names import dtype_name
from ..numerics.formats import FORMATS, Format
from ..tensor.mxtensor import MXTensor
from .global_scale import decoded, divides, remember, stored_for
from .layout import MERGES, SPLITS, Layout, Written, columns_of_blocks, companions, joined, rowwise, weight, with_others
from .source import Checkpoint, Entry

METHOD = "compressed-tensors"
NAME = "compressed-tensors"


class Scheme(NamedTuple):
    """How a format is written."""

    format: str
    """The name of compressed-tensors."""
    weights: dict[str, Any]
    activation: dict[str, Any] | None
    """The casts of activations, of a recipe that has one."""
    data: str = "weight"
    activation_format: str = ""
    """The only format of activations that has a name there."""


def _args(bits: int, strategy: str, group: int | None, scale: str | None, dynamic: bool | str, **more: Any) -> Any:
    args = {"num_bits": bits, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": dynamic, **more}
    return args | ({"group_size": group} if group else {}) | ({"scale_dtype": scale} if scale else {})


def _mx(format: str, bits: int, name: str, data: str) -> Scheme:
    def args(dynamic: bool) -> Any:
        return _args(bits, "group", 32, "torch.uint8", dynamic)

    return Scheme(name, args(False), None if bits == 6 else args(True), data, format)


SCHEMES = {
    "mxfp4_e2m1": _mx("mxfp4_e2m1", 4, "mxfp4-pack-quantized", "weight_packed"),
    "mxfp6_e2m3": _mx("mxfp6_e2m3", 6, "mxfp6-pack-quantized", "weight_packed"),
    "mxfp8_e4m3": _mx("mxfp8_e4m3", 8, "mxfp8-quantized", "weight"),
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
_E8M0 = (torch.uint8, torch.float8_e8m0fnu)

# ---------------------------------------------------------------------------------------------- reading


def _group_of(checkpoint: Checkpoint, module: str) -> dict[str, Any]:
    """The group of the configuration that a module belongs to; empty if there is none."""
    groups = checkpoint.quantization.get("config_groups")
    for group in (groups if isinstance(groups, dict) else {}).values():
        targets = group.get("targets") if isinstance(group, dict) else None
        if any(_matches(target, module) for target in (targets if isinstance(targets, list) else ())):
            return group  # type: ignore[no-any-return]
    return {}


def _activation(group: dict[str, Any]) -> str | None:
    """The format to which activations are cast on the fly; None leaves them as they are."""
    args = group.get("input_activations")
    if not isinstance(args, dict) or args.get("dynamic") is not True or args.get("type") != "float":
        return None
    key = args.get("num_bits"), args.get("strategy"), args.get("group_size")
    return ACTIVATIONS.get(key) if all(type(k) in (int, str, type(None)) for k in key) else None  # type: ignore


def tile_size(sizes: object) -> int | None:
    """The size of square tiles that a configuration names; None if it names none or others.

    Raises NotImplementedError for tiles without a format.
    """
    if not isinstance(sizes, list) or len(sizes) != 2 or sizes == [1, 32]:
        return None
    if sizes[0] != sizes[1] or type(sizes[0]) is not int or sizes[0] not in (16, 32, 64, 128):
        raise NotImplementedError(
            f"tiles of {described(sizes)} values are not supported; use square tiles of 16, 32, 64 or 128"
        )
    return sizes[0]


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


def _packed_format(data: Tensor, scale: Tensor) -> str:
    """The format of packed codes, by the bytes that one scale covers. Raises ValueError if there is none."""
    if data.dtype is not torch.uint8:
        raise NotImplementedError(
            f"weight_packed is {dtype_name(data.dtype)}: packed integers (int4, int8) are not "
            "supported; dequantize them with compressed-tensors"
        )
    if scale.dtype is torch.float8_e4m3fn:
        return "nvfp4"
    columns = data.shape[-1] if data.dim() else 0
    groups = max(scale.shape[-1], 1) if scale.dim() else 1
    for format in ("mxfp4_e2m1", "mxfp6_e2m3"):
        bits = FORMATS[format].element.bits
        if columns == groups * 4 * bits:
            return format
    raise ValueError(
        f"weight_packed {tuple(data.shape)} and weight_scale {tuple(scale.shape)} are neither MXFP4 nor MXFP6: a scale "
        "covers 16 or 24 bytes"
    )


def _packed(dtype: torch.dtype, activation: str | None) -> Callable[..., Tensor]:
    def build(data: Tensor, scale: Tensor, *global_scale: Tensor) -> Tensor:
        format = _packed_format(data, scale)
        if format != "nvfp4":
            return weight(data, scale, format, dtype, activation=activation)
        if not global_scale or global_scale[0].numel() != 1 or global_scale[0].dtype != torch.float32:
            got = [(str(t.dtype), tuple(t.shape)) for t in global_scale]
            raise ValueError(f"NVFP4 needs weight_global_scale, one float32; got {got or 'none'}")
        here = decoded(global_scale[0], divides, dtype)
        return remember(weight(data, scale, format, dtype, here, activation), divides, global_scale[0])

    return build


def float8_weight(
    data: Tensor, scale: Tensor, dtype: torch.dtype, activation: str | None = None, block: int | None = None
) -> MXTensor:
    """A float8 matrix, or a stack, with MX scales, or float scales for a row, the tensor or a square tile.

    Scales multiply. ``block``: the size of the tiles by the configuration; without it the shape of the scales decides.
    Raises ValueError for scales of another shape or dtype.
    """
    elements = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
    if data.dtype not in elements:
        raise NotImplementedError(f"the weight is {dtype_name(data.dtype)}, and only float8 (e4m3, e5m2) is supported")
    element, shape = elements[data.dtype], tuple(data.shape)
    if data.dim() not in (2, 3) or 0 in shape:
        raise ValueError(f"a float8 weight needs two dimensions (three: stacked) and values, got shape {shape}")
    stack, matrix = shape[:-2], shape[-2:]
    tiles = (block,) if block else (128, 64, 32, 16)
    if block is None and scale.dtype in _E8M0 and tuple(scale.shape) == (*shape[:-1], -(-shape[-1] // 32)):
        return weight(data, scale, f"mxfp8_{element}", dtype, activation=activation)
    if scale.dtype is torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    if not scale.is_floating_point():
        raise ValueError(f"the scale is {scale.dtype}; it must be a float dtype, or E8M0 bytes")
    scale = scale.to(torch.float32)
    if block is None and scale.numel() == 1 and (math.prod(shape[:-1]) > 1 or not scale.dim()):
        return weight(data, scale.reshape((1,) * len(shape)), f"float8_{element}_tensor", dtype, activation=activation)
    if block is None and tuple(scale.shape) in (shape[:-1], (*shape[:-1], 1)):
        return weight(data, scale.reshape(*shape[:-1], 1), f"float8_{element}_row", dtype, activation=activation)
    for n in tiles:
        if tuple(scale.shape) == (*stack, *(-(-size // n) for size in matrix)):
            format: Format = FORMATS[f"float8_{element}_128x128"].with_block((n, n))
            return weight(data, scale, format, dtype, activation=activation)
    what = f"tiles of {block}x{block}" if block else "rows, the tensor or square tiles of 16, 32, 64 or 128"
    raise ValueError(f"the scales {tuple(scale.shape)} of a weight {shape} are not those of {what}")


def _float8(dtype: torch.dtype, group: dict[str, Any]) -> Callable[..., Tensor]:
    casts = group.get("weights")
    block = tile_size(casts.get("block_structure")) if isinstance(casts, dict) else None
    return lambda data, scale: float8_weight(data, scale, dtype, _activation(group), block)


def _read(checkpoint: Checkpoint) -> dict[str, Entry]:
    entries = {}
    for module, names in companions(checkpoint, "weight_packed", ["weight_scale"], ["weight_global_scale"]):
        build = _packed(checkpoint.dtype, _activation(_group_of(checkpoint, module)))
        entries[joined(module, "weight")] = Entry(names, build)
    for module, names in companions(checkpoint, "weight", ["weight_scale"]):
        entries[joined(module, "weight")] = Entry(names, _float8(checkpoint.dtype, _group_of(checkpoint, module)))
    for module, names in companions(checkpoint, "weight_packed", []):
        if joined(module, "weight") not in entries:
            raise ValueError(f"{checkpoint.place(names[0])}: the checkpoint lacks {joined(module, 'weight_scale')}")
        if joined(module, "weight_zero_point") in checkpoint.tensors:
            raise NotImplementedError(f"{checkpoint.place(names[0])} has a zero point, which is not supported")
    return with_others(checkpoint, entries, ("weight_scale", "weight_global_scale"))


# ---------------------------------------------------------------------------------------------- writing


def _write(name: str, t: MXTensor) -> dict[str, Tensor]:
    scheme: Scheme
    operand, scheme = rowwise(name, t, NAME, SCHEMES, whole_blocks=t.format.block[0] == 1)
    module = name.removesuffix("weight")
    out = {f"{module}{scheme.data}": operand.data, f"{module}weight_scale": operand.scale}
    if operand.global_scale is not None:
        out[f"{module}weight_scale"] = operand.scale_view
        out[f"{module}weight_global_scale"] = stored_for(t, divides).reshape(1)
    elif operand.scale.is_floating_point():
        narrow = operand.scale.to(t.dtype)  # the dtype in which compressed-tensors makes them
        if torch.equal(narrow.to(torch.float32), operand.scale):
            out[f"{module}weight_scale"] = narrow
    return out


def _group(format: str, activation: str | None, targets: list[str]) -> dict[str, Any]:
    scheme = SCHEMES[format]
    inputs = scheme.activation if activation == scheme.activation_format else None
    return {"targets": targets, "weights": scheme.weights, "input_activations": inputs, "output_activations": None,
            "format": scheme.format}  # fmt: skip


def _config(written: Written) -> dict[str, Any]:
    kinds: dict[tuple[str, str | None], list[str]] = {}
    for name, recipe in written.weights.items():
        activation = recipe.activation.format.name if recipe.activation else None
        kinds.setdefault((recipe.stored.format.name, activation), []).append(name)
    if not kinds:
        return {}
    groups = {
        f"group_{i}": _group(*kind, ["Linear"] if len(kinds) == 1 else written.modules(names))
        for i, (kind, names) in enumerate(kinds.items())
    }
    formats = {SCHEMES[format].format for format, _ in kinds}
    quantization = {
        "quant_method": METHOD, "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed", "global_compression_ratio": None, "kv_cache_scheme": None,
        "config_groups": groups,
        "ignore": [*written.skipped, *(f"re:{re.escape(module)}\\..*" for module in written.skipped_stacks)],
    }  # fmt: skip
    return {"config.json": {"quantization_config": quantization}}


COMPRESSED_TENSORS = Layout(
    NAME,
    "llm-compressor, vLLM, transformers",
    detect=lambda checkpoint: checkpoint.method == METHOD,
    read=_read,
    write=_write,
    whole=lambda format: columns_of_blocks(format) if format.block[0] == 1 else (1, 1),
    config=_config,
    operations=MERGES,
    stacks_scales=False,  # CompressedTensorsDequantize of transformers 5.23 reads no weight_global_scale of experts
    shared=False,
    row_operations=SPLITS,
    formats=", ".join(SCHEMES),
    exact="codes and scales; the global scale of NVFP4 is a reciprocal, exact if it was loaded from this layout, "
    "otherwise to one float32 step",
)
