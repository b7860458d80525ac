"""Extra states of TransformerEngine's modules: bytes, empty or a pickle with the amax histories of delayed scaling.

A pickle is read by Python's unpickler with a part of its opcodes, which makes dicts, lists, tuples, tensors and
``Inert`` objects: nothing that a pickle names is imported or called. Memory and time are bounded by the size of the
input: a tensor has as many values as the input has for it, and bytes that are named several times are read once.

Row 0 of a history is the pass that runs, its last row the newest one; the scales of the next pass are computed already.
Here a step moves ``record``, the newest row, into the history, newest first, and computes the scales then.

Sources: the opcodes in Python's ``pickletools``; the file of a storage in ``torch.save`` before version 1.6.
"""

from __future__ import annotations

import math
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..core.arguments import described
from ..numerics.formats import E4M3, E5M2

EXTRA_STATE = "_extra_state"
"""torch's key for the extra state of a module."""
ATTENTION = "fused_attention._extra_state"
"""Where TransformerEngine 1.6 and 1.7 stored the state of quantized attention."""
NAMES = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")
FORWARD, BACKWARD = 3, 2
"""The tensors of each product: input, weight, result; gradient of the result, gradient of the input."""
ROUNDING = 1e-5
"""More than what computing a scale and its reciprocal changes."""


def product_states(label: str, data: Any) -> dict[str, Tensor]:
    """``"PRODUCT.TENSOR"`` -> tensor of delayed scaling from an extra state of TransformerEngine; nothing for other
    recipes. ``label`` names the module. Raises ValueError for other bytes."""
    if isinstance(data, Tensor) and data.dtype is torch.uint8 and data.numel() == 0:
        return {}
    try:
        state: dict[str, Any] = read_pickle(data.detach().cpu().numpy().tobytes()) or {}
        found: dict[str, Any] = {name: state.get(name) for name in NAMES}
        if not any(isinstance(value, Tensor) for value in found.values()):
            return {}
        return _converted(state.get("recipe"), *(found[name].to(torch.float32) for name in NAMES))
    except Exception as error:  # of damaged bytes anything may be raised
        raise ValueError(
            f"{label}: the extra state {described(data)} is neither of this package nor of TransformerEngine "
            f"({type(error).__name__}: {error!s:.120}); remove the keys that end in _extra_state to load the rest: "
            "amax histories then start anew"
        ) from error


def _converted(
    recipe: Inert | None, scale_fwd: Tensor, history_fwd: Tensor, scale_bwd: Tensor, history_bwd: Tensor
) -> dict[str, Tensor]:
    """``recipe`` None: that of TransformerEngine 1."""
    forward, backward, margin = E4M3.max, E5M2.max, 0.0
    if recipe is not None:
        (largest,) = recipe.fields["fp8_format"].given
        forward, backward = map(float, largest.given)
        margin = float(recipe.fields.get("margin", 0))
    products = len(scale_fwd) // FORWARD
    # (..., products, 3): input, weight, gradient of the result. Other shapes raise here.
    scales, histories = (
        torch.cat([fwd.view(*size, FORWARD)[..., :2], bwd.view(*size, BACKWARD)[..., :1]], -1)
        for fwd, bwd, size in (
            (scale_fwd, scale_bwd, (products,)), (history_fwd, history_bwd, (len(history_fwd), products))
        )
    )  # fmt: skip
    maxima = torch.tensor([forward, forward, backward], device="cpu")
    out: dict[str, Tensor] = {}
    for i, scale in enumerate(scales):
        amax, history = maxima / scale, histories[:, i]
        rows = history[1:].flip(0)  # newest first
        # The scale may be that of the row that has just left the history: for one more pass it is the oldest row.
        left = amax / 2.0**margin
        newest = rows.amax(0) if len(rows) else torch.zeros_like(amax)
        known = (history.amax(0) > 0) | (amax != maxima)
        left = torch.where(known & (left > newest * (1 + ROUNDING)), left, 0.0)
        rows = torch.cat([rows, left.unsqueeze(0), torch.zeros_like(left).unsqueeze(0)])
        tensors = {"history": rows[1:], "record": rows[0], "amax": amax}
        out |= {f"{i}.{name}": value.clone() for name, value in tensors.items()}
    return out


def ignore_keys(module: nn.Module, *names: str) -> None:
    """Let ``module`` load state dicts of TransformerEngine, whose module also has entries ``names``."""
    module.register_load_state_dict_pre_hook(partial(_drop, names=names))


def _drop(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any, names: tuple[str, ...]) -> None:
    for name in names:
        state_dict.pop(prefix + name, None)


# ---------------------------------------------------------------------------------------------- pickles

