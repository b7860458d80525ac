"""einsum: its rule runs before torch decomposes it into permutes, which could move a blocked dimension to the front."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from ..core.arguments import described
from ..core.dispatch import implements_function, refuse_if_strict
from ..core.explain import record
from ..core.kernel import Spec
from ..tensor.mxtensor import MXTensor


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
            spec = Spec("einsum", (tuple(t.shape),), (str(t.format),), t.dtype, t.device)
            refuse_if_strict("einsum", reason, "einsum.py")
            record(spec, "high precision", {"quantized": reason})
    plain = [t.dequantize() if isinstance(t, MXTensor) else t for t in tensors]
    return torch.einsum(equation, *plain)
