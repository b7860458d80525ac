"""Stream: the inputs of one block of a model after another, so that only one block's statistics are in memory.

The blocks are the entries of the ModuleList with the most layers to calibrate, such as ``model.layers``. The model runs
once; the inputs of its first block are recorded, and what each other block gets besides them, such as the positions.
From then on a block runs on the outputs of the one before. A model without such a list is one block. Each run is as in
use, and starts from the same state: a block may write into its input and its caches.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.arguments import described
from ..core.called_layers import Copies, in_evaluation, layers_are_called, with_fresh_cache
from ..core.compat import tree_map_only

_log = logging.getLogger("mxtensor")


class Call(NamedTuple):
    """The arguments of one call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, batch: Any) -> Call:
        """A batch of ``data``: a dict has arguments by name, a tuple or a list one by one, else it is the only one."""
        if isinstance(batch, Mapping):
            return cls((), dict(batch))
        return cls(tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {})

    @property
    def first(self) -> Any:
        """The first argument, by position or by name; None if there is none."""
        return self.args[0] if self.args else next(iter(self.kwargs.values()), None)

    def with_first(self, value: Any) -> Call:
        """The call with another first argument."""
        if self.args:
            return Call((value, *self.args[1:]), self.kwargs)
        return Call((), self.kwargs | dict.fromkeys(list(self.kwargs)[:1], value))

    def fresh(self, caches: Copies | None = None) -> Call:
        """The call with copies of its first argument and of each cache: a run that writes into them changes no other.

        ``caches`` has the copies of caches that were seen before.
        """
        copies: Copies = {} if caches is None else caches
        call = self.with_first(tree_map_only(Tensor, Tensor.clone, self.first))
        args = tuple(with_fresh_cache(value, copies) for value in call.args)
        return Call(args, {name: with_fresh_cache(value, copies) for name, value in call.kwargs.items()})


def batches_of(caller: str, data: Iterable[Any]) -> list[Any]:
    """The batches of ``data``. Raises TypeError for one batch in the place of several, ValueError for none."""
    if isinstance(data, (Mapping, str, bytes)) or not isinstance(data, Iterable):
        raise TypeError(f"{caller}: data is {described(data)}; pass a list of batches, such as [data] for one")
    batches = list(data)
    if not batches:
        raise ValueError(f"{caller}: data is empty; pass batches, such as [input_ids, ...] or [{{'input_ids': ids}}]")
    return batches


def tensors_of(out: Any) -> list[Tensor]:
    """The floating-point tensors of what a model or a block returns: a tensor, or a nest of tuples, dicts, dataclasses.

    In their order. Objects of other kinds, such as caches, have none.
    """
    if isinstance(out, Tensor):
        return [out] if out.is_floating_point() else []
    items: Iterable[Any] = ()
    if isinstance(out, Mapping):  # transformers' ModelOutput is one
        items = out.values()
    elif isinstance(out, (tuple, list)):
        items = out
    elif is_dataclass(out) and not isinstance(out, type):
        items = [getattr(out, field.name) for field in fields(out)]
    return [tensor for item in items for tensor in tensors_of(item)]


@contextmanager
def as_in_use(module: nn.Module) -> Iterator[None]:
    """In evaluation mode, with calls of all layers, and without a cache that a block would fill at each call."""
    configs: dict[int, Any] = {}  # those of parts of a model (``text_config``) and those of its modules
    left = [config for m in module.modules() if (config := getattr(m, "config", None)) is not None]
    while left:
        config = left.pop()
        if id(config) not in configs and hasattr(config, "use_cache"):
            configs[id(config)] = config
            left += getattr(config, "__dict__", {}).values()
    caching = [config for config in configs.values() if config.use_cache]
    try:
        for config in caching:
            config.use_cache = False
        with in_evaluation(module), layers_are_called():
            yield
    finally:
        for config in caching:
            config.use_cache = True


