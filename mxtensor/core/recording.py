"""Recording: what a call did to tensors, as a program that does the same for other tensors of the same kind.

    out, program = record(lambda: work(x, w), (x, w), tensors_of)
    tensors = program(other_x, other_w)

A general function decides, checks and looks up much before it allocates, launches and multiplies. For inputs with the
same shapes, strides, dtypes and alignment all of that comes out the same. A ``Program`` is what remains: ops of torch,
kernel launches, and nothing else, as one generated function. It holds no tensor.

The recorder records ops of torch by itself. Code that writes memory in another way must call it: ``launch`` for a
kernel that takes addresses, ``call`` for any other function, ``refuse`` where a later call could not do the same. What
writes a tensor of its own and tells nobody is noticed: no program is made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from . import compat
from .program import Node, Program, Value, geometry, is_written, program_of

Result = TypeVar("Result")
_log = logging.getLogger("mxtensor")
aten = torch.ops.aten

ALLOCATIONS = {
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default,
    aten.new_empty_strided.default,
}  # fmt: skip
READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Tags of ops of which the host sees more than shapes: values, or a shape that depends on them."""

_recorders: dict[int, Recorder] = {}
"""Thread -> its recorder."""


class Launch(NamedTuple):
    """A kernel launch: ``function(*before, stream, *after, *arguments)``; tensors among the arguments as addresses."""

    function: Callable[..., Any]
    before: tuple[Any, ...]
    after: tuple[Any, ...]
    arguments: tuple[Any, ...]


def _shares_memory(t: Tensor, base: Tensor) -> bool:
    """Whether ``t``, the result of an op that may give a view of ``base``, is one.

    ``contiguous``, ``reshape`` and ``to`` give a view or a copy. A recorder sees these ops themselves below autograd,
    where a custom op of a compiled graph runs: torch takes them apart above it. The address of a copy says nothing
    about the address of another call's copy.
    """
    return t.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()


