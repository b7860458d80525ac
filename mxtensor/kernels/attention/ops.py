"""Attention over codes, and the cast of tokens, as custom ops: what a compiled graph calls.

An op runs the kernels of eager code, so that a compiled step of decoding reads codes too.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ...core import custom_ops
from ...numerics.cast import Cast
from ...numerics.formats import get_format
from ...numerics.operand import Operand
from ..quantize.select import quantize_operand
from .select import attention
from .spec import AttentionArgs, Tokens, codes_format


@custom_ops.define("mxtensor::encode_tokens")
def encode_tokens(x: Tensor, format: str, scaling: str, rounding: str, amax_epsilon: float) -> list[Tensor]:
    """Codes and scales of tokens (batch, heads, tokens, head size), which a global scale was divided out of."""
    cast = Cast.of(format, scaling, rounding, None, amax_epsilon)
    operand = quantize_operand(x.contiguous(), replace(cast, format=codes_format(cast.format)))
    return [operand.data, operand.scale]


@custom_ops.fake_of(encode_tokens)
def _(x, format, scaling, rounding, amax_epsilon):  # type: ignore[no-untyped-def]
    return list(Operand.empty(codes_format(get_format(format)), x.shape, x.device).tensors)


def _tokens(first: Tensor, data: Tensor, scale: Tensor, global_scale: Tensor | None, format: str) -> Tokens:
    return Tokens(first, Operand(data, scale, global_scale, get_format(format), (*data.shape[:3], first.shape[-1])))


@custom_ops.define("mxtensor::attention")
def attention_op(
    q: Tensor, k_first: Tensor, k_data: Tensor, k_scale: Tensor, k_global: Tensor | None, v_first: Tensor,
    v_data: Tensor, v_scale: Tensor, v_global: Tensor | None, mask: Tensor | None, format: str, scale: float,
    causal: bool,
) -> Tensor:  # fmt: skip
    """``attention`` of queries over keys and values, each as its first tokens, codes and scales."""
    keys = _tokens(k_first, k_data, k_scale, k_global, format)
    values = _tokens(v_first, v_data, v_scale, v_global, format)
    return attention(q, keys, values, AttentionArgs(scale, mask, causal)).contiguous()


@custom_ops.fake_of(attention_op)
def _(q, k_first, k_data, k_scale, k_global, v_first, *rest):  # type: ignore[no-untyped-def]
    return q.new_empty((*q.shape[:3], v_first.shape[-1]))


def traced_attention(q: Tensor, k: Tokens, v: Tokens, args: AttentionArgs) -> Tensor:
    """``attention`` as one op of a graph. Both sides have one format."""
    sides = [t for s in (k, v) for t in (s.first, s.codes.data, s.codes.scale, s.codes.global_scale)]
    out: Tensor = attention_op(q, *sides, args.mask, k.codes.format.name, args.scale, args.causal)
    return out
