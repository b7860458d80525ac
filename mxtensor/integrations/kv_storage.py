"""Growing memory for the keys, or the values, of one layer: (batch, heads, tokens, head size).

The first tokens stay as they are, because all later ones attend to them most (StreamingLLM calls them sinks). Each
token after them is quantized once, when it comes, in blocks along the head. Memory grows by a 128th at a time: codes
are copied once for every 128 tokens that a step reads, and at most 0.8 % of the memory is not used yet. Memory is never
that of ``torch.inference_mode``, which could not be written outside of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..kernels.attention.spec import Tokens, codes_format
from ..kernels.quantize.select import quantize_operand
from ..numerics.cast import Cast
from ..numerics.formats import Format
from ..numerics.operand import Operand
from ..numerics.reference import check_source

FIRST = 16
"""Tokens that stay as they are."""
STEP, SHARE = 32, 128
"""Memory grows by ``max(STEP, tokens / SHARE)`` tokens."""
ROOM, LEAST = 8.0, 168.0
"""A global scale has room for values up to ROOM times the amax of the first tokens, and at least up to LEAST."""


def check_format(format: Format) -> None:
    """Raise NotImplementedError for a format whose scales belong to several tokens, or to rows of one head."""
    if format.block[0] != 1:
        raise NotImplementedError(
            f"KVCache: several tokens share a scale of {format}, and tokens are added one by one; pass a format with "
            "blocks along the head, such as mxfp8, nvfp4 or float8_row"
        )
    if format.row_scaled:
        raise NotImplementedError(f"KVCache: {format} has a global scale for each row; pass nvfp4, which has one")


def check_same_tokens(keys: Tensor, values: Tensor) -> None:
    """Raise ValueError unless there is a key and a value for every token and head."""
    if keys.shape[:3] != values.shape[:3]:
        raise ValueError(
            f"KVCache: keys {tuple(keys.shape)} and values {tuple(values.shape)} are of different "
            "tokens; pass one of each for every token and head"
        )


def same_sizes(x: Tensor, first: Tensor) -> bool:
    """Whether memory with ``first`` takes tokens like ``x``: batch, heads, head size and device."""
    return x.shape[:2] == first.shape[:2] and x.shape[3:] == first.shape[3:] and x.device == first.device


def check_sizes(x: Tensor, first: Tensor) -> None:
    """Raise ValueError unless ``x`` has the batch, heads and head size of ``first``, the tokens before it."""
    sizes, before = ((*t.shape[:2], t.shape[3]) for t in (x, first))
    if sizes != before:
        raise ValueError(
            f"KVCache: the tokens have (batch, heads, head size) {sizes}, those before them {before}; call reset() "
            "before another prompt, batch_repeat_interleave() for several answers"
        )


def check_length(total: int, limit: int | None) -> None:
    """Raise ValueError if ``total`` tokens are more than the limit."""
    if limit is not None and total > limit:
        raise ValueError(f"KVCache: {total} tokens do not fit max_cache_len={limit}; pass a larger one, or none")


def check_states(x: Tensor, format: Format) -> None:
    """Raise TypeError or ValueError for keys or values that a cache cannot hold."""
    check_source(x)
    if x.dim() != 4:
        raise ValueError(
            f"KVCache: tokens are (batch, heads, tokens, head size), got {tuple(x.shape)}; use x[None] or unflatten"
        )
    if x.shape[-1] % 8:
        raise ValueError(
            f"KVCache: heads of {x.shape[-1]} values are not a multiple of 8, and codes of {format} are "
            "read 8 at a time; use transformers' DynamicCache for this model"
        )


def global_scale_of(x: Tensor, format: Format) -> Tensor:
    """The power of two by which all scales of ``format`` are multiplied, with room for later tokens; see ``ROOM``.

    Values beyond it saturate. A power of two keeps each product exact.
    """
    amax = x.abs().amax().float().nan_to_num(0.0, 0.0, 0.0)
    wanted = (ROOM * amax).clamp(min=LEAST) / (format.element.max * 448.0)
    return torch.ldexp(torch.ones_like(wanted), torch.frexp(wanted)[1])


class Pickled:
    """Pickles codes as bytes: ``pickle`` of torch has no float8 (``torch.save`` has)."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: _as_bytes(x) if isinstance(x, Operand) else x for name, x in self.__dict__.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({name: _as_codes(x) if isinstance(x, Operand) else x for name, x in state.items()})


def _as_bytes(x: Operand) -> Operand:
    return x.map_blocks(lambda t: t.view(torch.uint8) if t.element_size() == 1 else t, x.shape)


def _as_codes(x: Operand) -> Operand:
    return x.with_blocks(x.data.view(x.format.element.dtype), x.scale.view(x.format.scale.dtype), x.shape)


