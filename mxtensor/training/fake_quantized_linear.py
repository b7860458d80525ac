"""A linear layer that computes with rounded values and trains the high-precision ones (quantization-aware training).

The gradient passes rounding as if it were the identity (straight-through estimator): with ``Q`` the rounding,
``y = Q(x) Q(w)^T``, ``dx = g Q(w)`` and ``dw = g^T Q(x)``.

Source: Bengio et al., "Estimating or Propagating Gradients Through Stochastic Neurons", 2013.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.compat import is_jit_tracing
from ..core.local import is_sharded, local_of, sharded_like
from ..core.nested import over_rows
from ..core.torch_autocast import autocast_dtype
from ..kernels.quantize.select import dequantize_operand, quantize_operand
from ..numerics.cast import Cast
from ..recipe.linear_recipe import LinearRecipe
from ..tensor.mxtensor import MXTensor
from .called_linear import CalledLinear


class _StraightThrough(torch.autograd.Function):
    """The shards of a DTensor are rounded one by one. Its gradient may have other placements, such as a partial sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cast: Cast, dtype: torch.dtype) -> Tensor:
        ctx.dtype = x.dtype
        y = dequantize_operand(quantize_operand(local_of(x), cast), dtype)
        # Dynamo of torch 2.11 gives no gradient to a result that is also a value before it, as after a cast to float32.
        return sharded_like(x, y.clone() if torch.compiler.is_compiling() else y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.to(ctx.dtype), None, None


def _check_shards(x: Any, cast: Cast) -> None:
    from ..tensor.quantize_shards import why_not_by_shards

    reason = why_not_by_shards(x, cast)
    if reason is not None:
        raise NotImplementedError(
            f"FakeQuantizer: the shards of a tensor {tuple(x.shape)}, {x.placements}, cannot be rounded one by one: "
            f"{reason}; use a format with a scale for each block, a mesh of fewer ranks, or leave the layer out by "
            "filter_fn"
        )


class FakeQuantizer(nn.Module):
    """Rounds a tensor (..., columns) to the values that a cast stores. Gradients pass unchanged.

    The values have the dtype of the tensor; inside ``torch.autocast`` they have its dtype, as products would cast them.
    Each rank rounds its shard of a DTensor. Raises NotImplementedError if a block or a scale has values of two ranks.
    """

    def __init__(self, cast: Cast) -> None:
        super().__init__()
        self.cast = cast
        self.enabled = True
        """Set it to False to compute in high precision for a while."""

    def forward(self, x: Tensor) -> Tensor:
        """The rounded values, of the shape of ``x``."""
        if not self.enabled:
            return x
        if not torch.compiler.is_compiling() and is_jit_tracing():
            raise NotImplementedError(
                "FakeQuantizer: torch.jit.trace cannot record the rounding; use torch.export or torch.compile"
            )
        if x.is_nested:
            return over_rows(self.forward, x)
        if is_sharded(x):
            _check_shards(x, self.cast)
        out: Tensor = _StraightThrough.apply(x, self.cast, autocast_dtype(x) or x.dtype)
        return out

    def extra_repr(self) -> str:
        """The format."""
        return str(self.cast.format)


class FakeQuantizedLinear(CalledLinear):
    """An nn.Linear between ``prepare`` and ``convert`` of quantization-aware training.

    It is the same module object as before, with the same parameters: references, hooks and optimizers stay valid.
    """

    activation_fake_quantizer: FakeQuantizer | None
    weight_fake_quantizer: FakeQuantizer

    @staticmethod
    def from_linear(layer: nn.Linear, recipe: LinearRecipe) -> FakeQuantizedLinear:
        """Make ``layer`` compute as ``recipe``, one for inference, says."""
        layer.__class__ = FakeQuantizedLinear
        assert isinstance(layer, FakeQuantizedLinear)
        layer._must_be_called()
        layer.weight_fake_quantizer = FakeQuantizer(recipe.stored)
        layer.activation_fake_quantizer = None if recipe.activation is None else FakeQuantizer(recipe.activation)
        return layer

    def to_linear(self) -> nn.Linear:
        """Make it an nn.Linear again, without rounding."""
        for name in ("weight_fake_quantizer", "activation_fake_quantizer"):
            if hasattr(self, name):
                delattr(self, name)
        return CalledLinear.to_linear(self)  # an interrupted step may call it with an nn.Linear

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Of this layer alone, only itself: torch's tensor parallelism splits every module that it finds so in a linear
        layer, and the fake quantizers have no weight. Those of a model have all modules."""
        found: Iterator[tuple[str, nn.Module]] = super().named_modules(memo, prefix, remove_duplicate)
        return found if memo is not None else iter([(prefix, self)])

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return self.product(input, self.weight, self.bias)

    def product(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``forward`` with this weight and bias: those of the layer, or the parts of a rank."""
        if isinstance(weight, MXTensor):  # a conversion was interrupted after this layer
            return F.linear(input, weight, bias)
        if self.activation_fake_quantizer is not None:  # torch.autocast casts the input of the converted layer first
            input = self.activation_fake_quantizer(input.to(autocast_dtype(input) or input.dtype))
        return F.linear(input, self.weight_fake_quantizer(weight), bias)
