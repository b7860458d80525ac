"""A Llama of transformers with random weights, for benchmarks that read shapes and not text."""

from __future__ import annotations

from typing import Any

import torch


def llama(**sizes: Any) -> Any:
    """The model of ``LlamaConfig(**sizes)``: in bfloat16, on the default device, for inference."""
    from transformers import LlamaConfig, LlamaForCausalLM

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return LlamaForCausalLM(LlamaConfig(**sizes)).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)
