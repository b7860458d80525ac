"""The activations between the two products of LayerNormMLP, by TransformerEngine's names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.arguments import NUMBER, check, described, instance, optional
from .arguments import one_of

PARAMS = optional(instance(dict, "a dictionary from names to numbers"))


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _qgelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _srelu(x: Tensor) -> Tensor:
    return F.relu(x).square()


PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": _gelu, "gelu_erf": F.gelu, "qgelu": _qgelu, "relu": F.relu, "srelu": _srelu, "silu": F.silu,
}  # fmt: skip


def _gate(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return function(first) * second


def _clamped_swiglu(x: Tensor, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0) -> Tensor:
    """The activation of gpt-oss: both halves are bounded, the first from above only."""
    first, second = x.chunk(2, -1)
    first, second = first.clamp(max=limit), second.clamp(-limit, limit)
    return first * torch.sigmoid(alpha * first) * (second + glu_linear_offset)


GATED: dict[str, Callable[..., Tensor]] = {
    "geglu": partial(_gate, _gelu), "qgeglu": partial(_gate, _qgelu), "reglu": partial(_gate, F.relu),
    "sreglu": partial(_gate, _srelu), "swiglu": partial(_gate, F.silu), "glu": partial(_gate, torch.sigmoid),
    "clamped_swiglu": _clamped_swiglu,
}  # fmt: skip
"""Functions of both halves of the result of the first product."""
PARAMETERS = {"clamped_swiglu": ("limit", "alpha", "glu_linear_offset")}
"""What ``activation_params`` may set."""


def activation_of(owner: str, name: str, params: dict[str, Any] | None) -> tuple[Callable[[Tensor], Tensor], bool]:
    """(the function, whether it takes two halves). Raises ValueError for other names and parameters; ``owner`` names
    the module."""
    one_of(f"{owner}: activation", name, (*PLAIN, *GATED))
    check(owner, "activation_params", params, PARAMS)
    if not params:
        return (GATED[name], True) if name in GATED else (PLAIN[name], False)
    unknown = [given for given in params if given not in PARAMETERS.get(name, ())]
    if unknown:
        known = "; ".join(f"{key} takes {', '.join(names)}" for key, names in PARAMETERS.items())
        raise ValueError(f"{owner}: activation_params has {described(unknown[0])}, and activation is {name!r}: {known}")
    for key, value in params.items():
        check(owner, key, value, NUMBER)
    return partial(GATED[name], **params), True
