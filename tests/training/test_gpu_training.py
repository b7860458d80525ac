"""Training on a CUDA device: the three products against the exact reference, as on CPU."""

import copy
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mxtensor as mx
from mxtensor.core.repeated import KINDS
from mxtensor.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling
from mxtensor.training.linear import Options, linear
from tests.helpers.compare import relative_error
from tests.helpers.training_reference import check_step, train_step
from tests.training.test_linear import NEAREST, problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),  # a warning of some torch versions
]

FLOAT8_SUMS = 4e-4
"""Error of a float8 product on tensor cores that keep 14 bits of a sum, by norm."""


ROTATED = 2e-3
"""Error of dw by norm: 16 float32 values added in another order may round to the other bfloat16, and a code changes."""


def on_gpu(*tensors):
    return [None if t is None else t.detach().cuda().requires_grad_(t.requires_grad) for t in tensors]


def check(actual, x, w, b, g, linear_recipe):
    """``check_step`` of results on the GPU, with a tolerance for float8 sums of 14 bits in 16-bit results."""
    cpu = [None if t is None else t.detach().cpu() for t in (*actual, x, w, b, g)]
    if actual[0].dtype is torch.float32:
        rotates = linear_recipe.input.signs is not None
        y, dx, dw, db = cpu[:4]
        check_step((y, dx, None if rotates else dw, db), *cpu[4:], linear_recipe)
        if rotates:
            assert relative_error(dw, train_step(*cpu[4:], linear_recipe).dw) < ROTATED
        return
    for mine, exact in zip(cpu[:4], train_step(*cpu[4:], linear_recipe), strict=True):
        if mine is not None and exact.any():
            assert mine.isfinite().all()
            assert relative_error(mine, exact) < 3e-3 + FLOAT8_SUMS


@pytest.mark.parametrize("recipe", NEAREST.values(), ids=NEAREST)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_every_recipe_gives_the_reference(recipe, dtype):
    x, w, b, g = problem(3, 96, 160, n=224, dtype=dtype)
    x, w, b, g = on_gpu(x, w, b, g)
    y = linear(x, w, b, Options(recipe.linear_recipe()))
    y.backward(g)
    check((y.detach(), x.grad, w.grad, b.grad), x, w, b, g, recipe.linear_recipe())


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8 hybrid", "nvfp4", "mxfp4", "float8 current", "float8 block"])
@pytest.mark.parametrize("shape, n", [((1, 32), 16), ((33, 31), 65), ((7, 100), 30), ((0, 64), 32), ((256, 512), 384)])
def test_any_shape(shape, n, recipe):
    x, w, b, g = on_gpu(*problem(*shape, n=n, dtype=torch.bfloat16))
    y = linear(x, w, b, Options(NEAREST[recipe].linear_recipe()))
    y.backward(g)
    check((y.detach(), x.grad, w.grad, b.grad), x, w, b, g, NEAREST[recipe].linear_recipe())


def test_strided_and_expanded_gradients():
    x, w, _, _ = on_gpu(*problem(96, 128, n=64, dtype=torch.bfloat16))
    for g in (torch.randn(128, 96).cuda().bfloat16().t()[:, ::2], torch.randn(1, 64).cuda().bfloat16().expand(96, 64)):
        x.grad = w.grad = None
        y = linear(x, w, None, Options(MXFP8BlockScaling().linear_recipe()))
        y.backward(g)
        check((y.detach(), x.grad, w.grad, None), x, w, None, g, MXFP8BlockScaling().linear_recipe())


def test_the_log_and_forced_kernels_reach_autograds_threads():
    x, w, _, g = on_gpu(*problem(64, 128, n=64, dtype=torch.bfloat16, bias=False))
    with mx.explain() as log, mx.kernels("emulated"):
        linear(x, w, None, Options(MXFP8BlockScaling().linear_recipe())).backward(g)
    ran = [(e.spec.op, e.kernel) for e in log.entries if e.spec.op in ("fprop", "dgrad", "wgrad")]
    assert ran == [("fprop", "emulated"), ("dgrad", "emulated"), ("wgrad", "emulated")]


