"""The twins of a case of inference: float64 models with the casts of the case, by the definition in plain torch.

``right`` has the values of the codes as its weights, casts each input of a layer as the recipe says, and keys and
values as the cache does. What then differs from the case is rounding to its dtype, and what this rounding does: a value
that is close to the middle between two codes gets the other one, and the casts of later layers make more of it.

- ``rounded`` is ``right`` with inputs and results of all layers rounded to the dtype: how far a right result may be.
- ``unquantized`` is ``right`` without casts of inputs, keys and values: how large the error of these casts is. A result
  cannot be further from ``right`` if other values got the other code.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

import mxtensor as mx
from mxtensor.integrations.kv_storage import FIRST
from mxtensor.numerics.cast import Cast
from mxtensor.numerics.reference import decode, encode

STEPS = 4
"""Rows of logits of a sequence."""


def cast_values(x: Tensor, cast: Cast | None) -> Tensor:
    """The values of the codes of ``x``, by the definition, as one matrix; ``x`` itself without a cast."""
    if cast is None:
        return x
    return decode(encode(x.float().flatten(0, -2), cast), torch.float32).to(x.dtype).view(x.shape)


class CastCache(transformers.DynamicCache):
    """Keys and values with the casts of ``mx.KVCache``: all after the first tokens, keys without their mean."""

    def __init__(self, cast: Cast):
        super().__init__()
        self.cast, self.means = cast, {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        exact = max(0, FIRST - self.get_seq_length(layer_idx))
        mean = self.means.setdefault(layer_idx, key_states[:, :, 1:].mean(2, keepdim=True))
        keys = torch.cat((key_states[:, :, :exact], mean + cast_values(key_states[:, :, exact:] - mean, self.cast)), 2)
        values = torch.cat((value_states[:, :, :exact], cast_values(value_states[:, :, exact:], self.cast)), 2)
        return super().update(keys, values, layer_idx, *args, **kwargs)


def _before(cast: Cast | None, dtype: torch.dtype | None, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    x, *rest = args
    return cast_values(x if dtype is None else x.to(dtype).to(x.dtype), cast), *rest


def _after(dtype: torch.dtype, _module: nn.Module, _args: Any, out: Tensor) -> Tensor:
    return out.to(dtype).to(out.dtype)


def twin(exact: nn.Module, model: nn.Module, casts: bool = True, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy of ``exact`` (float64) with the weights of the quantized ``model``, ``casts`` of inputs, and rounding of
    inputs and results of its layers to ``dtype``."""
    made = copy.deepcopy(exact)
    for name, layer in made.named_modules():
        weight = getattr(model.get_submodule(name), "weight", None)
        cast = None
        if isinstance(weight, mx.MXTensor):
            layer.weight.copy_(weight.dequantize(torch.float64))
            cast = weight.recipe.activation if casts else None
        if isinstance(layer, nn.Linear):
            layer.register_forward_pre_hook(partial(_before, cast, dtype))
        if dtype is not None and isinstance(layer, (nn.Linear, nn.Embedding)):
            layer.register_forward_hook(partial(_after, dtype))
    return made


def rows(mine: Tensor, right: Tensor) -> Tensor:
    """The relative error of each row of logits (batch, steps, vocabulary), by norm: (batch * steps)."""
    assert mine.shape == right.shape
    mine, right = mine.double().cpu(), right.double().cpu()
    return ((mine - right).norm(dim=-1) / right.norm(dim=-1)).flatten()


class Bounds(NamedTuple):
    """How far the rows of a batch may be from ``right``: half of them, and each."""

    half: float
    each: float


ROUNDED = 3.0
"""Layers are not all that rounds: norms, products with positions, activation functions and sums do, too."""
CODES = 1.75
"""Beside the largest error of casts: of two inputs whose values have independent codes it is 1.41 times as large."""
LEAST = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
"""What sums may add where rounding of layers changes no code."""


def bounds(right: Tensor, rounded: Tensor, unquantized: Tensor, dtype: str) -> Bounds:
    """See the top of this file."""
    noise, casts = rows(rounded, right), rows(unquantized, right)
    half, each = ROUNDED * noise.median().item() + LEAST[dtype], ROUNDED * noise.max().item() + LEAST[dtype]
    return Bounds(half, max(each, CODES * casts.max().item()))


FEW = 4
"""Sequences: a code that differs in the prompt is in all rows of its sequence, and in half of the rows of few."""


def check_rows(found: Tensor, allowed: Bounds) -> tuple[float, float]:
    """Raise AssertionError if the errors ``found`` of rows are larger than ``allowed``. Returns their shares of it."""
    most, half = found.max().item(), found.median().item() if len(found) >= FEW * STEPS else 0.0
    assert half <= allowed.half, f"half of the rows are {half:.3g} and more from the twin, allowed {allowed.half:.3g}"
    assert most <= allowed.each, f"a row is {most:.3g} from the twin, allowed {allowed.each:.3g}"
    return half / allowed.half, most / allowed.each
