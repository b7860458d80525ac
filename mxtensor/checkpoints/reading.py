"""How files are read: an opened checkpoint has the names, dtypes and shapes of its tensors, and reads one at a time.

safetensors' own parser reads the headers: it checks lengths, offsets and overlaps. Nothing is trusted beyond that:
names of shards stay inside the folder, JSON files have a largest size, and each message names file and tensor.

Values are read and not mapped: a file that another program makes shorter while its pages are in use kills the process
(SIGBUS), and here it is an OSError. A conversion reads one tensor after another, and memory that is new for each costs
more than the copy, since the system clears it: so memory is used again (``Buffers``).
"""

from __future__ import annotations

import json
import math
import mmap
import re
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
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
READ_BYTES = 1 << 30
"""Linux reads at most 2 GiB in one call."""
LEAST_REUSED = 1 << 20
"""Bytes of a tensor whose memory is used again: smaller ones get that of the allocator."""
MOST_IDLE = 1 << 29
"""Bytes of memory that wait for the next tensor."""
HUB = re.compile(r"[\w.-]+/[\w.-]+")
"""The name of a model in the hub of Hugging Face."""
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32,
    "F64": torch.float64, "I64": torch.int64, "U64": torch.uint64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
"""safetensors' names of dtypes whose values are read by offset; others are read by safetensors."""
CONFIG_TYPES = {
    "model_type": str, "architectures": list, "text_config": dict, "tie_word_embeddings": bool, "auto_map": dict,
}  # fmt: skip
"""Keys of a ``config.json`` and the types of their values, beside null."""


def needs(module: str, package: str) -> Any:
    """The imported ``module``. Raises ImportError with the pip command if its package is missing."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"this checkpoint needs the package {package}: pip install {package}") from error


class Buffers:
    """Memory that tensors are read into: when one is freed, the next gets its memory. For any number of threads."""

    def __init__(self) -> None:
        self._idle: list[mmap.mmap] = []
        self._lock = threading.Lock()
        self._open = True

    def empty(self, size: int) -> Tensor:
        """A tensor of ``size`` bytes (uint8)."""
        with self._lock:  # the smallest idle memory that has the size, and not more than twice as much
            fitting = [memory for memory in list(self._idle) if size <= len(memory) <= 2 * size]
            memory = min(fitting, key=len, default=None)
            if memory is not None:
                self._idle.remove(memory)
        memory = mmap.mmap(-1, size) if memory is None else memory
        view = memoryview(memory)  # the tensor holds it, and it holds the memory
        weakref.finalize(view, self._freed, memory).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8, count=size)

    def _freed(self, memory: mmap.mmap) -> None:
        """Called when a tensor is freed, at any moment: without the lock, which this thread may hold."""
        if self._open and sum(map(len, list(self._idle))) + len(memory) <= MOST_IDLE:
            self._idle.append(memory)

    def close(self) -> None:
        """Give back what is idle; tensors keep theirs."""
        self._open = False
        self._idle.clear()


def read_bytes(file: Path, offset: int, size: int, buffers: Buffers | None = None) -> Tensor:
    """``size`` bytes of a file from ``offset`` on (uint8). Raises OSError if the file has become shorter."""
    reused = buffers is not None and size >= LEAST_REUSED
    out = buffers.empty(size) if reused and buffers is not None else torch.empty(size, dtype=torch.uint8)
    with file.open("rb", buffering=0) as f:
        f.seek(offset)
        view, done = memoryview(out.numpy()), 0  # type: ignore[arg-type]
        while done < size:
            count = f.readinto(view[done : done + READ_BYTES])
            if not count:
                raise OSError(f"the file ends {size - done} bytes too early")
            done += count
    return out


@dataclass(frozen=True)
class Stored:
    """A tensor of a file, as its header describes it."""

    file: Path
    dtype: str
    """The name in the file: U8, F8_E4M3, BF16 ...; that of a type of GGUF, such as Q4_1; torch's in a pickle."""
    shape: tuple[int, ...]
    """The shape of its values."""
    offset: int | None = None
    """The first byte of its values in the file; None: a library reads it."""
    nbytes: int = 0
    mapped: tuple[Tensor, int] | None = field(default=None, compare=False)
    """A tensor whose values are mapped from a pickle, and read when it is used; the bytes of the file when it was
    opened."""