class KVStorage(Pickled):
    """Keys or values of one layer.

    ``cast``: the format, and how tokens are rounded. ``limit``: the most tokens, for which memory is allocated at once;
    None: it grows. ``centered``: codes are of differences from a mean of the first tokens, which softmax does not see
    in keys: the same number is added to all scores of a query.
    """

    def __init__(self, cast: Cast, limit: int | None = None, centered: bool = False) -> None:
        check_format(cast.format)
        self.cast, self.limit, self.centered = cast, limit, centered
        self._codes = replace(cast, format=codes_format(cast.format))
        self.first: Tensor | None = None
        """The first tokens, float32, without ``center``."""
        self.memory: Operand | None = None
        """Codes and scales of all other tokens that there is room for."""
        self.coded = 0
        """Tokens in codes."""
        self.center: Tensor | None = None
        """The mean that keys have lost, (batch, heads, 1, head size), float32; None until codes are needed."""
        self.global_scale: Tensor | None = None
        self._inverse: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens that are stored."""
        return 0 if self.first is None else self.first.shape[2] + self.coded

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, including the room for tokens to come."""
        tensors = (self.first, self.center, *(() if self.memory is None else self.memory.tensors))
        return sum(t.nbytes for t in tensors if t is not None)

    @torch.inference_mode(False)
    def prepare(self, x: Tensor) -> None:
        """Allocate memory for tokens like ``x``.

        Raises TypeError for another dtype than those that casts take, ValueError for other dimensions and for heads
        whose codes are not whole bytes.
        """
        check_states(x, self.cast.format)
        if self.first is not None and (self.length or same_sizes(x, self.first)):
            return
        batch, heads, _, size = x.shape
        self.first = x.new_empty((batch, heads, 0, size), dtype=torch.float32)
        room = 0 if self.limit is None else max(0, self.limit - FIRST)
        self.memory = Operand.empty(self._codes.format, (batch, heads, room, size), x.device)

    def append(self, x: Tensor) -> None:
        """Store tokens (batch, heads, tokens, head size).

        Raises ValueError for a batch or heads of other sizes than before, and for more tokens than the limit.
        """
        self.prepare(x)
        assert self.first is not None
        check_sizes(x, self.first)
        check_length(self.length + x.shape[2], self.limit)
        exact = 0 if self.coded else min(FIRST - self.first.shape[2], x.shape[2])
        if exact:
            some = x[:, :, :exact].float()
            self.first = torch.cat((self.first, some if self.center is None else some - self.center), 2)
        if x.shape[2] > exact:
            self._encode(x[:, :, exact:] if exact else x)

    def _encode(self, x: Tensor) -> None:
        assert self.first is not None
        if self.centered:
            if self.center is None:
                whole = torch.cat((self.first, x.float()), 2)
                self.center = whole[:, :, 1:].mean(2, keepdim=True).nan_to_num(0.0, 0.0, 0.0)  # not of the sink
                self.first = self.first - self.center
            x = (x - self.center).to(x.dtype)
        if self.cast.format.global_scale:
            if self._inverse is None:
                self.global_scale = global_scale_of(torch.cat((self.first, x.float()), 2), self.cast.format)
                self._inverse = (1.0 / self.global_scale).to(x.dtype)
            x = x * self._inverse
        new, count = quantize_operand(x.contiguous(), self._codes), x.shape[2]
        memory = self._with_room(self.coded + count)
        memory.data.narrow(2, self.coded, count).copy_(new.data)
        memory.scale.narrow(2, self.coded, count).copy_(new.scale)
        self.coded += count

    @torch.inference_mode(False)
    def _with_room(self, tokens: int) -> Operand:
        """Memory for this many tokens in codes, with those that there are."""
        before = self.memory
        assert before is not None
        if tokens > before.shape[2]:
            batch, heads, _, size = before.shape
            room = tokens + max(STEP, tokens // SHARE)
            self.memory = Operand.empty(self._codes.format, (batch, heads, room, size), before.data.device)
            for old, new in zip(before.tensors, self.memory.tensors, strict=True):
                new.narrow(2, 0, self.coded).copy_(old.narrow(2, 0, self.coded))
        assert self.memory is not None
        return self.memory

    def tokens(self) -> Tokens:
        """All tokens, without ``center``: a view."""
        memory, first = self.memory, self.first
        assert memory is not None and first is not None
        data, scale = (t.narrow(2, 0, self.coded) for t in (memory.data, memory.scale))
        shape = (*memory.shape[:2], self.coded, memory.shape[3])
        format = self._codes.format if self.global_scale is None else self.cast.format
        return Tokens(first, Operand(data, scale, self.global_scale, format, shape))

    @torch.inference_mode(False)
    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace all tensors with a batch, such as by those of other sequences."""
        if self.memory is None or self.first is None:
            return
        data, scale = fn(self.memory.data), fn(self.memory.scale)
        self.memory = self.memory.with_blocks(data, scale, (data.shape[0], *self.memory.shape[1:]))
        self.first = fn(self.first)
        self.center = None if self.center is None else fn(self.center)

    def to(self, device: torch.device | str) -> None:
        """Move all tensors."""
        self.map(lambda t: t.to(device, non_blocking=True))
        if self.global_scale is not None and self._inverse is not None:
            self.global_scale, self._inverse = self.global_scale.to(device), self._inverse.to(device)

    def crop(self, length: int) -> None:
        """Keep the first ``length`` tokens."""
        if self.first is not None:
            length = max(0, min(self.length, length))
            self.coded = max(0, length - self.first.shape[2])
            self.first = self.first[:, :, :length]
            if length == 0:  # the next tokens choose them
                self.center = self.global_scale = self._inverse = None

    def clear(self) -> None:
        """Forget all tokens; a storage with a limit keeps its memory."""
        self.coded, self.center, self.global_scale, self._inverse = 0, None, None, None
        if self.limit is None:
            self.first = self.memory = None
        elif self.first is not None:
            self.first = self.first[:, :, :0]
