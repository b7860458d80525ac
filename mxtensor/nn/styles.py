"""The styles of ``mx.parallel`` on modules of ``mx.nn``.

    parallelize_module(model, mesh, {"up": mx.parallel.ColwiseParallel(), "down": mx.parallel.RowwiseParallel()})

The parameters become DTensors, as those of torch's modules. A product takes the parts of this rank, and
``tensor_parallel.py`` does the sums and gathers around it, as for a module that was made with ``tp_group``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .tensor_parallel import Parallel

ARGUMENTS = {"column": "parallel_mode='column'", "row": "parallel_mode='row'"}


def refuse(style: Any, module: nn.Module, label: str, why: str, arguments: str = "set_parallel_mode=True") -> None:
    """Raise NotImplementedError for a module that ``style`` cannot split, with the arguments that split it."""
    raise NotImplementedError(
        f"{type(style).__name__} cannot split {label}: {why}; make {type(module).__name__} with {arguments}, "
        "tp_group=mesh.get_group()"
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
            "use mx.nn.Linear, or ColwiseParallel"
        )
    if module.fuse_wgrad_accumulation or module.delay_wgrad_compute:
        refuse(style, module, label, "it accumulates weight gradients itself, and not into shards", way_out)
    if module.return_bias or getattr(module, "return_layernorm_output", False):
        refuse(style, module, label, "it returns more than its result, which has no layout", way_out)
    if any(type(p) is not nn.Parameter for p in module.parameters()):
        refuse(style, module, label, "its weights are quantized, or sharded already", way_out)
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
    module.register_forward_pre_hook(_Given(mesh, mode, layouts[0], dim), with_kwargs=True)
    module.register_forward_hook(_Returned(mesh, mode, layouts[1], dim, style.use_local_output))
    return module


def _with_tokens_first(x: Tensor, dim: int | None) -> Tensor:
    """The dimension of tokens that ranks share as dim 0, for which the modules gather and scatter."""
    if dim is not None and dim >= x.dim() - 1:
        raise ValueError(f"Shard({dim}) of an input {tuple(x.shape)} is not a dimension of tokens; use Shard(-1)")
    return x if dim is None else x.movedim(dim, 0)


class _Given:
    """Before a forward pass: the input, in the layout of the style, as the local tensor that the module takes."""

    def __init__(self, mesh: Any, mode: str, layout: Any, dim: int | None) -> None:
        self.mesh, self.mode, self.layout, self.dim = mesh, mode, layout, dim

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        rest = dict(kwargs)
        x, others = (args[0], args[1:]) if args else (rest.pop("inp"), ())
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, self.mesh, [self.layout], run_check=False)
        if self.mode == "row":
            x = x.redistribute(placements=[Shard(x.dim() - 1)])
        elif self.dim is None:
            x = x.redistribute(placements=[Replicate()])
        elif x.placements != (self.layout,):
            x = x.redistribute(placements=[self.layout])
        return (_with_tokens_first(x.to_local(), self.dim), *others), rest


class _Returned:
    """After a forward pass: the result in the layout of the style."""

    def __init__(self, mesh: Any, mode: str, layout: Any, dim: int | None, local: bool) -> None:
        self.mesh, self.mode, self.layout, self.dim, self.local = mesh, mode, layout, dim, local

    def __call__(self, module: nn.Module, args: Any, y: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        y = y if self.dim is None else y.movedim(0, self.dim)
        here: Any = Replicate() if self.dim is None else Shard(self.dim)
        here = Shard(y.dim() - 1) if self.mode == "column" else here
        out = DTensor.from_local(y, self.mesh, [here], run_check=False)
        wanted = Shard(y.dim() - 1) if self.layout == Shard(-1) else self.layout
        if out.placements != (wanted,):
            out = out.redistribute(placements=[wanted])
        return out.to_local() if self.local else out


def local_part(parameter: Any, grad_placements: Any, stands_for: str) -> Tensor:
    """The part of this rank of a parameter that a style has split; it stands for the parameter."""
    part: Tensor = parameter.to_local(grad_placements=grad_placements)
    if not torch.compiler.is_dynamo_compiling():
        setattr(part, stands_for, parameter)
    return part
