"""Tensor parallelism: torch's own styles, with all three products of a layer quantized.

    parallelize_module(model, mesh, {"up": mx.parallel.ColwiseParallel(), "down": mx.parallel.RowwiseParallel()})

A parameter becomes a DTensor, as with torch's styles; what it holds on a rank carries the recipe still, and the layer
multiplies there (torch's own would take the product apart above the recipe). With ``input_layouts=Shard(1)``, sequence
parallelism, a column-wise layer gathers its input as codes and scales where the recipe allows it
(``gathered_linear.py``).
"""

from __future__ import annotations

import types
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import parallel as torch_parallel

from ..core.explain import record
from ..core.kernel import Spec
from ..core.torch_autocast import autocast_dtype
from ..numerics.formats import FULL
from ..recipe.linear_recipe import LinearRecipe
from ..tensor.mxtensor import MXTensor
from ..training.training_weight import TrainingWeight, local_of
from .all_gather_linear import gathered_linear, refuses


def _linear_recipe(weight: Any) -> LinearRecipe | None:
    """The recipe of a weight that is trained; None for any other."""
    local = local_of(weight)
    return local.linear_recipe if isinstance(local, TrainingWeight) else None


def _local(t: DTensor | None) -> Tensor | None:
    return None if t is None else t.to_local()


def _check_split(module: nn.Linear, mesh: DeviceMesh, dim: int) -> None:
    """Raise where ranks would get parts of blocks, or parts of different sizes (ValueError), and where a scale is made
    of a whole tensor, of which a rank has a part (NotImplementedError)."""
    weight, world = module.weight, mesh.size()
    extent, name = weight.shape[dim], ("out_features", "in_features")[dim]
    if extent % world:
        raise ValueError(
            f"{name}={extent} does not divide into {world} equal parts; use a mesh of fewer ranks, or pad the layer"
        )
    linear_recipe = _linear_recipe(weight)
    if linear_recipe is not None:
        formats = [
            c.format
            for r in (linear_recipe.input, linear_recipe.weight, linear_recipe.grad)
            for c in (r.rowwise, r.columnwise)
            if c
        ]
        whole = next((f for f in formats if f.global_scale or FULL in f.block), None)
        if whole is not None:
            raise NotImplementedError(
                f"a scale of {whole} is of a whole tensor, and tensor parallelism gives each rank a part; use a recipe "
                "with a scale for each block, such as MXFP8BlockScaling()"
            )
        blocks = [(f.block[1], f) for f in formats]
    else:
        blocks = [(weight.format.block[dim], weight.format)] if isinstance(weight, MXTensor) else []
    for block, format in blocks:
        if block != FULL and extent // world % block:
            raise ValueError(
                f"{name}={extent} over {world} ranks are {extent // world} each, which is no multiple of the {block} "
                f"that share a scale in {format}; use a mesh of fewer ranks, or leave this layer unquantized"
            )


# ---------------------------------------------------------------------------------------------- column-wise


def _columns(self: nn.Linear, x: DTensor) -> DTensor:
    """The columns of a result that this rank's rows of the weight make."""
    weight, bias = cast(DTensor, self.weight), cast("DTensor | None", self.bias)
    mesh, (placement,) = x.device_mesh, x.placements
    last, linear_recipe = x.dim() - 1, _linear_recipe(weight)
    if isinstance(placement, Shard) and placement.dim < last and linear_recipe is not None:
        y = _columns_of_sharded_rows(x, placement.dim, weight, bias, linear_recipe)
        if y is not None:
            return DTensor.from_local(y, mesh, [Shard(last)], run_check=False)
    x = x.redistribute(placements=[Replicate()])
    y = F.linear(x.to_local(grad_placements=[Partial()]), cast(Tensor, _local(weight)), _local(bias))
    return DTensor.from_local(y, mesh, [Shard(last)], run_check=False)


def _columns_of_sharded_rows(
    x: DTensor, dim: int, weight: DTensor, bias: Any, linear_recipe: LinearRecipe
) -> Tensor | None:
    """The same of rows that are spread over the ranks, gathered as codes; None where they cannot be."""
    mesh, part = x.device_mesh, x.to_local(grad_placements=x.placements)
    world, rows = mesh.size(), part.numel() // part.shape[-1]
    why = refuses(linear_recipe, rows, part.shape[-1])
    if why is None and x.shape[dim] % world:
        why = f"{x.shape[dim]} positions do not divide into {world} equal parts"
    given = autocast_dtype(part) or part.dtype
    spec = Spec("gather", ((rows, part.shape[-1]),), (part.dtype,), given, part.device)
    record(spec, "high precision" if why else "quantized", {"quantized": why} if why else {})
    if why is not None:
        return None
    local_weight = cast(Tensor, _local(weight))
    y = gathered_linear(
        part.reshape(rows, part.shape[-1]), local_weight, _local(bias), linear_recipe, mesh.get_group(), given
    )
    before, within = part.shape[:dim], part.shape[dim:-1]
    y = y.view(world, *before, *within, y.shape[-1]).movedim(0, dim)
    return y.reshape(*before, world * within[0], *within[1:], y.shape[-1])


class ColwiseParallel(torch_parallel.ColwiseParallel):
    """A linear layer of which each rank has ``out_features / world`` columns; arguments as torch's style has them.

    ``input_layouts``: Replicate() (default), or Shard(dim) of a dimension of tokens, which is gathered: as codes and
    scales where ``explain()`` names the gather "quantized". Weights of training (``quantize_`` with a recipe), frozen
    MXTensors and plain weights; embeddings as torch's. Raises ValueError at ``parallelize_module`` for a layer whose
    parts are no whole blocks.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            return super()._apply(module, device_mesh)
        _check_split(module, device_mesh, 0)
        quantized = _linear_recipe(module.weight) is not None or isinstance(module.weight, MXTensor)
        if quantized and isinstance(self.input_layouts[0], Shard):
            self.desired_input_layouts = cast(Any, self.input_layouts)  # gathered by ``_columns``
        module = super()._apply(module, device_mesh)
        if quantized:
            module.forward = types.MethodType(_columns, module)
        return module


# ---------------------------------------------------------------------------------------------- row-wise


def _rows(self: nn.Linear, x: DTensor) -> DTensor:
    """The part of a result that this rank's columns of the weight make, summed over the ranks; then the bias."""
    last = x.dim() - 1
    part = x.to_local(grad_placements=[Shard(last)])
    y = F.linear(part, cast(Tensor, _local(cast(DTensor, self.weight))))
    summed = DTensor.from_local(y, x.device_mesh, [Partial()], run_check=False)
    wanted: tuple[Placement, ...] = self._mx_output_layouts  # type: ignore[assignment]
    summed = summed.redistribute(placements=wanted)
    return summed if self.bias is None else cast(DTensor, summed + self.bias.to(summed.dtype))


class RowwiseParallel(torch_parallel.RowwiseParallel):
    """A linear layer of which each rank has ``in_features / world`` rows; arguments as torch's style has them.

    The parts of the result are summed in its dtype, as torch's style does, and the bias is added once, after. Raises
    ValueError at ``parallelize_module`` for a layer whose parts are no whole blocks.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            return super()._apply(module, device_mesh)
        _check_split(module, device_mesh, 1)
        quantized = _linear_recipe(module.weight) is not None or isinstance(module.weight, MXTensor)
        module = super()._apply(module, device_mesh)
        if quantized:
            module._mx_output_layouts = self.output_layouts  # type: ignore[assignment]
            module.forward = types.MethodType(_rows, module)
        return module
