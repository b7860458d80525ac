"""Repeated calls of a layer run a recorded program: the bits of the general way, for other data, weights and threads.

Casts are Triton's, launched by addresses as on a device and interpreted, or, where the cast does not matter, those of
the CPU (``helpers/compiled_triton.py``).
"""

import copy
import gc
import re
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mxtensor as mx
from mxtensor.core import recording
from mxtensor.core.repeated import KINDS
from mxtensor.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from mxtensor.training import linear as training_linear
from mxtensor.training.linear import Options, linear
from mxtensor.training.training_weight import TrainingWeight
from tests.helpers import compiled_triton
from tests.helpers.compiled_triton import interpreted_launches, launches, native, torchs_products
from tests.kernels.quantize.conftest import one_rounding, whole_reductions
from tests.training.test_linear import NEAREST

pytest.importorskip("triton")
__all__ = ["interpreted_launches", "launches", "native", "one_rounding", "torchs_products", "whole_reductions"]
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is interpreted; test_gpu_training.py has the device"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter divides zeros
]


def in_cpp(recipe):
    """Whether a cast of the recipe is C++ on a CPU, where Triton's interpreter stands for a GPU."""
    casts = (recipe.input.rowwise, recipe.weight.rowwise, recipe.grad.rowwise)
    return any(cast is not None and cast.why_not_plain is not None for cast in casts)


# Casts in C++ are not recorded: tests/kernels/quantize/test_cpu_nvfp4.py records the definition, which a GPU runs.
PLAIN = {name: one for name, one in NEAREST.items() if not in_cpp(one.linear_recipe())}
RECIPES = PLAIN | {"nvfp4 stochastic": NVFP4BlockScaling(), "mxfp4 stochastic": MXFP4BlockScaling()}
ROWS, IN, OUT = 32, 64, 48


@pytest.fixture
def passes_run(monkeypatch):
    """The names of the general passes that have run."""
    ran = []
    for name in ("forward", "backward"):
        work = getattr(training_linear, name)
        monkeypatch.setattr(training_linear, name, lambda *a, name=name, work=work: ran.append(name) or work(*a))
    return ran


def tensors(rows=ROWS, bias=True, dtype=torch.bfloat16):
    x, w = torch.randn(rows, IN).to(dtype).requires_grad_(), (torch.randn(OUT, IN) / 8).to(dtype).requires_grad_()
    return x, w, torch.randn(OUT).to(dtype).requires_grad_() if bias else None, torch.randn(rows, OUT).to(dtype)


def step(x, w, b, g, recipe, **options):
    """(y, dx, dw, db) of one step with a seed of its own."""
    for t in (x, w, b):
        if t is not None:
            t.grad = None
    torch.manual_seed(7)
    y = linear(x, w, b, Options(recipe.linear_recipe(), **options))
    if y.requires_grad:
        y.backward(g)
    return y.detach(), *(None if t is None else t.grad for t in (x, w, b))


def in_general(function, *args, **kwargs):
    """What no program computes: ``explain()`` sees all of the call."""
    with mx.explain():
        return function(*args, **kwargs)


