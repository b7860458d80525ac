"""Tensor parallelism: torch's own styles, with all three products of a layer quantized.

    parallelize_module(model, mesh, {"up": mx.parallel.ColwiseParallel(), "down": mx.parallel.RowwiseParallel()})

A parameter becomes a DTensor, as with torch's styles. Its local tensor still carries the recipe, and the layer
multiplies by the local tensor (torch's own styles decompose the product before the recipe applies). With
``input_layouts=Shard(1)``, sequence parallelism, a column-wise layer gathers its input as codes and scales if the
recipe allows it (``split_linear.py``).
"""

from __future__ import annotations

import types
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import parallel as torch_parallel

from ..core.arguments import FLAG, check, instance, optional
from ..core.autograd import autocast_dtype
from ..core.compat import local_of
from ..numerics.formats import Format, Orientation
from ..recipe.linear_recipe import LinearRecipe
from ..tensor.mxtensor import MXTensor
from ..training.prepared_linear import FakeQuantizedLinear
from ..training.training_weight import TrainingWeight
from .split_linear import gathered_linear, reason_for_values, split_linear


def _linear_recipe(weight: Any) -> LinearRecipe | None:
    """The recipe of a training weight; None for any other."""
    local = local_of(weight)
    return local.linear_recipe if isinstance(local, TrainingWeight) else None


def _computes_locally(module: nn.Linear) -> bool:
    """Whether the product of a layer is one of local tensors here; torch multiplies other layers as DTensors."""
    kinds = isinstance(module.weight, MXTensor) or isinstance(module, FakeQuantizedLinear)
    return kinds or _linear_recipe(module.weight) is not None


def _split_operands(module: nn.Linear, dim: int) -> list[tuple[Format, int, bool]]:
    """The operands of a layer that ranks get parts of, when dimension ``dim`` of its weight (N, K) is split.

    Each is (format, the dimension of the operand, whether each rank quantizes its part on its own).
    """
    weight: Any = module.weight
    recipe = _linear_recipe(weight)
    if recipe is not None:
        other = recipe.grad if dim == 0 else recipe.input  # grad (M, N), input (M, K): split along their last dimension
        operands = [(recipe.weight.rowwise, dim - 2), (recipe.weight.columnwise, -1 - dim)]
        operands += [(other.rowwise, -1), (other.columnwise, -2)]
        return [(cast.format, place, True) for cast, place in operands if cast is not None]
    if isinstance(weight, MXTensor):
        return [(weight.format, dim - 2 if Orientation.ROWWISE in weight.copies else -1 - dim, False)]
    if isinstance(module, FakeQuantizedLinear):
        inputs = module.activation_fake_quantizer
        found = [(module.weight_fake_quantizer.cast.format, dim - 2, True)]
        return found if inputs is None or dim == 0 else [*found, (inputs.cast.format, -1, True)]
    return []


