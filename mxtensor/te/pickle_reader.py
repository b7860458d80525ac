"""A reader of the pickles in TransformerEngine's extra states. It imports and calls nothing that a pickle names.

``pickletools`` splits the bytes into opcodes; those of OPCODES build dicts, lists, tuples, tensors and ``Inert``
objects. Memory and time are bounded by the size of the input: the memo is a dict, a tensor has as many values as the
input has for it, and bytes that are named several times are read once.

Sources: the opcodes in Python's ``pickletools``; the file of a storage in ``torch.save`` before version 1.6.
"""

from __future__ import annotations

import math
import pickletools
import sys
from collections.abc import Callable
from io import BytesIO
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST_DIMENSIONS = 8
MAGIC = 0x1950A86A20F9469CFC6C
"""torch.serialization.MAGIC_NUMBER."""
STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip
KEYS = (str, int)
"""Types of the keys of dicts: the hash of a tuple that holds itself twice, and so on, would take for ever."""


class Global(NamedTuple):
    """A class or a function that a pickle names, which is not looked up."""

    module: str
    name: str


class Inert:
    """An object of a class that is not called: what the pickle gives it."""

    def __init__(self, given: tuple[Any, ...]) -> None:
        self.given = given
        self.fields: dict[str, Any] = {}


class _Typed(NamedTuple):
    """The storage of a tensor."""

    values: Tensor
    """One dimension."""


def _storage(stream: BytesIO) -> _Typed:
    """The storage in bytes of ``torch.save``: five pickles, the number of values, the values."""
    magic, version, system, found, keys = (_read(stream, storages=True) for _ in range(5))
    if magic != MAGIC or version != 1001 or sys.byteorder != "little" or not system.get("little_endian"):
        raise ValueError("a storage is not of torch.save")
    if not isinstance(found, _Described) or keys != [found.key]:
        raise ValueError("a storage holds something else")
    start, whole = stream.tell() + 8, stream.getbuffer()
    size = found.values * found.dtype.itemsize
    if int.from_bytes(whole[start - 8 : start], "little") != found.values or not 0 <= size <= len(whole) - start:
        raise ValueError(f"a storage of {found.values} values has {len(whole) - start} bytes")
    if not size:
        return _Typed(torch.empty(0, dtype=found.dtype, device="cpu"))
    return _Typed(torch.frombuffer(bytearray(whole[start : start + size]), dtype=found.dtype))


class _Described(NamedTuple):
    """What names the storage in such bytes."""

    dtype: torch.dtype
    key: str
    values: int


def _described(found: Any) -> _Described:
    kind, storage, key, _, count, _ = found
    known = isinstance(storage, Global) and storage.module == "torch" and storage.name in STORAGES
    if kind != "storage" or not known or type(key) is not str or type(count) is not int:
        raise ValueError("a storage has an unknown type")
    return _Described(STORAGES[storage.name], key, count)


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> Tensor:
    numbers = (offset, *size, *stride)
    valid = all(type(n) is int and 0 <= n < 1 << 62 for n in numbers)
    if not isinstance(storage, _Typed) or len(size) > MOST_DIMENSIONS or not valid:
        raise ValueError("a tensor has no storage, or wrong sizes")
    if math.prod(size) > len(storage.values):  # strides of 0 would make it as large as they like
        raise ValueError(f"a tensor of shape {size} has {len(storage.values)} values")
    return storage.values.as_strided(size, stride, offset)  # raises for a view beyond the storage


