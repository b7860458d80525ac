"""How a model or a block of it runs for a calibration: as in use, and each time from the same state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..core.arguments import described
from ..core.caches import Copies, with_fresh_cache
from ..core.called_layers import in_evaluation, layers_are_called
from ..core.compat import tree_map_only


class Call(NamedTuple):
    """The arguments of one call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call_of(batch: Any) -> Call:
    """A batch of ``data`` as the arguments of the model: a dict by name, a tuple or a list one by one, else the one."""
    if isinstance(batch, Mapping):
        return Call((), dict(batch))
    return Call(tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {})


def batches_of(caller: str, data: Iterable[Any]) -> list[Any]:
    """The batches of ``data``. Raises TypeError for one batch in the place of several, ValueError for none."""
    if isinstance(data, (Mapping, str, bytes)) or not isinstance(data, Iterable):
        raise TypeError(f"{caller}: data is {described(data)}; pass a list of batches, such as [data] for one")
    batches = list(data)
    if not batches:
        raise ValueError(f"{caller}: data is empty; pass batches, such as [input_ids, ...] or [{{'input_ids': ids}}]")
    return batches


def first_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The first argument of a call, by position or by name; None if there is none."""
    return args[0] if args else next(iter(kwargs.values()), None)


def with_first(call: Call, value: Any) -> Call:
    """A call with another first argument."""
    if call.args:
        return Call((value, *call.args[1:]), call.kwargs)
    return Call((), call.kwargs | dict.fromkeys(list(call.kwargs)[:1], value))


def with_fresh_caches(call: Call, copies: Copies) -> Call:
    """A call with a copy of each cache in its arguments; ``copies`` has those of caches that were seen before."""
    args = tuple(with_fresh_cache(value, copies) for value in call.args)
    return Call(args, {name: with_fresh_cache(value, copies) for name, value in call.kwargs.items()})


def fresh(call: Call) -> Call:
    """A call that may write into its first argument and its caches, and each other run still gets them as they were."""
    return with_fresh_caches(with_first(call, copied(first_of(*call))), {})


def copied(value: Any) -> Any:
    """A tensor, or any nest of tuples, lists and dicts, with a copy of each tensor."""
    return tree_map_only(Tensor, Tensor.clone, value)


@contextmanager
def as_in_use(module: nn.Module) -> Iterator[None]:
    """In evaluation mode, with calls of all layers, and without a cache that a block would fill at each call."""
    caching = [config for config in _configs(module) if config.use_cache]
    try:
        for config in caching:
            config.use_cache = False
        with in_evaluation(module), layers_are_called():
            yield
    finally:
        for config in caching:
            config.use_cache = True


def _configs(module: nn.Module) -> list[Any]:
    """The configs with a ``use_cache``, those of parts of a model (``text_config``) and those of its modules."""
    found: dict[int, Any] = {}
    left = [config for m in module.modules() if (config := getattr(m, "config", None)) is not None]
    while left:
        config = left.pop()
        if id(config) not in found and hasattr(config, "use_cache"):
            found[id(config)] = config
            left += getattr(config, "__dict__", {}).values()
    return list(found.values())