MOST_DIMENSIONS = 8
MAGIC = 0x1950A86A20F9469CFC6C
"""torch.serialization.MAGIC_NUMBER."""
STORAGES = {
    "torch.DoubleStorage": torch.float64, "torch.FloatStorage": torch.float32, "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16, "torch.LongStorage": torch.int64, "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16, "torch.CharStorage": torch.int8, "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}  # fmt: skip
OPCODES = (
    "PROTO", "FRAME", "MARK", "STOP", "NONE", "NEWTRUE", "NEWFALSE", "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1",
    "TUPLE2", "TUPLE3", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "GLOBAL", "STACK_GLOBAL", "REDUCE", "BINPERSID",
    "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
    "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
)  # fmt: skip
"""What TransformerEngine's pickles use, as Python reads it. The three others have methods of their own."""


@dataclass
class Inert:
    """A class or a function that a pickle names, which is not looked up; with ``given``, a call of it."""

    name: str
    given: tuple[Any, ...] | None = None
    fields: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *given: Any) -> Inert:
        return Inert(self.name, given)


class _Named(dict[Any, Any]):
    """A dict whose keys are names or numbers: the hash of a tuple that holds itself twice, and so on, would take for
    ever."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if type(key) not in (str, int):
            raise ValueError("a dict has keys that are not names")
        super().__setitem__(key, value)


class _Reader(pickle._Unpickler):
    """Python's unpickler, not the one in C, whose memo is an array as long as five bytes say.

    ``storages``: for a pickle in the file of a storage, which names its type.
    """

    dispatch: ClassVar[dict[int, Any]] = {
        code: pickle._Unpickler.dispatch[code] for code in (getattr(pickle, name)[0] for name in OPCODES)
    }
    stack: list[Any]
    append: Callable[[Any], None]

    def __init__(self, stream: BytesIO, storages: bool = False) -> None:
        super().__init__(stream)
        self._storages = storages
        self._known = {} if storages else {
            "collections.OrderedDict": lambda *given: Inert("collections.OrderedDict", given) if given else _Named(),
            "torch._utils._rebuild_tensor_v2": _tensor,
            "torch.storage._load_from_bytes": self._loaded,
        }  # fmt: skip
        self._loads: dict[int, tuple[bytes, Tensor]] = {}
        """The identity of bytes -> these, and the storage in them: each is read once."""

    def find_class(self, module: str, name: str) -> Any:
        return self._known.get(f"{module}.{name}") or Inert(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> tuple[torch.dtype, str, int]:
        """The dtype, the key and the number of values of a storage."""
        kind, storage, key, _, count, _ = pid
        known = self._storages and isinstance(storage, Inert) and storage.given is None and storage.name in STORAGES
        if kind != "storage" or not known or type(key) is not str or type(count) is not int:
            raise ValueError("a storage has no bytes, or an unknown type")
        return STORAGES[storage.name], key, count

    def _loaded(self, data: Any) -> Tensor:
        if type(data) is not bytes:
            raise ValueError("a storage is not bytes")
        if id(data) not in self._loads:
            self._loads[id(data)] = data, _storage(data)
        return self._loads[id(data)][1]

    def load_named(self) -> None:
        self.append(_Named())

    def load_build(self) -> None:
        """The state of a call: fields that nothing acts on."""
        state, made = self.stack.pop(), self.stack[-1]
        if not isinstance(made, Inert) or made.given is None:
            raise ValueError(f"it changes a {type(made).__name__}")
        made.fields = state if isinstance(state, dict) else {}

    dispatch |= {pickle.EMPTY_DICT[0]: load_named, pickle.BUILD[0]: load_build}
    dispatch |= {pickle.NEWOBJ[0]: dispatch[pickle.REDUCE[0]]}  # without __new__ of anything


def _storage(data: bytes) -> Tensor:
    """The values (n,) in bytes of ``torch.save``: five pickles, the number of values, the values."""
    stream = BytesIO(data)
    magic, version, system, (dtype, key, values), keys = (_Reader(stream, storages=True).load() for _ in range(5))
    if magic != MAGIC or version != 1001 or sys.byteorder != "little" or not system.get("little_endian"):
        raise ValueError("a storage is not of torch.save")
    if not isinstance(dtype, torch.dtype) or keys != [key]:
        raise ValueError("a storage holds something else")
    start, size = stream.tell() + 8, values * dtype.itemsize
    if int.from_bytes(data[start - 8 : start], "little") != values or not 0 <= size <= len(data) - start:
        raise ValueError(f"a storage of {values} values has {len(data) - start} bytes")
    if not size:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(data[start : start + size]), dtype=dtype)


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> Tensor:
    numbers = (offset, *size, *stride)
    valid = all(type(n) is int and 0 <= n < 1 << 62 for n in numbers)
    if not isinstance(storage, Tensor) or len(size) > MOST_DIMENSIONS or not valid:
        raise ValueError("a tensor has no storage, or wrong sizes")
    if math.prod(size) > len(storage):  # strides of 0 would make it as large as they like
        raise ValueError(f"a tensor of shape {size} has {len(storage)} values")
    return storage.as_strided(size, stride, offset)  # raises for a view beyond the storage


def read_pickle(data: bytes) -> Any:
    """What a pickle holds: numbers, strings, bytes, tensors, tuples, lists and dicts of them; an ``Inert`` for all
    else. Raises what damaged bytes, and opcodes and keys that TransformerEngine does not write, lead to."""
    try:
        return _Reader(BytesIO(data)).load()
    except KeyError as error:  # an opcode that is not in the table
        raise ValueError(f"opcode {error} is not one of TransformerEngine's pickles") from error
