"""TransformerEngine's quantizers, by its names and arguments.

Each gives the same bits as ``mxtensor.quantize`` with its format. All except ``Float8Quantizer`` are stateless. Any
shape can be quantized without padding: the last block may be shorter.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.arguments import checked, described
from ..kernels.gemm.spec import Form
from ..kernels.quantize.select_pair import cast_pair
from ..numerics.cast import EPSILON, Cast
from ..numerics.choices import FourOverSix
from ..numerics.formats import FORMATS, Format, Orientation, Rounding, ScaleCalculationMode
from ..numerics.operand import Operand
from ..numerics.reference import tensor_amax
from ..recipe import Recipe
from ..recipe.block_scaling import RANDOM_SIGNS
from ..recipe.linear_recipe import LinearRecipe, TensorCasts
from ..training.delayed_scaling import DelayedState
from .quantizer_base import FP8, DType, Quantizer, check_no_reduction

# ---------------------------------------------------------------------------------------------- stateless ones


class MXQuantizer(Quantizer):
    """Any format of this package: ``MXQuantizer("mxfp6_e2m3")``. Arguments as in :func:`mxtensor.quantize`."""

    @checked()
    def __init__(
        self,
        format: Format | str | torch.dtype,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        scaling: ScaleCalculationMode | str = "rceil",
        rounding: Rounding | str = "nearest",
        seed: int | None = None,
    ) -> None:
        super().__init__(Cast.of(format, scaling, rounding, seed), rowwise, columnwise)

    def _arguments(self) -> dict[str, Any]:
        return {"format": self.cast.format.name}


class MXFP8Quantizer(Quantizer):
    """MXFP8: 32 values share a power-of-two scale (RCEIL). ``with_2d_quantization``: a 32x32 tile shares one."""

    formats = tuple(FORMATS[f"mxfp8_{e}"].with_block(block) for e in ("e4m3", "e5m2") for block in (32, (32, 32)))

    @checked()
    def __init__(
        self,
        fp8_dtype: DType | torch.dtype | str = DType.kFloat8E4M3,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_2d_quantization: bool = False,
    ) -> None:
        row = FORMATS[f"mxfp8_{DType.of(fp8_dtype, FP8).value}"]
        super().__init__(Cast(row.with_block((32, 32)) if with_2d_quantization else row), rowwise, columnwise)

    def _arguments(self) -> dict[str, Any]:
        return super()._arguments() | ({"with_2d_quantization": True} if self.cast.format.square else {})


class NVFP4Quantizer(Quantizer):
    """NVFP4: 16 values share an E4M3 scale, the tensor has a float32 global scale.

    ``with_rht``: a random Hadamard transform with these ``signs`` rotates the columnwise copy. Only products of two
    rotated copies, ``general_gemm(..., layout="NT")``, use it, and results of torch ops do not have it.
    ``with_random_sign_mask=False``: the transform without signs, the same as ``signs=0``.
    ``with_2d_quantization``: a 16x16 tile shares a scale. ``stochastic_rounding``: for gradients.
    ``nvfp4_use_4over6``: the amax of each block becomes 6 or 4, by the smaller error, ``nvfp4_4over6_err_mode`` MAE or
    MSE; ``nvfp4_e4m3_max``, 448 or 256, is then the largest block scale for 6. ``row_scaled_nvfp4``: each row has a
    global scale, for a ``CustomRecipe(qfactory=...)``; such a quantizer makes no tensors. ``with_post_rht_amax`` has no
    effect: the amax of the rotated copy is always that of the rotated values.
    """

    formats = tuple(FORMATS["nvfp4"].with_block(block) for block in (16, (16, 16)))
    fp4_dtype = Quantizer.dtype

    @checked()
    def __init__(
        self,
        fp4_dtype: DType | torch.dtype | str = DType.kFloat4E2M1,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_rht: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        nvfp4_4over6_err_mode: str = "MAE",
        with_random_sign_mask: bool = True,
        signs: int = RANDOM_SIGNS,
        with_post_rht_amax: bool | None = None,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
    ) -> None:
        check_no_reduction("NVFP4Quantizer", with_amax_reduction, amax_reduction_group)
        DType.of(fp4_dtype, (DType.kFloat4E2M1,))
        if with_rht and with_2d_quantization:
            raise ValueError(
                "NVFP4Quantizer: with_2d_quantization has one copy for both orientations, with_rht rotates one of two; "
                "use only one of them"
            )
        if not with_random_sign_mask and signs not in (0, RANDOM_SIGNS):
            raise ValueError(
                f"NVFP4Quantizer: with_random_sign_mask=False is signs=0, and signs is {signs}; pass only one of them"
            )
        signs = signs if with_random_sign_mask else 0
        for name, given in (("row_scaled_nvfp4", row_scaled_nvfp4), ("nvfp4_use_4over6", nvfp4_use_4over6)):
            others = {"with_rht": with_rht, "stochastic_rounding": stochastic_rounding}
            if name == "row_scaled_nvfp4":
                others["with_2d_quantization"] = with_2d_quantization
            for other, wanted in others.items():
                if given and wanted:
                    raise ValueError(f"NVFP4Quantizer: {name} and {other} do not go together; use only one of them")
        row = FORMATS["nvfp4"].with_block((16, 16) if with_2d_quantization else 16)
        row = row.with_row_scales() if row_scaled_nvfp4 else row
        rounding = Rounding.STOCHASTIC if stochastic_rounding else Rounding.NEAREST
        if nvfp4_e4m3_max not in (448, 256):
            raise ValueError(f"NVFP4Quantizer: nvfp4_e4m3_max is {nvfp4_e4m3_max}; choose 448 or 256")
        if nvfp4_4over6_err_mode.upper() not in ("MAE", "MSE"):
            raise ValueError(f"NVFP4Quantizer: nvfp4_4over6_err_mode is {nvfp4_4over6_err_mode!r}; choose MAE or MSE")
        word = nvfp4_4over6_err_mode.lower() + ("_448" if nvfp4_e4m3_max == 448 else "")
        four = FourOverSix.of(word) if nvfp4_use_4over6 else None
        cast = Cast(row, rounding=rounding, four_over_six=four)
        super().__init__(cast, rowwise, columnwise, signs if with_rht else None)

    def _arguments(self) -> dict[str, Any]:
        stochastic = self.cast.rounding is Rounding.STOCHASTIC
        options = {"with_rht": self.signs is not None, "with_2d_quantization": self.cast.format.square}
        signs: dict[str, Any] = {} if self.signs in (None, RANDOM_SIGNS) else {"signs": self.signs}
        if self.cast.format.row_scaled:
            signs["row_scaled_nvfp4"] = True
        return {"fp4_dtype": self.dtype} | options | {"stochastic_rounding": stochastic} | signs


class Float8CurrentScalingQuantizer(Quantizer):
    """Float8 with one float32 scale per tensor, from its own amax. ``force_pow_2_scales``: powers of two only.

    ``amax_epsilon``: a smaller amax counts as this number, also that of zeros.
    """

    formats = tuple(FORMATS[f"float8_{e}_tensor{s}"] for e in ("e4m3", "e5m2") for s in ("", "_pow2"))

    @checked(amax_epsilon=EPSILON)
    def __init__(
        self,
        fp8_dtype: DType | torch.dtype | str = DType.kFloat8E4M3,
        device: torch.device | str | None = None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
        use_existing_amax: bool = False,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
    ) -> None:
        check_no_reduction("Float8CurrentScalingQuantizer", with_amax_reduction, amax_reduction_group)
        if use_existing_amax:
            raise NotImplementedError(
                "Float8CurrentScalingQuantizer: use_existing_amax=True is not available: the amax is that of the "
                "values; use Float8Quantizer, whose scale you set"
            )
        row = FORMATS[f"float8_{DType.of(fp8_dtype, FP8).value}_tensor{'_pow2' if force_pow_2_scales else ''}"]
        super().__init__(Cast(row, amax_epsilon=amax_epsilon or 0), rowwise, columnwise)
        self.device = None if device is None else torch.device(device)

    def _arguments(self) -> dict[str, Any]:
        return super()._arguments() | {"force_pow_2_scales": self.cast.format.scale.significant_bits == 1}


class Float8BlockQuantizer(Quantizer):
    """Float8 with a float32 scale per 128x128 tile (``block_scaling_dim=2``) or per 128 values of a row (1).

    ``amax_epsilon``: a smaller amax counts as this number, also that of a block of zeros.
    """

    formats = tuple(
        FORMATS[f"float8_{e}_{b}{s}"] for e in ("e4m3", "e5m2") for b in ("1x128", "128x128") for s in ("", "_pow2")
    )

    @checked(amax_epsilon=EPSILON)
    def __init__(
        self,
        fp8_dtype: DType | torch.dtype | str = DType.kFloat8E4M3,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        if block_scaling_dim not in (1, 2):
            raise ValueError(f"Float8BlockQuantizer: block_scaling_dim is {described(block_scaling_dim)}; use 1 or 2")
        block = "1x128" if block_scaling_dim == 1 else "128x128"
        row = FORMATS[f"float8_{DType.of(fp8_dtype, FP8).value}_{block}{'_pow2' if force_pow_2_scales else ''}"]
        super().__init__(Cast(row, amax_epsilon=amax_epsilon or 0), rowwise, columnwise)

    def _arguments(self) -> dict[str, Any]:
        return super()._arguments() | {
            "force_pow_2_scales": self.cast.format.scale.significant_bits == 1,
            "block_scaling_dim": 2 if self.cast.format.square else 1,
        }


# ---------------------------------------------------------------------------------------------- delayed scaling


class Float8Quantizer(Quantizer):
    """Float8 with one given scale per tensor: values are multiplied by ``scale`` and saturate.

    ``scale`` and ``amax``: tensors with one float32 each. Each call reads ``scale`` and sets ``amax`` to the maximum of
    itself and the amax of the values. Raises TypeError or ValueError for other tensors.
    """

    scale: Tensor
    amax: Tensor

    @checked()
    def __init__(
        self,
        scale: Tensor,
        amax: Tensor,
        fp8_dtype: DType | torch.dtype | str = DType.kFloat8E4M3,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        super().__init__(Cast(FORMATS[f"float8_{DType.of(fp8_dtype, FP8).value}_tensor"]), rowwise, columnwise)
        for name, value in (("scale", scale), ("amax", amax)):
            if not isinstance(value, Tensor) or value.dtype is not torch.float32:
                raise TypeError(f"Float8Quantizer: {name} must be a float32 tensor, got {described(value)}")
            if value.numel() != 1:
                raise ValueError(f"Float8Quantizer: {name} must be one value, got {tuple(value.shape)}")
        self.scale, self.amax, self.device = scale.detach(), amax.detach(), scale.device

    def _operands(self, x: Tensor, orientation: Orientation) -> tuple[Operand | None, Operand | None]:
        if x.device != self.scale.device:
            raise ValueError(f"Float8Quantizer: scale is on {self.scale.device}, the values on {x.device}")
        if orientation is Orientation.COLUMNWISE:
            return None, self._operands(x.transpose(-1, -2), Orientation.ROWWISE)[0]
        operand = self._under_scale(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]))
        shape = tuple(x.shape)
        scale = operand.scale.reshape(self.cast.format.scale_shape(shape))
        return replace(operand, data=operand.data.view(shape), scale=scale, shape=shape), None

    def _under_scale(self, x: Tensor) -> Operand:
        """The operand of a matrix; its stored scale is 1 / ``scale``."""
        self.amax.copy_(torch.maximum(self.amax, tensor_amax(x).reshape(self.amax.shape)))
        largest = self.cast.format.element.max
        x, bound = x.to(torch.float32), torch.finfo(torch.float32).max
        scaled = torch.where(x.isfinite(), (x * self.scale.reshape(())).clamp(-bound, bound), float("nan"))
        full = torch.full((), largest, dtype=torch.float32, device=x.device)  # the amax for which the scale is 1
        operand = cast_pair(scaled, self.cast, Form.CODES, None, torch.bfloat16, full)[0]
        assert isinstance(operand, Operand)
        return replace(operand, scale=self.scale.reciprocal().expand_as(operand.scale).clone())

    def _arguments(self) -> dict[str, Any]:
        return {"scale": self.scale.tolist(), "amax": self.amax.tolist()} | super()._arguments()


class _LayerQuantizer(Float8Quantizer):
    """A Float8Quantizer over the amax histories of a layer: it casts and records as the layer's own products do."""

    def __init__(self, cast: Cast, state: DelayedState, index: int, rowwise: bool, columnwise: bool) -> None:
        Quantizer.__init__(self, cast, rowwise, columnwise)
        self.state, self.index, self.device = state, index, state.record.device

    @property
    def scale(self) -> Tensor:  # type: ignore[override]
        """The scale of this step: a new tensor, since the state makes a new amax at each step."""
        return self.state.scale[self.index]

    @property
    def amax(self) -> Tensor:  # type: ignore[override]
        """A view of the state's record."""
        return self.state.record[self.index]

    def _under_scale(self, x: Tensor) -> Operand:
        mine = self.state.amax[self.index], self.amax
        operand = cast_pair(x, self.cast, Form.CODES, None, torch.bfloat16, *mine)[0]
        assert isinstance(operand, Operand)
        return operand

    def __repr__(self) -> str:
        return super().__repr__().replace(type(self).__name__, Float8Quantizer.__name__)


