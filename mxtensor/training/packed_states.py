"""The amax histories of a module as one tensor of bytes, for its state dict.

A state dict holds tensors only, so that safetensors, torch.distributed.checkpoint and ``torch.load(weights_only=True)``
take it; bytes are what no cast of a state dict to another dtype changes.
"""

from __future__ import annotations

import json
import math

import torch
from torch import Tensor

from ..core.arguments import described

MAGIC = b"mxtensor delayed scaling 1\n"
LENGTH = 8
"""Bytes of the length of the header, which follows MAGIC: JSON, [name, shape] of each float32 tensor in order."""


def packed(tensors: dict[str, Tensor], size: int = 0) -> Tensor:
    """Float32 tensors by name as uint8 (bytes,) on the CPU, with zeros up to ``size`` bytes."""
    header = json.dumps([[name, list(t.shape)] for name, t in tensors.items()]).encode()
    start = MAGIC + len(header).to_bytes(LENGTH, "little") + header
    values = [t.detach().to("cpu").reshape(-1).contiguous().view(torch.uint8) for t in tensors.values()]
    data = torch.cat([torch.tensor(list(start), dtype=torch.uint8, device="cpu"), *values])
    return torch.nn.functional.pad(data, (0, max(size - data.numel(), 0)))


def unpacked(data: Tensor) -> dict[str, Tensor]:
    """The tensors of ``packed``. Raises ValueError for other bytes."""
    if not isinstance(data, Tensor) or data.dtype is not torch.uint8 or data.dim() != 1 or data.is_meta:
        raise ValueError(f"amax histories are 1-D uint8, not {described(data)}; remove the key to load the rest")
    raw = data.cpu().numpy().tobytes()
    if not raw.startswith(MAGIC):
        raise ValueError("these bytes are not amax histories of mxtensor; remove the key to load the rest")
    start = len(MAGIC) + LENGTH
    size = int.from_bytes(raw[len(MAGIC) : start], "little")
    try:
        entries = [(str(name), tuple(map(int, shape))) for name, shape in json.loads(raw[start : start + size])]
    except (ValueError, TypeError) as error:
        raise ValueError(f"the header of these amax histories is damaged ({error})") from error
    at, found = start + size, {}
    for name, shape in entries:
        length = 4 * math.prod(shape)
        if min(shape, default=0) < 0 or at + length > len(raw):
            raise ValueError(f"the amax histories end before {name} {shape}: {len(raw)} bytes")
        if length:
            found[name] = torch.frombuffer(bytearray(raw[at : at + length]), dtype=torch.float32).reshape(shape)
        at += length
    return found