@pytest.mark.parametrize("make", [MXFP8BlockScaling, Float8CurrentScaling, DelayedScaling, NVFP4BlockScaling])
def test_a_model_trains(make):
    """The loss of a small regression falls by half in 60 steps of AdamW, weights and activations in bfloat16."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).cuda().bfloat16()
    mx.quantize_(model, make())
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, fused=True)
    x = torch.randn(512, 64, device="cuda").bfloat16()
    target = torch.tanh(x @ torch.randn(64, 64, device="cuda").bfloat16() / 8)
    losses = []
    for _ in range(60):
        loss = nn.functional.mse_loss(model(x).float(), target.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("make", [MXFP8BlockScaling, Float8CurrentScaling, DelayedScaling])
def test_compiled_equals_eager(make):
    """One inductor graph for forward and backward is bitwise identical to eager."""
    torch._dynamo.reset()
    recipe, model = make(), nn.Linear(256, 128, device="cuda", dtype=torch.bfloat16)
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, fullgraph=True)
    for i in range(4):
        x = torch.randn(64, 256, device="cuda").bfloat16().requires_grad_()
        g = torch.randn(64, 128, device="cuda").bfloat16()
        results = []
        for layer in (model, compiled if i else twin):  # delayed scaling needs an eager first step
            x.grad = model.weight.grad = twin.weight.grad = None
            with mx.autocast(recipe=recipe):
                y = layer(x)
            y.backward(g)
            grad = model.weight.grad if layer is model else twin.weight.grad
            results.append((y.detach(), x.grad.clone(), grad.clone()))
        assert all(torch.equal(a, c) for a, c in zip(*results, strict=True))


def test_a_step_in_a_cuda_graph():
    model = mx.quantize_(nn.Linear(256, 128, device="cuda", dtype=torch.bfloat16), MXFP8BlockScaling())
    x = torch.randn(64, 256, device="cuda").bfloat16().requires_grad_()
    g = torch.randn(64, 128, device="cuda").bfloat16()

    def step():
        y = model(x)
        return y, *torch.autograd.grad(y, (x, model.weight), g)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    assert all(torch.equal(a, c) for a, c in zip(outputs, step(), strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_under_autocast_changes_no_bit(reentrant):
    """On a CUDA device another thread recomputes in the backward pass."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).cuda().bfloat16()
    x, g = torch.randn(64, 64, device="cuda").bfloat16().requires_grad_(), torch.randn(64, 64, device="cuda").bfloat16()
    grads = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=reentrant)):
        model.zero_grad()
        x.grad = None
        with mx.autocast():
            y = run(x)
        y.backward(g)
        grads.append([p.grad.clone() for p in model.parameters()] + [x.grad.clone()])
    assert all(torch.equal(a, c) for a, c in zip(*grads, strict=True))


