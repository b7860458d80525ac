"""Safetensors without quantized tensors: weights in bfloat16, float16 or float32."""

from __future__ import annotations

from torch import Tensor

from ..tensor.mxtensor import MXTensor
from .layout import Layout, with_others
from .source import Checkpoint, Entry


def _detect(checkpoint: Checkpoint) -> bool:
    return not checkpoint.method and "quantization" not in checkpoint.config


def _read(checkpoint: Checkpoint) -> dict[str, Entry]:
    return with_others(checkpoint, {})


def _write(name: str, t: MXTensor) -> dict[str, Tensor]:
    return {name: t.dequantize()}


PLAIN = Layout(
    "plain",
    "transformers and others, without quantization",
    detect=_detect,
    read=_read,
    write=_write,
    one_file=True,
    embeddings=True,
    columnwise=True,
    any_name=True,
    formats="none: values are dequantized",
    exact="the decoded values, rounded to the dtype of the tensor",
)
