"""GroupedLinear: several linear layers, each for one group of rows, such as the experts of a mixture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.arguments import COUNT, DEVICE, SIZE, checked, optional
from ..training.grouped import Splits, groups_of, row_counts, stacked
from .arguments import refuse_others
from .base import QuantizedModule, cast_bias
from .tensor_parallel import Init, Parallel, tracker_of


class GroupedLinear(QuantizedModule):
    """``num_gemms`` linear layers of one shape: the first ``m_splits[0]`` rows go through the first, and so on.

    The arguments are those of TransformerEngine, and so is the order of the parameters: ``weight0`` (out_features,
    in_features), ``bias0`` (out_features,), ``weight1``, ``bias1`` ..., initialized as in ``Linear``. Any row counts,
    zero included, work without padding: each group is cast from its own rows. The result and all gradients are bitwise
    identical to those of ``num_gemms`` ``Linear`` modules over ``torch.split(inp, m_splits)``. Every group has its own
    quantizers and, with delayed scaling, its own histories.

    The other options are those of ``Linear``; with ``return_bias`` the result is ``(y, [bias0, ...])``. As in
    TransformerEngine, tensor parallelism gives each rank its part of each weight and sends nothing: the exchange of
    tokens gathers and sums.

    Raises ValueError for ``num_gemms`` below 1, for parts that are not equal and for parts with biases.
    """

    @checked(num_gemms=COUNT, in_features=SIZE, out_features=SIZE, device=optional(DEVICE))
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Init | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        name: str | None = None,
        **others: Any,
    ) -> None:
        refuse_others(name or "GroupedLinear", others)
        super().__init__(
            name,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute,
            save_original_input=save_original_input,
        )
        self.parallel = parallel = Parallel(self.label, tp_group, tp_size, parallel_mode, sequence_parallel)
        if bias and parallel.mode is not None:
            raise ValueError(
                f"{self.label}: parallel_mode={parallel_mode!r} of {parallel.size} ranks and bias=True: what ranks add "
                "up is added outside of this module, and so must be the bias; pass bias=False"
            )
        self.num_gemms, self.return_bias = num_gemms, return_bias
        self.in_features = parallel.part("in_features", in_features, "row")
        self.out_features = parallel.part("out_features", out_features, "column")
        tracker = tracker_of(get_rng_state_tracker, rng_tracker_name)
        shape = (out_features, in_features)
        for i in range(num_gemms):
            self.add_linear("", shape, init_method, bias, device, params_dtype, self.parallel, (), tracker, f"{i}")

    def forward(
        self, inp: Tensor, m_splits: Splits, is_first_microbatch: bool | None = None, **others: Any
    ) -> Tensor | tuple[Tensor, list[Tensor | None]]:
        """inp (..., in_features) -> y (..., out_features); with ``return_bias`` (y, biases).

        The leading dimensions count as one. ``m_splits``: the row count of each group, as integers or as an integer
        tensor on any device, which synchronizes. A compiled model needs a list, and compiles again if the row count of
        a group is 0 or 1, or exceeds a block for the first time. ``is_first_microbatch``: see ``Linear``. Raises
        ValueError and TypeError for m_splits that do not fit ``inp``, and what ``Linear`` raises, with nothing changed.
        """
        refuse_others(self.label, others)
        groups = groups_of(inp, row_counts(m_splits, self.num_gemms, self.label), self.label)
        weights = [[getattr(self, f"weight{i}")] for i in range(self.num_gemms)]
        biases = [getattr(self, f"bias{i}") for i in range(self.num_gemms)]
        active = self.prepare(inp, weights)
        out = stacked(
            [
                self.product(i, rows, weights[i], None if self.return_bias else biases[i], active, is_first_microbatch)
                for i, rows in enumerate(groups)
            ],
            inp,
        )
        if not self.return_bias:
            return out
        return out, [cast_bias(bias, out) for bias in biases]

    def extra_repr(self) -> str:
        return f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}"
