"""Program: steps on tensors as one generated function, with nothing between them. ``recording.py`` makes them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import compat

aten = torch.ops.aten

FUNCTIONS: dict[Any, Callable[..., Any]] = {
    aten.addmm.default: torch.addmm, aten.bmm.default: torch.bmm, aten.mm.default: torch.mm, aten.t.default: torch.t,
    aten.transpose.int: torch.transpose, aten.view.default: Tensor.view, aten.view.dtype: Tensor.view,
    aten.select.int: torch.select, aten._scaled_mm.default: torch._scaled_mm, aten.detach.default: torch.detach,
    aten.mul.Tensor: torch.mul, aten.zero_.default: torch.zero_, aten.zeros.default: torch.zeros,
    aten.expand.default: Tensor.expand,
}  # fmt: skip
"""Op -> a function of torch with the same arguments, which costs the host less than a call of the op."""
PREPARE: dict[Any, Callable[[tuple[Any, ...]], tuple[Callable[..., Any], tuple[Any, ...]]]] = {}
"""Op -> a function that is called once for its arguments, and gives another one with fewer arguments."""
PLAIN = (int, float, bool, str, type(None))


class Value(NamedTuple):
    """A tensor of a program."""

    at: int
    """its number"""
    root: int
    """the number of the tensor whose memory it views; its own if it is not a view"""
    offset: int
    """bytes from the first value of the root to its own first value"""


@dataclass
class Node:
    """One step: ``function(*args, **kwargs)`` gives ``results``; None stands for a result that is not needed."""

    function: Any
    args: Any
    kwargs: dict[str, Any]
    results: Any
    pure: bool = False
    """Whether the step may be left out if its results are not needed."""
    geometry: tuple[Any, ...] = ()
    """Of the result of an allocation or of a view."""

    @classmethod
    def allocation(cls, value: Value, t: Tensor) -> Node:
        """Memory for a tensor like ``t``."""
        return cls(torch.empty_strided, (), {"device": t.device}, value, pure=True, geometry=geometry(t))

    @classmethod
    def constant(cls, value: Value, t: Tensor) -> Node:
        """A tensor that is the same in each call."""
        return cls(None, t, {}, value, pure=True)

    @property
    def is_allocation(self) -> bool:
        """Whether the step allocates memory."""
        return bool(self.geometry) and not self.args

    @property
    def is_launch(self) -> bool:
        """Whether the step takes addresses."""
        return hasattr(self.args, "arguments")


def geometry(t: Tensor) -> tuple[Any, ...]:
    """Shape, strides and dtype."""
    return tuple(t.shape), t.stride(), t.dtype


def _is_dense(geometry: tuple[Any, ...]) -> bool:
    """Whether a tensor of this geometry fills its memory, each value once."""
    shape, stride, _ = geometry
    step = 1
    for size, distance in sorted(zip(shape, stride, strict=True), key=lambda one: one[1]):
        if size != 1:
            if distance != step:
                return False
            step *= size
    return True


def _bytes(geometry: tuple[Any, ...]) -> int:
    shape, _, dtype = geometry
    return math.prod(shape) * dtype.itemsize  # type: ignore[no-any-return]


def _fills(view: Node, memory: Node) -> bool:
    """Whether a view could be allocated in place of the memory that it views."""
    one, other = view.geometry, memory.geometry
    same = _is_dense(one) and _is_dense(other) and _bytes(one) == _bytes(other)
    return same and view.results.offset == memory.results.offset


def without_first_views(nodes: Sequence[Node], results: set[int]) -> tuple[list[Node], dict[int, int]]:
    """The nodes without views that are all that is used of an allocation: it is then allocated with the geometry of its
    view. And tensor -> the tensor that replaces it, for each such view.

    Launches take addresses, so that they may use the allocation too.
    """
    memory: dict[int, Node] = {}
    """Tensor -> the node that allocates it."""
    users = Counter(at for node in nodes if not node.is_launch for at in _uses(node))
    users.update(results)
    replaced: dict[int, int] = {}
    out = []
    for node in nodes:
        if node.is_allocation:
            memory[node.results.at] = node
        elif node.geometry:
            base = memory.get(node.args[0].at)
            if base is not None and users[node.args[0].at] == 1 and _fills(node, base):
                base.geometry = node.geometry
                memory[node.results.at] = base
                replaced[node.results.at] = base.results.at
                continue
        out.append(node)
    return out, replaced


class Program:
    """Steps on tensors: ``program(*inputs)`` gives the list of results. Any thread may call it, on any stream."""

    __slots__ = ("device", "run", "source")

    def __init__(self, run: Callable[..., Any], source: str, device: int | None) -> None:
        self.run, self.source, self.device = run, source, device

    def __call__(self, *inputs: Tensor | None) -> tuple[Any, ...]:
        device = self.device
        if device is None:
            return self.run(0, *inputs)  # type: ignore[no-any-return]
        if compat.current_cuda_device() != device:
            with torch.cuda.device(device):
                return self(*inputs)
        return self.run(compat.current_cuda_stream(device), *inputs)  # type: ignore[no-any-return]


class _Writer:
    """Writes the source of a program."""

    def __init__(self, replaced: dict[int, int]) -> None:
        self.replaced = replaced
        """Tensor -> the tensor that replaces it (``without_first_views``)."""
        self.names: dict[str, Any] = {}
        self._known: dict[int, str] = {}
        self.lines: list[str] = []
        self.addresses: set[int] = set()

    def name(self, obj: Any) -> str:
        """The name of an object in the source."""
        if id(obj) not in self._known:
            name = f"k{len(self.names)}"
            self._known[id(obj)], self.names[name] = name, obj
        return self._known[id(obj)]

    def text(self, x: Any) -> str:
        """An argument, tensors by their names."""
        if isinstance(x, Value):
            return f"v{self.replaced.get(x.at, x.at)}"
        if type(x) in (tuple, list):
            inside = "".join(f"{self.text(one)}, " for one in x)
            return f"({inside})" if type(x) is tuple else f"[{inside}]"
        if type(x) in PLAIN and math.isfinite(x if isinstance(x, (int, float)) else 0):
            return repr(x)
        return self.name(x)

    def address(self, x: Any) -> str:
        """An argument of a launch, tensors by their addresses."""
        if not isinstance(x, Value):
            return self.text(x)
        if x.root not in self.addresses:
            self.addresses.add(x.root)
            self.lines.append(f"a{x.root} = v{x.root}.data_ptr()")
        return f"a{x.root} + {x.offset}" if x.offset else f"a{x.root}"

    def write(self, node: Node, needed: set[int]) -> None:
        """One step."""
        if node.is_launch:
            _, before, after, arguments = node.args
            given = [*map(self.text, before), "stream", *map(self.text, after), *map(self.address, arguments)]
            self.lines.append(f"{self.name(node.function)}({', '.join(given)})")
            return
        if node.function is None:
            self.lines.append(f"{self.text(node.results)} = {self.name(node.args)}")
            return
        if node.is_allocation:
            shape, stride, dtype = node.geometry
            node = replace(node, args=(shape, stride), kwargs={"dtype": dtype} | node.kwargs)
        if node.function in PREPARE:
            function, args = PREPARE[node.function](node.args)
            node = replace(node, function=function, args=args)
        given = [*map(self.text, node.args), *(f"{key}={self.text(v)}" for key, v in node.kwargs.items())]
        function = FUNCTIONS.get(node.function, node.function)
        target = _target(node.results, needed)
        self.lines.append(f"{target}{self.name(function)}({', '.join(given)})")


def _target(results: Any, needed: set[int]) -> str:
    if results is None:
        return ""
    if isinstance(results, Value):
        return f"v{results.at} = " if results.at in needed else ""
    names = [f"v{r.at}" if isinstance(r, Value) and r.at in needed else "_" for r in results]
    return f"{', '.join(names)}{',' * (len(names) == 1)} = "


def _values(x: Any) -> list[Value]:
    """All values in arguments or results."""
    if isinstance(x, Value):
        return [x]
    if isinstance(x, (tuple, list)):
        return [value for one in x for value in _values(one)]
    return []


def _uses(node: Node) -> set[int]:
    """The tensors that a step needs."""
    if node.is_launch:
        return {value.root for value in _values(node.args.arguments)}
    if node.function is None:
        return set()
    return {value.at for value in [*_values(node.args), *_values(list(node.kwargs.values()))]}


def without_unused(nodes: Sequence[Node], results: Sequence[Value | None]) -> list[Node]:
    """The nodes without those whose results are not needed."""
    needed = {value.at for value in results if value is not None}
    out = []
    for node in reversed(nodes):
        if not node.pure or any(value.at in needed for value in _values(node.results)):
            needed |= _uses(node)
            out.append(node)
    return out[::-1]


def _writes(node: Node) -> set[int]:
    """The memory, by the numbers of its first tensors, that a step may write: all that it takes, unless it is an op of
    torch, whose schema says which."""
    if node.function is None or node.is_allocation:
        return set()
    if node.is_launch:
        return _uses(node)
    arguments: Any = node.args
    if hasattr(node.function, "_schema"):
        schema = node.function._schema.arguments
        written = {a.name for a in schema if a.alias_info is not None and a.alias_info.is_write}
        named = zip((a.name for a in schema), node.args, strict=False)
        arguments = [value for name, value in (*named, *node.kwargs.items()) if name in written]
    return {value.root for value in _values(arguments)}


def is_written(nodes: Sequence[Node], results: Sequence[Value | None]) -> bool:
    """Whether a step writes each allocation that is needed. Otherwise code wrote it that no step stands for."""
    nodes = without_unused(nodes, results)
    written = set().union(*map(_writes, nodes))
    return all(not n.is_allocation or n.results.at in written or not _bytes(n.geometry) for n in nodes)


def program_of(
    nodes: Sequence[Node], inputs: Sequence[Value | None], results: Sequence[Value | None], device: torch.device
) -> Program:
    """The program of ``nodes``, without steps whose results are not needed. Memory is freed after its last use: the
    device's launches come one after the other on a stream, and torch gives freed memory to later ones only."""
    nodes, replaced = without_first_views(
        without_unused(nodes, results), {value.at for value in results if value is not None}
    )
    needed = {replaced.get(value.at, value.at) for value in results if value is not None}
    steps: list[tuple[Node, set[int]]] = []
    """From the end, each with the tensors that it is the last to need."""
    for node in reversed(nodes):
        uses = {replaced.get(at, at) for at in _uses(node)}
        made = {value.at for value in _values(node.results)}
        steps.append((node, (uses | made) - needed))
        needed |= uses
    arguments = {value.at for value in inputs if value is not None}
    writer = _Writer(replaced)
    for node, last_used in reversed(steps):
        writer.write(node, needed)
        unused = sorted(at for at in last_used - arguments if at in needed)
        writer.lines += [f"del {', '.join(f'v{at}' for at in unused)}"] if unused else []
    names = [f"v{value.at}" if value is not None else f"_{i}" for i, value in enumerate(inputs)]
    lines = [*writer.lines, f"return {writer.text(tuple(results))}"]
    source = f"def run(stream, {', '.join(names)}):\n" + "".join(f"    {line}\n" for line in lines)
    namespace = dict(writer.names)
    exec(compile(source, "<mxtensor program>", "exec"), namespace)
    return Program(namespace["run"], source, device.index if device.type == "cuda" else None)