class Stream:
    """The blocks of a model, and the inputs of the next one to run.

    ``states`` are the inputs of the block that runs next, one for each batch; ``without_input`` are the ``layers`` that
    get no row of input from any batch.
    """

    def __init__(self, model: nn.Module, batches: Iterable[Any], layers: Collection[nn.Module]) -> None:
        calls = [Call.of(batch) for batch in batches]
        self.model, self.blocks, self._batches = model, _blocks(model, set(layers)), calls
        self.without_input = dict.fromkeys(layers)
        with as_in_use(model):
            recorded = self._record(calls)
        if recorded is None:  # the blocks do not follow each other
            self.blocks, recorded = [model], [calls]
        self._calls = recorded
        self.states = [call.first for call in recorded[0]]

    def by_block(self, layers: Collection[nn.Module]) -> tuple[list[list[nn.Module]], list[nn.Module]]:
        """Those of ``layers`` that are in each block, and those that are in none, such as a head."""
        inside = [[module for module in block.modules() if module in layers] for block in self.blocks]
        found = {module for block in inside for module in block}
        return inside, [layer for layer in layers if layer not in found]

    def is_shared(self, *modules: nn.Module) -> bool:
        """Whether a parameter of these modules has other places in the model, or they are in several blocks."""
        wanted = {id(parameter) for module in modules for parameter in module.parameters()}
        places: list[int] = []
        for module in self.model.modules():
            places += [id(p) for p in module._parameters.values() if id(p) in wanted]
        blocks = [id(p) for block in self.blocks for p in block.parameters() if id(p) in wanted]
        return len(places) > len(wanted) or len(blocks) > len(wanted)

    def run(self, index: int, batch: int, state: Any, gradient: bool = False) -> Any:
        """The output of a block for this input from a batch: the input of the next block.

        If the model is the only block: all that it returns. ``gradient``: with a graph for autograd.
        """
        block = self.blocks[index]
        call = self._calls[index][batch].with_first(state).fresh()
        with torch.set_grad_enabled(gradient), as_in_use(block):
            out = block(*call.args, **call.kwargs)
        return out[0] if isinstance(out, tuple) and len(self.blocks) > 1 else out

    def finish(self, batch: int, state: Tensor, gradient: bool = True) -> Any:
        """The output of the model for this output of the last of several blocks.

        ``gradient``: with a graph for autograd, from ``state`` on.
        """

        def replaced(module: nn.Module, args: Any, out: Any) -> Any:
            return (end, *out[1:]) if isinstance(out, tuple) else end

        end, call = state.clone(), self._batches[batch].fresh()
        hook = self.blocks[-1].register_forward_hook(replaced)
        with torch.set_grad_enabled(gradient), as_in_use(self.model), hook:
            return self.model(*call.args, **call.kwargs)

    def _record(self, calls: list[Call]) -> list[list[Call]] | None:
        """The calls of each block. None if they do not run once each, in their order, on each other's outputs.

        Takes the layers that get an input from ``without_input``.
        """
        recorded: list[list[Call]] = [[] for _ in self.blocks]
        order: list[int] = []
        last: Any = None
        caches: Copies = {}

        def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = Call(args, kwargs).first
            if isinstance(x, Tensor) and x.numel():
                self.without_input.pop(layer, None)

        def before(index: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = Call(args, kwargs)
            order.append(index if not index or call.first is last else -1)
            # caches as the first block finds them: each block adds to a part of its own
            recorded[index].append((call.with_first(None) if index else call).fresh(caches))

        def after(block: nn.Module, args: Any, out: Any) -> None:
            nonlocal last
            last = out[0] if isinstance(out, tuple) else out

        follow = True
        with ExitStack() as noting, ExitStack() as recording:
            for layer in self.without_input:
                noting.enter_context(layer.register_forward_pre_hook(note, with_kwargs=True))
            for index, block in enumerate(self.blocks):
                recording.enter_context(block.register_forward_pre_hook(partial(before, index), with_kwargs=True))
                recording.enter_context(block.register_forward_hook(after))
            for call in calls:
                order.clear()
                caches.clear()
                last = None
                call = call.fresh()
                with torch.no_grad():
                    self.model(*call.args, **call.kwargs)
                if follow and order != list(range(len(self.blocks))):
                    follow = False
                    recording.close()  # the other batches run for the inputs of the layers alone
        return recorded if follow else None


def _blocks(model: nn.Module, layers: set[nn.Module]) -> list[nn.Module]:
    best, most = [model], 0
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1 and None not in list(module):
            count = sum(layer in layers for block in module for layer in block.modules())
            if count > most:
                best, most = list(module), count
    return best


def warn_of_layers_without_input(caller: str, fqns: Collection[str], total: int, consequence: str) -> None:
    """Warn of layers without an input, if there are any. ``consequence``: what happens to their weights."""
    if fqns:
        _log.warning(
            f"{caller}: {len(fqns)} of {total} layers saw no input, and {consequence}: {patterns(fqns)}; pass data "
            "that reaches them (images for a vision tower, more tokens for experts), or leave them out by filter_fn. A "
            "layer whose weight the model reads without calling the layer, such as out_proj of nn.MultiheadAttention, "
            "sees none"
        )


def patterns(fqns: Collection[str]) -> str:
    """Names of parameters, those of all layers of a kind as one."""
    return ", ".join(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", fqn) for fqn in fqns))
