"""LayerNormMLP: norm, linear, activation, linear; and its activations, by TransformerEngine's names.

Both products run quantized inside ``autocast``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recomputed

from ..core.arguments import DEVICE, NUMBER, POSITIVE, SIZE, check, checked, described, instance, optional
from .arguments import one_of, refuse_others
from .norm import NormBase
from .product_state import WeightShards
from .tensor_parallel import Init, Parallel

PARAMS = optional(instance(dict, "a dictionary from names to numbers"))


def _qgelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _srelu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _clamped_swiglu(x: Tensor, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0) -> Tensor:
    """The activation of gpt-oss: both halves are bounded, the first from above only."""
    first, second = x.chunk(2, -1)
    first, second = first.clamp(max=limit), second.clamp(-limit, limit)
    return first * torch.sigmoid(alpha * first) * (second + glu_linear_offset)


def _gate(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return function(first) * second


PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": partial(F.gelu, approximate="tanh"), "gelu_erf": F.gelu, "qgelu": _qgelu,
    "relu": F.relu, "srelu": _srelu, "silu": F.silu,
}  # fmt: skip
GATED: dict[str, Callable[..., Tensor]] = {
    "geglu": partial(_gate, PLAIN["gelu"]), "qgeglu": partial(_gate, PLAIN["qgelu"]), "reglu": partial(_gate, F.relu),
    "sreglu": partial(_gate, PLAIN["srelu"]), "swiglu": partial(_gate, F.silu), "glu": partial(_gate, torch.sigmoid),
    "clamped_swiglu": _clamped_swiglu,
}  # fmt: skip
"""Functions of both halves of the result of the first product."""
PARAMETERS = {"clamped_swiglu": ("limit", "alpha", "glu_linear_offset")}
"""What ``activation_params`` may set."""


def activation_of(owner: str, name: str, params: dict[str, Any] | None) -> tuple[Callable[[Tensor], Tensor], bool]:
    """(the function, whether it takes two halves). Raises ValueError for other names and parameters; ``owner`` names
    the module."""
    one_of(f"{owner}: activation", name, (*PLAIN, *GATED))
    check(owner, "activation_params", params, PARAMS)
    if not params:
        return (GATED[name], True) if name in GATED else (PLAIN[name], False)
    unknown = [given for given in params if given not in PARAMETERS.get(name, ())]
    if unknown:
        known = "; ".join(f"{key} takes {', '.join(names)}" for key, names in PARAMETERS.items())
        raise ValueError(f"{owner}: activation_params has {described(unknown[0])}, and activation is {name!r}: {known}")
    for key, value in params.items():
        check(owner, key, value, NUMBER)
    return partial(GATED[name], **params), True


# ---------------------------------------------------------------------------------------------- layernorm_mlp


class LayerNormMLP(NormBase):
    """``y = act(norm(x) fc1_weight^T + fc1_bias) fc2_weight^T + fc2_bias``. The arguments are TransformerEngine's.

    The parameters are ``layer_norm_weight``, ``layer_norm_bias`` (hidden_size,), ``fc1_weight`` (ffn_hidden_size,
    hidden_size), ``fc1_bias``, ``fc2_weight`` (hidden_size, ffn_hidden_size) and ``fc2_bias``.

    - ``activation``: gelu (tanh approximation), gelu_erf (exact, torch's default), qgelu, relu, srelu, silu, or gated:
      geglu, qgeglu, reglu, sreglu, swiglu, glu, clamped_swiglu. With a gated one fc1 has 2 * ffn_hidden_size rows, and
      the function of the first half of its result is multiplied by the second half. ``activation_params``: ``limit``,
      ``alpha`` and ``glu_linear_offset`` of clamped_swiglu, which is gpt-oss's.
    - ``init_method`` initializes fc1_weight, ``output_layer_init_method`` fc2_weight; without one, weight and bias
      start as in torch.nn.Linear.
    - ``return_bias``: return fc2_bias instead of adding it.
    - ``seq_length`` and ``micro_batch_size`` have no effect: nothing is compiled ahead of time.
    - ``set_parallel_mode``: split fc1 by columns and fc2 by rows over the ranks of ``tp_group``; with a gated
      activation each rank has its part of both halves of fc1.
    - ``checkpoint``: save the input only, and compute the layer again in the backward pass.
    - The other arguments: see :class:`LayerNormLinear`.

    Raises what Linear raises, and ValueError for an unknown norm or activation.
    """

    fc1_weight: Tensor
    fc1_bias: Tensor | None
    fc2_weight: Tensor
    fc2_bias: Tensor | None

    @checked(hidden_size=SIZE, ffn_hidden_size=SIZE, device=optional(DEVICE), eps=POSITIVE)
    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Init | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: dict[str, Any] | None = None,
        output_layer_init_method: Init | None = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        device: Any = None,
        delay_wgrad_compute: bool = False,
        name: str | None = None,
        *,
        checkpoint: bool = False,
        **others: Any,
    ) -> None:
        refuse_others(name or "LayerNormMLP", others)
        function, gated = activation_of("LayerNormMLP", activation, activation_params)
        super().__init__(name, fuse_wgrad_accumulation=fuse_wgrad_accumulation, delay_wgrad_compute=delay_wgrad_compute)
        self.hidden_size, self.ffn_hidden_size, self.activation = hidden_size, ffn_hidden_size, activation
        self.return_bias, self.return_layernorm_output = return_bias, return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self.checkpoint = checkpoint
        self.activation_params, self._function, self._gated = activation_params, function, gated
        modes = ("column", "row") if set_parallel_mode else (None, None)
        self.fc1, self.fc2 = (
            Parallel(self.label, tp_group, tp_size, mode, sequence_parallel, get_rng_state_tracker) for mode in modes
        )
        self.fc1.part("ffn_hidden_size", ffn_hidden_size, "column")
        self.add_norm(hidden_size, eps, normalization, zero_centered_gamma, device, params_dtype, self.fc1)
        pieces = (ffn_hidden_size,) * (2 if self._gated else 1)
        common = bias, device, params_dtype
        self.add_linear("fc1_", (sum(pieces), hidden_size), init_method, *common, self.fc1, pieces)
        self.add_linear("fc2_", (hidden_size, ffn_hidden_size), output_layer_init_method, *common, self.fc2)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None, **others: Any) -> Any:
        """inp (..., hidden_size) -> y of the same shape.

        With ``return_bias`` or ``return_layernorm_output`` a tuple: y, the bias, the result of the norm.
        ``is_first_microbatch``: see :class:`Linear`.
        """
        refuse_others(self.label, others)
        if self.checkpoint and torch.is_grad_enabled():
            return recomputed(self._forward, inp, is_first_microbatch, use_reentrant=False)
        return self._forward(inp, is_first_microbatch)

    def _forward(self, inp: Tensor, is_first_microbatch: bool | None) -> Any:
        weights: list[WeightShards] = [[self.fc1_weight], [self.fc2_weight]]
        now = self.prepare(inp, weights, is_first_microbatch)
        normed = self.norm(inp)
        inner = self._function(self.parallel_product(0, normed, weights[0], self.fc1_bias, now, self.fc1))
        added = None if self.return_bias else self.fc2_bias
        out = self.parallel_product(1, inner, weights[1], added, now, self.fc2)
        return self.returned(out, self.fc2_bias, normed, self.fc1)

    def extra_repr(self) -> str:
        sizes = f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}"
        return f"{sizes}, normalization={self.normalization}, activation={self.activation}"
