"""GGUF, of llama.cpp: MXFP4 and NVFP4 as codes, and every other type that the package ``gguf`` dequantizes as float32.
From GGUF to GGUF, a tensor that is not quantized anew keeps its type and its bytes.

A block of MXFP4 has 17 bytes: E8M0 first, then 16 bytes whose low nibbles are the values 0-15 and whose high nibbles
are 16-31. The scale is 2^(byte - 128) over doubled values, which is the E8M0 scale of this package over its values.
64 values of NVFP4 have 36 bytes: 4 scales in UE4M3, then 8 bytes for each 16 values, nibbles as above.
Names of tensors stay those of GGUF (``blk.0.attn_q.weight``).

Source: gguf/quants.py of version 0.19.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.names import dtype_name
from ..tensor.mxtensor import MXTensor
from .gguf_reader import LARGEST_ARRAY as LARGEST_ARRAY
from .gguf_reader import header_of
from .gguf_sink import GGUFSink
from .layout import Layout, weight
from .source import Checkpoint, Encoded, Entry, Stored, needs

PLAIN = {"F32": torch.float32, "F16": torch.float16, "F64": torch.float64, "BF16": torch.bfloat16}
INTEGERS = {"I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64}
NAMES = {dtype: name for name, dtype in (PLAIN | INTEGERS).items()}


class GGUFCheckpoint(Checkpoint):
    """An opened GGUF file. ``tensor`` gives the bytes of a tensor, as the file has them.

    They are read by offset. gguf's reader maps the file, and mapped pages count as memory of the process.
    """

    reader: Any
    stored: dict[str, Any]

    def tensor(self, name: str) -> Tensor:
        found = self.stored[name]
        data = np.fromfile(self.path, found.data.dtype, found.data.size, offset=int(found.data_offset))
        if data.size < found.data.size:
            raise ValueError(f"the file ends {found.data.nbytes - data.nbytes} bytes too early")
        return torch.from_numpy(data.reshape(found.data.shape))


def open_gguf(path: Path) -> GGUFCheckpoint:
    """Open a GGUF file. Raises ValueError for one that the package gguf cannot read."""
    needs("gguf", "gguf")
    out = GGUFCheckpoint(path)
    try:
        out.reader = header_of(path)
        out.stored = {t.name: t for t in out.reader.tensors}
        if len(out.stored) < len(out.reader.tensors):
            raise ValueError("two tensors have the same name")
        _check_overlaps(out.reader.tensors)
        _check_whole(path, out.reader.fields)
        for t in out.reader.tensors:
            out.tensors[t.name] = Stored(path, t.tensor_type.name, tuple(int(n) for n in reversed(t.shape)))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # a file that is not valid raises what numpy and enum raise
        why = str(error) if isinstance(error, ValueError) else repr(error)
        raise ValueError(f"{path} cannot be read as GGUF: {why:.200}") from error
    return out


def _check_whole(path: Path, fields: Mapping[str, Any]) -> None:
    """Raise ValueError for one of several files that llama.cpp has split a model into: it lacks the other tensors."""
    count, number = (int(fields[key].contents()) if key in fields else 0 for key in ("split.count", "split.no"))
    if count > 1:
        raise ValueError(
            f"it is part {number + 1} of {count} of a model; join them by `llama-gguf-split --merge` with the first "
            "part and a new file"
        )


def _check_overlaps(tensors: Iterable[Any]) -> None:
    """Raise ValueError for two tensors that share bytes: gguf's reader does not."""
    places = sorted((int(t.data_offset), int(t.n_bytes), t.name) for t in tensors if t.n_bytes)
    for (start, size, name), (following, _, other) in pairwise(places):
        if start + size > following:
            raise ValueError(f"the bytes of {name} and {other} overlap")


# ---------------------------------------------------------------------------------------------- reading


def _in_order(packed: Tensor) -> Tensor:
    """Bytes (..., n) whose low nibbles are the first n values -> the same codes with an even index in a low nibble."""
    nibbles = torch.cat((packed & 15, packed >> 4), -1)
    return nibbles[..., ::2] | nibbles[..., 1::2] << 4