def assert_same(results, expected):
    for mine, other in zip(results, expected, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            assert mine.dtype is other.dtype and mine.stride() == other.stride()
            assert torch.equal(mine, other)


def negated(x):
    """A float32 tensor like x with torch's lazy minus sign."""
    out = torch.complex(torch.zeros(x.shape), torch.randn(x.shape)).conj().imag
    assert out.is_neg()
    return out


# ---------------------------------------------------------------------------------------------- the same bits


@pytest.mark.exhaustive(quick=3)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_every_recipe_gives_the_bits_of_the_general_way(recipe, bias, launches, passes_run):
    for _ in range(2):
        step(*tensors(bias=bias), recipe)
    assert passes_run == ["forward", "backward"] * 2
    for _ in range(2):
        args = tensors(bias=bias)
        expected = in_general(step, *args, recipe)
        del passes_run[:], launches[:]
        assert_same(step(*args, recipe), expected)
        assert passes_run == [] and launches and all(by_address for _, by_address in launches)


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("recipe", ["float8 current", "mxfp8"])
def test_the_launches_of_the_interpreter_are_recorded_too(recipe, interpreted_launches, passes_run):
    for _ in range(2):
        step(*tensors(), NEAREST[recipe])
    args = tensors()
    expected = in_general(step, *args, NEAREST[recipe])
    del passes_run[:]
    assert_same(step(*args, NEAREST[recipe]), expected)
    assert passes_run == []


@pytest.mark.parametrize(
    "change",
    [
        lambda x, w, b, g: (torch.randn(40, IN).bfloat16().requires_grad_(), w, b, torch.randn(40, OUT).bfloat16()),
        lambda x, w, b, g: (x.detach().view(4, 8, IN).requires_grad_(), w, b, g.view(4, 8, OUT)),
        lambda x, w, b, g: (torch.randn(IN, ROWS).bfloat16().t().requires_grad_(), w, b, g),
        lambda x, w, b, g: (torch.randn(ROWS, 2 * IN).bfloat16()[:, ::2].requires_grad_(), w, b, g),
        lambda x, w, b, g: (torch.randn(ROWS * IN + 1).bfloat16()[1:].view(ROWS, IN).requires_grad_(), w, b, g),
        lambda x, w, b, g: (x.detach(), w, b, g),
        lambda x, w, b, g: (x, w.detach(), b, g),
        lambda x, w, b, g: (x, w, b.detach(), g),
        lambda x, w, b, g: (x, w, b.detach().float().requires_grad_(), g),
        lambda x, w, b, g: (x, torch.randn(IN, OUT).bfloat16().t().requires_grad_(), b, g),
        lambda x, w, b, g: (x, w, b, g[:1].expand(ROWS, OUT)),
        lambda x, w, b, g: (x, w, b, torch.randn(OUT, ROWS).bfloat16().t()),
        lambda x, w, b, g: (x, w, b, torch.randn(ROWS * OUT + 1).bfloat16()[1:].view(ROWS, OUT)),
        lambda x, w, b, g: (x.detach().float().requires_grad_(), w.detach().float().requires_grad_(), b, g.float()),
        lambda x, w, b, g: (negated(x), w.detach().float(), b.detach().float().requires_grad_(), g.float()),
    ],
    ids=[
        "rows", "dimensions", "column-major x", "every second value", "unaligned x", "no dx", "no dw", "no db",
        "float32 bias", "column-major w", "one row of g", "column-major g", "unaligned g", "float32", "lazy sign",
    ],
)  # fmt: skip
def test_a_call_of_another_kind_is_another_program(change, native, passes_run):
    recipe = Float8CurrentScaling()
    for _ in range(2):
        step(*tensors(), recipe)
    for _ in range(2):
        step(*change(*tensors()), recipe)
    args = change(*tensors())
    expected = in_general(step, *args, recipe)
    del passes_run[:]
    assert_same(step(*args, recipe), expected)
    assert passes_run == (["forward", "backward"] if args[0].is_neg() else [])


@pytest.mark.parametrize("options", [{"dtype": torch.float32}, {"save_input": True}], ids=str)
def test_options_are_part_of_the_kind(options, native, passes_run):
    recipe = Float8CurrentScaling()
    for options_of_call in ({}, {}, options, options):
        step(*tensors(), recipe, **options_of_call)
    args = tensors()
    expected = in_general(step, *args, recipe, **options)
    del passes_run[:]
    assert_same(step(*args, recipe, **options), expected)
    assert passes_run == []


# ---------------------------------------------------------------------------------------------- models


def losses(model, optimizer, steps=2, accumulate=1):
    found = []
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(accumulate):
            x = torch.randn(ROWS, IN, generator=generator).bfloat16()
            loss = model(x).float().square().mean()
            loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return [*found, *(p.detach().clone() for p in model.parameters())]


def models(recipe):
    model = nn.Sequential(nn.Linear(IN, IN), nn.GELU(), nn.Linear(IN, IN, bias=False)).bfloat16()
    return [mx.quantize_(copy.deepcopy(model), recipe) for _ in range(2)]


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize(
    "make", [DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, Float8BlockScaling, NVFP4BlockScaling]
)
def test_a_model_trains_with_the_same_bits(make, native, passes_run):
    """Weights that the optimizer writes, in place; histories of delayed scaling; random numbers."""
    mine, other = models(make())
    torch.manual_seed(5)
    expected = in_general(losses, other, torch.optim.AdamW(other.parameters(), 1e-2), accumulate=2)
    del passes_run[:]
    torch.manual_seed(5)
    assert_same(losses(mine, torch.optim.AdamW(mine.parameters(), 1e-2), accumulate=2), expected)
    assert len(passes_run) <= 8  # two steps of each of two kinds of layers


def test_writes_to_a_weight_in_any_way_are_seen(native):
    layer = mx.quantize_(nn.Linear(IN, OUT).bfloat16(), Float8CurrentScaling())
    x = torch.randn(ROWS, IN).bfloat16()

    def check():
        assert_same([layer(x).detach()], [in_general(layer, x).detach()])

    def write(weight, value):
        with torch.no_grad():
            weight.copy_(value)

    for _ in range(3):
        check()
    writes = [
        write,
        lambda weight, value: weight.data.copy_(value),
        lambda weight, value: setattr(weight, "data", value),
        lambda weight, value: write(weight.detach(), value),
        lambda weight, value: layer.load_state_dict({"weight": value}, strict=False),
        lambda weight, value: torch._foreach_mul_([weight.data], 3),
    ]
    for change in writes:
        change(layer.weight, torch.randn(OUT, IN).bfloat16())
        check()


def test_autocast_and_hooks_and_recomputation(native, passes_run):
    layers = nn.Sequential(nn.Linear(IN, IN), nn.GELU(), nn.Linear(IN, IN)).bfloat16()
    x = torch.randn(ROWS, IN).bfloat16().requires_grad_()

    def run(reentrant):
        x.grad = None
        layers.zero_grad()
        with mx.autocast(recipe=Float8CurrentScaling()):
            y = layers(x) if reentrant is None else checkpoint(layers, x, use_reentrant=reentrant)
        y.float().square().sum().backward()
        return [y.detach(), x.grad, *(p.grad for p in layers.parameters())]

    expected = in_general(run, None)
    for reentrant in (None, None, None, True, False):
        assert_same(run(reentrant), expected)
    del passes_run[:]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy() if t.dtype is torch.float32 else t, _tensor):
        assert_same(run(None), expected)


