"""Linear layers between ``prepare`` and ``convert``, and those with a static scale of their inputs.

``FakeQuantizedLinear`` trains with rounded values (quantization-aware training), ``ObservedLinear`` remembers the
largest magnitude of its inputs, ``StaticInputLinear`` divides them by a scale that was chosen before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.autograd import autocast_dtype, without_autocast
from ..core.compat import is_jit_tracing, is_sharded, local_of, sharded_like
from ..core.shapes import as_matrix, over_rows, rows_of
from ..kernels.gemm.select import gemm
from ..kernels.gemm.spec import GemmArgs
from ..kernels.operands import Unquantized
from ..kernels.quantize.choose_cast import dequantize_operand, quantize_operand, quantize_rows
from ..numerics.cast import Cast
from ..numerics.formats import FORMATS, Rounding
from ..ops.matmul import check_product
from ..recipe.linear_recipe import LinearRecipe
from ..tensor.mxtensor import MXTensor


class CalledLinear(nn.Linear):
    """An nn.Linear with a ``forward`` of its own.

    In evaluation without gradients ``nn.TransformerEncoderLayer`` gives the weights of its layers to one fused op, and
    calls no layer. It calls them if one of them has a hook.
    """

    def _must_be_called(self) -> None:
        """Call it once after the class was changed to this one."""
        if not hasattr(self, "_called"):
            self._called = self.register_forward_pre_hook(_nothing)

    def to_linear(self) -> nn.Linear:
        """Make it an nn.Linear again, with the parameters that it has."""
        if hasattr(self, "_called"):
            self._called.remove()
            del self._called
        self.__class__ = nn.Linear  # type: ignore[assignment]
        return self


def _nothing(module: nn.Module, args: Any) -> None:
    """A hook that changes nothing."""


# ------------------------------------------------------------------------------------------ quantization-aware training

# The gradient passes rounding as if it were the identity (straight-through estimator): with ``Q`` the rounding,
# ``y = Q(x) Q(w)^T``, ``dx = g Q(w)`` and ``dw = g^T Q(x)``. The product y is that of the quantized layer, by the same
# kernel, so that the model that trains is bit for bit the one that ``convert`` gives. A product of dequantized values
# would not be: in bfloat16 they are rounded once more, after the scale.
#
# Source: Bengio et al., "Estimating or Propagating Gradients Through Stochastic Neurons", 2013.


class _StraightThrough(torch.autograd.Function):
    """The shards of a DTensor are rounded one by one. Its gradient may have other placements, such as a partial sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cast: Cast, dtype: torch.dtype) -> Tensor:
        ctx.dtype = x.dtype
        y = dequantize_operand(quantize_rows(local_of(x), cast), dtype)
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


