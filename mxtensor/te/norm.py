"""The norm before a linear layer: torch's LayerNorm or RMSNorm, in high precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.arguments import DEVICE, POSITIVE, Kind, check, checked, instance, is_integers, optional
from .arguments import one_of
from .extra_state import EXTRA_STATE, ignore_keys
from .module import QuantizedModule, cast_bias
from .tensor_parallel import WHOLE, Parallel

DTYPE = instance(torch.dtype, "a torch.dtype")
SIZES = Kind(
    "an integer of 1 or more, or a sequence of them",
    lambda sizes: isinstance(sizes, Sequence) and is_integers(sizes),
    lambda sizes: len(sizes) > 0 and min(sizes) > 0,
)


class NormBase(QuantizedModule):
    """A module that starts with a norm: ``layer_norm_weight`` (H,) and, for LayerNorm, ``layer_norm_bias`` (H,)."""

    layer_norm_weight: Tensor
    layer_norm_bias: Tensor | None
    return_bias: bool
    return_layernorm_output: bool
    return_layernorm_output_gathered = False

    def add_norm(
        self, size: int, eps: float, normalization: str, zero_centered_gamma: bool, device: Any,
        dtype: torch.dtype | None, parallel: Parallel,
    ) -> None:  # fmt: skip
        """Register the parameters of the norm. ``zero_centered_gamma``: the norm multiplies by 1 + weight.

        Raises ValueError for an unknown norm.
        """
        one_of(f"{type(self).__name__}: normalization", normalization, NORMS)
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        ones = nn.init.zeros_ if zero_centered_gamma else nn.init.ones_
        self.add_parameter("layer_norm_weight", (size,), ones, device, dtype)
        if normalization == "LayerNorm":
            self.add_parameter("layer_norm_bias", (size,), nn.init.zeros_, device, dtype)
        else:
            self.register_parameter("layer_norm_bias", None)
        parallel.mark_whole(self.layer_norm_weight, self.layer_norm_bias)

    def norm(self, x: Tensor) -> Tensor:
        """x (..., H) normalized, in its dtype."""
        weight, bias = self.local("layer_norm_weight"), self.local("layer_norm_bias")
        return normalized(x, weight, bias, self.eps, self.normalization, self.zero_centered_gamma)

    def returned(self, out: Tensor, bias: Tensor | None, normed: Tensor, parallel: Parallel) -> Any:
        """``out`` alone, or a tuple with the bias and the result of the norm if the options ask for them."""
        more = [cast_bias(bias, out)] if self.return_bias else []
        if self.return_layernorm_output_gathered and parallel.sequence:
            normed = parallel.into(normed)
        more += [normed] if self.return_layernorm_output else []
        return (out, *more) if more else out


class Norm(nn.Module):
    """``x`` (..., *normalized_shape) normalized over these dimensions, with TransformerEngine's arguments.

    ``zero_centered_gamma``: the norm multiplies by ``1 + weight``, which starts at zero. ``sequence_parallel``: the
    value of this attribute of the parameters, for Megatron. ``params_dtype`` and ``dtype`` are the same.

    Raises ValueError for sizes below 1 and for two dtypes.
    """

    bias: nn.Parameter | None
    kind = ""
    parallel = WHOLE
    """How ranks split the heads, each of which is normalized on its own."""

    @checked(eps=POSITIVE, device=optional(DEVICE), params_dtype=optional(DTYPE), dtype=optional(DTYPE))
    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape
        check(name, "normalized_shape", shape, SIZES)
        if None not in (params_dtype, dtype):
            raise ValueError(f"{name}: params_dtype is {params_dtype} and dtype is {dtype}; pass only one of them")
        self.normalized_shape = tuple(shape)
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        like: dict[str, Any] = {"device": device, "dtype": params_dtype or dtype}
        self.weight = nn.Parameter(torch.empty(self.normalized_shape, **like))
        has_bias = self.kind == "LayerNorm"
        self.bias = nn.Parameter(torch.empty(self.normalized_shape, **like)) if has_bias else None
        self.reset_parameters()
        ignore_keys(self, EXTRA_STATE)
        for parameter in () if sequence_parallel is None else self.parameters():
            parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Let the norm multiply by one and add zero, in place: after ``to_empty()``, for example."""
        self.weight.fill_(0.0 if self.zero_centered_gamma else 1.0)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """x (..., *normalized_shape) normalized, in its dtype."""
        weight, bias = self.parallel.for_heads(self.weight), self.parallel.for_heads(self.bias)
        return normalized(x, weight, bias, self.eps, self.kind, self.zero_centered_gamma)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class LayerNorm(Norm):
    __doc__ = Norm.__doc__
    kind = "LayerNorm"


class RMSNorm(Norm):
    __doc__ = Norm.__doc__
    kind = "RMSNorm"


NORMS: dict[str, type[Norm]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
"""By TransformerEngine's ``normalization``."""


class L2Norm(nn.Module):
    """x (..., H) divided by ``sqrt(sum of x^2 + eps)`` over its last dimension, computed in float32."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps
        ignore_keys(self, EXTRA_STATE)

    def forward(self, x: Tensor) -> Tensor:
        """x normalized, in its dtype."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        out: Tensor = wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + self.eps)
        return out.to(x.dtype)


def normalized_heads(
    what: str, kind: str | None, size: int, eps: float, device: Any, dtype: torch.dtype | None, parallel: Parallel
) -> nn.Module | None:
    """The norm of queries or keys, over the channels of a head; ``what`` names the argument, ``parallel`` how heads are
    split. Raises ValueError for an unknown kind."""
    if kind is None:
        return None
    if one_of(what, kind, ("L2Normalization", *NORMS)) == "L2Normalization":
        return L2Norm(eps)
    norm = NORMS[kind](size, eps, params_dtype=dtype, device=device)
    norm.parallel = parallel
    return norm


def normalized(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, normalization: str, zero_centered_gamma: bool
) -> Tensor:
    """x (..., H) normalized over the dimensions of ``weight``, in its dtype."""
    shape, dtype = tuple(weight.shape), x.dtype
    if zero_centered_gamma or weight.dtype is not dtype:
        # 1 + weight would lose bits in a 16-bit dtype, and torch's norms need one dtype.
        wide = torch.promote_types(dtype, torch.float32)
        x, weight, bias = x.to(wide), weight.to(wide), None if bias is None else bias.to(wide)
    if zero_centered_gamma:
        weight = 1 + weight
    if normalization == "RMSNorm":
        return F.rms_norm(x, shape, weight, eps).to(dtype)
    return F.layer_norm(x, shape, weight, bias, eps).to(dtype)
