"""Writing a checkpoint: shards of a largest size in a folder beside the destination, which is renamed at the end.

The destination is whole or absent: an error or an interrupt removes the folder that was being written.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from .source import INDEX, needs, read_json, safetensors_error

ONE_FILE = "model.safetensors"
NOT_COPIED = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".index.json", "hf_quant_config.json")
"""Endings of files that hold or list tensors; all others of a folder are copied, such as the tokenizer."""
LARGEST_COPY = 1 << 28
Header = Callable[[Mapping[str, str]], dict[str, str]]
"""Entries of all tensors up to the end of a shard -> the metadata of the shard."""


class Sink:
    """A context manager that collects tensors and writes them in shards.

    ``path``: a folder, or a file that ends in ``.safetensors``. ``header``: as in ``Layout``. Raises FileExistsError if it exists and is not empty,
    unless ``overwrite``.
    """

    def __init__(
        self, path: str | Path, shard_bytes: int, overwrite: bool = False, header: Header | None = None
    ) -> None:
        self.path = Path(path)
        self.is_file = self.path.suffix == ".safetensors"
        empty = self.path.is_dir() and not any(self.path.iterdir()) and not self.is_file
        if self.path.exists() and not empty and not overwrite:
            raise FileExistsError(f"{self.path} exists; choose another destination, or pass overwrite=True")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.shard_bytes = shard_bytes if not self.is_file else 1 << 62
        self.folder = Path(tempfile.mkdtemp(prefix=f".{self.path.name}.", suffix=".partial", dir=self.path.parent))
        self.shards: list[tuple[str, ...]] = []
        self.total = 0
        self._names: set[str] = set()
        self._tensors: dict[str, Tensor] = {}
        self._metadata: dict[str, str] = {}
        self._header = header
        self._bytes = 0

    def add(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
        """Add tensors that go to one shard together, and entries of the header of that shard."""
        size = sum(t.nbytes for t in tensors.values())
        if self._tensors and self._bytes + size > self.shard_bytes:
            self._flush()
        for name, t in tensors.items():
            if name in self._names:
                raise ValueError(f"two tensors would be stored as {name}; rename one of them")
            self._names.add(name)
            self._tensors[name] = t.detach().to("cpu").contiguous()
        self._metadata |= metadata or {}
        self._bytes += size

    def _flush(self) -> None:
        number = len(self.shards) + 1
        save = needs("safetensors.torch", "safetensors").save_file
        try:
            metadata = self._metadata if self._header is None else self._header(self._metadata)
            save(_apart(self._tensors), str(self.folder / f"{number}.safetensors"), {"format": "pt"} | metadata)
        except safetensors_error() as error:
            raise OSError(f"{self.path} cannot be written: {error}") from error
        self.shards.append(tuple(self._tensors))
        self.total += self._bytes
        self._tensors, self._bytes = {}, 0
        if self._header is None:
            self._metadata = {}

    def finish(self, files: Mapping[str, Any], source: Path | None = None) -> None:
        """Write the shard that is left, the JSON files and the index, copy what else is in ``source``, and rename."""
        if self._tensors or not self.shards:
            self._flush()
        if self.is_file:
            os.replace(self.folder / "1.safetensors", self.path)
            shutil.rmtree(self.folder)
            return
        self._copy(source)
        for name, content in files.items():
            (self.folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        self._name_shards()
        os.chmod(self.folder, 0o755)  # mkdtemp makes it private
        if self.path.exists():
            shutil.rmtree(self.path) if self.path.is_dir() else self.path.unlink()
        os.replace(self.folder, self.path)

    def _copy(self, source: Path | None) -> None:
        for file in sorted(source.iterdir()) if source is not None and source.is_dir() else ():
            if file.is_file() and not file.name.endswith(NOT_COPIED) and file.stat().st_size <= LARGEST_COPY:
                shutil.copyfile(file, self.folder / file.name)

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

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, t: TracebackType | None) -> None:
        if self.folder.exists():
            shutil.rmtree(self.folder, ignore_errors=True)


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with a copy of each that shares memory with one before it, which safetensors refuses."""
    seen: set[int] = set()
    out = {}
    for name, t in tensors.items():
        pointer = t.untyped_storage().data_ptr()
        out[name] = t.clone(memory_format=torch.contiguous_format) if pointer in seen and t.numel() else t
        seen.add(pointer)
    return out


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
