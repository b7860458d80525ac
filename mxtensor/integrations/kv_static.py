"""The static layer of ``mx.KVCache``: memory of one size and no step that depends on values, so that a model compiles.

All tokens have their places from the start. How many there are is a tensor: positions are computed from it, and the
mask hides empty places. Writes that a step must not make go to one more row, which is never read.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..core.compat import keep_address
from ..kernels.attention.ops import encode_tokens, traced_attention
from ..kernels.attention.spec import AttentionArgs, Tokens, codes_format
from ..kernels.quantize.triton_ops import cast_arguments
from ..numerics.cast import Cast
from ..numerics.operand import Operand
from .kv_storage import (
    FIRST,
    Pickled,
    check_format,
    check_length,
    check_same_tokens,
    check_sizes,
    check_states,
    global_scale_of,
    same_sizes,
)
from .kv_tensor import CachedTokens, decoded, first_of, with_repeated_heads


class StaticStorage(Pickled):
    """Keys or values of one layer, (batch, heads, limit, head size). ``centered``: as in KVStorage.

    The first ``exact`` tokens are in ``first``, whose last row is the one that is never read. The others are in
    ``codes``, whose first row is that one.
    """

    def __init__(self, cast: Cast, limit: int, centered: bool, like: Tensor) -> None:
        check_format(cast.format)
        check_states(like, cast.format)
        self.cast, self.limit, self.centered = cast, limit, centered
        batch, heads, _, size = like.shape
        self.exact = min(FIRST, limit)
        zeros = like.new_zeros((batch, heads, self.exact + 1, size), dtype=torch.float32)
        self.first, self.center = zeros, zeros[:, :, :1].clone()
        empty = Operand.empty(codes_format(cast.format), (0,), like.device)
        self.codes = empty.new_zeros((batch, heads, limit - self.exact + 1, size))
        self.global_scale = like.new_ones((), dtype=torch.float32) if cast.format.global_scale else None

    @property
    def buffers(self) -> list[Tensor]:
        """All memory of it."""
        return [
            self.first,
            self.center,
            *self.codes.tensors,
            *([] if self.global_scale is None else [self.global_scale]),
        ]

    def start(self, x: Tensor) -> None:
        """Choose the mean of keys and the global scale by the first tokens."""
        if self.centered:
            mean = x[:, :, 1:].float().mean(2, keepdim=True)
            self.center.copy_(mean.nan_to_num(0.0, 0.0, 0.0))
        if self.global_scale is not None:
            self.global_scale.copy_(global_scale_of(x.float() - self.center, self.cast.format))

    def write(self, x: Tensor, positions: Tensor) -> None:
        """Store tokens at these positions."""
        exact = x.float() - self.center
        x = exact.to(x.dtype) if self.centered else x
        row = positions.clamp(max=self.exact)
        self.first.index_copy_(2, row, exact)
        if self.global_scale is not None:
            x = x * (1.0 / self.global_scale).to(x.dtype)
        name, scaling, rounding, _, epsilon = cast_arguments(self.cast)
        made = encode_tokens(x, name, scaling, rounding, epsilon)
        row = (positions - self.exact + 1).clamp(min=0)
        for memory, new in zip(self.codes.tensors, made, strict=True):
            as_bytes = memory.view(torch.uint8) if memory.element_size() == 1 else memory
            as_bytes.index_copy_(2, row, new.view(as_bytes.dtype))

    def tokens(self, filled: Tensor | None = None) -> Tokens:
        """All places, without ``center``: a view. ``filled``: how many have a token; None: all."""
        data, scale = (t[:, :, 1:] for t in self.codes.tensors)
        shape = (*self.first.shape[:2], self.limit - self.exact, self.first.shape[-1])
        codes = Operand(data, scale, self.global_scale, self.cast.format, shape)
        return Tokens(self.first[:, :, : self.exact], codes, filled)

    def clear(self) -> None:
        """Forget all tokens; the memory stays."""
        for memory in (self.first, self.center, *self.codes.tensors):
            memory.zero_()

    def map(self, fn: Any) -> None:
        """Put ``fn`` of each tensor with a batch into its memory."""
        for memory in (self.first, self.center, *self.codes.tensors):
            memory.copy_(fn(memory))

    @torch.inference_mode(False)
    def to(self, device: torch.device | str) -> None:
        """Move all tensors."""
        self.first, self.center, self.codes = (
            self.first.to(device),
            self.center.to(device),
            self.codes.map(lambda t: t.to(device, non_blocking=True)),
        )
        self.global_scale = None if self.global_scale is None else self.global_scale.to(device)


class TracedTokens:
    """CachedTokens of a compiled graph: ``F.scaled_dot_product_attention`` reads codes, everything else the values.

    It is not a tensor, because a graph can hold tensors of torch only: a graph has the ops that its methods call.
    """

    def __init__(
        self, tokens: Tokens, center: Tensor | None, dtype: torch.dtype, repeats: int = 1, grouped: bool = False
    ) -> None:
        """``grouped``: (batch, heads, repeats, tokens, head size), between two calls that repeat heads."""
        self.tokens, self.center, self.dtype, self.repeats, self.grouped = tokens, center, dtype, repeats, grouped

    @property
    def shape(self) -> torch.Size:
        """(batch, heads * repeats, tokens, head size)."""
        batch, heads, *rest = self.tokens.shape
        return torch.Size((batch, heads, self.repeats, *rest) if self.grouped else (batch, heads * self.repeats, *rest))

    def dequantize(self) -> Tensor:
        """The values in ``dtype``."""
        return with_repeated_heads(decoded(self.tokens, self.center, self.dtype), self.repeats, self.shape)

    def _with(self, repeats: int, grouped: bool) -> TracedTokens:
        return TracedTokens(self.tokens, self.center, self.dtype, repeats, grouped)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, tuple) and len(index) == 5 and index[2] is None and self.repeats == 1 and not self.grouped:
            return self._with(1, True)
        count = None if self.grouped else first_of(index, self.tokens.shape[2])
        if count is not None:
            return TracedTokens(self.tokens.up_to(count), self.center, self.dtype, self.repeats)
        return self.dequantize()[index]

    def expand(self, *size: int) -> Any:
        """As of a tensor: repeats heads between an index with None and ``reshape``."""
        if self.grouped and len(size) == 5 and self.repeats == 1:
            return self._with(size[2], True)
        return self.dequantize().expand(*size)

    def reshape(self, *size: int) -> Any:
        """As of a tensor: joins heads and their repeats."""
        if self.grouped and tuple(size) == tuple(self._with(self.repeats, False).shape):
            return self._with(self.repeats, False)
        return self.dequantize().reshape(*size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dequantize(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = _attention(*args, **kwargs) if func is F.scaled_dot_product_attention else None
        if found is not None:
            return found
        return func(*[_values(x) for x in args], **{name: _values(x) for name, x in kwargs.items()})


def _values(x: Any) -> Any:
    return x.dequantize() if isinstance(x, TracedTokens) else x


def _attention(
    query: Tensor, key: Any, value: Any, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor | None:  # fmt: skip
    """Attention over codes; None if the values have to be multiplied."""
    if not isinstance(key, TracedTokens) or not isinstance(value, TracedTokens) or dropout_p > 0:
        return None
    if (torch.is_grad_enabled() and query.requires_grad) or (is_causal and attn_mask is not None):
        return None
    if not (enable_gqa or query.shape[1] == key.shape[1]):
        return None
    multiplier = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    args = AttentionArgs(multiplier, key.tokens.mask(attn_mask, is_causal), is_causal)
    return traced_attention(query, key.tokens, value.tokens, args)


class StaticKVLayer(CacheLayerMixin):
    """Keys and values of one layer in memory for ``max_cache_len`` tokens, allocated once.

    Attention reads all places, and needs the mask that transformers makes for a static cache.
    """

    is_sliding = False
    is_croppable = True
    is_compileable = True

    def __init__(self, cast: Cast, max_cache_len: int) -> None:
        self.cast, self.max_cache_len = cast, max_cache_len
        self.is_initialized = self.started = False
        with torch.inference_mode(False):
            self.length = torch.tensor(0)
        """Tokens in the cache: a tensor, so that a step is compiled once."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Allocate memory for states like these."""
        if torch.is_inference_mode_enabled() and not torch.compiler.is_dynamo_compiling():
            with torch.inference_mode(False):  # memory of inference mode cannot be written outside of it
                return self.lazy_initialization(key_states, value_states)
        values = key_states if value_states is None else value_states
        self.dtype, self.device, self.batch_size = key_states.dtype, key_states.device, key_states.shape[0]
        self._keys = StaticStorage(self.cast, self.max_cache_len, True, key_states)
        self._values = StaticStorage(self.cast, self.max_cache_len, False, values)
        self.length = self.length.to(self.device)
        self.is_initialized = True
        if not torch.compiler.is_dynamo_compiling():
            for buffer in (self.length, *self._keys.buffers, *self._values.buffers):
                keep_address(buffer)

    def _sides(self) -> list[StaticStorage]:
        return [self._keys, self._values] if self.is_initialized else []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Store new tokens and return all places.

        In eager code it raises ValueError for keys and values of other sizes than before, and for too many tokens.
        """
        if not torch.compiler.is_dynamo_compiling():
            self._check(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if not self.started and key_states.shape[2]:
            self._keys.start(key_states)
            self._values.start(value_states)
            self.started = True
        count = key_states.shape[2]
        positions = torch.arange(count, device=self.device) + self.length
        self.length.add_(count)
        self._keys.write(key_states.detach(), positions)
        self._values.write(value_states.detach(), positions)
        return self._shown(self._keys), self._shown(self._values)

    def _shown(self, side: StaticStorage) -> Any:
        kind = TracedTokens if torch.compiler.is_dynamo_compiling() else CachedTokens
        return kind(side.tokens(self.length), side.center if side.centered else None, self.dtype)

    def _check(self, keys: Tensor, values: Tensor) -> None:
        """A compiled graph has no values to check: there torch's own check of an index raises."""
        check_same_tokens(keys, values)
        sides = list(zip(self._sides(), (keys, values), strict=False))  # no side before the first token
        if not self.started and not all(same_sizes(x, side.first) for side, x in sides):
            self.is_initialized = False  # after reset(), or too early an initialization
        elif self.started:
            for side, x in sides:
                check_sizes(x, side.first)
        check_length(keys.shape[2] + int(self.length), self.max_cache_len)

    @property
    def keys(self) -> Any:  # type: ignore[override]  # transformers has attributes
        """All places of keys, (batch, heads, max_cache_len, head size); None before the first token."""
        return self._shown(self._keys) if self.is_initialized else None

    @property
    def values(self) -> Any:  # type: ignore[override]
        """All places of values, (batch, heads, max_cache_len, head size); None before the first token."""
        return self._shown(self._values) if self.is_initialized else None

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, including the room for tokens to come."""
        return sum(t.nbytes for side in self._sides() for t in side.buffers)

    def get_seq_length(self) -> Any:
        """Tokens in the cache: a tensor on its device, or 0 before the first one."""
        return self.length if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """(tokens that attention reads, index of the first): all places."""
        return self.max_cache_len, 0

    def get_max_length(self) -> int:
        """The most tokens."""
        return self.max_cache_len

    get_max_cache_shape = get_max_length  # the name in older transformers

    def reset(self) -> None:
        """Forget all tokens. The memory stays, at its addresses."""
        self.length.zero_()
        self.started = False
        for side in self._sides():
            side.clear()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove ``-tokens_to_remove`` tokens at the end. A positive number is how many stay (older transformers)."""
        length = self.length
        length.copy_(length + tokens_to_remove if tokens_to_remove <= 0 else length.clamp(max=tokens_to_remove))
        length.clamp_(min=0)
        self.started = bool(length)  # with no token left, the next ones choose the mean and the global scale

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i becomes what sequence ``beam_idx[i]`` was."""
        for side in self._sides():
            side.map(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def offload(self) -> None:
        """Move keys and values to the CPU."""
        for side in self._sides():
            side.to("cpu")

    def prefetch(self) -> None:
        """Move keys and values back."""
        for side in self._sides():
            side.to(self.device)
