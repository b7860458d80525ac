"""Attributes of an MXTensor that a compiled graph has made, such as ``w.rowwise.data``: what Dynamo traces for each.

A graph has the tensors that ``__tensor_flatten__`` names. The readers build everything else from them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..core.compat_compile import hook_graph_attributes, run_rules_uncompiled
from ..core.shapes import swapped
from ..core.when_imported import when_imported
from ..kernels.quantize.hadamard import GROUP
from ..numerics.operand import Operand, Rotated


def _rowwise(w: Any) -> Operand:
    format = w.recipe.stored.format
    global_scale = w._inner_rowwise_global_scale if format.global_scale else None
    return Operand(w._inner_rowwise_data, w._inner_rowwise_scale, global_scale, format, tuple(w.shape))


def _columnwise(w: Any) -> Operand:
    format = w.recipe.stored.format
    global_scale = w._inner_columnwise_global_scale if format.global_scale else None
    shape = swapped(tuple(w.shape))
    return Operand(w._inner_columnwise_data, w._inner_columnwise_scale, global_scale, format, shape)


def _rotated(w: Any) -> Rotated:
    format, (*outer, rows, cols) = w.recipe.stored.format, tuple(w.shape)
    global_scale = w._inner_rotated_global_scale if format.global_scale else None
    shape = (*outer, cols, -(-rows // GROUP) * GROUP)
    return Rotated(Operand(w._inner_rotated_data, w._inner_rotated_scale, global_scale, format, shape), w._signs)


def readers_of(kind: type[Tensor]) -> dict[str, Callable[[Any], Any]]:
    """Attribute -> its reader: the stored operands, and every property that reads them."""
    ours = [base for base in reversed(kind.__mro__) if issubclass(base, Tensor) and base is not Tensor]
    found = {name: value for base in ours for name, value in vars(base).items() if isinstance(value, property)}
    readers = {
        name: value.fget for name, value in found.items() if value.fget and not name.startswith(("_inner_", "_signs"))
    }
    return readers | {"_rowwise": _rowwise, "_columnwise": _columnwise, "_rotated": _rotated}


def tell_dynamo(
    kind: type[Tensor], readers: dict[str, Callable[[Any], Any]], constants: tuple[str, ...] = ("recipe", "_signs")
) -> None:
    """Tell Dynamo two things about the class ``kind``.

    Attributes: in a graph they are read by ``readers``, or as ``constants``. ``__tensor_flatten__`` installs this once
    the compiler is imported: Dynamo calls it for each tensor of a graph, before anybody reads an attribute.

    Rules: between two graphs they run as eager code. Dynamo would compile them, as if they were functions of the user.
    """
    when_imported("torch._dynamo.variables.tensor", lambda: hook_graph_attributes(kind, readers, constants))
    run_rules_uncompiled(kind)


def give_attributes(kind: type[Tensor], attributes: dict[str, Any]) -> None:
    """Give the class ``kind`` the attributes of a door, such as ``mxtensor.te``, and tell Dynamo how to read them."""
    for name, value in attributes.items():
        setattr(kind, name, value)
    readers = {name: value.fget for name, value in attributes.items() if isinstance(value, property) and value.fget}
    tell_dynamo(kind, readers, constants=())
