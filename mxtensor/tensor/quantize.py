"""``mxtensor.quantize``: a plain tensor becomes an MXTensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.arguments import check, check_plain, described
from ..core.devices import cached
from ..core.peer_names import refuse_arguments
from ..numerics.cast import SEED, Cast
from ..numerics.formats import Format, Orientation, Rounding, ScaleCalculationMode
from ..recipe.linear_recipe import LinearRecipe
from .mxtensor import MXTensor
from .quantize_as import quantize_as


def quantize(
    x: Tensor,
    format: Format | str | torch.dtype,
    scaling: ScaleCalculationMode | str = "rceil",
    orientation: Orientation | str = "rowwise",
    rounding: Rounding | str = "nearest",
    seed: int | None = None,
    **others: Any,
) -> MXTensor:
    """Quantize ``x`` (float32, bfloat16, float16 or float64; 1-D or more; any strides) to an MXTensor of its shape.

    ``format``: a name of FORMATS, a Format or a torch dtype. ``scaling``: "rceil", "floor", "ceil" or "even", the rule
    for power-of-two scales. ``orientation``: "rowwise" blocks the last dimension, "columnwise" the one before it,
    "both" stores a copy of each, cast from the same values. ``rounding``: "nearest" or "stochastic", also for later
    writes to the tensor. ``seed`` makes stochastic rounding the same on every device; without it the random numbers
    come from torch's generator. The result carries no gradient. A DTensor gives a DTensor of MXTensors: each rank
    quantizes its shard. Raises TypeError for other dtypes, ValueError for an unknown name or a tensor with too few
    dimensions, NotImplementedError for a DTensor whose shards cut blocks or share a scale.
    """
    if others:
        refuse_arguments("quantize", others)
    if not isinstance(x, Tensor):
        raise TypeError(
            f"quantize takes a tensor, not {described(x)}; for numbers use torch.as_tensor(x), for a module "
            "mx.quantize_(model, format)"
        )
    if seed is not None:
        check("quantize", "seed", seed, SEED)
    try:
        recipe = _recipe(format, scaling, rounding, seed)
    except TypeError:  # an object that cannot be hashed is not a name; this raises the error for it
        recipe = LinearRecipe.inference(Cast.of(format, scaling, rounding, seed))
    default = isinstance(orientation, str) and orientation == "rowwise"  # an array compares with each of its entries
    copies = Orientation.ROWWISE if default else Orientation.of(orientation)
    if type(x) is Tensor:
        return MXTensor._quantized(x, recipe, copies)
    check_plain("quantize: the tensor", x)
    return quantize_as(x, recipe, copies)


@cached
def _recipe(format: Any, scaling: Any, rounding: Any, seed: int | None) -> LinearRecipe:
    return LinearRecipe.inference(Cast.of(format, scaling, rounding, seed))
