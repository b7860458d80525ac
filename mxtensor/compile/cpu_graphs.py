"""CPU graphs: what CUDA graphs are to a GPU, for the code that torch's compiler generates for a CPU.

That code calls each kernel from Python, which takes some microseconds: as long as the kernels of a small model. A
``CpuGraph`` lets it run once, records the kernels and ops that it calls, and makes the same calls itself from then on.
Inputs must be where they were; small ones that move are copied. After any other change the generated code runs again,
and is recorded again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import torch
from torch.nn import Parameter

from ..core.compat_compile import Code, compiled_by_inductor, forgetter, hook_compiled_graphs
from ..core.progress import clock
from ..kernels.runtime import cpu_graph
from .cpu_integers import taken_out
from .cpu_recording import Arguments, Recording, is_plain, picker, same

COPIED_BYTES = 1 << 20
"""An input that has moved is copied from then on, up to this size."""
MOST_UNUSED, PAUSE = 8, 100
"""After so many recordings in a row that no later call could use, as many calls run the generated code as it is."""


class ReplacedError(Exception):
    """A parameter of another kind was given to a graph: torch compiles for the kinds that it has seen."""


def kind_of(tensor: Any) -> tuple[Any, ...]:
    """What a compiled graph takes to be the same in every call."""
    flat = tensor.__tensor_flatten__() if hasattr(tensor, "__tensor_flatten__") else None
    return type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), flat


class CpuGraph:
    """What runs in the place of a compiled graph: its recording, or the generated code if that does not fit.

    ``refusal``: why no call can be recorded, or None; ``runs``: calls that a recording has made; ``recordings``: how
    many there were.
    """

    def __init__(self, graphs: list[CpuGraph]) -> None:
        """``graphs``: those of the same model, which forget replaced parameters together."""
        self.compiled: Callable[..., Any] = lambda *args: None
        self.forget_inputs: Callable[[], None] | None = None  # to be called once, when torch has compiled
        self._graphs = graphs
        self.refusal: str | None = None
        self.runs = self.recordings = self._unused = self._paused = 0
        self._pieces = 0  # of generated code in this graph
        self._recording: Recording | None = None
        self._args: Arguments | None = None  # of the call that is to be recorded
        self._parameters: Arguments | None = None
        self._copied: set[int] = set()
        self._addresses: list[int] = []
        self._lock = threading.Lock()

    def wrapped(self, code: Code, mutated: Collection[int]) -> Code:
        """What runs in the place of generated code: it records the call if ``__call__`` has noted its arguments.

        ``mutated``: the places of the inputs that the code writes to.
        """
        self._pieces += 1
        self.refusal = "the graph has several pieces of generated code" if self._pieces > 1 else None

        def recorded(inputs: list[Any]) -> Any:
            args, self._args = self._args, None
            if args is None:
                return code(inputs)
            self._note_moves(args, {id(inputs[i]) for i in mutated})
            self._recording = Recording(cpu_graph.library(), code, inputs, args, self._copied)
            return self._recording.outputs

        return recorded

    def __call__(self, *args: Any) -> Any:
        with self._lock:
            recording = self._recording
            if recording is not None and self.refusal is None:
                results = recording.run(args)
                if results is not None:
                    self.runs, self._unused = self.runs + 1, 0
                    return results
            return self._run_generated(args)

    def _run_generated(self, args: Arguments) -> Any:
        if self.forget_inputs is not None:
            self.forget_inputs()
            self.forget_inputs = None
        self._check_parameters(args)
        if self.refusal is None:
            self._recording = None
        if not self._wants_recording():
            return self.compiled(*args)
        self._args = args
        try:
            results = self.compiled(*args)
        except BaseException:
            self._recording = None
            raise
        finally:
            self._args = None
        self._finish(results, args)
        return results

    def _check_parameters(self, args: Arguments) -> None:
        """Raises ReplacedError if one of the parameters is of another kind than in the first call."""
        if self._parameters is None:
            places = [i for i, arg in enumerate(args) if isinstance(arg, Parameter)]
            self._parameters_of = picker(places)
            self._parameters = self._parameters_of(args)
            self._kinds = [kind_of(parameter) for parameter in self._parameters]
        elif not same(found := self._parameters_of(args), self._parameters):
            if [kind_of(parameter) for parameter in found] != self._kinds:
                raise ReplacedError
            for graph in self._graphs:
                graph.forget()
            self._parameters = found

    def forget(self) -> None:
        """Keep no parameter that may have been replaced."""
        self._recording = None
        self._parameters = None if self._parameters is None else ()

    def _wants_recording(self) -> bool:
        lib = cpu_graph.library()
        if self.refusal is None:
            if isinstance(lib, str):
                self.refusal = lib
            elif not self._pieces:
                self.refusal = "torch's compiler generated no code that can be recorded"
        if self._unused == MOST_UNUSED:
            self._unused, self._paused = 0, PAUSE
        self._paused -= self._paused > 0
        return self.refusal is None and not self._paused and not torch.is_grad_enabled()

    def _finish(self, results: Any, args: Arguments) -> None:
        """Keep the recording of a call with these results, if there is one that can be made again."""
        if self._recording is None:
            return
        if self._recording.refusal is None:
            self._recording.returns(results, args)
        self.refusal = self._recording.refusal
        if self.refusal is None:
            self.recordings, self._unused = self.recordings + 1, self._unused + 1
        else:
            self._recording = None

    def _note_moves(self, args: Arguments, mutated: set[int]) -> None:
        """Copy small arguments, from now on, that are at another address than in the recording before."""
        addresses = [arg.data_ptr() if is_plain(arg) else 0 for arg in args]
        if self._addresses:
            moved = (i for i, (a, b) in enumerate(zip(addresses, self._addresses, strict=True)) if a != b)
            self._copied.update(i for i in moved if id(args[i]) not in mutated and args[i].nbytes <= COPIED_BYTES)
        self._addresses = addresses


_compiling: ContextVar[CpuGraph | None] = ContextVar("compiling", default=None)


def _wrapped(code: Code, mutated: Collection[int]) -> Code:
    graph = _compiling.get()
    return code if graph is None else graph.wrapped(code, mutated)


@cache
def _install() -> bool:
    return hook_compiled_graphs(_wrapped)


def backend(graphs: list[CpuGraph], description: str) -> Callable[..., Any]:
    """A backend of ``torch.compile``: Inductor, whose graphs become CPU graphs, which ``graphs`` gets.

    ``description``: what a clock says meanwhile.
    """
    _install()

    def recorded_inductor(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graph = CpuGraph(graphs)
        inputs = list(inputs)
        integers = taken_out(module, inputs)
        token = _compiling.set(graph)
        try:
            with clock(description):
                graph.compiled, graph.forget_inputs = compiled_by_inductor(module, inputs), forgetter(module)
        finally:
            _compiling.reset(token)
        graphs.append(graph)
        return graph if integers is None else partial(integers.run, graph)

    return recorded_inductor