# ---------------------------------------------------------------------------------------------- for a recipe

_STATELESS = (MXFP8Quantizer, NVFP4Quantizer, Float8CurrentScalingQuantizer, Float8BlockQuantizer)
QUANTIZER_OF: dict[Format, type[Quantizer]] = {row: kind for kind in _STATELESS for row in kind.formats}
"""Format -> its class; MXQuantizer takes all others."""


def quantizers_of(
    recipe: Recipe | LinearRecipe, device: torch.device | str, state: DelayedState | None = None
) -> dict[str, list[Quantizer | None]]:
    """The quantizers of a linear layer: ``{"scaling_fwd": [input, weight], "scaling_bwd": [grad]}``.

    Each makes the copies that the layer's products need; None for a tensor that stays in high precision. If the two
    copies have different casts, the quantizer makes the rowwise one. Delayed scaling: Float8Quantizers over ``state``,
    or over a new state with scale 1 and amax 0.
    """
    linear_recipe, device = recipe if isinstance(recipe, LinearRecipe) else recipe.linear_recipe(), torch.device(device)
    if linear_recipe.delayed is not None and state is None:
        state = DelayedState(linear_recipe, device)
    made = [
        _of_casts(casts, index, state, device)
        for index, casts in enumerate((linear_recipe.input, linear_recipe.weight, linear_recipe.grad))
    ]
    return {"scaling_fwd": made[:2], "scaling_bwd": made[2:]}


def _of_casts(casts: TensorCasts, index: int, state: DelayedState | None, device: torch.device) -> Quantizer | None:
    rowwise = casts.rowwise is not None
    columnwise = casts.columnwise is not None and casts.columnwise == (casts.rowwise or casts.columnwise)
    cast = casts.rowwise or casts.columnwise
    if cast is None:
        return None
    if state is not None:
        return _LayerQuantizer(cast, state, index, rowwise, columnwise)
    kind = NVFP4Quantizer if cast.format.row_scaled else QUANTIZER_OF.get(cast.format, MXQuantizer)
    made = kind.of(cast, rowwise, columnwise, casts.signs)
    made.device = device
    return made
