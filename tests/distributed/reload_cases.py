"""The cases of two ranks for ``test_reload.py``: state dicts loaded into a sharded model between two steps."""

import copy
from functools import partial

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from tests.distributed.fsdp_cases import RECIPES, ROWS, WIDTH, adamw, net, plain, shard, values, whole
from tests.helpers.ranks import WORLD, case

SIZES = WIDTH, WIDTH + 1
"""Rows that two ranks share evenly, and rows of which the second rank has one less."""
NAMES = "two copies", "one copy"
"""Recipes whose weights are gathered as values, and as codes."""
STEPS, SINCE = 4, 1
"""Steps, and the number of the first one before which a state dict is loaded."""


def load(model, optimizer, rank, **options):
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, **options)


def load_optimizer_too(model, optimizer, rank):
    load(model, optimizer, rank)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def assign(model, optimizer, rank):
    """The parameters are new objects, which the optimizer goes on with."""
    before = [*model.parameters()]
    load(model, optimizer, rank, assign=True)
    for old, new in zip(before, model.parameters(), strict=True):
        optimizer.state[new] = optimizer.state.pop(old)
    optimizer.param_groups[0]["params"] = [*model.parameters()]


def set_model(model, optimizer, rank, **options):
    options = StateDictOptions(**options)
    state = {name: value.clone() for name, value in get_model_state_dict(model, options=options).items()}
    set_model_state_dict(model, state, options=options)


def set_both(model, optimizer, rank):
    of_model, of_optimizer = copy.deepcopy(get_state_dict(model, optimizer))
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)


def replace(model, optimizer, rank, alone):
    """Rank ``alone`` gets local weights that are other objects; no other rank notices."""
    for p in model.parameters():
        if rank == alone and p.dim() == 2:  # FSDP2 would not see another bias
            p._local_tensor = p._local_tensor.clone()


WAYS = {
    "load_state_dict": load,
    "load_state_dict of both": load_optimizer_too,
    "load_state_dict, assigned": assign,
    "set_model_state_dict": set_model,
    "set_model_state_dict, full": partial(set_model, full_state_dict=True),
    "set_model_state_dict, from rank 0": partial(set_model, full_state_dict=True, broadcast_from_rank0=True),
    "set_state_dict": set_both,
    "rank 0 replaces": partial(replace, alone=0),
    "rank 1 replaces": partial(replace, alone=1),
}


def trained(recipe, features, rank, way=None, since=SINCE):
    """Losses, and the parameters at the end; ``way`` is called before each step from ``since`` on."""
    model = shard(net(features, recipe))
    optimizer = adamw(model)
    torch.manual_seed(7)
    found = []
    for step in range(STEPS):
        if way is not None and step >= since:
            way(model, optimizer, rank)
        x = torch.randn(WORLD, ROWS, WIDTH)[rank]
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found + [values(whole(plain(p))).clone() for p in model.parameters()]


def same(a, b):
    return [torch.equal(mine, its) for mine, its in zip(a, b, strict=True)]


@case
def reloaded(rank, folder):
    """For each way whether every loss and every parameter is that of a run in which nothing is loaded."""
    told = {}
    for name in NAMES:
        for features in SIZES:
            alone = trained(RECIPES[name], features, rank)
            for way, call in WAYS.items():
                told[way, name, features] = same(trained(RECIPES[name], features, rank, call), alone)
            told["before the first step", name, features] = same(
                trained(RECIPES[name], features, rank, load, since=0), alone
            )
    return told
