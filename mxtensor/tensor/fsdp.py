"""What FSDP2 gathers of a weight that carries roles: codes and scales where that changes no bit, values elsewhere.

A shard holds whole rows of the weight in high precision. Blocks along a row never cross a shard, tiles do not where a
shard ends on a tile; so each rank casts its rows, and what is gathered are the bytes of the whole weight's rowwise
operand: 8.25 bits a value in MXFP8 with blocks of 1x32, 8.01 with tiles of 32x32, where bfloat16 has 16. Both come from
the sharded values themselves, whatever dtype a mixed-precision policy gives the layer.

The choice depends on the recipe, the shape and the number of ranks alone, so that all ranks take the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from inspect import Signature, signature
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..core.explain import record
from ..core.kernel import Spec
from ..core.tracing import is_traced
from ..kernels.quantize.select import quantize_operand
from ..numerics.cast import Cast
from ..numerics.formats import FULL, Rounding
from ..numerics.operand import Operand
from ..recipe.linear_recipe import LinearRecipe
from .mxtensor import MXTensor

AGREED = "_mxtensor_agreed"
"""The attribute of a shard's values that holds what all ranks have said they gather."""


class Shard(NamedTuple):
    """Where the rows of a rank belong."""

    whole: tuple[int, ...]
    """The shape of the whole weight."""
    padded: tuple[int, ...]
    """The shape of the largest shard, which all gather."""


def place_of(known: Shard | None, whole: tuple[int, ...], padded: tuple[int, ...]) -> Shard:
    """The place of a shard's buffer, made of the whole weight in the padded shape, or of a shard that knows its own."""
    return known if known is not None and known.padded == padded else Shard(whole, padded)


