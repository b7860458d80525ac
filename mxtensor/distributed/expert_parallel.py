"""ExpertParallel: each rank has some of the experts of a mixture, and gets their tokens as codes and scales.

    parallelize_module(model, mesh, {"model.layers.*.mlp.experts": mx.parallel.ExpertParallel()})

The module of the experts has its weights in stacks (experts, ., .). A parameter becomes a DTensor that is sharded along
its first dimension, and its local tensor still carries the recipe. The module's own ``forward`` runs on each rank, with
the local stacks and the rows that ``dispatch_tokens`` has received.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from ..core.arguments import FLAG, check
from ..core.compat import local_of
from ..kernels.permute.choose_permutation import choices_of_rows
from ..kernels.permute.definition import rows_of_index
from ..recipe.linear_recipe import LinearRecipe
from ..tensor.mxtensor import MXTensor
from ..training.delayed_scaling import OWNER, owner_of
from ..training.grouped import GATHERED, merged, permuted
from ..training.training_weight import TrainingWeight
from .all_to_all import combine_tokens, dispatch_tokens

Forward = Callable[..., Any]


def _recipe_of(module: nn.Module) -> LinearRecipe | None:
    """The recipe of the stacks; None for plain ones, which ``autocast`` may quantize."""
    for parameter in module.parameters(recurse=False):
        local = local_of(parameter)
        if isinstance(local, TrainingWeight):
            return local.linear_recipe
        if isinstance(local, MXTensor):
            return local.recipe
    return None


def _number_of_experts(module: nn.Module) -> int:
    """The first dimension of all parameters. Raises NotImplementedError for a module that is not a stack of experts."""
    parameters = dict(module.named_parameters())
    own = dict(module.named_parameters(recurse=False))
    stacks = [p.shape[0] for p in own.values() if p.dim() == 3]
    others = [
        f"{name} {tuple(p.shape)}"
        for name, p in parameters.items()
        if not stacks or name not in own or p.dim() == 0 or p.shape[0] != stacks[0]
    ]
    if not stacks or others:
        found = ", ".join(others) or "no parameter"
        raise NotImplementedError(
            f"ExpertParallel splits modules whose parameters are stacks (experts, ., .); {type(module).__name__} has "
            f"{found}; use dispatch_tokens and combine_tokens"
        )
    return stacks[0]


@contextmanager
def _local_parameters(module: nn.Module) -> Iterator[None]:
    """Inside, the parameters of the module are the local tensors of the DTensors that they are: a new view in each
    pass, with the owner of its amax histories. One of three dimensions is marked, so that ``autocast`` knows it, and
    views of it, as a stack of weights."""
    sharded = dict(module._parameters)
    local: dict[str, Any] = dict(sharded)
    for name, parameter in sharded.items():
        if isinstance(parameter, DTensor):
            local[name] = part = parameter.to_local()
            owner = owner_of(local_of(parameter))
            for t in (part, part._base):
                if t is not None and t is not owner:
                    setattr(t, OWNER, owner)
                if t is not None and part.dim() > 2:
                    setattr(t, GATHERED, True)
    module._parameters.update(local)
    try:
        yield
    finally:
        module._parameters.update(sharded)


class _Experts:
    """The forward pass of a module of experts of which each rank has some."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, experts: int, quantize_combined: bool) -> None:
        self.module, self.mesh, self.experts = module, mesh, experts
        self.quantize_combined = quantize_combined
        self.forward: Forward = module.forward
        self.inputs = len([p for p in inspect.signature(self.forward).parameters.values() if p.kind in POSITIONAL])

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """In eager code: a graph that the exchanges cut would return the local stacks, and AOTAutograd takes their
        gradients for weights; and it would lose the mark by which ``autocast`` knows them."""
        x, *rest = inspect.signature(self.forward).bind(*args, **kwargs).args
        rows, of_tokens = x, len(rest) == 2
        if of_tokens:  # as in transformers: x (T, K), the experts of each token (T, top_k) and their weights (T, top_k)
            index, weights = rest
            expert, row_id_map = index.reshape(-1), rows_of_index(index)
            counts = expert.new_zeros(self.experts, dtype=torch.int64)
            counts.scatter_add_(0, expert.to(torch.int64), torch.ones_like(expert, dtype=torch.int64))
            rows, _ = permuted(x, None, row_id_map, choices_of_rows(row_id_map, len(expert)))
        elif rest:  # as in torchtitan: rows sorted by expert, and their number for each; JetMoe has a list of numbers
            (counts,) = rest
        elif x.shape[0] % self.experts == 0:  # as in transformers' Llama 4: rows sorted by expert, as many for each
            counts = [x.shape[0] // self.experts] * self.experts
        else:
            raise ValueError(
                f"ExpertParallel: {type(self.module).__name__} takes the same number of rows for each of its "
                f"{self.experts} experts, and {x.shape[0]} rows do not divide so; pass all tokens once for each expert"
            )
        recipe = _recipe_of(self.module)
        dispatched = dispatch_tokens(rows, counts, self.mesh, recipe, quantize_combined=self.quantize_combined)
        received, here = dispatched.tokens, dispatched.counts
        if of_tokens:
            local = torch.arange(len(here), device=x.device)
            local = local.repeat_interleave(here, output_size=len(received)).unsqueeze(1)
            rest = [local.to(index.dtype), weights.new_ones(len(received), 1)]
        elif rest:
            rest = [here if isinstance(counts, Tensor) else here.tolist()]
        with _local_parameters(self.module):
            y = self.forward(received, *rest)
        combined: Tensor = combine_tokens(y, dispatched)
        return merged(combined, weights, row_id_map).to(x.dtype) if of_tokens else combined


POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class ExpertParallel(ParallelStyle):
    """Each rank of a mesh has ``experts / ranks`` of the experts of a module; ranks send each other tokens.

    For modules whose parameters are stacks (experts, ., .) or (experts, .), and whose forward pass takes either
    (tokens, indices of experts, weights), as the experts of transformers' models do, or (rows sorted by expert, number
    of rows for each expert), as torchtitan's do, or rows alone, as many for each expert, as those of Llama 4 in
    transformers do. Each rank calls it with its own tokens. The gradient of a stack is the
    sum over the tokens of all ranks of the mesh.

    Tokens are sent as codes and scales of the recipe that the stacks carry, or of ``autocast``; the gradients of the
    results too. ``quantize_combined=True`` also casts what the experts return, and the gradient of the tokens.

    ``parallelize_module`` raises ValueError if the experts do not divide into equal parts, NotImplementedError for
    other modules.
    """

    def __init__(self, *, quantize_combined: bool = False) -> None:
        super().__init__()
        check("ExpertParallel", "quantize_combined", quantize_combined, FLAG)
        self.quantize_combined = bool(quantize_combined)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        experts, world = _number_of_experts(module), device_mesh.size()
        if experts % world:
            raise ValueError(
                f"ExpertParallel: {experts} experts do not divide into {world} equal parts; use a mesh of fewer ranks"
            )
        run = _Experts(module, device_mesh, experts, self.quantize_combined)
        if run.inputs not in (1, 2, 3):
            raise NotImplementedError(
                f"ExpertParallel: the forward pass of {type(module).__name__} takes {run.inputs} arguments; it must "
                "take (tokens, indices of experts, weights), (rows, number of rows for each expert) or (rows, as many "
                "for each expert); use dispatch_tokens and combine_tokens"
            )
        for name, parameter in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(parameter, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        if getattr(module, "num_experts", None) == experts:
            module.num_experts = experts // world  # type: ignore[assignment]  # what the module's own forward pass counts
        module.forward = run
        return module
