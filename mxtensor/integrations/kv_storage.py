"""Memory of ``mx.KVCache``: the keys, or the values, of one layer, (batch, heads, tokens, head size).

The first tokens stay as they are, because all later ones attend to them most (StreamingLLM calls them sinks). Each
token after them is quantized once, when it comes, in blocks along the head. ``KVStorage`` grows; ``StaticStorage`` has
all places from the start, and no step of it depends on values. Memory is never that of ``torch.inference_mode``, which
could not be written outside of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..kernels.attention.arguments import Tokens, codes_format
from ..kernels.attention.choose_attention import encode_tokens
from ..kernels.quantize.choose_cast import quantize_operand
from ..kernels.quantize.triton_ops import cast_arguments
from ..numerics.cast import Cast
from ..numerics.formats import Format
from ..numerics.operand import Operand
from ..numerics.reference import check_source

FIRST = 16
"""Tokens that stay as they are."""
STEP, SHARE = 32, 128
"""Memory grows by ``max(STEP, tokens / SHARE)`` tokens: codes are copied once for every 128 tokens that a step reads,
and at most 0.8 % of the memory is not used yet."""
ROOM, LEAST = 8.0, 168.0
"""A global scale has room for values up to ROOM times the amax of the first tokens, and at least up to LEAST."""


def global_scale_of(x: Tensor, format: Format) -> Tensor:
    """The power of two by which all scales of ``format`` are multiplied, with room for later tokens; see ``ROOM``.

    Values beyond it saturate. A power of two keeps each product exact.
    """
    amax = x.abs().amax().float().nan_to_num(0.0, 0.0, 0.0)
    wanted = (ROOM * amax).clamp(min=LEAST) / (format.element.max * 448.0)
    return torch.ldexp(torch.ones_like(wanted), torch.frexp(wanted)[1])


class Storage:
    """What both kinds of memory have.

    ``cast``: the format, and how tokens are rounded. ``limit``: the most tokens. ``centered``: codes are of differences
    from a mean of the first tokens, which softmax does not see in keys: the same number is added to all scores of a
    query.
    """

    def __init__(self, cast: Cast, limit: int | None = None, centered: bool = False) -> None:
        self.cast, self.limit, self.centered = cast, limit, centered
        self.format = codes_format(cast.format)
        self.first: Tensor | None = None
        """The first tokens, float32, without ``center``; None before there is memory."""
        self.codes: list[Tensor] = []
        """Bytes and scales of all other tokens that there is room for. pickle has no float8, and a CUDA graph writes to
        its inputs themselves, not to views of them: so they are bytes."""
        self.center: Tensor | None = None
        """The mean that keys have lost, (batch, heads, 1, head size), float32."""
        self.global_scale: Tensor | None = None

    @property
    def buffers(self) -> list[Tensor]:
        """All memory of it, including the room for tokens to come."""
        found = (self.first, self.center, *self.codes, self.global_scale)
        return [t for t in found if t is not None]

    def fits(self, x: Tensor) -> bool:
        """Whether there is memory for tokens like ``x``: batch, heads, head size and device."""
        t = self.first
        return t is not None and x.device == t.device and x.shape[:2] == t.shape[:2] and x.shape[3:] == t.shape[3:]

    def check(self, x: Tensor, length: int) -> None:
        """Raise TypeError or ValueError for tokens that cannot follow the ``length`` ones that there are."""
        check_source(x)
        if x.dim() != 4:
            raise ValueError(
                f"KVCache: tokens are (batch, heads, tokens, head size), got {tuple(x.shape)}; use x[None] or unflatten"
            )
        if x.shape[-1] % 8:
            raise ValueError(
                f"KVCache: heads of {x.shape[-1]} values are not a multiple of 8, and codes of {self.cast.format} are "
                "read 8 at a time; use transformers' DynamicCache for this model"
            )
        sizes, before = ((*t.shape[:2], t.shape[3]) for t in (x, x if self.first is None else self.first))
        if length and sizes != before:
            raise ValueError(
                f"KVCache: the tokens have (batch, heads, head size) {sizes}, those before them {before}; call reset() "
                "before another prompt, batch_repeat_interleave() for several answers"
            )
        if self.limit is not None and length + x.shape[2] > self.limit:
            raise ValueError(
                f"KVCache: {length + x.shape[2]} tokens do not fit max_cache_len={self.limit}; pass a larger one, "
                "or none"
            )

    @torch.inference_mode(False)
    def to(self, device: torch.device | str) -> None:
        """Move all tensors. The copies of codes overlap; the last ones wait for them."""
        self.codes = [t.to(device, non_blocking=True) for t in self.codes]
        self.first, self.center, self.global_scale = (
            t if t is None else t.to(device) for t in (self.first, self.center, self.global_scale)
        )

    def _tokens(self, first: Tensor, codes: list[Tensor], filled: Tensor | None = None) -> Tokens:
        """These tokens, without ``center``: a view."""
        data, scale = codes
        format = self.format if self.global_scale is None else self.cast.format
        shape = (*data.shape[:3], first.shape[-1])
        return Tokens(first, Operand(data.view(format.element.dtype), scale, self.global_scale, format, shape), filled)


class KVStorage(Storage):
    """Memory that grows by a 128th at a time; with a ``limit`` it is allocated at once.

    Tensors are replaced, or written behind the tokens that there are.
    """

    coded = 0
    """Tokens in codes."""

    @property
    def length(self) -> int:
        """Tokens that are stored."""
        return 0 if self.first is None else self.first.shape[2] + self.coded

    def prepare(self, x: Tensor) -> None:
        """Allocate memory for tokens like ``x``, which ``check`` accepts."""
        if not self.length and not self.fits(x):
            with torch.inference_mode(False):
                self.first = x.new_empty((*x.shape[:2], 0, x.shape[3]), dtype=torch.float32)
            self.codes = self._empty(0 if self.limit is None else max(0, self.limit - FIRST))

    @torch.inference_mode(False)
    def _empty(self, count: int) -> list[Tensor]:
        assert self.first is not None
        batch, heads, _, size = self.first.shape
        made = Operand.empty(self.format, (batch, heads, count, size), self.first.device)
        return [made.data.view(torch.uint8), made.scale]

    def append(self, x: Tensor) -> None:
        """Store tokens, which ``check`` accepts."""
        self.prepare(x)
        assert self.first is not None
        exact = 0 if self.coded else min(FIRST - self.first.shape[2], x.shape[2])
        if exact:
            some = x[:, :, :exact].float()
            self.first = torch.cat((self.first, some if self.center is None else some - self.center), 2)
        if x.shape[2] > exact:
            self._encode(x[:, :, exact:])

    def _encode(self, x: Tensor) -> None:
        assert self.first is not None
        if self.centered:
            if self.center is None:
                whole = torch.cat((self.first, x.float()), 2)
                self.center = whole[:, :, 1:].mean(2, keepdim=True).nan_to_num(0.0, 0.0, 0.0)  # not of the sink
                self.first = self.first - self.center
            x = (x - self.center).to(x.dtype)
        if self.cast.format.global_scale:
            if self.global_scale is None:
                self.global_scale = global_scale_of(torch.cat((self.first, x.float()), 2), self.cast.format)
            x = x / self.global_scale
        made, total = quantize_operand(x.contiguous(), replace(self.cast, format=self.format)), self.coded + x.shape[2]
        if total > self.codes[0].shape[2]:
            grown = self._empty(total + max(STEP, total // SHARE))
            for old, new in zip(self.codes, grown, strict=True):
                new.narrow(2, 0, self.coded).copy_(old.narrow(2, 0, self.coded))
            self.codes = grown
        for memory, new in zip(self.codes, (made.data, made.scale), strict=True):
            memory.narrow(2, self.coded, x.shape[2]).copy_(new.view(memory.dtype))
        self.coded = total

    def tokens(self) -> Tokens:
        """All tokens, without ``center``: a view."""
        assert self.first is not None
        return self._tokens(self.first, [t.narrow(2, 0, self.coded) for t in self.codes])

    @torch.inference_mode(False)
    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace all tensors with a batch, such as by those of other sequences."""
        self.first, self.center = (t if t is None else fn(t) for t in (self.first, self.center))
        self.codes = [fn(t) for t in self.codes]

    def crop(self, length: int) -> None:
        """Keep the first ``length`` tokens."""
        if self.first is not None:
            length = max(0, min(self.length, length))
            self.coded = max(0, length - self.first.shape[2])
            self.first = self.first[:, :, :length]
            if length == 0:  # the next tokens choose them
                self.center = self.global_scale = None

    def clear(self) -> None:
        """Forget all tokens; a storage with a limit keeps its memory."""
        self.crop(0)
        if self.limit is None:
            self.first, self.codes = None, []


