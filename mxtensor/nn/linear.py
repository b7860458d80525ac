"""Linear: a linear layer that runs quantized inside ``autocast``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..tensor.mxtensor import MXTensor
from .base import Active, Init, QuantizedModule, WeightShards, cast_bias, check_parallelism

Split = dict[str, int] | Sequence[str] | None
"""Names of parameters, with the rows of each, or of equal rows."""


def split_sizes(owner: str, out_features: int, split: Split) -> dict[str, int]:
    """Prefix of each parameter's name -> its rows. Raises ValueError where they do not sum to ``out_features``."""
    if split is None:
        return {"": out_features}
    if not isinstance(split, dict):
        split = dict.fromkeys(split, out_features // max(len(split), 1))
    sizes = {f"{name.rstrip('_')}_": rows for name, rows in split.items()}
    if sum(sizes.values()) != out_features or any(rows < 1 for rows in sizes.values()):
        raise ValueError(
            f"{owner}: parameters_split {split} does not divide out_features={out_features}: the rows of all "
            "parameters sum to it"
        )
    return sizes


class LinearBase(QuantizedModule):
    """A module with one weight, which may be split by rows into several parameters."""

    in_features: int
    out_features: int
    return_bias: bool

    def add_split_linear(
        self, in_features: int, out_features: int, split: Split, init: Init | None, bias: bool, device: Any,
        dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        """Register ``weight`` and ``bias``, or ``NAME_weight`` and ``NAME_bias`` of each part."""
        sizes = split_sizes(self.label, out_features, split)
        self.in_features, self.out_features = in_features, out_features
        self.weight_names = [f"{prefix}weight" for prefix in sizes]
        self.bias_names = [f"{prefix}bias" for prefix in sizes]
        for prefix, rows in sizes.items():
            self.add_linear(prefix, (rows, in_features), init, bias, device, dtype)

    def weights(self) -> list[WeightShards]:
        """The parameters of each product: one product of all, or where they are quantized, one of each.

        A part's scales are its own, so that parts cannot be put together without rounding again.
        """
        components = [getattr(self, name) for name in self.weight_names]
        return (
            [[part] for part in components] if any(isinstance(part, MXTensor) for part in components) else [components]
        )

    def full_bias(self) -> Tensor | None:
        """(out_features,), or None."""
        components = [getattr(self, name) for name in self.bias_names]
        if components[0] is None:
            return None
        return components[0] if len(components) == 1 else torch.cat(components)

    def by_weight(self, x: Tensor, weights: list[WeightShards], active: Active | None, first: bool | None) -> Tensor:
        """The result (..., out_features), with the bias unless it is to be returned."""
        if len(weights) == 1:
            return self.product(0, x, weights[0], None if self.return_bias else self.full_bias(), active, first)
        biases = [None if self.return_bias else getattr(self, name) for name in self.bias_names]
        each = enumerate(zip(weights, biases, strict=True))
        return torch.cat([self.product(i, x, weight, bias, active, first) for i, (weight, bias) in each], -1)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class Linear(LinearBase):
    """``y = x weight^T + bias``: torch's linear layer outside ``mxtensor.autocast``, inside it the recipe's products.

    Arguments as TransformerEngine has them. Parameters ``weight`` (out_features, in_features) and ``bias``
    (out_features,), as torch.nn.Linear's, whose state dict loads and whose initialization is the default;
    ``init_method(tensor)`` initializes otherwise, and biases start at zero then. The result has the input's dtype (in
    torch.autocast: its dtype), whatever ``params_dtype`` is.

    ``parameters_split``: names with their rows, or of equal rows: parameters ``NAME_weight`` and ``NAME_bias`` take
    the place of one. ``return_bias``: the result is ``(y, bias)`` and the bias is not added.
    ``fuse_wgrad_accumulation``: weight gradients are added in float32 to ``weight.main_grad``, which the user makes;
    ``weight.grad`` stays None. ``delay_wgrad_compute``: weight gradients wait for ``backward_dw()``, which adds up
    those of all backward passes since the last. ``save_original_input``: keep the input, not its quantized copy, for
    wgrad. ``name``: what messages call the layer.

    Raises NotImplementedError for arguments that ask for tensor parallelism, ValueError for a split that does not fit.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        init_method: Init | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Split = None,
        device: Any = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        check_parallelism(
            "Linear", sequence_parallel=sequence_parallel, tp_group=tp_group, tp_size=tp_size,
            get_rng_state_tracker=get_rng_state_tracker, parallel_mode=parallel_mode,
        )  # fmt: skip
        super().__init__(
            name,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute,
            save_original_input=save_original_input,
        )
        self.return_bias = return_bias
        self.add_split_linear(in_features, out_features, parameters_split, init_method, bias, device, params_dtype)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor | tuple[Tensor, Tensor | None]:
        """inp (..., in_features); (..., out_features), with ``return_bias`` and the bias.

        ``is_first_microbatch``: True keeps the quantized weight for microbatches to come, False uses it (unless the
        weight or the recipe has changed), None keeps nothing.
        """
        weights = self.weights()
        out = self.by_weight(inp, weights, self.prepare(inp, weights), is_first_microbatch)
        return (out, cast_bias(self.full_bias(), out)) if self.return_bias else out
