"""Writing a checkpoint in safetensors: shards of a largest size, by a thread, while the next tensors are made."""

from __future__ import annotations

import json
import os
import queue
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from .destination import Destination, folders_of_model
from .shard_file import ShardFile, dtype_name
from .source import ENDINGS, INDEX, Checkpoint, read_json

ONE_FILE = "model.safetensors"
NOT_COPIED = (*ENDINGS, ".index.json", "hf_quant_config.json")
"""Endings of files that hold or list tensors; all others of a folder are copied, such as the tokenizer, and the
subfolders of ``folders_of_model`` as a whole."""
LARGEST_COPY = 1 << 28
PENDING = 1 << 28
"""Bytes of tensors that may wait for the thread that writes."""
Header = Callable[[Mapping[str, str]], dict[str, str]]
"""Entries of all tensors up to the end of a shard -> the metadata of the shard."""


class Writer:
    """A thread that does jobs in order. Its errors are raised by the next call."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None] | None, int]] = queue.SimpleQueue()
        self._state = threading.Condition()
        self._pending, self._stopped = 0, False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="mxtensor-writer", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            job, size = self._jobs.get()
            if job is None:
                return
            try:
                if self._error is None and not self._stopped:
                    job()
            except BaseException as error:
                self._error = error
            del job  # and the tensor in it
            with self._state:
                self._pending -= size
                self._state.notify()

    def do(self, job: Callable[[], None], size: int = 0) -> None:
        """Do ``job`` after all others; wait while more than ``PENDING`` bytes of tensors are in jobs."""
        with self._state:
            while self._pending > PENDING and self._error is None:
                self._state.wait(1.0)  # so that an interrupt is noticed
            self._pending += size
        self._raise()
        self._jobs.put((job, size))

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Wait for all jobs. Raises what one of them raised."""
        self.stop(drop=False)
        self._raise()

    def stop(self, drop: bool = True) -> None:
        """End the thread; ``drop``: without the jobs that wait."""
        self._stopped = drop
        self._jobs.put((None, 0))
        self._thread.join()


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
        self._writer = Writer()
        self._file: ShardFile | None = None
        self._files: list[ShardFile] = []

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
            dtype_name(name, t)
            self._all.add(name)
            self._names.append(name)
            self._do(file.add, name, t.detach().to("cpu").contiguous())
        self._metadata |= metadata or {}
        self._bytes += size

    def _opened(self) -> ShardFile:
        if self._file is None:
            self._file = self.checked_write(ShardFile, self.folder / f"{len(self.shards) + 1}.safetensors")
            self._files.append(self._file)
        return self._file

    def _do(self, job: Callable[..., None], *arguments: Any) -> None:
        size = sum(a.nbytes for a in arguments if isinstance(a, Tensor))
        self._writer.do(lambda: self.checked_write(job, *arguments), size)

    def _flush(self) -> None:
        file = self._opened()
        metadata = dict(self._metadata if self._header is None else self._header(self._metadata))
        self._do(file.close, {"format": "pt"} | metadata)
        self.shards.append(tuple(self._names))
        self.total += self._bytes
        self._file, self._names, self._bytes = None, [], 0
        if self._header is None:
            self._metadata = {}

    def finish(self, files: Mapping[str, Any], source: Path | None = None) -> None:
        """Write the shard that is left, the JSON files and the index, copy what else is in ``source``, and rename."""
        if self._names or not self.shards:
            self._flush()
        self._writer.finish()
        self.checked_write(self._finish, files, source)

    def _finish(self, files: Mapping[str, Any], source: Path | None) -> None:
        if self.is_file:
            self.move_file("1.safetensors")
            return
        self._copy(source)
        for name, content in files.items():
            (self.folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        self._name_shards()
        self.move()

    def _copy(self, source: Path | None) -> None:
        if source is None or not source.is_dir():
            return
        for file in sorted(source.iterdir()):
            if file.is_file() and not file.name.endswith(NOT_COPIED) and file.stat().st_size <= LARGEST_COPY:
                shutil.copyfile(file, self.folder / file.name)
        for folder in folders_of_model(source):
            (self.folder / folder.name).mkdir()
            for file in sorted(folder.iterdir()):
                if file.is_file():
                    shutil.copyfile(file, self.folder / folder.name / file.name)

    def _name_shards(self) -> None:
        count = len(self.shards)
        if count == 1:
            os.replace(self.folder / "1.safetensors", self.folder / ONE_FILE)
            return
        weight_map: dict[str, str] = {}
        for i, tensors in enumerate(self.shards, 1):
            name = f"model-{i:05}-of-{count:05}.safetensors"
            os.replace(self.folder / f"{i}.safetensors", self.folder / name)
            weight_map |= dict.fromkeys(tensors, name)
        index = {"metadata": {"total_size": self.total}, "weight_map": weight_map}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def __exit__(self, *error: Any) -> None:
        self._writer.stop()
        for file in self._files:
            file.abort()
        super().__exit__(*error)


def merged(base: Mapping[str, Any], files: Mapping[str, Any], source: Path | None) -> dict[str, Any]:
    """The JSON files to write: those of a layout, merged into those of the source; ``base`` is its config.json.

    What describes the quantization of the source is dropped.
    """
    config = {k: v for k, v in base.items() if k not in ("quantization_config", "compression_config", "quantization")}
    out: dict[str, Any] = {"config.json": config} if config else {}
    for name, content in files.items():
        before = out.get(name)
        if before is None and source is not None and source.is_dir() and (source / name).is_file():
            before = read_json(source / name)
        out[name] = {**(before or {}), **content}
    return out
