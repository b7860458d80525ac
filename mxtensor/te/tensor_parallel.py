"""Tensor parallelism of TransformerEngine's modules: how the ranks of ``tp_group`` split a weight.

As in TransformerEngine, a module has the part of its rank as plain parameters, each rank quantizes its part on its own,
and what the ranks add up is summed in the dtype of the layer.

- ``column``: the weight is (out / ranks, in), the bias (out / ranks,). The input is the whole; with sequence
  parallelism it is a part along dim 0, which is gathered. The result are the columns of this rank.
- ``row``: the weight is (out, in / ranks), the bias (out,). The input are the columns of this rank. The result is
  summed over the ranks; with sequence parallelism each rank gets a part of it along dim 0.

The styles of ``mx.parallel`` split these modules too:

    parallelize_module(model, mesh, {"up": mx.parallel.ColwiseParallel(), "down": mx.parallel.RowwiseParallel()})

The parameters become DTensors, as those of torch's modules. A product takes the parts of this rank, with the sums and
gathers of a module that was made with ``tp_group``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..core.arguments import COUNT, FLAG, check, described
from .arguments import one_of

MODES = ("column", "row")
Init = Callable[[Tensor], Any]
"""Fills a tensor in place."""


def meshes_of(group: Any) -> dict[str, Any]:
    """Type of device -> a group as a DeviceMesh: made with the group, since a compiled graph cannot make one."""
    here = torch.accelerator.current_accelerator(check_available=True)
    kinds = {"cpu"} if here is None else {"cpu", here.type}
    return {kind: DeviceMesh.from_group(group, kind) for kind in kinds}


def moved(t: Tensor, mesh: Any, before: Any, after: Any, of_gradient: Any) -> Tensor:
    """The local tensor after a redistribution of a DTensor. The gradient, as ``of_gradient`` places it, is
    redistributed back."""
    from torch.distributed.tensor import DTensor

    whole = DTensor.from_local(t if before == after else t.contiguous(), mesh, [before], run_check=False)
    if before != after:
        whole = whole.redistribute(placements=[after])
    return whole.to_local(grad_placements=[of_gradient])


class Parallel:
    """How the ranks of a group split one weight; without a mode, or on one rank, not at all.

    ``get_rng_state_tracker``: TransformerEngine's argument, whose ``fork`` (of ``rng_tracker_name``) makes a context in
    which a rank draws random numbers of its own.
    """

    def __init__(
        self, owner: str, group: Any, size: int, mode: str | None, sequence: bool,
        get_rng_state_tracker: Callable[..., Any] | None = None, rng_tracker_name: str | None = None,
    ) -> None:  # fmt: skip
        check(owner, "tp_size", size, COUNT)
        check(owner, "sequence_parallel", sequence, FLAG)
        if mode is not None:
            one_of(f"{owner}: parallel_mode", mode, MODES)
        self.owner, self.size = owner, size
        self.get_tracker = get_rng_state_tracker
        self.tracker_name = () if rng_tracker_name is None else (rng_tracker_name,)
        self.group: Any = None
        self.meshes: dict[str, Any] = {}
        """Type of device -> the group as a DeviceMesh."""
        if group is not None:
            self.size = 0
            self.set_group(group)
        self.mode = mode if self.size > 1 else None
        self.sequence = bool(sequence) and self.mode is not None

    def set_group(self, group: Any) -> None:
        """The process group; raises TypeError for another object, ValueError for a group of another size."""
        if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"{self.owner}: tp_group is {described(group)}; pass a process group of torch.distributed")
        size = dist.get_world_size(group)
        if self.size not in (0, size):
            raise ValueError(
                f"{self.owner}: the tensor-parallel group has {size} ranks, and the parameters were made for "
                f"tp_size={self.size}; use a group of that size"
            )
        self.group, self.size, self.meshes = group, size, meshes_of(group)

    def __deepcopy__(self, memo: object) -> Parallel:
        return self  # a copy of a module is of the same group

    @property
    def rank(self) -> int:
        """The rank in the group. Before the group is known: as if its ranks were consecutive."""
        if self.group is not None:
            return dist.get_rank(self.group)
        known = self.size > 1 and dist.is_available() and dist.is_initialized()
        return dist.get_rank() % self.size if known else 0

    def part(self, what: str, extent: int, mode: str) -> int:
        """The part of ``extent`` that a rank has if ``mode`` splits it. Raises ValueError if parts are not equal."""
        if self.mode != mode:
            return extent
        if extent % self.size:
            raise ValueError(
                f"{self.owner}: {what}={extent} does not divide into {self.size} equal parts; use fewer ranks"
            )
        return extent // self.size

    # ---------------------------------------------------------------------------------------- values

    def mesh_of(self, device: torch.device) -> Any:
        """The group as a DeviceMesh. Raises RuntimeError if there is no group yet."""
        if self.group is None:
            raise RuntimeError(
                f"{self.owner}: tp_size is {self.size} and there is no tp_group; call set_tensor_parallel_group first"
            )
        return self.meshes[device.type]

    def into(self, x: Tensor) -> Tensor:
        """The input of a product: for ``column`` the whole input, whose gradient is summed over the ranks."""
        if self.mode != "column":
            return x
        from torch.distributed.tensor import Partial, Replicate, Shard

        return moved(x, self.mesh_of(x.device), Shard(0) if self.sequence else Replicate(), Replicate(), Partial())

    def out_of(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """The result of a product without its bias: for ``row`` the sum over the ranks, then the bias."""
        if self.mode != "row":
            return y
        from torch.distributed.tensor import Partial, Replicate, Shard

        after = Shard(0) if self.sequence else Replicate()
        y = moved(y, self.mesh_of(y.device), Partial(), after, after)
        return y if bias is None else y + bias.to(y.dtype)

    def for_heads(self, parameter: Any) -> Any:
        """A parameter that each rank has whole and applies to its heads only; the gradient is summed over the ranks."""
        if self.mode != "column" or parameter is None:
            return parameter
        from torch.distributed.tensor import Partial, Replicate

        return moved(parameter, self.mesh_of(parameter.device), Replicate(), Replicate(), Partial())

    # ---------------------------------------------------------------------------------------- parameters

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the part of a weight (N, K) or of a bias (N,)."""
        dim = {"column": 0, "row": 1}.get(self.mode or "")
        return tuple(n // self.size if i == dim else n for i, n in enumerate(whole))

    def draws(self) -> AbstractContextManager[Any]:
        """The context in which this rank draws random numbers of its own, if there is a tracker."""
        return nullcontext() if self.get_tracker is None else self.get_tracker().fork(*self.tracker_name)

    def initialize(self, init: Init, pieces: Sequence[int], is_weight: bool) -> Init:
        """``init`` for the part of a weight or of a bias.

        The whole parameter is initialized and cut, so that ranks with one seed have the parts of one layer. ``pieces``:
        the rows that ``column`` splits one by one, such as those of gate and up. With a tracker, which gives each rank
        other random numbers, the part of a weight itself is initialized, as in TransformerEngine.
        """
        own = is_weight and self.get_tracker is not None
        if self.mode is None and not own:
            return init

        def fill(values: Tensor) -> None:
            if own or (self.mode == "row" and values.dim() == 1):
                with self.draws() if own else nullcontext():
                    init(values)
                return
            dim = 0 if self.mode == "column" else 1
            whole = values.new_empty([n * self.size if i == dim else n for i, n in enumerate(values.shape)])
            init(whole)
            each = whole.split(list(pieces)) if dim == 0 else (whole,)
            values.copy_(torch.cat([piece.chunk(self.size, dim)[self.rank] for piece in each], dim))

        return fill

    def mark(self, weight: Any, bias: Any) -> None:
        """Set the attributes by which Megatron knows the parts of a weight, and of its bias."""
        if self.mode is None:
            return
        split = [(weight, 0 if self.mode == "column" else 1), (bias if self.mode == "column" else None, 0)]
        for parameter, dim in split:
            if parameter is not None:
                parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1
        if self.mode == "row" and bias is not None:
            self.mark_whole(bias)

    def mark_whole(self, *parameters: Any) -> None:
        """The same for parameters that each rank has whole: whether their gradient is that of a part of the sequence,
        and has to be summed over the ranks."""
        for parameter in parameters:
            if parameter is not None and self.mode is not None:
                parameter.sequence_parallel = self.sequence


WHOLE = Parallel("", None, 1, None, False)
"""A weight that is not split."""


class SplitModule(nn.Module):
    """A module whose weights the ranks of ``tp_group`` may split."""

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """The process group of modules that were made with ``tp_size`` and without ``tp_group``.

        Raises TypeError for another object, ValueError for a group of another size.
        """
        for inner in self.modules():
            for value in vars(inner).values():
                if isinstance(value, Parallel) and value.mode is not None:
                    value.set_group(tp_group)

    def split_by_style(self, style: Any, mode: str, mesh: Any) -> Any:
        """Called by the styles of ``mx.parallel``: raises NotImplementedError for a module of several products."""
        arguments = ARGUMENTS[mode] if hasattr(self, "parallel") else "set_parallel_mode=True"
        refuse(style, self, "it has several weights, and a style is for one", arguments)


# ---------------------------------------------------------------------------------------------- styles of mx.parallel


ARGUMENTS = {"column": "parallel_mode='column'", "row": "parallel_mode='row'"}


def refuse(style: Any, module: nn.Module, why: str, arguments: str) -> None:
    """Raise NotImplementedError for a module that ``style`` cannot split, with the arguments that split it."""
    raise NotImplementedError(
        f"{type(style).__name__} cannot split {getattr(module, 'label', type(module).__name__)}: {why}; make "
        f"{type(module).__name__} with {arguments}, tp_group=mesh.get_group()"
    )


def check_splittable(module: Any, style: Any, mode: str, layouts: tuple[Any, Any]) -> None:
    """Raise ValueError or NotImplementedError, with nothing changed, if ``style`` cannot split ``module``."""
    from torch.distributed.tensor import Shard

    name, label, way_out = type(style).__name__, module.label, ARGUMENTS[mode]
    if module.parallel.mode is not None or module._grad_placements:
        raise ValueError(f"{name}: {label} is split already; give each module a tp_group or a style, and not both")
    if module.part_of is not None:
        raise NotImplementedError(
            f"{name}: {label} is a part of {module.part_of}, which splits by heads; make that with "
            "set_parallel_mode=True, tp_group=mesh.get_group()"
        )
    if mode == "row" and hasattr(module, "layer_norm_weight"):
        raise NotImplementedError(
            f"{name}: {label} begins with a norm of whole rows, and RowwiseParallel gives each rank a part of a row; "
            "use te.Linear, or ColwiseParallel"
        )
    if module.fuse_wgrad_accumulation or module.delay_wgrad_compute:
        refuse(style, module, "it accumulates weight gradients itself, and not into shards", way_out)
    if module.return_bias or getattr(module, "return_layernorm_output", False):
        refuse(style, module, "it returns more than its result, which has no layout", way_out)
    if any(type(p) is not nn.Parameter for p in module.parameters()):
        refuse(style, module, "its weights are quantized, or sharded already", way_out)
    if mode == "column" and len(module.weight_names) > 1 and layouts[1] != Shard(-1):
        raise ValueError(
            f"{name}: {label} has parameters_split, whose parts come in another order on ranks: output_layouts is "
            f"{layouts[1]}; use Shard(-1)"
        )


def split_by_style(module: Any, style: Any, mode: str, mesh: Any) -> Any:
    """Split a module with one product over the ranks of ``mesh`` (one dimension), in place; returns it.

    ``style``: a style of ``mx.parallel``, whose layouts and ``use_local_output`` apply to input and result. ``mode``:
    "column" or "row". Raises ValueError if the parts are not equal, NotImplementedError for modules and options that
    need ``tp_group``.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    layouts = style.input_layouts[0], style.output_layouts[0]
    check_splittable(module, style, mode, layouts)
    tokens = layouts[0] if mode == "column" else layouts[1]
    sequence = isinstance(tokens, Shard) and tokens.dim >= 0
    parallel = Parallel(f"{type(style).__name__} of {module.label}", mesh.get_group(), mesh.size(), mode, sequence)
    parallel.part("in_features", module.in_features, "row")
    for name in module.weight_names:
        parallel.part("out_features", getattr(module, name).shape[0], "column")
    placements: dict[str, Any] = dict.fromkeys(module.weight_names, Shard(0 if mode == "column" else 1))
    placements |= dict.fromkeys(module.bias_names, Shard(0) if mode == "column" else Replicate())
    for name, parameter in list(module.named_parameters(recurse=False)):
        placement = placements.get(name, Replicate())
        part = distribute_tensor(parameter, mesh, [placement], src_data_rank=style.src_data_rank)
        module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        # A parameter that each rank has whole has, with sequence parallelism, the gradient of a part of the tokens.
        whole = isinstance(placement, Replicate) and parallel.sequence
        module._grad_placements[name] = [Partial() if whole else placement]
    module.parallel = parallel
    dim = tokens.dim if sequence else None
    module.register_forward_pre_hook(partial(_given, mesh, mode, layouts[0], dim), with_kwargs=True)
    module.register_forward_hook(partial(_returned, mesh, mode, layouts[1], dim, style.use_local_output))
    return module


def _given(
    mesh: Any, mode: str, layout: Any, dim: int | None, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Before a forward pass: the input, in the layout of the style, as the local tensor that the module takes. The
    dimension of tokens that ranks share, ``dim``, becomes dim 0, along which the modules gather and scatter."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    rest = dict(kwargs)
    x, others = (args[0], args[1:]) if args else (rest.pop("inp"), ())
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [layout], run_check=False)
    wanted = Shard(x.dim() - 1) if mode == "row" else Replicate() if dim is None else layout
    x = (x if x.placements == (wanted,) else x.redistribute(placements=[wanted])).to_local()
    if dim is None:
        return (x, *others), rest
    if dim >= x.dim() - 1:
        raise ValueError(f"Shard({dim}) of an input {tuple(x.shape)} is not a dimension of tokens; use Shard(-1)")
    return (x.movedim(dim, 0), *others), rest


def _returned(
    mesh: Any, mode: str, layout: Any, dim: int | None, to_local: bool, module: nn.Module, args: Any, y: Tensor
) -> Tensor:
    """After a forward pass: the result in the layout of the style."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    y = y if dim is None else y.movedim(0, dim)
    here: Any = Replicate() if dim is None else Shard(dim)
    here = Shard(y.dim() - 1) if mode == "column" else here
    out = DTensor.from_local(y, mesh, [here], run_check=False)
    wanted = Shard(y.dim() - 1) if layout == Shard(-1) else layout
    if out.placements != (wanted,):
        out = out.redistribute(placements=[wanted])
    return out.to_local() if to_local else out
