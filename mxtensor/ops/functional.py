"""Torch functions seen before aten takes them apart, where that saves work and changes nothing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.compat import functorch_interpreter
from ..core.dispatch import implements_function
from ..core.torch_autocast import torch_autocasts
from ..core.tracing import is_traced
from ..tensor.mxtensor import MXTensor
from .again import found, keep
from .matmul import linear as linear_rule

aten = torch.ops.aten


def _wanted_whole(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether nobody between torch's function and the product wants to see the aten ops."""
    if torch.is_grad_enabled() and (
        input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return False
    return not (
        is_traced(input, bias)  # torch.compile, dispatch modes, functorch, other subclasses
        or functorch_interpreter() is not None
        or torch_autocasts(input.device)
    )


@implements_function(F.linear)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, **out: Tensor) -> Tensor:
    """Without gradients the product runs at once: no ``t``, no second dispatch, no expanded batch."""
    matrix = type(weight) is MXTensor and weight.dim() == 2 and input.dim() > 0 and not out
    if not matrix or not _wanted_whole(input, weight, bias):
        return F.linear(input, weight, bias, **out)
    assert isinstance(weight, MXTensor)
    kept = found(input, weight, bias)
    if kept is not None and kept.call is not None:
        return kept.call(input)
    product: Tensor = linear_rule(aten.linear.default, (input, weight, bias), {})
    if kept is None:
        keep(input, weight, bias)
    return product
