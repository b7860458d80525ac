"""StatefulModule: the quantizers and the product states of a module, and their place in its state dict."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..recipe import Recipe
from ..recipe.linear_recipe import LinearRecipe
from ..te.quantizers import quantizers_of
from .fp8_meta import Fp8Meta
from .parameters import ParameterModule
from .product_state import ProductState, share_loaded
from .te_extra_state import product_states

EXTRA_STATE = "_extra_state"
"""torch's key for the extra state of a module."""


class StatefulModule(ParameterModule):
    """A module with one ProductState per product.

    ``quantizers["scaling_fwd"]`` has the quantizers of input and weight of every product, ``quantizers["scaling_bwd"]``
    those of the gradients; the first forward pass under a recipe makes them. With delayed scaling each product has its
    own histories, which the state dict contains.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name
        self.quantizers: dict[str, list[Any]] = {"scaling_fwd": [], "scaling_bwd": []}
        self._made_for: tuple[str, LinearRecipe, torch.device, list[Any]] | None = None
        """Recipe class, casts, device and delayed states that the quantizers were made for."""
        self._products: list[ProductState] = []
        self._last_pass: tuple[Recipe, Any, int] | None = None
        """Recipe, group of autocast and number of products of the last forward pass under a recipe, in eager code."""

    @property
    def label(self) -> str:
        """The name of this module in messages."""
        return self.name or type(self).__name__

    @property
    def fp8_meta(self) -> Fp8Meta:
        """TransformerEngine's dictionary of recipe and scaling state, to read (:class:`Fp8Meta`)."""
        return Fp8Meta(self)

    def _state(self, index: int) -> ProductState:
        """The state of product ``index``."""
        while len(self._products) <= index:
            self._products.append(ProductState())
        return self._products[index]

    def _update(
        self, recipe: Recipe, linear_recipe: LinearRecipe, products: int, device: torch.device, group: Any
    ) -> None:
        """Make the quantizers and delayed states that the recipe needs, if they are not the present ones."""
        self._last_pass = recipe, group, products
        states = [self._state(index) for index in range(products)]
        share_loaded(self._products, products)
        for state in states:
            state.init_state(linear_recipe, device)
        before, now = self._made_for, (type(recipe).__name__, linear_recipe, device, [s.delayed for s in states])
        if before == now:
            return
        made = [quantizers_of(recipe, device, state.delayed) for state in states]
        self.quantizers = {key: [q for lists in made for q in lists[key]] for key in ("scaling_fwd", "scaling_bwd")}
        self._made_for = now
        if before is not None and before[0] != now[0]:
            warnings.warn(
                f"Recipe type changed from {before[0]} to {now[0]} for {self.label}: its quantizers are replaced and "
                "the amax histories of delayed scaling are lost",
                UserWarning,
                stacklevel=4,
            )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        out = super()._apply(fn, recurse)
        device = next(self.parameters()).device
        for state in self._products:
            if state.delayed is not None and state.delayed.amax.device != device:
                state.move(device)
        return out

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no last pass: its process group cannot be copied."""
        return self.__dict__ | {"_last_pass": None}

    # ---------------------------------------------------------------------------------------- state dict

    def get_extra_state(self) -> dict[str, Tensor] | None:
        """The delayed states as ``"PRODUCT.TENSOR"`` -> tensor; None without delayed scaling."""
        saved = {
            f"{index}.{name}": value
            for index, state in enumerate(self._products)
            for name, value in (state.delayed.state_dict() if state.delayed is not None else state.loaded or {}).items()
        }
        return saved or None

    def set_extra_state(self, state: dict[str, Tensor] | Tensor | None) -> None:
        """Store the delayed states of a checkpoint, also of TransformerEngine, for the next forward pass.

        Raises ValueError for a state of another module."""
        if state is None:
            return
        for key, value in (state if isinstance(state, dict) else product_states(self.label, state)).items():
            index, _, name = key.partition(".")
            if not re.fullmatch(r"[0-9]{1,3}", index) or not isinstance(value, Tensor):
                raise ValueError(
                    f"{self.label} has no extra state {key!r:.80} of {type(value).__name__}; its keys are "
                    "PRODUCT.TENSOR, its values tensors"
                )
            product = self._state(int(index))
            product.delayed, product.loaded = None, (product.loaded or {}) | {name: value.clone()}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if destination[prefix + EXTRA_STATE] is None:
            del destination[prefix + EXTRA_STATE]

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """As in torch, but a state dict without delayed states, such as that of torch's own module, is complete."""
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if prefix + EXTRA_STATE in missing_keys:
            missing_keys.remove(prefix + EXTRA_STATE)