class Recorder(compat.dispatch_mode):
    """Notes the ops of one thread, as nodes of a program."""

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.refusal: str | None = None
        self._values: dict[int, Value] = {}
        self._constants: set[int] = set()
        self._alive: list[Tensor] = []
        """All tensors seen, so that no other gets the id of one."""
        self.inputs = [None if t is None else self._new(t) for t in inputs]

    def _new(self, t: Tensor, base: Tensor | None = None) -> Value:
        """The value of a tensor that has just been made, maybe as a view of ``base``."""
        at = len(self._alive)
        value = Value(at, at, 0)
        if base is not None and _shares_memory(t, base):
            root = self._values[id(base)]
            value = Value(at, root.root, root.offset + t.data_ptr() - base.data_ptr())
        self._alive.append(t)
        self._values[id(t)] = value
        return value

    def value_of(self, t: Tensor) -> Value:
        """The value of a tensor of the program."""
        value = self._values.get(id(t))
        if value is None:
            self.refuse("a tensor comes from outside")
            return self._new(t)
        return value

    def _replaced(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self.value_of(x)
        if isinstance(x, (tuple, list)) and not hasattr(x, "_fields"):
            return type(x)(map(self._replaced, x))
        return x

    def _results(self, out: Any, base: Tensor | None) -> tuple[Value | None, ...] | Value | None:
        """The values of results; None for a tensor that the program has already, such as one written in place."""
        if isinstance(out, Tensor):
            return None if id(out) in self._values else self._new(out, base)
        if isinstance(out, (tuple, list)):
            found = tuple(self._results(one, base) for one in out)
            return found  # type: ignore[return-value]
        if out is not None:
            self.refuse(f"a result is a {type(out).__name__}")
        return None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not READS.isdisjoint(func.tags):
            self.refuse(f"{func} reads values")
        given = self._replaced(args), {k: self._replaced(v) for k, v in (kwargs or {}).items()}
        if func in ALLOCATIONS:
            self.nodes.append(Node.allocation(self._new(out), out))
            return out
        may_view = func.is_view or func is aten._unsafe_view.default
        base = args[0] if may_view and isinstance(args[0], Tensor) else None
        if isinstance(out, Tensor) and base is not None and _shares_memory(out, base):
            self._view(base, out, func, *given)
        else:
            self.nodes.append(Node(func, *given, self._results(out, base), pure=func.is_view))
        return out

    def _view(self, base: Tensor, out: Tensor, func: Any, args: Any, kwargs: Any) -> None:
        """``out`` is a view of ``base``; maybe the same one."""
        if geometry(out) == geometry(base) and out.data_ptr() == base.data_ptr():
            self._alive.append(out)
            self._values[id(out)] = self.value_of(base)
        elif id(base) in self._constants:
            self.constant(out)
        else:
            self.nodes.append(Node(func, args, kwargs, self._new(out, base), pure=True, geometry=geometry(out)))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is recorded inside the block."""
        self.__exit__(None, None, None)
        del _recorders[get_ident()]
        try:
            yield
        finally:
            _recorders[get_ident()] = self
            self.__enter__()

    def call(self, function: Callable[..., Result], args: tuple[Any, ...]) -> Result:
        """Call a function that may write memory in any way; it takes and gives tensors."""
        given = self._replaced(args)
        with self.paused():
            out = function(*args)
        self.nodes.append(Node(function, given, {}, self._results(out, None)))
        return out

    def constant(self, t: Tensor) -> None:
        """A tensor that all calls may share, and that no call writes."""
        self._constants.add(id(t))
        if id(t) not in self._values:
            self.nodes.append(Node.constant(self._new(t), t))

    def made(self, t: Tensor) -> bool:
        """Whether ``t`` has been made since the recording began, and is not a view of an input."""
        value = self._values.get(id(t))
        return value is not None and value.root not in {one.root for one in self.inputs if one is not None}

    def launch(self, launch: Launch) -> None:
        """A kernel has been launched."""
        self.nodes.append(Node(launch.function, launch._replace(arguments=self._replaced(launch.arguments)), {}, None))

    def refuse(self, reason: str) -> None:
        """What is being recorded cannot be done in another call."""
        self.refusal = self.refusal or reason


def active() -> Recorder | None:
    """The recorder of this thread; None if nothing is being recorded."""
    return _recorders.get(get_ident()) if _recorders else None


def refuse(reason: str) -> None:
    """What this thread is recording, if anything, cannot be done in another call."""
    recorder = active()
    if recorder is not None:
        recorder.refuse(reason)


def call(function: Callable[..., Result], *args: Any) -> Result:
    """``function(*args)``, as one step of the program that is being recorded, if one is."""
    recorder = active()
    return function(*args) if recorder is None else recorder.call(function, args)


def derived(function: Callable[[Tensor], Tensor], look_up: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    """``look_up(t)``, which caches ``function(t)`` for later calls; in a program, ``function(t)`` for a ``t`` that each
    call makes anew."""
    recorder = active()
    return function(t) if recorder is not None and recorder.made(t) else call(look_up, t)


def constant(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """``function(*args)``: a tensor that is the same in every call, and is never written."""
    recorder = active()
    if recorder is None:
        return function(*args)
    with recorder.paused():
        out = function(*args)
    recorder.constant(out)
    return out


def record(
    function: Callable[[], Result],
    inputs: Sequence[Tensor | None],
    tensors_of: Callable[[Result], Sequence[Tensor | None]],
) -> tuple[Result, Program | None]:
    """What ``function`` returns, and the program that computes the tensors of its result from other ``inputs``; None
    if it cannot be done in another call."""
    if active() is not None:
        return function(), None
    recorder = Recorder(inputs)
    _recorders[get_ident()] = recorder
    try:
        with recorder:
            out = function()
    finally:
        del _recorders[get_ident()]
    if recorder.refusal is None:
        results = [None if t is None else recorder.value_of(t) for t in tensors_of(out)]
        if not is_written(recorder.nodes, results):
            recorder.refuse("something writes memory and does not tell the recorder")
    if recorder.refusal is not None:
        _log.debug("a call is not recorded, and each later one decides anew: %s", recorder.refusal)
        return out, None
    device = next(t.device for t in inputs if t is not None)
    return out, program_of(recorder.nodes, recorder.inputs, results, device)
