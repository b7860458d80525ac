"""Rules of torch functions that run before aten decomposes them, when that saves work and the result is identical."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from ..core.arguments import described
from ..core.autograd import torch_autocasts
from ..core.compat import any_autocast_is_active, functorch_interpreter
from ..core.dispatch import implements_function
from ..core.repeated import is_watched, repeated
from ..core.tracing import is_captured, is_traced, refuse_jit_trace
from ..numerics.operand import Operand
from ..tensor.mxtensor import MXTensor
from .bodies import EXPORTED
from .fallback import read
from .inplace import note
from .matmul import OTHER_LAYOUT, has_other_layout
from .matmul import linear as linear_rule

aten = torch.ops.aten
REPEATED = {"cuda", "cpu"}
"""Types of devices on which products without gradients are repeated calls."""
FEW_ROWS = 64
"""Rows up to which no kernel wants a cached form of a weight, so that a CUDA graph decides as eager code does."""


def _runs_whole(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether no gradient, trace, mode or autocast needs the aten ops between torch's function and the product."""
    if torch.is_grad_enabled() and (
        input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return False
    return not (
        is_traced(input, bias)  # torch.compile, dispatch modes, functorch, other subclasses
        or has_other_layout(input)
        or functorch_interpreter() is not None
        or unpack_dual(input).tangent is not None  # forward-mode differentiation
        or input.is_neg()  # a lazy minus sign, which aten carries out and a launch does not
        or (bias is not None and bias.is_neg())
        or (any_autocast_is_active() and torch_autocasts(input.device))
    )


def repeated_product(
    name: str, weight: MXTensor, operand: Operand | None, x: Tensor, other: Tensor | None, facts: Hashable,
    work: Callable[[], Tensor],
) -> Tensor:  # fmt: skip
    """``work()``, a product without gradients of x and ``operand`` of a weight, as a repeated call where it may be one.

    ``other``: the third tensor of the product. ``facts``: what the kind depends on beside the tensors and the weight.
    """
    recipe = weight.recipe.key
    if operand is None or not recipe or x.device.type not in REPEATED or is_watched():
        return work()
    kind = name, recipe, operand.format.name, operand.shape, weight.dtype, facts
    given = x, operand.data, operand.scale, operand.global_scale, other
    tensors, _ = repeated(kind, given, lambda: ((work(),), None))
    return tensors[0]  # type: ignore[return-value]


@implements_function(F.linear)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, **out: Tensor) -> Tensor:
    """Without gradients the product runs at once: no ``t``, no second dispatch, no expanded batch.

    Later calls of a kind run the program of an earlier one.
    """
    matrix = type(weight) is MXTensor and weight.dim() == 2 and input.dim() > 0 and not out
    if not matrix or not _runs_whole(input, weight, bias):
        refuse_jit_trace("an MXTensor")
        if not out and (has_other_layout(input) or has_other_layout(weight)):
            return read(aten.linear.default, (input, weight, bias), {}, OTHER_LAYOUT)  # type: ignore[no-any-return]
        if EXPORTED[-1:] == [True] and not out:
            return linear_rule(aten.linear.default, (input, weight, bias), {})  # type: ignore[no-any-return]
        return F.linear(input, weight, bias, **out)
    assert isinstance(weight, MXTensor)
    captured = input.numel() > FEW_ROWS * input.shape[-1] and is_captured(input)

    def work() -> Tensor:
        return linear_rule(aten.linear.default, (input, weight, bias), {})  # type: ignore[no-any-return]

    return repeated_product("linear", weight, weight._rowwise, input, bias, captured, work)


@implements_function(torch.matmul, Tensor.matmul, Tensor.__matmul__)
def matmul(input: Tensor, other: Tensor, **out: Tensor) -> Tensor:
    """torch's own. Nested tensors get the dequantized values, because torch asks for their sizes before any rule."""
    if not out and any(has_other_layout(t) and t.is_nested for t in (input, other)):
        return read(aten.matmul.default, (input, other), {}, OTHER_LAYOUT)  # type: ignore[no-any-return]
    return torch.matmul(input, other, **out)


