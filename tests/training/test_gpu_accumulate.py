"""``mx.accumulate`` on a CUDA device: repeated layers take the casts of the block, with the bits of those without."""

import copy

import pytest
import torch
from torch import nn

import mxtensor as mx
import mxtensor.te as te
from mxtensor.core.repeated import KINDS
from mxtensor.recipe import MXFP4BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")]


def batch(rows):
    return torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("rows", [16, 512, 4096])
@pytest.mark.parametrize("make", [MXFP8BlockScaling, MXFP4BlockScaling, NVFP4BlockScaling])
def test_steps_in_a_block_have_the_bits_of_those_outside(make, rows):
    net = nn.Sequential(nn.Linear(512, 768), nn.GELU(), nn.Linear(768, 512, bias=False)).to("cuda", torch.bfloat16)
    nets = [mx.quantize_(copy.deepcopy(net), make()) for _ in range(2)]
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in nets]
    for step in range(3):
        batches = [batch(rows) for _ in range(4)]

        def work(one, seed=step, batches=batches):
            torch.manual_seed(seed)
            for x in batches:
                (one(x).float() ** 2).mean().backward()

        work(nets[0])
        with mx.accumulate():
            work(nets[1])
        for optimizer in optimizers:
            optimizer.step()
        for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            assert torch.equal(one.grad, other.grad) and torch.equal(one.detach() * 1, other.detach() * 1)
        for optimizer in optimizers:
            optimizer.zero_grad()


def test_layers_with_the_casts_of_a_block_are_programs():
    KINDS.clear()
    layer = nn.Linear(512, 768, device="cuda", dtype=torch.bfloat16)
    mx.quantize_(layer, MXFP8BlockScaling())
    with mx.accumulate():
        for _ in range(4):
            layer(batch(512).requires_grad_()).float().square().mean().backward()
    assert [kind.program is not None for kind in KINDS.values()] == [True, True]


@pytest.mark.parametrize("rows", [64, 512])
def test_first_microbatches_of_modules_have_the_same_bits(rows):
    alone, cached = (te.Linear(512, 768, bias=True, params_dtype=torch.bfloat16, device="cuda") for _ in range(2))
    cached.load_state_dict(alone.state_dict())
    for _ in range(2):
        with mx.autocast(recipe=MXFP8BlockScaling()):
            for i in range(4):
                x = batch(rows)
                alone(x).float().square().mean().backward()
                cached(x, is_first_microbatch=i == 0).float().square().mean().backward()
        assert torch.equal(alone.weight.grad, cached.weight.grad) and torch.equal(alone.bias.grad, cached.bias.grad)
