"""Who looks on while an op runs: what torch traces must be ops, and what it exports aten's own."""

from __future__ import annotations

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import _len_torch_dispatch_stack  # type: ignore[attr-defined]

_recorder = torch._C._get_tracing_state


def is_recorded() -> bool:
    """Whether ``torch.jit.trace`` looks on: it sees ops, not what is written to memory."""
    return _recorder() is not None


def is_traced(*tensors: torch.Tensor | None) -> bool:
    """Whether these tensors are being traced (or have no values at all) rather than computed."""
    if torch.compiler.is_compiling() or _len_torch_dispatch_stack() > 0 or _recorder() is not None:
        return True
    for t in tensors:
        if t is not None and (type(t) not in _PLAIN or t.is_meta or is_functorch_wrapped_tensor(t)):
            return True
    return False


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_exporting() -> bool:
    """``torch.compiler.is_exporting``, which Dynamo of torch 2.11 takes to be true of all that it traces."""
    flag = getattr(torch.compiler, "_is_exporting_flag", None)
    return torch.compiler.is_exporting() if flag is None else bool(flag)


def guard_int(number: int) -> int:
    """``number``; decided now, where it is a symbol for an argument of a view that torch makes anew to trace it.

    No guard can name such a symbol, so that none may be left of it.
    """
    if type(number) is int:
        return number
    node = number.node  # type: ignore[attr-defined]
    sources = node.shape_env.var_to_sources.get(node.expr, ())
    return int(number) if any(source.is_ephemeral() for source in sources) else number
