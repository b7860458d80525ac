"""What FSDP2 gathers of a training weight: codes and scales that a rank casts from its rows, or high-precision values.

The choice depends on the recipe, the shape and the number of ranks only, so all ranks choose the same; they compare it
at the first gather (``Agreement``). ``tensor/fsdp.py`` makes operands of gathered tensors.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.explain import record
from ..core.kernel import Spec
from ..core.tracing import is_traced
from ..kernels.quantize.choose_cast import quantize_operand
from ..numerics.formats import Rounding
from ..recipe.linear_recipe import LinearRecipe
from ..tensor.fsdp import Gathered, Shard, gather_inputs, pad_rows, ranks_of


class Agreement:
    """What all ranks have agreed to gather of one weight: (key of the recipe, codes or values, mesh).

    To compare is a collective, so either all ranks compare or none does. A rank may replace its local tensor without
    the others: FSDP2 pads shards that are shorter than the largest whenever a state dict was loaded. Therefore no
    tensor stores what was agreed. Everything that is made of a weight (shards, views, copies) shares one Agreement.
    """

    def __init__(self) -> None:
        self.reached: set[tuple[Any, str, Any]] = set()


def refusal(linear_recipe: LinearRecipe, shard: Shard | None) -> str | None:
    """Why codes of a weight cannot be gathered with a bitwise identical result; None if they can."""
    casts, cast = linear_recipe.weight, linear_recipe.weight.rowwise
    if not linear_recipe.quantized_gather:
        return "quantized_gather is off, or the weight is (in_features, out_features)"
    if cast is None or casts.columnwise is None:
        return "the recipe has a product with the high-precision values of the weight"
    if linear_recipe.delayed is not None:
        return "delayed scaling has one scale for the whole weight, and a rank has a part of it"
    across = cast.format.why_not_split(-2, scales_differ=True)
    if across is not None:
        return f"{across}, and a rank has a part of it"
    if cast.rounding is not Rounding.NEAREST or casts.columnwise.rounding is not Rounding.NEAREST:
        return "the weight is rounded stochastically, in the order of its values"
    if not casts.one_copy:
        return (
            f"dgrad's copy in {casts.columnwise.format} is cast from high precision, along the shards; use square "
            "tiles or single_weight_copy=True"
        )
    if shard is None or len(shard.whole) != 2:
        return "the weight is not a sharded matrix"
    if shard.padded[1] != shard.whole[1]:
        return f"the shards are of columns, {shard.padded} of {shard.whole}: they would cut blocks"
    rows = shard.padded[0]
    cut = None if shard.padded == shard.whole else cast.format.why_not_split(-2, rows)
    return None if cut is None else f"shards of {rows} rows of {shard.whole[0]}: {cut}"


def quantized_inputs(
    values: Tensor, linear_recipe: LinearRecipe, agreement: Agreement, shard: Shard, mesh: Any, *ignored: Any,
    **others: Any,
) -> tuple[tuple[Tensor, ...], Gathered]:  # fmt: skip
    """(codes, scales) of this rank's rows, padded to the largest shard, cast from the sharded values in their dtype."""
    cast = linear_recipe.weight.rowwise
    assert cast is not None
    _check_agreement(values, linear_recipe, agreement, "codes", shard.whole, mesh)
    _record(values, shard, (values.dtype, cast.format), "codes", {})
    return gather_inputs((quantize_operand(pad_rows(values, shard.padded[0]), cast), None), shard)


def high_precision_inputs(
    values: Tensor, linear_recipe: LinearRecipe, agreement: Agreement, shard: Shard | None, reason: str, mesh: Any,
    outer_size: Any = None, outer_stride: Any = None, module: Any = None, mp_policy: Any = None,
) -> tuple[tuple[Tensor, ...], Gathered]:  # fmt: skip
    """The values of this rank's rows in the policy's dtype, padded to the largest shard."""
    whole = tuple(outer_size) if outer_size is not None else shard.whole if shard is not None else tuple(values.shape)
    _check_agreement(values, linear_recipe, agreement, "values", whole, mesh)
    padded = shard.padded if shard is not None else (-(-whole[0] // ranks_of(mesh)), *whole[1:])
    _record(values, Shard(whole, padded), values.dtype, "high precision", {"codes": reason})
    values = values if mp_policy is None or mp_policy.param_dtype is None else values.to(mp_policy.param_dtype)
    return (pad_rows(values, padded[0]),), Gathered(whole)


def gathered_values(outputs: tuple[Tensor, ...], gathered: Gathered, dtype: torch.dtype) -> Tensor:
    """The high-precision values of the whole weight in ``dtype``, from the one tensor that was gathered."""
    values = outputs[0].view(-1)[: math.prod(gathered.whole)].view(gathered.whole)
    return values if values.dtype is dtype else values.to(dtype)


def _check_agreement(
    values: Tensor, linear_recipe: LinearRecipe, agreement: Agreement, kind: str, whole: tuple[int, ...], mesh: Any
) -> None:
    """Check, at the first gather of a weight, that all ranks gather the same of it.

    Otherwise the tensors would not fit each other, or ranks would train different models. Raises RuntimeError on every
    rank.
    """
    agreed = (linear_recipe.key, kind, mesh)
    if ranks_of(mesh) == 1 or agreed in agreement.reached or is_traced(values):
        return
    group = mesh.get_group(-1)
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, (linear_recipe.key, kind, f"{linear_recipe} in {kind}"), group=group)
    if len({each[:2] for each in said}) > 1:
        names = ", ".join(f"rank {rank} {name}" for rank, (*_, name) in enumerate(said))
        raise RuntimeError(
            f"ranks do not gather the weight {whole} alike: {names}; give quantize_ the same recipe on every rank"
        )
    agreement.reached.add(agreed)


def _record(values: Tensor, shard: Shard, formats: Any, chosen: str, refusals: dict[str, str]) -> None:
    traced = is_traced(values)
    record(Spec("all-gather", (shard.whole,), (formats,), values.dtype, values.device, traced), chosen, refusals)