def _refuse_jit_trace() -> None:
    if not torch.compiler.is_compiling() and is_jit_tracing():
        raise NotImplementedError(
            "FakeQuantizer: torch.jit.trace cannot record the rounding; use torch.export or torch.compile"
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
        _refuse_jit_trace()
        if x.is_nested:
            return over_rows(self.forward, x)
        if is_sharded(x):
            _check_shards(x, self.cast)
        out: Tensor = _StraightThrough.apply(x, self.cast, autocast_dtype(x) or x.dtype)
        return out

    def extra_repr(self) -> str:
        """The format."""
        return str(self.cast.format)


class _Casts(NamedTuple):
    """How a quantized layer computes."""

    weight: Cast
    activation: Cast | None
    kernel: str | None
    """the product kernel that the recipe requires"""


def _as_autocast(weight: Tensor) -> Tensor:
    """A tensor of the shape and the dtype that a weight has in the product; its values are of no account."""
    dtype = autocast_dtype(weight) or weight.dtype
    return weight if dtype is weight.dtype else weight.new_empty((), dtype=dtype).expand(weight.shape)


def _quantized_product(x: Tensor, weight: Tensor, bias: Tensor | None, casts: _Casts) -> Tensor:
    """``F.linear`` of x (..., K) by the MXTensor of a weight (N, K): (..., N) in the dtype of x."""
    left = as_matrix(x) if casts.activation is None else Unquantized(as_matrix(x), casts.activation)
    right = quantize_operand(weight, casts.weight)
    out = gemm("linear", left, right, GemmArgs(x.dtype, bias), prefer=casts.kernel)
    return out.view(*x.shape[:-1], weight.shape[0])


class _QuantizedProduct(torch.autograd.Function):
    """The product of the quantized layer; its gradients are those of ``F.linear(rounded, rounded_weight, bias)``."""

    @staticmethod
    def forward(
        ctx: Any, rounded: Tensor, rounded_weight: Tensor, bias: Tensor | None, x: Tensor, weight: Tensor, casts: _Casts
    ) -> Tensor:
        ctx.save_for_backward(rounded, rounded_weight)
        return _quantized_product(x, weight, bias, casts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rounded, rounded_weight = ctx.saved_tensors
        x, weight, bias = ctx.needs_input_grad[:3]
        with without_autocast(grad.device):
            rows = as_matrix(grad)
            dx = torch.matmul(grad, rounded_weight) if x else None
            dw = torch.mm(rows.t(), as_matrix(rounded)) if weight else None
            db = rows.sum(0) if bias else None
        return dx, dw, db, None, None, None


class FakeQuantizedLinear(CalledLinear):
    """An nn.Linear between ``prepare`` and ``convert`` of quantization-aware training.

    It is the same module object as before, with the same parameters: references, hooks and optimizers stay valid.
    """

    activation_fake_quantizer: FakeQuantizer | None
    weight_fake_quantizer: FakeQuantizer
    kernel: str | None = None
    """The product kernel that the recipe requires; None: the fastest one."""

    @staticmethod
    def from_linear(layer: nn.Linear, recipe: LinearRecipe) -> FakeQuantizedLinear:
        """Make ``layer`` compute as ``recipe``, one for inference, says."""
        layer.__class__ = FakeQuantizedLinear
        assert isinstance(layer, FakeQuantizedLinear)
        layer._must_be_called()
        layer.weight_fake_quantizer = FakeQuantizer(recipe.stored)
        layer.activation_fake_quantizer = None if recipe.activation is None else FakeQuantizer(recipe.activation)
        layer.kernel = recipe.required_kernel
        return layer

    def to_linear(self) -> nn.Linear:
        """Make it an nn.Linear again, without rounding."""
        for name in ("weight_fake_quantizer", "activation_fake_quantizer", "kernel"):
            if name in self._modules or name in self.__dict__:
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
        if input.is_nested:
            return over_rows(lambda rows: self.product(rows, weight, bias), input)
        dtype = autocast_dtype(input) or input.dtype  # torch.autocast casts the input of the converted layer first
        input = input.to(dtype)
        if not self._computes_as_quantized(input, weight):
            rounded = input if self.activation_fake_quantizer is None else self.activation_fake_quantizer(input)
            return F.linear(rounded, self.weight_fake_quantizer(weight), bias)
        _refuse_jit_trace()
        bias = None if bias is None else bias.to(autocast_dtype(bias) or bias.dtype)
        check_product("linear", as_matrix(input), _as_autocast(weight), False, bias)
        return self._quantized(input, weight, bias)

    def _computes_as_quantized(self, x: Tensor, weight: Tensor) -> bool:
        """Whether the layer multiplies as the quantized one; else torch multiplies rounded values: of DTensors, where a
        fake quantizer is not enabled, and where random numbers must be the same in the gradient."""
        used = [q for q in (self.weight_fake_quantizer, self.activation_fake_quantizer) if q is not None]
        if not all(q.enabled for q in used) or is_sharded(x) or is_sharded(weight):
            return False
        return all(q.cast.rounding is not Rounding.STOCHASTIC or q.cast.seed is not None for q in used)

    def _quantized(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        inputs, weights = self.activation_fake_quantizer, self.weight_fake_quantizer
        activation = None if inputs is None else inputs.cast
        casts = _Casts(weights.cast, activation, self.kernel)
        trains = any(t is not None and t.requires_grad for t in (x, weight, bias))
        with without_autocast(x.device):
            if not (torch.is_grad_enabled() and trains):
                return _quantized_product(x, weight, bias, casts)
            rounded = x if inputs is None else inputs(x)
            made: Tensor = _QuantizedProduct.apply(
                rounded, _StraightThrough.apply(weight, weights.cast, x.dtype), bias, x.detach(), weight.detach(), casts
            )
            return made


# ---------------------------------------------------------------------------------------------- static scales of inputs

# ``y = (x / g) w^T * g + b``: NVFP4 inputs have a scale that was chosen before, so that no pass over the input looks
# for its amax. The input is cast without a scale of the whole tensor after it was divided by ``g``, a power of two, so
# that both products with it are exact.

LARGEST = 448.0 * 6.0
"""The largest value of NVFP4 with a global scale of 1."""
SCALE = "input_scale"
"""The buffer of a layer with a static scale, and its name in state dicts and checkpoints."""


def has_static_inputs(recipe: LinearRecipe) -> bool:
    """Whether inputs are cast as those of a layer with a static scale: to NVFP4 without a scale of the whole tensor."""
    return recipe.activation is not None and recipe.activation.format == FORMATS["nvfp4_single_level"]


class ObservedLinear(CalledLinear):
    """An nn.Linear between ``prepare`` and ``convert``, which remembers the largest magnitude of its inputs.

    It is the same module object as before, with the same parameters.
    """

    input_amax: Tensor

    @staticmethod
    def from_linear(layer: nn.Linear) -> ObservedLinear:
        """Let ``layer`` watch its inputs."""
        layer.__class__ = ObservedLinear
        assert isinstance(layer, ObservedLinear)
        layer._must_be_called()
        amax = torch.zeros((), dtype=torch.float32, device=layer.weight.device)
        layer.register_buffer("input_amax", amax, persistent=False)
        return layer

    def to_linear(self) -> nn.Linear:
        """Make it an nn.Linear again, which watches nothing."""
        del self.input_amax
        return super().to_linear()

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        values = rows_of(input.detach()) if input.is_nested else input.detach()
        if values.numel():
            self.input_amax.copy_(torch.maximum(self.input_amax, values.abs().amax().float()))
        return super().forward(input)


class StaticInputLinear(nn.Linear):
    """An nn.Linear whose weight casts inputs to NVFP4 without a scale of the whole tensor.

    Magnitudes above 2688 times ``input_scale`` saturate.
    """

    input_scale: Tensor
    """A power of two, as ModelOpt's ``input_scale``: the amax of inputs is at most 2688 times it."""

    @staticmethod
    def from_observed(layer: ObservedLinear) -> StaticInputLinear:
        """Choose the scale by what ``layer`` has seen."""
        mantissa, exponent = torch.frexp(layer.input_amax / LARGEST)
        scale = torch.ldexp(torch.ones_like(mantissa), torch.where(mantissa == 0.5, exponent - 1, exponent))
        return StaticInputLinear.from_linear(layer.to_linear(), scale)

    @staticmethod
    def from_linear(linear: nn.Linear, scale: Tensor) -> StaticInputLinear:
        """Give a layer the static ``scale`` of its inputs, one value; it stays the same module object."""
        linear.__class__ = StaticInputLinear
        assert isinstance(linear, StaticInputLinear)
        linear.register_buffer(SCALE, scale.to(linear.weight.dtype))
        return linear

    def to_linear(self) -> nn.Linear:
        """Make it an nn.Linear again, without the scale."""
        del self.input_scale
        self.__class__ = nn.Linear  # type: ignore[assignment]
        return self

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out), in the dtype of ``torch.autocast`` if that is active.

        Raises ValueError for float16, which may not hold the product before it is scaled.
        """
        dtype = autocast_dtype(input) or input.dtype
        if dtype is torch.float16:
            raise ValueError(
                "StaticInputLinear: products over a static scale may be too large for float16; use bfloat16, for the "
                "model or in torch.autocast"
            )
        out = F.linear(input / self.input_scale, self.weight) * self.input_scale.to(dtype)
        return out if self.bias is None else out + self.bias.to(dtype)


def take_scale(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Before ``load_state_dict``: make a linear layer in the same format one with the static scale that a state dict
    has for it. Both casts are those of the state dict then."""
    scale, new = state_dict.get(prefix + SCALE), state_dict.get(f"{prefix}weight")
    if type(module) is not nn.Linear or not isinstance(scale, Tensor) or not isinstance(new, MXTensor):
        return
    weight: Any = module.weight
    if scale.dim() or not has_static_inputs(new.recipe) or not isinstance(weight, MXTensor) or weight.rowwise is None:
        return
    if weight.format == new.format:
        module.weight = nn.Parameter(MXTensor(weight.rowwise, None, new.recipe, weight.dtype), requires_grad=False)
        StaticInputLinear.from_linear(module, torch.ones((), device=weight.device))
