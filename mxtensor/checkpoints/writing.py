"""How a model is written in safetensors: shards of a largest size, by a thread, while the next tensors are made.

A file is written in one pass. Its header comes first and describes all tensors: a small file waits in memory until it
is whole. A large one begins with room for a header, which safetensors pads with spaces; if the room is too small, the
values are copied once more.

Source: the format in the README of safetensors.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.arguments import described
from .destination import Destination, folders_of_model
from .reading import DTYPES, ENDINGS, INDEX, Checkpoint

ONE_FILE = "model.safetensors"
NOT_COPIED = (*ENDINGS, ".index.json", "hf_quant_config.json")
"""Endings of files that hold or list tensors; all others of a folder are copied, such as the tokenizer, and the
subfolders of ``folders_of_model`` as a whole."""
LARGEST_COPY = 1 << 28
PENDING = 1 << 28
"""Bytes of tensors that may wait for the thread that writes."""
SMALL = 1 << 26
"""Bytes up to which a file waits in memory."""
CHUNK = 1 << 24
ROOM = 1 << 18
"""Bytes of the header of a larger file: about a thousand tensors."""
ALIGNED = 8
"""Values of every dtype begin at a multiple of their size if all sizes before are multiples of this."""
NAMES = {dtype: name for name, dtype in DTYPES.items()} | {torch.complex64: "C64"}
Header = Callable[[Mapping[str, str]], dict[str, str]]
"""Entries of all tensors up to the end of a shard -> the metadata of the shard."""


class Sink(Destination):
    """A context manager that collects tensors and writes them in shards.

    ``path``: a folder, or a file that ends in ``.safetensors``. ``header``: as in ``Layout``. Raises FileExistsError if
    it exists and is not empty, unless ``overwrite``.
    """

    def __init__(
        self,
        path: str | Path,
        shard_bytes: int,
        overwrite: bool = False,
        source: Checkpoint | None = None,
        header: Header | None = None,
    ) -> None:
        self.is_file = Path(path).suffix == ".safetensors"
        super().__init__(path, overwrite)
        self.shard_bytes = shard_bytes if not self.is_file else 1 << 62
        self.shards: list[tuple[str, ...]] = []
        self.total = 0
        self._all: set[str] = set()
        self._names: list[str] = []
        self._metadata: dict[str, str] = {}
        self._header, self._bytes = header, 0
        self._file: ShardFile | None = None
        self._files: list[ShardFile] = []
        self._writer = ThreadPoolExecutor(1, "mxtensor-writer")
        self._jobs: deque[tuple[Future[None], int]] = deque()
        """What the thread has not done, and the bytes of its tensors."""
        self._pending = 0

    def add(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
        """Add tensors that go to one shard together, and entries of the header of that shard.

        They are written later: do not change them. Raises ValueError for a name that is taken, OSError for a disk that
        is full, which an earlier tensor may have met.
        """
        size = sum(t.nbytes for t in tensors.values())
        if self._names and self._bytes + size > self.shard_bytes:
            self._flush()
        file = self._opened()
        for name, t in tensors.items():
            if name in self._all:
                raise ValueError(f"two tensors would be stored as {name}; rename one of them")
            stored_dtype(name, t)
            self._all.add(name)
            self._names.append(name)
            self._do(t.nbytes, file.add, name, t.detach().to("cpu").contiguous())
        self._metadata |= metadata or {}
        self._bytes += size

    def _opened(self) -> ShardFile:
        if self._file is None:
            with self.named_errors():
                self._file = ShardFile(self.folder / f"{len(self.shards) + 1}.safetensors")
            self._files.append(self._file)
        return self._file

    def _flush(self) -> None:
        """End a shard."""
        metadata = dict(self._metadata if self._header is None else self._header(self._metadata))
        self._do(0, self._opened().close, {"format": "pt"} | metadata)
        self.shards.append(tuple(self._names))
        self.total += self._bytes
        self._file, self._names, self._bytes = None, [], 0
        if self._header is None:
            self._metadata = {}

    def _do(self, size: int, job: Callable[..., None], *arguments: Any) -> None:
        """Let the thread do ``job`` after all others; wait while more than ``PENDING`` bytes of tensors are in jobs.

        ``size``: the bytes of its tensors. Raises what an earlier job has raised.
        """
        while self._jobs and (self._jobs[0][0].done() or self._pending > PENDING):
            self._await_first()
        self._pending += size
        self._jobs.append((self._writer.submit(self.named_errors()(job), *arguments), size))

    def _await_first(self) -> None:
        """Wait for the first job. Raises what it has raised."""
        future, size = self._jobs.popleft()
        while not wait((future,), 1.0).done:  # a second each, so that an interrupt is noticed
            pass
        future.result()
        self._pending -= size

    def finish(self, files: Mapping[str, Any], source: Path | None = None) -> None:
        """Write the shard that is left, the JSON files and the index, copy what else is in ``source``, and rename."""
        if self._names or not self.shards:
            self._flush()
        while self._jobs:
            self._await_first()
        with self.named_errors():
            if self.is_file:
                self.move("1.safetensors")
                return
            if source is not None and source.is_dir():
                for file in sorted(source.iterdir()):
                    if file.is_file() and not file.name.endswith(NOT_COPIED) and file.stat().st_size <= LARGEST_COPY:
                        shutil.copyfile(file, self.folder / file.name)
                for inner in folders_of_model(source):
                    (self.folder / inner.name).mkdir()
                    for file in sorted(inner.iterdir()):
                        if file.is_file():
                            shutil.copyfile(file, self.folder / inner.name / file.name)
            for name, content in files.items():
                (self.folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            weight_map: dict[str, str] = {}
            for i, tensors in enumerate(self.shards, 1):
                single = len(self.shards) == 1
                name = ONE_FILE if single else f"model-{i:05}-of-{len(self.shards):05}.safetensors"
                os.replace(self.folder / f"{i}.safetensors", self.folder / name)
                weight_map |= dict.fromkeys(tensors, name)
            if len(self.shards) > 1:
                index = {"metadata": {"total_size": self.total}, "weight_map": weight_map}
                (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
            self.move()

    def __exit__(self, *error: Any) -> None:
        try:
            self._writer.shutdown(cancel_futures=True)
            for file in self._files:
                file.abort()
        finally:  # an interrupt here, too, leaves nothing
            super().__exit__(*error)


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
        self._waiting.append((name, t))
        self._bytes += t.nbytes
        if not self._room and self._bytes > SMALL:
            self._room = ROOM
            self._file.seek(self._room)
        if self._room:
            ready = [(name, t) for name, t in self._waiting if t.nbytes % ALIGNED == 0]
            self._waiting = [(name, t) for name, t in self._waiting if t.nbytes % ALIGNED]
            for name, t in ready:
                self._place(name, t)
                self._write_all(t)

    def _place(self, name: str, t: Tensor) -> None:
        offsets = [self._at, self._at + t.nbytes]
        self._described[name] = {"dtype": stored_dtype(name, t), "shape": list(t.shape), "data_offsets": offsets}
        self._at += t.nbytes

    def _write_all(self, values: Tensor | bytes) -> None:
        """Write bytes, or those of a contiguous tensor on the CPU without a copy."""
        data: Any = values.reshape(-1).view(torch.uint8).numpy() if isinstance(values, Tensor) else values
        data = memoryview(data)
        while data:
            data = data[self._file.write(data) :]

    def close(self, metadata: Mapping[str, str]) -> None:
        """Write what waits, and the header."""
        rest = sorted(self._waiting, key=lambda item: (item[1].nbytes % ALIGNED != 0, -item[1].itemsize))
        self._waiting = []
        for name, t in rest:
            self._place(name, t)
            if self._room:
                self._write_all(t)
        text = json.dumps({"__metadata__": dict(metadata), **self._described}, separators=(",", ":")).encode()
        size = max(self._room - 8, -(-len(text) // ALIGNED) * ALIGNED)
        header = size.to_bytes(8, "little") + text.ljust(size)
        if self._room and len(header) > self._room:
            self._make_room(len(header) - self._room)
        self._file.seek(0)
        self._write_all(header)
        if not self._room:
            for _, t in rest:
                self._write_all(t)
        self._file.close()

    def _make_room(self, more: int) -> None:
        """Move all values by ``more`` bytes, through a second file."""
        old, self._file = self._file, (moved := self.path.with_suffix(".moved")).open("wb", buffering=0)
        self._file.seek(self._room + more)
        with self.path.open("rb", buffering=0) as source:
            source.seek(self._room)
            while data := source.read(CHUNK):
                self._write_all(data)
        old.close()
        os.replace(moved, self.path)

    def abort(self) -> None:
        """Close the file as it is."""
        self._waiting = []
        self._file.close()


def stored_dtype(name: str, t: Tensor) -> str:
    """safetensors' name of a dtype. Raises NotImplementedError for one that it does not have."""
    if t.is_meta:
        raise NotImplementedError(f"{name} is on the device meta and has no values; load the model without offload")
    found = NAMES.get(t.dtype)
    if found is None or t.layout is not torch.strided:
        raise NotImplementedError(f"{name} is {described(t)}, which safetensors cannot store")
    return found
