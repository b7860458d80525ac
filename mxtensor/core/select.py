"""Choosing a kernel: the one with the smallest expected time, unless ``kernels()`` or a recipe names one.

A tuple of kernels is in the order of their usual speed. It decides between kernels whose time no model knows: such a
kernel is taken to be slower than those before it and faster than those after it.

``decide`` asks the kernels, ``plan_for`` caches the answer, ``perform`` logs it and runs the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from . import names
from .arguments import described
from .explain import LOGS, Log, measure, record, use_log
from .kernel import PLANS, Kernel, Plan, Spec, describe, elsewhere
from .scopes import Scopes

KERNEL_NAMES: set[str] = set()
"""Names that ``kernels()`` accepts: those of the product kernels, entered by ``kernels/gemm/select.py``."""
_forced: Scopes[str | None] = Scopes("kernels", None)


def forced_kernel() -> str | None:
    """The kernel that an enclosing ``kernels()`` names. None while Dynamo traces, which cannot read a ContextVar."""
    return None if torch.compiler.is_dynamo_compiling() else _forced.get()


@contextmanager
def kernels(name: str) -> Iterator[None]:
    """Force the product kernel called ``name`` inside the block; a product that it refuses raises NotImplementedError.

    A compiled graph keeps the kernel that was chosen when it was traced. Raises ValueError for an unknown name.
    """
    if not isinstance(name, str) or name not in KERNEL_NAMES:
        choices = names.choices("product kernels", name if isinstance(name, str) else "", sorted(KERNEL_NAMES))
        raise ValueError(f"unknown product kernel {described(name)}; {choices}")
    with _forced.block(name):
        yield


# ---------------------------------------------------------------------------------------------- plans


def decide(candidates: tuple[Kernel, ...], spec: Spec, *operands: Any, prefer: str | None = None) -> Plan:
    """Ask the candidates in order until one accepts without an expected time, and take the fastest of those that have
    one; of equals, the first. Nothing is cached or logged.

    Sizes that torch.compile does not know have no expected time.
    """
    forced = forced_kernel() or prefer if candidates and candidates[0].name in KERNEL_NAMES else None
    refusals: dict[str, str] = {}
    expected: dict[str, float] = {}
    fastest, least = None, math.inf
    device, has_times = spec.device.type, all(type(size) is int for shape in spec.shapes for size in shape)
    for kernel in candidates:
        if forced is not None and kernel.name != forced:
            refusals[kernel.name] = f"{forced!r} was asked for"
            continue
        if kernel.device is not None and kernel.device != device:
            refusals[kernel.name] = elsewhere(kernel.device, device)
            continue
        reason = kernel.refuses(spec, *operands)
        if reason is not None:
            refusals[kernel.name] = reason
            continue
        us = kernel.expected_us(spec, *operands) if has_times and kernel.expected_us is not None else None
        if us is None:
            fastest = fastest or kernel
            break
        expected[kernel.name] = us
        if us < least:
            fastest, least = kernel, us
    if fastest is not None and not torch.compiler.is_dynamo_compiling():  # nothing is logged there
        for name, us in expected.items():
            if name != fastest.name:
                refusals[name] = f"{us:.1f} us expected, {fastest.name} {least:.1f} us"
    return Plan(spec, fastest, refusals)


def plan_for(
    candidates: tuple[Kernel, ...], spec: Spec, *operands: Any, prefer: str | None = None, facts: Hashable = None
) -> Plan:
    """The plan of a call, cached if ``facts`` are given; nothing is logged.

    ``facts``: all that the refusals look at beside the spec. With them the plan is cached, unless the call is traced.
    ``prefer``: the kernel that a recipe names; an enclosing ``kernels()`` overrides it.
    """
    if facts is None or spec.traced:
        return decide(candidates, spec, *operands, prefer=prefer)
    key = (candidates, spec, facts, prefer, _forced.get())
    plan = PLANS.get(key)
    if plan is None:
        plan = decide(candidates, spec, *operands, prefer=prefer)
        PLANS.put(key, plan)
    return plan


def accepted(plan: Plan) -> Kernel:
    """The kernel of a plan. Raises NotImplementedError with every refusal if there is none."""
    if plan.kernel is not None:
        return plan.kernel
    spec, why = plan.spec, "; ".join(f"{name}: {reason}" for name, reason in plan.refusals.items())
    raise NotImplementedError(f"no kernel runs {spec.op} of {describe(spec)} on {spec.device}: {why}")


def perform(
    candidates: tuple[Kernel, ...], spec: Spec, *operands: Any, prefer: str | None = None, facts: Hashable = None
) -> Any:
    """Run the kernel of ``plan_for``, logged.

    Raises NotImplementedError with every refusal if no kernel accepts. An unexpected error inside the kernel becomes a
    RuntimeError that names the kernel and its operands.
    """
    plan = plan_for(candidates, spec, *operands, prefer=prefer, facts=facts)
    kernel = accepted(plan)
    entry = record(spec, kernel.name, plan.refusals)
    if spec.traced:
        return (kernel.run_traced or kernel.run)(*operands)
    try:
        if entry is None:
            return kernel.run(*operands)
        with measure(entry):
            return kernel.run(*operands)
    except (ValueError, TypeError, NotImplementedError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise RuntimeError(
            f"the kernel {kernel.name!r} failed in {spec.op} of {describe(spec)} on {spec.device}: {error}"
        ) from error


# ---------------------------------------------------------------------------------------------- the dispatch context


def is_observed() -> bool:
    """Whether there is an enclosing ``explain()`` or ``kernels()``: then each call decides and logs."""
    if _forced.latest() is None and LOGS.latest() is None:
        return False
    return _forced.get() is not None or LOGS.get() is not None


def dispatch_context() -> tuple[Log | None, str | None]:
    """The enclosing ``explain()`` and ``kernels()``, for a backward pass to restore."""
    return (None, None) if torch.compiler.is_dynamo_compiling() else (LOGS.get(), _forced.get())


def restore_context(log: Log | None, forced: str | None) -> AbstractContextManager[None]:
    """Set the log and the forced kernel of ``dispatch_context()`` where there are none, as in autograd's threads."""
    return nullcontext() if log is None and forced is None else _restore_context(log, forced)


@contextmanager
def _restore_context(log: Log | None, forced: str | None) -> Iterator[None]:
    with (
        _forced.block(forced) if forced is not None and _forced.get() is None else nullcontext(),
        use_log(log) if log is not None and LOGS.get() is None else nullcontext(),
    ):
        yield
