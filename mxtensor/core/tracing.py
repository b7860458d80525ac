"""Whether torch is tracing: then all work must be ops, and in an export ops of aten."""

from __future__ import annotations

from typing import Any

import torch

from .compat import dispatch_mode_count, is_ephemeral, is_functorch_wrapped_tensor, is_jit_tracing
from .recording import active


def refuse_torchscript(what: str) -> None:
    """Raise NotImplementedError: TorchScript would save the storage of the tensor ``what``, which it does not have."""
    raise NotImplementedError(
        f"TorchScript (torch.jit.trace, torch.jit.script, the ONNX exporter with dynamo=False) cannot record {what}: a "
        "saved program would compute with zeros; use torch.export or torch.compile, or a model in high precision"
    )


def refuse_jit_trace(what: str) -> None:
    """Raise NotImplementedError while ``torch.jit.trace`` runs; ``what`` is the tensor."""
    if is_jit_tracing():
        refuse_torchscript(what)


def is_traced(*tensors: torch.Tensor | None) -> bool:
    """Whether these tensors are being traced (or have no values at all) rather than computed.

    ``torch.compiler.is_compiling()`` is not asked: since torch 2.13 it is true for all threads while one compiles.
    Outside of Dynamo a trace has modes, and tensors of other types.
    """
    if torch.compiler.is_dynamo_compiling() or is_jit_tracing():
        return True
    modes = dispatch_mode_count()
    if modes and modes > (active() is not None):  # a recorder sees ops, and traces nothing
        return True
    for t in tensors:
        if t is not None and (type(t) not in _PLAIN or t.is_meta or is_functorch_wrapped_tensor(t)):
            return True
    return False


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def guard_int(number: int) -> int:
    """``number`` as an int if it is a symbol for an argument of a view that torch replays to trace it.

    No guard can name such a symbol, so that none may remain. Other symbols are returned as they are.
    """
    if type(number) is int:
        return number
    return int(number) if is_ephemeral(number) else number


def constants_of(fields: Any) -> Any | None:
    """The fields of a frozen dataclass as constants; None if Dynamo is only writing a call of the class to its graph.

    With ``dynamic=True`` Dynamo makes numbers of an object that is an argument symbols, and a format has constants.
    """
    if isinstance(fields, torch.fx.Proxy):
        return None
    if isinstance(fields, tuple):
        found = [constants_of(value) for value in fields]
        return (
            None
            if any(new is None and old is not None for new, old in zip(found, fields, strict=True))
            else tuple(found)
        )
    kind = _SYMBOLS.get(type(fields))
    return fields if kind is None else kind(fields)


def make_constant(instance: Any, *names: str) -> bool:
    """``constants_of`` these fields of a frozen dataclass, set in it; False if it is only written to a graph."""
    found = constants_of(tuple(getattr(instance, name) for name in names))
    for name, value in zip(names, found or (), strict=False):
        object.__setattr__(instance, name, value)
    return found is not None


_SYMBOLS: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


def is_captured(t: torch.Tensor) -> bool:
    """Whether a CUDA graph is captured, which runs again later and to which the memory belongs."""
    return t.is_cuda and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
