"""Rows of tokens sorted by expert and put back, differentiable: each pass runs the first kernel that accepts it.

Gradients of gradients, and the transforms of torch.func, take the definition in plain torch
(``kernels/permute/reference.py``), which torch differentiates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.compat import is_functorch_wrapped_tensor, nonstrict_trace
from ..kernels.permute import reference, select

Pair = tuple[Tensor, Tensor | None]


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, probs: Tensor | None, row_id_map: Tensor, choices: Tensor, offsets: Tensor | None
    ) -> Pair:
        ctx.save_for_backward(row_id_map, offsets)
        return select.gather(x, choices, row_id_map.shape[1], probs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, probs_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        row_id_map, offsets = ctx.saved_tensors
        merge = reference.merge if torch.is_grad_enabled() else select.merge
        return *merge(grad, row_id_map, offsets, None, probs_grad), None, None, None


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor | None, row_id_map: Tensor, offsets: Tensor | None) -> Pair:
        ctx.rows = y.shape[0]
        ctx.save_for_backward(None if weights is None else y, weights, row_id_map, offsets)
        return select.merge(y, row_id_map, offsets, weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
        y, weights, row_id_map, offsets = ctx.saved_tensors
        kernels: Any = reference if torch.is_grad_enabled() else select
        if weights is None:
            choices = kernels.choices_of_rows(row_id_map, ctx.rows, offsets)
            return kernels.gather(grad, choices, row_id_map.shape[1], None)[0], None, None, None
        wants = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        return *kernels.spread(grad, y, row_id_map, offsets, weights, wants), None, None


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor | None, source: Tensor, target: Tensor) -> Pair:
        ctx.save_for_backward(source, target)
        return select.gather(x, source, 1, None if probs is None else probs.unsqueeze(1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor, probs_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        source, target = ctx.saved_tensors
        return *moved(grad, probs_grad, target, source), None, None


# ---------------------------------------------------------------------------------------------- the three functions


def permuted(
    x: Tensor, probs: Tensor | None, row_id_map: Tensor, choices: Tensor, offsets: Tensor | None = None
) -> Pair:
    """The rows that ``choices`` names, of tokens x (T, K), and their weights in ``probs`` (T, experts).

    ``row_id_map`` and ``offsets`` are the way back, for gradients.
    """
    return _run("permute", x, probs, row_id_map, choices, offsets)


def merged(y: Tensor, weights: Tensor | None, row_id_map: Tensor, offsets: Tensor | None = None) -> Tensor:
    """The sum of the rows of each token in y, times ``weights``."""
    return _run("merge", y, weights, row_id_map, offsets)[0]


def moved(x: Tensor, probs: Tensor | None, source: Tensor, target: Tensor) -> Pair:
    """Rows of x, and of their weights ``probs`` (rows,), at other places.

    ``source`` has the row of x for each row of the result, -1 for zeros; ``target`` is the inverse.
    """
    return _run("move", x, probs, source, target)


DEFINITIONS: dict[str, Callable[..., Pair]] = {
    "permute": lambda x, probs, row_id_map, choices, _: reference.gather(x, choices, row_id_map.shape[1], probs),
    "merge": lambda y, weights, row_id_map, offsets: reference.merge(y, row_id_map, offsets, weights, None),
    "move": lambda x, probs, source, _: reference.gather(x, source, 1, None if probs is None else probs.unsqueeze(1)),
}
FUNCTIONS = {"permute": _Permute, "merge": _Merge, "move": _Move}


def _run(name: str, *args: Tensor | None) -> Pair:
    if not torch.compiler.is_dynamo_compiling():
        return _apply(name, *args)
    has = "".join("-" if t is None else "x" for t in args)
    out = _traced(name, has, *[t for t in args if t is not None])
    return out[0], out[1] if len(out) > 1 else None


def _apply(name: str, *args: Tensor | None) -> Pair:
    if any(t is not None and is_functorch_wrapped_tensor(t) for t in args):
        return DEFINITIONS[name](*args)
    out: Pair = FUNCTIONS[name].apply(*args)
    return out


@nonstrict_trace
def _traced(name: str, has: str, *given: Tensor) -> list[Tensor]:
    """``_apply`` for Dynamo, which leaves it to AOTAutograd: kernels are chosen as in eager code. ``has``: an x for an
    argument, a - for None."""
    tensors = iter(given)
    out = _apply(name, *[next(tensors) if mark == "x" else None for mark in has])
    return [t for t in out if t is not None]