def _mxfp4(shape: tuple[int, ...], dtype: torch.dtype) -> Callable[..., Tensor]:
    def build(data: Tensor) -> Tensor:
        blocks = data.reshape(*shape[:-1], shape[-1] // 32, 17)
        codes = _in_order(blocks[..., 1:]).flatten(-2)
        return weight(codes, blocks[..., 0].contiguous(), "mxfp4_e2m1", dtype, shape=shape)

    return build


def _nvfp4(shape: tuple[int, ...], dtype: torch.dtype) -> Callable[..., Tensor]:
    def build(data: Tensor) -> Tensor:
        blocks = data.reshape(*shape[:-1], shape[-1] // 64, 36)
        codes = _in_order(blocks[..., 4:].unflatten(-1, (4, 8))).flatten(-3)
        scale = blocks[..., :4].flatten(-2)
        scale = torch.where((scale & 127) == 127, 0, scale & 127)  # no sign, and no NaN
        return weight(codes, scale.contiguous(), "nvfp4_single_level", dtype, shape=shape)

    return build


CODES = {"MXFP4": (_mxfp4, 32), "NVFP4": (_nvfp4, 64)}
"""Type of GGUF -> (what builds a tensor of its codes, values that its blocks have)."""


def _dequantized(shape: tuple[int, ...], kind: str) -> Callable[..., Tensor]:
    def build(data: Tensor) -> Tensor:
        if kind in INTEGERS:
            return data.reshape(shape)
        if kind in PLAIN:
            return data.reshape(-1).view(torch.uint8).view(PLAIN[kind]).reshape(shape)
        gguf = needs("gguf", "gguf")
        try:
            values = gguf.dequantize(data.numpy(), gguf.GGMLQuantizationType[kind])
        except NotImplementedError as error:
            raise NotImplementedError(f"the package gguf does not dequantize {kind}") from error
        return torch.from_numpy(values).reshape(shape)

    return build


def _read(checkpoint: Any) -> dict[str, Entry]:
    entries = {}
    for name, stored in checkpoint.tensors.items():
        make, block = CODES.get(stored.dtype, (None, 1))
        if make is not None and stored.shape and stored.shape[-1] % block == 0:
            entries[name] = Entry((name,), make(stored.shape, checkpoint.dtype))
            continue
        encoded = None
        if stored.dtype not in PLAIN | INTEGERS:
            encoded = Encoded(stored.dtype, stored.shape, int(checkpoint.stored[name].n_bytes))
        entries[name] = Entry((name,), _dequantized(stored.shape, stored.dtype), encoded)
    return entries


# ---------------------------------------------------------------------------------------------- writing


def _halves(data: Tensor, size: int) -> Tensor:
    """Packed codes of blocks of ``2 * size`` values -> bytes whose low nibbles are the first half of each block."""
    packed = data.unflatten(-1, (-1, size))
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    return codes[..., :size] | codes[..., size:] << 4


def _from_mxfp4(name: str, data: Tensor, scale: Tensor) -> Tensor:
    return torch.cat((scale[..., None], _halves(data, 16)), -1).flatten(-2)


def _from_nvfp4(name: str, data: Tensor, scale: Tensor) -> Tensor:
    if bool((scale > 126).any()):
        raise NotImplementedError(f"{name} has negative or NaN scales, which GGUF's NVFP4 cannot store")
    codes = _halves(data, 8).unflatten(-2, (-1, 4)).flatten(-2)
    return torch.cat((scale.unflatten(-1, (-1, 4)), codes), -1).flatten(-2)


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
    "mxfp4_e2m1": ("MXFP4", _from_mxfp4, 32), "nvfp4_single_level": ("NVFP4", _from_nvfp4, 64),
    "mxint8": ("Q8_0", _from_mxint8, 32),
}  # fmt: skip
"""Format -> (type of GGUF, what makes its bytes, values that its blocks have)."""


def _write(name: str, t: MXTensor) -> dict[str, Tensor]:
    if t.format.name not in WRITTEN:
        raise NotImplementedError(
            f"{name} is {t.format.name}, and the layout gguf holds {', '.join(WRITTEN)}: pass format=, which quantizes "
            "again"
        )
    _, bytes_of, block = WRITTEN[t.format.name]
    operand = t.rowwise
    if operand is None or t.dim() not in (2, 3) or t.shape[-1] % block:
        raise NotImplementedError(
            f"{name} has the orientation {t.orientation.label} and the shape {tuple(t.shape)}, and the layout gguf "
            f"holds rowwise matrices with whole blocks of {block} values; skip it, or use the layout native"
        )
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


def _unchanged(checkpoint: Checkpoint, name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The bytes and the type of a tensor as the file has them, also of types that this package does not write."""
    return {name: checkpoint.tensor(name)}, {name: checkpoint.tensors[name].dtype}


GGUF = Layout(
    "gguf",
    "llama.cpp",
    detect=lambda checkpoint: isinstance(checkpoint, GGUFCheckpoint),
    read=_read,
    write=_write,
    whole=lambda format: (1, WRITTEN[format.name][2] if format.name in WRITTEN else 1),
    metadata=_type_of,
    unchanged=_unchanged,
    sink=GGUFSink,
    dims=(2, 3),
    embeddings=True,
    one_file=True,
    formats=f"{', '.join(WRITTEN)}; all others are read as float32",
    exact="MXFP4 and NVFP4 bit for bit, mxint8 as Q8_0 where float16 has its scales; others as gguf dequantizes them",
)
