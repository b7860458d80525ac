"""Whether torch is tracing: then all work must be ops, and in an export ops of aten."""

from __future__ import annotations

import torch

from .compat import dispatch_mode_count, is_ephemeral, is_functorch_wrapped_tensor, is_jit_tracing
from .recording import active


def is_recorded() -> bool:
    """Whether ``torch.jit.trace`` is recording: it sees ops, and no write to memory."""
    return is_jit_tracing()


def refuse_torchscript(what: str) -> None:
    """Raise NotImplementedError: TorchScript would save the storage of the tensor ``what``, which it does not have."""
    raise NotImplementedError(
        f"TorchScript (torch.jit.trace, torch.jit.script, the ONNX exporter with dynamo=False) cannot record {what}: a "
        "saved program would compute with zeros; use torch.export or torch.compile, or a model in high precision"
    )


def refuse_recording(what: str) -> None:
    """Raise NotImplementedError while ``torch.jit.trace`` is recording; ``what`` is the tensor."""
    if is_jit_tracing():
        refuse_torchscript(what)


def is_traced(*tensors: torch.Tensor | None) -> bool:
    """Whether these tensors are being traced (or have no values at all) rather than computed."""
    if torch.compiler.is_compiling() or is_jit_tracing():
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
