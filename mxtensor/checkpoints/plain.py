"""Safetensors without quantized tensors: weights in bfloat16, float16 or float32."""

from __future__ import annotations

from .layout import Layout, format_of_inputs

PLAIN = Layout(
    "plain",
    "transformers and others, without quantization",
    detect=lambda checkpoint: not checkpoint.method and "quantization" not in checkpoint.config,
    read=lambda checkpoint: {},
    scales=(),
    write=lambda name, t: {name: t.dequantize()},
    one_file=True,
    embeddings=True,
    columnwise=True,
    any_name=True,
    input_scales=True,  # values are not cast: nothing applies them
    activation=lambda recipe, every: format_of_inputs(recipe),  # there is no quantized product
    own_dtypes=True,
    decodes=True,
    formats="none: values are dequantized",
    exact="the decoded values, rounded to the dtype of the tensor",
)
