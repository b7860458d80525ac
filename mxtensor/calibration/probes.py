"""Probes: gradients of a model's output whose products with small changes of it give the change of the output.

For ``g`` the gradient of the log likelihood of labels that are sampled from the model's own predictions, and ``d`` a
small change of the output of a layer, half the mean of ``(g d)^2`` is the KL divergence between the predictions before
and after: the Fisher information is its second derivative. For ``g`` the gradient of the product of the output and
standard normal values, the mean of ``(g d)^2`` is the squared change of the output.

Source: Amari, "Natural Gradient Works Efficiently in Learning", 1998.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.arguments import described
from .outputs import tensors_of


class Probe(NamedTuple):
    """A scalar whose gradient is a probe, and what the sum of squares over a batch is divided by."""

    value: Tensor
    share: float


def output_of(out: Any) -> Tensor:
    """The floating-point tensor that a model returns: its ``logits``, its ``last_hidden_state``, or the first in it.

    A loss, which has no dimension, is passed over. Raises ValueError if there is none.
    """

    def named(name: str) -> Any:
        return out.get(name) if isinstance(out, Mapping) else getattr(out, name, None)

    for one in (named("logits"), named("last_hidden_state"), out):
        for tensor in tensors_of(one):
            if tensor.dim():
                return tensor
    raise ValueError(f"plan: the model returns {described(out)}, which has no gradient; pass measure='layer'")


def sampled_label(out: Any, generator: torch.Generator) -> Probe:
    """For ``"kl"``: the log likelihood of one sampled label for each row of logits (..., classes)."""
    logits = output_of(out).float().flatten(0, -2)
    log_p = logits.log_softmax(-1)
    _check_finite(~log_p.isnan())  # a masked token has -inf
    labels = torch.multinomial(log_p.detach().exp(), 1, generator=generator)
    return Probe(log_p.gather(1, labels).sum(), 2.0 * len(logits))


def _check_finite(fits: Tensor) -> None:
    if not fits.all():
        raise ValueError(
            "plan: the output of the model has NaN or Inf, whose errors cannot be measured; look for weights that are "
            "not finite, and for data that the model cannot read"
        )


def normal_product(out: Any, generator: torch.Generator) -> Probe:
    """For ``"squared"``: the product with standard normal values, relative to the squared norm of the output."""
    value = output_of(out).float()
    _check_finite(value.isfinite())
    normal = torch.randn(value.shape, generator=generator, device=value.device)
    return Probe((value * normal).sum(), float(value.detach().square().sum()))


PROBES: dict[str, Callable[[Any, torch.Generator], Probe]] = {"kl": sampled_label, "squared": normal_product}
"""By the name of the measure."""