def padded_to(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``values`` with rows of zeros after them, contiguous."""
    missing = shape[0] - values.shape[0]
    return (F.pad(values, (0, 0) * (len(shape) - 1) + (0, missing)) if missing else values).contiguous()


@dataclass(frozen=True)
class Gathered:
    """What the tensors that were gathered are, for the hook that puts them together."""

    whole: tuple[int, ...]
    cast: Cast | None = None
    """Of the codes; None: high-precision values."""
    scale: Tensor | None = None
    """On a single rank, where torch passes on the first tensor only."""

    def refill(self, values: Tensor) -> None:
        """Bring up to date what torch does not, once it has filled the tensors inside."""
        if isinstance(values, MXTensor):
            values._rowwise = filled_again(values._rowwise, None if self.scale is None else [None, self.scale])


def filled_again(operand: Operand | None, contents: Sequence[Tensor | None] | None = None) -> Operand | None:
    """The operand over the same memory, which was written to unseen: in new tensors, for kernels keep what they make of
    a scale with the tensor and its version. ``contents`` goes into what torch does not fill, through ``data``, because
    autograd may have kept the tensor for backward.
    """
    if operand is None:
        return None
    if contents is not None:
        for mine, new in zip(operand.tensors, contents, strict=False):
            if new is not None:
                mine.data.copy_(new)
    return Operand(operand.data.detach(), operand.scale.detach(), operand.global_scale, operand.format, operand.shape)


@cache
def _rest(function: Callable[..., Any], given: int) -> Signature:
    """The signature of a function without so many of its first parameters."""
    whole = signature(function)
    return whole.replace(parameters=list(whole.parameters.values())[given:])


def hook(function: Callable[..., Any], *given: Any) -> Callable[..., Any]:
    """``function`` with its first arguments given, as FSDP2 is to call it. It counts the parameters at each gather,
    which takes as long as a cast where they are not at hand."""
    call = partial(function, *given)
    call.__signature__ = _rest(function, len(given))  # type: ignore[attr-defined]
    return call


def refusal(linear_recipe: LinearRecipe, shard: Shard | None) -> str | None:
    """Why the codes of a weight cannot be gathered without changing a bit; None where they can."""
    casts, cast = linear_recipe.weight, linear_recipe.weight.rowwise
    if not linear_recipe.quantized_gather:
        return "quantized_gather is off, or the weight is (in_features, out_features)"
    if cast is None or casts.columnwise is None:
        return "the recipe has a product by the weight's high-precision values"
    if linear_recipe.delayed is not None or cast.format.global_scale or cast.format.block[0] == FULL:
        return f"a scale of {cast.format} is of the whole weight, of which a rank holds a part"
    if cast.rounding is not Rounding.NEAREST or casts.columnwise.rounding is not Rounding.NEAREST:
        return "the weight is rounded stochastically, in the order of its values"
    if not casts.one_copy:
        return (
            f"dgrad's copy in {casts.columnwise.format} is cast from high precision, along the shards; use square tiles "
            "or single_weight_copy=True"
        )
    if shard is None or len(shard.whole) != 2:
        return "the weight is no sharded matrix"
    if shard.padded[1] != shard.whole[1]:
        return f"the shards are of columns, {shard.padded} of {shard.whole}: blocks would be cut"
    rows = cast.format.block[0]
    if shard.padded != shard.whole and shard.padded[0] % rows:
        return f"shards of {shard.padded[0]} rows of {shard.whole[0]} cut tiles of {rows} rows"
    return None


def in_codes(
    values: Tensor, linear_recipe: LinearRecipe, shard: Shard, mesh: Any
) -> tuple[tuple[Tensor, ...], Gathered]:
    """(codes, scales) of this rank's rows (rows, K), padded to the largest shard; bytes, or float32 scales."""
    cast = linear_recipe.weight.rowwise
    assert cast is not None
    _agree(values, linear_recipe, "codes", shard.whole, mesh)
    _note(values, shard, (values.dtype, cast.format), "codes", {})
    operand = quantize_operand(padded_to(values, shard.padded), cast)
    codes, scale = operand.data.view(torch.uint8).contiguous(), operand.scale.contiguous()
    return (codes, scale), Gathered(shard.whole, cast, scale if mesh.size() == 1 else None)


def in_high_precision(
    values: Tensor, linear_recipe: LinearRecipe, shard: Shard | None, reason: str, mesh: Any, size: Any, stride: Any, module: Any,
    policy: Any,
) -> tuple[tuple[Tensor, ...], Gathered]:  # fmt: skip
    """The values of this rank's rows in the policy's dtype, padded to the largest shard."""
    whole = tuple(size)
    _agree(values, linear_recipe, "values", whole, mesh)
    padded = shard.padded if shard is not None else (-(-whole[0] // mesh.size()), *whole[1:])
    _note(values, Shard(whole, padded), values.dtype, "high precision", {"codes": reason})
    values = values if policy.param_dtype is None else values.to(policy.param_dtype)
    return (padded_to(values, padded),), Gathered(whole)


def gathered_values(
    outputs: tuple[Tensor, ...], gathered: Gathered, linear_recipe: LinearRecipe, dtype: torch.dtype
) -> Tensor:
    """The whole weight over the tensors that were gathered: an MXTensor of the facade ``dtype``, or plain values."""
    whole, cast = gathered.whole, gathered.cast
    if cast is None:
        values = outputs[0].view(-1)[: math.prod(whole)].view(whole)
        return values if values.dtype is dtype else values.to(dtype)
    codes, scale = outputs if gathered.scale is None else (outputs[0], gathered.scale)
    rows = cast.format.scale_shape(whole)[0]
    operand = Operand(codes[: whole[0]].view(cast.format.element.dtype), scale[:rows], None, cast.format, whole)
    return MXTensor(operand, None, LinearRecipe.inference(cast, cast, linear_recipe.kernel_preference), dtype, whole)


def _agree(values: Tensor, linear_recipe: LinearRecipe, sent: str, whole: tuple[int, ...], mesh: Any) -> None:
    """Ask, at the first gather of a weight, whether all ranks gather the same of it: what they send would not fit, or
    they would train different models. Raises RuntimeError on every rank where they do not."""
    key = (linear_recipe.key, sent)
    if mesh.size() == 1 or getattr(values, AGREED, None) == key or is_traced(values):
        return
    group = mesh.get_group(-1)
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, (*key, f"{linear_recipe} in {sent}"), group=group)
    if len({each[:2] for each in said}) > 1:
        names = ", ".join(f"rank {rank} {name}" for rank, (*_, name) in enumerate(said))
        raise RuntimeError(
            f"ranks do not gather the weight {whole} alike: {names}; give quantize_ the same recipe on every rank"
        )
    setattr(values, AGREED, key)


def _note(values: Tensor, shard: Shard, formats: Any, chosen: str, refusals: dict[str, str]) -> None:
    traced = is_traced(values)
    record(Spec("all-gather", (shard.whole,), (formats,), values.dtype, values.device, traced), chosen, refusals)
