"""Recipes of float8 with float32 scales: one scale per tensor (current or delayed), or one per block of 128."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..core.arguments import FLAG, FUNCTION, check, described
from ..numerics.cast import EPSILON, Cast
from .base import BackwardOptions, Format, Recipe, check_choice, check_no_attention
from .linear_recipe import Delayed, LinearRecipe, TensorCasts

__all__ = ["DelayedScaling", "Float8BlockScaling", "Float8CurrentScaling"]


@dataclass(frozen=True)
class QParams:
    """How the float32 scales of one tensor are computed (TransformerEngine's class).

    ``power_2_scale``: powers of two only. ``amax_epsilon``: an amax below it counts as this number, also that of a
    block of zeros. Raises TypeError or ValueError for other values.
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        check("QParams", "power_2_scale", self.power_2_scale, FLAG)
        check("QParams", "amax_epsilon", self.amax_epsilon, EPSILON)


def _casts(recipe: Recipe, name: str, format: str, power_2_scale: bool) -> TensorCasts:
    """The casts to ``format`` by the QParams of the field ``name``, or with ``power_2_scale`` if that is None."""
    params = getattr(recipe, name)
    if params is not None and not isinstance(params, QParams):
        raise ValueError(
            f"{type(recipe).__name__}: {name} is {described(params)}; use mxtensor.recipe.QParams(...), or None"
        )
    params = QParams(power_2_scale) if params is None else params
    suffix = "_pow2" if params.power_2_scale else ""
    return TensorCasts.of(Cast.of(f"{format}{suffix}", amax_epsilon=params.amax_epsilon))


@dataclass(repr=False)
class Float8CurrentScaling(BackwardOptions):
    """Float8 with one scale per tensor, computed from the tensor's own amax.

    ``fp8_quant_*``: the QParams of inputs, weights and gradients; None takes ``use_power_2_scales`` and no floor.
    """

    fp8_format: Format = Format.HYBRID
    use_power_2_scales: bool = False
    fp8_quant_fwd_inp: QParams | None = None
    fp8_quant_fwd_weight: QParams | None = None
    fp8_quant_bwd_grad: QParams | None = None
    fp8_dpa: bool = False
    fp8_mha: bool = False
    _kinds = frozenset({"float8_current_scaling"})
    _shown = (("fp8_format", "format"), ("use_power_2_scales", "use_power_2_scales"))

    def _linear_recipe(self) -> LinearRecipe:
        check_no_attention(self)
        check_choice(self, "fp8_format", (Format.HYBRID, Format.E4M3, Format.E5M2))
        forward, backward = (f"float8_{e}_tensor" for e in self.fp8_format.value)
        return self.with_options(
            _casts(self, "fp8_quant_fwd_inp", forward, self.use_power_2_scales),
            _casts(self, "fp8_quant_fwd_weight", forward, self.use_power_2_scales),
            _casts(self, "fp8_quant_bwd_grad", backward, self.use_power_2_scales),
        )


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

    The ``*_block_scaling_dim`` fields: 1 for vectors along the contraction, 2 for tiles. ``fp8_quant_*``: the QParams
    of inputs, weights and gradients; None takes ``use_f32_scales`` and no floor.
    """

    fp8_format: Format = Format.E4M3
    use_f32_scales: bool = False
    """Allow any float32 as a scale; False: powers of two."""
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_quant_fwd_inp: QParams | None = None
    fp8_quant_fwd_weight: QParams | None = None
    fp8_quant_bwd_grad: QParams | None = None
    fp8_dpa: bool = False
    fp8_mha: bool = False
    _kinds = frozenset({"float8_block_scaling", "block_scaling"})
    _shown = (("fp8_format", "format"), ("use_f32_scales", "use_f32_scales"))

    def _linear_recipe(self) -> LinearRecipe:
        check_no_attention(self)
        check_choice(self, "fp8_format", (Format.E4M3, Format.HYBRID, Format.E5M2))

        def casts(element: str, dim: str, params: str) -> TensorCasts:
            check_choice(self, dim, (1, 2))
            block = "1x128" if getattr(self, dim) == 1 else "128x128"
            return _casts(self, params, f"float8_{element}_{block}", not self.use_f32_scales)

        forward, backward = self.fp8_format.value
        return self.with_options(
            casts(forward, "x_block_scaling_dim", "fp8_quant_fwd_inp"),
            casts(forward, "w_block_scaling_dim", "fp8_quant_fwd_weight"),
            casts(backward, "grad_block_scaling_dim", "fp8_quant_bwd_grad"),
        )
