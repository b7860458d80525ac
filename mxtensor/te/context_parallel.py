"""Context parallelism of attention: each rank of ``cp_group`` has a part of every sequence, as in TransformerEngine.

A sequence is cut into ``2 * ranks`` chunks of equal length. Rank ``r`` has chunks ``r`` and ``2 * ranks - 1 - r``, in
this order (DualChunkSwap): then a causal mask leaves all ranks the same number of pairs of queries and keys. Queries
and keys are those of the same positions of a sequence; everything but attention treats tokens one by one.

    cp_comm_type
    all_gather   each rank gets the keys and values of all ranks, and attends with its own queries
    p2p          the same: the results are those of TransformerEngine's ring, which does not hold all keys at a time
    a2a          each rank gets the whole sequences for its part of the heads (DeepSpeed-Ulysses)

Sources: Llama Team, "The Llama 3 Herd of Models", 2024, section 3.3.2; Jacobs et al., "DeepSpeed Ulysses", 2023.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from ..core.arguments import described
from .arguments import one_of
from .attention_masks import MASKS, Window, limits, near
from .tensor_parallel import meshes_of, moved

COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")
POSITIONS, HEADS = 2, 1
"""Dimensions of queries, keys and values (batch, heads, positions, channels)."""
Attend = Callable[[Tensor, Tensor, Tensor, bool, Tensor | None], Tensor]
"""(queries, keys, values, whether the kernel's own causal mask is the mask, which keys each query sees or None)."""


def chunks_of(size: int, rank: int) -> tuple[int, int]:
    """The chunks of rank ``rank``, of ``2 * size``."""
    return rank, 2 * size - 1 - rank


def of_chunks(t: Tensor, length: int, size: int, rank: int) -> Tensor:
    """The rows (length, ...) of ``t`` (positions of the sequence or more, ...) that rank ``rank`` has."""
    half = length // 2
    return torch.cat([t[n * half : (n + 1) * half] for n in chunks_of(size, rank)])


class ContextParallel:
    """A group of ranks that share sequences; ``group`` None or of one rank: every rank has whole sequences.

    Raises TypeError for another object, ValueError for an unknown ``comm_type``, NotImplementedError for ``a2a+p2p``.
    """

    def __init__(self, owner: str, group: Any = None, comm_type: str = "p2p") -> None:
        self.owner, self.size, self.rank = owner, 1, 0
        self.meshes: dict[str, Any] = {}
        self.comm_type = one_of(f"{owner}: cp_comm_type", comm_type, COMM_TYPES)
        if comm_type == "a2a+p2p" and group is not None:
            raise NotImplementedError(
                f"{owner}: cp_comm_type='a2a+p2p' is not available; pass one group of all its ranks and "
                "cp_comm_type='a2a' or 'all_gather', whose results are the same"
            )
        if group is None:
            return
        if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"{owner}: cp_group is {described(group)}; pass a process group of torch.distributed")
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.meshes = meshes_of(group) if self.size > 1 else {}

    def __deepcopy__(self, memo: object) -> ContextParallel:
        return self  # a copy of a module is of the same group

    # ---------------------------------------------------------------------------------------- chunks

    def check(self, mask_type: str, *lengths: int) -> None:
        """Raise ValueError for a number of positions that has no two chunks, NotImplementedError for a mask that is a
        tensor."""
        if any(length % 2 for length in lengths):
            raise ValueError(
                f"{self.owner}: with cp_group each rank has two chunks of a sequence, and {max(lengths)} positions do "
                f"not divide into two; pad sequences to a multiple of {2 * self.size} positions"
            )
        if MASKS[mask_type].padding or MASKS[mask_type].arbitrary:
            usual = ", ".join(name for name, mask in MASKS.items() if not (mask.padding or mask.arbitrary))
            raise NotImplementedError(
                f"{self.owner}: attn_mask_type={mask_type!r} is not available with a cp_group of {self.size} ranks, "
                f"which have parts of a mask; use one of {usual}, with window_size if you need it"
            )

    def _order(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Chunks in the order of a sequence, among those of rank 0, 1, ...; and the inverse."""
        of_ranks = [n for rank in range(self.size) for n in chunks_of(self.size, rank)]
        mine = torch.tensor(of_ranks, device=device)
        return mine.argsort(), mine

    def _reordered(self, t: Tensor, order: Tensor) -> Tensor:
        """``t`` (b, h, positions of all, d) with its chunks in another order."""
        chunks: Tensor = t.unflatten(POSITIONS, (2 * self.size, -1))
        return chunks.index_select(POSITIONS, order).flatten(POSITIONS, POSITIONS + 1)

    # ---------------------------------------------------------------------------------------- exchanges

    def _gathered(self, t: Tensor, to_sequence: Tensor) -> Tensor:
        """The positions of all ranks, in the order of a sequence; the gradients of all ranks are summed."""
        from torch.distributed.tensor import Partial, Replicate, Shard

        t = moved(t, self.meshes[t.device.type], Shard(POSITIONS), Replicate(), Partial())
        return self._reordered(t, to_sequence)

    # ---------------------------------------------------------------------------------------- attention

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask_type: str, window: Window, as_tensor: bool, attend: Attend
    ) -> Tensor:
        """Attention of this rank's queries (b, h, s, d) over the keys and values (b, g, s, d) of all ranks.

        ``attend`` computes it for queries and keys that this rank has. ``as_tensor``: every mask is a tensor, because
        torch functions are disabled, without which a CausalBias is not read. Dynamo cannot make one.
        """
        of_chunk = partial(_of_chunk, as_tensor=as_tensor or torch.compiler.is_compiling(), attend=attend)
        if self.comm_type == "a2a":
            return self._by_heads(q, k, v, mask_type, window, of_chunk)
        to_sequence, _ = self._order(q.device)
        k, v = self._gathered(k, to_sequence), self._gathered(v, to_sequence)
        left, right = limits(mask_type, window)
        if left < 0 and right < 0:
            return attend(q, k, v, False, None)
        shift = k.shape[POSITIONS] - self.size * q.shape[POSITIONS] if MASKS[mask_type].bottom_right else 0
        pairs = zip(q.chunk(2, POSITIONS), chunks_of(self.size, self.rank), strict=True)
        firsts = [(part, n * part.shape[POSITIONS] + shift) for part, n in pairs]
        return torch.cat([of_chunk(part, k, v, first, (left, right)) for part, first in firsts], POSITIONS)

    def _by_heads(
        self, q: Tensor, k: Tensor, v: Tensor, mask_type: str, window: Window, of_chunk: Callable[..., Tensor]
    ) -> Tensor:
        """The same by whole sequences of a part of the heads."""
        from torch.distributed.tensor import Shard

        heads, groups = q.shape[HEADS], k.shape[HEADS]
        if heads % self.size or groups % self.size:
            raise ValueError(
                f"{self.owner}: cp_comm_type='a2a' divides heads among the ranks, and {heads} heads in {groups} groups "
                f"do not divide by {self.size}; use cp_comm_type='all_gather'"
            )
        to_sequence, to_ranks = self._order(q.device)
        by_position, by_head = Shard(POSITIONS), Shard(HEADS)
        mesh = self.meshes[q.device.type]
        q, k, v = (self._reordered(moved(t, mesh, by_position, by_head, by_head), to_sequence) for t in (q, k, v))
        shift = k.shape[POSITIONS] - q.shape[POSITIONS] if MASKS[mask_type].bottom_right else 0
        y = of_chunk(q, k, v, shift, limits(mask_type, window))
        return moved(self._reordered(y, to_ranks), mesh, by_head, by_position, by_position)


def _of_chunk(q: Tensor, k: Tensor, v: Tensor, first: int, window: Window, as_tensor: bool, attend: Attend) -> Tensor:
    """Attention of consecutive queries, the first of which has key ``first`` on its diagonal, over the keys that any of
    them sees."""
    queries, keys, (left, right) = q.shape[POSITIONS], k.shape[POSITIONS], window
    begin = max(first - left, 0) if left >= 0 else 0
    end = max(min(first + queries + right, keys), 0) if right >= 0 else keys
    if begin >= end:  # no query sees a key
        return q.new_zeros(*q.shape[:-1], v.shape[-1])
    k, v = k[:, :, begin:end], v[:, :, begin:end]
    if (left, right) == (-1, -1):
        return attend(q, k, v, False, None)
    if left < 0 and right == 0 and 0 <= first == end - queries and not (as_tensor and first):
        return attend(q, k, v, not first, causal_lower_right(queries, end) if first else None)  # no mask in memory
    rows = torch.arange(queries, device=q.device)[:, None] + first
    return attend(q, k, v, False, near(rows, torch.arange(begin, end, device=q.device), window))


class SequenceSplit(nn.Module):
    """A module that attends, or that has modules inside that do."""

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str = "p2p"
    ) -> None:
        """The process group of context parallelism, None for none; ``cp_global_ranks`` and ``cp_stream`` have no
        effect. Raises what the constructor of DotProductAttention raises."""
        for inner in self.modules():
            context = getattr(inner, "context_parallel", None)
            if isinstance(context, ContextParallel):
                inner.context_parallel = ContextParallel(context.owner, cp_group, cp_comm_type)  # type: ignore[assignment]
