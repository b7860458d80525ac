"""One call of the code that torch's compiler generated for a CPU: recorded, and made again without Python.

The way of a call is caller -> AOTAutograd -> generated code. AOTAutograd unwraps tensor subclasses and makes views of
results. A recording goes around it: it knows from which argument of the caller each input of the code comes
(``Sources``), and which result of the caller each output of the code is (``Recording.returns``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..core.compat_compile import Code, observed
from ..kernels.runtime import cpu_graph
from ..tensor.mxtensor import MXTensor

Arguments = Sequence[Any]
"""What the caller passes to a graph."""


def is_plain(value: Any) -> bool:
    """Whether a value is a tensor of no subclass."""
    return type(value) in (Tensor, Parameter)


def components_of(wrapper: Any) -> list[Tensor]:
    """The plain tensors that a tensor is made of."""
    if not hasattr(wrapper, "__tensor_flatten__"):
        return [wrapper]
    return [part for name in wrapper.__tensor_flatten__()[0] for part in components_of(getattr(wrapper, name))]


_OPERANDS = attrgetter("_rowwise", "_columnwise", "_rotated")
"""What an MXTensor has its components from; to list those takes longer."""


def joined(lists: Iterable[Iterable[Any]]) -> list[Any]:
    """One list of what all of them have."""
    return list(chain.from_iterable(lists))


def same(values: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether both have the same objects."""
    return len(values) == len(others) and all(map(is_, values, others))


def picker(indexes: Sequence[int]) -> Callable[[Arguments], Sequence[Any]]:
    """A function that gives the values at these indexes."""
    return itemgetter(*indexes) if len(indexes) > 1 else lambda values: [values[i] for i in indexes]


class Sources:
    """From which arguments the inputs of generated code come.

    ``argument_of[i]``: the number of the argument that input i is; None for a component of a tensor subclass.
    ``known``: whether every input is one of the two.
    """

    def __init__(self, args: Arguments, inputs: Sequence[Tensor]) -> None:
        wrappers = [i for i, arg in enumerate(args) if isinstance(arg, Tensor) and not is_plain(arg)]
        ours = [i for i in wrappers if isinstance(args[i], MXTensor)]
        self._ours_of, self._foreign_of = picker(ours), picker([i for i in wrappers if i not in ours])
        self._others_of = picker([i for i, arg in enumerate(args) if not isinstance(arg, Tensor)])
        self._others = self._others_of(args)
        self._ours, self._foreign = self._ours_of(args), self._foreign_of(args)
        self._components = _made_of(self._ours, self._foreign)
        places = {id(arg): i for i, arg in enumerate(args) if is_plain(arg)}
        components = {id(part) for i in wrappers for part in components_of(args[i])}
        self.argument_of = [places.get(id(value)) for value in inputs]
        found = zip(self.argument_of, inputs, strict=True)
        self.known = all(i is not None or id(value) in components for i, value in found)

    def are_same(self, args: Arguments) -> bool:
        """Whether tensor subclasses, their components and what is not a tensor are the same in these arguments.

        Plain tensors are compared by ``cpu_graph.run``.
        """
        ours, foreign = self._ours_of(args), self._foreign_of(args)
        return (
            same(ours, self._ours)
            and same(foreign, self._foreign)
            and same(_made_of(ours, foreign), self._components)
            and self._others_of(args) == self._others
        )


def _made_of(ours: Sequence[Any], foreign: Sequence[Any]) -> list[Any]:
    """The operands of MXTensors, and the components of other subclasses."""
    return joined(chain(map(_OPERANDS, ours), map(components_of, foreign)))


