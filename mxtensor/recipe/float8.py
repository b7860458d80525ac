"""Recipes of float8 with float32 scales: one scale per tensor (current or delayed), or one per block of 128."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..core.arguments import FUNCTION
from .base import BackwardOptions, Format, check_choice, check_no_attention
from .linear_recipe import Delayed, LinearRecipe, TensorCasts

__all__ = ["DelayedScaling", "Float8BlockScaling", "Float8CurrentScaling"]


@dataclass(repr=False)
class Float8CurrentScaling(BackwardOptions):
    """Float8 with one scale per tensor, computed from the tensor's own amax."""

    fp8_format: Format = Format.HYBRID
    use_power_2_scales: bool = False
    fp8_dpa: bool = False
    fp8_mha: bool = False
    _kinds = frozenset({"float8_current_scaling"})
    _shown = (("fp8_format", "format"), ("use_power_2_scales", "use_power_2_scales"))

    def _linear_recipe(self) -> LinearRecipe:
        check_no_attention(self)
        check_choice(self, "fp8_format", (Format.HYBRID, Format.E4M3, Format.E5M2))
        suffix = "_pow2" if self.use_power_2_scales else ""
        forward, backward = (f"float8_{e}_tensor{suffix}" for e in self.fp8_format.value)
        return self.with_options(TensorCasts.of(forward), TensorCasts.of(forward), TensorCasts.of(backward))


@dataclass(repr=False)
class DelayedScaling(BackwardOptions):
    """Float8 with one scale per tensor, from the amax of earlier steps: one pass over each tensor, the fastest recipe.

    The scale of the first step is 1, as in TransformerEngine.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[Tensor], Tensor] = "max"
    """``max``, ``most_recent``, or a function from the history (newest first) to an amax."""
    scaling_factor_compute_algo: Callable[..., Tensor] | None = None
    """(amax, scale, fp8_max, recipe) -> the scale that maps amax to fp8_max."""
    reduce_amax: bool = True
    """Whether ``autocast(amax_reduction_group=...)`` takes the largest amax of the group."""
    fp8_dpa: bool = False
    fp8_mha: bool = False
    _kinds = frozenset({"delayed"})
    _shown = (
        ("margin", "margin"), ("fp8_format", "format"), ("amax_history_len", "amax_history_len"),
        ("reduce_amax", "reduce_amax"), ("fp8_dpa", "fp8_dpa"), ("fp8_mha", "fp8_mha"),
    )  # fmt: skip

    def _linear_recipe(self) -> LinearRecipe:
        check_no_attention(self)
        check_choice(self, "fp8_format", (Format.HYBRID, Format.E4M3, Format.E5M2))
        if not FUNCTION.accepts(self.amax_compute_algo):
            check_choice(self, "amax_compute_algo", ("max", "most_recent"))
        if not isinstance(self.amax_history_len, int) or self.amax_history_len < 1:
            raise ValueError(
                f"DelayedScaling: amax_history_len is {self.amax_history_len!r}; use an integer of 1 or more"
            )
        if not isinstance(self.margin, (int, float)):
            raise ValueError(f"DelayedScaling: margin is {self.margin!r}; use a number, the exponent of a power of two")
        if not (self.scaling_factor_compute_algo is None or FUNCTION.accepts(self.scaling_factor_compute_algo)):
            raise ValueError(
                f"DelayedScaling: scaling_factor_compute_algo is {self.scaling_factor_compute_algo!r}; use a function "
                "or None"
            )
        forward, backward = (f"float8_{e}_tensor" for e in self.fp8_format.value)
        delayed = Delayed(
            self.margin,
            self.amax_history_len,
            self.amax_compute_algo,
            self.scaling_factor_compute_algo,
            self.reduce_amax,
        )
        return self.with_options(TensorCasts.of(forward), TensorCasts.of(forward), TensorCasts.of(backward), delayed)


@dataclass(repr=False)
class Float8BlockScaling(BackwardOptions):
    """Float8 with float32 scales: 1x128 vectors of inputs and gradients, 128x128 tiles of weights (as in DeepSeek-V3).

    The ``*_block_scaling_dim`` fields: 1 for vectors along the contraction, 2 for tiles.
    """

    fp8_format: Format = Format.E4M3
    use_f32_scales: bool = False
    """Allow any float32 as a scale; False: powers of two."""
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_dpa: bool = False
    fp8_mha: bool = False
    _kinds = frozenset({"float8_block_scaling", "block_scaling"})
    _shown = (("fp8_format", "format"), ("use_f32_scales", "use_f32_scales"))

    def _linear_recipe(self) -> LinearRecipe:
        check_no_attention(self)
        check_choice(self, "fp8_format", (Format.E4M3, Format.HYBRID, Format.E5M2))
        suffix = "" if self.use_f32_scales else "_pow2"

        def casts(element: str, name: str) -> TensorCasts:
            check_choice(self, name, (1, 2))
            block = "1x128" if getattr(self, name) == 1 else "128x128"
            return TensorCasts.of(f"float8_{element}_{block}{suffix}")

        forward, backward = self.fp8_format.value
        return self.with_options(
            casts(forward, "x_block_scaling_dim"),
            casts(forward, "w_block_scaling_dim"),
            casts(backward, "grad_block_scaling_dim"),
        )
