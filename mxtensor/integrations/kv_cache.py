"""``mx.KVCache``: a cache of transformers whose keys and values are codes.

A layer stores each token once (``kv_storage.py``) and gives attention ``CachedTokens`` (``kv_tensor.py``): torch's
attention (``sdpa``) reads their codes, everything else their values. ``KVCacheLayer`` grows; ``StaticKVLayer`` has
memory of one size and no step that depends on values, so that a model compiles. Imported when ``mx.KVCache`` is used.

Calls are whole or not at all: what a call had changed is put back if anything raises. An error, a lack of memory or
Ctrl-C may come between keys and values, or between two layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

try:
    from transformers.cache_utils import (
        Cache,
        CacheLayerMixin,
        DynamicCache,
        DynamicLayer,
        LinearAttentionCacheLayerMixin,
        StaticCache,
        StaticLayer,
    )
except ImportError as error:
    raise ImportError(f"mx.KVCache needs transformers 5: pip install 'transformers>=5' ({error})") from error

from ..core.arguments import COUNT, FLAG, INTEGER, SIZE, TENSOR, check, described, optional
from ..core.compat import keep_address
from ..numerics.cast import Cast
from ..numerics.formats import Format
from .kv_storage import KVStorage, StaticStorage, Storage
from .kv_tensor import CachedTokens, TracedTokens

READ_CODES = ("sdpa", "eager", "mxtensor")
"""Implementations of attention that take CachedTokens: ``eager`` copies values, the others read codes."""
Method = TypeVar("Method", bound=Callable[..., Any])


# ---------------------------------------------------------------------------------------------- whole or not at all


class Remembered:
    """The state of some layers, and of their cache, before a call.

    Most state is replaced and not written, so that references to it are enough, and take a microsecond per layer. A
    layer names the tensors that a call writes in place (``written``), of which there are copies while the call runs.
    ``moved``: the call moves stored tokens in place, and not only adds new ones behind them.
    """

    def __init__(self, layers: Iterable[Any], cache: Any = None, moved: bool = False) -> None:
        layers = list(layers)
        sides = [value for layer in layers for value in layer.__dict__.values() if isinstance(value, Storage)]
        self.attributes = [
            (owner.__dict__, dict(owner.__dict__)) for owner in (*layers, *sides, *([] if cache is None else [cache]))
        ]
        found = [value for _, state in self.attributes for value in state.values() if type(value) in (dict, list, set)]
        self.containers = [(value, value.copy()) for value in found]
        self.tensors = [(t, t.clone()) for layer in layers for t in _written(layer, moved)]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back."""
        for attributes, state in self.attributes:
            attributes.update(state)
            for name in attributes.keys() - state.keys():
                del attributes[name]
        for container, before in self.containers:
            container.clear()
            container.extend(before) if isinstance(container, list) else container.update(before)
        for t, values in self.tensors:
            t.copy_(values)


def _written(layer: Any, moved: bool) -> list[Tensor]:
    """Tensors that a call writes in place. transformers' own layers replace theirs, but for static and linear ones."""
    if isinstance(layer, CodesLayer):
        return layer.written(moved)
    if not isinstance(layer, (StaticLayer, LinearAttentionCacheLayerMixin)):
        return []
    replaced = ("keys", "values") if isinstance(layer, DynamicLayer) else ()
    values = [value for name, value in layer.__dict__.items() if name not in replaced]
    values += [value for container in values if isinstance(container, dict) for value in container.values()]
    return [value for value in values if isinstance(value, Tensor)]


def whole(method: Method) -> Method:
    """Make a method of a layer, or one of a cache that calls all its layers, whole or not at all.

    Not a ``with`` block: Python takes Ctrl-C between its last line and ``__exit__``. Compiled code has no such step: a
    graph runs as a whole, and Dynamo sees the method alone.
    """
    moved = method.__name__ == "reorder_cache"

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return method(self, *args, **kwargs)
        is_cache = hasattr(self, "layers")
        before = Remembered(self.layers if is_cache else [self], self if is_cache else None, moved)
        try:
            return method(self, *args, **kwargs)
        except BaseException:
            before.restore()
            raise

    return call  # type: ignore[return-value]


# ---------------------------------------------------------------------------------------------- layers


