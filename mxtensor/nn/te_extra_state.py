"""Extra states that TransformerEngine saved: bytes, empty or a pickle with the amax histories of delayed scaling.

Its row 0 is the pass that runs, its last row is the newest one; the scales of the next pass are computed already. Here
a step moves ``record``, the newest row, into the history, newest first, and computes the scales then.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.arguments import described
from ..numerics.formats import E4M3, E5M2

ATTENTION = "fused_attention._extra_state"
"""Where TransformerEngine 1.6 and 1.7 stored the state of quantized attention."""
NAMES = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")
FORWARD, BACKWARD = 3, 2
"""The tensors of each product: input, weight, result; gradient of the result, gradient of the input."""
ROUNDING = 1e-5
"""More than what computing a scale and its reciprocal changes."""


class _Inert:
    """An object of a class that is not called: what the pickle gives it."""

    def __new__(cls, *given: Any) -> _Inert:
        made = super().__new__(cls)
        made.given, made.fields = given, {}
        return made

    def __init__(self, *given: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.fields = state if isinstance(state, dict) else {}

    given: tuple[Any, ...]
    fields: dict[str, Any]


def _storage(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _tensor(storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *rest: Any) -> Tensor:
    whole = torch.empty(0, dtype=storage.dtype, device="cpu").set_(storage)
    return whole.as_strided(size, stride, offset)  # raises for a view beyond the storage


_CALLED = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch.storage._load_from_bytes": _storage,
    "collections.OrderedDict": dict,
}


class _Unpickler(pickle.Unpickler):
    """Makes tensors, and an ``_Inert`` for everything else: a pickle runs no code here."""

    def find_class(self, module: str, name: str) -> Any:
        return _CALLED.get(f"{module}.{name}", _Inert)


class _Recipe(NamedTuple):
    forward: float = E4M3.max
    backward: float = E5M2.max
    margin: float = 0


def product_states(label: str, data: Any) -> dict[str, Tensor]:
    """``"PRODUCT.TENSOR"`` -> tensor of delayed scaling from an extra state of TransformerEngine; nothing for other
    recipes. ``label`` names the module. Raises ValueError for other bytes."""
    if isinstance(data, Tensor) and data.dtype is torch.uint8 and data.numel() == 0:
        return {}
    try:
        state: dict[str, Any] = _Unpickler(io.BytesIO(data.detach().cpu().numpy().tobytes())).load() or {}
        found: dict[str, Any] = {name: state.get(name) for name in NAMES}
        if not any(isinstance(value, Tensor) for value in found.values()):
            return {}
        return _converted(_recipe(state.get("recipe")), *(found[name].to(torch.float32) for name in NAMES))
    except Exception as error:  # of damaged bytes anything may be raised
        raise ValueError(
            f"{label}: the extra state {described(data)} is neither of this package nor of TransformerEngine "
            f"({type(error).__name__}: {error!s:.120}); remove the keys that end in _extra_state to load the rest: "
            "amax histories then start anew"
        ) from error


def _recipe(recipe: Any) -> _Recipe:
    """What scales depend on; without a recipe that of TransformerEngine 1."""
    if recipe is None:
        return _Recipe()
    (maxima,) = recipe.fields["fp8_format"].given
    forward, backward = maxima.given
    return _Recipe(float(forward), float(backward), float(recipe.fields.get("margin", 0)))


def _converted(
    recipe: _Recipe, scale_fwd: Tensor, history_fwd: Tensor, scale_bwd: Tensor, history_bwd: Tensor
) -> dict[str, Tensor]:
    products = len(scale_fwd) // FORWARD
    # (..., products, 3): input, weight, gradient of the result. Other shapes raise here.
    scales, histories = (
        torch.cat([forward.view(*size, FORWARD)[..., :2], backward.view(*size, BACKWARD)[..., :1]], -1)
        for forward, backward, size in (
            (scale_fwd, scale_bwd, (products,)), (history_fwd, history_bwd, (len(history_fwd), products))
        )
    )  # fmt: skip
    maxima = torch.tensor([recipe.forward, recipe.forward, recipe.backward], device="cpu")
    out: dict[str, Tensor] = {}
    for i, scale in enumerate(scales):
        amax, history = maxima / scale, histories[:, i]
        rows = history[1:].flip(0)  # newest first
        # The scale may be that of the row that has just left the history: for one more pass it is the oldest row.
        left = amax / 2.0**recipe.margin
        largest = rows.amax(0) if len(rows) else torch.zeros_like(amax)
        known = (history.amax(0) > 0) | (amax != maxima)
        left = torch.where(known & (left > largest * (1 + ROUNDING)), left, 0.0)
        rows = torch.cat([rows, left.unsqueeze(0), torch.zeros_like(left).unsqueeze(0)])
        tensors = {"history": rows[1:], "record": rows[0], "amax": amax}
        out |= {f"{i}.{name}": value.clone() for name, value in tensors.items()}
    return out


def ignore_extra_state(module: nn.Module) -> None:
    """Let ``module``, which has no state here, load state dicts of TransformerEngine, whose module has one."""
    module.register_load_state_dict_pre_hook(_drop_extra_state)


def _drop_extra_state(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """A hook before a state dict is loaded: remove the state of TransformerEngine's module."""
    for name in ("_extra_state", ATTENTION):
        state_dict.pop(prefix + name, None)
