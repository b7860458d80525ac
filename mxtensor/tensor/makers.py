"""The ways to make an MXTensor: of values, by a cast, and of codes and scales that exist already."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from ..core.arguments import TENSOR, check, instance
from ..kernels.quantize.choose_pair import quantize_operands
from ..numerics.cast import Cast
from ..numerics.formats import Format, Orientation, ScaleCalculationMode, get_format, get_mx_format
from ..numerics.validate import check_components, check_outer_dtype
from ..recipe.linear_recipe import LinearRecipe
from .dequantized_view import DequantizedView

M = TypeVar("M", bound="Makers")


DTYPE = instance(torch.dtype, "a torch.dtype")


class Makers(Tensor):
    """The class methods of MXTensor that make one."""

    @classmethod
    def to_mx(
        cls: type[M],
        data_hp: Tensor,
        elem_dtype: Format | str | torch.dtype = torch.float8_e4m3fn,
        block_size: int = 32,
        scaling_mode: ScaleCalculationMode | str = ScaleCalculationMode.FLOOR,
    ) -> M:
        """Quantize along the last dimension, with torchao's argument names and defaults.

        Scales are FLOOR unless ``scaling_mode`` says otherwise; those of :func:`mxtensor.quantize` are RCEIL.
        ``block_size`` applies to MX formats only.
        """
        check("to_mx", "data_hp", data_hp, TENSOR)
        cast = Cast.of(get_mx_format(elem_dtype, block_size), scaling_mode)
        return cls._quantized(data_hp, LinearRecipe.inference(cast))

    @classmethod
    def from_components(
        cls: type[M],
        data: Tensor,
        scale: Tensor,
        format: Format | str | torch.dtype,
        shape: tuple[int, ...] | None = None,
        dtype: torch.dtype = torch.bfloat16,
        global_scale: Tensor | None = None,
    ) -> M:
        """A rowwise MXTensor of existing codes and scales; nothing is copied.

        ``data``: codes, in the element's dtype or uint8; ``scale``: uint8 (or its e8m0/e4m3 view) or float32;
        ``shape``: the logical shape, needed only if the last dimension of packed data does not determine it;
        ``dtype``: that of the values; ``global_scale``: one float32, for formats that have one. Raises ValueError or
        TypeError that names what was expected.
        """
        fmt = get_format(format)
        operand = check_components(data, scale, fmt, shape, global_scale)
        check_outer_dtype(dtype)
        made: Any = cls
        return made(operand, None, LinearRecipe.inference(Cast(fmt)), dtype, checked=True)  # type: ignore[no-any-return]

    @classmethod
    def _quantized(cls: type[M], x: Any, recipe: LinearRecipe, orientation: Orientation = Orientation.ROWWISE) -> M:
        """``x`` quantized by the weight cast of ``recipe``, which the result carries; see :func:`mxtensor.quantize`."""
        if type(x) is not Tensor and isinstance(x, (Makers, DequantizedView)):
            x = x.dequantize()
        x = x.detach()
        if x.dim() < 2 and orientation is not Orientation.ROWWISE:
            raise ValueError(f"orientation {orientation.label!r} needs two dimensions, this tensor has {x.dim()}")
        if recipe.stored.format.square and x.dim() > 1:
            orientation = Orientation.ROWWISE  # one copy serves both
        operands = quantize_operands(x, recipe.stored, orientation)
        made: Any = cls
        return made(*operands, recipe, x.dtype, tuple(x.shape), checked=True)  # type: ignore[no-any-return]

    def with_dtype(self, dtype: torch.dtype) -> Tensor:
        """The same codes and scales with another outer dtype, in which products compute and ``dequantize()`` rounds.

        ``to(dtype)`` gives plain values instead. This tensor itself if the dtype is its own; plain values in a dtype
        that an MXTensor cannot have, such as an integer. Raises TypeError for other arguments than a dtype.
        """
        check("with_dtype", "dtype", dtype, DTYPE)
        return self if dtype is self.dtype else torch.ops.aten._to_copy.default(self, dtype=dtype)
