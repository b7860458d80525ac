"""Probes: gradients of a model's output whose products with small changes of it tell how much the output changes.

For ``g`` the gradient of the log likelihood of labels that are sampled from the model's own predictions, and ``d`` a
small change of the output of a layer, half the mean of ``(g d)^2`` is the KL divergence between the predictions before
and after: the Fisher information is its second derivative. For ``g`` the gradient of the product of the output and
standard normal values, the mean of ``(g d)^2`` is the squared change of the output.

Source: Amari, "Natural Gradient Works Efficiently in Learning", 1998.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.arguments import described


class Probe(NamedTuple):
    """A scalar whose gradient is a probe, and what the sum of squares over a batch is divided by."""

    value: Tensor
    share: float


def output_of(out: Any) -> Tensor:
    """The floating-point tensor that a model returns: its ``logits``, its ``last_hidden_state``, or itself.

    Raises ValueError if there is none.
    """
    for one in (getattr(out, "logits", None), getattr(out, "last_hidden_state", None), out):
        first = one[0] if isinstance(one, (tuple, list)) and one else one
        if isinstance(first, Tensor) and first.is_floating_point():
            return first
    raise ValueError(f"plan: the model returns {described(out)}, which has no gradient; pass measure='layer'")


def sampled_label(out: Any, generator: torch.Generator) -> Probe:
    """For ``"kl"``: the log likelihood of one sampled label for each row of logits (..., classes)."""
    logits = output_of(out).float().flatten(0, -2)
    log_p = logits.log_softmax(-1)
    labels = torch.multinomial(log_p.detach().exp(), 1, generator=generator)
    return Probe(log_p.gather(1, labels).sum(), 2.0 * len(logits))


def normal_product(out: Any, generator: torch.Generator) -> Probe:
    """For ``"squared"``: the product with standard normal values, relative to the squared norm of the output."""
    value = output_of(out).float()
    normal = torch.randn(value.shape, generator=generator, device=value.device)
    return Probe((value * normal).sum(), float(value.detach().square().sum()))


PROBES: dict[str, Callable[[Any, torch.Generator], Probe]] = {"kl": sampled_label, "squared": normal_product}
"""By the name of the measure."""
