"""The tables of rules for aten ops and torch functions of an MXTensor, and ``strict()``, which forbids dequantization.

Independent of the tensor class. ``ops/`` fills the tables.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from .scopes import Scopes

Rule = Callable[..., Any]

OP_TABLE: dict[Any, Rule] = {}
"""aten overload -> rule(func, args, kwargs)."""
FALLBACK: list[Rule] = []
"""The one rule for every op that is not in OP_TABLE, entered by ``ops/fallback.py``."""
VIEW_FALLBACK: list[Rule] = []
"""The one rule for every op of a view that cuts blocks, entered by ``ops/view.py``."""
FUNCTION_TABLE: dict[Any, Rule] = {}
"""torch function -> rule(*args, **kwargs), for functions that a rule must see before aten decomposes them."""


def _register(table: dict[Any, Rule], keys: Sequence[Any]) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        for key in keys:
            if key in table:
                raise RuntimeError(f"{key} already has the rule {table[key].__module__}.{table[key].__name__}")
            table[key] = rule
        return rule

    return register


def implements(*ops: Any) -> Callable[[Rule], Rule]:
    """Enter the decorated function into OP_TABLE for these aten overloads. Raises RuntimeError for a second rule."""
    return _register(OP_TABLE, ops)


def implements_function(*functions: Any) -> Callable[[Rule], Rule]:
    """Enter the decorated function into FUNCTION_TABLE. Raises RuntimeError for a second rule."""
    return _register(FUNCTION_TABLE, functions)


_strict: Scopes[bool] = Scopes("strict", False)
_LOCK = threading.Lock()
OPEN = {"strict": 0}
"""The number of open ``strict()`` blocks of all threads. Graphs have a guard on it: inside a block they recompile."""


@contextmanager
def strict() -> Iterator[None]:
    """Inside the block, an op that would dequantize an MXTensor raises a NotImplementedError that names it.

    So does a product with a training weight that runs in high precision because it is not recognized as a linear layer,
    such as an einsum over stacked experts, or one of an input whose class turns torch functions off.
    """
    with _LOCK:
        OPEN["strict"] += 1
    try:
        with _strict.block(True):
            yield
    finally:
        with _LOCK:
            OPEN["strict"] -= 1


def is_inside_strict() -> bool:
    """``is_strict`` for a function that Dynamo calls while it traces."""
    return _strict.get()


def is_strict() -> bool:
    """Whether there is an enclosing ``strict()``. False while Dynamo traces, which cannot read a ContextVar."""
    return not torch.compiler.is_dynamo_compiling() and _strict.get()


def arguments_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of an op, by name."""
    return {**dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)), **kwargs}


def every_argument(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments of a call of an op in the order of its schema, defaults included."""
    rest = op._schema.arguments[len(args) :]
    return [*args, *(kwargs.get(argument.name, argument.default_value) for argument in rest)]


@cache
def names_written(func: Any) -> frozenset[str]:
    """Names of the arguments that an op writes, by its schema or by what is known of it."""
    names = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    return frozenset(names | _UNDECLARED.get(func._overloadpacket, set()))


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that this call writes: tensors, lists of tensors, and None."""
    named = arguments_of(func, args, kwargs)
    return [named.get(name) for name in names_written(func)]


_STATISTICS = {"running_mean", "running_var"}
_UNDECLARED = {torch.ops.aten.native_batch_norm: _STATISTICS, torch.ops.aten.cudnn_batch_norm: _STATISTICS}
"""Arguments that ops write and that their schemas do not call so."""
