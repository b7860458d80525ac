"""TransformerEngine's functions that sort tokens by expert and put them back, in plain torch and differentiable.

``row_id_map`` is what ``moe_permute`` returns for ``moe_unpermute``: for each token and each expert (``index``: each
choice) the row of the permuted tensor, or -1. Its layout is not TransformerEngine's.

Sums over the rows of a token are computed in float32, in the order of experts, and rounded once.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.arguments import COUNT, DENSE, INTEGER, check, described
from .arguments import one_of

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


def _rows_of(row_id_map: Tensor, rows: int) -> Tensor:
    """int64 (rows,): the place in the flattened, transposed ``row_id_map`` of each row; its size for a row of none."""
    places = row_id_map.t().reshape(-1).to(torch.int64)
    out = torch.full((rows + 1,), len(places), device=places.device)
    out.scatter_(0, torch.where(places < 0, rows, places), torch.arange(len(places), device=places.device))
    return out[:rows]


def _tokens_of(where: Tensor, row_id_map: Tensor) -> Tensor:
    """int64 (rows,): the token of each row, from ``_rows_of``; the number of tokens for a row of none."""
    tokens = row_id_map.shape[0]
    return torch.where(where < row_id_map.numel(), where % max(tokens, 1), tokens)


def _map_of_mask(routing_map: Tensor) -> Tensor:
    """int32 (tokens, experts): the row of each token for each of its experts, -1 for others."""
    mask = routing_map.t() != 0
    row = mask.reshape(-1).cumsum(0).view(mask.shape) - 1
    return torch.where(mask, row, -1).t().to(torch.int32)


def _map_of_index(routing_map: Tensor) -> Tensor:
    """int32 (tokens, choices): the row of each choice; a stable sort by expert. Choices of expert -1 have none."""
    expert = routing_map.reshape(-1).to(torch.int64)
    expert = torch.where(expert < 0, expert.max() + 1 if len(expert) else 0, expert)  # after all others
    order = expert.argsort(stable=True)
    row = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return torch.where(routing_map < 0, -1, row.view(routing_map.shape)).to(torch.int32)


def _picked(source: Tensor, where: Tensor) -> Tensor:
    """Rows of ``source``; zeros where the index is beyond its end."""
    inside = where < source.shape[0]
    if source.shape[0] == 0:
        return source.new_zeros((len(where), *source.shape[1:]))
    out = source.index_select(0, where.clamp(max=source.shape[0] - 1))
    return torch.where(inside.view(-1, *[1] * (source.dim() - 1)), out, 0)


def _permuted(inp: Tensor, where: Tensor, row_id_map: Tensor) -> Tensor:
    return _picked(inp, _tokens_of(where, row_id_map))


def _weights_of_rows(probs: Tensor, where: Tensor) -> Tensor:
    return _picked(probs.t().reshape(-1), where)


def _cut(name: str, row_id_map: Tensor, given: int) -> tuple[Tensor, int]:
    """The map without rows from ``given`` on, and the number of rows; 0 or less: all are counted and stay."""
    if given > row_id_map.numel():
        raise ValueError(
            f"{name}: num_out_tokens={given} is more than the {row_id_map.numel()} entries of routing_map; leave it "
            "at -1 to count them"
        )
    rows = given if given > 0 else int((row_id_map >= 0).sum())
    return torch.where(row_id_map < rows, row_id_map, -1), rows


def moe_permute(
    inp: Tensor, routing_map: Tensor, num_out_tokens: int = -1, max_token_num: int = -1, map_type: str = "mask"
) -> tuple[Tensor, Tensor]:
    """Tokens (T, H) sorted by expert, then by token: (num_out_tokens, H), and the ``row_id_map`` for the way back.

    ``routing_map``: for ``mask`` (T, experts), not 0 where a token goes to an expert; for ``index`` (T, top_k), the
    experts of each token, -1 for none. ``num_out_tokens``: the number of rows; rows beyond it are dropped. Without it
    (-1, 0) they are counted, and a GPU waits. ``max_token_num`` has no effect.

    Raises TypeError and ValueError for tensors that do not fit.
    """
    one_of("moe_permute: map_type", map_type, MAPS)
    check("moe_permute", "num_out_tokens", num_out_tokens, INTEGER)
    _check_tokens("moe_permute", inp, routing_map)
    row_id_map = _map_of_mask(routing_map) if map_type == "mask" else _map_of_index(routing_map)
    row_id_map, rows = _cut("moe_permute", row_id_map, num_out_tokens)
    return _permuted(inp, _rows_of(row_id_map, rows), row_id_map), row_id_map


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int = -1
) -> tuple[Tensor, Tensor, Tensor]:
    """``moe_permute`` of a mask, and the weight of each row from ``probs`` (T, experts): rows, weights, row_id_map."""
    check("moe_permute_with_probs", "num_out_tokens", num_out_tokens, INTEGER)
    _check_tokens("moe_permute_with_probs", inp, routing_map, probs)
    row_id_map, rows = _cut("moe_permute_with_probs", _map_of_mask(routing_map), num_out_tokens)
    where = _rows_of(row_id_map, rows)
    return _permuted(inp, where, row_id_map), _weights_of_rows(probs, where), row_id_map


def moe_permute_and_pad_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, tokens_per_expert: Tensor, align_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """``moe_permute_with_probs`` with zero rows after the rows of each expert, up to a multiple of ``align_size``.

    Returns rows, weights, row_id_map, the rows of padding before each expert (None if there is no padding), and the
    padded number of rows of each expert. A GPU waits. Layers of this package need no padding.
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
    row_id_map, offsets = _map_of_mask(routing_map), (padded - counts).cumsum(0) - (padded - counts)
    moved = torch.where(row_id_map < 0, -1, row_id_map + offsets).to(torch.int32)
    where = _rows_of(moved, int(padded.sum()))
    pad_offsets = None if torch.equal(counts, padded) else offsets
    return _permuted(inp, where, moved), _weights_of_rows(probs, where), row_id_map, pad_offsets, padded


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
        row_id_map = torch.where(row_id_map < 0, -1, row_id_map + pad_offsets.to(row_id_map.device))
    tokens, where = row_id_map.shape[0], _rows_of(row_id_map, inp.shape[0])
    rows = inp.to(torch.float32)
    if merging_probs is not None:
        rows = rows * _weights_of_rows(merging_probs.to(torch.float32), where).unsqueeze(1)
    out = rows.new_zeros(tokens + 1, inp.shape[1]).index_add(0, _tokens_of(where, row_id_map), rows)
    return out[:tokens].to(inp.dtype)


