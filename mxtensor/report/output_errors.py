"""The error of the output of each quantized layer: by itself, and with the errors of all layers before it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..convert.heads import is_lookup
from ..core.arguments import MODULE, check, described
from ..core.caches import Copies, with_fresh_cache
from ..core.called_layers import in_evaluation, layers_are_called
from ..tensor.mxtensor import MXTensor
from .model_report import decibels


@dataclass(frozen=True)
class OutputError:
    """The output of one quantized layer, compared with that of the layer before quantization."""

    fqn: str
    """The name of the weight in ``named_parameters()``."""
    alone_db: float
    """SQNR in dB if the layer gets the inputs of the model before quantization: the error of this layer alone."""
    total_db: float
    """SQNR in dB in the quantized model, whose inputs have the errors of the layers before."""


@dataclass
class _Sums:
    """Sums of squares over all inputs, in float64."""

    signal: float = 0.0
    alone: float = 0.0
    total: float = 0.0


@dataclass
class _Pairs:
    """Layers of both models, and the outputs of one run of the model before quantization."""

    layers: dict[str, tuple[nn.Module, nn.Module]]
    sums: dict[str, _Sums] = field(default_factory=dict)
    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    def before(self, fqn: str) -> Callable[..., None]:
        """A hook of the layer before quantization: its output, and that of the quantized layer for the same input."""
        small = self.layers[fqn][1]

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
            sums = self.sums.setdefault(fqn, _Sums())
            sums.signal += _squares(out)
            sums.alone += _squares(small(*args, **kwargs) - out)
            self.outputs.setdefault(fqn, []).append(out.clone())  # what follows may write into it

        return hook

    def after(self, fqn: str) -> Callable[..., None]:
        """A hook of the quantized layer."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
            number = self.calls[fqn] = self.calls.get(fqn, 0) + 1
            sums, before = self.sums.setdefault(fqn, _Sums()), self.outputs.get(fqn, [])[number - 1 : number]
            same = bool(before) and before[0].shape == out.shape
            sums.total += _squares(out - before[0]) if same else math.nan

        return hook


def _squares(t: Tensor) -> float:
    return float(t.detach().double().square().sum())


@contextmanager
def _hooked(layers: Mapping[str, nn.Module], make: Callable[[str], Callable[..., None]]) -> Iterator[None]:
    with ExitStack() as hooks:
        for fqn, layer in layers.items():  # a hook returns None: no change
            hooks.enter_context(layer.register_forward_hook(make(fqn), with_kwargs=True))
        yield


def _quantized_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Name of the weight -> module, of linear layers; a module that is used twice has its first name."""
    found = {}
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, MXTensor) and weight.dim() == 2 and not is_lookup(module):
            found[f"{path}.weight" if path else "weight"] = module
    return found


def output_errors(
    model: nn.Module,
    reference: nn.Module,
    inputs: Sequence[Mapping[str, Any]],
    done: Callable[[], object] = lambda: None,
) -> list[OutputError]:
    """One row per quantized linear layer of ``model`` that ran, in the order of the model.

    ``reference``: the model before ``quantize_``, another object, on the same device. ``inputs``: the keyword arguments
    of each call, such as ``{"input_ids": ids}``; both models run once for each, in evaluation mode. Memory holds the
    outputs of all quantized layers of one call. ``done`` is called after each. Stacked experts have no row. A layer
    that routing gives other rows in the two models has nan as its total. Raises ValueError if the reference lacks a
    layer, TypeError for inputs that are not dicts.
    """
    check("output_errors", "model", model, MODULE)
    check("output_errors", "reference", reference, MODULE)
    modules = dict(reference.named_modules())
    small = _quantized_layers(model)
    for fqn in small:
        path = fqn.rpartition(".")[0]
        if path not in modules or modules[path] is small[fqn]:
            raise ValueError(
                f"the reference has no layer {path!r} of its own; pass a copy.deepcopy of the model before"
            )

    def fresh(given: Mapping[str, Any]) -> dict[str, Any]:
        copies: Copies = {}
        return {name: with_fresh_cache(value, copies) for name, value in given.items()}

    pairs = _Pairs({fqn: (modules[fqn.rpartition(".")[0]], layer) for fqn, layer in small.items()})
    if isinstance(inputs, (Mapping, str)):
        raise TypeError(f"output_errors: inputs is {described(inputs)}; pass a list of dicts, such as [inputs] for one")
    for given in inputs:
        if not isinstance(given, Mapping):
            raise TypeError(
                f"output_errors: inputs has {described(given)}; pass the keyword arguments of each call as a dict, "
                "such as {'input_ids': ids}"
            )
        pairs.outputs, pairs.calls = {}, {}
        with torch.no_grad(), in_evaluation(model, reference), layers_are_called():
            with _hooked({fqn: layers[0] for fqn, layers in pairs.layers.items()}, pairs.before):
                reference(**fresh(given))
            with _hooked({fqn: layers[1] for fqn, layers in pairs.layers.items()}, pairs.after):
                model(**fresh(given))
        done()
    return [OutputError(fqn, decibels(sums.signal, sums.alone), decibels(sums.signal, sums.total))
            for fqn, sums in ((fqn, pairs.sums[fqn]) for fqn in small if fqn in pairs.sums)]  # fmt: skip
