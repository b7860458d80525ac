"""The mechanism: the op table, kernels that refuse with a sentence, and the log behind ``explain()``.

Knows neither the tensor nor any kernel. ``ops/`` fills OP_TABLE, ``kernels/`` holds tuples of Kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _len_torch_dispatch_stack  # type: ignore[attr-defined]

Rule = Callable[..., Any]

OP_TABLE: dict[Any, Rule] = {}
"""aten overload -> rule(func, args, kwargs)."""
FUNCTION_TABLE: dict[Any, Rule] = {}
"""torch function -> rule(*args, **kwargs), for what has to be seen before aten takes it apart."""


def _register(table: dict[Any, Rule], keys: Sequence[Any]) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        for key in keys:
            if key in table:
                raise RuntimeError(f"{key} already has the rule {table[key].__module__}.{table[key].__name__}")
            table[key] = rule
        return rule

    return register


def implements(*ops: Any) -> Callable[[Rule], Rule]:
    """Enter the decorated function into OP_TABLE for these aten overloads. Registering one twice is an error."""
    return _register(OP_TABLE, ops)


def implements_function(*functions: Any) -> Callable[[Rule], Rule]:
    """Enter the decorated function into FUNCTION_TABLE. Registering one twice is an error."""
    return _register(FUNCTION_TABLE, functions)


# ---------------------------------------------------------------------------------------------- kernels


@dataclass(frozen=True)
class Spec:
    """What a kernel decides on. Shapes are logical; formats are format names, or dtype names of plain operands."""

    op: str
    shapes: tuple[tuple[int, ...], ...]
    formats: tuple[str, ...]
    dtype: torch.dtype
    device: torch.device
    traced: bool = False
    """Under torch.compile, FakeTensorMode or make_fx: loops and out= buffers would be baked into the graph."""

    @property
    def capability(self) -> tuple[int, int]:
        """CUDA compute capability; (0, 0) elsewhere."""
        return torch.cuda.get_device_capability(self.device) if self.device.type == "cuda" else (0, 0)


@dataclass(frozen=True)
class Kernel:
    """``refuses(spec, *operands)`` returns a sentence or None; ``run`` does the work."""

    name: str
    refuses: Callable[..., str | None]
    run: Callable[..., Any]


def is_traced(*tensors: torch.Tensor | None) -> bool:
    """Whether these tensors are being traced (or have no values at all) rather than computed."""
    if torch.compiler.is_compiling() or _len_torch_dispatch_stack() > 0:
        return True
    return any(t is not None and (t.is_meta or type(t) not in (torch.Tensor, torch.nn.Parameter)) for t in tensors)


_forced: ContextVar[str | None] = ContextVar("mxtensor_kernels", default=None)
KERNEL_NAMES: set[str] = set()
"""Names that ``kernels()`` accepts: those of the product kernels, entered by ``kernels/gemm.py``."""


def forced_kernel() -> str | None:
    """The enclosing ``kernels()``; Dynamo, which cannot read a ContextVar, never sees it where it traces by itself."""
    return None if torch.compiler.is_dynamo_compiling() else _forced.get()


@contextmanager
def kernels(name: str) -> Iterator[None]:
    """Force the product kernel called ``name`` inside the block; it raises where that kernel refuses.

    A compiled graph keeps the kernel that was chosen when it was traced.
    """
    if name not in KERNEL_NAMES:
        raise ValueError(f"unknown kernel {name!r}; the kernels are {', '.join(sorted(KERNEL_NAMES))}")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def choose(candidates: Sequence[Kernel], spec: Spec, *operands: Any, prefer: str | None = None) -> Kernel:
    """The first kernel that accepts, logged with the refusals of those before it.

    ``prefer`` (a tensor's own preference) or an enclosing ``kernels()`` leaves one candidate, the latter winning.
    Raises NotImplementedError with every refusal when none accepts.
    """
    forced = forced_kernel() or prefer if candidates and candidates[0].name in KERNEL_NAMES else None
    refusals: dict[str, str] = {}
    for kernel in candidates:
        if forced is not None and kernel.name != forced:
            refusals[kernel.name] = f"{forced!r} was asked for"
            continue
        reason = kernel.refuses(spec, *operands)
        if reason is None:
            record(spec, kernel.name, refusals)
            return kernel
        refusals[kernel.name] = reason
    why = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
    raise NotImplementedError(f"no kernel runs {spec.op} of {describe(spec)} on {spec.device}: {why}")


# ---------------------------------------------------------------------------------------------- the log


@dataclass(frozen=True)
class Entry:
    """One decision: what was asked, what ran, and why each faster kernel did not."""

    spec: Spec
    kernel: str
    refusals: dict[str, str]


def describe(spec: Spec) -> str:
    """Operands as text: ``bfloat16 512x4096, mxfp8_e4m3 4096x4096``."""
    shapes = ("x".join(map(str, shape)) for shape in spec.shapes)
    return ", ".join(f"{name} {shape}" for name, shape in zip(spec.formats, shapes, strict=True))


@dataclass
class Log:
    """What ``explain()`` yields: the decisions taken inside its block, in order."""

    entries: list[Entry] = field(default_factory=list)

    def table(self) -> str:
        """Equal decisions on one line: how often, op, operands, kernel chosen, and why the faster ones refused."""
        if not self.entries:
            return "no MXTensor operation ran"
        counts: dict[tuple[str, ...], int] = {}
        for e in self.entries:
            why = "; ".join(f"{name}: {reason}" for name, reason in e.refusals.items())
            row = (e.spec.op, describe(e.spec), e.kernel, why or "-")
            counts[row] = counts.get(row, 0) + 1
        rows = [("calls", "op", "operands", "kernel", "refused"), *((f"{n}", *row) for row, n in counts.items())]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[4]]).rstrip() for row in rows]
        return "\n".join([lines[0], "  ".join("-" * w for w in [*widths, 7]), *lines[1:]])


_log: ContextVar[Log | None] = ContextVar("mxtensor_log", default=None)


@contextmanager
def explain() -> Iterator[Log]:
    """Log every decision inside the block: ``with mx.explain() as log: model(x)``, then ``print(log.table())``.

    A compiled function decides while it is traced, so only its first call shows here.
    """
    log = Log()
    token = _log.set(log)
    try:
        yield log
    finally:
        _log.reset(token)


def record(spec: Spec, kernel: str, refusals: dict[str, str]) -> None:
    """Append to the innermost ``explain()``, if there is one."""
    if torch.compiler.is_dynamo_compiling():
        return  # Python that Dynamo reads itself; rules that run below it are logged
    log = _log.get()
    if log is not None:
        log.entries.append(Entry(spec, kernel, dict(refusals)))
