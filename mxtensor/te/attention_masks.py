"""Masks of attention: what the mask types of TransformerEngine hide."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

PaddingMask = Tensor | tuple[Tensor, Tensor]
Window = tuple[int, int]
Sizes = tuple[int, int, int, int]
"""Batch, heads, queries, keys."""


@dataclass(frozen=True)
class Mask:
    """What a mask type hides. The diagonal pairs each query with the key of its own position."""

    causal: bool = False
    """Hide the keys after the query."""
    padding: bool = False
    """Hide the positions that the caller's mask marks; such queries give zeros."""
    arbitrary: bool = False
    """Hide the (query, key) pairs that the caller's mask marks."""
    bottom_right: bool = True
    """The diagonal ends at the last query and the last key; False: it starts at the first query and the first key."""


MASKS = {
    "no_mask": Mask(),
    "causal": Mask(causal=True, bottom_right=False),
    "causal_bottom_right": Mask(causal=True),
    "padding": Mask(padding=True),
    "padding_causal": Mask(causal=True, padding=True, bottom_right=False),
    "padding_causal_bottom_right": Mask(causal=True, padding=True),
    "arbitrary": Mask(arbitrary=True),
}


def limits(mask_type: str, window: Window) -> Window:
    """How many keys before and after the diagonal a query sees, -1 for all."""
    return window[0], 0 if MASKS[mask_type].causal else window[1]


def near(rows: Tensor, columns: Tensor, window: Window) -> Tensor:
    """Which keys (columns,) are within ``window``, one side of which has a limit, of the diagonal, whose keys are
    ``rows`` (..., queries, 1)."""
    left, right = window
    if left < 0 or right < 0:
        return columns <= rows + right if left < 0 else columns >= rows - left
    return (columns >= rows - left) & (columns <= rows + right)


def visible(
    mask_type: str, window: Window, given: PaddingMask | None, sizes: Sizes, device: torch.device
) -> tuple[bool, Tensor | None]:
    """(whether the kernel's own causal mask is the whole mask, which keys each query sees; None: all keys).

    The tensor is bool and broadcastable to ``sizes``.
    """
    mask, (_, _, queries, keys) = MASKS[mask_type], sizes
    left, right = limits(mask_type, window)
    seen: Tensor | None = None
    shift: int | Tensor = keys - queries if mask.bottom_right else 0
    if mask.padding:
        of_queries, of_keys = _paddings(mask_type, given, sizes)
        seen = ~(of_queries.transpose(2, 3) | of_keys)
        if mask.bottom_right:
            lengths = [(~padding).sum(3, keepdim=True) for padding in (of_queries, of_keys)]
            shift = lengths[1] - lengths[0]
    elif mask.arbitrary:
        seen = ~_arbitrary(given, sizes)
    if left < 0 and right < 0:
        return False, seen
    if seen is None and left < 0 and right == 0 and isinstance(shift, int) and shift == 0:
        return True, None
    rows = torch.arange(queries, device=device)[:, None] + shift
    within = near(rows, torch.arange(keys, device=device), (left, right))
    return False, within if seen is None else seen & within


def _boolean(masks: Iterable[Tensor]) -> None:
    for mask in masks:
        if mask.dtype != torch.bool:
            raise TypeError(f"attention_mask is {mask.dtype}; pass bool, True for what is masked out")


def _paddings(mask_type: str, given: PaddingMask | None, sizes: Sizes) -> tuple[Tensor, Tensor]:
    batch, _, queries, keys = sizes
    pair = (given, given) if isinstance(given, Tensor) else given
    if pair is None:
        raise ValueError(
            f"attn_mask_type={mask_type!r} needs an attention_mask ({batch}, 1, 1, {queries}), True for padding, or a "
            "pair of these for queries and keys"
        )
    _boolean(pair)
    shapes = tuple(tuple(mask.shape) for mask in pair)
    if shapes != ((batch, 1, 1, queries), (batch, 1, 1, keys)):
        raise ValueError(
            f"attn_mask_type={mask_type!r}: masks {shapes[0]} of queries and {shapes[1]} of keys do not fit; "
            f"pass a pair of shapes ({batch}, 1, 1, {queries}) and ({batch}, 1, 1, {keys})"
        )
    return pair


def _arbitrary(given: PaddingMask | None, sizes: Sizes) -> Tensor:
    shape = tuple(given.shape) if isinstance(given, Tensor) else None
    if (
        not isinstance(given, Tensor)
        or given.dim() > 4
        or any(n not in (1, size) for n, size in zip(given.shape[::-1], sizes[::-1], strict=False))
    ):
        raise ValueError(
            f"attn_mask_type='arbitrary' needs one attention_mask that broadcasts to (batch, heads, queries, keys) = "
            f"{tuple(sizes)}, True for what is masked out; got {shape or type(given).__name__}"
        )
    _boolean([given])
    return given