class CodesLayer(CacheLayerMixin):
    """Keys and values of one layer in codes. ``max_cache_len``: the most tokens; None: memory grows."""

    is_sliding = False
    is_croppable = True
    storage: ClassVar[type[Any]]
    dtype: torch.dtype
    device: torch.device

    def __init__(self, cast: Cast, max_cache_len: int | None = None) -> None:
        self._keys, self._values = (self.storage(cast, max_cache_len, centered) for centered in (True, False))
        self.is_initialized = False
        self.max_cache_len = max_cache_len

    def written(self, moved: bool) -> list[Tensor]:
        """Tensors that a call writes in place; ``moved``: as of Remembered."""
        return []

    def _check(self, keys: Tensor, values: Tensor, length: int) -> None:
        """Raise TypeError or ValueError unless these tokens can follow the ``length`` ones that there are."""
        check("KVCache", "key_states", keys, TENSOR)
        check("KVCache", "value_states", values, TENSOR)
        if keys.shape[:3] != values.shape[:3]:
            raise ValueError(
                f"KVCache: keys {tuple(keys.shape)} and values {tuple(values.shape)} are of different "
                "tokens; pass one of each for every token and head"
            )
        self._keys.check(keys, length)
        self._values.check(values, length)

    def _shown(self, side: Any) -> Any:
        return CachedTokens(side.tokens(), side.center, self.dtype)

    @property
    def keys(self) -> Any:  # type: ignore[override]  # transformers has attributes
        """The keys, (batch, heads, tokens or places, head size); None before there is memory."""
        return self._shown(self._keys) if self.is_initialized else None

    @property
    def values(self) -> Any:  # type: ignore[override]
        """The values, as ``keys``."""
        return self._shown(self._values) if self.is_initialized else None

    @property
    def batch_size(self) -> int:
        """Sequences in the cache. Raises AttributeError before the first token, as transformers expects."""
        if self._keys.first is None:
            raise AttributeError("batch_size: the cache has no tokens yet")
        return int(self._keys.first.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, including the room for tokens to come."""
        return sum(t.nbytes for t in (*self._keys.buffers, *self._values.buffers))

    def get_max_length(self) -> int:
        """The most tokens; -1 if there is no limit."""
        return -1 if self.max_cache_len is None else self.max_cache_len

    get_max_cache_shape = get_max_length  # the name in older transformers

    def _map(self, fn: Callable[[Tensor], Tensor]) -> None:
        if self.is_initialized:
            self._keys.map(fn)
            self._values.map(fn)

    @whole
    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i becomes what sequence ``beam_idx[i]`` was."""
        self._map(lambda t: t.index_select(0, beam_idx.to(t.device)))

    @whole
    def offload(self) -> None:
        """Move keys and values to the CPU."""
        self._keys.to("cpu")
        self._values.to("cpu")

    @whole
    def prefetch(self) -> None:
        """Move keys and values back."""
        if self.is_initialized:
            self._keys.to(self.device)
            self._values.to(self.device)


class KVCacheLayer(CodesLayer):
    """The growing layer: memory grows, or is allocated at once for ``max_cache_len`` tokens."""

    is_compileable = False
    storage = KVStorage

    @whole
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Allocate memory for states like these."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self._keys.prepare(key_states)
        self._values.prepare(key_states if value_states is None else value_states)
        self.is_initialized = True

    @whole
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new tokens and return all of them.

        Raises TypeError for another dtype than those that casts take, ValueError for other sizes than before.
        """
        if torch.compiler.is_dynamo_compiling():
            return _update_between_graphs(self, key_states, value_states)  # type: ignore[no-any-return]
        self._check(key_states, value_states, self.get_seq_length())
        if not self.get_seq_length():
            self.lazy_initialization(key_states, value_states)
        self._keys.append(key_states.detach())
        self._values.append(value_states.detach())
        return self._shown(self._keys), self._shown(self._values)

    def get_seq_length(self) -> int:
        """Tokens in the cache."""
        return self._keys.length  # type: ignore[no-any-return]

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """(tokens that the next attention reads, index of the first). Older transformers pass the new positions."""
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.get_seq_length() + new, 0

    @whole
    def reset(self) -> None:
        """Forget all tokens."""
        self._keys.clear()
        self._values.clear()
        self.is_initialized = self._keys.first is not None

    @whole
    def crop(self, tokens_to_remove: int) -> None:
        """Remove ``-tokens_to_remove`` tokens at the end. A positive number is how many stay (older transformers)."""
        length = self.get_seq_length() + tokens_to_remove if tokens_to_remove <= 0 else tokens_to_remove
        self._keys.crop(length)
        self._values.crop(length)

    @whole
    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence ``repeats`` times."""
        self._map(lambda t: t.repeat_interleave(repeats, 0))

    @whole
    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences only: indices, or a bool for each."""
        self._map(lambda t: t[indices.to(t.device)])


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _update_between_graphs(layer: KVCacheLayer, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """``update`` for a compiled model: memory that grows is in no graph, and the next graph has the values."""
    k, v = layer.update(keys, values)
    return k.dequantize(), v.dequantize()


class StaticKVLayer(CodesLayer):
    """The static layer: memory for ``max_cache_len`` tokens, allocated once.

    How many tokens there are is a tensor: positions are computed from it. Attention reads all places, and needs the
    mask that transformers makes for a static cache, which hides the empty ones.
    """

    is_compileable = True
    storage = StaticStorage
    started = False
    """Whether the mean of keys and the global scale are chosen."""
    stale = False
    """Whether memory has values of tokens that ``reset`` forgot, which may be NaN."""

    def __init__(self, cast: Cast, max_cache_len: int) -> None:
        super().__init__(cast, max_cache_len)
        with torch.inference_mode(False):
            self.length = torch.tensor(0)
        """Tokens in the cache: a tensor, so that a step is compiled once."""

    @whole
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Allocate memory for states like these."""
        if torch.is_inference_mode_enabled() and not torch.compiler.is_dynamo_compiling():
            with torch.inference_mode(False):  # memory of inference mode cannot be written outside of it
                return self.lazy_initialization(key_states, value_states)
        self.dtype, self.device = key_states.dtype, key_states.device
        self._keys.prepare(key_states)
        self._values.prepare(key_states if value_states is None else value_states)
        self.length = self.length.to(self.device)
        self.is_initialized, self.stale = True, False
        if not torch.compiler.is_dynamo_compiling():
            for buffer in (self.length, *self._keys.buffers, *self._values.buffers):
                keep_address(buffer)

    def written(self, moved: bool) -> list[Tensor]:
        """The length, and all tokens if they are moved."""
        count = int(self.length) if moved and self.is_initialized else 0
        return [self.length, *((*self._keys.stored(count), *self._values.stored(count)) if count else ())]

    @whole
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Store new tokens and return all places.

        In eager code it raises ValueError for keys and values of other sizes than before, and for too many tokens. A
        compiled graph has no values to check: there torch's own check of an index raises.
        """
        if not torch.compiler.is_dynamo_compiling():
            self._check(key_states, value_states, int(self.length))
            if not (self.started or (self._keys.fits(key_states) and self._values.fits(value_states))):
                self.is_initialized = False  # after reset(), or too early an initialization
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.stale:
            self.forget()
        count = key_states.shape[2]
        if not self.started and count:
            self._keys.start(key_states)
            self._values.start(value_states)
            self.started = True
        positions = torch.arange(count, device=self.device) + self.length
        self.length.add_(count)
        self._keys.write(key_states.detach(), positions)
        self._values.write(value_states.detach(), positions)
        return self._shown(self._keys), self._shown(self._values)

    def _shown(self, side: StaticStorage) -> Any:
        kind = TracedTokens if torch.compiler.is_dynamo_compiling() else CachedTokens
        return kind(side.tokens(self.length), side.center if side.centered else None, self.dtype)

    def get_seq_length(self) -> Any:
        """Tokens in the cache: a tensor on its device, or 0 before the first one."""
        return self.length if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """(tokens that attention reads, index of the first): all places."""
        return self.get_max_length(), 0

    @whole
    def reset(self) -> None:
        """Forget all tokens. The memory stays, at its addresses; ``forget`` or the next update overwrites it."""
        self.length.zero_()
        self.started, self.stale = False, self.is_initialized

    def forget(self) -> None:
        """Overwrite memory of tokens that ``reset`` forgot. If it fails, the next update does it."""
        if self.stale:
            self._keys.clear()
            self._values.clear()
        self.stale = False

    @whole
    def crop(self, tokens_to_remove: int) -> None:
        """Remove ``-tokens_to_remove`` tokens at the end. A positive number is how many stay (older transformers)."""
        length = self.length
        length.copy_(length + tokens_to_remove if tokens_to_remove <= 0 else length.clamp(max=tokens_to_remove))
        length.clamp_(min=0)
        self.started = bool(length)  # with no token left, the next ones choose the mean and the global scale


# ---------------------------------------------------------------------------------------------- the cache


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

    _last: int | None = None
    """The index of the layer that got tokens last."""
    _repeated: int | None = None
    """The index of a layer that got tokens twice in a row."""
    _filled: frozenset[int] = frozenset()
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
        if cast.format.block[0] != 1:
            raise NotImplementedError(
                f"KVCache: several tokens share a scale of {cast.format}, and tokens are added one by one; pass a "
                "format with blocks along the head, such as mxfp8, nvfp4 or float8_row"
            )
        if cast.format.row_scaled:
            raise NotImplementedError(
                f"KVCache: {cast.format} has a global scale for each row; pass nvfp4, which has one"
            )
        kind: Any = StaticKVLayer if static else KVCacheLayer
        make: Any = partial(kind, cast, max_cache_len)
        if config is None:
            super().__init__(layer_class_to_replicate=make)
        else:
            kinds = _layers(config, max_cache_len if static else None)
            super().__init__(layers=[make() if full else layer for layer, full in kinds])
        self.format = cast.format

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
        check("KVCache", "layer_idx", layer_idx, SIZE)
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
        before = Remembered(self.layers[layer_idx : layer_idx + 1], self)
        try:
            self._last, self._repeated, self._filled = layer_idx, repeated, self._filled | {layer_idx}
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        except BaseException:
            before.restore()
            raise

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
        self._reset()
        for layer in self.layers:
            if isinstance(layer, StaticKVLayer):
                layer.forget()

    @whole
    def _reset(self) -> None:
        super().reset()
        self._last, self._repeated, self._filled = None, None, frozenset()

    @whole
    def early_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Allocate memory of all layers before the first token."""
        super().early_initialization(*args, **kwargs)

    @whole
    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i becomes what sequence ``beam_idx[i]`` was. Raises TypeError or ValueError for other indices."""
        beam_idx = self._indices("beam_idx", beam_idx)
        for layer in self.layers:
            method: Any = type(layer).reorder_cache
            getattr(method, "__wrapped__", method)(layer, beam_idx)  # `whole` would copy static memory once more

    @whole
    def crop(self, tokens_to_remove: int) -> None:
        """Remove ``-tokens_to_remove`` tokens at the end. Raises TypeError for a number that is not whole."""
        self._check_layers("crop")
        count: Any = tokens_to_remove
        if isinstance(count, Tensor) and count.dim() == 0 and count.dtype in (torch.int64, torch.int32):
            count = count.item()
        check("KVCache", "tokens_to_remove", count, INTEGER)
        super().crop(int(count))

    @whole
    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence ``repeats`` times. Raises TypeError or ValueError for another number than 1, 2, ..."""
        self._check_layers("batch_repeat_interleave")
        check("KVCache", "repeats", repeats, COUNT)
        super().batch_repeat_interleave(repeats)

    @whole
    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences only: indices, or a bool for each. Raises TypeError or ValueError for other indices."""
        self._check_layers("batch_select_indices")
        super().batch_select_indices(self._indices("indices", indices, flags=True))

    def _indices(self, name: str, indices: Any, flags: bool = False) -> Tensor:
        """``indices`` as a tensor of one dimension: indices of sequences, or with ``flags`` also a bool for each.

        Raises TypeError for other dtypes, ValueError for other dimensions and for sequences that do not exist.
        """
        if isinstance(indices, Sequence) and not isinstance(indices, (str, bytes)):
            indices = torch.tensor(indices, dtype=None if len(indices) else torch.int64)
        allowed = (torch.int64, torch.int32, torch.bool) if flags else (torch.int64, torch.int32)
        if not isinstance(indices, Tensor) or indices.dtype not in allowed:
            raise TypeError(
                f"KVCache: {name} is {described(indices)}; pass a tensor of int64 with the indices of sequences"
                f"{', or of a bool for each' if flags else ''}"
            )
        if indices.dim() != 1:
            raise ValueError(f"KVCache: {name} has shape {tuple(indices.shape)}; it must have one dimension")
        for batch in {layer.batch_size for layer in self._in_codes() if hasattr(layer, "batch_size")}:
            if indices.dtype is torch.bool:
                if len(indices) != batch:
                    raise ValueError(
                        f"KVCache: {name} has {len(indices)} bools, and the cache {batch} sequences; pass one each"
                    )
            elif len(indices):
                low, high = (int(n) for n in torch.aminmax(indices))
                if high >= batch or low < (-batch if flags else 0):
                    wrong = high if high >= batch else low
                    raise ValueError(f"KVCache: {name} names sequence {wrong} of {batch}; the first is 0")
        return indices

    def _in_codes(self) -> list[CodesLayer]:
        return [layer for layer in self.layers if isinstance(layer, CodesLayer)]

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
        return sum(layer.nbytes for layer in self._in_codes())


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
