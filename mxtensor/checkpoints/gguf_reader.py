"""The header of a GGUF file, by gguf's reader with checks of its lengths and without its loops over a vocabulary.

gguf's reader makes each string of a vocabulary by calls that slice a mapped array: 2 to 4 s for 50,000 tokens. Here
arrays are read at once. Inside ``headers_cached``, ``header_of`` reads each file once, and ``read_quickly`` gives the
same headers to transformers, which reads a header three times.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from .source import needs

LARGEST_ARRAY = 1 << 22
"""Entries of an array of the header; a tokenizer has up to half a million."""
_cached: ContextVar[dict[tuple[Any, ...], Any] | None] = ContextVar("_cached", default=None)


@cache
def _reader(gguf: Any) -> Any:
    """gguf's reader. A wrong length in the header is an error; the package would read on for ever."""

    class Reader(gguf.GGUFReader):
        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, mapped: Any) -> None:
            self._data = np.asarray(mapped)  # slices of a plain array are ten times as fast as those of a memmap

        def _get(self, offset: Any, dtype: Any, count: Any = 1, *rest: Any, **more: Any) -> Any:
            found = super()._get(offset, dtype, count, *rest, **more)
            _check_length(len(found) - int(count), offset, count)
            return found

        def _get_field_parts(self, orig_offs: Any, raw_type: Any) -> Any:
            types = gguf.GGUFValueType
            if int(raw_type) != int(types.ARRAY):
                return super()._get_field_parts(orig_offs, raw_type)
            inner, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            kind, count, at = types(int(inner[0])), int(length[0]), int(orig_offs) + 12
            if count > LARGEST_ARRAY or kind == types.ARRAY:
                raise ValueError(f"an array of the header has {count} entries; at most {LARGEST_ARRAY} are read")
            if kind == types.STRING:
                pieces, end = self._strings(at, count)
                places = [3 + 2 * i for i in range(count)]
            elif kind in self.gguf_scalar_to_np:
                values = self._get(at, self.gguf_scalar_to_np[kind], count)
                pieces, end = [values[i : i + 1] for i in range(count)], at + values.nbytes
                places = list(range(2, 2 + count))
            else:
                raise ValueError(f"an array of the header has entries of the type {kind.name}")
            return end - int(orig_offs), [inner, length, *pieces], places, [types.ARRAY, *([kind] if count else [])]

        def _strings(self, at: int, count: int) -> tuple[list[Any], int]:
            """The length and the bytes of each string, and where the last one ends."""
            data, dtype = self.data, np.dtype(np.uint64).newbyteorder(self.byte_order)
            pieces: list[Any] = []
            for _ in range(count):
                _check_length(len(data) - at - 8, at, 8)
                length = data[at : at + 8].view(dtype)
                end = at + 8 + int(length[0])
                _check_length(len(data) - end, at, end - at)
                pieces += length, data[at + 8 : end]
                at = end
            return pieces, at

    return Reader


def _check_length(rest: int, offset: Any, count: Any) -> None:
    """Raise ValueError if less than nothing is left of the file after these entries."""
    if rest < 0:
        raise ValueError(f"the file ends before byte {int(offset)} of the header and {int(count)} entries")


def header_of(path: str | Path) -> Any:
    """gguf's reader of a file. Raises what numpy, enum and gguf raise for a file that is not valid, OSError."""
    reader, cached = _reader(needs("gguf", "gguf")), _cached.get()
    if cached is None:
        return reader(str(path))
    about = os.stat(path)
    key = os.path.realpath(path), about.st_size, about.st_mtime_ns, about.st_ino
    if key not in cached:
        cached[key] = reader(str(path))
    return cached[key]


@contextmanager
def headers_cached() -> Iterator[None]:
    """Each header is read once inside this block: for a command, which does not change the files that it reads."""
    token = _cached.set({})
    try:
        yield
    finally:
        _cached.reset(token)


@contextmanager
def read_quickly() -> Iterator[None]:
    """Inside this block, others who read headers by the package gguf get those of ``header_of``.

    transformers also asks for the names of all tensors once for each module; they are made once.
    """
    gguf = needs("gguf", "gguf")
    _reader(gguf)  # before its base class is replaced
    quick = {"GGUFReader": header_of, "get_tensor_name_map": cache(gguf.get_tensor_name_map)}
    slow = {name: getattr(gguf, name) for name in quick}
    with headers_cached() if _cached.get() is None else nullcontext():
        try:
            vars(gguf).update(quick)
            yield
        finally:
            vars(gguf).update(slow)
