"""Repeated calls: what a call does to tensors is recorded once for each kind of call, and later calls run that.

    tensors, note = repeated(("linear", recipe.key), (x, weight), work)

``work`` decides, checks, casts and multiplies in general. The second call of a kind is recorded (``recording.py``), and
becomes a program (``program.py``): allocations, launches and ops of torch, which hold no tensor and no address. A later
call costs the host a look-up, its allocations and its launches. There is no second definition of a call: one that
cannot be recorded, and one inside ``explain()``, ``kernels()`` or a trace, runs ``work``.

``F.linear`` without gradients (``ops/functional.py``), both passes of a layer that trains (``training/linear.py``) and
the custom ops of compiled graphs (``recorded``) are repeated calls.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial, wraps
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from . import recording
from .kernel import Cache
from .program import Program
from .select import is_observed
from .tracing import is_captured, is_traced

DEVICES = {"cuda"}
"""Types of devices on which all that writes memory is an op or tells the recorder what it does. On others, products of
inference alone do."""
WATCHERS: list[Callable[[], bool]] = []
"""Whether somebody observes launches, such as a profiler of Triton: then they are made in the general way."""
Results = tuple[Sequence[Tensor | None], Any]
"""What a call gives: tensors, and a note that is the same for all calls of its kind."""


class Kind:
    """A kind of call. Holds no tensor."""

    __slots__ = ("calls", "note", "program")

    def __init__(self) -> None:
        self.calls = 1
        self.program: Program | None = None
        """None: not recorded yet, or not to be recorded."""
        self.note: Any = None


KINDS: Cache[Kind] = Cache()
"""The kinds of calls of this process."""


def kind_of(t: Tensor | None) -> Hashable:
    """All of a tensor that kernels and ops decide on."""
    return None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & 15)


def is_profiled() -> bool:
    """Whether one of ``WATCHERS`` observes launches."""
    return any(watched() for watched in WATCHERS)


def is_watched() -> bool:
    """Whether there is an enclosing ``explain()`` or ``kernels()``, or a profiler: then no program runs."""
    return is_observed() or is_profiled()


def may_repeat(*tensors: Tensor | None) -> bool:
    """Whether a call with these tensors may run a program: nobody observes or traces it, the first one is on a device
    of ``DEVICES``, and all are dense."""
    if tensors[0].device.type not in DEVICES or is_watched() or is_traced(*tensors):  # type: ignore[union-attr]
        return False
    return not any(t is not None and (t.is_neg() or t.layout is not torch.strided) for t in tensors)


def repeated(
    facts: Hashable, inputs: Sequence[Tensor | None], work: Callable[[], Results], after: int = 2
) -> Results:  # fmt: skip
    """What ``work`` returns, which it computes from ``inputs`` and from what all calls of the kind share.

    ``facts``: what the kind depends on beside the kinds of the inputs. The call number ``after`` is recorded.
    """
    key = facts, *map(kind_of, inputs)
    kind = KINDS.get(key)
    if kind is None:
        results = work()
        KINDS.put(key, Kind())
        return results
    if kind.program is not None:
        try:
            return kind.program(*inputs), kind.note
        except torch.OutOfMemoryError:
            raise
        except Exception:
            return work()  # which names the kernel and the operands in its error
    if recording.active() is not None or is_captured(next(t for t in inputs if t is not None)):
        return work()
    kind.calls += 1
    if kind.calls != after:
        return work()
    try:
        results, program = recording.record(work, inputs, lambda results: results[0])
    except torch.OutOfMemoryError:  # all of a call that is recorded lives until its end
        return work()
    kind.note, kind.program = results[1], program
    return results


# ---------------------------------------------------------------------------------------------- custom ops

Function = TypeVar("Function", bound=Callable[..., Any])


def _taken_apart(args: Sequence[Any]) -> tuple[list[Tensor], tuple[Hashable, ...]]:
    """The tensors among the arguments of an op, and all else: a number of tensors stands for a list of them."""
    tensors: list[Tensor] = []
    rest: list[Hashable] = []
    for value in args:
        if isinstance(value, Tensor):
            tensors.append(value)
            rest.append(Tensor)
        elif type(value) is not list:
            rest.append(value)
        elif any(isinstance(one, Tensor) for one in value):
            tensors += [one for one in value if one is not None]
            rest.append(tuple(one is not None for one in value))
        else:
            rest.append(tuple(value))
    return tensors, tuple(rest)


@overload
def recorded(function: Function) -> Function: ...
@overload
def recorded(*, after: int) -> Callable[[Function], Function]: ...
def recorded(function: Callable[..., Any] | None = None, *, after: int = 2) -> Any:
    """Make the decorated function of tensors, lists of tensors and plain values one whose calls are repeated calls.

    A custom op checks what anybody may pass, decides and allocates; for arguments of one kind all of that comes out the
    same. It returns a tensor or a list of tensors that it has made, and depends on its arguments alone. ``after``: more
    than 2 where most kinds come a few times only.
    """
    if function is None:
        return partial(recorded, after=after)
    name = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def run(*args: Any, **named: Any) -> Any:
        tensors, rest = _taken_apart(args)
        if named or tensors[0].device.type not in DEVICES or recording.active() is not None or is_profiled():
            return function(*args, **named)

        def work() -> Results:
            out = function(*args)
            return ((out,), True) if isinstance(out, Tensor) else (out, False)

        results, is_one = repeated((name, rest), tensors, work, after)
        return results[0] if is_one else list(results)

    return run