def _tensor(t):
    return t if isinstance(t, torch.Tensor) else torch.from_numpy(t.copy())


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16])
def test_torch_autocast(to, native):
    for _ in range(3):
        x, w, b, _ = tensors(dtype=torch.float32)
        weight = TrainingWeight(w.detach(), Float8CurrentScaling().linear_recipe())

        def run():
            with torch.autocast("cpu", dtype=to):
                return nn.functional.linear(x, weight, b)  # noqa: B023

        assert_same([run().detach()], [in_general(run).detach()])


# ---------------------------------------------------------------------------------------------- the general way


def repeated_layer(recipe=None):
    layer = mx.quantize_(nn.Linear(IN, OUT).bfloat16(), recipe or Float8CurrentScaling())
    for _ in range(3):
        layer(torch.randn(ROWS, IN).bfloat16().requires_grad_()).sum().backward()
    return layer


def test_explain_and_kernels_see_repeated_layers(native, passes_run):
    layer, x = repeated_layer(), torch.randn(ROWS, IN).bfloat16().requires_grad_()
    del passes_run[:]
    with mx.explain() as log:
        layer(x).sum().backward()
    assert [e.spec.op for e in log.entries if e.spec.op in ("fprop", "dgrad", "wgrad")] == ["fprop", "dgrad", "wgrad"]
    with mx.kernels("emulated"):
        y = layer(x)
    y.sum().backward()
    assert passes_run == ["forward", "backward"] * 2
    y = layer(x)
    with mx.explain() as log:
        y.sum().backward()
    assert {e.spec.op for e in log.entries} >= {"dgrad", "wgrad"}


