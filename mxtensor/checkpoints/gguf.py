"""GGUF, of llama.cpp: MXFP4 as codes, and every other type that the package ``gguf`` can dequantize as float32.

A block of MXFP4 has 17 bytes: E8M0 first, then 16 bytes whose low nibbles are the values 0-15 and whose high nibbles
are 16-31. The scale is 2^(byte - 128) over doubled values, which is the E8M0 scale of this package over its values.
Names of tensors stay those of GGUF (``blk.0.attn_q.weight``).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .layout import Layout, weight
from .source import Checkpoint, Entry, Stored, needs, plain

FORMAT = "mxfp4_e2m1"
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "F64": torch.float64, "BF16": torch.bfloat16}
_INTEGERS = {"I8", "I16", "I32", "I64"}


class GGUFCheckpoint(Checkpoint):
    """An opened GGUF file. ``tensor`` gives the bytes of a tensor, as the file has them."""

    reader: Any

    def tensor(self, name: str) -> Tensor:
        found = next(t for t in self.reader.tensors if t.name == name)
        return torch.from_numpy(found.data.copy())


def open_gguf(path: Path) -> GGUFCheckpoint:
    """Open a GGUF file. Raises ValueError for one that the package gguf cannot read."""
    gguf = needs("gguf", "gguf")
    out = GGUFCheckpoint(path)
    try:
        out.reader = gguf.GGUFReader(str(path))
        for t in out.reader.tensors:
            if t.name in out.tensors:
                raise ValueError(f"two tensors are called {t.name}")
            out.tensors[t.name] = Stored(path, t.tensor_type.name, tuple(int(n) for n in reversed(t.shape)))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    except Exception as error:  # a file that is not valid raises what numpy and enum raise
        raise ValueError(f"{path} cannot be read as GGUF: {error!r:.200}") from error
    return out


def _codes(shape: tuple[int, ...], dtype: torch.dtype) -> Callable[..., Tensor]:
    def build(data: Tensor) -> Tensor:
        if shape[-1] % 32:
            raise ValueError(f"MXFP4 has whole blocks of 32 values, got the shape {shape}")
        blocks = data.reshape(*shape[:-1], shape[-1] // 32, 17)
        packed = blocks[..., 1:]
        nibbles = torch.cat((packed & 15, packed >> 4), -1)
        codes = (nibbles[..., ::2] | nibbles[..., 1::2] << 4).flatten(-2)
        return weight(codes, blocks[..., 0].contiguous(), FORMAT, dtype, shape=shape)

    return build


def _dequantized(shape: tuple[int, ...], kind: str) -> Callable[..., Tensor]:
    def build(data: Tensor) -> Tensor:
        if kind in _INTEGERS:
            return data.reshape(shape)
        if kind in _PLAIN:
            return data.reshape(-1).view(torch.uint8).view(_PLAIN[kind]).reshape(shape)
        gguf = needs("gguf", "gguf")
        try:
            values = gguf.dequantize(data.numpy(), gguf.GGMLQuantizationType[kind])
        except NotImplementedError as error:
            raise NotImplementedError(f"the package gguf does not dequantize {kind}") from error
        return torch.from_numpy(values).reshape(shape)

    return build


def _read(checkpoint: Checkpoint) -> dict[str, Entry]:
    entries = {}
    for name, stored in checkpoint.tensors.items():
        build = _codes if stored.dtype == "MXFP4" else None
        entries[name] = Entry(
            (name,), build(stored.shape, checkpoint.dtype) if build else _dequantized(stored.shape, stored.dtype)
        )
    return entries or {name: plain(name) for name in checkpoint.tensors}


GGUF = Layout(
    "gguf",
    "llama.cpp (read only)",
    detect=lambda checkpoint: isinstance(checkpoint, GGUFCheckpoint),
    read=_read,
    formats="mxfp4_e2m1; all others as float32",
    exact="MXFP4 bit for bit; other types as gguf dequantizes them",
)
