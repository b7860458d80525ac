"""DotProductAttention: softmax(Q K^T) V in high precision, whatever recipe is active.

The MXFP8 pre-training paper quantizes linear layers only, and so does ``autocast``. torch's
scaled_dot_product_attention computes both products.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import CausalBias
from torch.utils.checkpoint import checkpoint

from ..core.arguments import (
    COUNT,
    FLAG,
    FUNCTION,
    LARGEST,
    SHARE,
    Kind,
    check,
    checked,
    described,
    is_dense_float,
    is_integers,
    optional,
)
from ..core.compat import disable_torch_function
from .arguments import check_heads, one_of, refuse_others
from .attention_masks import MASKS, PaddingMask, Window, visible
from .context_parallel import ContextParallel, SequenceSplit
from .extra_state import ATTENTION, EXTRA_STATE, ignore_keys
from .tensor_parallel import Parallel

QKV_FORMATS = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3)}
"""Format -> the permutation to (batch, head, position, channel)."""
BACK = {"sbhd": (2, 0, 1, 3), "bshd": (0, 2, 1, 3)}
"""Format -> the inverse permutation."""
ATTENTION_TYPES = ("self", "cross")


CHANNELS = Kind(
    "an integer of 1 or more, or two of them",
    lambda given: is_integers(given if isinstance(given, tuple) else (given,)),
    lambda given: (
        (not isinstance(given, tuple) or len(given) == 2)
        and all(0 < n <= LARGEST for n in (given if isinstance(given, tuple) else (given,)))
    ),
)
ATTENDED = Kind("a dense floating-point torch.Tensor", lambda t: isinstance(t, Tensor) and is_dense_float(t))
MASK = optional(
    Kind(
        "a dense bool tensor, or a pair of them",
        lambda mask: all(
            isinstance(m, Tensor) and m.layout is torch.strided for m in (mask if isinstance(mask, tuple) else (mask,))
        ),
        lambda mask: isinstance(mask, Tensor) or len(mask) == 2,
    )
)
WINDOW = optional(
    Kind(
        "two integers (left, right), -1 for no limit",
        lambda window: isinstance(window, (tuple, list)) and is_integers(window),
        lambda window: len(window) == 2 and all(-1 <= n <= LARGEST for n in window),
    )
)


class DotProductAttention(SequenceSplit):
    """Attention of queries (s, b, h, d) over keys and values (s, b, g, d), for ``bshd`` (b, s, ...). No parameters.

    - ``kv_channels``: d, or (d of queries and keys, d of values).
    - ``attn_mask_type``: one of ``MASKS``. The diagonal of ``causal`` and ``padding_causal`` starts at the top left,
      that of the other types ends at the bottom right.
    - ``window_size`` (left, right): the number of keys that a query sees on each side of the diagonal, -1 for all.
      (-1, 0) belongs to the causal types, as in TransformerEngine: with others it is (-1, -1), and warns.
    - ``attention_dropout`` is active in training only; ``get_rng_state_tracker`` gives each rank its own.
    - ``tp_group`` or ``tp_size``: this rank has its part of the heads, whose numbers are those of all ranks.
    - ``cp_group``: this rank has two chunks of every sequence, and attends to those of all ranks of the group
      (``context_parallel.py``). ``cp_comm_type``: "all_gather", "p2p" (the same) or "a2a". ``cp_global_ranks`` and
      ``cp_stream`` have no effect.

    Each call may override ``qkv_format``, ``attn_mask_type`` and ``window_size``. Raises ValueError for numbers of
    heads that do not divide, and for unknown names.
    """

    @checked(
        num_attention_heads=COUNT, num_gqa_groups=optional(COUNT), attention_dropout=SHARE,
        get_rng_state_tracker=optional(FUNCTION),
    )  # fmt: skip
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: Window | None = None,
        *,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        softmax_scale: float | None = None,
        cp_group: Any = None,
        cp_comm_type: str = "p2p",
        **others: Any,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        refuse_others(name, others, ("name",))
        self.split = split = Parallel(name, tp_group, tp_size, "column", sequence_parallel, get_rng_state_tracker)
        groups = check_heads(name, num_attention_heads, num_gqa_groups)
        check(name, "kv_channels", kv_channels, CHANNELS)
        check(name, "window_size", window_size, WINDOW)
        self.num_attention_heads = split.part("num_attention_heads", num_attention_heads, "column")
        self.num_gqa_groups = split.part("num_gqa_groups", groups, "column")
        self.channels = (kv_channels, kv_channels) if isinstance(kv_channels, int) else tuple(kv_channels)
        self.attention_dropout = attention_dropout
        self.qkv_format = one_of(f"{name}: qkv_format", qkv_format, QKV_FORMATS)
        self.attn_mask_type = one_of(f"{name}: attn_mask_type", attn_mask_type, MASKS)
        self.attention_type = one_of(f"{name}: attention_type", attention_type, ATTENTION_TYPES)
        self.window_size = window_size
        self.softmax_scale = 1 / math.sqrt(self.channels[0]) if softmax_scale is None else softmax_scale
        self.layer_number = layer_number
        self.context_parallel = ContextParallel(name, cp_group, cp_comm_type)
        ignore_keys(self, EXTRA_STATE, ATTENTION)

    def extra_repr(self) -> str:
        return (
            f"{self.num_attention_heads}, {self.channels}, num_gqa_groups={self.num_gqa_groups}, "
            f"attn_mask_type={self.attn_mask_type!r}, qkv_format={self.qkv_format!r}"
        )

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: PaddingMask | None = None,
        qkv_format: str | None = None,
        *,
        attn_mask_type: str | None = None,
        window_size: Window | None = None,
        checkpoint_core_attention: bool = False,
        **others: Any,
    ) -> Tensor:
        """(s, b, h * d of values), for ``bshd`` (b, s, ...).

        ``attention_mask`` is bool, True for what is masked out. For ``padding`` types: (b, 1, 1, s) for both queries
        and keys, or a pair of these, with the padding at the end. For ``arbitrary``: broadcastable to (b, h, s of
        queries, s of keys). Other types ignore it. A query that sees no key gives zeros. ``checkpoint_core_attention``
        recomputes the attention in the backward pass instead of saving it. Raises ValueError for shapes and masks that
        do not fit, TypeError for masks that are not bool.
        """
        name = type(self).__name__
        refuse_others(name, others)
        form = one_of(f"{name}: qkv_format", self.qkv_format if qkv_format is None else qkv_format, QKV_FORMATS)
        check(name, "attention_mask", attention_mask, MASK)
        mask_type = one_of(
            f"{name}: attn_mask_type", self.attn_mask_type if attn_mask_type is None else attn_mask_type, MASKS
        )
        check(name, "window_size", window_size, WINDOW)
        check(name, "checkpoint_core_attention", checkpoint_core_attention, FLAG)
        left, right = window_size or self.window_size or (-1, -1)
        if (left, right) == (-1, 0) and not MASKS[mask_type].causal:
            if not torch.compiler.is_compiling():
                warnings.warn(
                    f"{name}: window_size=(-1, 0) limits nothing with attn_mask_type={mask_type!r}, as in "
                    "TransformerEngine; choose a causal type to hide the keys after the query",
                    UserWarning,
                    stacklevel=2,
                )
            right = -1
        self._check(query_layer, key_layer, value_layer, form)
        q, k, v = (t.permute(QKV_FORMATS[form]) for t in (query_layer, key_layer, value_layer))
        core: Callable[..., Tensor]
        masks: tuple[Any, ...]
        if self.context_parallel.size > 1:
            self.context_parallel.check(mask_type, q.shape[2], k.shape[2])
            core = self.context_parallel.attend
            masks = mask_type, (left, right), bool(checkpoint_core_attention), self._core
        else:
            seen = visible(mask_type, (left, right), attention_mask, (*q.shape[:3], k.shape[2]), q.device)
            core, masks = self._core, seen
        if checkpoint_core_attention:
            with disable_torch_function():  # no rule of autocast is needed, and none would survive compilation
                y = checkpoint(core, q, k, v, *masks, use_reentrant=False)
        else:
            y = core(q, k, v, *masks)
        out: Tensor = y.permute(BACK[form]).flatten(2)
        return out

    def _check(self, q: Tensor, k: Tensor, v: Tensor, form: str) -> None:
        name = type(self).__name__
        for argument, t in (("query_layer", q), ("key_layer", k), ("value_layer", v)):
            check(name, argument, t, ATTENDED)
        if len({q.dtype, k.dtype, v.dtype}) > 1 or len({q.device, k.device, v.device}) > 1:
            given = ", ".join(map(described, (q, k, v)))
            raise ValueError(f"{name}: query, key and value need one dtype and one device, got {given}")
        batch, shapes = form.index("b"), (tuple(q.shape), tuple(k.shape), tuple(v.shape))
        heads = (self.num_attention_heads, self.num_gqa_groups, self.num_gqa_groups)
        channels = (self.channels[0], *self.channels)
        fits = all(len(s) == 4 and s[2:] == (h, d) for s, h, d in zip(shapes, heads, channels, strict=True))
        if not fits or shapes[1][:2] != shapes[2][:2] or shapes[0][batch] != shapes[1][batch]:
            wanted = ", ".join(f"(..., {h}, {d})" for h, d in zip(heads, channels, strict=True))
            raise ValueError(
                f"{type(self).__name__}: query, key and value {shapes[0]}, {shapes[1]}, {shapes[2]} do not fit: {form} "
                f"needs one batch size, {wanted}, and one length for keys and values"
            )

    def _core(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, seen: Tensor | None) -> Tensor:
        groups = self.num_attention_heads // self.num_gqa_groups
        dropout = self.attention_dropout if self.training else 0.0
        attend = partial(F.scaled_dot_product_attention, dropout_p=dropout, scale=self.softmax_scale)
        with self.split.draws() if dropout > 0 else nullcontext():
            if seen is None or isinstance(seen, CausalBias):
                return attend(q, k, v, seen, is_causal=causal, enable_gqa=groups > 1)
            if groups > 1:  # torch's memory-efficient kernel accepts masks but no groups
                k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            blind = ~seen.any(-1, keepdim=True)  # for a row without keys each kernel gives another result
            return attend(q, k, v, seen | blind).masked_fill(blind, 0)
