"""NVIDIA ModelOpt: NVFP4, MXFP4, MXFP8 and float8 with one scale per tensor.

NVFP4 with its W4A16 and W4A8: ``weight`` U8 with ``weight_scale`` F8_E4M3 and ``weight_scale_2`` F32, which multiplies.
MXFP4 and its W4A8: ``weight`` U8 with ``weight_scale`` U8 (E8M0). MXFP8 and float8: ``weight`` F8_E4M3 with
``weight_scale`` U8 or F32. ``input_scale`` belongs to static activations and is read as an ordinary tensor.

Source: modelopt/torch/export and modelopt/torch/quantization/qtensor of version 0.47.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.names import dtype_name
from ..recipe.linear_recipe import LinearRecipe
from ..tensor.mxtensor import MXTensor
from .global_scale import multiplies
from .layout import (
    Layout,
    Written,
    beside,
    columns_of_blocks,
    companions,
    float8_weight,
    format_of_inputs,
    nvfp4_weight,
    weight,
)
from .reading import Checkpoint, Entry

NAME = "modelopt"
ENDS = ("weight", "weight_scale", "weight_scale_2")
ALGORITHMS = {"nvfp4": ("NVFP4", 16), "mxfp8_e4m3": ("MXFP8", 32), "mxfp4_e2m1": ("mxfp4", 32)}
"""Format -> quant_algo and group_size."""
WITH_ACTIVATION = {
    ("nvfp4", None): "W4A16_NVFP4", ("nvfp4", "float8_e4m3_tensor"): "W4A8_NVFP4_FP8",
    ("mxfp4_e2m1", "float8_e4m3_tensor"): "W4A8_MXFP4_FP8",
}  # fmt: skip
"""(format, format of activations) -> quant_algo, where another one is used."""


def _codes(data: Tensor, scale: Tensor, *second: Tensor, dtype: torch.dtype) -> MXTensor:
    if data.dtype is not torch.uint8:
        return float8_weight(data, scale, dtype)
    if scale.dtype is torch.uint8 and scale.dim():
        return weight(data, scale, "mxfp4_e2m1", dtype)
    if scale.dtype is not torch.float8_e4m3fn:
        raise NotImplementedError(
            f"codes of 4 bits with scales in {dtype_name(scale.dtype)} are neither NVFP4 nor MXFP4; integer codes "
            "(AWQ, W4A8_AWQ) are not supported"
        )
    return nvfp4_weight(data, scale, second, "weight_scale_2", multiplies, dtype)


def _read(checkpoint: Checkpoint) -> dict[str, Entry]:
    build = partial(_codes, dtype=checkpoint.dtype)
    return {names[0]: Entry(names, build) for _, names in companions(checkpoint, *ENDS)}


def _algorithm(recipes: Collection[LinearRecipe]) -> tuple[str, str | None]:
    """The quant_algo of weights in one format, and the format to which its readers cast activations."""
    format = next(iter(recipes)).stored.format.name
    casts = {format_of_inputs(recipe) for recipe in recipes}
    kind = format, casts.pop() if len(casts) == 1 else format
    return (WITH_ACTIVATION[kind], kind[1]) if kind in WITH_ACTIVATION else (ALGORITHMS[format][0], format)


def _config(written: Written) -> dict[str, Any]:
    formats = {recipe.stored.format.name for recipe in written.weights.values()}
    if len(formats) > 1:
        raise NotImplementedError(
            f"the layout modelopt holds one format in a checkpoint, got {', '.join(sorted(formats))}: pass format="
        )
    algorithm, _ = _algorithm(written.weights.values())
    common = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "group_size": ALGORITHMS[formats.pop()][1]}
    producer = {"name": "modelopt", "version": "0.47.0"}  # the version whose layout this is
    quantization = {"quant_method": NAME, "producer": producer, "ignore": written.skipped, **common}
    return {
        "config.json": {"quantization_config": quantization},
        "hf_quant_config.json": {"producer": producer, "quantization": {**common, "exclude_modules": written.skipped}},
    }


MODELOPT: Layout = Layout(
    NAME,
    "NVIDIA ModelOpt; vLLM, SGLang, TensorRT-LLM read it",
    detect=lambda checkpoint: (
        checkpoint.method == NAME
        or (not checkpoint.method and bool(checkpoint.json("hf_quant_config.json").get("quantization")))
    ),
    read=_read,
    write=lambda name, t: beside(name, t, MODELOPT, ALGORITHMS, *ENDS),
    whole=columns_of_blocks,
    input_scales=True,
    config=_config,
    activation=lambda recipe, every: _algorithm(every)[1],
    combine=multiplies,
    scales=ENDS[1:],
    formats=f"{', '.join(ALGORITHMS)}; read also: float8 with one scale per tensor",
)
