"""Attention over codes: the tuple of kernels, fastest first, and the one function that goes through them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...core.kernel import Kernel, Spec
from ...core.select import perform
from ...core.tracing import is_traced
from . import by_heads, cpu, triton_ranges, values_cpu, values_cuda
from .spec import AttentionArgs, Tokens

ATTENTION: tuple[Kernel, ...] = (triton_ranges.KERNEL, cpu.KERNEL, by_heads.KERNEL)
"""``run(q, k, v, args)``: the result, in the dtype of q."""


def attention(q: Tensor, k: Tokens, v: Tokens, args: AttentionArgs) -> Tensor:
    """softmax(q k^T * scale + mask) v: q (B, Hq, Q, D), k (B, H, S, D), v (B, H, S, E), Hq a multiple of H; result
    (B, Hq, Q, E) in the dtype of q.

    The values of codes are those that ``dequantize_operand`` gives, before they are rounded to the dtype of q.
    """
    shapes, formats = (tuple(q.shape), k.shape, v.shape), (q.dtype, k.codes.format, v.codes.format)
    data = k.codes.data
    spec = Spec("attention", shapes, formats, q.dtype, data.device, is_traced(q, data, v.codes.data, args.mask))
    return perform(ATTENTION, spec, q, k, v, args)  # type: ignore[no-any-return]


def op_of_values(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Any:
    """The op that computes this attention of keys and values in high precision; None where torch's is the one to take.

    ``op(q, k, v, mask, scale)``, for real and for fake tensors.
    """
    if q.device.type == "cuda":
        return values_cuda.attention_of_values if values_cuda.takes(q, k, v, mask) else None
    return values_cpu.attention_of_values if values_cpu.takes(q, k, v) and values_cpu.library() is None else None
