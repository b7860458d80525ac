"""Linear: a linear layer that runs quantized inside ``autocast``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.arguments import DEVICE, SIZE, Kind, check, checked, described, optional
from ..tensor.mxtensor import MXTensor
from .arguments import refuse_others
from .base import Active, QuantizedModule, cast_bias
from .product_state import WeightShards
from .styles import split_by_style
from .tensor_parallel import WHOLE, Init, Parallel, Tracker, tracker_of

Split = dict[str, int] | Sequence[str] | None
"""Names of parameters with the number of rows of each; a sequence of names divides the rows equally."""


SPLIT = Kind(
    "a sequence of names, or a dictionary from names to rows",
    lambda split: isinstance(split, (dict, list, tuple)) and all(isinstance(name, str) for name in split),
    lambda split: not isinstance(split, dict) or all(isinstance(rows, int) for rows in split.values()),
)


def split_sizes(owner: str, out_features: int, split: Split) -> dict[str, int]:
    """Prefix of each parameter's name -> its number of rows. Raises ValueError unless they sum to ``out_features``."""
    if split is None:
        return {"": out_features}
    check(owner, "parameters_split", split, SPLIT)
    given = split
    if not isinstance(split, dict):
        split = dict.fromkeys(split, out_features // max(len(split), 1))
    sizes = {f"{name.rstrip('_')}_": rows for name, rows in split.items()}
    if sum(sizes.values()) != out_features or any(rows < 1 for rows in sizes.values()):
        raise ValueError(
            f"{owner}: parameters_split {described(given)} does not divide out_features={out_features}: the rows "
            "of the parameters must sum to it"
        )
    return sizes


class LinearBase(QuantizedModule):
    """A module with one weight, whose rows may be split into several parameters."""

    in_features: int
    out_features: int
    return_bias: bool
    parallel: Parallel = WHOLE

    def add_split_linear(
        self, in_features: int, out_features: int, split: Split, init: Init | None, bias: bool, device: Any,
        dtype: torch.dtype | None, parallel: Parallel = WHOLE, tracker: Tracker | None = None,
    ) -> None:  # fmt: skip
        """Register ``weight`` and ``bias``, or ``NAME_weight`` and ``NAME_bias`` for each name of ``split``; all sizes
        are those of the whole weight, of which ``parallel`` gives this rank a part."""
        sizes = split_sizes(self.label, out_features, split)
        self.parallel = parallel
        self.in_features = parallel.part("in_features", in_features, "row")
        for rows in sizes.values():
            parallel.part("out_features", rows, "column")
        self.out_features = parallel.part("out_features", out_features, "column")
        self.weight_names = [f"{prefix}weight" for prefix in sizes]
        self.bias_names = [f"{prefix}bias" for prefix in sizes]
        for prefix, rows in sizes.items():
            self.add_linear(prefix, (rows, in_features), init, bias, device, dtype, parallel, (), tracker)

    def weights(self) -> list[WeightShards]:
        """The parameters of each product: one product of all, or one of each if they are quantized.

        Quantized parameters have their own scales: concatenating them would round their values again.
        """
        shards = [self.local(name) for name in self.weight_names]
        return [[shard] for shard in shards] if any(isinstance(shard, MXTensor) for shard in shards) else [shards]

    def full_bias(self) -> Tensor | None:
        """(out_features,), or None."""
        shards = [self.local(name) for name in self.bias_names]
        if shards[0] is None:
            return None
        return shards[0] if len(shards) == 1 else torch.cat(shards)

    def by_weight(self, x: Tensor, weights: list[WeightShards], active: Active | None, first: bool | None) -> Tensor:
        """The result (..., out_features), with the bias added unless ``return_bias`` is set."""
        by_rows = self.parallel.mode == "row"
        full = self.full_bias() if (len(weights) == 1 or by_rows) and not self.return_bias else None
        if len(weights) == 1:
            return self.parallel_product(0, x, weights[0], full, active, first, self.parallel)
        biases = [None if self.return_bias or by_rows else self.local(name) for name in self.bias_names]
        each, x = enumerate(zip(weights, biases, strict=True)), self.parallel.into(x)
        y = torch.cat([self.product(i, x, weight, bias, active, first) for i, (weight, bias) in each], -1)
        return self.parallel.out_of(y, full)

    def split_by_style(self, style: Any, mode: str, mesh: Any) -> LinearBase:
        """Called by the styles of ``mx.parallel`` (``styles.py``)."""
        return split_by_style(self, style, mode, mesh)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class Linear(LinearBase):
    """``y = x weight^T + bias``: in high precision outside ``mxtensor.autocast``, quantized by the recipe inside it.

    The arguments are those of TransformerEngine. The parameters are ``weight`` (out_features, in_features) and ``bias``
    (out_features,), as in torch.nn.Linear, whose state dict loads and whose initialization is the default. With
    ``init_method(tensor)`` the weight is initialized by it and the bias starts at zero. The result has the dtype of the
    input (inside torch.autocast: its dtype), whatever ``params_dtype`` is.

    - ``parameters_split``: names, or names with their rows. Parameters ``NAME_weight`` and ``NAME_bias`` replace the
      single weight and bias.
    - ``return_bias``: return ``(y, bias)`` and do not add the bias.
    - ``fuse_wgrad_accumulation``: add weight gradients in float32 to ``weight.main_grad``, which the user creates;
      ``weight.grad`` stays None.
    - ``delay_wgrad_compute``: leave weight gradients to ``backward_dw()``, which computes and accumulates those of all
      backward passes since its last call.
    - ``save_original_input``: save the input, not its quantized copy, for wgrad.
    - ``name``: the name of the layer in messages.
    - ``tp_group``, ``tp_size``, ``parallel_mode``, ``sequence_parallel``: tensor parallelism (``tensor_parallel.py``);
      the sizes are those of the whole layer. ``get_rng_state_tracker`` gives each rank random numbers of its own.

    Raises ValueError for a split that does not fit and for parts that are not equal, TypeError for another group.
    """

    @checked(in_features=SIZE, out_features=SIZE, device=optional(DEVICE))
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
        *,
        rng_tracker_name: str | None = None,
        **others: Any,
    ) -> None:
        refuse_others(name or "Linear", others)
        super().__init__(
            name,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute,
            save_original_input=save_original_input,
        )
        self.return_bias = return_bias
        parallel = Parallel(self.label, tp_group, tp_size, parallel_mode, sequence_parallel)
        self.add_split_linear(
            in_features, out_features, parameters_split, init_method, bias, device, params_dtype, parallel,
            tracker_of(get_rng_state_tracker, rng_tracker_name),
        )  # fmt: skip

    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None, **others: Any
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """inp (..., in_features) -> y (..., out_features); with ``return_bias`` (y, bias).

        ``is_first_microbatch``: True caches the quantized weight for later microbatches, False uses the cached one
        (unless the weight or the recipe has changed), None caches nothing.
        """
        refuse_others(self.label, others)
        weights = self.weights()
        out = self.by_weight(inp, weights, self.prepare(inp, weights), is_first_microbatch)
        return (out, cast_bias(self.full_bias(), out)) if self.return_bias else out
