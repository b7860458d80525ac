"""LayerNormLinear: a norm in high precision, then a linear layer that runs quantized inside ``autocast``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.arguments import DEVICE, POSITIVE, SIZE, checked, optional
from .arguments import refuse_others
from .linear import LinearBase, Split
from .norm import NormBase, check_normalization
from .tensor_parallel import Init, Parallel, tracker_of


class LayerNormLinear(NormBase, LinearBase):
    """``y = norm(x) weight^T + bias``. The arguments are TransformerEngine's, most of them as in :class:`Linear`.

    The parameters are ``layer_norm_weight`` and ``layer_norm_bias`` (in_features,), ``weight`` and ``bias``;
    ``layer_norm_bias`` is None for ``normalization="RMSNorm"``. ``zero_centered_gamma``: the norm multiplies by
    ``1 + layer_norm_weight``. ``return_layernorm_output``: return the result of the norm, last.

    Raises what Linear raises, and ValueError for an unknown norm.
    """

    @checked(in_features=SIZE, out_features=SIZE, device=optional(DEVICE), eps=POSITIVE)
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        init_method: Init | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Split = None,
        zero_centered_gamma: bool = False,
        device: Any = None,
        delay_wgrad_compute: bool = False,
        name: str | None = None,
        **others: Any,
    ) -> None:
        refuse_others(name or "LayerNormLinear", others)
        check_normalization("LayerNormLinear", normalization)
        super().__init__(name, fuse_wgrad_accumulation=fuse_wgrad_accumulation, delay_wgrad_compute=delay_wgrad_compute)
        self.return_bias, self.return_layernorm_output = return_bias, return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        parallel = Parallel(self.label, tp_group, tp_size, parallel_mode, sequence_parallel)
        self.add_norm(in_features, eps, normalization, zero_centered_gamma, device, params_dtype, parallel)
        self.add_split_linear(
            in_features, out_features, parameters_split, init_method, bias, device, params_dtype, parallel,
            tracker_of(get_rng_state_tracker),
        )  # fmt: skip

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None, **others: Any) -> Any:
        """inp (..., in_features) -> y (..., out_features).

        With ``return_bias`` or ``return_layernorm_output`` a tuple: y, the bias, the result of the norm.
        ``is_first_microbatch``: see :class:`Linear`.
        """
        refuse_others(self.label, others)
        weights = self.weights()
        active = self.prepare(inp, weights)
        normed = self.norm(inp)
        y = self.by_weight(normed, weights, active, is_first_microbatch)
        return self.returned(y, self.full_bias(), normed, self.parallel)
