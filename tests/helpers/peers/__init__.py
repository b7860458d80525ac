"""Files that other libraries make, and the values to which their own code dequantizes them.

python -m tests.helpers.peers        write the fixtures of the libraries that are installed

A module of this folder has ``NEEDS``, the modules that it imports, and ``make(folder, shapes, dtype)``, which writes a
checkpoint into the folder and returns name -> values. torchao 0.18 and mlx[cpu] 0.32 install as they are; for
nvidia-modelopt 0.47 and amd-quark 0.13, ``pip install --no-deps`` and the modules whose names they then ask for.
"""

from __future__ import annotations

import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import save_file

FIXTURES = Path(__file__).parent / "fixtures"
PEERS = ("torchao_files", "mlx_files", "modelopt_files", "quark_files")
SHAPES = [(64, 64), (130, 96), (16, 256), (1, 32), (200, 1024), (33, 160)]
SMALL = [(8, 64), (2, 96)]
"""Shapes of the fixtures."""


def peer(name):
    return import_module(f"{__name__}.{name}")


def is_installed(name):
    return all(find_spec(module.partition(".")[0]) is not None for module in peer(name).NEEDS)


def special(shape, dtype, largest=2.0**14):
    """Normal values over many magnitudes, with rows of zeros, of negative zeros, of one value, tiny and large."""
    w = torch.randn(shape) * torch.exp2(torch.randint(-12, 8, (shape[0], 1)).float())
    rows = [torch.zeros(shape[1]), -torch.zeros(shape[1]), torch.full((shape[1],), 0.75),
            torch.randn(shape[1]) * 1e-6, torch.randn(shape[1]).clamp(-4, 4) * largest / 4]  # fmt: skip
    for i, row in enumerate(rows[: shape[0] - 1]):
        w[i] = row
    return w.to(dtype)


def save(folder, tensors, method, metadata=None, **config):
    """A folder with these tensors; ``method``: its ``quantization_config``."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", metadata)
    extra = {} if method is None else {"quantization_config": method}
    (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16"} | config | extra) + "\n")
