"""The cases of two ranks for ``test_histories.py``: amax histories of sharded models, which checkpoints continue."""

import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import mxtensor as mx
from mxtensor.distributed.collectives import _states
from mxtensor.recipe import DelayedScaling
from mxtensor.training.delayed_scaling import delayed_states
from mxtensor.training.training_weight import values_of
from tests.distributed.expert_cases import TopExperts, batch
from tests.helpers.ranks import DEVICE, case

RECIPE = DelayedScaling(amax_history_len=4)
ROWS, WIDTH = 8, 64


class Experts(nn.Module):
    """Two experts, whose weights are slices of stacks."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(2, 2 * WIDTH, WIDTH) / 8)
        self.down_proj = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / 8)

    def forward(self, x):
        up = [nn.functional.linear(x, w)[..., :WIDTH] for w in self.gate_up_proj]
        return sum(nn.functional.linear(y, w) for y, w in zip(up, self.down_proj, strict=True))


class Model(nn.Module):
    """torch's attention has two histories for slices of one weight, and experts have one for each of theirs."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.experts = Experts()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = x + self.attention(x, x.flip(1), x.flip(1), need_weights=False)[0]
        return self.last(y + self.experts(y)).clone()


HISTORIES = 3 + 1 + 4 + 1
"""Of queries, keys, values, the output of attention, two layers of two experts, and the last layer."""


def sharded(meta=False):
    """A model with FSDP2; ``meta``: made on the meta device, and filled when it is sharded."""
    torch.manual_seed(0)
    whole = mx.quantize_(Model(), RECIPE)
    model = whole
    if meta:
        with torch.device("meta"):
            model = mx.quantize_(Model(), RECIPE)
    for module in (model.last, model):
        fully_shard(module)
    if meta:
        model.to_empty(device=DEVICE)
        with torch.no_grad():
            for p, given in zip(model.parameters(), whole.parameters(), strict=True):
                p.copy_(distribute_tensor(values_of(given).detach(), p.device_mesh, p.placements))
    return model


def steps(model, numbers):
    """The losses of steps of SGD on the same data on each rank."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for number in numbers:
        torch.manual_seed(number)
        loss = model(torch.randn(2, ROWS, WIDTH) * number).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@case
def histories_of_shards(rank, folder):
    """How -> the losses of a run, of its continuation in another model, and the histories that ``share_amax`` sees."""
    told = {}
    for how, meta, assign in (("sharded", False, False), ("assigned", False, True), ("from meta", True, False)):
        first, second = sharded(meta), sharded(meta)
        steps(first, (1, 2, 3))
        steps(second, (9,))  # other histories
        state = {key: value.clone() for key, value in first.state_dict().items()}
        second.load_state_dict(state, assign=assign)
        told[how] = steps(first, (4, 5)), steps(second, (4, 5)), len(_states(second))
    return told


def loaded_by_torch(given, wrap, **options):
    """The losses of a run, and those of its continuation in a model that ``set_model_state_dict`` loads."""
    first, second = wrap(given()), wrap(given())
    steps(first, (1, 2, 3))
    steps(second, (9,))
    saved = get_model_state_dict(first, options=StateDictOptions(full_state_dict=bool(options)))
    if options.get("broadcast_from_rank0") and dist.get_rank():
        saved = {}
    if options:
        set_model_state_dict(second, saved, options=StateDictOptions(full_state_dict=True, **options))
    else:
        set_model_state_dict(second, saved)
    return steps(first, (4, 5)), steps(second, (4, 5))


def whole():
    torch.manual_seed(0)
    return mx.quantize_(Model(), RECIPE)


@case
def histories_of_experts_without_tokens(rank, folder):
    """The amax of each expert's gradient that this rank has for the next step: each rank has run one of two experts."""
    torch.manual_seed(0)
    model = mx.quantize_(Experts(), RECIPE)
    hidden = nn.functional.linear(torch.randn(ROWS, WIDTH), model.gate_up_proj[rank])
    (hidden[:, :WIDTH].square().sum() * (1 + rank)).backward()
    mx.parallel.share_amax(model)
    return {name: state.record.tolist() for name, state in sorted(delayed_states(model.gate_up_proj).items())}


@case
def histories_of_plain_layers(rank, folder):
    """The warning of a state dict that lacks the histories of a sharded model under ``autocast``."""
    model = fully_shard(mx.track_delayed_scaling(nn.Sequential(nn.Linear(WIDTH, WIDTH))))
    with mx.autocast(recipe=RECIPE):
        model(torch.randn(ROWS, WIDTH)).sum().backward()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model.state_dict()
    return [str(one.message) for one in said]


@case
def histories_in_torchs_state_dicts(rank, folder):
    """How -> the losses of a run, and of its continuation: wrapped models, and states that rank 0 alone has."""
    first = {"broadcast_from_rank0": True}
    return {
        "replicated": loaded_by_torch(whole, DistributedDataParallel),
        "broadcast": loaded_by_torch(sharded, lambda model: model, **first),
        "broadcast to the CPU": loaded_by_torch(sharded, lambda model: model, cpu_offload=True, **first),
        "whole on each rank": loaded_by_torch(sharded, lambda model: model, cpu_offload=False),
    }


@case
def histories_in_checkpoints(rank, folder):
    """How -> the losses of a run, and of its continuation in a model that has not run: ``dcp.load`` fills what a state
    dict has."""
    told = {}
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))

    def layers(meta):
        torch.manual_seed(0)
        with torch.device("meta" if meta else DEVICE):
            model = mx.quantize_(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)), RECIPE)
        fully_shard(model)
        return model.to_empty(device=DEVICE) if meta else model

    def experts(meta):
        torch.manual_seed(0)
        return parallelize_module(mx.quantize_(TopExperts(), RECIPE), mesh, mx.parallel.ExpertParallel())

    for how, made, inputs in (("from meta", layers, of_layers), ("experts", experts, of_experts)):
        first, second = made(False), made(True)
        run(first, inputs, (1, 2, 3))
        path = f"{folder}/histories of {how}"
        dcp.save(get_model_state_dict(first), checkpoint_id=path)
        state = get_model_state_dict(second)
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(second, state)
        told[how] = run(first, inputs, (4, 5)), run(second, inputs, (4, 5))
    return told


def of_layers(number):
    return (torch.randn(ROWS, WIDTH) * number,)


def of_experts(number):
    x, index, weights = batch(dist.get_rank())
    return x * number, index, weights


def run(model, inputs, numbers):
    """The losses of steps of SGD, with shared histories."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for number in numbers:
        torch.manual_seed(number)
        loss = model(*inputs(number)).square().mean()
        loss.backward()
        mx.parallel.share_amax(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
