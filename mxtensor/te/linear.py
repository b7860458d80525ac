"""Layers with one weight, or one for each group of rows: Linear, LayerNormLinear and GroupedLinear.

Groups of rows are the experts of a mixture. Copies are cast from the rows of a group only, so neither a block along the
rows nor the amax of a tensor spans two groups, and the products use the kernels of single products. The result and
every gradient are therefore bitwise identical to those of separate layers. Products of a stack of weights in one
parameter (``linear`` with ``ends``) are not used: they need a copy of all weights as one tensor, and add in another
order on CUDA.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..core.arguments import COUNT, DENSE, DEVICE, POSITIVE, SIZE, Kind, check, checked, described, optional
from ..tensor.mxtensor import MXTensor
from .arguments import refuse_others
from .module import Pass, QuantizedModule, cast_bias
from .norm import NormBase
from .product_state import WeightShards
from .tensor_parallel import WHOLE, Init, Parallel, split_by_style

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
        dtype: torch.dtype | None, parallel: Parallel,
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
            self.add_linear(prefix, (rows, in_features), init, bias, device, dtype, parallel)

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

    def by_weight(self, x: Tensor, weights: list[WeightShards], now: Pass) -> Tensor:
        """The result (..., out_features), with the bias added unless ``return_bias`` is set."""
        by_rows = self.parallel.mode == "row"
        full = self.full_bias() if (len(weights) == 1 or by_rows) and not self.return_bias else None
        if len(weights) == 1:
            return self.parallel_product(0, x, weights[0], full, now, self.parallel)
        biases = [None if self.return_bias or by_rows else self.local(name) for name in self.bias_names]
        each, x = enumerate(zip(weights, biases, strict=True)), self.parallel.into(x)
        y = torch.cat([self.product(i, x, weight, bias, now) for i, (weight, bias) in each], -1)
        return self.parallel.out_of(y, full)

    split_by_style = split_by_style

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
        parallel = Parallel(
            self.label, tp_group, tp_size, parallel_mode, sequence_parallel, get_rng_state_tracker, rng_tracker_name
        )
        self.add_split_linear(
            in_features, out_features, parameters_split, init_method, bias, device, params_dtype, parallel
        )

    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None, **others: Any
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """inp (..., in_features) -> y (..., out_features); with ``return_bias`` (y, bias).

        ``is_first_microbatch``: True caches the quantized weight for later microbatches, False uses the cached one
        (unless the weight or the recipe has changed), None caches nothing.
        """
        refuse_others(self.label, others)
        weights = self.weights()
        out = self.by_weight(inp, weights, self.prepare(inp, weights, is_first_microbatch))
        return (out, cast_bias(self.full_bias(), out)) if self.return_bias else out


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
        super().__init__(name, fuse_wgrad_accumulation=fuse_wgrad_accumulation, delay_wgrad_compute=delay_wgrad_compute)
        self.return_bias, self.return_layernorm_output = return_bias, return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        parallel = Parallel(self.label, tp_group, tp_size, parallel_mode, sequence_parallel, get_rng_state_tracker)
        self.add_norm(in_features, eps, normalization, zero_centered_gamma, device, params_dtype, parallel)
        self.add_split_linear(
            in_features, out_features, parameters_split, init_method, bias, device, params_dtype, parallel
        )

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None, **others: Any) -> Any:
        """inp (..., in_features) -> y (..., out_features).

        With ``return_bias`` or ``return_layernorm_output`` a tuple: y, the bias, the result of the norm.
        ``is_first_microbatch``: see :class:`Linear`.
        """
        refuse_others(self.label, others)
        weights = self.weights()
        now = self.prepare(inp, weights, is_first_microbatch)
        normed = self.norm(inp)
        y = self.by_weight(normed, weights, now)
        return self.returned(y, self.full_bias(), normed, self.parallel)


# ---------------------------------------------------------------------------------------------- groups of rows

Splits: TypeAlias = Sequence[int] | Tensor
"""The row count of each group: integers, or an integer tensor (groups,) on any device."""
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def row_counts(m_splits: Splits, groups: int, name: str) -> list[int]:
    """``m_splits`` as a list of ``groups`` row counts, zeros allowed. A tensor on a device synchronizes.

    Raises TypeError for values that are not integers, ValueError for another number of groups and for negative counts.
    ``name`` is the caller's name in messages.
    """
    if isinstance(m_splits, Tensor):
        if m_splits.is_meta or m_splits.layout is not torch.strided or m_splits.dtype not in INTEGERS:
            raise TypeError(f"{name}: m_splits is {described(m_splits)}; row counts are integers")
        m_splits = m_splits.reshape(-1).tolist()
    if not hasattr(m_splits, "__len__") or isinstance(m_splits, (str, bytes)):
        raise TypeError(f"{name}: m_splits is {described(m_splits)}; row counts are integers")
    if torch.compiler.is_compiling():  # symbolic integers stay as they are
        sizes = list(m_splits)
    else:
        try:
            sizes = [operator.index(n) for n in m_splits]
        except TypeError:
            raise TypeError(f"{name}: m_splits is {described(m_splits)}; row counts are integers") from None
    if len(sizes) != groups:
        raise ValueError(
            f"{name}: m_splits has {len(sizes)} row counts, there are {groups} groups: {described(m_splits)}"
        )
    if any(n < 0 for n in sizes):
        raise ValueError(f"{name}: m_splits has negative row counts: {sizes}")
    return sizes


def groups_of(x: Tensor, sizes: list[int], name: str) -> tuple[Tensor, ...]:
    """The rows of x (..., K), its leading dimensions counted as one, in groups of ``sizes``: (rows, K) each.

    Raises ValueError where x has more or fewer rows, or no dimensions.
    """
    check(name, "the input", x, DENSE)
    if x.dim() == 0:
        raise ValueError(f"{name}: the input is 0-dimensional; rows in groups are (rows, features)")
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if sum(sizes) != rows.shape[0]:
        raise ValueError(
            f"{name}: m_splits {sizes} sum to {sum(sizes)}, the input has {rows.shape[0]} rows, {tuple(x.shape)}"
        )
    return torch.split(rows, sizes)


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
        self.parallel = parallel = Parallel(
            self.label, tp_group, tp_size, parallel_mode, sequence_parallel, get_rng_state_tracker, rng_tracker_name
        )
        if bias and parallel.mode is not None:
            raise ValueError(
                f"{self.label}: parallel_mode={parallel_mode!r} of {parallel.size} ranks and bias=True: what ranks add "
                "up is added outside of this module, and so must be the bias; pass bias=False"
            )
        self.num_gemms, self.return_bias = num_gemms, return_bias
        self.in_features = parallel.part("in_features", in_features, "row")
        self.out_features = parallel.part("out_features", out_features, "column")
        shape = (out_features, in_features)
        for i in range(num_gemms):
            self.add_linear("", shape, init_method, bias, device, params_dtype, parallel, suffix=f"{i}")

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
        now = self.prepare(inp, weights, is_first_microbatch)
        added = [None] * self.num_gemms if self.return_bias else biases
        y = [self.product(i, x, weights[i], added[i], now) for i, x in enumerate(groups)]
        out = torch.cat(y).view(*inp.shape[:-1], self.out_features)
        if not self.return_bias:
            return out
        return out, [cast_bias(bias, out) for bias in biases]

    def extra_repr(self) -> str:
        return f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}"
