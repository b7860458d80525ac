"""Casts of a DTensor: each rank casts its shard, bit for bit as the whole tensor would be.

``mxtensor.quantize`` and ``quantize_`` store the codes; quantization-aware training rounds values.
"""

from __future__ import annotations

from torch.distributed.tensor import DTensor, Replicate, Shard

from ..numerics.cast import Cast
from ..numerics.formats import Orientation, Rounding
from ..recipe.linear_recipe import LinearRecipe
from .mxtensor import MXTensor


def quantize_shards(x: DTensor, recipe: LinearRecipe, orientation: Orientation) -> DTensor:
    """A DTensor of MXTensors with the mesh and placements of ``x``; nothing is communicated.

    Raises NotImplementedError if a block or a scale needs values of two ranks, and for partial sums.
    """
    reason = why_not_by_shards(x, recipe.stored, orientation)
    if reason is not None:
        raise NotImplementedError(
            f"a DTensor of shape {tuple(x.shape)} with placements {x.placements} cannot be quantized shard by shard: "
            f"{reason}; call redistribute(placements=[Replicate()]) or full_tensor() first"
        )
    local = MXTensor._quantized(x.to_local(), recipe, orientation)
    return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


def why_not_by_shards(x: DTensor, cast: Cast, orientation: Orientation = Orientation.ROWWISE) -> str | None:
    """Why shards cannot be cast one by one; None if each alone gets the codes that it has in the whole tensor. All
    ranks decide alike."""
    format = cast.format
    sharded: dict[int, int] = {}
    for mesh_dim, placement in enumerate(x.placements):
        if type(placement) is Shard:
            dim = placement.dim % x.dim()
            sharded[dim] = sharded.get(dim, 1) * x.device_mesh.size(mesh_dim)
        elif type(placement) is not Replicate:
            return f"{placement} has no values of its own on each rank"
    if not sharded:
        return None if cast.rounding is Rounding.NEAREST else "replicas would be rounded differently"
    if cast.rounding is not Rounding.NEAREST:
        return "it is rounded stochastically, in the order of its values"
    for dim, ranks in sharded.items():
        outer = dim - x.dim()
        if x.shape[dim] % ranks and outer >= -2:
            return f"{x.shape[dim]} values do not divide into {ranks} equal shards"
        size = x.shape[dim] // ranks
        for place in _places(outer, orientation):
            reason = format.why_not_split(place, size, scales_differ=True)
            if reason is not None:
                return reason
    return None


def _places(place: int, orientation: Orientation) -> list[int]:
    """The dimensions of the stored operands that hold dimension ``place`` of the outer tensor."""
    swapped = {-1: -2, -2: -1}.get(place, place)
    return {
        Orientation.ROWWISE: [place], Orientation.COLUMNWISE: [swapped], Orientation.BOTH: [place, swapped],
    }[orientation]  # fmt: skip
