"""An opened checkpoint: the names, dtypes and shapes of its tensors, read one at a time, and its JSON files.

safetensors' own parser reads the headers: it checks lengths, offsets and overlaps. Nothing is trusted beyond that:
names of shards stay inside the folder, JSON files have a largest size, and each message names file and tensor.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ..core.arguments import described
from ..numerics.reference import DTYPES_BY_NAME

ENDINGS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
"""Of files that are read as checkpoints."""
INDEX = "model.safetensors.index.json"
LARGEST_JSON = 1 << 28
"""Bytes of a JSON file that is read; the index of a model with 100,000 tensors has 10 MB."""
HUB = re.compile(r"[\w.-]+/[\w.-]+")
"""The name of a model in the hub of Hugging Face."""
READ_BYTES = 1 << 30
"""Linux reads at most 2 GiB in one call."""
LEAST_MAPPED = 1 << 20
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32,
    "F64": torch.float64, "I64": torch.int64, "U64": torch.uint64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
"""safetensors' names of dtypes whose values are read by offset; others are read by safetensors."""


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
    offset: int | None = None
    """The first byte of its values in the file; None: safetensors reads it."""


@dataclass(frozen=True)
class Encoded:
    """How a tensor is stored that this package decodes when it reads it."""

    kind: str
    """What its library calls the type, such as Q4_1."""
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Entry:
    """A tensor of the model: the stored tensors it is made of, and how."""

    sources: tuple[str, ...]
    build: Callable[..., Tensor]
    encoded: Encoded | None = None
    """None: ``build`` makes what is stored."""


def _same(t: Tensor) -> Tensor:
    return t


def plain(name: str) -> Entry:
    """A stored tensor as it is."""
    return Entry((name,), _same)


def named_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype that a ``config.json`` names, or that of its text model; None if it names none."""
    nested = config.get("text_config")
    for fields in (config, nested if isinstance(nested, dict) else {}):
        name = fields.get("dtype") or fields.get("torch_dtype")
        if isinstance(name, str) and name.removeprefix("torch.") in DTYPES_BY_NAME:
            return DTYPES_BY_NAME[name.removeprefix("torch.")]
    return None


@dataclass
class Checkpoint:
    """An opened folder or file of safetensors. A context manager."""

    path: Path
    tensors: dict[str, Stored] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    """The metadata of all headers."""
    config: dict[str, Any] = field(default_factory=dict)
    """``config.json``; empty if there is none."""
    maps: bool = False
    """Whether tensors are the mapped file, until they are freed: faster, for who reads a tensor once."""

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
        return named_dtype(self.config) or torch.bfloat16

    def place(self, name: str) -> str:
        """``file, tensor NAME``: the beginning of messages."""
        stored = self.tensors.get(name)
        return f"{stored.file if stored else self.path}, tensor {name}"

    def tensor(self, name: str) -> Tensor:
        """The values of a stored tensor. Raises ValueError that names file and tensor."""
        stored = self.tensors[name]
        try:
            if stored.offset is None:
                return self._by_library(stored, name)
            return _map(stored) if self.maps and _can_map(stored) else _read(stored)
        except (safetensors_error(), OSError, RuntimeError, KeyError, TypeError) as error:
            raise ValueError(f"{self.place(name)}: {error}") from error

    def _by_library(self, stored: Stored, name: str) -> Tensor:
        with open_safetensors(stored.file) as handle:
            return handle.get_tensor(name)  # type: ignore[no-any-return]

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

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, t: TracebackType | None) -> None:
        """Nothing is open between two tensors."""


def open_safetensors(file: Path) -> Any:
    """safetensors' handle of a file. Raises ValueError that names the file."""
    safetensors = needs("safetensors", "safetensors")
    try:
        with Path(file).open("rb"):  # safetensors says that a file without permission does not exist
            pass
        return safetensors.safe_open(str(file), framework="pt")
    except (safetensors.SafetensorError, OSError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"{file} cannot be read as safetensors: {why}") from error


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
        hub = HUB.fullmatch(str(path)) is not None and not path.parent.exists()
        more = f" (from the Hugging Face hub: hf download {path} --local-dir {path.name})" if hub else ""
        raise FileNotFoundError(f"{path} does not exist; pass a folder or a file of a checkpoint on this machine{more}")
    files = _files(path)
    out = Checkpoint(path)
    out.config = out.json("config.json")
    for file in files:
        with open_safetensors(file) as handle:
            for name, stored in _described(handle, file):
                if name in out.tensors:
                    raise ValueError(f"tensor {name} is in two files: {out.tensors[name].file} and {file}")
                out.tensors[name] = stored
            out.metadata |= handle.metadata() or {}
    _check_index(path, out)
    return out


