"""Tokens sorted by expert and put back, by TransformerEngine's functions, and groups of rows padded to whole blocks.

All are differentiable, on any device. ``row_id_map`` is what ``moe_permute`` returns for ``moe_unpermute``: for each
token and each expert (``index``: each choice) the row of the permuted tensor, or -1. Its layout is not
TransformerEngine's.

Sums over the rows of a token are computed in float32, in the order of experts, and rounded once, in forward and
backward passes. On a CUDA device each function copies or sums in one launch of Triton (``kernels/permute``), after the
launches that number rows, and without atomics: results and gradients are those of a CPU, but for gradients of
``merging_probs``, which are sums of another order.

Fp8Padding and Fp8Unpadding serve kernels that need whole blocks of rows. ``GroupedLinear`` accepts any row counts and
needs neither module. Zero rows do not change an amax, and a short last block equals one padded with zeros. Padded rows
are therefore cast to the same codes and scales, with every format and nearest rounding; stochastic rounding draws other
numbers for other shapes. Products of padded groups differ from those of the rows alone at most in the order of
floating-point sums.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..core.arguments import COUNT, DENSE, INTEGER, check, described, optional
from ..core.tracing import is_captured, is_traced
from ..kernels.permute.choose_permutation import choices_of_rows, chunk_rows, rows_of_mask
from ..kernels.permute.definition import rows_of_index
from ..numerics.formats import FULL
from ..recipe.linear_recipe import LinearRecipe
from ..training.autocast import get_recipe
from ..training.grouped import merged, moved, permuted
from .arguments import one_of
from .linear import Splits, groups_of, row_counts

MAPS = ("mask", "index")


def _integers(name: str, what: str, t: Tensor, dims: int) -> None:
    if not isinstance(t, Tensor) or t.dim() != dims or t.dtype.is_floating_point or t.dtype.is_complex:
        raise TypeError(f"{name}: {what} is {described(t)}; pass an integer tensor of {dims} dimensions")


def _check_rows(name: str, inp: Tensor) -> None:
    check(name, "inp", inp, DENSE)
    if inp.dim() != 2:
        raise ValueError(f"{name}: inp is {described(inp)}; pass (tokens, hidden_size)")


def _check_tokens(name: str, inp: Tensor, routing_map: Tensor, probs: Tensor | None = None) -> None:
    """The arguments that all forms of ``moe_permute`` have."""
    _check_rows(name, inp)
    _integers(name, "routing_map", routing_map, 2)
    for what, given in (("routing_map", routing_map), ("probs", probs)):
        if given is not None and given.shape[0] != inp.shape[0]:
            raise ValueError(f"{name}: {what} is {described(given)}, and inp has {inp.shape[0]} tokens")
    if probs is not None and probs.shape != routing_map.shape:
        raise ValueError(f"{name}: probs is {described(probs)}; it must have the shape {tuple(routing_map.shape)}")


def _permuted(
    name: str, inp: Tensor, probs: Tensor | None, routing_map: Tensor, num_out_tokens: int, by_mask: bool = True
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(rows, their weights, row_id_map). ``num_out_tokens`` 0 or less: the number of choices, for which the host
    waits."""
    check(name, "num_out_tokens", num_out_tokens, INTEGER)
    _check_tokens(name, inp, routing_map, probs)
    if num_out_tokens > routing_map.numel():
        raise ValueError(
            f"{name}: num_out_tokens={num_out_tokens} is more than the {routing_map.numel()} entries of routing_map; "
            "leave it at -1 to count them"
        )
    rows = num_out_tokens
    if rows <= 0:
        rows = int(routing_map.count_nonzero() if by_mask else (routing_map >= 0).sum())
    if by_mask:
        row_id_map, choices = rows_of_mask(routing_map, rows)
    else:
        row_id_map = rows_of_index(routing_map)
        row_id_map = torch.where(row_id_map < rows, row_id_map, -1)
        choices = choices_of_rows(row_id_map, rows)
    return *permuted(inp, probs, row_id_map, choices), row_id_map


def moe_permute(
    inp: Tensor, routing_map: Tensor, num_out_tokens: int = -1, max_token_num: int = -1, map_type: str = "mask"
) -> tuple[Tensor, Tensor]:
    """Tokens (T, H) sorted by expert, then by token: (num_out_tokens, H), and the ``row_id_map`` for the way back.

    ``routing_map``: for ``mask`` (T, experts), not 0 where a token goes to an expert; for ``index`` (T, top_k), the
    experts of each token, -1 for none. ``num_out_tokens``: the number of rows; rows beyond it are dropped. Without it
    (-1, 0) they are counted, which synchronizes. ``max_token_num`` has no effect.

    Raises TypeError and ValueError for tensors that do not fit.
    """
    one_of("moe_permute: map_type", map_type, MAPS)
    out, _, row_id_map = _permuted("moe_permute", inp, None, routing_map, num_out_tokens, map_type == "mask")
    return out, row_id_map


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int = -1
) -> tuple[Tensor, Tensor, Tensor]:
    """``moe_permute`` of a mask, and the weight of each row from ``probs`` (T, experts): rows, weights, row_id_map."""
    out, weights, row_id_map = _permuted("moe_permute_with_probs", inp, probs, routing_map, num_out_tokens)
    assert weights is not None
    return out, weights, row_id_map


