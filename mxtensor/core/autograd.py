"""The derivative of ``dequantize``, functions without a second derivative, and the mode in which views are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from .compat_compile import run_uncompiled
from .tracing import is_traced


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return torch.ops.aten.dequantize.self(w)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def dequantize_with_gradient(w: Tensor) -> Tensor:
    """``w`` as plain values; the gradient passes through unchanged. aten's own dequantize has no derivative."""
    if w.requires_grad and torch.is_grad_enabled():
        return _Dequantize.apply(w)  # type: ignore[no-any-return]
    return torch.ops.aten.dequantize.self(w)  # type: ignore[no-any-return]


class _NoSecond(torch.autograd.Function):
    """A gradient, computed from ``sources``, whose own derivative is an error."""

    @staticmethod
    def forward(ctx: Any, what: str, way_out: str, gradient: Tensor, *sources: Tensor) -> Tensor:
        ctx.what, ctx.way_out = what, way_out
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(f"{ctx.what} has no second derivative (create_graph=True); {ctx.way_out}")


def remember_input(ctx: Any, x: Tensor) -> None:
    """Call it in the forward pass of a ``differentiable_once`` function. ``x`` may end before."""
    ctx.x = TensorWeakRef(x)


def differentiable_once(what: str, way_out: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For the backward pass of an autograd function: a second derivative raises NotImplementedError.

    torch's ``once_differentiable`` raises nothing if the given gradients have no graph, or if a derivative by inputs of
    the forward pass is asked for: a Hessian was zero, and a gradient penalty trained nothing, without a word.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def call(ctx: Any, *grads: Any) -> Any:
            if not torch.is_grad_enabled():
                return backward(ctx, *grads)
            with torch.no_grad():
                found = backward(ctx, *grads)
            sources = [t for t in (*grads, *_inputs_of(ctx)) if t is not None and t.requires_grad]
            sources.append(torch.empty(0, requires_grad=True))  # so that there is always one
            return tuple(None if t is None else _NoSecond.apply(what, way_out, t, *sources) for t in found)

        run_uncompiled(call)  # a graph break would unpack saved tensors twice, which checkpoints refuse
        return call

    return decorate


def _inputs_of(ctx: Any) -> Iterator[Tensor | None]:
    """What the gradients of a function depend on, as far as anyone can ask for a derivative by it: the leaves of its
    graph, and its input while that exists."""
    yield ctx.x() if hasattr(ctx, "x") else None
    seen, nodes = set(), [ctx]
    while nodes:
        for node, _ in nodes.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                nodes.append(node)
                yield getattr(node, "variable", None)


@contextmanager
def _outside_inference() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def mode_of_views(func: Any, base: Any) -> AbstractContextManager[None]:
    """The context for ``func`` of ``base``: torch accepts a view only if base and view are both inference tensors or
    neither is, and a wrapper that is made in inference mode is one."""
    if not torch.is_inference_mode_enabled() or not getattr(func, "is_view", False) or base.is_inference():
        return nullcontext()
    return _outside_inference()


# ---------------------------------------------------------------------------------------------- torch autocast

# ``torch.autocast``: whether it is active, its dtype, and code that runs without it.


def torch_autocasts(device: torch.device) -> bool:
    """Whether torch.autocast is active for tensors of ``device``. False for meta, for which torch would raise."""
    kind = device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """The dtype that torch.autocast gives products of ``x``; None outside it and for float64, which it leaves alone."""
    if torch_autocasts(x.device) and x.dtype is not torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return None


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """The context without torch.autocast, for code that chooses dtypes itself."""
    return torch.autocast(device.type, enabled=False) if torch_autocasts(device) else nullcontext()


# ---------------------------------------------------------------------------------------------- writes

# How many writes to codes and scales there have been, so that values decoded before a write are not used after it.
#
# torch does not count the writes of a rule: inside ``__torch_dispatch__`` the version counters of codes and scales
# stay. Writes that are only traced count by themselves, because they change no memory.

_counts = {False: 0, True: 0}


def note_write(target: Tensor) -> None:
    """Call it after each write of a rule to ``target``, the codes or scales of any MXTensor."""
    _counts[has_no_memory(target)] += 1


def count_writes(op: Any, wrappers: Iterable[Tensor]) -> None:
    """Count a write of ``op`` to each tensor if torch does not: it counts those of all ops but the ones that return
    nothing (``_foreach_add_``).

    Those write the tensors inside, and torch sees no write to the wrappers that a backward pass will read.
    """
    if op._schema.returns or is_traced():
        return
    counted = [t for t in wrappers if not t.is_inference()]
    if counted:
        torch.autograd.graph.increment_version(counted)


def has_no_memory(t: Tensor) -> bool:
    """Whether ``t`` stands for a tensor of a graph that is traced."""
    return type(t) is not Tensor


def state_of(components: Iterable[Tensor]) -> tuple[int, ...]:
    """A key that changes with each write to ``components``, by a rule or by torch.

    Inference tensors have no version.
    """
    components = list(components)
    versions = (t._version for t in components if not t.is_inference())
    return (_counts[has_no_memory(components[0])], *versions)
