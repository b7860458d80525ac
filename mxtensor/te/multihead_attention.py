"""MultiheadAttention: projections that run quantized under a recipe, and attention that stays in high precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core.arguments import COUNT, POSITIVE, SHARE, Kind, check, checked, described, instance, is_dense_float, optional
from .arguments import check_heads, one_of, refuse_others
from .attention_masks import PaddingMask, Window
from .context_parallel import SequenceSplit
from .dot_product_attention import ATTENTION_TYPES, DotProductAttention
from .linear import LayerNormLinear, Linear
from .norm import normalized_heads
from .rope import apply_rotary_pos_emb
from .tensor_parallel import Init, Parallel, SplitModule

SEQUENCE = Kind(
    "a dense floating-point torch.Tensor of 3 dimensions",
    lambda x: isinstance(x, Tensor) and is_dense_float(x),
    lambda x: x.dim() == 3,
)


def check_sequences(owner: str, hidden_states: Any, encoder_output: Any, is_cross: bool, option: str) -> None:
    """Raise TypeError or ValueError unless both are sequences, and ``encoder_output`` is given if ``is_cross`` and only
    then. ``option`` names the argument that decides."""
    check(owner, "hidden_states", hidden_states, SEQUENCE)
    check(owner, "encoder_output", encoder_output, optional(SEQUENCE))
    if (encoder_output is None) is is_cross:
        needs = "needs" if encoder_output is None else "takes no"
        given = "" if encoder_output is None else f", got {described(encoder_output)}"
        raise ValueError(f"{owner}: {option} {needs} encoder_output{given}")


ANGLES = Kind(
    "a tensor of angles, or a pair of them",
    lambda given: all(isinstance(t, Tensor) for t in (given if isinstance(given, tuple) else (given,))),
    lambda given: not isinstance(given, tuple) or len(given) == 2,
)
ATTENTION = instance(nn.MultiheadAttention, "an nn.MultiheadAttention")


class MultiheadAttention(SplitModule, SequenceSplit):
    """Self-attention, or cross-attention to ``encoder_output``: (s, b, hidden_size), for ``bshd`` (b, s, hidden_size).

    The projections have TransformerEngine's names: ``qkv`` (``layernorm_qkv`` with ``input_layernorm``), for ``cross``
    ``query_layer`` (``layernorm_query``) and ``key_value``; then ``proj``. Each has ``query_weight``, ``key_weight``,
    ``value_weight`` and biases. With ``fuse_qkv_params`` it has one ``weight`` and ``bias``, whose rows are the query
    heads, the key and the value of each group in turn; with ``qkv_weight_interleaved=False`` all queries, all keys, all
    values. A state dict of nn.MultiheadAttention loads too. With ``set_parallel_mode`` each rank of ``tp_group`` has
    some of the heads; the numbers of heads are those of all ranks.

    ``qk_norm_type``: normalize each head of queries and keys, by ``RMSNorm`` or ``LayerNorm`` with weights (``q_norm``,
    ``k_norm``), or by ``L2Normalization``; after the rotation, or with ``qk_norm_before_rope`` before it.

    Raises ValueError for sizes that do not divide and for unknown names.
    """

    @checked(
        hidden_size=COUNT, num_attention_heads=COUNT, num_gqa_groups=optional(COUNT), kv_channels=optional(COUNT),
        attention_dropout=SHARE, layernorm_epsilon=POSITIVE, qk_norm_eps=POSITIVE,
    )  # fmt: skip
    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: Init | None = None,
        output_layer_init_method: Init | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: Window | None = None,
        *,
        tp_group: Any = None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        qkv_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        **others: Any,
    ) -> None:
        super().__init__()
        title = name or type(self).__name__
        refuse_others(title, others, ("seq_length", "micro_batch_size"))
        groups = check_heads(title, num_attention_heads, num_gqa_groups)
        split = Parallel(title, tp_group, tp_size, "column" if set_parallel_mode else None, sequence_parallel)
        self.num_gqa_groups = split.part("num_gqa_groups", groups, "column")
        if kv_channels is None and hidden_size % num_attention_heads:
            raise ValueError(
                f"{title}: hidden_size={hidden_size} does not divide into num_attention_heads={num_attention_heads}; "
                "pass kv_channels"
            )
        self.num_attention_heads = split.part("num_attention_heads", num_attention_heads, "column")
        self.kv_channels = kv_channels or hidden_size // num_attention_heads
        self.attention_type = one_of(f"{title}: attention_type", attention_type, ATTENTION_TYPES)
        self.input_layernorm, self.return_bias = input_layernorm, return_bias
        self.return_layernorm_output = return_layernorm_output and input_layernorm
        self.fuse_qkv_params = fuse_qkv_params
        self.qkv_weight_interleaved = qkv_weight_interleaved and fuse_qkv_params
        self.rotary_pos_interleaved = rotary_pos_interleaved

        common: dict[str, Any] = {
            "bias": bias, "params_dtype": params_dtype, "device": device, "tp_group": tp_group, "tp_size": tp_size,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation, "sequence_parallel": sequence_parallel,
            "get_rng_state_tracker": get_rng_state_tracker,
        }  # fmt: skip
        norm: dict[str, Any] = {
            "eps": layernorm_epsilon, "normalization": normalization, "zero_centered_gamma": zero_centered_gamma,
            "return_layernorm_output": self.return_layernorm_output,
        }  # fmt: skip
        n, g, d = num_attention_heads, groups, self.kv_channels
        rows = {"query": n * d, "key": g * d, "value": g * d}
        self.projections = SELF[input_layernorm] if attention_type == "self" else CROSS[input_layernorm]
        for attribute, names in self.projections.items():
            layer: type[Any] = LayerNormLinear if attribute.startswith("layernorm_") else Linear
            made = layer(
                hidden_size,
                sum(rows[name] for name in names),
                parameters_split=None if self._is_fused(attribute) else {name: rows[name] for name in names},
                name=f"{title}.{attribute}", init_method=init_method, parallel_mode=split.mode,
                **common, **(norm if layer is LayerNormLinear else {}),
            )  # fmt: skip
            made.part_of = title
            self.add_module(attribute, made)
        of_heads = f"{title}: qk_norm_type", qk_norm_type, d, qk_norm_eps, device, params_dtype, split
        self.q_norm, self.k_norm = normalized_heads(*of_heads), normalized_heads(*of_heads)
        self.qk_norm_before_rope = qk_norm_before_rope
        self.core_attention = DotProductAttention(
            n, d, g, attention_dropout, qkv_format, attn_mask_type, window_size, layer_number=layer_number,
            attention_type=attention_type, tp_size=split.size if split.mode else 1,
            get_rng_state_tracker=get_rng_state_tracker if split.mode else None,
        )  # fmt: skip
        self.proj = Linear(
            n * d, hidden_size, init_method=output_layer_init_method, return_bias=return_bias,
            parallel_mode="row" if split.mode else None, name=f"{title}.proj", **common,
        )  # fmt: skip
        self.proj.part_of = title
        self.register_load_state_dict_pre_hook(_from_torch_names)

    def _is_fused(self, projection: str) -> bool:
        """Whether a projection has one weight parameter; TransformerEngine's ``query_layer`` always does."""
        return self.fuse_qkv_params or projection == "query_layer"

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: PaddingMask | None = None,
        encoder_output: Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: Window | None = None,
        is_first_microbatch: bool | None = None,
        *,
        checkpoint_core_attention: bool = False,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        **others: Any,
    ) -> Any:
        """The output. With ``return_bias`` or ``return_layernorm_output`` a tuple: output, bias, result of the norm.

        Masks and ``checkpoint_core_attention``: see DotProductAttention. ``rotary_pos_emb``: angles for queries and
        keys, or a pair with one tensor of angles for each. Raises ValueError for cross-attention without
        ``encoder_output`` and for self-attention with one.
        """
        refuse_others("MultiheadAttention", others)
        is_cross = self.attention_type == "cross"
        option = f"attention_type={self.attention_type!r}"
        check_sequences("MultiheadAttention", hidden_states, encoder_output, is_cross, option)
        normed: Tensor | None = None
        heads: dict[str, Tensor] = {}
        for attribute, names in self.projections.items():
            source = encoder_output if attribute == "key_value" else hidden_states
            y = getattr(self, attribute)(source, is_first_microbatch=is_first_microbatch)
            if attribute.startswith("layernorm_") and self.return_layernorm_output:
                y, normed = y
            heads |= zip(names, self._heads(y, names), strict=True)
        q, k = self._normed_and_rotated(heads["query"], heads["key"], rotary_pos_emb)
        context = self.core_attention(
            q, k, heads["value"], attention_mask, attn_mask_type=attn_mask_type, window_size=window_size,
            checkpoint_core_attention=checkpoint_core_attention,
        )  # fmt: skip
        y = self.proj(context, is_first_microbatch=is_first_microbatch)
        outputs = (*(y if self.return_bias else (y,)), *((normed,) if self.return_layernorm_output else ()))
        return outputs if len(outputs) > 1 else outputs[0]

    def _normed_and_rotated(
        self, q: Tensor, k: Tensor, rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys after their norms and the rotation, if there are any."""
        if self.q_norm is not None and self.k_norm is not None and self.qk_norm_before_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary_pos_emb is not None:
            check("MultiheadAttention", "rotary_pos_emb", rotary_pos_emb, ANGLES)
            angles = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb, rotary_pos_emb)
            form, interleaved = self.core_attention.qkv_format, self.rotary_pos_interleaved
            context = self.core_attention.context_parallel
            options: dict[str, Any] = {
                "interleaved": interleaved, "cp_size": context.size, "cp_rank": context.rank
            }  # fmt: skip
            q = apply_rotary_pos_emb(q, angles[0], form, **options)
            k = apply_rotary_pos_emb(k, angles[1], form, **options)
        if self.q_norm is not None and self.k_norm is not None and not self.qk_norm_before_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k

    # ------------------------------------------------------------------------------------------ heads in a projection

    def _heads(self, mixed: Tensor, names: Sequence[str]) -> list[Tensor]:
        """(..., channels of all) -> (..., heads, kv_channels) for each name."""
        groups = self.num_gqa_groups
        counts = [self.num_attention_heads if name == "query" else groups for name in names]
        # Dynamo cannot trace Tensor.unflatten under the torch function mode of autocast.
        if self.qkv_weight_interleaved:
            grouped = torch.unflatten(mixed, -1, (groups, -1, self.kv_channels))
            return [heads.flatten(-3, -2) for heads in grouped.split([n // groups for n in counts], -2)]
        return list(torch.unflatten(mixed, -1, (-1, self.kv_channels)).split(counts, -2))

    def _fused(self, weights: Sequence[Tensor]) -> Tensor:
        """The rows of all weights, one after the other or interleaved by group: the inverse of ``_heads``."""
        if not self.qkv_weight_interleaved:
            return torch.cat(list(weights))
        grouped = [weight.unflatten(0, (self.num_gqa_groups, -1, self.kv_channels)) for weight in weights]
        return torch.cat(grouped, 1).flatten(0, 2)

    # ------------------------------------------------------------------------------------------ from torch

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, **options: Any) -> MultiheadAttention:
        """A layer with the function of ``module`` and copies of its parameters; ``options`` override arguments.

        Raises NotImplementedError for key or value sizes other than embed_dim, ``add_bias_kv`` and ``add_zero_attn``.
        """
        check("MultiheadAttention.from_torch", "module", module, ATTENTION)
        if not module._qkv_same_embed_dim or module.bias_k is not None or module.add_zero_attn:
            raise NotImplementedError(
                f"MultiheadAttention.from_torch: kdim={module.kdim}, vdim={module.vdim}, add_bias_kv="
                f"{module.bias_k is not None}, add_zero_attn={module.add_zero_attn}; only kdim = vdim = embed_dim "
                f"({module.embed_dim}) without these is supported: use torch's module, which autocast quantizes too"
            )
        weight = module.out_proj.weight
        known: dict[str, Any] = {
            "attention_dropout": module.dropout,
            "attn_mask_type": "no_mask",
            "bias": module.in_proj_bias is not None,
            "qkv_format": "bshd" if module.batch_first else "sbhd",
            "params_dtype": weight.dtype,
            "device": weight.device,
        }
        made = cls(module.embed_dim, module.num_heads, **(known | options))
        made.load_state_dict(module.state_dict())
        return made.train(module.training)


SELF = {True: {"layernorm_qkv": ("query", "key", "value")}, False: {"qkv": ("query", "key", "value")}}
CROSS = {
    True: {"layernorm_query": ("query",), "key_value": ("key", "value")},
    False: {"query_layer": ("query",), "key_value": ("key", "value")},
}
"""With a norm or without: attribute -> what its projection computes, in order."""


def _from_torch_names(module: MultiheadAttention, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Before a state dict is loaded: rename the parameters of nn.MultiheadAttention."""
    for kind in ("weight", "bias"):
        if f"{prefix}out_proj.{kind}" in state_dict:
            state_dict[f"{prefix}proj.{kind}"] = state_dict.pop(f"{prefix}out_proj.{kind}")
        packed = state_dict.pop(f"{prefix}in_proj_{kind}", None)
        if packed is None:
            continue
        rows = dict(zip(("query", "key", "value"), packed.chunk(3), strict=True))
        for attribute, names in module.projections.items():
            if module._is_fused(attribute):
                state_dict[f"{prefix}{attribute}.{kind}"] = module._fused([rows[name] for name in names])
            else:
                state_dict.update({f"{prefix}{attribute}.{name}_{kind}": rows[name] for name in names})
