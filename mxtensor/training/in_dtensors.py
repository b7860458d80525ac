"""Weights inside DTensors: the error for products that would run in high precision, without a word.

torch decomposes a product of DTensors without a call of the class of what is inside, so that the recipe of a weight
would not apply. The styles of ``mx.parallel`` compute with the local tensors.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..core.compat import in_backward
from ..core.local import local_of
from .unread import PRODUCTS, SEEN, Seen


def mark_parameters(kind: type[Tensor]) -> None:
    """Mark local tensors of class ``kind`` of every DTensor that becomes a parameter of a module, by ``in_dtensor``."""

    def mark(module: nn.Module, name: str, parameter: Any) -> None:
        local = local_of(parameter)
        if local is not parameter and isinstance(local, kind):
            local.in_dtensor = True  # type: ignore[attr-defined]

    register_module_parameter_registration_hook(mark)


def refuse_product(func: Any, weights: list[Any]) -> None:
    """Raise RuntimeError if ``func``, an aten op, multiplies by a weight inside a DTensor."""
    if len(weights) > 1 or not weights[0].in_dtensor or func not in PRODUCTS:
        return
    if SEEN.get() is not Seen.NOT or in_backward():
        return
    raise RuntimeError(
        f"torch would multiply by a weight {tuple(weights[0].shape)} of a DTensor in high precision: it decomposes the "
        "product before the recipe applies; use mx.parallel.ColwiseParallel and RowwiseParallel instead of torch's "
        "styles, or leave a weight that is not split a plain parameter"
    )
