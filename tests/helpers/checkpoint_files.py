"""Checkpoints of other libraries, written by hand."""

import json

import torch
from safetensors.torch import save_file

CONFIG = {"dtype": "bfloat16"}


def checkpoint(path, tensors, quantization=None, **config):
    """A folder with these tensors and this configuration."""
    path.mkdir()
    save_file({name: t.contiguous() for name, t in tensors.items()}, path / "model.safetensors")
    extra = {} if quantization is None else {"quantization_config": quantization}
    (path / "config.json").write_text(json.dumps(CONFIG | config | extra))
    return path


def scale_bytes(*shape, low=100, high=140):
    return torch.randint(low, high, shape, dtype=torch.uint8)
