"""Products of a weight that trains that no rule reads as a linear layer: ``explain()`` logs, ``strict()`` refuses them.

The rules of ``interception.py`` see torch functions. A class of the input that turns torch functions off inside its own
(``DisableTorchFunctionSubclass``), and functions without a rule (``torch.inner``, an ``einsum`` of a matrix), lead to
aten products that reach ``TrainingWeight.__torch_dispatch__``, which runs them with the high-precision values.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from ..core.compat import in_backward
from ..core.dispatch import is_strict
from ..core.explain import record
from ..core.kernel import Spec
from ..core.scopes import Scopes
from ..core.tracing import is_traced

aten = torch.ops.aten
PRODUCTS = {
    getattr(packet, overload)
    for packet in (
        aten.mm, aten.addmm, aten.linear, aten.matmul, aten.bmm, aten.baddbmm, aten.mv, aten.addmv, aten._grouped_mm,
    )
    for overload in ("default", "out")
    if overload in packet.overloads()
}  # fmt: skip
"""aten ops that multiply matrices."""
REASON = "torch's function is not a linear layer, or a class of the input turns torch functions off"


class Seen(Enum):
    """What the rules of torch functions know of the product that is running."""

    NOT = "nothing"
    UNREAD = "it is not a linear layer"
    NOTED = "it is logged, or in high precision because the user wants it"


SEEN = Scopes("seen", Seen.NOT)


def note_product(func: Any, weights: Sequence[Tensor], args: Any) -> None:
    """Log an aten product by a weight that trains, in high precision; NotImplementedError inside ``strict()``.

    ``weights``: the weights among the arguments; ``args``: the plain arguments. Not a product of two weights, as when
    an adapter is merged, one of a backward pass, and one that is traced.
    """
    if func not in PRODUCTS or len(weights) > 1 or SEEN.get() is Seen.NOTED or in_backward():
        return
    values: Tensor = weights[0].high_precision  # type: ignore[attr-defined]
    if is_traced(values):
        return
    if is_strict():
        raise NotImplementedError(
            f"{func} would multiply by a weight {tuple(values.shape)} in high precision ({REASON}), which mx.strict() "
            "forbids; use F.linear or x @ weight.t(), with an input x.as_subclass(torch.Tensor)"
        )
    others = [t for t in args if isinstance(t, Tensor) and t is not values and t.dim() > 1]
    x = others[0] if others else values
    spec = Spec(str(func), (tuple(x.shape), tuple(values.shape)), (x.dtype, values.dtype), x.dtype, x.device, False)
    record(spec, "high precision", {"quantized": REASON})
