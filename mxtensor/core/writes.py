"""How many writes to codes and scales there have been, so that values decoded before a write are not used after it.

torch does not count the writes of a rule: inside ``__torch_dispatch__`` the version counters of codes and scales stay.
Writes that are only traced count by themselves, because they change no memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .tracing import is_traced

_counts = {False: 0, True: 0}


def note_write(target: Tensor) -> None:
    """Call it after each write of a rule to ``target``, the codes or scales of any MXTensor."""
    _counts[has_no_memory(target)] += 1


def count_writes(op: Any, wrappers: Iterable[Tensor]) -> None:
    """Count a write of ``op`` to each tensor if torch does not: it counts those of all ops but the ones that return
    nothing (``_foreach_add_``).

    Those write the tensors inside, and torch sees no write to the wrappers that a backward pass will read.
    """
    if op._schema.returns or is_traced():
        return
    counted = [t for t in wrappers if not t.is_inference()]
    if counted:
        torch.autograd.graph.increment_version(counted)


def has_no_memory(t: Tensor) -> bool:
    """Whether ``t`` stands for a tensor of a graph that is traced."""
    return type(t) is not Tensor


def state_of(components: Iterable[Tensor]) -> tuple[int, ...]:
    """A key that changes with each write to ``components``, by a rule or by torch.

    Inference tensors have no version.
    """
    components = list(components)
    versions = (t._version for t in components if not t.is_inference())
    return (_counts[has_no_memory(components[0])], *versions)