def _check_split(module: nn.Linear, mesh: DeviceMesh, dim: int) -> None:
    """Check that the weight can be split along dimension ``dim``, 0 (out_features) or 1 (in_features).

    Raises ValueError if ranks would get parts of different sizes or parts of blocks, NotImplementedError if a scale
    depends on values of two ranks that they do not share (delayed scaling, float8 with one scale per row).
    """
    weight, world = module.weight, mesh.size()
    extent, name = weight.shape[dim], ("out_features", "in_features")[dim]
    if extent % world:
        raise ValueError(
            f"{name}={extent} does not divide into {world} equal parts; use a mesh of fewer ranks, or pad the layer"
        )
    operands, recipe = _split_operands(module, dim), _linear_recipe(weight)
    shared = recipe is not None and recipe.has_tensor_scales
    for format, place, scales_differ in operands:
        if shared and format.has_tensor_scale:
            continue
        reason = format.why_not_split(place, scales_differ=scales_differ)
        if reason is not None:
            raise NotImplementedError(
                f"{reason}, and tensor parallelism gives each rank a part of it; use a recipe with a scale for each "
                "block, such as MXFP8BlockScaling()"
            )
    for format, place, _ in operands:
        reason = format.why_not_split(place, extent // world)
        if reason is not None:
            raise ValueError(
                f"{name}={extent} over {world} ranks are {extent // world} each: {reason}; use a mesh of fewer ranks, "
                "or leave this layer unquantized"
            )


def _product(self: nn.Linear, x: Tensor, bias: Tensor | None, mesh: DeviceMesh, by_rows: bool) -> Tensor:
    """The product of this rank; scales of whole tensors are shared with the other ranks."""
    local, linear_recipe = cast(DTensor, self.weight).to_local(), _linear_recipe(self.weight)
    if isinstance(self, FakeQuantizedLinear):
        return self.product(x, local, bias)
    if linear_recipe is not None and linear_recipe.has_tensor_scales:
        dtype = autocast_dtype(x) or x.dtype
        return split_linear(x, local, bias, linear_recipe, mesh.get_group(), by_rows, dtype)
    return F.linear(x, local, bias)


# ---------------------------------------------------------------------------------------------- column-wise


def _columns(self: nn.Linear, x: DTensor) -> DTensor:
    """The columns of the result that come from this rank's rows of the weight."""
    weight, bias = cast(DTensor, self.weight), None if self.bias is None else cast(DTensor, self.bias).to_local()
    mesh, (placement,) = x.device_mesh, x.placements
    last, linear_recipe = x.dim() - 1, _linear_recipe(weight)
    if isinstance(placement, Shard) and placement.dim < last and linear_recipe is not None:
        y = _columns_of_sharded_rows(x, placement.dim, weight, bias, linear_recipe)
        if y is not None:
            return DTensor.from_local(y, mesh, [Shard(last)], run_check=False)
    x = x.redistribute(placements=[Replicate()])
    y = _product(self, x.to_local(grad_placements=[Partial()]), bias, mesh, by_rows=False)
    return DTensor.from_local(y, mesh, [Shard(last)], run_check=False)


def _columns_of_sharded_rows(
    x: DTensor, dim: int, weight: DTensor, bias: Tensor | None, linear_recipe: LinearRecipe
) -> Tensor | None:
    """The same for input rows that are sharded over the ranks, gathered as codes; None if that is refused."""
    mesh, part = x.device_mesh, x.to_local(grad_placements=x.placements)
    world, rows = mesh.size(), part.numel() // part.shape[-1]
    why = None
    if x.shape[dim] % world:
        why = f"{x.shape[dim]} positions do not divide into {world} equal parts"
    given, mine = autocast_dtype(part) or part.dtype, part.reshape(rows, part.shape[-1])
    if reason_for_values(mine, linear_recipe, given, why) is not None:
        return None
    y = gathered_linear(mine, weight.to_local(), bias, linear_recipe, mesh.get_group(), given)
    before, within = part.shape[:dim], part.shape[dim:-1]
    y = y.view(world, *before, *within, y.shape[-1]).movedim(0, dim)
    return y.reshape(*before, world * within[0], *within[1:], y.shape[-1])


PLACEMENT = optional(instance(Placement, "a placement of torch.distributed.tensor, such as Replicate() or Shard(1)"))


def _of_other_modules(style: Any, module: nn.Module, mode: str, mesh: DeviceMesh) -> nn.Module | None:
    """``module`` split by its own method, as those of ``mxtensor.te`` have it; None for torch's modules."""
    split = getattr(module, "split_by_style", None)
    return None if split is None else split(style, mode, mesh)


class _Style:
    """What both styles add to torch's, besides the product: their arguments are checked."""

    def __init__(
        self, *, input_layouts: Placement | None = None, output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:  # fmt: skip
        given = {"input_layouts": input_layouts, "output_layouts": output_layouts, "use_local_output": use_local_output}
        for argument, value in given.items():
            check(type(self).__name__, argument, value, FLAG if argument == "use_local_output" else PLACEMENT)
        super().__init__(**given)


class ColwiseParallel(_Style, torch_parallel.ColwiseParallel):
    """Each rank computes ``out_features / world`` columns of a linear layer; arguments are those of torch's style.

    ``input_layouts``: Replicate() (default), or Shard(dim) of a dimension of tokens, which is gathered: as codes and
    scales if ``explain()`` names the gather "quantized". Takes training weights (``quantize_`` with a recipe), frozen
    MXTensors, layers that ``quantize_`` has prepared, and plain weights; embeddings are torch's. ``parallelize_module``
    raises ValueError for a layer whose parts are not whole blocks, and NotImplementedError for delayed scaling and
    float8 with one scale per row. Also takes ``te.Linear`` and ``te.LayerNormLinear``, whose recipe ``autocast``
    gives.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            return _of_other_modules(self, module, "column", device_mesh) or super()._apply(module, device_mesh)
        _check_split(module, device_mesh, 0)
        quantized = _computes_locally(module)
        if quantized and isinstance(self.input_layouts[0], Shard):
            self.desired_input_layouts = cast(Any, self.input_layouts)  # gathered by ``_columns``
        module = super()._apply(module, device_mesh)
        if quantized:
            module.forward = types.MethodType(_columns, module)
        return module


# ---------------------------------------------------------------------------------------------- row-wise


def _rows(self: nn.Linear, x: DTensor) -> DTensor:
    """The sum over the ranks of the products with each rank's columns of the weight; then the bias."""
    last = x.dim() - 1
    part = x.to_local(grad_placements=[Shard(last)])
    y = _product(self, part, None, x.device_mesh, by_rows=True)
    summed = DTensor.from_local(y, x.device_mesh, [Partial()], run_check=False)
    wanted: tuple[Placement, ...] = self._mx_output_layouts  # type: ignore[assignment]
    summed = summed.redistribute(placements=wanted)
    return summed if self.bias is None else cast(DTensor, summed + self.bias.to(summed.dtype))


class RowwiseParallel(_Style, torch_parallel.RowwiseParallel):
    """Each rank contracts ``in_features / world`` values of a linear layer; arguments are those of torch's style.

    The partial results are summed in their dtype, as in torch's style, and the bias is added once after that.
    ``parallelize_module`` raises ValueError for a layer whose parts are not whole blocks, and NotImplementedError for
    delayed scaling and float8 with one scale per row. Also takes ``te.Linear``, whose recipe ``autocast`` gives.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            return _of_other_modules(self, module, "row", device_mesh) or super()._apply(module, device_mesh)
        _check_split(module, device_mesh, 1)
        quantized = _computes_locally(module)
        module = super()._apply(module, device_mesh)
        if quantized:
            module._mx_output_layouts = self.output_layouts  # type: ignore[assignment]
            module.forward = types.MethodType(_rows, module)
        return module