class StaticStorage(Storage):
    """Memory for ``limit`` tokens at addresses that stay, for compiled code.

    The first ``exact`` tokens are in ``first``, whose last row is never read; the others in ``codes``, whose first row
    is never read. Writes that a step must not make go there.
    """

    first: Tensor  # None before ``prepare``
    limit: int
    center: Tensor

    def prepare(self, x: Tensor) -> None:
        """Allocate memory for tokens like ``x``, which ``check`` accepts."""
        (batch, heads, _, size), self.exact = x.shape, min(FIRST, self.limit)
        zeros = x.new_zeros((batch, heads, self.exact + 1, size), dtype=torch.float32)
        self.first, self.center = zeros, zeros[:, :, :1].clone()
        empty = Operand.empty(self.format, (0,), x.device)
        codes = empty.new_zeros((batch, heads, self.limit - self.exact + 1, size))
        self.codes = [codes.data.view(torch.uint8), codes.scale]
        self.global_scale = x.new_ones((), dtype=torch.float32) if self.cast.format.global_scale else None

    def stored(self, count: int) -> list[Tensor]:
        """Views of all that the first ``count`` tokens are made of."""
        coded = max(0, count - self.exact) + 1
        found = (self.first, self.center, *(t[:, :, :coded] for t in self.codes), self.global_scale)
        return [t for t in found if t is not None]

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
        for memory, new in zip(self.codes, made, strict=True):
            memory.index_copy_(2, row, new.view(memory.dtype))

    def tokens(self, filled: Tensor | None = None) -> Tokens:
        """All places, without ``center``: a view. ``filled``: how many have a token; None: all."""
        return self._tokens(self.first[:, :, : self.exact], [t[:, :, 1:] for t in self.codes], filled)

    def clear(self) -> None:
        """Forget all tokens; the memory stays."""
        for memory in (self.first, self.center, *self.codes):
            memory.zero_()

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Put ``fn`` of each tensor with a batch into its memory. Raises ValueError for another number of sequences."""
        for memory in (self.first, self.center, *self.codes):
            made = fn(memory)
            if made.shape != memory.shape:
                raise ValueError(
                    f"KVCache: beam_idx has {len(made)} indices, and a static cache keeps {len(memory)} sequences"
                )
            memory.copy_(made)
