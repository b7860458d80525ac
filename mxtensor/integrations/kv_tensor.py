"""What attention gets from ``mx.KVCache``: keys or values that it reads in codes, and every other op as values.

``F.scaled_dot_product_attention`` of two of them runs the kernels of ``kernels/attention``. The three calls by which
transformers repeats heads of keys for groups of queries (index with None, ``expand``, ``reshape``) repeat nothing: the
kernels take fewer heads of keys than of queries. ``CachedTokens`` is a tensor; ``TracedTokens`` takes its place while
Dynamo traces a step with a static cache, because a graph can hold tensors of torch only.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.compat import disable_subclass_torch_function, make_wrapper_subclass, tree_map_only
from ..core.compat_compile import run_rules_uncompiled
from ..core.shapes import contiguous_stride
from ..kernels.attention.arguments import AttentionArgs, Tokens
from ..kernels.attention.choose_attention import attention, traced_attention
from ..kernels.quantize.choose_cast import dequantize_operand

EVERYTHING = slice(None)
ViewT = TypeVar("ViewT", bound="_View")


class _View:
    """Keys or values of a layer, (batch, heads * repeats, tokens, head size): a view of the cache, until it changes.

    ``center`` is added to all tokens, (batch, heads, 1, head size); attention over keys does not need it. ``grouped``:
    (batch, heads, repeats, tokens, head size), between two of the calls that repeat heads.
    """

    tokens: Tokens
    center: Tensor | None
    dtype: torch.dtype
    repeats: int
    grouped: bool

    def like(self: ViewT, tokens: Tokens | None = None, repeats: int | None = None, grouped: bool = False) -> ViewT:
        """The same with other tokens, with heads repeated, or with a dimension for repeats."""
        tokens = self.tokens if tokens is None else tokens
        kind: Any = type(self)
        view: ViewT = kind(tokens, self.center, self.dtype, self.repeats if repeats is None else repeats, grouped)
        return view

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values in ``dtype`` (default: that of the model)."""
        tokens, dtype = self.tokens, self.dtype if dtype is None else dtype
        codes = dequantize_operand(tokens.codes.map_blocks(Tensor.contiguous, tokens.codes.shape), torch.float32)
        values = torch.cat((tokens.first, codes), 2)
        values = (values if self.center is None else values + self.center).to(dtype)
        if self.grouped:
            return values[:, :, None].expand(_shape(tokens, self.repeats, True))
        return values if self.repeats == 1 else values.repeat_interleave(self.repeats, 1)


def _shape(tokens: Tokens, repeats: int, grouped: bool) -> torch.Size:
    batch, heads, *rest = tokens.shape
    return torch.Size((batch, heads, repeats, *rest) if grouped else (batch, heads * repeats, *rest))


class CachedTokens(_View, Tensor):
    """A view of keys or values as a tensor: ``dequantize()`` gives the values."""

    @staticmethod
    def __new__(
        cls, tokens: Tokens, center: Tensor | None, dtype: torch.dtype, repeats: int = 1, grouped: bool = False
    ) -> CachedTokens:
        size = _shape(tokens, repeats, grouped)
        self: CachedTokens = make_wrapper_subclass(
            cls, size, strides=contiguous_stride(size), storage_offset=0, dtype=dtype, device=tokens.first.device,
            requires_grad=False,
        )  # fmt: skip
        self.tokens, self.center, self.repeats, self.grouped = tokens, center, repeats, grouped
        return self

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


class TracedTokens(_View):
    """CachedTokens of a compiled graph: it has the ops that these methods call."""

    def __init__(
        self, tokens: Tokens, center: Tensor | None, dtype: torch.dtype, repeats: int = 1, grouped: bool = False
    ) -> None:
        self.tokens, self.center, self.dtype, self.repeats, self.grouped = tokens, center, dtype, repeats, grouped

    @property
    def shape(self) -> torch.Size:
        """As of a tensor."""
        return _shape(self.tokens, self.repeats, self.grouped)

    def __getitem__(self, index: Any) -> Any:
        found = _index(self, index)
        return self.dequantize()[index] if found is None else found

    def expand(self, *size: Any) -> Any:
        """As of a tensor: repeats heads between an index with None and ``reshape``."""
        found = _expand(self, *size)
        return self.dequantize().expand(*size) if found is None else found

    def reshape(self, *size: Any) -> Any:
        """As of a tensor: joins heads and their repeats."""
        found = _reshape(self, *size)
        return self.dequantize().reshape(*size) if found is None else found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dequantize(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = _attention(*args, **kwargs) if func is F.scaled_dot_product_attention else None
        if found is not None:
            return found
        plain = [x.dequantize() if isinstance(x, TracedTokens) else x for x in (*args, *kwargs.values())]
        return func(*plain[: len(args)], **dict(zip(kwargs, plain[len(args) :], strict=True)))


# Rules: each returns None where it has nothing to say, and the values are read.


def _index(x: Any, index: Any) -> Any:
    """``x`` with a dimension for repeats (``x[:, :, None, :, :]``), or its first tokens (``x[:, :, :n, :]``)."""
    if not isinstance(x, _View) or x.grouped or type(index) is not tuple or len(index) not in (3, 4, 5):
        return None
    if any(type(i) is not slice or i != EVERYTHING for i in (*index[:2], *index[3:])):
        return None
    if len(index) == 5:
        return x.like(grouped=True) if index[2] is None and x.repeats == 1 else None
    tokens = index[2]
    if type(tokens) is not slice or tokens.start not in (None, 0) or tokens.step not in (None, 1):
        return None
    is_count = type(tokens.stop) is int and 0 < tokens.stop <= x.tokens.shape[2]
    return x.like(x.tokens.up_to(tokens.stop)) if is_count else None


def _expand(x: Any, *size: Any) -> Any:
    size = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
    if not isinstance(x, _View) or not x.grouped or x.repeats != 1 or len(size) != 5:
        return None
    return x.like(repeats=size[2], grouped=True) if size == tuple(_shape(x.tokens, size[2], True)) else None


def _reshape(x: Any, *size: Any) -> Any:
    size = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
    if not isinstance(x, _View) or not x.grouped:
        return None
    return x.like() if size == tuple(_shape(x.tokens, x.repeats, False)) else None


def _attention(
    query: Tensor, key: Any, value: Any, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor | None:  # fmt: skip
    """The attention of queries in high precision over codes; None if the values have to be multiplied."""
    if not isinstance(key, _View) or not isinstance(value, _View) or type(query) is not Tensor:
        return None
    tensors = (query,) if attn_mask is None else (query, attn_mask)
    if dropout_p > 0 or value.center is not None or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
        return None
    k, v, heads = key.tokens, value.tokens, query.shape[1] if query.dim() == 4 else 0
    of_keys = k.shape[1] * key.repeats
    grouped = heads == of_keys or (enable_gqa and heads % max(of_keys, 1) == 0)
    same = k.shape[:3] == v.shape[:3] and query.shape[0] == k.shape[0] and query.shape[-1] == k.shape[-1]
    if not (heads and grouped and same) or key.grouped or value.grouped or (is_causal and attn_mask is not None):
        return None
    args = AttentionArgs(
        1 / math.sqrt(query.shape[-1]) if scale is None else scale, k.mask(attn_mask, is_causal), is_causal
    )
    return (traced_attention if isinstance(key, TracedTokens) else attention)(query, k, v, args)


_RULES: dict[Any, Any] = {
    F.scaled_dot_product_attention: _attention,
    Tensor.__getitem__: _index,
    Tensor.expand: _expand,
    Tensor.reshape: _reshape,
}
run_rules_uncompiled(CachedTokens)