# ---------------------------------------------------------------------------------------------- einsum

# torch decomposes it into permutes, which could move a blocked dimension to the front.


def _matrix_form(equation: str, x: Tensor, w: MXTensor) -> tuple[str, str, str, str, str] | None:
    """The letters (batch, rows, contracted, columns, output) if the equation is one batched product; None otherwise."""
    text = equation.replace(" ", "")
    if "." in text or text.count(",") != 1:
        return None
    inputs, _, output = text.partition("->")
    left, right = inputs.split(",")
    if "->" not in text:
        letters = left + right
        output = "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    if any(len(set(s)) != len(s) for s in (left, right, output)) or len(left) != x.dim() or len(right) != w.dim():
        return None
    shared = [c for c in right if c in left]
    batch = "".join(c for c in shared if c in output)
    contracted = "".join(c for c in shared if c not in output)
    rows = "".join(c for c in left if c not in shared)
    columns = "".join(c for c in right if c not in shared)
    if set(rows + columns) - set(output) or not contracted:
        return None
    return batch, rows, contracted, columns, output


def _einsum(equation: str, x: Tensor, w: MXTensor) -> Tensor:
    """Permute both sides to (batch, rows, contracted) and (batch, contracted, columns) and multiply.

    Raises ValueError, with the reason for the log, if the equation is not one product or no operand can be used.
    """
    form = _matrix_form(equation, x, w)
    if form is None:
        raise ValueError("not one product")
    batch, rows, contracted, columns, output = form
    left, right = equation.replace(" ", "").partition("->")[0].split(",")
    sizes = dict(zip(left, x.shape, strict=True)) | dict(zip(right, w.shape, strict=True))
    if any(sizes[c] != size for c, size in zip(left, x.shape, strict=True)):
        raise ValueError("a shared dimension differs in size")  # broadcasts, or torch's own error

    def arrange(t: Tensor, letters: str, *groups: str) -> Tensor:
        t = t.permute([letters.index(c) for g in groups for c in g])
        return t.reshape([prod(sizes[c] for c in g) for g in groups])

    if batch:
        a, b = arrange(x, left, batch, rows, contracted), arrange(w, right, batch, columns, contracted)
        out = torch.bmm(a, b.transpose(-1, -2))
    else:
        a, b = arrange(x, left, rows, contracted), arrange(w, right, columns, contracted)
        out = torch.mm(a, b.t())
    letters = batch + rows + columns
    return out.reshape([sizes[c] for c in letters]).permute([letters.index(c) for c in output])


@implements_function(torch.einsum)
def einsum(equation: Any, *operands: Any) -> Tensor:
    """One plain and one quantized operand multiply as matrices; otherwise operands are dequantized, which is logged."""
    tensors = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else list(operands)
    for i, t in enumerate(tensors):
        if not isinstance(t, Tensor):
            raise TypeError(f"einsum: operand {i} is {described(t)}; pass tensors")
    reason = "more than one product"
    if isinstance(equation, str) and len(tensors) == 2 and "," in equation:
        x, w = tensors
        inputs, arrow, output = equation.partition("->")
        if isinstance(x, MXTensor) and not isinstance(w, MXTensor):
            x, w = w, x
            inputs = ",".join(reversed(inputs.split(",")))
        if isinstance(w, MXTensor):
            try:
                return _einsum(inputs + arrow + output, x, w)
            except ValueError as error:
                reason = str(error)
    for t in tensors:
        if isinstance(t, MXTensor):
            note("einsum", "functional.py", [t], "high precision", reason)
    plain = [t.dequantize() if isinstance(t, MXTensor) else t for t in tensors]
    return torch.einsum(equation, *plain)
