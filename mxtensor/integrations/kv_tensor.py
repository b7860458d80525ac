"""CachedTokens: a tensor of a cache, which attention reads in codes and every other op as values.

``F.scaled_dot_product_attention`` of two of them runs the kernels of ``kernels/attention``. The three calls by which
transformers repeats heads of keys for groups of queries (index with None, ``expand``, ``reshape``) repeat nothing: the
kernels take fewer heads of keys than of queries.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.compat import disable_subclass_torch_function, make_wrapper_subclass, tree_map_only
from ..core.compat_compile import run_rules_uncompiled
from ..core.shapes import contiguous_stride
from ..kernels.attention.select import attention
from ..kernels.attention.spec import AttentionArgs, Tokens
from ..kernels.quantize.select import dequantize_operand

EVERYTHING = slice(None)


def decoded(tokens: Tokens, center: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The values of keys or values, (batch, heads, tokens, head size); ``center`` is added to all tokens."""
    codes = dequantize_operand(tokens.codes.map_blocks(Tensor.contiguous, tokens.codes.shape), torch.float32)
    values = torch.cat((tokens.first, codes), 2)
    return (values if center is None else values + center).to(dtype)


def with_repeated_heads(values: Tensor, repeats: int, shape: torch.Size) -> Tensor:
    """``values`` with each head repeated; ``shape`` has a dimension for the repeats between two calls of transformers
    that repeat heads."""
    if len(shape) == 5:
        return values[:, :, None].expand(shape)
    return values if repeats == 1 else values.repeat_interleave(repeats, 1)


class CachedTokens(Tensor):
    """Keys or values of a layer, (batch, heads, tokens, head size): a view of the cache, until it changes.

    ``dequantize()`` gives the values. After heads are repeated, the shape is (batch, heads * repeats, tokens, size).
    """

    tokens: Tokens
    center: Tensor | None
    """What is added to all tokens, (batch, heads, 1, head size); attention over keys does not need it."""
    repeats: int

    @staticmethod
    def __new__(
        cls, tokens: Tokens, center: Tensor | None, dtype: torch.dtype, repeats: int = 1, size: Any = None
    ) -> CachedTokens:
        """``size``: (batch, heads, repeats, tokens, head size) between two calls that repeat heads."""
        batch, heads, count, length = tokens.shape
        size = (batch, heads * repeats, count, length) if size is None else tuple(size)
        self: CachedTokens = make_wrapper_subclass(
            cls, size, strides=contiguous_stride(size), storage_offset=0, dtype=dtype, device=tokens.first.device,
            requires_grad=False,
        )  # fmt: skip
        self.tokens, self.center, self.repeats = tokens, center, repeats
        return self

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values in ``dtype`` (default: that of the model)."""
        values = decoded(self.tokens, self.center, self.dtype if dtype is None else dtype)
        return with_repeated_heads(values, self.repeats, self.shape)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"CachedTokens(shape={tuple(self.shape)}, format={self.tokens.codes.format}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """The values, which do not change with the cache."""
        memo[id(self)] = values = self.dequantize()
        return values

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = _RULES.get(func)
        found = None if rule is None else rule(*args, **(kwargs or {}))
        if found is not None:
            return found
        with disable_subclass_torch_function():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Every op has the values."""
        args, kwargs = tree_map_only(CachedTokens, CachedTokens.dequantize, (args, kwargs or {}))
        return func(*args, **kwargs)


def first_of(index: Any, count: int) -> int | None:
    """n, if ``index`` takes the first n of ``count`` tokens and nothing else, such as ``x[:, :, :n, :]``."""
    if type(index) is not tuple or len(index) not in (3, 4) or any(type(i) is not slice for i in index):
        return None
    tokens, others = index[2], index[:2] + index[3:]
    if any(i != EVERYTHING for i in others) or tokens.start not in (None, 0) or tokens.step not in (None, 1):
        return None
    return tokens.stop if type(tokens.stop) is int and 0 < tokens.stop <= count else None


def _index(x: Any, index: Any) -> CachedTokens | None:
    if not isinstance(x, CachedTokens) or x.dim() != 4:
        return None
    count = first_of(index, x.shape[2])
    if count is not None:
        return CachedTokens(x.tokens.up_to(count), x.center, x.dtype, x.repeats)
    return _with_dimension(x, index)


def _with_dimension(x: Any, index: Any) -> CachedTokens | None:
    fits = isinstance(x, CachedTokens) and x.repeats == 1 and x.dim() == 4 and type(index) is tuple
    if not fits or len(index) != 5 or index[2] is not None or any(i != EVERYTHING for i in index[:2] + index[3:]):
        return None
    batch, heads, *rest = x.shape
    return CachedTokens(x.tokens, x.center, x.dtype, 1, (batch, heads, 1, *rest))


def _expand(x: Any, *size: Any) -> CachedTokens | None:
    size = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
    if not isinstance(x, CachedTokens) or x.dim() != 5 or len(size) != 5 or x.repeats != 1:
        return None
    if tuple(size[:2]) + tuple(size[3:]) != tuple(x.shape[:2]) + tuple(x.shape[3:]):
        return None
    return CachedTokens(x.tokens, x.center, x.dtype, int(size[2]), size)


def _reshape(x: Any, *size: Any) -> CachedTokens | None:
    size = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
    if not isinstance(x, CachedTokens) or x.dim() != 5:
        return None
    batch, heads, count, length = x.tokens.shape
    wanted = (batch, heads * x.repeats, count, length)
    return CachedTokens(x.tokens, x.center, x.dtype, x.repeats) if tuple(size) == wanted else None


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """The attention of queries in high precision over codes; None if the values have to be multiplied."""
    if not isinstance(key, CachedTokens) or not isinstance(value, CachedTokens) or type(query) is not Tensor:
        return None
    tensors = (query,) if attn_mask is None else (query, attn_mask)
    if dropout_p > 0 or value.center is not None or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
        return None
    k, v, heads = key.tokens, value.tokens, query.shape[1] if query.dim() == 4 else 0
    grouped = heads == key.shape[1] or (enable_gqa and heads % max(key.shape[1], 1) == 0)
    same = k.shape[:3] == v.shape[:3] and query.shape[0] == k.shape[0] and query.shape[-1] == k.shape[-1]
    if not (heads and grouped and same) or 5 in (key.dim(), value.dim()) or (is_causal and attn_mask is not None):
        return None
    multiplier = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return attention(query, k, v, AttentionArgs(multiplier, k.mask(attn_mask, is_causal), is_causal))


_RULES: dict[Any, Any] = {
    F.scaled_dot_product_attention: _attention,
    Tensor.__getitem__: _index,
    Tensor.expand: _expand,
    Tensor.reshape: _reshape,
}
"""torch function -> rule, which returns None where it has nothing to say."""
run_rules_uncompiled(CachedTokens)