def moe_permute_and_pad_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, tokens_per_expert: Tensor, align_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """``moe_permute_with_probs`` with zero rows after the rows of each expert, up to a multiple of ``align_size``.

    Returns rows, weights, row_id_map, the rows of padding before each expert (None if there is no padding), and the
    padded number of rows of each expert. Synchronizes with a GPU. Layers of this package need no padding.
    """
    name = "moe_permute_and_pad_with_probs"
    check(name, "align_size", align_size, COUNT)
    _check_tokens(name, inp, routing_map, probs)
    _integers(name, "tokens_per_expert", tokens_per_expert, 1)
    if len(tokens_per_expert) != routing_map.shape[1]:
        raise ValueError(
            f"{name}: tokens_per_expert is {described(tokens_per_expert)}; routing_map has {routing_map.shape[1]} "
            "experts"
        )
    counts = tokens_per_expert.to(inp.device, torch.int64)
    padded = (counts + align_size - 1) // align_size * align_size
    added = padded - counts
    rows, padding = torch.stack([padded.sum(), added.sum()]).tolist()  # waits once
    offsets = added.cumsum(0) - added if padding else None
    row_id_map, choices = rows_of_mask(routing_map, rows, offsets)
    out, weights = permuted(inp, probs, row_id_map, choices, offsets)
    assert weights is not None
    return out, weights, row_id_map, offsets, padded


