"""GGUF, of llama.cpp: MXFP4 and NVFP4 as codes, and every other type that the package ``gguf`` dequantizes as float32.
From GGUF to GGUF, a tensor that is not quantized anew keeps its type and its bytes.

A block of MXFP4 has 17 bytes: E8M0 first, then 16 bytes whose low nibbles are the values 0-15 and whose high nibbles
are 16-31. The scale is 2^(byte - 128) over doubled values, which is the E8M0 scale of this package over its values.
64 values of NVFP4 have 36 bytes: 4 scales in UE4M3, then 8 bytes for each 16 values, nibbles as above.
Names of tensors stay those of GGUF (``blk.0.attn_q.weight``).

Headers are read by gguf's reader with checks of its lengths and without its loops over a vocabulary: it makes each
string by calls that slice a mapped array, 2 to 4 s for 50,000 tokens. Inside ``headers_cached``, each file's header is
read once, and ``read_quickly`` gives the same headers to transformers, which reads a header three times.

Source: gguf/quants.py of version 0.19.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.names import dtype_name
from ..tensor.mxtensor import MXTensor
from .destination import Destination
from .layout import Layout, rowwise, weight
from .reading import DTYPES, Checkpoint, Entry, Stored, check_file, needs

LARGEST_ARRAY = 1 << 22
"""Entries of an array of the header; a tokenizer has up to half a million."""
PLAIN = ("F32", "F16", "F64", "BF16")
NAMES = {DTYPES[name]: name for name in (*PLAIN, "I8", "I16", "I32", "I64")}
"""dtype of plain values -> type of GGUF, which has safetensors' names for them."""
_cached: ContextVar[dict[tuple[Any, ...], Any] | None] = ContextVar("_cached", default=None)

# ---------------------------------------------------------------------------------------------- the header


@cache
def _reader(gguf: Any) -> Any:
    """gguf's reader. A wrong length in the header is an error; the package would read on for ever."""

    class Reader(gguf.GGUFReader):
        def __setattr__(self, name: str, value: Any) -> None:
            """The mapped ``data`` becomes a plain array, whose slices are ten times as fast as those of a memmap."""
            super().__setattr__(name, np.asarray(value) if name == "data" else value)

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
    check_file(Path(path))
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


