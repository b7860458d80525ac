"""Ways to have Dynamo compile one function that ``torch.compile`` has no options for.

As in ``compat_compile``: nothing is changed when this file is imported. Seen in torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from itertools import count
from threading import RLock
from types import FunctionType
from typing import Any

import torch

Function = Callable[..., Any]


def compiled_alone(function: Any, **options: Any) -> Function:
    """``torch.compile(function, fullgraph=True, **options)`` with graphs that no other call of this takes.

    Dynamo looks for a graph by the code that it compiled. Where guards are skipped, another model of the same class
    would get this one's graph. By the name of the code it notes which sizes differ from call to call, and compiles for
    any: those of another model would count. torch 2.13 has ``torch.compile(isolate_recompiles=True)`` for the graphs,
    torch 2.11 nothing.
    """
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    own = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    return torch.compile(own, fullgraph=True, **options)


_numbers = count()


@cache
def compiler_errors() -> tuple[type[Exception], ...]:
    """What a function of ``torch.compile(fullgraph=True)`` raises if it cannot be compiled, before any of it has run.

    No public name tells these from errors of the function. Missing: they are raised as others are.
    """
    names = "Unsupported", "BackendCompilerFailed", "InternalTorchDynamoError", "TorchRuntimeError", "UserError"
    found = (getattr(import_module("torch._dynamo.exc"), name, None) for name in (*names, _LIMIT))
    return tuple(kind for kind in found if kind is not None)


_LIMIT = "FailOnRecompileLimitHit"


def exceeds_limit(error: Exception) -> bool:
    """Whether torch refuses to compile one more graph of a function; those that it has can still be called."""
    return type(error).__name__ == _LIMIT


_symbols = RLock()


@contextmanager
def traced_as_symbols(names: str) -> Iterator[None]:
    """Dynamo takes integers whose names match this regular expression to be different in each call, and compiles no
    graph for their first value.

    It has no such option for one function, only ``torch.compiler.config.dynamic_sources`` for all: one thread at a time
    changes that. Missing: nothing happens, and there is one graph more.
    """
    config = torch.compiler.config
    with _symbols:
        before = getattr(config, "dynamic_sources", None)
        if before is None:
            yield
            return
        config.dynamic_sources = f"{before},{names}" if before else names
        try:
            yield
        finally:
            config.dynamic_sources = before


def size_hint(number: Any) -> int:
    """The size that a SymInt had where torch began to trace, without a guard; a size that is known, as it is.

    torch has no public question without a guard in both 2.11 and 2.13. Missing (no hint): ``int``, which is a guard.
    """
    hint = None if type(number) is int else getattr(getattr(number, "node", None), "hint", None)
    return int(number if hint is None else hint)
