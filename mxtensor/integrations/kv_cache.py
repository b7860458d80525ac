"""``mx.KVCache``: a cache of transformers whose keys and values are codes.

A layer stores each token once and gives attention ``CachedTokens``: torch's attention (``sdpa``) reads their codes,
everything else their values. Imported when ``mx.KVCache`` is used.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

try:
    from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, StaticCache, StaticLayer
except ImportError as error:
    raise ImportError(f"mx.KVCache needs transformers 5: pip install 'transformers>=5' ({error})") from error

from ..core.arguments import COUNT, FLAG, check, described, optional
from ..numerics.cast import Cast
from ..numerics.formats import Format
from .kv_static import StaticKVLayer
from .kv_storage import KVStorage, check_format, check_same_tokens
from .kv_tensor import CachedTokens

READ_CODES = ("sdpa", "eager", "mxtensor")
"""Implementations of attention that take CachedTokens: ``eager`` copies values, the others read codes."""


class KVCacheLayer(CacheLayerMixin):
    """Keys and values of one layer. ``max_cache_len``: the most tokens; None: memory grows."""

    is_sliding = False
    is_croppable = True
    is_compileable = False

    def __init__(self, cast: Cast, max_cache_len: int | None = None) -> None:
        self._keys, self._values = KVStorage(cast, max_cache_len, centered=True), KVStorage(cast, max_cache_len)
        self.is_initialized = False
        self.max_cache_len = max_cache_len

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Allocate memory for states like these."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self._keys.prepare(key_states)
        self._values.prepare(key_states if value_states is None else value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new tokens and return all of them. Raises ValueError for other sizes than before."""
        if torch.compiler.is_dynamo_compiling():
            return _update_between_graphs(self, key_states, value_states)  # type: ignore[no-any-return]
        if not self.get_seq_length():
            self.lazy_initialization(key_states, value_states)
        check_same_tokens(key_states, value_states)
        self._keys.append(key_states.detach())
        self._values.append(value_states.detach())
        return self._shown(self._keys), self._shown(self._values)

    def _shown(self, side: KVStorage) -> CachedTokens:
        return CachedTokens(side.tokens(), side.center, self.dtype)

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]  # transformers has attributes
        """The keys, (batch, heads, tokens, head size); None before the first token."""
        return self._shown(self._keys) if self.is_initialized else None

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """The values, (batch, heads, tokens, head size); None before the first token."""
        return self._shown(self._values) if self.is_initialized else None

    @property
    def batch_size(self) -> int:
        """Sequences in the cache. Raises AttributeError before the first token, as transformers expects."""
        if self._keys.first is None:
            raise AttributeError("batch_size: the cache has no tokens yet")
        return self._keys.first.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, including the room for tokens to come."""
        return self._keys.nbytes + self._values.nbytes

    def get_seq_length(self) -> int:
        """Tokens in the cache."""
        return self._keys.length

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """(tokens that the next attention reads, index of the first). Older transformers pass the new positions."""
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.get_seq_length() + new, 0

    def get_max_length(self) -> int:
        """The most tokens; -1 if there is no limit."""
        return -1 if self.max_cache_len is None else self.max_cache_len

    get_max_cache_shape = get_max_length  # the name in older transformers

    def reset(self) -> None:
        """Forget all tokens."""
        self._keys.clear()
        self._values.clear()
        self.is_initialized = self._keys.first is not None

    def crop(self, tokens_to_remove: int) -> None:
        """Remove ``-tokens_to_remove`` tokens at the end. A positive number is how many stay (older transformers)."""
        length = self.get_seq_length() + tokens_to_remove if tokens_to_remove <= 0 else tokens_to_remove
        self._keys.crop(length)
        self._values.crop(length)

    def _map(self, fn: Any) -> None:
        self._keys.map(fn)
        self._values.map(fn)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i becomes what sequence ``beam_idx[i]`` was."""
        self._map(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence ``repeats`` times."""
        self._map(lambda t: t.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences only: indices, or a bool for each."""
        self._map(lambda t: t[indices.to(t.device)])

    def offload(self) -> None:
        """Move keys and values to the CPU."""
        self._keys.to("cpu")
        self._values.to("cpu")

    def prefetch(self) -> None:
        """Move keys and values back."""
        if self.is_initialized:
            self._keys.to(self.device)
            self._values.to(self.device)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _update_between_graphs(layer: KVCacheLayer, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """``update`` for a compiled model: memory that grows is in no graph, and the next graph has the values."""
    k, v = layer.update(keys, values)
    return k.dequantize(), v.dequantize()


class KVCache(Cache):
    """A cache of transformers with quantized keys and values: ``model.generate(..., past_key_values=mx.KVCache())``.

    ``format``: one with blocks along the head dimension, such as ``"mxfp8"`` (8.25 bits per value), ``"mxfp4"`` (4.25)
    or ``"nvfp4"`` (4.5), or a Cast. ``config``: ``model.config``, for models whose layers differ: layers with a sliding
    window or a recurrent state get transformers' own caches, in high precision. ``max_cache_len``: memory for this many
    tokens is allocated at the first one; None: it grows. ``static``: attention reads all ``max_cache_len`` places at
    each step, so that a model compiles without graph breaks (``torch.compile(model, fullgraph=True)``). An
    encoder-decoder model needs two: ``transformers.EncoderDecoderCache(mx.KVCache(), mx.KVCache())``.

    The first 16 tokens stay in high precision. The mean of the prompt's keys is subtracted from keys before they are
    quantized, which does not change the softmax. Attention reads the stored values, also in the first pass over a
    prompt. Use ``attn_implementation="sdpa"``, transformers' default, which reads codes. Raises ValueError for an
    unknown format and for ``static`` without ``config`` and ``max_cache_len``; NotImplementedError for a format whose
    scales belong to several tokens, and for a ``config`` with an attention that needs plain tensors (flash, flex).
    """

    _last: int | None
    """The index of the layer that got tokens last."""
    _repeated: int | None
    """The index of a layer that got tokens twice in a row."""
    _filled: set[int]
    """All layers that got tokens."""

    def __init__(
        self, format: Format | str | torch.dtype | Cast = "mxfp8", config: Any = None,
        max_cache_len: int | None = None, *, static: bool = False,
    ) -> None:  # fmt: skip
        check("KVCache", "max_cache_len", max_cache_len, optional(COUNT))
        check("KVCache", "static", static, FLAG)
        if static and (max_cache_len is None or config is None):
            raise ValueError(
                "KVCache: static=True needs config=model.config and max_cache_len, the most tokens of prompt and answer"
            )
        cast = Cast.of(format)
        check_format(cast.format)
        kind: Any = StaticKVLayer if static else KVCacheLayer
        make: Any = partial(kind, cast, max_cache_len)
        if config is None:
            super().__init__(layer_class_to_replicate=make)
        else:
            kinds = _layers(config, max_cache_len if static else None)
            super().__init__(layers=[make() if full else layer for layer, full in kinds])
        self.format = cast.format
        self._forget_order()

    def __repr__(self) -> str:
        return f"KVCache(format={self.format}, tokens={int(self.get_seq_length())}, layers={len(self.layers)})"

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new tokens of a layer and return all of them.

        Raises ValueError if a layer gets tokens twice in a row, because those of an encoder belong in another cache;
        without ``config`` also if the first layer has no attention.
        """
        if torch.compiler.is_dynamo_compiling():
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        without_first = layer_idx and not self._filled and not self.get_seq_length()
        if without_first and self.layer_class_to_replicate is not None:
            raise ValueError(
                f"KVCache: layer {layer_idx} got tokens, and layer 0, which counts them, has no attention; pass "
                "config=model.config"
            )
        repeated = layer_idx if layer_idx == self._last else self._repeated
        if repeated is not None and (self._filled | {layer_idx}) - {repeated}:
            raise ValueError(
                f"KVCache: layer {repeated} got tokens twice in one call of the model; for an encoder and a decoder "
                "pass EncoderDecoderCache(mx.KVCache(), mx.KVCache()); after a call that failed, call reset()"
            )
        shown = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self._last, self._repeated = layer_idx, repeated
        self._filled.add(layer_idx)
        return shown

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """(tokens that the next attention of a layer reads, index of the first).

        A model asks before its first layer, so that the layer of the call before may come first in this one: Mllama
        stores keys of an image once, and then calls the other layers only.
        """
        if not torch.compiler.is_dynamo_compiling():
            self._last = None
        return super().get_mask_sizes(*args, **kwargs)

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        self._forget_order()

    def _forget_order(self) -> None:
        self._last = self._repeated = None
        self._filled = set()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove ``-tokens_to_remove`` tokens at the end."""
        self._check_layers("crop")
        super().crop(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence ``repeats`` times."""
        self._check_layers("batch_repeat_interleave")
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences only: indices, or a bool for each."""
        self._check_layers("batch_select_indices")
        super().batch_select_indices(indices)

    def _check_layers(self, name: str) -> None:
        without = sorted({type(layer).__name__ for layer in self.layers if not hasattr(layer, name)})
        if without:
            raise NotImplementedError(f"KVCache: layers of {', '.join(without)} have no {name}; leave out static=True")

    def get_conv_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor | None:
        """The state of a convolution. Raises ValueError without ``config``, which names the layers that have one."""
        self._check_config(layer_idx)
        return super().get_conv_state(layer_idx, *args, **kwargs)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        """Store the state of a convolution. Raises as ``get_conv_state``."""
        self._check_config(layer_idx)
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Store keys of an index of tokens. Raises as ``get_conv_state``."""
        self._check_config(layer_idx)
        return super().update_indexer(indexer_key_states, layer_idx)

    def _check_config(self, layer_idx: int) -> None:
        if self.layer_class_to_replicate is not None:
            raise ValueError(
                f"KVCache: layer {layer_idx} stores more than keys and values; pass config=model.config, by which it "
                "gets the cache of transformers"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all layers in codes, including the room for tokens to come."""
        return sum(layer.nbytes for layer in self.layers if isinstance(layer, (KVCacheLayer, StaticKVLayer)))


def _layers(config: Any, max_cache_len: int | None) -> list[tuple[Any, bool]]:
    """transformers' layers for this model, and whether each attends to all tokens."""
    if not hasattr(config, "get_text_config"):
        raise TypeError(f"KVCache: config is {described(config)}; pass model.config")
    attention = getattr(config.get_text_config(decoder=True), "_attn_implementation", None)
    if attention is not None and attention not in READ_CODES:
        raise NotImplementedError(
            f"KVCache: {described(attention)} attention reads plain keys and values; load the model with "
            f"attn_implementation={READ_CODES[0]!r}"
        )
    if max_cache_len is None:
        return [(layer, type(layer) is DynamicLayer) for layer in DynamicCache(config=config).layers]
    layers = StaticCache(config=config, max_cache_len=max_cache_len).layers
    return [(layer, type(layer) is StaticLayer) for layer in layers]
