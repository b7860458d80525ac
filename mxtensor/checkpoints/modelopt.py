"""NVIDIA ModelOpt: NVFP4, MXFP4, MXFP8 and float8 with one scale per tensor.

NVFP4 with its W4A16 and W4A8: ``weight`` U8 with ``weight_scale`` F8_E4M3 and ``weight_scale_2`` F32, which multiplies.
MXFP4 and its W4A8: ``weight`` U8 with ``weight_scale`` U8 (E8M0). MXFP8 and float8: ``weight`` F8_E4M3 with
``weight_scale`` U8 or F32. ``input_scale`` belongs to static activations and is read as an ordinary tensor.

Source: modelopt/torch/export and modelopt/torch/quantization/qtensor of version 0.47.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.names import dtype_name
from ..tensor.mxtensor import MXTensor
from .compressed_tensors import float8_weight
from .global_scale import decoded, multiplies, remember, stored_for
from .layout import Layout, Written, columns_of_blocks, companions, joined, rowwise, weight, with_others
from .source import Checkpoint, Entry

NAME = "modelopt"
ALGORITHMS = {"nvfp4": ("NVFP4", 16), "mxfp8_e4m3": ("MXFP8", 32), "mxfp4_e2m1": ("mxfp4", 32)}
"""Format -> quant_algo and group_size."""
WITH_ACTIVATION = {
    ("nvfp4", None): "W4A16_NVFP4", ("nvfp4", "float8_e4m3_tensor"): "W4A8_NVFP4_FP8",
    ("mxfp4_e2m1", "float8_e4m3_tensor"): "W4A8_MXFP4_FP8",
}  # fmt: skip
"""(format, format of activations) -> quant_algo, where another one is used."""


def _codes(dtype: torch.dtype) -> Callable[..., Tensor]:
    def build(data: Tensor, scale: Tensor, *second: Tensor) -> Tensor:
        if data.dtype is not torch.uint8:
            return float8_weight(data, scale, dtype)
        if scale.dtype is torch.uint8 and scale.dim():
            return weight(data, scale, "mxfp4_e2m1", dtype)
        if scale.dtype is not torch.float8_e4m3fn:
            raise NotImplementedError(
                f"codes of 4 bits with scales in {dtype_name(scale.dtype)} are neither NVFP4 nor "
                "MXFP4; integer codes (AWQ, W4A8_AWQ) are not supported"
            )
        if not second or second[0].numel() != 1 or second[0].dtype != torch.float32:
            got = [(str(t.dtype), tuple(t.shape)) for t in second]
            raise ValueError(f"NVFP4 needs weight_scale_2, one float32; got {got or 'none'}")
        here = decoded(second[0], multiplies, dtype)
        return remember(weight(data, scale, "nvfp4", dtype, here), multiplies, second[0])

    return build


def _detect(checkpoint: Checkpoint) -> bool:
    return checkpoint.method == "modelopt" or (
        not checkpoint.method and bool(checkpoint.json("hf_quant_config.json").get("quantization"))
    )


def _read(checkpoint: Checkpoint) -> dict[str, Entry]:
    entries = {
        joined(module, "weight"): Entry(names, _codes(checkpoint.dtype))
        for module, names in companions(checkpoint, "weight", ["weight_scale"], ["weight_scale_2"])
    }
    return with_others(checkpoint, entries, ("weight_scale", "weight_scale_2"))


def _write(name: str, t: MXTensor) -> dict[str, Tensor]:
    operand, _ = rowwise(name, t, NAME, ALGORITHMS)
    out = {name: operand.data, f"{name}_scale": operand.scale}
    if operand.global_scale is not None:
        out[f"{name}_scale"] = operand.scale_view
        out[f"{name}_scale_2"] = stored_for(t, multiplies)
    return out


def _config(written: Written) -> dict[str, Any]:
    recipes = written.weights.values()
    formats = {recipe.stored.format.name for recipe in recipes}
    if not formats:
        return {}
    if len(formats) > 1:
        raise NotImplementedError(
            f"the layout modelopt holds one format in a checkpoint, got {', '.join(sorted(formats))}: pass format="
        )
    format = formats.pop()
    algorithm, group = ALGORITHMS[format]
    casts = {recipe.activation.format.name if recipe.activation else None for recipe in recipes}
    algorithm = WITH_ACTIVATION.get((format, casts.pop()), algorithm) if len(casts) == 1 else algorithm
    common = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "group_size": group}
    producer = {"name": "modelopt", "version": "0.47.0"}  # the version whose layout this is
    return {
        "config.json": {
            "quantization_config": {
                "quant_method": "modelopt",
                "producer": producer,
                "ignore": written.skipped,
                **common,
            }
        },
        "hf_quant_config.json": {"producer": producer, "quantization": {**common, "exclude_modules": written.skipped}},
    }


MODELOPT = Layout(
    NAME,
    "NVIDIA ModelOpt; vLLM, SGLang, TensorRT-LLM read it",
    detect=_detect,
    read=_read,
    write=_write,
    whole=columns_of_blocks,
    config=_config,
    formats=f"{', '.join(ALGORITHMS)}; read also: float8 with one scale per tensor",
)
