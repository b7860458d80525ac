"""Checks of the arguments that TransformerEngine's modules take, also of those that have no effect here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch.distributed as dist

from ..core.arguments import described, is_one_of


def one_of(what: str, value: str, choices: Iterable[str]) -> str:
    """``value``, if it is one of ``choices``. Raises ValueError otherwise; ``what`` names the argument."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{what} is {described(value)}; choose one of {', '.join(choices)}")
    return value


def check_heads(name: str, heads: int, groups: int | None) -> int:
    """The number of key and value heads. Raises ValueError unless the query heads divide into that many groups."""
    groups = heads if groups is None else groups
    if heads < 1 or groups < 1 or heads % groups:
        raise ValueError(f"{name}: num_attention_heads={heads} must be a multiple of num_gqa_groups={groups}")
    return groups


# ---------------------------------------------------------------------------------------------- what is not here


class Other(NamedTuple):
    """An argument of TransformerEngine that asks for something that is not here."""

    asks_for_nothing: Callable[[Any], bool]
    """Whether a value leaves the layer as it is here: it is accepted."""
    instead: str = ""
    """The end of the error for other values."""


def _only(*values: Any) -> Callable[[Any], bool]:
    return lambda value: is_one_of(value, values)


def _anything(value: Any) -> bool:
    return True


def _one_rank(group: Any) -> bool:
    return group is None or (
        dist.is_available() and isinstance(group, dist.ProcessGroup) and dist.get_world_size(group) == 1
    )


_USERBUFFERS = Other(_only(None, False), "collectives do not overlap by userbuffers; leave it out")
_PLAIN = Other(_only(None, False), "results and gradients of layers are plain tensors; quantize them by a quantizer")
_BIAS = Other(_only(None, "no_bias"), "attention adds no bias; call F.scaled_dot_product_attention with attn_mask")
_PACKED = Other(_only(None, False), "sequences are not packed; pass attention_mask with attn_mask_type='padding'")
_DIAGONAL = Other(_only(None), "the mask type has the diagonal; use attn_mask_type='causal' or 'causal_bottom_right'")
_SCORES = Other(_only(None), "attention is torch's; call torch's flex_attention")
_STACK = Other(_only(None, False), "each group has parameters of its own; leave it out")
_RESULT = Other(_only(None), "results are new tensors; leave it out")
_NO_EFFECT = Other(_anything)
OTHERS: dict[str, Other] = {
    **dict.fromkeys(("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad"), _USERBUFFERS),
    **dict.fromkeys(("ub_bulk_dgrad", "ub_bulk_wgrad", "ub_tp_comm_overlap"), _USERBUFFERS),
    "symmetric_ar_type": Other(_only(None), "sums over ranks are all-reduces of torch.distributed; leave it out"),
    **dict.fromkeys(("fp8_output", "fp8_grad", "bf16_backward"), _PLAIN),
    **dict.fromkeys(("core_attention_bias_type", "core_attention_bias", "alibi_slopes"), _BIAS),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"), _PACKED),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_kv", "pad_between_seqs"), _PACKED),
    **dict.fromkeys(("bottom_right_diagonal", "enc_dec_bottom_right_diagonal"), _DIAGONAL),
    **dict.fromkeys(("score_mod", "score_mod_bprop", "score_mod_tensors", "score_mod_bprop_tensors"), _SCORES),
    **dict.fromkeys(("single_grouped_weight", "single_grouped_bias", "use_grouped_tensor"), _STACK),
    **dict.fromkeys(("out", "dgrad_out"), _RESULT),
    "softmax_type": Other(_only("vanilla"), "attention is torch's, whose softmax is 'vanilla'"),
    "return_max_logit": Other(_only(None, False), "torch's attention does not return logits; leave it out"),
    "inference_params": Other(_only(None), "layers have no cache; use mx.KVCache with transformers"),
    "cp_group": Other(_one_rank, "call set_context_parallel_group(cp_group, cp_comm_type='all_gather')"),
    "cp_comm_type": Other(_anything),
    **dict.fromkeys(("cp_global_ranks", "cp_stream"), _NO_EFFECT),
    **dict.fromkeys(("fast_zero_fill", "num_splits", "ub_name"), _NO_EFFECT),
}
"""Argument of a constructor or of ``forward`` there."""
ELSEWHERE = {
    "dtype": "it is params_dtype here, as in TransformerEngine",
    **dict.fromkeys(("fp8", "recipe", "fp8_recipe"), "call the layer inside mx.autocast(recipe=...)"),
}
"""Argument that a layer of torch or a user's guess has -> what it is here."""


def refuse_others(owner: str, others: Mapping[str, Any], no_effect: Iterable[str] = ()) -> None:
    """Raise NotImplementedError for the first of these arguments that asks for something, TypeError for an unknown one.

    ``owner`` names the module; ``no_effect``: names whose values have no effect there.
    """
    for name, value in others.items():
        if name in no_effect:
            continue
        if name not in OTHERS:
            instead = f"; {ELSEWHERE[name]}" if name in ELSEWHERE else ""
            raise TypeError(f"{owner} got an unexpected keyword argument {name!r}{instead}")
        if not OTHERS[name].asks_for_nothing(value):
            raise NotImplementedError(f"{owner}: {name}={described(value)} is not available: {OTHERS[name].instead}")