class Views:
    """Tensors, some of which share memory. ``bases``: those that do not, and the memory of the others, in bytes."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        memory = [t.untyped_storage().data_ptr() for t in tensors]
        self.bases: list[Tensor] = []
        self._views: list[tuple[int, Tensor | None]] = []
        places: dict[int, int] = {}
        for t, at in zip(tensors, memory, strict=True):
            alone = memory.count(at) == 1
            if at not in places or alone:
                places[at] = len(self.bases)
                self.bases.append(t if alone else torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()))
            self._views.append((places[at], None if alone else t))
        self._shared = len(self.bases) < len(tensors)

    def of(self, bases: Sequence[Tensor]) -> Sequence[Tensor]:
        """The same tensors over other bases."""
        if not self._shared:
            return bases
        return [bases[i] if like is None else _over(bases[i], like) for i, like in self._views]


def _over(base: Tensor, like: Tensor) -> Tensor:
    """The same view as ``like`` of the memory of another tensor."""
    storage = base.untyped_storage()
    return torch.empty(0, dtype=like.dtype).set_(storage, like.storage_offset(), like.shape, like.stride())


class Recording:
    """One call of generated code, which later calls repeat.

    1. ``Recording(...)`` calls the code and records what it calls; ``outputs`` is what the code returned.
    2. ``returns`` notes what AOTAutograd made of the outputs for the caller.
    3. ``run`` makes the recorded calls with other arguments, and gives the caller's results.

    ``refusal``: why steps 2 and 3 are not possible; None if they are.
    """

    def __init__(self, lib: Any, code: Code, inputs: list[Any], args: Arguments, copied: Collection[int]) -> None:
        """``args``: of the caller; ``copied``: the numbers of those that later calls may have at any address."""
        self._memory: list[Tensor] = []
        self.refusal: str | None = None
        places = [i for i, value in enumerate(inputs) if isinstance(value, Tensor)]
        self._sources = sources = Sources(args, [inputs[i] for i in places])
        observer = observed(code, partial(cpu_graph.Kernel, lib), self._saved)
        if not sources.known:
            observer = "an input of the code is neither an argument nor a part of one"
        if isinstance(observer, str):
            self.refusal, self.outputs = observer, code(inputs)
            return
        moving = [i for i, source in enumerate(sources.argument_of) if source in copied]
        for i in moving:
            inputs[places[i]] = inputs[places[i]].clone()
        given = [i for i, source in enumerate(sources.argument_of) if source is not None]
        self._given_of = picker([sources.argument_of[i] for i in given])  # type: ignore[misc]
        tensors = [inputs[i] for i in places]
        lib.mx_graph_begin()
        try:
            self.outputs = observer(inputs)
            self._end(lib, tensors, given, moving)
        finally:
            lib.mx_graph_drop()

    def _end(self, lib: Any, tensors: list[Tensor], given: list[int], moving: list[int]) -> None:
        self._views = Views([output for output in self.outputs if isinstance(output, Tensor)])
        try:
            self._number, copies = cpu_graph.end(tensors, given, moving, self._views.bases)
        except NotImplementedError as error:
            self.refusal = str(error).splitlines()[0]
            return
        weakref.finalize(self, lib.mx_graph_free, self._number)
        self._results = self._views.of(copies)
        result = iter(self._results)
        self.outputs = tuple(next(result) if isinstance(output, Tensor) else output for output in self.outputs)

    def _saved(self, allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """``allocate``, whose memory stays for later runs."""

        def keep(*args: Any) -> Tensor:
            self._memory.append(made := allocate(*args))
            return made

        return keep

    def returns(self, values: Sequence[Any], args: Arguments) -> None:
        """Note what the caller got for the outputs; ``refusal`` if a result is neither an output nor an argument."""
        numbers = {id(result): i for i, result in enumerate(self._results)}
        places = {id(arg): i for i, arg in enumerate(args)}
        back = [value for value in values if id(value) not in numbers]  # arguments, and what is not a tensor
        if any(isinstance(value, Tensor) and id(value) not in places for value in back):
            self.refusal = "a result is not an output of the generated code"
            return
        self._back_of = picker([places[id(value)] for value in back if isinstance(value, Tensor)])
        self._constants = [value for value in back if not isinstance(value, Tensor)]
        order = sorted(back, key=lambda value: not isinstance(value, Tensor))
        numbers |= {id(value): len(self._results) + i for i, value in enumerate(order)}
        self._arranged, self._results = picker([numbers[id(value)] for value in values]), []

    def run(self, args: Arguments) -> tuple[Any, ...] | None:
        """What the caller gets with these arguments; None if something is not as it was."""
        if not self._sources.are_same(args):
            return None
        given = list(self._given_of(args))
        results = cpu_graph.run(given, self._number) if all(map(is_plain, given)) else None
        if not results:
            return None
        return tuple(self._arranged([*self._views.of(results), *self._back_of(args), *self._constants]))
