"""The mechanism: the op table, kernels that refuse with a sentence, and the log behind ``explain()``.

Knows neither the tensor nor any kernel. ``ops/`` fills OP_TABLE, ``kernels/`` holds tuples of Kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Any, NamedTuple, TypeVar

import torch

Rule = Callable[..., Any]
Result = TypeVar("Result")

OP_TABLE: dict[Any, Rule] = {}
"""aten overload -> rule(func, args, kwargs)."""
FALLBACK: list[Rule] = []
"""The one rule for every op that is not in OP_TABLE, entered by ``ops/fallback.py``."""
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


class Spec(NamedTuple):
    """What a kernel decides on. Shapes are logical; every call makes several, so that names are spelled out only when
    somebody reads them."""

    op: str
    shapes: tuple[tuple[int, ...], ...]
    formats: tuple[object, ...]
    """Of each operand its format, the dtype of a plain one, a name, or a pair of these (from, to)."""
    dtype: torch.dtype
    device: torch.device
    traced: bool = False
    """Under torch.compile, FakeTensorMode or make_fx: loops and out= buffers would be baked into the graph."""

    @property
    def capability(self) -> tuple[int, int]:
        """CUDA compute capability; (0, 0) elsewhere."""
        return device_capability(self.device)


def cached(function: Callable[..., Result]) -> Callable[..., Result]:
    """``functools.cache`` that Dynamo, which warns of such caches, sees through."""
    cached_value = cache(function)

    @wraps(function)
    def call(*args: Any) -> Result:
        return function(*args) if torch.compiler.is_dynamo_compiling() else cached_value(*args)

    return call


@cached
def device_capability(device: torch.device) -> tuple[int, int]:
    """CUDA compute capability of ``device``; (0, 0) for one that is no CUDA device, or that is not there."""
    there = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_capability(device) if there else (0, 0)


@dataclass(frozen=True, eq=False)
class Kernel:
    """``refuses(spec, *operands)`` returns a sentence or None; ``run`` does the work."""

    name: str
    refuses: Callable[..., str | None]
    run: Callable[..., Any]
    device: str | None = None
    """The type of the only device it runs on: what ``choose`` looks at first, at next to no cost."""
    run_traced: Callable[..., Any] | None = None
    """What runs in the place of ``run`` where the spec is traced: the same work as ops that a graph can hold."""


_ELSEWHERE: dict[tuple[str, str], str] = {}


def elsewhere(wanted: str, device: str) -> str:
    """Why a kernel for one type of device refuses another; the sentences are kept, every call needs a few."""
    sentence = _ELSEWHERE.get((wanted, device))
    if sentence is None:
        sentence = _ELSEWHERE[wanted, device] = f"runs on {wanted}, this tensor is on {device}"
    return sentence


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


_decisions: dict[Hashable, tuple[Kernel | None, dict[str, str]]] = {}
MOST_DECISIONS = 4096
"""That are kept; then all are forgotten."""


def choose(
    candidates: tuple[Kernel, ...], spec: Spec, *operands: Any, prefer: str | None = None, facts: Hashable = None
) -> Kernel:
    """The first kernel that accepts, logged with the refusals of those before it.

    ``prefer`` (a tensor's own preference) or an enclosing ``kernels()`` leaves one candidate, the latter winning.
    ``facts``: all that the refusals look at beside the spec; with them, kernels are asked once for calls that are
    alike, unless these are traced. Raises NotImplementedError with every refusal when none accepts.
    """
    key = None if facts is None or spec.traced else (candidates, spec, facts, prefer, _forced.get())
    known = _decisions.get(key)
    if known is None:
        known = accepting(candidates, spec, *operands, prefer=prefer)
        if key is not None:
            if len(_decisions) >= MOST_DECISIONS:
                _decisions.clear()
            _decisions[key] = known
    kernel, refusals = known
    if kernel is not None:
        record(spec, kernel.name, refusals)
        return kernel
    why = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
    raise NotImplementedError(f"no kernel runs {spec.op} of {describe(spec)} on {spec.device}: {why}")


def accepting(
    candidates: Sequence[Kernel], spec: Spec, *operands: Any, prefer: str | None = None
) -> tuple[Kernel | None, dict[str, str]]:
    """What ``choose`` would choose, and what refused before it; nothing is logged."""
    forced = forced_kernel() or prefer if candidates and candidates[0].name in KERNEL_NAMES else None
    refusals: dict[str, str] = {}
    device = spec.device.type
    for kernel in candidates:
        if forced is not None and kernel.name != forced:
            refusals[kernel.name] = f"{forced!r} was asked for"
            continue
        if kernel.device is not None and kernel.device != device:
            refusals[kernel.name] = elsewhere(kernel.device, device)
            continue
        reason = kernel.refuses(spec, *operands)
        if reason is None:
            return kernel, refusals
        refusals[kernel.name] = reason
    return None, refusals


def perform(
    candidates: tuple[Kernel, ...], spec: Spec, *operands: Any, prefer: str | None = None, facts: Hashable = None
) -> Any:
    """``choose`` and run. What fails inside the kernel raises a RuntimeError that names it and its operands."""
    kernel = choose(candidates, spec, *operands, prefer=prefer, facts=facts)
    if spec.traced:
        return (kernel.run_traced or kernel.run)(*operands)
    try:
        return kernel.run(*operands)
    except (ValueError, TypeError, NotImplementedError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise RuntimeError(
            f"the kernel {kernel.name!r} failed in {spec.op} of {describe(spec)} on {spec.device}: {error}"
        ) from error


# ---------------------------------------------------------------------------------------------- strict

_strict: ContextVar[bool] = ContextVar("mxtensor_strict", default=False)


@contextmanager
def strict() -> Iterator[None]:
    """Inside the block, an op that would dequantize an MXTensor is a NotImplementedError that names it."""
    token = _strict.set(True)
    try:
        yield
    finally:
        _strict.reset(token)


def refuse_if_strict(op: str, reason: str, home: str) -> None:
    """Raise where ``op`` is to leave the quantized world inside ``strict()``; its rule would stand in ``home``."""
    if not torch.compiler.is_dynamo_compiling() and _strict.get():
        raise NotImplementedError(
            f"{op} would dequantize ({reason}), which mx.strict() forbids; "
            f"a rule for it would go to mxtensor/ops/{home}"
        )


# ---------------------------------------------------------------------------------------------- the log


@dataclass(frozen=True)
class Entry:
    """One decision: what was asked, what ran, and why each faster kernel did not."""

    spec: Spec
    kernel: str
    refusals: dict[str, str]


def describe(spec: Spec) -> str:
    """Operands as text: ``bfloat16 512x4096, mxfp8_e4m3 4096x4096``."""

    def name(part: object) -> str:
        return "->".join(map(name, part)) if isinstance(part, tuple) else str(part).removeprefix("torch.")

    shapes = ("x".join(map(str, shape)) for shape in spec.shapes)
    return ", ".join(f"{name(part)} {shape}" for part, shape in zip(spec.formats, shapes, strict=True))


def by_reason(refusals: dict[str, str]) -> dict[str, list[str]]:
    """Reason -> the kernels that gave it, in order."""
    found: dict[str, list[str]] = {}
    for name, reason in refusals.items():
        found.setdefault(reason, []).append(name)
    return found


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
            why = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason(e.refusals).items())
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


def restore_context(log: Log | None, forced: str | None) -> AbstractContextManager[None]:
    """Where there are none, the log and the forced kernel of ``dispatch_context()``: autograd's threads have neither."""
    return nullcontext() if log is None and forced is None else _restore_context(log, forced)


@contextmanager
def _restore_context(log: Log | None, forced: str | None) -> Iterator[None]:
    tokens: list[tuple[ContextVar[Any], Any]] = []
    pairs: tuple[tuple[ContextVar[Any], Any], ...] = ((_log, log), (_forced, forced))
    for variable, value in pairs:
        if value is not None and variable.get() is None:
            tokens.append((variable, variable.set(value)))
    try:
        yield
    finally:
        for variable, token in tokens:
            variable.reset(token)


def observed() -> bool:
    """Whether there is an enclosing ``explain()`` or ``kernels()``, for which every product is chosen anew."""
    return _log.get() is not None or _forced.get() is not None


def dispatch_context() -> tuple[Log | None, str | None]:
    """The enclosing ``explain()`` and ``kernels()``, for a backward pass to resume."""
    return (None, None) if torch.compiler.is_dynamo_compiling() else (_log.get(), _forced.get())


def record(spec: Spec, kernel: str, refusals: dict[str, str]) -> None:
    """Append to the innermost ``explain()``, if there is one."""
    if torch.compiler.is_dynamo_compiling():
        return  # Python that Dynamo reads itself; rules that run below it are logged
    log = _log.get()
    if log is not None:
        log.entries.append(Entry(spec, kernel, dict(refusals)))