def moe_unpermute(
    inp: Tensor, row_id_map: Tensor, merging_probs: Tensor | None = None, restore_shape: Sequence[int] | None = None,
    map_type: str = "mask", probs: Tensor | None = None, pad_offsets: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The sum of the rows of each token: (rows, H) -> (T, H), with ``row_id_map`` from ``moe_permute``.

    ``merging_probs``: the weight of each row, (T, experts) for ``mask``, (T, top_k) for ``index``. ``pad_offsets``: the
    fourth result of ``moe_permute_and_pad_with_probs``. ``restore_shape``: (T, H), which ``row_id_map`` knows already.
    ``probs`` is the old name of ``merging_probs``.

    Raises TypeError and ValueError for tensors that do not fit.
    """
    one_of("moe_unpermute: map_type", map_type, MAPS)
    _check_rows("moe_unpermute", inp)
    _integers("moe_unpermute", "row_id_map", row_id_map, 2)
    if probs is not None:
        warnings.warn("moe_unpermute: probs is the old name of merging_probs", UserWarning, stacklevel=2)
        merging_probs = probs
    for what, given in (("merging_probs", merging_probs), ("restore_shape", restore_shape)):
        expected = tuple(row_id_map.shape) if given is merging_probs else (row_id_map.shape[0], inp.shape[1])
        found = None if given is None else tuple(given.shape if isinstance(given, Tensor) else given)
        if found is not None and found != expected:
            raise ValueError(f"moe_unpermute: {what} has the shape {found}; it must be {expected}")
    if pad_offsets is not None:
        pad_offsets = pad_offsets.to(row_id_map.device)
    return merged(inp, merging_probs, row_id_map, pad_offsets)


def _chunks(name: str, inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> tuple[Tensor, Tensor]:
    """int32 (rows,) twice: the row of ``inp`` at each place of the result, and the place of each row."""
    _check_rows(name, inp)
    _integers(name, "split_sizes", split_sizes, 1)
    _integers(name, "sorted_index", sorted_index, 1)
    if split_sizes.shape != sorted_index.shape:
        raise ValueError(f"{name}: {len(split_sizes)} split_sizes and {len(sorted_index)} indices; pass one for each")
    rows = inp.shape[0]
    return chunk_rows(split_sizes.to(inp.device), sorted_index.to(inp.device), None, rows, rows)


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """The chunks of rows of ``inp``, of ``split_sizes`` rows each, in the order ``sorted_index``.

    ``sorted_index`` names each chunk once. Rows after all chunks stay where they are. Does not synchronize. Raises
    TypeError and ValueError for other tensors.
    """
    return moved(inp, None, *_chunks("moe_sort_chunks_by_index", inp, split_sizes, sorted_index))[0]


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    """``moe_sort_chunks_by_index`` of rows and of their weights ``probs`` (rows,)."""
    name = "moe_sort_chunks_by_index_with_probs"
    maps = _chunks(name, inp, split_sizes, sorted_index)
    if not isinstance(probs, Tensor) or probs.shape != inp.shape[:1]:
        raise ValueError(f"{name}: probs is {described(probs)}; pass a weight for each of the {len(inp)} rows")
    out, weights = moved(inp, probs, *maps)
    assert weights is not None
    return out, weights


# ---------------------------------------------------------------------------------------------- padding


WITHOUT_BLOCKS = 16
"""The multiple that float8 kernels need of a contraction, with or without blocks."""
MX_BLOCK = 32
"""The multiple to which TransformerEngine aligns rows for formats with one-byte scales, NVFP4 included."""


def align_size_of(linear_recipe: LinearRecipe | None) -> int:
    """The multiple of rows that the kernels of a recipe need.

    For formats with one-byte scales: their block size, at least 32. For formats with float32 scales, and without a
    recipe: 16.
    """
    if linear_recipe is None:
        return WITHOUT_BLOCKS
    size = WITHOUT_BLOCKS
    for casts in (linear_recipe.input, linear_recipe.weight, linear_recipe.grad):
        for cast in (casts.rowwise, casts.columnwise):
            if cast is not None and cast.format.scale.bits == 8 and cast.format.block[1] != FULL:
                size = max(size, MX_BLOCK, cast.format.block[1])
    return size


def _has_kernels(inp: Tensor) -> bool:
    """Whether rows are copied in one launch by the kernels of permutations. A CUDA graph would read the row counts of
    its capture from memory of the host."""
    return inp.is_cuda and not is_traced(inp) and not is_captured(inp)


class _Aligned(nn.Module):
    """The number of groups, and the multiple to which their row counts are rounded up."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        check(type(self).__name__, "num_gemms", num_gemms, COUNT)
        check(type(self).__name__, "align_size", align_size, optional(COUNT))
        self.num_gemms, self.align_size = num_gemms, align_size

    def padded(self, sizes: list[int]) -> list[int]:
        """Each row count rounded up to ``align_size``, or to the multiple that the active recipe needs."""
        recipe = get_recipe()
        size = self.align_size or align_size_of(None if recipe is None else recipe.linear_recipe())
        return [-(-n // size) * size for n in sizes]

    def copied(self, inp: Tensor, before: list[int], after: list[int]) -> Tensor:
        """Rows in groups of ``before``, each cut to its size in ``after`` or filled up with zeros; ``inp`` itself if no
        size differs."""
        groups = groups_of(inp, before, type(self).__name__)
        if before == after:
            return inp
        pads = sum(before) < sum(after)
        if not _has_kernels(inp):
            pieces = []
            for rows, size in zip(groups, after, strict=True):
                pieces += [rows, rows.new_zeros(size - len(rows), rows.shape[1])] if pads else [rows[:size]]
            return torch.cat(pieces)
        sizes, padded = (before, after) if pads else (after, before)
        counts = torch.tensor([sizes, padded], dtype=torch.int32, device="cpu")
        if inp.device.type == "cuda":
            counts = counts.pin_memory().to(inp.device, non_blocking=True)  # does not synchronize
        into, back = chunk_rows(counts[0], None, counts[1], sum(sizes), sum(padded))
        return moved(inp.reshape(-1, inp.shape[-1]), None, *((into, back) if pads else (back, into)))[0]

    def extra_repr(self) -> str:
        return f"num_gemms={self.num_gemms}, align_size={self.align_size}"


class Fp8Padding(_Aligned):
    """Append zero rows to each group, up to a multiple of ``align_size``.

    ``align_size=None``: at each call the multiple that the active recipe needs (``align_size_of``), 16 outside
    autocast.
    """

    def forward(self, inp: Tensor, m_splits: Splits) -> tuple[Tensor, list[int]]:
        """inp (..., K) with sum(m_splits) rows -> (rows (padded sum, K), padded row counts). Differentiable.

        If no group needs padding, returns ``inp`` itself. Raises TypeError and ValueError for m_splits that do not fit
        ``inp``.
        """
        sizes = row_counts(m_splits, self.num_gemms, type(self).__name__)
        padded = self.padded(sizes)
        return self.copied(inp, sizes, padded), padded


class Fp8Unpadding(_Aligned):
    """The inverse of ``Fp8Padding`` with the same ``align_size``, or under the same recipe."""

    def forward(self, inp: Tensor, m_splits: Splits) -> Tensor:
        """inp (..., N) with padded rows, the row counts before padding -> rows (sum(m_splits), N). Differentiable.

        If no group was padded, returns ``inp`` itself. Raises TypeError and ValueError for m_splits whose padded counts
        do not fit ``inp``.
        """
        sizes = row_counts(m_splits, self.num_gemms, type(self).__name__)
        return self.copied(inp, self.padded(sizes), sizes)