@dataclass(frozen=True)
class Entry:
    """A tensor of the model: the stored tensors it is made of, and how."""

    sources: tuple[str, ...]
    build: Callable[..., Tensor] | None = None
    """None: it is the only source as it is."""
    encoded: Stored | None = None
    """A tensor of a type that this package decodes when it reads it; None: ``build`` makes what is stored."""


def _levels(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """A ``config.json``, and that of its text model."""
    nested = config.get("text_config")
    return (config, nested) if isinstance(nested, dict) else (config,)


def named_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype that a ``config.json`` names, or that of its text model; None if it names none."""
    for fields in _levels(config):
        name = fields.get("dtype") or fields.get("torch_dtype")
        if isinstance(name, str) and name.removeprefix("torch.") in DTYPES_BY_NAME:
            return DTYPES_BY_NAME[name.removeprefix("torch.")]
    return None


@dataclass
class Checkpoint:
    """An opened folder or file. A context manager."""

    path: Path
    tensors: dict[str, Stored] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    """The metadata of all headers."""
    config: dict[str, Any] = field(default_factory=dict)
    """``config.json``; empty if there is none."""
    streams: bool = False
    """Whether memory of tensors that are freed holds the next ones: faster, for who reads a tensor once."""
    kind: str = "safetensors"
    """Of its files: safetensors, gguf or pickle."""
    reader: Any = None
    """The reader of the package ``gguf``, of a GGUF file; it has the other fields of the header."""
    _buffers: Buffers = field(default_factory=Buffers)

    def __post_init__(self) -> None:
        """Read ``config.json``. Raises ValueError for a value of another type than transformers writes."""
        self.config = self.json("config.json")
        for fields in _levels(self.config):
            for key, kind in CONFIG_TYPES.items():
                value = fields.get(key)
                if value is not None and type(value) is not kind:
                    raise ValueError(
                        f"{self.path / 'config.json'}: {key} must be {kind.__name__}, got {described(value)}"
                    )
            classes = fields.get("architectures") or []
            if not all(isinstance(name, str) for name in classes):
                raise ValueError(
                    f"{self.path / 'config.json'}: architectures must be names of classes, got {described(classes)}"
                )

    @property
    def quantization(self) -> dict[str, Any]:
        """``quantization_config`` of the configuration, or of its text model."""
        for config in _levels(self.config):
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

    def json(self, name: str) -> dict[str, Any]:
        """A JSON file of the folder; empty if there is none."""
        return read_json(self.path / name) if self.path.is_dir() and (self.path / name).is_file() else {}

    def place(self, name: str) -> str:
        """``file, tensor NAME``: the beginning of messages."""
        stored = self.tensors.get(name)
        return f"{stored.file if stored else self.path}, tensor {name}"

    def add(self, name: str, stored: Stored) -> None:
        """Add a tensor of one of the files. Raises ValueError for a name that another file has, too."""
        if name in self.tensors:
            raise ValueError(f"tensor {name} is in two files: {self.tensors[name].file} and {stored.file}")
        self.tensors[name] = stored

    def tensor(self, name: str) -> Tensor:
        """The values of a stored tensor, or the bytes of its blocks if its type has no dtype here.

        Raises ValueError that names file and tensor, also for a mapped file that is shorter now: its pages would be a
        SIGBUS.
        """
        stored = self.tensors[name]
        if stored.mapped is not None:
            found, size = stored.mapped
            if stored.file.stat().st_size < size:
                raise ValueError(f"{self.place(name)}: the file has changed since it was opened")
            return found
        dtype = DTYPES.get(stored.dtype)
        library_error = getattr(sys.modules.get("safetensors"), "SafetensorError", OSError)  # GGUF does not need it
        try:
            if stored.offset is None:
                with open_safetensors(stored.file) as handle:
                    return handle.get_tensor(name)  # type: ignore[no-any-return]
            found = read_bytes(stored.file, stored.offset, stored.nbytes, self._buffers if self.streams else None)
            if dtype is None:
                rows = stored.shape[:-1]
                return found.reshape(*rows, stored.nbytes // max(math.prod(rows), 1))
            return found.view(dtype).reshape(stored.shape)
        except (library_error, OSError, RuntimeError, KeyError, TypeError) as error:
            raise ValueError(f"{self.place(name)}: {error}") from error

    def load(self, name: str, entry: Entry) -> Tensor:
        """The tensor that an entry describes. Raises ValueError or NotImplementedError that names file and tensor."""
        try:
            stored = map(self.tensor, entry.sources)
            return next(stored) if entry.build is None else entry.build(*stored)
        except (ValueError, TypeError, RuntimeError, LookupError, ArithmeticError) as error:
            if any(str(error).startswith(self.place(source)) for source in entry.sources):
                raise
            kind = NotImplementedError if isinstance(error, NotImplementedError) else ValueError
            raise kind(f"{self.place(entry.sources[0])}: {error}") from error

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, t: TracebackType | None) -> None:
        """No file is open between two tensors."""
        self._buffers.close()


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a folder with safetensors, or one file. Raises FileNotFoundError or ValueError that says what is missing."""
    if not path.exists():
        hub = HUB.fullmatch(str(path)) is not None and not path.parent.exists()
        more = f" (from the Hugging Face hub: hf download {path} --local-dir {path.name})" if hub else ""
        raise FileNotFoundError(f"{path} does not exist; pass a folder or a file of a checkpoint on this machine{more}")
    check_file(path)
    index = weight_map(path / INDEX) if (path / INDEX).is_file() else {}
    files = sorted({path / name for name in index.values()}) or _files(path)
    out = Checkpoint(path)
    for file in files:
        with open_safetensors(file) as handle:
            out.metadata |= handle.metadata() or {}
            # safetensors has checked that the values follow the header, and each other, without gaps. They are read by
            # offset and not from its mapped memory: mapped pages count as memory of the process, and are slower
            with file.open("rb") as f:
                offset: int | None = 8 + int.from_bytes(f.read(8), "little")
            for name in handle.offset_keys():
                described_by = handle.get_slice(name)
                dtype, shape = described_by.get_dtype(), tuple(described_by.get_shape())
                known = DTYPES.get(dtype)
                if known is None:  # of packed values, whose bytes torch does not count
                    offset = None
                size = 0 if known is None else math.prod(shape) * known.itemsize
                out.add(name, Stored(file, dtype, shape, offset, size))
                if offset is not None:
                    offset += size
    for name, shard in index.items():
        if name not in out.tensors or out.tensors[name].file.name != shard:
            raise ValueError(f"{path / INDEX}: tensor {name} is not in {shard}")
    return out


def _files(path: Path) -> list[Path]:
    """The files of a checkpoint without an index."""
    if not path.is_dir():
        if path.suffix != ".safetensors":
            raise ValueError(f"{path} is not a checkpoint; pass a folder, or a file that ends in {', '.join(ENDINGS)}")
        return [path]
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


def weight_map(index: Path) -> dict[str, str]:
    """Tensor -> file, from the JSON file ``index``. Raises ValueError for a name that leaves the folder."""
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise ValueError(f"{index} needs a weight_map of tensors and files, got {described(found)}")
    for name, file in found.items():
        if not isinstance(file, str) or file in ("", "..") or Path(file).name != file or "\0" in file:
            raise ValueError(f"{index}: {name} is in {described(file)}, which is not the name of a file in this folder")
        if not (index.parent / file).is_file():
            raise ValueError(f"{index}: {name} is in {file}, which does not exist")
    return found


def open_safetensors(file: Path) -> Any:
    """safetensors' handle of a file. Raises ValueError that names the file."""
    safetensors = needs("safetensors", "safetensors")
    check_file(Path(file))
    try:
        with Path(file).open("rb"):  # safetensors says that a file without permission does not exist
            pass
        return safetensors.safe_open(str(file), framework="pt")
    except (safetensors.SafetensorError, OSError, UnicodeError) as error:  # a name that is not UTF-8
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"{file} cannot be read as safetensors: {why}") from error


def read_json(file: Path) -> dict[str, Any]:
    """A JSON file that holds a dict. Raises ValueError that names the file."""
    check_file(file)
    if file.stat().st_size > LARGEST_JSON:
        raise ValueError(f"{file} has {file.stat().st_size} bytes; at most {LARGEST_JSON} are read")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"{file} is not valid JSON: {why}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} must hold a dict, got {described(found)}")
    return found


def check_file(file: Path) -> None:
    """Raise ValueError for a pipe, a socket or a device: opening one may wait for ever."""
    if file.exists() and not file.is_file() and not file.is_dir():
        raise ValueError(f"{file} is a pipe, a socket or a device; pass a file or a folder")