def test_a_profiler_of_triton_is_told_of_each_launch(native, passes_run, profiled):
    layer = repeated_layer()
    del passes_run[:]
    with profiled():
        layer(torch.randn(ROWS, IN).bfloat16())
    assert passes_run == ["forward"]


def test_a_second_derivative_is_refused(native):
    layer, x = repeated_layer(), torch.randn(ROWS, IN).bfloat16().requires_grad_()
    (dx,) = torch.autograd.grad(layer(x).float().square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        dx.sum().backward()


def test_a_compiled_layer_has_the_same_bits(native):
    torch._dynamo.reset()
    layer, x = repeated_layer(), torch.randn(ROWS, IN).bfloat16().requires_grad_()
    y = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    expected = layer(x)
    assert_same([y.detach(), dx], [expected.detach(), *torch.autograd.grad(expected.sum(), x)])


def test_an_error_names_the_kernel(launches, monkeypatch):
    layer = repeated_layer()
    monkeypatch.setattr(compiled_triton.Compiled, "error", ZeroDivisionError("no"))
    message = r"the kernel 'triton' failed in cast pair of bfloat16->float8_e4m3_tensor .*: no"
    with pytest.raises(RuntimeError, match=message):
        layer(torch.randn(ROWS, IN).bfloat16().requires_grad_())


def test_a_pass_without_memory_for_a_recording_runs(native, monkeypatch):
    asked = []

    def record(*args):
        asked.append(args)
        raise torch.OutOfMemoryError("recording")

    torch.manual_seed(0)
    expected = repeated_layer().weight.grad
    KINDS.clear()
    monkeypatch.setattr(recording, "record", record)
    torch.manual_seed(0)
    assert torch.equal(repeated_layer().weight.grad, expected) and asked


# ---------------------------------------------------------------------------------------------- memory and threads


def test_programs_hold_neither_weights_nor_activations(native):
    layer = repeated_layer()
    x = torch.randn(ROWS, IN).bfloat16().requires_grad_()
    y = layer(x)
    y.sum().backward()
    gone = [weakref.ref(t) for t in (layer.weight, layer.weight.high_precision, layer.weight.grad, x, y, x.grad)]
    gc.disable()
    try:
        del layer, x, y
        assert [ref() for ref in gone] == [None] * len(gone)
    finally:
        gc.enable()
    assert [kind.program is not None for kind in KINDS.values()] == [True, True]


def test_memory_is_freed_at_its_last_use(native):
    repeated_layer()
    _, backward = KINDS.values()
    lines = [line.strip() for line in backward.program.source.splitlines()]
    made = {name for line in lines if " = k" in line for name in re.findall(r"v\d+", line.split(" = ")[0])}
    freed = {name for line in lines if line.startswith("del ") for name in re.findall(r"v\d+", line)}
    assert len(made) > 4 and made - freed == made & set(re.findall(r"v\d+", lines[-1]))


def test_threads_share_programs(native, passes_run):
    recipe = Float8CurrentScaling()
    for _ in range(2):
        step(*tensors(), recipe)
    work = [tensors() for _ in range(4)]
    expected = [in_general(step, *args, recipe) for args in work]
    del passes_run[:]
    found = [None] * len(work)

    def run(i):
        found[i] = step(*work[i], recipe)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for mine, other in zip(found, expected, strict=True):
        assert_same(mine, other)
    assert passes_run == []
