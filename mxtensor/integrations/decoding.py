"""``mx.compile_decoding``: compiled steps for ``generate`` on a CPU, where transformers compiles none."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from ..compile.cpu_graphs import CpuGraph, recorded
from ..core.arguments import described
from ..core.compat_compile import compiled_alone

ModelT = TypeVar("ModelT", bound=Any)


def compile_decoding(model: ModelT) -> ModelT:
    """Have ``model.generate`` compile its steps of one token on a CPU, in place; returns ``model``.

    ``model``: a model of transformers. The steps need a static cache, which ``generate`` makes, in one size for all
    calls::

        mx.compile_decoding(model)
        model.generate(**inputs, cache_implementation="static", max_cache_len=1024)

    Each batch size and each size of the cache is one graph, which takes torch some ten seconds at its first step.
    Prompts, and steps with another cache, stay eager. On a GPU transformers compiles the steps of a static cache by
    itself; this changes nothing there.

    A graph belongs to this model as it is: torch does not check the properties of its modules before each step, which
    takes 2 of 12 ms for the 30 layers of SmolLM2. Steps are compiled again when a parameter or a module was replaced,
    as ``quantize_`` and adapters do. Call ``compile_decoding`` again after a change of other attributes, such as
    ``model.set_attn_implementation``. Values of weights may change in place.

    The calls of the compiled code are recorded and made again without Python (``compile/cpu_graphs.py``).

    Raises TypeError for a model without ``generate``.
    """
    if not callable(getattr(model, "generate", None)):
        raise TypeError(f"compile_decoding: {described(model)} has no generate; pass a model of transformers")
    before = vars(model).get("forward")
    model.forward = Decoding(model, before.own if isinstance(before, Decoding) else before)
    return model


def _step(forward: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    return forward(**given)


class Decoding:
    """The ``forward`` of one model: compiled for steps of one token, otherwise the model's own.

    ``own``: a forward that the model had as an attribute; None is that of its class.
    """

    def __init__(self, model: Any, own: Callable[..., Any] | None = None) -> None:
        self.model, self.own = model, own
        self._compile()

    def _compile(self) -> None:
        """Forget the compiled steps; the next one is compiled."""
        skip = torch.compiler.skip_guard_on_all_nn_modules_unsafe
        self.graphs: list[CpuGraph] = []
        self._step = compiled_alone(_step, {"guard_filter_fn": skip})
        self._places: list[tuple[dict[str, Any], str, Any]] = []

    @property
    def __signature__(self) -> inspect.Signature:
        """``generate`` reads which arguments a model takes."""
        return inspect.signature(self._eager())

    def _eager(self) -> Callable[..., Any]:
        return self.own or type(self.model).forward.__get__(self.model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        eager = self._eager()
        if args or torch.compiler.is_compiling() or torch.is_grad_enabled() or not _is_step(kwargs):
            return eager(*args, **kwargs)
        if not all(owner.get(name) is found for owner, name, found in self._places):
            self._compile()
        self._places = self._places or _places(self.model)
        with recorded(self.graphs):
            return self._step(eager, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Decoding:
        return Decoding(copy.deepcopy(self.model, memo), copy.deepcopy(self.own, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return Decoding, (self.model, self.own)


def _places(model: Any) -> list[tuple[dict[str, Any], str, Any]]:
    """Where the model has its parameters and modules: (the dict of a module, name, what it has there)."""
    owners = [owner for module in model.modules() for owner in (module._parameters, module._modules)]
    return [(owner, name, found) for owner in owners for name, found in owner.items()]


def _is_step(given: Mapping[str, Any]) -> bool:
    """Whether these arguments decode one token of each sequence on a CPU, with a cache of tensors of fixed size."""
    from transformers import DynamicCache, EncoderDecoderCache

    ids = given["decoder_input_ids"] if given.get("decoder_input_ids") is not None else given.get("input_ids")
    if ids is None or ids.shape[1] != 1 or ids.device.type != "cpu":
        return False
    cache = given.get("past_key_values")
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    return bool(getattr(cache, "is_compileable", False)) and type(cache) is not DynamicCache
