"""Write the fixtures of the libraries that are installed."""

import shutil

import torch
from safetensors.torch import save_file

from . import FIXTURES, PEERS, SMALL, is_installed, peer

for name in PEERS:
    if is_installed(name):
        torch.manual_seed(0)
        shutil.rmtree(FIXTURES / name, ignore_errors=True)
        (FIXTURES / name).mkdir(parents=True)
        values = peer(name).make(FIXTURES / name, SMALL, torch.bfloat16)
        save_file({key: t.contiguous() for key, t in values.items()}, FIXTURES / f"{name}.safetensors")
        print(name, len(values), "tensors")
