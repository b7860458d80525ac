"""An opened checkpoint: the names, dtypes and shapes of its tensors, read one at a time, and its JSON files.

safetensors' own parser reads the headers: it checks lengths, offsets and overlaps. Nothing is trusted beyond that:
names of shards stay inside the folder, JSON files have a largest size, and each message names file and tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ..core.arguments import described
from ..numerics.reference import SOURCE_DTYPES

INDEX = "model.safetensors.index.json"
LARGEST_JSON = 1 << 28
"""Bytes of a JSON file that is read; the index of a model with 100,000 tensors has 10 MB."""
REOPEN_BYTES = 1 << 28
"""A file is opened anew after so many bytes, since its mapped pages count as memory of the process."""
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in SOURCE_DTYPES}


def needs(module: str, package: str) -> Any:
    """The imported ``module``. Raises ImportError with the pip command if its package is missing."""
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"this checkpoint needs the package {package}: pip install {package}") from error


def safetensors_error() -> type[Exception]:
    """What safetensors raises for a file that it cannot read."""
    return needs("safetensors", "safetensors").SafetensorError  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Stored:
    """A tensor of a file, as its header describes it."""

    file: Path
    dtype: str
    """safetensors' name: U8, F8_E4M3, BF16 ..."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """A tensor of the model: the stored tensors it is made of, and how."""

    sources: tuple[str, ...]
    build: Callable[..., Tensor]


def _same(t: Tensor) -> Tensor:
    return t


def plain(name: str) -> Entry:
    """A stored tensor as it is."""
    return Entry((name,), _same)


@dataclass
class Checkpoint:
    """An opened folder or file of safetensors. A context manager: ``close`` frees the mapped files."""

    path: Path
    tensors: dict[str, Stored] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    """The metadata of all headers."""
    config: dict[str, Any] = field(default_factory=dict)
    """``config.json``; empty if there is none."""
    _open: dict[Path, Any] = field(default_factory=dict)
    _read: dict[Path, int] = field(default_factory=dict)

    @property
    def quantization(self) -> dict[str, Any]:
        """``quantization_config`` of the configuration, or of its text model."""
        nested = self.config.get("text_config")
        for config in (self.config, nested if isinstance(nested, dict) else {}):
            found = config.get("quantization_config") or config.get("compression_config")
            if found is not None:
                if not isinstance(found, dict):
                    raise ValueError(f"{self.path}: quantization_config must be a dict, got {described(found)}")
                return found
        return {}

    @property
    def method(self) -> str:
        """``quant_method``; "" if the configuration names none."""
        method = self.quantization.get("quant_method", "")
        if not isinstance(method, str):
            raise ValueError(f"{self.path}: quant_method must be a string, got {described(method)}")
        return method

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model's values by its configuration; bfloat16 if that names none."""
        nested = self.config.get("text_config")
        for config in (self.config, nested if isinstance(nested, dict) else {}):
            name = config.get("dtype") or config.get("torch_dtype")
            if isinstance(name, str) and name.removeprefix("torch.") in _DTYPES:
                return _DTYPES[name.removeprefix("torch.")]
        return torch.bfloat16

    def place(self, name: str) -> str:
        """``file, tensor NAME``: the beginning of messages."""
        stored = self.tensors.get(name)
        return f"{stored.file if stored else self.path}, tensor {name}"

    def tensor(self, name: str) -> Tensor:
        """The values of a stored tensor. Raises ValueError that names file and tensor."""
        stored = self.tensors[name]
        count = self._read.get(stored.file, 0)
        if count > REOPEN_BYTES:
            self._open.pop(stored.file, None)
            count = 0
        try:
            handle = self._open.get(stored.file)
            if handle is None:
                handle = self._open[stored.file] = open_safetensors(stored.file)
            values: Tensor = handle.get_tensor(name)
        except (safetensors_error(), OSError, RuntimeError, KeyError, TypeError) as error:
            raise ValueError(f"{self.place(name)}: {error}") from error
        self._read[stored.file] = count + values.nbytes
        return values

    def load(self, name: str, entry: Entry) -> Tensor:
        """The tensor that an entry describes. Raises ValueError or NotImplementedError that names file and tensor."""
        try:
            return entry.build(*map(self.tensor, entry.sources))
        except (ValueError, TypeError, RuntimeError, LookupError, ArithmeticError) as error:
            kind = NotImplementedError if isinstance(error, NotImplementedError) else ValueError
            raise kind(f"{self.place(entry.sources[0])}: {error}") from error

    def json(self, name: str) -> dict[str, Any]:
        """A JSON file of the folder; empty if there is none."""
        return read_json(self.path / name) if self.path.is_dir() and (self.path / name).is_file() else {}

    def close(self) -> None:
        self._open.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, t: TracebackType | None) -> None:
        self.close()


def open_safetensors(file: Path) -> Any:
    """safetensors' handle of a file. Raises ValueError that names the file."""
    safetensors = needs("safetensors", "safetensors")
    try:
        return safetensors.safe_open(str(file), framework="pt")
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read as safetensors: {error}") from error


def read_json(file: Path) -> dict[str, Any]:
    """A JSON file that holds a dict. Raises ValueError that names the file."""
    if file.stat().st_size > LARGEST_JSON:
        raise ValueError(f"{file} has {file.stat().st_size} bytes; at most {LARGEST_JSON} are read")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} must hold a dict, got {described(found)}")
    return found


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a folder with safetensors, or one file. Raises FileNotFoundError or ValueError that says what is missing."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; pass a folder or a file of a checkpoint on this machine")
    files = _files(path)
    out = Checkpoint(path)
    out.config = out.json("config.json")
    for file in files:
        with open_safetensors(file) as handle:
            for name in handle.keys():  # noqa: SIM118  (a handle is no dict)
                if name in out.tensors:
                    raise ValueError(f"tensor {name} is in two files: {out.tensors[name].file} and {file}")
                part = handle.get_slice(name)
                out.tensors[name] = Stored(file, part.get_dtype(), tuple(part.get_shape()))
            out.metadata |= handle.metadata() or {}
    _check_index(path, out)
    return out


def _files(path: Path) -> list[Path]:
    if path.is_file():
        if path.suffix != ".safetensors":
            raise ValueError(f"{path} is no checkpoint that is known; pass a folder, a .safetensors or a .gguf file")
        return [path]
    if (path / INDEX).is_file():
        return sorted({path / name for name in _weight_map(path).values()})
    files = sorted(path.glob("*.safetensors"))
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    if not files:
        raise FileNotFoundError(f"{path} has no .safetensors file")
    return files


def _weight_map(path: Path) -> dict[str, str]:
    """Tensor -> file, from the index. Raises ValueError for a name that leaves the folder."""
    found = read_json(path / INDEX).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise ValueError(f"{path / INDEX} needs a weight_map of tensors and files, got {described(found)}")
    for name, file in found.items():
        if not isinstance(file, str) or file in ("", "..") or Path(file).name != file or "\0" in file:
            raise ValueError(f"{path / INDEX}: {name} is in {described(file)}, which is no file name in this folder")
        if not (path / file).is_file():
            raise ValueError(f"{path / INDEX}: {name} is in {file}, which does not exist")
    return found


def _check_index(path: Path, out: Checkpoint) -> None:
    if not (path.is_dir() and (path / INDEX).is_file()):
        return
    for name, file in _weight_map(path).items():
        if name not in out.tensors or out.tensors[name].file.name != file:
            raise ValueError(f"{path / INDEX}: tensor {name} is not in {file}")