def test_saved_activations_use_about_half_the_memory():
    x = torch.randn(2048, 2048, device="cuda").bfloat16()

    def saved(model):
        before = torch.cuda.memory_allocated()
        y = model(x)
        return torch.cuda.memory_allocated() - before - y.nbytes, y

    layers = [nn.Linear(2048, 2048, bias=False, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    model = nn.Sequential(*layers)
    saved(model)
    plain, _ = saved(model)
    mx.quantize_(model, MXFP8BlockScaling())
    saved(model)
    ours, _ = saved(model)
    assert plain == 3 * x.nbytes  # the input exists anyway
    inputs, weights = 4, 3  # codes of the weights are saved for dgrad, which the first layer does not need
    assert ours <= inputs * 0.52 * x.nbytes + weights * 0.52 * layers[0].weight.nbytes


# ---------------------------------------------------------------------------------------------- repeated layers

REPEATED = NEAREST | {"nvfp4 stochastic": NVFP4BlockScaling(), "delayed": DelayedScaling()}


def results_of(layer, x, g):
    """(y, dx, dw, db) of one step with a seed of its own."""
    x.grad = None
    layer.zero_grad()
    torch.manual_seed(7)
    y = layer(x)
    y.backward(g)
    return [t.detach().clone() for t in (y, x.grad, *(p.grad for p in layer.parameters()))]


def in_general(function, *args):
    """What no program computes: ``explain()`` sees all of the call."""
    with mx.explain():
        return function(*args)


def inputs(rows=256, cols=512, n=384):
    x = torch.randn(rows, cols, device="cuda").bfloat16().requires_grad_()
    return x, torch.randn(rows, n, device="cuda").bfloat16()


def repeated_layer(recipe, bias=True, steps=3):
    layer = mx.quantize_(nn.Linear(512, 384, bias=bias, device="cuda", dtype=torch.bfloat16), recipe)
    for _ in range(steps):
        results_of(layer, *inputs())
    return layer


def programs():
    return [kind.program for kind in KINDS.values() if kind.program is not None]


def assert_equal(found, expected):
    assert all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("recipe", REPEATED.values(), ids=REPEATED)
def test_repeated_layers_have_the_bits_of_the_general_way(recipe, bias):
    """Other data, other weights, rows that are freed and reused by torch's allocator, in place and through .data."""
    layer = repeated_layer(recipe, bias)
    assert len(programs()) == 2
    for change in (lambda w: None, lambda w: w.mul_(1.5), lambda w: w.data.neg_(), lambda w: w.copy_(w.roll(1, 0))):
        with torch.no_grad():
            change(layer.weight)
        x, g = inputs()
        expected = in_general(results_of, copy.deepcopy(layer), x, g)
        assert_equal(results_of(layer, x, g), expected)
    assert len(programs()) == 2


@pytest.mark.parametrize("rows", [1, 17, 64, 2048])
@pytest.mark.parametrize("recipe", ["mxfp8", "float8 current", "nvfp4 stochastic"])
def test_repeated_layers_with_any_number_of_rows(rows, recipe):
    layer = repeated_layer(REPEATED[recipe], steps=0)
    for _ in range(4):
        x, g = inputs(rows)
        assert_equal(results_of(layer, x, g), in_general(results_of, layer, x, g))


@pytest.mark.parametrize("recipe", ["mxfp8", "float8 current", "nvfp4 stochastic", "delayed"])
def test_repeated_layers_launch_on_the_current_stream(recipe):
    """A side stream waits for the input, which comes late; another stream must not read it before."""
    layer = repeated_layer(REPEATED[recipe])
    x, g = inputs()
    expected = in_general(results_of, copy.deepcopy(layer), x, g)
    late = torch.zeros_like(x).requires_grad_()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # about 30 ms
        with torch.no_grad():
            late.copy_(x)
        found = results_of(layer, late, g)
    stream.synchronize()
    assert_equal(found, expected)


@pytest.mark.parametrize("recipe", ["mxfp8", "float8 current", "nvfp4"])
def test_a_repeated_step_in_a_cuda_graph(recipe):
    """The graph casts the weight and the input anew in each replay."""
    layer = repeated_layer(REPEATED[recipe])
    x, g = inputs()

    def step():
        y = layer(x)
        return y, *torch.autograd.grad(y, (x, layer.weight), g)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    for _ in range(3):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
            layer.weight.mul_(-1.25)
        graph.replay()
        assert_equal(outputs, in_general(step))
        assert_equal(outputs, step())


def test_two_threads_share_repeated_layers():
    layer = repeated_layer(MXFP8BlockScaling())
    layers = [layer, *(copy.deepcopy(layer) for _ in range(3))]
    work = [inputs() for _ in layers]
    expected = [in_general(results_of, mine, *args) for mine, args in zip(layers, work, strict=True)]
    found = [None] * len(layers)
    torch.cuda.synchronize()

    def run(i):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(10):
                found[i] = results_of(layers[i], *work[i])
        stream.synchronize()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(layers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for mine, other in zip(found, expected, strict=True):
        assert_equal(mine, other)


def test_programs_hold_no_memory():
    layer = repeated_layer(MXFP8BlockScaling())
    x, g = inputs()
    results_of(layer, x, g)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    gone = [weakref.ref(t) for t in (layer.weight, layer.weight.high_precision, x)]
    nbytes = layer.weight.nbytes + x.nbytes + g.nbytes
    del layer, x, g
    assert [ref() for ref in gone] == [None] * len(gone)
    assert before - torch.cuda.memory_allocated() >= nbytes


def test_a_repeated_step_needs_no_more_memory():
    layer = repeated_layer(MXFP8BlockScaling(), steps=0)
    x, g = inputs(4096)

    def peak():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what other tests left: a block that is up to 1 MiB larger counts whole
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        layer(x).backward(g)
        x.grad = None
        layer.zero_grad()
        return torch.cuda.max_memory_allocated() - before

    for _ in range(3):
        peak()
    general = in_general(peak)
    assert peak() <= 1.02 * general