def _described(handle: Any, file: Path) -> Iterator[tuple[str, Stored]]:
    """The tensors of an opened file, in their order in it.

    safetensors has checked that the values follow the header, and each other, without gaps. They are read by offset and
    not from its mapped memory: mapped pages count as memory of the process, and reading them is slower.
    """
    with file.open("rb") as f:
        offset: int | None = 8 + int.from_bytes(f.read(8), "little")
    for name in handle.offset_keys():
        described_by = handle.get_slice(name)
        dtype, shape = described_by.get_dtype(), tuple(described_by.get_shape())
        known = DTYPES.get(dtype)
        if known is None:  # of packed values, whose bytes torch does not count
            offset = None
        yield name, Stored(file, dtype, shape, offset)
        if offset is not None and known is not None:
            offset += math.prod(shape) * known.itemsize


def _read(stored: Stored) -> Tensor:
    """The values of a tensor, by offset. Raises OSError if the file has become shorter."""
    dtype = DTYPES[stored.dtype]
    out = torch.empty(math.prod(stored.shape) * dtype.itemsize, dtype=torch.uint8)
    with stored.file.open("rb", buffering=0) as f:
        f.seek(stored.offset or 0)
        view, done = memoryview(out.numpy()), 0  # type: ignore[arg-type]
        while done < len(view):
            count = f.readinto(view[done : done + READ_BYTES])
            if not count:
                raise OSError(f"the file ends {len(view) - done} bytes too early")
            done += count
    return out.view(dtype).reshape(stored.shape)


def _can_map(stored: Stored) -> bool:
    """Whether values begin where kernels may read them, and are many enough."""
    dtype = DTYPES[stored.dtype]
    return math.prod(stored.shape) * dtype.itemsize >= LEAST_MAPPED and (stored.offset or 0) % 8 == 0


def _map(stored: Stored) -> Tensor:
    """The values of a tensor as pages of the file, which are read when they are used; writing changes no file.

    Raises OSError if the file has become shorter.
    """
    dtype, offset = DTYPES[stored.dtype], stored.offset or 0
    size = math.prod(stored.shape) * dtype.itemsize
    first = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    with stored.file.open("rb") as f:
        missing = offset + size - os.fstat(f.fileno()).st_size
        if missing > 0:
            raise OSError(f"the file ends {missing} bytes too early")
        pages = mmap.mmap(f.fileno(), offset - first + size, access=mmap.ACCESS_COPY, offset=first)
    if hasattr(mmap, "MADV_WILLNEED"):
        pages.madvise(mmap.MADV_WILLNEED)
    return (
        torch.frombuffer(pages, dtype=torch.uint8, count=size, offset=offset - first).view(dtype).reshape(stored.shape)
    )


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        if path.suffix != ".safetensors":
            raise ValueError(f"{path} is not a checkpoint; pass a folder, or a file that ends in {', '.join(ENDINGS)}")
        return [path]
    if (path / INDEX).is_file():
        return sorted({path / name for name in _weight_map(path).values()})
    files = sorted(path.glob("*.safetensors"))
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    if not files:
        found = sorted(entry.name for entry in path.iterdir())  # raises OSError for a folder that cannot be read
        others = f"{len(found)} other files, such as {found[0]}" if found else "nothing"
        snapshots = sorted(path.glob("snapshots/*/"))
        if snapshots:  # a folder models--ORGANIZATION--NAME
            others = f"what the cache of the Hugging Face hub has of a model: pass {snapshots[-1]}"
        raise FileNotFoundError(f"{path} holds no checkpoint: no file ends in {', '.join(ENDINGS)}; it holds {others}")
    return files


def _weight_map(path: Path) -> dict[str, str]:
    """Tensor -> file, from the index. Raises ValueError for a name that leaves the folder."""
    found = read_json(path / INDEX).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise ValueError(f"{path / INDEX} needs a weight_map of tensors and files, got {described(found)}")
    for name, file in found.items():
        if not isinstance(file, str) or file in ("", "..") or Path(file).name != file or "\0" in file:
            raise ValueError(
                f"{path / INDEX}: {name} is in {described(file)}, which is not the name of a file in this folder"
            )
        if not (path / file).is_file():
            raise ValueError(f"{path / INDEX}: {name} is in {file}, which does not exist")
    return found


def _check_index(path: Path, out: Checkpoint) -> None:
    if not (path.is_dir() and (path / INDEX).is_file()):
        return
    for name, file in _weight_map(path).items():
        if name not in out.tensors or out.tensors[name].file.name != file:
            raise ValueError(f"{path / INDEX}: tensor {name} is not in {file}")