# ---------------------------------------------------------------------------------------------- reading


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file. Raises ValueError for one that the package gguf cannot read, for tensors that share a name or
    bytes, and for one of several files that llama.cpp has split a model into."""
    needs("gguf", "gguf")
    out = Checkpoint(path, kind="gguf")
    try:
        out.reader = header_of(path)
        places = []
        for t in out.reader.tensors:
            if t.name in out.tensors:
                raise ValueError("two tensors have the same name")
            shape, offset, size = tuple(int(n) for n in reversed(t.shape)), int(t.data_offset), int(t.n_bytes)
            out.add(t.name, Stored(path, t.tensor_type.name, shape, offset, size))
            places += [(offset, size, t.name)] if size else []
        for (start, size, name), (following, _, other) in pairwise(sorted(places)):
            if start + size > following:
                raise ValueError(f"the bytes of {name} and {other} overlap")
        fields = out.reader.fields
        count, number = (int(fields[key].contents()) if key in fields else 0 for key in ("split.count", "split.no"))
        if count > 1:
            raise ValueError(
                f"it is part {number + 1} of {count} of a model; join them by `llama-gguf-split --merge` with the "
                "first part and a new file"
            )
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # a file that is not valid raises what numpy and enum raise
        why = str(error) if isinstance(error, ValueError) else repr(error)
        raise ValueError(f"{path} cannot be read as GGUF: {why:.200}") from error
    return out


CODES = {"MXFP4": ("mxfp4_e2m1", 32, 1), "NVFP4": ("nvfp4_single_level", 64, 4)}
"""Type of GGUF -> (format, values that its blocks have, scales of a block). Of the bytes that share a scale, the low
nibbles are the first half of the values."""


def _decoded(data: Tensor, shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> MXTensor:
    """Blocks of CODES as a tensor of this package, where a byte has the code of an even index in its low nibble."""
    format, values, scales = CODES[kind]
    blocks = data.reshape(*shape[:-1], shape[-1] // values, scales + values // 2)
    packed = blocks[..., scales:].unflatten(-1, (scales, -1))
    nibbles = torch.cat((packed & 15, packed >> 4), -1)
    codes = (nibbles[..., ::2] | nibbles[..., 1::2] << 4).flatten(-3)
    scale = blocks[..., :scales].flatten(-2).contiguous()
    if kind == "NVFP4":  # no sign, and no NaN
        scale = torch.where((scale & 127) == 127, 0, scale & 127)
    return weight(codes, scale, format, dtype, shape=shape)


def _dequantized(data: Tensor, shape: tuple[int, ...], kind: str) -> Tensor:
    gguf = needs("gguf", "gguf")
    try:
        values = gguf.dequantize(data.numpy(), gguf.GGMLQuantizationType[kind])
    except NotImplementedError as error:
        raise NotImplementedError(f"the package gguf does not dequantize {kind}") from error
    return torch.from_numpy(values).reshape(shape)


def _read(checkpoint: Checkpoint) -> dict[str, Entry]:
    entries = {}
    for name, stored in checkpoint.tensors.items():
        other = f"{name.removesuffix('.weight')}.scale"
        if stored.dtype not in PLAIN and other != name and other in checkpoint.tensors:
            raise NotImplementedError(
                f"{checkpoint.place(name)}: codes in {stored.dtype} with {other}, which multiplies the results of this "
                "layer in llama.cpp and is not read here; use a file without such scales"
            )
        kind, shape = stored.dtype, stored.shape
        if kind in CODES and shape and shape[-1] % CODES[kind][1] == 0:
            entries[name] = Entry((name,), partial(_decoded, shape=shape, dtype=checkpoint.dtype, kind=kind))
        elif kind in NAMES.values():
            entries[name] = Entry((name,))
        else:
            entries[name] = Entry((name,), partial(_dequantized, shape=shape, kind=kind), stored)
    return entries


# ---------------------------------------------------------------------------------------------- writing


class GGUFSink(Destination):
    """A context manager that collects the bytes of tensors and writes one file, by the package ``gguf``, which needs
    the sizes of all tensors before the first byte: they wait in a file beside the destination.

    ``path``: a file that ends in ``.gguf``. ``source``: a GGUF file hands on its header: the architecture, the
    tokenizer and all other fields. Without one, the header has the architecture only: tools read the tensors, but
    llama.cpp needs a file that its own converter has made. Raises ValueError for another path, FileExistsError if it
    exists, unless ``overwrite``. ``shard_bytes`` and ``header`` are for shards, which GGUF does not have.
    """

    def __init__(
        self,
        path: str | Path,
        shard_bytes: int,
        overwrite: bool = False,
        source: Checkpoint | None = None,
        header: object = None,
    ) -> None:
        if Path(path).suffix != ".gguf":
            raise ValueError(f"the layout gguf is one file; pass a name that ends in .gguf, not {path}")
        super().__init__(path, overwrite)
        self.source = source
        self._infos: dict[str, tuple[tuple[int, ...], int, str]] = {}
        """Name -> (shape of its bytes, number of bytes, type of GGUF)."""
        self._spool = (self.folder / "tensors").open("wb")

    def add(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
        """Add the bytes of a tensor; ``metadata`` has its type of GGUF by name."""
        for name, t in tensors.items():
            if name in self._infos:
                raise ValueError(f"two tensors would be stored as {name}; rename one of them")
            t = t.detach().to("cpu").contiguous()
            raw = (t if t.dim() else t.reshape(1)).view(torch.uint8)
            self._infos[name] = tuple(raw.shape), raw.numel(), (metadata or {})[name]
            with self.named_errors():
                self._spool.write(memoryview(raw.reshape(-1).numpy()))  # type: ignore[arg-type]

    def finish(self, files: Mapping[str, Any], source: Path | None = None) -> None:
        """Write the file and move it to its place. ``files``: ``config.json`` names the architecture. What llama.cpp
        calls the type of the file is guessed from its tensors."""
        gguf, config = needs("gguf", "gguf"), files.get("config.json") or {}
        with self.named_errors():
            self._spool.close()
            fields = {} if self.source is None or self.source.reader is None else self.source.reader.fields
            keys = gguf.Keys.General
            key = keys.ARCHITECTURE
            architecture = fields[key].contents() if key in fields else str(config.get("model_type", "unknown"))
            writer = gguf.GGUFWriter(out := self.folder / "out.gguf", architecture)
            try:
                for name, field in fields.items():
                    value, kind = field.contents(), field.types[0]
                    if name.startswith("GGUF.") or name in (key, keys.FILE_TYPE) or value in (None, []):
                        continue
                    inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
                    writer.add_key_value(name, value, kind, sub_type=inner)
                    if name == keys.ALIGNMENT:
                        writer.data_alignment = int(value)
                writer.add_uint32(keys.FILE_TYPE, int(gguf.LlamaFileType.GUESSED))
                for name, (shape, size, kind) in self._infos.items():
                    writer.add_tensor_info(name, shape, np.dtype(np.uint8), size, gguf.GGMLQuantizationType[kind])
                writer.write_header_to_file()
                writer.write_kv_data_to_file()
                writer.write_ti_data_to_file()
                with open(self._spool.name, "rb") as spool:
                    for _, size, _ in self._infos.values():
                        writer.write_tensor_data(np.fromfile(spool, np.uint8, size))
            finally:
                writer.close()
            self.move(out.name)

    def __exit__(self, *error: Any) -> None:
        self._spool.close()
        super().__exit__(*error)


def _blocks(name: str, data: Tensor, scale: Tensor, kind: str) -> Tensor:
    """Codes and scales as blocks of CODES."""
    if kind == "NVFP4" and bool((scale > 126).any()):
        raise NotImplementedError(f"{name} has negative or NaN scales, which GGUF's NVFP4 cannot store")
    _, values, scales = CODES[kind]
    half = values // scales // 2
    packed = data.unflatten(-1, (-1, scales, half))
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    halves = codes[..., :half] | codes[..., half:] << 4
    return torch.cat((scale.unflatten(-1, (-1, scales)), halves.flatten(-2)), -1).flatten(-2)


def _from_mxint8(name: str, data: Tensor, scale: Tensor) -> Tensor:
    """Q8_0: a float16 scale and 32 integers. 2^(byte - 127) / 64 is exact from 2^-24 to 2^15."""
    codes = data.unflatten(-1, (-1, 32))
    exponent = scale.to(torch.int32) - 127 - 6
    used = (codes != 0).any(-1)
    if bool(((exponent < -24) | (exponent > 15))[used].any()):
        raise NotImplementedError(
            f"{name} has scales beyond the range of float16, in which Q8_0 stores them; pass format='mxfp4-weight-only'"
        )
    half = torch.where(used, torch.exp2(exponent.clamp(-24, 15).to(torch.float32)), 0).to(torch.float16)
    return torch.cat((half[..., None].view(torch.uint8), codes.view(torch.uint8)), -1).flatten(-2)


WRITTEN: dict[str, tuple[str, Callable[[str, Tensor, Tensor], Tensor], int]] = {
    **{format: (kind, partial(_blocks, kind=kind), values) for kind, (format, values, _) in CODES.items()},
    "mxint8": ("Q8_0", _from_mxint8, 32),
}
"""Format -> (type of GGUF, what makes its bytes, values that its blocks have)."""


def _write(name: str, t: MXTensor) -> dict[str, Tensor]:
    operand = rowwise(name, t, GGUF, WRITTEN, any_name=True)
    _, bytes_of, _ = WRITTEN[t.format.name]
    return {name: bytes_of(name, operand.data.contiguous(), operand.scale.contiguous())}


def _type_of(name: str, t: Tensor) -> dict[str, str]:
    """Name -> type of GGUF. Raises NotImplementedError for a tensor that GGUF cannot hold."""
    if isinstance(t, MXTensor):
        return {name: WRITTEN[t.format.name][0]}
    if t.dtype not in NAMES or t.dim() > 4:
        raise NotImplementedError(
            f"{name} is {dtype_name(t.dtype)} of shape {tuple(t.shape)}, and GGUF stores tensors of up "
            f"to four dimensions in {', '.join(NAMES.values())}"
        )
    return {name: NAMES[t.dtype]}


GGUF = Layout(
    "gguf",
    "llama.cpp",
    detect=lambda checkpoint: checkpoint.kind == "gguf",
    read=_read,
    scales=(),
    write=_write,
    whole=lambda format: (1, WRITTEN[format.name][2] if format.name in WRITTEN else 1),
    metadata=_type_of,
    unchanged=lambda checkpoint, name: ({name: checkpoint.tensor(name)}, {name: checkpoint.tensors[name].dtype}),
    sink=GGUFSink,
    dims=(2, 3),
    embeddings=True,
    one_file=True,
    formats=f"{', '.join(WRITTEN)}; all others are read as float32",
    exact="MXFP4 and NVFP4 bit for bit, mxint8 as Q8_0 where float16 has its scales; others as gguf dequantizes them",
)
