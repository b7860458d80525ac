"""CPU graphs: what CUDA graphs are to a GPU, for the code that torch's compiler generates for a CPU.

That code calls each kernel from Python, which takes some microseconds: as long as the kernels of a small model. A
``CpuGraph`` lets it run once, records the kernels and ops that it calls, and makes the same calls itself from then on.
Inputs must be where they were; small ones that move are copied. After any other change the generated code runs again,
and is recorded again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

from torch import Tensor

from ..core.compat_generated import Code, hook_compiled_graphs, observed
from ..kernels.runtime import cpu_graph

COPIED_BYTES = 1 << 20
"""An input that has moved is copied from then on, up to this size."""
MOST_UNUSED, PAUSE = 8, 100
"""After so many recordings in a row that no later call could use, as many calls run the generated code as it is."""


def _split(values: Sequence[Any]) -> tuple[list[Tensor], list[Any]]:
    """The tensors among these values, and the others."""
    return [v for v in values if isinstance(v, Tensor)], [v for v in values if not isinstance(v, Tensor)]


class Recording:
    """One call of generated code, which ``run`` makes again. ``refusal``: why it cannot be made again, if so."""

    def __init__(self, lib: Any, code: Code, args: list[Any], copied: Collection[int]) -> None:
        """Calls the code. ``copied``: places of the inputs that later calls may have at any address."""
        for i in copied:
            args[i] = args[i].clone()
        inputs, self.others = _split(args)
        tensors = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]
        self._memory: list[Tensor] = []
        self.refusal: str | None = None
        observer = observed(code, partial(cpu_graph.Kernel, lib), self._saved)
        if isinstance(observer, str):
            self.refusal = observer
            self.outputs = code(args)
            return
        lib.mx_graph_begin()
        try:
            self.outputs = observer(args)
            self._end(lib, inputs, [tensors.index(i) for i in copied])
        finally:
            lib.mx_graph_drop()

    def _end(self, lib: Any, inputs: list[Tensor], copied: list[int]) -> None:
        try:
            self._number, results = cpu_graph.end(inputs, copied, _split(self.outputs)[0])
        except NotImplementedError as error:
            self.refusal = str(error).splitlines()[0]
            return
        weakref.finalize(self, lib.mx_graph_free, self._number)
        self._like = [Tensor if isinstance(output, Tensor) else output for output in self.outputs]
        self.outputs = self._arranged(results)

    def _saved(self, allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """``allocate``, whose memory stays for later runs."""

        def keep(*args: Any) -> Tensor:
            self._memory.append(made := allocate(*args))
            return made

        return keep

    def _arranged(self, results: Sequence[Tensor]) -> tuple[Any, ...]:
        """The outputs of the code: these tensors, and others in their places."""
        left = iter(results)
        return tuple(next(left) if other is Tensor else other for other in self._like)

    def run(self, args: list[Any]) -> tuple[Any, ...] | None:
        """The outputs with these inputs; None if one of them is not where it was, or another number."""
        inputs, others = _split(args)
        results = cpu_graph.run(inputs, self._number) if others == self.others else ()
        return self._arranged(results) if results else None


class CpuGraph:
    """What runs in the place of the generated code of one graph.

    ``refusal``: why its calls cannot be made again, if so; ``runs`` and ``recordings`` are counted.
    """

    def __init__(self, code: Code, mutated: Collection[int]) -> None:
        self.code, self.mutated = code, frozenset(mutated)
        self.refusal: str | None = None
        self.runs = self.recordings = self._unused = self._paused = 0
        self._recording: Recording | None = None
        self._copied: set[int] = set()
        self._addresses: list[int] = []
        self._lock = threading.Lock()

    def __call__(self, args: list[Any]) -> Any:
        if self.refusal is not None:
            return self.code(args)
        with self._lock:
            outputs = self._recording.run(args) if self._recording is not None else None
            if outputs is None:
                return self._record(args)
            args.clear()
            self.runs, self._unused = self.runs + 1, 0
            return outputs

    def _record(self, args: list[Any]) -> Any:
        self._recording, lib = None, cpu_graph.library()
        if isinstance(lib, str):
            self.refusal = lib
            return self.code(args)
        if self._unused == MOST_UNUSED:
            self._unused, self._paused = 0, PAUSE
        if self._paused:
            self._paused -= 1
            return self.code(args)
        self._note_moves(args)
        recording = Recording(lib, self.code, args, self._copied)
        self.refusal = recording.refusal
        if self.refusal is None:
            self._recording = recording
            self.recordings, self._unused = self.recordings + 1, self._unused + 1
        return recording.outputs

    def _note_moves(self, args: list[Any]) -> None:
        """Copy small inputs, from now on, that are at another address than in the recording before."""
        addresses = [arg.data_ptr() if isinstance(arg, Tensor) else 0 for arg in args]
        if self._addresses:
            moved = (i for i, (a, b) in enumerate(zip(addresses, self._addresses, strict=True)) if a != b)
            self._copied.update(i for i in moved if i not in self.mutated and args[i].nbytes <= COPIED_BYTES)
        self._addresses = addresses


_wanted: ContextVar[list[CpuGraph] | None] = ContextVar("wanted", default=None)


def _changed(code: Code, mutated: Collection[int]) -> Code:
    graphs = _wanted.get()
    if graphs is None:
        return code
    graphs.append(graph := CpuGraph(code, mutated))
    return graph


@cache
def _install() -> bool:
    return hook_compiled_graphs(_changed)


@contextmanager
def recorded(graphs: list[CpuGraph]) -> Iterator[None]:
    """Graphs that torch compiles in this block become CPU graphs, which ``graphs`` gets."""
    _install()
    token = _wanted.set(graphs)
    try:
        yield
    finally:
        _wanted.reset(token)
