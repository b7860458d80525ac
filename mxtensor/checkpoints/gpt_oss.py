"""gpt-oss: the experts of a layer stacked in MXFP4, as OpenAI released them and as transformers saves them.

``experts.gate_up_proj_blocks`` U8 (experts, out, in / 32, 16) and ``..._scales`` U8 (experts, out, in / 32). The
parameter of the model is (experts, in, out), so it has these codes as its columnwise operand. The original release has
other names: ``mlp1_weight.blocks``.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..tensor.mxtensor import MXTensor
from .layout import Layout, weight
from .reading import Checkpoint, Entry

NAMES = (("_blocks", "_scales"), (".blocks", ".scales"))
"""The two endings of codes and scales: transformers', and those of the original release."""
FORMAT = "mxfp4_e2m1"


def _codes(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> MXTensor:
    if blocks.dim() < 2 or blocks.shape[-1] != 16 or blocks.shape[:-1] != scales.shape:
        raise ValueError(
            f"blocks {tuple(blocks.shape)} and scales {tuple(scales.shape)} do not fit: 16 bytes share a scale"
        )
    if blocks.dim() != 4:
        raise ValueError(f"blocks must be (experts, out, in / 32, 16), got {tuple(blocks.shape)}")
    return weight(blocks.flatten(-2), scales, FORMAT, dtype, columnwise=True)


def _read(checkpoint: Checkpoint) -> dict[str, Entry]:
    entries = {}
    for name, stored in checkpoint.tensors.items():
        for blocks, scales in NAMES:
            if not name.endswith(blocks) or stored.dtype != "U8":
                continue
            model_name = name.removesuffix(blocks)
            other = model_name + scales
            if other not in checkpoint.tensors:
                raise ValueError(f"{checkpoint.place(name)}: the checkpoint lacks {other}")
            entries[model_name] = Entry((name, other), partial(_codes, dtype=checkpoint.dtype))
    return entries


def _write(name: str, t: MXTensor) -> dict[str, Tensor]:
    operand = t.columnwise
    if t.format.name != FORMAT or t.dim() != 3 or operand is None or t.shape[-2] % 32:
        raise NotImplementedError(
            f"{name} is {t.format}, {t.orientation.label}, of shape {tuple(t.shape)}; the layout gpt-oss holds experts "
            "(experts, in, out) as columnwise mxfp4 with in a multiple of 32"
        )
    blocks = operand.data.reshape(*operand.scale.shape, 16)
    return {f"{name}_blocks": blocks, f"{name}_scales": operand.scale}


GPT_OSS = Layout(
    "gpt-oss",
    "OpenAI's gpt-oss, transformers' Mxfp4Config",
    detect=lambda checkpoint: (
        checkpoint.method == "mxfp4"
        or (
            not checkpoint.method
            and any(n.endswith(("_blocks", ".blocks")) and t.dtype == "U8" for n, t in checkpoint.tensors.items())
        )
    ),
    read=_read,
    write=_write,
    whole=lambda format: (32, 1),
    config=lambda written: {
        "config.json": {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": written.skipped}}
    },
    dims=(3,),
    scales=("_scales", ".scales"),
    formats="mxfp4_e2m1, stacked experts",
)
