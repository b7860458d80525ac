"""Training on two ranks in combinations: each step beside one process with the batches of both ranks.

All steps run first. Then each rank repeats them alone, from the parameters that it has recorded: gradients and losses
are those of the ranks, bitwise if each weight is multiplied whole (DDP, FSDP2), and except for the order of sums if it
is split (TP). The optimizer does with its shards what it does with whole plain parameters, bitwise.

``test_ranks.py`` has the tests. The cases cover every pair of values of ``AXES``, and every triple of ``BOLD``.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import mxtensor as mx
import mxtensor.te as te
from tests.combinations.covering import Case, Rule, Space, id_of
from tests.combinations.training_steps import put
from tests.distributed.fsdp_cases import plain, same_as, values, whole
from tests.helpers.ranks import DEVICE, WORLD, case, long_case

RECIPES = {
    "MXFP8": mx.recipe.MXFP8BlockScaling(),
    "MXFP8-one-copy": mx.recipe.MXFP8BlockScaling(single_weight_copy=True),
    "MXFP8-tiles": mx.recipe.MXFP8BlockScaling(two_dimensional_weights=True),
    "NVFP4": mx.recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
    "Float8Current": mx.recipe.Float8CurrentScaling(),
    "Custom": mx.recipe.CustomRecipe("mxfp8_e4m3", "mxfp6_e2m3", grad="mxfp8_e5m2"),
}
"""Recipes without random numbers, and without histories, which ranks have of their own batches."""
AXES = {
    "parallel": ["DDP", "FSDP2", "TP"],
    "recipe": list(RECIPES),
    "width": ["64", "65"],
    "reload": ["no", "load_state_dict", "set_state_dict"],
    "way": ["eager", "blocks"],
    "dtype": ["float32", "bfloat16"],
    "autocast": ["no", "bfloat16"],
    "optimizer": ["SGD", "AdamW", "fused", "FusedAdam"],
    "accumulation": ["1", "2", "mx.accumulate"],
    "clipping": ["no", "yes"],
    "checkpointing": ["no", "yes"],
}
BOLD = "parallel", "width", "reload"
RULES = [
    Rule("time: graphs see a recipe as one op", lambda way, recipe: way == "blocks" and recipe not in (
        "MXFP8", "MXFP8-one-copy")),
]  # fmt: skip
STEPS, RELOADED = 4, 2
"""Steps of each case, and the one before which a state dict is loaded."""
HIDDEN, ROWS, MAX_NORM = 128, 24, 0.5
SPLIT, SPLIT_LOW = 0.02, {"NVFP4": 0.25}
"""How far results of split layers may be from one process, by norm: sums in another order change codes now and then. In
bfloat16 the sums of both ranks are rounded before they are added up: 0.1, and in a format of four bits 0.25."""


class Block(nn.Module):
    """Two products with a residual. Two ranks can share its hidden features in whole blocks, for any width.

    The norm has no parameters, because torch clips and steps plain parameters and DTensors not together.
    """

    def __init__(self, width: int, recomputed: bool):
        super().__init__()
        self.norm, self.recomputed = nn.LayerNorm(width, elementwise_affine=False), recomputed
        self.up, self.down = nn.Linear(width, HIDDEN), nn.Linear(HIDDEN, width, bias=False)

    def inner(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.recomputed else self.inner(x)


class Step(NamedTuple):
    """A step of the ranks: all batches, the losses of this rank, whole parameters and gradients."""

    before: dict[str, Tensor]
    inputs: Tensor
    losses: list[Tensor]
    grads: dict[str, Tensor]
    norm: Tensor | None
    clipped: dict[str, Tensor]
    after: dict[str, Tensor]


def model_of(case: Case) -> nn.Module:
    torch.manual_seed(0)
    width, recomputed = int(case["width"]), case["checkpointing"] == "yes"
    model = nn.Sequential(*(Block(width, recomputed) for _ in range(2)))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(torch.randn(p.shape).exp2())
    return model.to(getattr(torch, case["dtype"]))


def optimizer_of(case: Case, model: nn.Module) -> Any:
    adamw = partial(torch.optim.AdamW, lr=1e-3)
    kinds = {
        "SGD": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, foreach=False),
        "AdamW": partial(adamw, foreach=False),
        "fused": partial(adamw, fused=True),
        "FusedAdam": partial(te.FusedAdam, lr=1e-3),
    }
    return kinds[case["optimizer"]](model.parameters())


def distributed(case: Case, model: nn.Module) -> Any:
    """The model to call; its parameters are those of ``model``."""
    if case["way"] == "blocks":
        for block in model:
            block.compile(backend="aot_eager")
    if case["parallel"] == "DDP":
        return DistributedDataParallel(model)
    if case["parallel"] == "FSDP2":
        for block in model:
            fully_shard(block)
        return fully_shard(model)
    plan = {"*.up": mx.parallel.ColwiseParallel(), "*.down": mx.parallel.RowwiseParallel()}
    return parallelize_module(model, init_device_mesh(DEVICE, (WORLD,)), plan)


def full(t: Tensor) -> Tensor:
    """A copy of a parameter or gradient: whole, plain."""
    return values(whole(plain(t))).clone()


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(p) for name, p in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(p.grad) for name, p in model.named_parameters()}


def precision(case: Case) -> Any:
    return contextlib.nullcontext() if case["autocast"] == "no" else torch.autocast(DEVICE, torch.bfloat16)


def backward(case: Case, run: Any, batches: Tensor, synchronized: Any = None) -> list[Tensor]:
    """Forward and backward passes of the microbatches; the losses. ``synchronized(last)`` is open around each."""
    losses = []
    with mx.accumulate() if case["accumulation"] == "mx.accumulate" else contextlib.nullcontext():
        for i, x in enumerate(batches):
            with synchronized(i == len(batches) - 1) if synchronized else contextlib.nullcontext():
                with precision(case):
                    y = run(x)
                losses.append(F.mse_loss(y.float(), x.flip(-1).float()))
                losses[-1].backward()
    return [loss.detach() for loss in losses]


def synchronization(case: Case, run: Any) -> Any:
    """A function of whether a microbatch is the last one: only then are gradients sent."""

    @contextlib.contextmanager
    def synchronized(last: bool) -> Iterator[None]:
        if case["parallel"] == "FSDP2":
            run.set_requires_gradient_sync(last)
        with run.no_sync() if case["parallel"] == "DDP" and not last else contextlib.nullcontext():
            yield

    return synchronized


def reload(how: str, model: nn.Module, optimizer: Any) -> None:
    """Load a state dict with other values of the parameters, and the state of the optimizer."""
    if how == "load_state_dict":
        model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if how == "set_state_dict":
        of_model, of_optimizer = get_state_dict(model, optimizer)
        of_model = {name: value * 0.9 for name, value in of_model.items()}
        set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=copy.deepcopy(of_optimizer))


def subject(case: Case, rank: int) -> list[Step]:
    """All steps on the ranks, one after the other. With TP both ranks have the first batch."""
    model = mx.quantize_(model_of(case), RECIPES[case["recipe"]], lambda module, fqn: isinstance(module, nn.Linear))
    run = distributed(case, model)
    optimizer, steps = optimizer_of(case, model), []
    torch.manual_seed(1)
    micro, mine = 1 if case["accumulation"] == "1" else 2, 0 if case["parallel"] == "TP" else rank
    inputs = torch.randn(STEPS, WORLD, micro, ROWS, int(case["width"])).to(getattr(torch, case["dtype"]))
    for number, batches in enumerate(inputs):
        if number == RELOADED:
            reload(case["reload"], model, optimizer)
        before = parameters(model)
        losses = backward(case, run, batches[mine], synchronization(case, run))
        grads = gradients(model)
        norm = None
        if case["clipping"] == "yes":
            norm = whole(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)).detach()
        clipped = gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(Step(before, batches, losses, grads, norm, clipped, parameters(model)))
    return steps


def alike(case: Case, mine: Tensor, its: Tensor) -> bool:
    if case["parallel"] != "TP":
        return same_as(mine, its)
    low = case["dtype"] == "bfloat16" or case["autocast"] != "no"
    apart = SPLIT_LOW.get(case["recipe"], 0.1) if low else SPLIT
    mine, its = mine.double(), its.double()
    return mine.shape == its.shape and bool((mine - its).norm() <= apart * its.norm())


def summed(case: Case, twin: nn.Module, inputs: Tensor) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    """The losses of each rank, and the mean over ranks of the gradients, by one process."""
    losses, total = [], {}
    for batches in inputs[:1] if case["parallel"] == "TP" else inputs:
        losses.append(backward(case, twin, batches))
        for name, grad in gradients(twin).items():
            total[name] = total[name] + grad if name in total else grad
        for p in twin.parameters():
            p.grad = None
    return losses, {name: grad / len(losses) for name, grad in total.items()}


def differences(case: Case, rank: int) -> list[str]:
    """What of the steps is not as in one process; empty if all is."""
    steps, found = subject(case, rank), []
    alone = case | {"way": "eager", "checkpointing": "no", "accumulation": "1"}
    twin, shadow = mx.quantize_(model_of(alone), RECIPES[case["recipe"]]), model_of(alone)
    optimizer = optimizer_of(case, shadow)
    for number, step in enumerate(steps):
        put(twin, step.before)
        losses, grads = summed(alone, twin, step.inputs)
        its = losses[0 if case["parallel"] == "TP" else rank]
        found += [f"step {number}: loss {i}" for i, loss in enumerate(its) if not alike(case, step.losses[i], loss)]
        found += [f"step {number}: gradient of {n}" for n, g in grads.items() if not alike(case, step.grads[n], g)]
        if step.norm is not None:
            norm = torch.stack([g.double().norm() for g in step.grads.values()]).norm()
            scale = min(1.0, MAX_NORM / (norm.item() + 1e-6))
            near = 0.02 if case["dtype"] == "bfloat16" else 1e-4
            pairs = [(step.norm.double(), norm), *((step.clipped[n], g * scale) for n, g in step.grads.items())]
            found += [f"step {number}: clipping" for a, b in pairs if not (a - b).norm() <= near * b.norm()]
        put(shadow, step.before)
        for name, p in shadow.named_parameters():
            p.grad = step.clipped[name].clone()
        optimizer.step()
        found += [f"step {number}: {n} after it" for n, p in shadow.named_parameters() if not same_as(step.after[n], p)]
    return found


def space() -> Space:
    return Space(AXES, BOLD, RULES)


@cache
def cases() -> tuple[Case, ...]:
    return tuple(space().cases())


def quick() -> list[Case]:
    """A case of uneven rows that loads a state dict for each kind of parallelism, and a compiled one."""
    chosen: dict[tuple[str, ...], Case] = {}
    for each in cases():
        if each["way"] == "blocks":
            chosen.setdefault(("blocks",), each)
        elif each["width"] == "65" and each["reload"] != "no":
            chosen.setdefault((each["parallel"],), each)
    return list(chosen.values())


def told(rank: int, given: list[Case]) -> dict[str, list[str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Dynamo, of AccumulateGrad under DDP
        found = {}
        for each in given:
            torch._dynamo.reset()
            found[id_of(each)] = differences(each, rank)
        torch._dynamo.reset()
    return found


@case
def combined(rank: int, folder: str) -> dict[str, list[str]]:
    return told(rank, quick())


@long_case
def combined_rest(rank: int, folder: str) -> dict[str, list[str]]:
    return told(rank, [each for each in cases() if each not in quick()])
