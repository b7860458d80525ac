"""DeepSeek: float8 with one float32 scale for a tile of 128x128 values, and the FP4 experts of its fourth version.

``X.weight`` F8_E4M3 (N, K) has ``X.weight_scale_inv`` (ceil(N / 128), ceil(K / 128)), which multiplies despite its
name, and stacked experts of transformers (E, N, K) have ``experts.gate_up_proj_scale_inv``.
Scales are float32; transformers also stores them as F8_E8M0, or these bytes as U8 (``scale_fmt: ue8m0``). Those become
float32 scales, which is exact. transformers' "mxfp8" has scales of 1x32 values. Experts in FP4 are I8 or F4 with E8M0
scales of 1x32 values. The fourth version calls the scales ``X.scale``.

Other libraries (AutoFP8, vLLM) call the method ``fp8`` too: ``X.weight_scale`` is one for the tensor or for a row, and
multiplies. ``X.input_scale`` belongs to static activations and is read as an ordinary tensor.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..tensor.mxtensor import MXTensor
from .layout import MERGES, Layout, beside, companions, float8_weight, tile_size, weight
from .reading import Checkpoint, Entry

NAME = "deepseek"
FP4 = (torch.int8, torch.uint8, torch.float4_e2m1fn_x2)
QUANTIZED = ("F8_E4M3", "F8_E5M2", "I8", "U8", "F4")
STACK_SCALE = "_scale_inv"
"""The ending of scales: ``weight_scale_inv``, and transformers' ``experts.gate_up_proj_scale_inv``."""
ACTIVATION = "float8_e4m3_1x128"
"""What readers cast activations to."""
BLOCK = {"float8_e4m3_128x128": 128, "float8_e4m3_128x128_pow2": 128}


def _codes(data: Tensor, scale: Tensor, dtype: torch.dtype, block: int | None) -> MXTensor:
    if data.dtype in FP4:
        return weight(data.view(torch.uint8), scale, "mxfp4_e2m1", dtype)
    return float8_weight(data, scale, dtype, block=block)


def _read(checkpoint: Checkpoint) -> dict[str, Entry]:
    sizes, dtype = checkpoint.quantization.get("weight_block_size"), checkpoint.dtype
    tiles = "weight_block_size" in checkpoint.quantization or checkpoint.method == "mxfp8"
    build = partial(_codes, dtype=dtype, block=tile_size(sizes if tiles else [128, 128]))
    other = partial(_codes, dtype=dtype, block=tile_size(sizes))
    builds = {"weight_scale_inv": build, "scale": build, "weight_scale": other}
    entries: dict[str, Entry] = {}
    for scale, made in builds.items():
        for _, names in companions(checkpoint, "weight", scale):
            if checkpoint.tensors[names[0]].dtype in QUANTIZED:
                entries.setdefault(names[0], Entry(names, made))
    for name, stored in checkpoint.tensors.items():  # stacked experts, which are not the weight of a module
        if name + STACK_SCALE in checkpoint.tensors and stored.dtype in QUANTIZED:
            entries.setdefault(name, Entry((name, name + STACK_SCALE), build))
    return entries


DEEPSEEK: Layout = Layout(
    NAME,
    "DeepSeek V3 and V3.1, transformers' FineGrainedFP8Config; read: AutoFP8, vLLM's fp8",
    detect=lambda checkpoint: (
        checkpoint.method in ("fp8", "mxfp8")
        or (not checkpoint.method and any(name.endswith("weight_scale_inv") for name in checkpoint.tensors))
    ),
    read=_read,
    write=lambda name, t: beside(name, t, DEEPSEEK, BLOCK, "weight", "weight_scale_inv"),
    config=lambda written: {
        "config.json": {
            "quantization_config": {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
                "modules_to_not_convert": written.skipped,
            }
        }
    },
    operations=MERGES,
    shared=False,
    activation=lambda recipe, every: ACTIVATION,
    scales=("weight_scale_inv", "weight_scale", "scale", "_scale_inv"),
    orphans=(STACK_SCALE, ".weight_scale"),
    formats=f"{', '.join(BLOCK)}; read also: float8 with a scale per tensor or row, mxfp8_e4m3, mxfp4_e2m1",
)