class _Reader:
    """The state of one pickle that is read."""

    def __init__(self, stream: BytesIO, storages: bool) -> None:
        self._stream, self._storages = stream, storages
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._loads: dict[int, tuple[bytes, _Typed]] = {}
        """The identity of bytes -> these, and the storage in them: each is read once."""

    def read(self) -> Any:
        for opcode, argument, _ in pickletools.genops(self._stream):
            if opcode.name == "STOP":
                return self.pop()
            step = OPCODES.get(opcode.name)
            if step is None:
                raise ValueError(f"its opcode {opcode.name} is not one of TransformerEngine's")
            step(self, argument)
        raise ValueError("it does not end")

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def pop(self) -> Any:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise ValueError("it takes a value that is not there")
        return self._stack.pop()

    def top(self, kind: type) -> Any:
        """The uppermost value, which is of this type."""
        self.push(found := self.pop())
        if type(found) is not kind:
            raise ValueError(f"it changes a {type(found).__name__} as a {kind.__name__}")
        return found

    def mark(self, _: Any) -> None:
        self._marks.append(len(self._stack))

    def marked(self) -> list[Any]:
        """The values above the last mark, which are removed."""
        if not self._marks:
            raise ValueError("it takes a mark that is not there")
        at = self._marks.pop()
        found = self._stack[at:]
        del self._stack[at:]
        return found

    def items(self, values: list[Any]) -> None:
        keys = values[::2]
        if len(values) % 2 or not all(type(key) in KEYS for key in keys):
            raise ValueError("a dict has keys that are not names")
        self.top(dict).update(zip(keys, values[1::2], strict=True))

    def memoize(self, argument: Any) -> None:
        self.push(found := self.pop())
        self._memo[len(self._memo) if argument is None else argument] = found

    def get(self, argument: int) -> None:
        if argument not in self._memo:
            raise ValueError("it takes a value that was not stored")
        self.push(self._memo[argument])

    def tuple_of(self, count: int) -> None:
        self.push(tuple([self.pop() for _ in range(count)][::-1]))

    def name(self, argument: str | None) -> None:
        name, module = (self.pop(), self.pop()) if argument is None else argument.split(" ", 1)[::-1]
        if type(module) is not str or type(name) is not str:
            raise ValueError("it names something without a name")
        self.push(Global(module, name))

    def call(self, _: Any) -> None:
        given, called = self.pop(), self.pop()
        if type(given) is not tuple or type(called) is not Global or self._storages:
            raise ValueError("it calls what cannot be called")
        if called == ("collections", "OrderedDict") and not given:
            self.push({})
        elif called == ("torch._utils", "_rebuild_tensor_v2"):
            self.push(_tensor(*given))
        elif called == ("torch.storage", "_load_from_bytes"):
            self.push(self._loaded(*given))
        else:
            self.push(Inert(given))

    def _loaded(self, data: Any) -> _Typed:
        if type(data) is not bytes:
            raise ValueError("a storage is not bytes")
        if id(data) not in self._loads:
            self._loads[id(data)] = data, _storage(BytesIO(data))
        return self._loads[id(data)][1]

    def persistent(self, _: Any) -> None:
        if not self._storages:
            raise ValueError("it holds a storage without bytes")
        self.push(_described(self.pop()))

    def build(self, _: Any) -> None:
        state = self.pop()
        self.top(Inert).fields = state if isinstance(state, dict) else {}


def _nothing(reader: _Reader, _: Any) -> None: ...


def _pushed(make: Callable[[Any], Any]) -> Callable[[_Reader, Any], None]:
    return lambda reader, argument: reader.push(make(argument))


OPCODES: dict[str, Callable[[_Reader, Any], None]] = {
    "PROTO": _nothing, "FRAME": _nothing, "MARK": _Reader.mark,
    "NONE": _pushed(lambda _: None), "NEWTRUE": _pushed(lambda _: True), "NEWFALSE": _pushed(lambda _: False),
    "EMPTY_DICT": _pushed(lambda _: {}), "EMPTY_LIST": _pushed(lambda _: []), "EMPTY_TUPLE": _pushed(lambda _: ()),
    "TUPLE": lambda reader, _: reader.push(tuple(reader.marked())),
    "TUPLE1": lambda reader, _: reader.tuple_of(1),
    "TUPLE2": lambda reader, _: reader.tuple_of(2),
    "TUPLE3": lambda reader, _: reader.tuple_of(3),
    "APPEND": lambda reader, _: (lambda value: reader.top(list).append(value))(reader.pop()),
    "APPENDS": lambda reader, _: (lambda values: reader.top(list).extend(values))(reader.marked()),
    "SETITEM": lambda reader, _: (lambda value: reader.items([reader.pop(), value]))(reader.pop()),
    "SETITEMS": lambda reader, _: reader.items(reader.marked()),
    "GLOBAL": _Reader.name, "STACK_GLOBAL": _Reader.name, "REDUCE": _Reader.call, "NEWOBJ": _Reader.call,
    "BUILD": _Reader.build, "BINPERSID": _Reader.persistent,
    "MEMOIZE": _Reader.memoize, "BINPUT": _Reader.memoize, "LONG_BINPUT": _Reader.memoize,
    "BINGET": _Reader.get, "LONG_BINGET": _Reader.get,
    **dict.fromkeys(
        ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
         "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
        _Reader.push,
    ),
}  # fmt: skip


def _read(stream: BytesIO, storages: bool = False) -> Any:
    return _Reader(stream, storages).read()


def read_pickle(data: bytes) -> Any:
    """What a pickle holds: numbers, strings, bytes, tensors, tuples, lists and dicts of them; an ``Inert`` for every
    other object. Raises what damaged bytes lead to, ValueError for opcodes and keys that TransformerEngine does not
    write."""
    return _read(BytesIO(data))
