"""The code that Inductor generates for a graph on a CPU: where it is, and what it calls.

As in ``compat_compile``: nothing is changed when this file is imported. Seen in torch 2.11 and 2.13.
"""

from __future__ import annotations

import ctypes
import dis
from collections.abc import Callable, Collection
from functools import wraps
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

Code = Callable[[list[Any]], Any]

_ALLOCATES = ("empty_strided_cpu",)
_CALLS_OPS = ("torch", "aten", "extern_kernels", "inductor_ops", "alloc_from_pool", "reinterpret_tensor")
"""Names that generated code calls ops of torch by, and one that makes a view."""
_CHECKS = ("assert_size_stride", "assert_alignment")


def compiled_by_inductor(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """What ``torch.compile`` makes of a graph with its backend "inductor".

    A backend of one's own that changes what Inductor returns has no public way to call it. Missing: ImportError.
    """
    from torch._dynamo import lookup_backend

    compiled: Callable[..., Any] = lookup_backend("inductor")(module, inputs)
    return compiled


def forgetter(module: torch.fx.GraphModule) -> Callable[[], None]:
    """A function that drops the weak references to inputs which torch makes while it compiles this graph; call it when
    torch has compiled it.

    ``torch.utils.swap_tensors``, and so ``model.to()``, refuses a quantized parameter that has a weak reference. torch
    2.13 does this for its own backends; for others only if a setting of the whole process says so
    (``torch._dynamo.config.invalidate_compile_context_weakrefs``). Missing: nothing happens, and ``model.to()`` raises.
    """
    context: Any = torch._guards.TracingContext.try_get()
    values = [node.meta.get("example_value") for node in module.graph.find_nodes(op="placeholder")]
    modes = {
        id(mode): mode for holder in (context, *values) if (mode := getattr(holder, "fake_mode", None)) is not None
    }
    found = [getattr(context, "tensor_to_context", None)]
    for mode in modes.values():  # of the backend, and of the code that was traced
        converter = getattr(getattr(mode, "fake_tensor_converter", None), "meta_converter", None)
        found += (
            getattr(getattr(converter, "describer", None), name, None) for name in ("lookup_tensor", "lookup_storage")
        )

    def forget() -> None:
        for references in found:
            if references is not None:
                references.clear()

    return forget


def hook_compiled_graphs(change: Callable[[Code, Collection[int]], Code]) -> bool:
    """Let ``change(code, mutated)`` give what runs in the place of the generated code of each compiled graph, also of
    one from torch's caches. ``code`` takes the list of inputs, which it clears, and returns the outputs; ``mutated``
    are the places of inputs that it writes to. True if this Inductor has the place.

    Inductor wraps code so for CUDA graphs only. Missing: nothing is changed, and generated code runs as it is.
    """
    from torch._inductor import output_code

    kind: Any = getattr(output_code, "CompiledFxGraph", None)
    usual = getattr(kind, "post_compile", None)
    if usual is None:
        return False

    @wraps(usual)
    def post_compile(self: Any, *args: Any, **kwargs: Any) -> None:
        usual(self, *args, **kwargs)
        code, mutated = (getattr(self, name, None) for name in ("current_callable", "mutated_input_idxs"))
        if callable(code) and mutated is not None:
            self.current_callable = change(code, mutated)

    kind.post_compile = post_compile
    return True


def address_of(function: Any) -> int | None:
    """The address of the C++ kernel behind the Python function that Inductor made of it; None for anything else."""
    module = getattr(function, "__self__", None)
    path, name = getattr(module, "__file__", None), getattr(function, "__name__", None)
    if path is None or name != "kernel":
        return None
    found = getattr(ctypes.CDLL(path), name, None)
    return None if found is None else ctypes.cast(found, ctypes.c_void_p).value


def observed(code: Code, kernel: Callable[[Any, int], Any], allocation: Callable[[Any], Any]) -> Code | str:
    """A copy of generated code that calls ``kernel(function, address)`` in the place of each C++ kernel, and
    ``allocation(function)`` in that of each function that allocates memory. All else that it calls is an op of torch.

    If it may call something else: what it is.
    """
    owner = code.__self__ if isinstance(code, MethodType) else None
    function = code.__func__ if isinstance(code, MethodType) else code
    if not isinstance(function, FunctionType):
        return f"{type(code).__name__} is not generated code"
    names = dict(function.__globals__)
    used = (one.argval for one in dis.get_instructions(function) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    for name in dict.fromkeys(used):
        value = names.get(name)
        address = address_of(value)
        if address is not None:
            names[name] = kernel(value, address)
        elif name in _ALLOCATES:
            names[name] = allocation(value)
        elif name not in (*_CALLS_OPS, *_CHECKS) and not isinstance(value, Tensor):
            return f"generated code calls {name}"
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    return copy if owner is None else MethodType(copy, owner)
