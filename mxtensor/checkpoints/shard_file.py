"""Writing one safetensors file in one pass, while its tensors are still being made.

The header comes first and describes all tensors. A small file waits in memory until it is whole. A large one begins
with room for a header, which safetensors pads with spaces; if the room is too small, the values are copied once more.

Source: the format in the README of safetensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..core.arguments import described
from .source import DTYPES

SMALL = 1 << 26
"""Bytes up to which a file waits in memory."""
CHUNK = 1 << 24
ROOM = 1 << 18
"""Bytes of the header of a larger file: about a thousand tensors."""
ALIGNED = 8
"""Values of every dtype begin at a multiple of their size if all sizes before are multiples of this."""
NAMES = {dtype: name for name, dtype in DTYPES.items()} | {torch.complex64: "C64"}


def dtype_name(name: str, t: Tensor) -> str:
    """safetensors' name of a dtype. Raises NotImplementedError for one that it does not have."""
    if t.is_meta:
        raise NotImplementedError(f"{name} is on the device meta and has no values; load the model without offload")
    found = NAMES.get(t.dtype)
    if found is None or t.layout is not torch.strided:
        raise NotImplementedError(f"{name} is {described(t)}, which safetensors cannot store")
    return found


def raw_bytes(t: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU; no copy."""
    return memoryview(t.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


class ShardFile:
    """A file that grows by tensors. ``close`` writes the header."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._described: dict[str, dict[str, object]] = {}
        self._at = 0
        """Bytes of values that have a place."""
        self._waiting: list[tuple[str, Tensor]] = []
        """Tensors without a place: those of a small file, and those after which others would not be aligned."""
        self._bytes = 0
        self._file = path.open("wb", buffering=0)
        self._room = 0

    def add(self, name: str, t: Tensor) -> None:
        """Add a contiguous tensor on the CPU. Raises OSError if the disk is full."""
        if self._room and t.nbytes % ALIGNED == 0:
            self._write(name, t)
            return
        self._waiting.append((name, t))
        self._bytes += t.nbytes
        if not self._room and self._bytes > SMALL:
            self._room = ROOM
            self._file.seek(self._room)
            for name, t in self._taken(lambda t: t.nbytes % ALIGNED == 0):
                self._write(name, t)

    def _taken(self, wanted: Callable[[Tensor], bool]) -> list[tuple[str, Tensor]]:
        found = [(name, t) for name, t in self._waiting if wanted(t)]
        self._waiting = [(name, t) for name, t in self._waiting if not wanted(t)]
        return found

    def _write(self, name: str, t: Tensor) -> None:
        self._place(name, t)
        self._write_all(raw_bytes(t))

    def _place(self, name: str, t: Tensor) -> None:
        offsets = [self._at, self._at + t.nbytes]
        self._described[name] = {"dtype": dtype_name(name, t), "shape": list(t.shape), "data_offsets": offsets}
        self._at += t.nbytes

    def _write_all(self, data: memoryview) -> None:
        while data:
            data = data[self._file.write(data) :]

    def close(self, metadata: Mapping[str, str]) -> None:
        """Write what waits, and the header."""
        rest = sorted(self._waiting, key=lambda item: (item[1].nbytes % ALIGNED != 0, -item[1].itemsize))
        self._waiting = []
        if self._room:
            for name, t in rest:
                self._write(name, t)
        else:
            for name, t in rest:
                self._place(name, t)
        text = json.dumps({"__metadata__": dict(metadata), **self._described}, separators=(",", ":")).encode()
        size = max(self._room - 8, -(-len(text) // ALIGNED) * ALIGNED)
        header = size.to_bytes(8, "little") + text.ljust(size)
        if self._room and len(header) > self._room:
            self._make_room(len(header) - self._room)
        self._file.seek(0)
        self._write_all(memoryview(header))
        if not self._room:
            for _, t in rest:
                self._write_all(raw_bytes(t))
        self._file.close()

    def _make_room(self, more: int) -> None:
        """Move all values by ``more`` bytes, through a second file."""
        old, self._file = self._file, (moved := self.path.with_suffix(".moved")).open("wb", buffering=0)
        self._file.seek(self._room + more)
        with self.path.open("rb", buffering=0) as source:
            source.seek(self._room)
            while data := source.read(CHUNK):
                self._write_all(memoryview(data))
        old.close()
        os.replace(moved, self.path)

    def abort(self) -> None:
        """Close the file as it is."""
        self._waiting = []
        self._file.close()
