"""What an attention kernel is asked: softmax(q k^T * scale + mask) v, with keys and values mostly in codes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...core.kernel import Spec
from ...core.names import dtype_name
from ...numerics.formats import Format
from ...numerics.operand import Operand


@dataclass(frozen=True)
class Tokens:
    """Keys, or values, of all tokens, (batch, heads, tokens, head size): the first as they are, the others in codes.

    ``first`` (batch, heads, some tokens, head size) is float32 on the device of the codes; ``codes`` are blocked along
    the head. ``filled``: how many tokens there are, a tensor without dimensions, for memory whose later places have
    none yet; None: all of them.
    """

    first: Tensor
    codes: Operand
    filled: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        batch, heads, count, size = self.first.shape
        return batch, heads, count + self.codes.shape[2], size

    def contiguous(self) -> tuple[Tensor, Tensor, Tensor]:
        """(first, codes, scales) with unit strides along the head. ``first`` is divided by the global scale, by which
        kernels multiply all keys."""
        first, data, scale = self.first.contiguous(), self.codes.data, self.codes.scale
        if self.codes.global_scale is not None and first.shape[2]:
            first = first / self.codes.global_scale
        data = data if data.stride(-1) == 1 else data.contiguous()
        return first, data, scale if scale.stride(-1) == 1 or scale.shape[-1] == 1 else scale.contiguous()

    def up_to(self, count: int) -> Tokens:
        """The first ``count`` tokens: a view."""
        coded = max(0, count - self.first.shape[2])
        shape = (*self.codes.shape[:2], coded, self.codes.shape[3])
        codes = self.codes.map_blocks(lambda t: t[:, :, :coded], shape)
        return Tokens(self.first[:, :, :count], codes, self.filled)

    def mask(self, given: Tensor | None, causal: bool) -> Tensor | None:
        """The mask of a call: ``given``, or one that hides the places without a token where the call has none.

        Raises ValueError for a mask of another number of keys.
        """
        count = self.shape[2]
        if given is not None and given.shape[-1] not in (1, count):
            raise ValueError(
                f"KVCache: the attention mask is for {given.shape[-1]} keys, and the cache has {count}; for an encoder "
                "and a decoder pass EncoderDecoderCache(mx.KVCache(), mx.KVCache()), the second without static"
            )
        if given is not None or causal or self.filled is None:
            return given
        return (torch.arange(count, device=self.filled.device) < self.filled).view(1, 1, 1, count)


@dataclass(frozen=True)
class AttentionArgs:
    """Arguments of an attention beside its queries, keys and values."""

    scale: float
    """Scores are multiplied by it."""
    mask: Tensor | None = None
    """Broadcasts to (batch, query heads, queries, keys): bool, where False hides a key, or added to the scores."""
    causal: bool = False
    """Whether query i reads keys 0 to i only, as ``is_causal`` of torch's function."""


def codes_format(format: Format) -> Format:
    """``format`` for casts of tokens, without a global scale: it is chosen once, and not by the cast of each token."""
    return replace(format, name=f"{format.name}_codes", global_scale=False) if format.global_scale else format


def group_of(q: Tensor, k: Tokens) -> int:
    """How many query heads read one head of keys."""
    return q.shape[1] // k.shape[1]


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of queries that kernels over codes take."""


def refuses_few_rows(spec: Spec, q: Tensor, k: Tokens, v: Tokens, args: AttentionArgs, most: int) -> str | None:
    """Why a kernel refuses that decodes each key for up to ``most`` queries; None if it accepts these queries."""
    if spec.traced:
        return "being traced: torch's attention of decoded values fuses better"
    if any(t.codes.global_scale is not None and t.codes.global_scale.numel() != 1 for t in (k, v)):
        return "takes one global scale for all keys"
    if q.dtype not in DTYPES:
        return f"computes with float32, bfloat16 and float16, not {dtype_name(q.dtype)}"
    rows = group_of(q, k) * q.shape[2]
    if rows > most:
        return f"is for {most} rows that read a head of keys, not {rows}"
    return "takes a mask, not is_causal" if args.causal else None


def refuses_head_size(size: int, most: int) -> str | None:
    """Why a kernel refuses that takes heads of up to ``most`` values, in eights; None if it accepts this size."""
    return f"is for heads of a multiple of 8 up to {most} values, not {size}" if size % 8 or size > most else None


def additive(args: AttentionArgs, q: Tensor, k: Tokens, dtype: torch.dtype) -> Tensor | None:
    """The mask as summands in ``dtype``, a view of (batch, heads of keys, group, queries, keys); None if there is none.

    Dimensions that the mask shares have stride 0.
    """
    mask = args.mask
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    size = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    return mask.to(dtype).expand(size).unflatten(1, (k.shape[1], group_of(q, k)))  # type: ignore[no-any-return]
