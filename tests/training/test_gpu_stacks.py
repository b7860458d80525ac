"""Stacks of weights on a CUDA device: repeated steps, blocks of ``mx.accumulate``, layouts, and compiled graphs."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mxtensor as mx
from mxtensor.convert.training import training_parameter
from mxtensor.core.repeated import KINDS
from mxtensor.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from mxtensor.training.delayed_scaling import STATE
from tests.helpers.compare import relative_error
from tests.helpers.no_sync import no_host_sync

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")]
BF16 = torch.bfloat16
RECIPES = {
    "mxfp8": MXFP8BlockScaling(),
    "e5m2 gradients": MXFP8BlockScaling(fp8_format=Format.HYBRID),
    "float8 block": Float8BlockScaling(),
    "mxfp4": MXFP4BlockScaling(stochastic_rounding=False),
    "mxfp6": MXFP6BlockScaling(),
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
    "nvfp4 rows": NVFP4BlockScaling(disable_stochastic_rounding=True, disable_rht=True, row_scaled_activation=True),
    "float8 current": Float8CurrentScaling(),
}
ENDS = ([1000, 1000, 1300, 2040], [0, 2048, 2048, 2048], [512, 1024, 1536, 2048], [7, 9, 9, 2000])


class Experts(nn.Module):
    """A stack (experts, out, in), or (experts, in, out) as ``F.grouped_mm`` takes it."""

    def __init__(self, recipe, weight, transposed=False):
        super().__init__()
        weight = weight.mT.contiguous() if transposed else weight.clone()
        self.weight = training_parameter(nn.Parameter(weight), recipe.linear_recipe())
        self.transposed = transposed

    def forward(self, x, ends):
        weight = self.weight if self.transposed else self.weight.mT
        return torch._grouped_mm(x, weight, offs=ends)


def tensors():
    x, w = torch.randn(2048, 512, device="cuda", dtype=BF16), torch.randn(4, 256, 512, device="cuda", dtype=BF16)
    return x, w, torch.randn(2048, 256, device="cuda", dtype=BF16)


def ends_of(values):
    return torch.tensor(values, device="cuda", dtype=torch.int32)


def step(net, x, g, ends):
    x, net.weight.grad = x.clone().requires_grad_(), None
    y = net(x, ends)
    y.backward(g)
    return y.detach(), x.grad, net.weight.grad.clone()


def in_general(*args):
    with mx.explain():
        return step(*args)


def assert_same(one, other):
    for mine, theirs in zip(one, other, strict=True):
        assert torch.equal(mine, theirs) and mine.dtype is theirs.dtype


@pytest.mark.parametrize("name", RECIPES)
def test_repeated_steps_are_programs_with_the_bits_of_the_general_way(name):
    KINDS.clear()
    x, w, g = tensors()
    net = Experts(RECIPES[name], w)
    for ends in map(ends_of, ENDS * 2):
        x, _, g = tensors()
        assert_same(step(net, x, g, ends), in_general(net, x, g, ends))
    assert sum(kind.program is not None for kind in KINDS.values()) >= 2


@pytest.mark.parametrize("name", RECIPES)
def test_the_layout_of_a_stack_changes_no_bit(name):
    x, w, g = tensors()
    alone, other = Experts(RECIPES[name], w), Experts(RECIPES[name], w, transposed=True)
    for values in ENDS:
        y, dx, dw = step(other, x, g, ends_of(values))
        assert_same(step(alone, x, g, ends_of(values)), (y, dx, dw.mT))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_steps_in_a_block_have_the_bits_of_those_outside(name, transposed):
    x, w, g = tensors()
    alone, together = (Experts(RECIPES[name], w, transposed) for _ in range(2))
    for _ in range(2):
        expected = [step(alone, x, g, ends_of(values)) for values in ENDS]
        with mx.accumulate():
            for values, one in zip(ENDS, expected, strict=True):
                assert_same(step(together, x, g, ends_of(values)), one)
        with torch.no_grad():
            alone.weight.mul_(0.5)
            together.weight.mul_(0.5)


def assert_never_waits(recipe, kernel):
    """A step of experts makes no host wait, and its products take this kernel."""
    x, w, g = tensors()
    net, ends = Experts(recipe, w), ends_of(ENDS[0])
    step(net, x, g, ends)
    with no_host_sync():
        step(net, x, g, ends)
    with mx.explain() as log:
        step(net, x, g, ends)
    ran = {e.spec.op: e.kernel for e in log.entries if e.spec.op in ("fprop", "dgrad", "wgrad")}
    assert ran == dict.fromkeys(("fprop", "dgrad", "wgrad"), kernel)


@pytest.mark.parametrize("name", RECIPES)
def test_a_step_never_waits_for_the_device(name):
    """Each of the three products is one launch for all groups."""
    assert_never_waits(RECIPES[name], "dequant" if name.startswith("nvfp4") else "fp8_rows")


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "float8 block", "float8 current"])
def test_a_compiled_step_has_the_bits_of_the_eager_one(name):
    torch._dynamo.reset()
    x, w, g = tensors()
    net = Experts(RECIPES[name], w)
    compiled = torch.compile(net, fullgraph=True, dynamic=False)
    for values in ENDS:
        ends = ends_of(values)
        expected = step(net, x, g, ends)
        x.grad = net.weight.grad = None
        given = x.clone().requires_grad_()
        y = compiled(given, ends)
        y.backward(g)
        assert_same((y.detach(), given.grad, net.weight.grad), expected)


def test_each_group_has_the_gradients_of_a_layer_of_its_own():
    """Its columns are cast alone: what other groups hold changes no bit of wgrad."""
    x, w, g = tensors()
    net, ends = Experts(RECIPES["mxfp8"], w), ends_of([512, 1024, 1536, 2048])
    _, _, expected = step(net, x, g, ends)
    x[512:], g[:512] = x[512:] * 2.0**40, g[:512] * 1.0
    x[1536:] *= 2.0**-60
    _, _, dw = step(net, x, g, ends)
    assert torch.equal(dw[0], expected[0]) and not torch.equal(dw[1], expected[1])


# ---------------------------------------------------------------------------------------------- delayed scaling

DELAYED = {
    "hybrid": DelayedScaling(amax_history_len=2),
    "e4m3": DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent", fp8_format=Format.E4M3),
}


def history(net):
    return [t.clone() for t in vars(net.weight)[STATE].state_dict().values()]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", DELAYED)
def test_delayed_scaling_repeats_as_programs_with_the_bits_of_the_general_way(name, transposed):
    KINDS.clear()
    _, w, _ = tensors()
    alone, general = (Experts(DELAYED[name], w, transposed) for _ in range(2))
    for i, ends in enumerate(map(ends_of, ENDS * 2)):
        x, _, g = tensors()
        x, g = 2.0**i * x, g / 2.0**i
        assert_same(step(alone, x, g, ends), in_general(general, x, g, ends))
        assert_same(history(alone), history(general))
    assert sum(kind.program is not None for kind in KINDS.values()) >= 2


@pytest.mark.parametrize("name", DELAYED)
def test_delayed_scaling_is_that_of_the_cpu(name):
    """The same histories bit for bit, and products of the same codes: the CPU adds in float32 and rounds once."""
    _, w, _ = tensors()
    here, there = Experts(DELAYED[name], w), Experts(DELAYED[name], w.cpu())
    for i, values in enumerate(ENDS):
        x, _, g = tensors()
        x, g = 2.0**i * x, g / 2.0**i
        got = step(here, x, g, ends_of(values))
        expected = step(there, x.cpu(), g.cpu(), ends_of(values).cpu())
        for mine, one in zip(got, expected, strict=True):
            assert relative_error(mine.cpu().float(), one.float()) < 5e-3  # a rounding to bfloat16 on either side
        assert_same([t.cpu() for t in history(here)], history(there))


@pytest.mark.parametrize("name", DELAYED)
def test_delayed_scaling_never_waits_for_the_device(name):
    assert_never_waits(DELAYED[name], "fp8_rows")


@pytest.mark.parametrize("reentrant", [True, False])
def test_delayed_scaling_is_recomputed_with_its_own_scales(reentrant):
    _, w, _ = tensors()
    alone, recomputed = (Experts(DELAYED["hybrid"], w) for _ in range(2))
    ends, results = ends_of(ENDS[0]), []
    batches = [tuple(2.0 ** (i * 3) * t for t in (tensors()[0], tensors()[2])) for i in range(3)]
    for net in (alone, recomputed):
        out = []
        for _ in range(3):
            xs = [x.clone().requires_grad_() for x, _ in batches]
            run = net if net is alone else lambda x, e, net=net: checkpoint(net, x, e, use_reentrant=reentrant)
            ys = [run(x, ends) for x in xs]
            for x, y, (_, g) in zip(xs, ys, batches, strict=True):
                net.weight.grad = None
                y.backward(g)
                out += [y.detach(), x.grad, net.weight.grad.clone(), *history(net)]
        results.append(out)
    assert_same(*results)
