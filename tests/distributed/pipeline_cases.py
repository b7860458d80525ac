"""The cases of two ranks for ``test_pipelines.py``: stages of torch.distributed.pipelining, and one process."""

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleavedZeroBubble

import mxtensor as mx
from mxtensor.recipe import MXFP8BlockScaling, NVFP4BlockScaling
from tests.distributed.fsdp_cases import same_as
from tests.helpers.ranks import DEVICE, WORLD, case

RECIPES = {"mxfp8": MXFP8BlockScaling(), "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True)}
SCHEDULES = {Schedule1F1B: 1}
"""Schedule -> stages of each rank."""
if torch.__version__ >= "2.12":  # torch 2.11 cannot split the backward pass of a torch.autograd.Function
    SCHEDULES[ScheduleInterleavedZeroBubble] = 2
BATCHES, ROWS, WIDTH = 4, 8, 64


def blocks(recipe):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, WIDTH)) for _ in range(4)]
    return mx.quantize_(nn.Sequential(*layers), recipe)


def loss_of(y, target):
    return (y - target).square().mean()


@case
def pipelined(rank, folder):
    """(recipe, schedule) -> whether the gradients of this rank's blocks are those of one process."""
    told = {}
    for name, recipe in RECIPES.items():
        for kind, count in SCHEDULES.items():
            model, one = blocks(recipe), blocks(recipe)
            numbers = [rank + WORLD * i for i in range(count)]
            each = len(model) // (WORLD * count)
            mine = [slice(each * n, each * (n + 1)) for n in numbers]
            stages = [
                PipelineStage(model[part], n, WORLD * count, torch.device(DEVICE))
                for part, n in zip(mine, numbers, strict=True)
            ]
            torch.manual_seed(1)
            x, target = torch.randn(2, BATCHES * ROWS, WIDTH)
            schedule = kind(stages if count > 1 else stages[0], BATCHES, loss_fn=loss_of)
            schedule.step(*([x] if rank == 0 else []), **({"target": target} if rank == WORLD - 1 else {}))
            for batch, wanted in zip(x.chunk(BATCHES), target.chunk(BATCHES), strict=True):
                (loss_of(one(batch), wanted) / BATCHES).backward()
            pairs = [
                pair for part in mine for pair in zip(model[part].parameters(), one[part].parameters(), strict=True)
            ]
            told[name, kind.__name__] = all(same_as(a.grad, b.grad) for a, b in pairs)
    return told