def _chunks(name: str, inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """int64 (rows,): the row of ``inp`` at each place of the result."""
    _check_rows(name, inp)
    _integers(name, "split_sizes", split_sizes, 1)
    _integers(name, "sorted_index", sorted_index, 1)
    if split_sizes.shape != sorted_index.shape:
        raise ValueError(f"{name}: {len(split_sizes)} split_sizes and {len(sorted_index)} indices; pass one for each")
    sizes, index = split_sizes.to(inp.device, torch.int64), sorted_index.to(inp.device, torch.int64)
    starts, moved = sizes.cumsum(0) - sizes, sizes.index_select(0, index)
    shift = starts.index_select(0, index) - (moved.cumsum(0) - moved)
    rows = inp.shape[0]
    return torch.arange(rows, device=inp.device) + shift.repeat_interleave(moved, output_size=rows)


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """The chunks of rows of ``inp``, of ``split_sizes`` rows each, in the order ``sorted_index``.

    ``split_sizes`` must sum to the rows of ``inp``; nothing waits for a GPU. Raises TypeError and ValueError for other
    tensors.
    """
    return inp.index_select(0, _chunks("moe_sort_chunks_by_index", inp, split_sizes, sorted_index))


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    """``moe_sort_chunks_by_index`` of rows and of their weights ``probs`` (rows,)."""
    name = "moe_sort_chunks_by_index_with_probs"
    where = _chunks(name, inp, split_sizes, sorted_index)
    if not isinstance(probs, Tensor) or probs.shape != inp.shape[:1]:
        raise ValueError(f"{name}: probs is {described(probs)}; pass a weight for each of the {len(inp)} rows")
    return inp.index_select(0, where), probs.index_select(0, where)
