"""One call of the code that torch's compiler generated for a CPU: recorded, and made again without Python.

Between the caller and that code is AOTAutograd, which unwraps tensor subclasses and makes views of results. Later
calls go around it. So a recording knows which argument of the caller each input of the code is, or is a part of, and
which result each output is.
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

from ..core.compat_generated import Code, observed
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
    """Where the inputs of generated code come from: ``given[i]`` is the argument that input i is; None for a part of a
    wrapper. ``known``: whether all are one of the two."""

    def __init__(self, args: Arguments, inputs: Sequence[Tensor]) -> None:
        wrappers = [i for i, arg in enumerate(args) if isinstance(arg, Tensor) and not is_plain(arg)]
        ours = [i for i in wrappers if isinstance(args[i], MXTensor)]
        self._ours_of, self._foreign_of = picker(ours), picker([i for i in wrappers if i not in ours])
        self._others_of = picker([i for i, arg in enumerate(args) if not isinstance(arg, Tensor)])
        self._others = self._others_of(args)
        self._ours, self._foreign = self._ours_of(args), self._foreign_of(args)
        self._operands, self._components = (
            joined(map(_OPERANDS, self._ours)),
            joined(map(components_of, self._foreign)),
        )
        places = {id(arg): i for i, arg in enumerate(args) if is_plain(arg)}
        components = {id(part) for i in wrappers for part in components_of(args[i])}
        self.given = [places.get(id(value)) for value in inputs]
        self.known = all(i is not None or id(value) in components for i, value in zip(self.given, inputs, strict=True))

    def hold(self, args: Arguments) -> bool:
        """Whether wrappers, their components and what is no tensor are the same in these arguments."""
        ours, foreign = self._ours_of(args), self._foreign_of(args)
        return (
            same(ours, self._ours)
            and same(foreign, self._foreign)
            and same(joined(map(_OPERANDS, ours)), self._operands)
            and same(joined(map(components_of, foreign)), self._components)
            and self._others_of(args) == self._others
        )


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
    """One call of generated code, which ``run`` makes again. ``refusal``: why it cannot be made again, if so.

    ``outputs`` of the code; after ``returns``, ``run`` gives what the caller gets for them.
    """

    def __init__(self, lib: Any, code: Code, inputs: list[Any], args: Arguments, copied: Collection[int]) -> None:
        """Calls the code. ``args``: of the caller; ``copied``: those that later calls may have at any address."""
        self._memory: list[Tensor] = []
        places = [i for i, value in enumerate(inputs) if isinstance(value, Tensor)]
        self._sources = sources = Sources(args, [inputs[i] for i in places])
        observer = observed(code, partial(cpu_graph.Kernel, lib), self._saved)
        self.refusal = None if sources.known else "an input of the code is no argument and no part of one"
        if isinstance(observer, str):
            self.refusal = observer
        if self.refusal is not None or isinstance(observer, str):
            self.outputs = code(inputs)
            return
        moving = [i for i, source in enumerate(sources.given) if source in copied]
        for i in moving:
            inputs[places[i]] = inputs[places[i]].clone()
        given = [i for i, source in enumerate(sources.given) if source is not None]
        self._given_of = picker([sources.given[i] for i in given])  # type: ignore[misc]
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
        """Tells what the caller got for the outputs."""
        numbers = {id(result): i for i, result in enumerate(self._results)}
        places = {id(arg): i for i, arg in enumerate(args)}
        back = [value for value in values if id(value) not in numbers]  # arguments, and what is no tensor
        if any(isinstance(value, Tensor) and id(value) not in places for value in back):
            self.refusal = "a result is no output of the generated code"
            return
        self._back_of = picker([places[id(value)] for value in back if isinstance(value, Tensor)])
        self._constants = [value for value in back if not isinstance(value, Tensor)]
        order = sorted(back, key=lambda value: not isinstance(value, Tensor))
        numbers |= {id(value): len(self._results) + i for i, value in enumerate(order)}
        self._arranged, self._results = picker([numbers[id(value)] for value in values]), []

    def run(self, args: Arguments) -> tuple[Any, ...] | None:
        """What the caller gets with these arguments; None if something is not as it was."""
        if not self._sources.hold(args):
            return None
        given = list(self._given_of(args))
        results = cpu_graph.run(given, self._number) if all(map(is_plain, given)) else None
        if not results:
            return None
        return tuple(self._arranged([*self._views.of(results), *self._back_of(args), *self._constants]))
