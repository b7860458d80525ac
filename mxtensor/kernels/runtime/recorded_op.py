"""Custom ops whose repeated calls run a program: what a compiled graph calls costs the host its launches.

A custom op checks what anybody may pass, decides and allocates. For arguments of one kind all of that comes out the
same, so that the second call of a kind is recorded (``core/repeated.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial, wraps
from typing import Any, TypeVar, overload

from torch import Tensor

from ...core import recording
from ...core.kernel import Spec
from ...core.plan import PLANS, Plan
from ...core.repeated import DEVICES, Repeated, kind_of
from .triton_launch import is_watched


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
        elif value and isinstance(value[0], Tensor):
            tensors += value
            rest.append((Tensor, len(value)))
        else:
            rest.append(tuple(value))
    return tensors, tuple(rest)


Function = TypeVar("Function", bound=Callable[..., Any])


@overload
def recorded(function: Function) -> Function: ...
@overload
def recorded(*, after: int) -> Callable[[Function], Function]: ...
def recorded(function: Callable[..., Any] | None = None, *, after: int = 2) -> Any:
    """Make the decorated function of tensors, lists of tensors and plain values one whose repeated calls are a program.

    It returns a tensor or a list of tensors that it has made, and what it computes depends on its arguments alone. The
    call number ``after`` of a kind is recorded: more than 2 where most kinds come a few times only.
    """
    if function is None:
        return partial(recorded, after=after)
    name = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def run(*args: Any, **named: Any) -> Any:
        tensors, rest = _taken_apart(args)
        if named or tensors[0].device.type not in DEVICES or recording.active() is not None or is_watched():
            return function(*args, **named)
        key = name, rest, *map(kind_of, tensors)
        plan = PLANS.get(key)
        if plan is None:
            out = function(*args)
            x = tensors[0]
            shapes, dtypes = tuple(tuple(t.shape) for t in tensors), tuple(t.dtype for t in tensors)
            spec = Spec(name, shapes, dtypes, x.dtype, x.device)
            PLANS.put(key, Plan(spec, None, {}, (RepeatedOne if isinstance(out, Tensor) else Repeated)(after)))
            return out
        kind = plan.launch
        if type(kind) is RepeatedOne:
            return kind(lambda: (function(*args),), tensors)[0]
        assert kind is not None
        return list(kind(lambda: function(*args), tensors))

    return run


class RepeatedOne(Repeated):
    """Calls whose result is one tensor."""

    __slots__ = ()
