"""``autocast``: which threads and tasks are inside, which functions it quantizes, and their results."""

import asyncio
import copy
import threading
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack

import mxtensor as mx
import mxtensor.te as te
from mxtensor.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from mxtensor.training.autocast import autocast_state, get_recipe
from tests.helpers.training_reference import check_step, products

MXFP8, MXFP6, E5M2 = MXFP8BlockScaling(), MXFP6BlockScaling(), MXFP8BlockScaling(fp8_format=Format.E5M2)
NEAREST = {
    "mxfp8": MXFP8,
    "mxfp4": MXFP4BlockScaling(stochastic_rounding=False),
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
    "float8 current": Float8CurrentScaling(),
    "float8 block": Float8BlockScaling(),
    "mixed": CustomRecipe("mxfp8", "mxfp6_e3m2", "mxint8"),
}


@pytest.fixture(autouse=True)
def nothing_stays():
    """Each test starts and ends outside any block."""
    torch._dynamo.reset()
    yield
    assert autocast_state() is None and not _get_current_function_mode_stack()


def active():
    return get_recipe()


def ops(fn):
    """The quantized products that ``fn`` runs."""
    with mx.explain() as log:
        fn()
    return products(log)


def leaf(*shape):
    return torch.randn(shape, requires_grad=True)


def step(fn, x, parameters, g, recipe=MXFP8):
    """Result and gradients of ``fn(x)``; the backward pass runs outside the block."""
    leaves = [x, *parameters]
    with mx.autocast(recipe is not None, recipe):
        y = fn(x)
    return (y.detach(), *torch.autograd.grad(y, leaves, g))


def same(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


# ---------------------------------------------------------------------------------------------- inside and outside


def test_the_default_recipe_is_mxfp8():
    with mx.autocast():
        assert active() == MXFP8
    assert active() is None


def test_the_inner_block_wins_and_the_outer_is_restored():
    with mx.autocast(recipe=MXFP8):
        with mx.autocast(recipe=MXFP6):
            assert active() is MXFP6
            with mx.autocast(enabled=False):
                assert active() is None
                with mx.autocast(recipe=E5M2):
                    assert active() is E5M2
                assert active() is None
            assert active() is MXFP6
        assert active() is MXFP8


def test_layers_run_by_the_innermost_block():
    layer, x = nn.Linear(64, 48), leaf(4, 64)
    results = {}
    with mx.autocast(recipe=MXFP8):
        results["outer"] = layer(x)
        with mx.autocast(recipe=E5M2):
            results["inner"] = layer(x)
        with mx.autocast(enabled=False):
            results["disabled"] = layer(x)
        assert torch.equal(layer(x), results["outer"])
    assert torch.equal(layer(x), results["disabled"])
    assert torch.equal(step(layer, x, list(layer.parameters()), torch.randn(4, 48), E5M2)[0], results["inner"])
    assert len({t.sum().item() for t in results.values()}) == 3


def test_a_disabled_block_runs_a_quantized_model_in_high_precision():
    plain = nn.Linear(64, 48)
    layer, x = mx.quantize_(copy.deepcopy(plain), MXFP8), torch.randn(4, 64)
    with mx.autocast(enabled=False):
        assert torch.equal(layer(x), plain(x))
        assert ops(lambda: layer(x)) == []
    assert not torch.equal(layer(x), plain(x))


def test_autocast_overrides_the_recipe_of_a_weight():
    plain = nn.Linear(64, 48)
    layer, x = mx.quantize_(copy.deepcopy(plain), MXFP8), torch.randn(4, 64)
    with mx.autocast(recipe=E5M2):
        assert torch.equal(layer(x), plain(x))


def test_an_exception_leaves_the_block():
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), mx.autocast(recipe=MXFP8), mx.autocast(recipe=MXFP6):
            raise error
        assert active() is None


def test_an_exception_inside_an_inner_block_leaves_the_outer_one():
    with mx.autocast(recipe=MXFP8):
        with pytest.raises(ZeroDivisionError), mx.autocast(recipe=MXFP6):
            _ = 1 / 0
        assert active() is MXFP8


WRONG = [
    *((wrong, "is not a recipe") for wrong in ("mxfp8", MXFP8BlockScaling, 3, Format.E4M3)),
    (MXFP8.linear_recipe(), "a LinearRecipe is for quantize_"),
]


@pytest.mark.parametrize(("wrong", "reason"), WRONG, ids=str)
def test_an_object_that_is_not_a_recipe_is_a_type_error(wrong, reason):
    with mx.autocast(recipe=MXFP6):
        with pytest.raises(TypeError, match=f"{reason}; pass an instance of a class of mxtensor.recipe"):
            mx.autocast(recipe=wrong)
        assert active() is MXFP6


def test_a_recipe_passed_as_enabled_is_a_type_error():
    """A recipe is true, so the default recipe would run."""
    with pytest.raises(TypeError, match="pass True or False, and the recipe as recipe="):
        mx.autocast(NVFP4BlockScaling())


def test_a_failed_entry_changes_nothing_and_the_next_one_works():
    recipe = MXFP8BlockScaling()
    block = mx.autocast(recipe=recipe)
    recipe.margin = 3
    with mx.autocast(recipe=MXFP6):
        for _ in range(2):
            with pytest.raises(ValueError, match="margin is 3"):
                block.__enter__()
            assert active() is MXFP6 and len(_get_current_function_mode_stack()) == 1
        recipe.margin = 0
        with block:
            assert active() is recipe
        assert active() is MXFP6


def test_as_a_decorator():
    @mx.autocast(recipe=MXFP6)
    def inside(depth=0):
        assert active() is MXFP6
        return inside(depth + 1) if depth < 3 else get_recipe()

    assert inside() is MXFP6 and active() is None
    with mx.autocast(recipe=MXFP8):
        assert inside() is MXFP6 and active() is MXFP8


def test_one_object_may_be_entered_several_times():
    block = mx.autocast(recipe=MXFP8)
    for _ in range(2):
        with block, mx.autocast(recipe=MXFP6), block:
            assert active() is MXFP8
            with mx.autocast(enabled=False), block:
                assert active() is MXFP8
    assert active() is None


# ---------------------------------------------------------------------------------------------- threads and tasks


def test_each_thread_has_its_own_state():
    seen, inside, done = {}, threading.Event(), threading.Event()

    def other(recipe):
        seen["before"] = active()
        with mx.autocast(recipe=recipe):
            inside.set()
            done.wait(10)
            seen["inside"] = active()
        seen["after"] = active()

    with mx.autocast(recipe=MXFP8):
        thread = threading.Thread(target=other, args=(MXFP6,))
        thread.start()
        inside.wait(10)
        assert active() is MXFP8
        done.set()
        thread.join()
        assert active() is MXFP8
    assert seen == {"before": None, "inside": MXFP6, "after": None}


def test_one_object_serves_two_threads_at_once():
    """They leave in the order in which they entered, and each restores its own outer state."""
    block, steps, seen = mx.autocast(recipe=MXFP8), threading.Barrier(2, timeout=10), []

    def other():
        with mx.autocast(recipe=MXFP6):
            steps.wait()  # 1: the main thread is inside
            with block:
                steps.wait()  # 2
                steps.wait()  # 3: the main thread has left
                seen.append(active())
            seen.append(active())

    thread = threading.Thread(target=other)
    thread.start()
    with mx.autocast(recipe=E5M2):
        with block:
            steps.wait()
            steps.wait()
        assert active() is E5M2
        steps.wait()
        thread.join()
    assert seen == [MXFP8, MXFP6]


def test_interleaved_tasks_have_their_own_recipes():
    """Two tasks in their own blocks and one outside; all await inside and leave in another order."""
    layer, x = nn.Linear(64, 48), torch.randn(4, 64)
    results, alone = {}, {}

    async def task(name, recipe, steps):
        with mx.autocast(recipe=recipe) if recipe is not None else nullcontext():
            for _ in range(steps):
                await asyncio.sleep(0)
                results.setdefault(name, []).append(layer(x))
                assert active() is recipe
        await asyncio.sleep(0)
        assert active() is None
        results[name].append(layer(x))

    async def main():
        await asyncio.gather(
            task("mxfp8", MXFP8, 2), task("e5m2", E5M2, 5), task("plain", None, 7), task("6", MXFP6, 3)
        )

    asyncio.run(main())
    for name, recipe in (("mxfp8", MXFP8), ("e5m2", E5M2), ("plain", None), ("6", MXFP6)):
        with mx.autocast(recipe is not None, recipe):
            alone[name] = layer(x)
        assert all(torch.equal(y, alone[name]) for y in results[name][:-1])
        assert torch.equal(results[name][-1], layer(x))
    assert len({y.sum().item() for y in alone.values()}) == 4


def test_a_task_started_inside_a_block_is_inside_until_the_block_is_left():
    layer, x, seen = nn.Linear(64, 48), torch.randn(4, 64), []

    async def child(gate):
        seen.append((active(), ops(lambda: layer(x))))
        await gate.wait()
        seen.append((active(), ops(lambda: layer(x))))

    async def main():
        gate = asyncio.Event()
        with mx.autocast(recipe=MXFP8):
            with mx.autocast(recipe=MXFP6):
                task = asyncio.create_task(child(gate))
                await asyncio.sleep(0)
            gate.set()
            await task
            outlives = asyncio.create_task(child(gate))
        await outlives

    asyncio.run(main())
    assert seen == [(MXFP6, ["fprop"]), (MXFP8, ["fprop"]), (None, []), (None, [])]


def test_a_thread_of_asyncio_is_outside_the_block():
    """The context is copied to it, but torch's modes, and torch.autocast, belong to one thread."""
    layer, x = nn.Linear(64, 48), torch.randn(4, 64)

    def other():
        before = active(), ops(lambda: layer(x))
        with mx.autocast(recipe=MXFP6):
            return before, (active(), ops(lambda: layer(x)))

    async def main():
        with mx.autocast(recipe=MXFP8):
            seen = await asyncio.to_thread(other)
            assert active() is MXFP8
            return seen

    assert asyncio.run(main()) == ((None, []), (MXFP6, ["fprop"]))


# ---------------------------------------------------------------------------------------------- linear layers


@pytest.mark.parametrize("recipe", NEAREST.values(), ids=NEAREST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_unmodified_linear_equals_the_reference(recipe, dtype):
    layer, x, g = (
        nn.Linear(70, 40).to(dtype),
        leaf(3, 11, 70).to(dtype).detach().requires_grad_(),
        torch.randn(3, 11, 40),
    )
    g = g.to(dtype)
    out = step(layer, x, [layer.weight, layer.bias], g, recipe)
    check_step(out, x, layer.weight, layer.bias, g, recipe.linear_recipe())


@pytest.mark.parametrize(
    "recipe",
    [*NEAREST.values(), NVFP4BlockScaling(), MXFP4BlockScaling(), DelayedScaling()],
    ids=lambda r: repr(r)[12:30],
)
def test_autocast_and_quantize_are_bitwise_identical(recipe):
    def model():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 32))

    plain, quantized = model(), mx.quantize_(model(), recipe)
    for _ in range(3):
        x, g = leaf(20, 64), torch.randn(20, 32)
        torch.manual_seed(5)
        a = step(plain, x, list(plain.parameters()), g, recipe)
        torch.manual_seed(5)
        y = quantized(x)
        assert same(a, (y.detach(), *torch.autograd.grad(y, [x, *quantized.parameters()], g)))


def test_the_backward_pass_is_quantized_outside_and_inside_and_under_another_recipe():
    layer, x, g = nn.Linear(64, 48), leaf(20, 64), torch.randn(20, 48)
    leaves = [x, *layer.parameters()]
    outside = step(layer, x, leaves[1:], g)
    for around in (mx.autocast(recipe=MXFP8), mx.autocast(recipe=MXFP6), mx.autocast(enabled=False)):
        with mx.autocast(recipe=MXFP8):
            y = layer(x)
        with around:
            assert same(outside[1:], torch.autograd.grad(y, leaves, g))


def test_two_forwards_before_their_backwards():
    layer, x, g = nn.Linear(64, 48), leaf(20, 64), torch.randn(20, 48)
    leaves = [x, *layer.parameters()]
    with mx.autocast(recipe=MXFP8):
        first = layer(x)
    with mx.autocast(recipe=E5M2):
        second = layer(x)
    assert same(torch.autograd.grad(second, leaves, g), step(layer, x, leaves[1:], g, E5M2)[1:])
    assert same(torch.autograd.grad(first, leaves, g), step(layer, x, leaves[1:], g, MXFP8)[1:])


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_inference_is_quantized(without):
    layer, x = nn.Linear(64, 48).eval(), torch.randn(4, 64)
    with mx.autocast(recipe=MXFP8):
        trained = layer(x).detach()
        with without():
            assert ops(lambda: layer(x)) == ["fprop"]
            assert torch.equal(layer(x), trained)


def test_torch_autocast_in_either_order():
    layer, x, g = nn.Linear(64, 48), leaf(20, 64), torch.randn(20, 48).bfloat16()
    leaves, results = [x, *layer.parameters()], []
    bf16 = torch.autocast("cpu", dtype=torch.bfloat16)
    for outer, inner in ((bf16, mx.autocast(recipe=MXFP8)), (mx.autocast(recipe=MXFP8), bf16)):
        with outer, inner:
            y = layer(x)
        results.append((y.detach(), *torch.autograd.grad(y, leaves, g)))
        assert y.dtype is torch.bfloat16
    assert same(*results)


F16 = torch.float16


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, F16)], ids=str)
def test_two_dtypes_are_a_value_error(dtypes):
    x, layer = torch.randn(4, 64, dtype=dtypes[0]), nn.Linear(64, 48, dtype=dtypes[1])
    with mx.autocast():
        with pytest.raises(ValueError, match=r"one dtype, got torch\.\w+ and torch\.\w+; convert one with .to\(\)"):
            layer(x)
        layer(x.to(dtypes[1]))


def test_integer_input_is_a_type_error():
    layer = nn.Linear(64, 48)
    with mx.autocast(), pytest.raises(TypeError, match="the input is int64"):
        layer(torch.ones(4, 64, dtype=torch.int64))


def test_frozen_tensors_need_no_products():
    layer, x, g = nn.Linear(64, 48), leaf(20, 64), torch.randn(20, 48)

    def run():
        with mx.autocast(recipe=MXFP8):
            y = layer(x)
        y.backward(g)

    assert ops(run) == ["fprop", "dgrad", "wgrad"]
    layer.weight.requires_grad_(False)
    assert ops(run) == ["fprop", "dgrad"]
    layer.weight.requires_grad_(True)
    x.requires_grad_(False)
    assert ops(run) == ["fprop", "wgrad"]


# ---------------------------------------------------------------------------------------------- spellings


def weight_and_bias():
    return nn.Parameter(torch.randn(64, 48) * 0.1), nn.Parameter(torch.randn(48))


SPELLINGS = {
    "F.linear": lambda x, w, b: F.linear(x, w.t(), b),
    "F.linear by name": lambda x, w, b: F.linear(input=x, weight=w.t(), bias=b),
    "torch.addmm": lambda x, w, b: torch.addmm(b, x, w),
    "torch.addmm by name": lambda x, w, b: torch.addmm(input=b, mat1=x, mat2=w),
    "Tensor.addmm": lambda x, w, b: b.addmm(x, w),
    "torch.mm": lambda x, w, b: torch.mm(x, w) + b,
    "torch.mm by name": lambda x, w, b: torch.mm(x, mat2=w) + b,
    "Tensor.mm": lambda x, w, b: x.mm(w) + b,
    "torch.matmul": lambda x, w, b: torch.matmul(x, w) + b,
    "torch.matmul by name": lambda x, w, b: torch.matmul(input=x, other=w) + b,
    "Tensor.matmul": lambda x, w, b: x.matmul(w) + b,
    "@": lambda x, w, b: x @ w + b,
}
"""All as one layer with a weight (in, out)."""


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_a_product_with_a_parameter_is_a_linear_layer(spelling):
    w, b = weight_and_bias()
    x, g = leaf(20, 64), torch.randn(20, 48)
    out = step(lambda x: spelling(x, w, b), x, [w, b], g)
    check_step((out[0], out[1], out[2].t(), out[3]), x, w.t(), b, g, MXFP8.linear_recipe())


@pytest.mark.parametrize("shape", [(2, 5, 64), (2, 3, 5, 64), (0, 64), (1, 64)], ids=str)
def test_matmul_takes_any_leading_dimensions(shape):
    w, _ = weight_and_bias()
    x, g = leaf(*shape), torch.randn(*shape[:-1], 48)
    y, dx, dw = step(lambda x: x @ w, x, [w], g)
    check_step((y, dx, dw.t(), None), x, w.t(), None, g, MXFP8.linear_recipe())


class Conv1D(nn.Module):
    """The linear layer of GPT-2 in transformers."""

    def __init__(self, n_out, n_in):
        super().__init__()
        self.nf, self.weight, self.bias = (
            n_out,
            nn.Parameter(torch.randn(n_in, n_out)),
            nn.Parameter(torch.randn(n_out)),
        )

    def forward(self, x):
        size_out = (*x.size()[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size_out)


def test_transformers_conv1d_is_a_linear_layer():
    layer, x, g = Conv1D(48, 64), leaf(2, 10, 64), torch.randn(2, 10, 48)
    y, dx, dw, db = step(layer, x, [layer.weight, layer.bias], g)
    check_step((y, dx, dw.t(), db), x, layer.weight.t(), layer.bias, g, MXFP8.linear_recipe())
    mx.quantize_(layer, MXFP8)
    y2 = layer(x)
    assert same((y, dx, dw, db), (y2.detach(), *torch.autograd.grad(y2, [x, layer.weight, layer.bias], g)))


def plain_calls():
    w, b, x = nn.Parameter(torch.randn(64, 48)), nn.Parameter(torch.randn(48)), torch.randn(20, 64)
    table, square = nn.Embedding(9, 64), nn.Bilinear(64, 64, 3)
    filters, matrix = torch.randn(4, 20, 3), torch.randn(20, 48)
    return {
        "einsum": lambda: torch.einsum("mk,kn->mn", x, w),
        "bilinear": lambda: square(x, x),
        "activations": lambda: x @ x.t(),
        "a parameter on the left": lambda: w.t() @ x.t(),
        "a vector": lambda: x[0] @ w,
        "a vector of weights": lambda: F.linear(x, w[:, 0]),
        "a vector of weights for a vector": lambda: F.linear(x[0], w[:, 0]),
        "alpha": lambda: torch.addmm(b, x, w, alpha=2),
        "beta": lambda: torch.addmm(b, x, w, beta=0.5),
        "a matrix for a bias": lambda: torch.addmm(matrix, x, w),
        "bmm": lambda: torch.bmm(x[None], w[None]),
        "embedding": lambda: table(torch.arange(9)),
        "convolution": lambda: F.conv1d(x[None], filters),
        "attention": lambda: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    }


@pytest.mark.parametrize("name", plain_calls())
def test_everything_else_stays_in_high_precision(name):
    call = plain_calls()[name]
    expected = call()
    with mx.autocast():
        assert ops(call) == [] and torch.equal(call(), expected)


def test_an_out_argument_is_filled_in_high_precision():
    w, _ = weight_and_bias()
    x, out = torch.randn(20, 64), torch.full((20, 48), torch.nan)
    with mx.autocast(), torch.no_grad():
        torch.mm(x, w, out=out)
    assert torch.equal(out, x @ w.detach())


# ---------------------------------------------------------------------------------------------- attention


def attention_by_hand(q, k, v, w, b, out, heads, linear):
    """Multi-head attention (batch, time, features) over any ``linear``."""
    e = q.shape[-1]
    ws, bs = w.split(e), b.split(e)
    q, k, v = (linear(t, wi, bi) for t, wi, bi in zip((q, k, v), ws, bs, strict=True))
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    return linear(y, out.weight, out.bias)


def test_projections_of_attention_are_quantized_and_its_own_products_are_not():
    mha = nn.MultiheadAttention(64, 4, batch_first=True)
    x, g = leaf(2, 10, 64), torch.randn(2, 10, 64)
    leaves = [mha.in_proj_weight, mha.in_proj_bias, mha.out_proj.weight, mha.out_proj.bias]
    mine = step(lambda x: mha(x, x, x, need_weights=False)[0], x, leaves, g)

    def linear(x, w, b):
        with mx.autocast(recipe=MXFP8):
            return F.linear(x, w, b)

    y = attention_by_hand(x, x, x, *leaves[:2], mha.out_proj, 4, linear)
    theirs = (y.detach(), *torch.autograd.grad(y, [x, *leaves], g))
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(mine, theirs, strict=True))


def attention(kind):
    """(module, call of x) of a kind of attention."""
    options = {"kdim": 32, "vdim": 16} if kind == "other sizes" else {}
    mha = nn.MultiheadAttention(64, 4, batch_first=True, **options)
    memory, other = torch.randn(2, 7, 64), (torch.randn(2, 7, 32), torch.randn(2, 7, 16))
    calls = {
        "self": lambda x: mha(x, x, x, need_weights=False)[0],
        "self with weights": lambda x: mha(x, x, x)[0],
        "cross": lambda x: mha(x, memory, memory, need_weights=False)[0],
        "three": lambda x: mha(x, memory, memory + 1, need_weights=False)[0],
        "other sizes": lambda x: mha(x, *other, need_weights=False)[0],
    }
    return mha, calls[kind]


KINDS = {"self": 2, "self with weights": 2, "cross": 3, "three": 4, "other sizes": 4}
"""Kind of attention -> its linear layers: torch projects what it can together."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["autocast", "quantize_"])
def test_every_kind_of_attention_is_quantized(kind, way):
    mha, call = attention(kind)
    x, g = leaf(2, 10, 64), torch.randn(2, 10, 64)
    if way == "quantize_":
        mx.quantize_(mha, MXFP8)

    def run():
        with mx.autocast(recipe=MXFP8) if way == "autocast" else nullcontext():
            y = call(x)
        y.backward(g)

    counts = ops(run)
    assert counts.count("fprop") == counts.count("wgrad") == KINDS[kind]
    in_dgrad = {"self": 2, "self with weights": 2, "cross": 2, "three": 2, "other sizes": 2}
    assert counts.count("dgrad") == in_dgrad[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_attention_under_quantize_equals_that_under_autocast(kind):
    mha, call = attention(kind)
    x, g = leaf(2, 10, 64), torch.randn(2, 10, 64)
    a = step(call, x, list(mha.parameters()), g)
    mx.quantize_(mha, MXFP8)
    y = call(x)
    assert same(a, (y.detach(), *torch.autograd.grad(y, [x, *mha.parameters()], g)))


@pytest.mark.parametrize("make", [lambda: nn.MultiheadAttention(64, 4, batch_first=True),
                                  lambda: nn.TransformerEncoderLayer(64, 4, 96, batch_first=True)])  # fmt: skip
@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("way", ["autocast", "quantize_"])
def test_torchs_fast_path_for_inference_is_not_used(make, without, way):
    module, x = make().eval(), torch.randn(2, 10, 64)
    call = (lambda: module(x)) if isinstance(module, nn.TransformerEncoderLayer) else (lambda: module(x, x, x)[0])
    if way == "quantize_":
        mx.quantize_(module, MXFP8)
    with without(), mx.autocast(recipe=MXFP8) if way == "autocast" else nullcontext():
        y = call()
        assert ops(call) == ["fprop"] * (4 if isinstance(module, nn.TransformerEncoderLayer) else 2)
    with mx.autocast(recipe=MXFP8) if way == "autocast" else nullcontext():
        assert torch.allclose(call(), y, atol=1e-5)


def test_a_whole_encoder_in_evaluation():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 96, batch_first=True), 2).eval()
    x, mask = torch.randn(2, 10, 64), torch.zeros(2, 10, dtype=torch.bool)
    mask[:, 7:] = True
    with torch.no_grad(), mx.autocast():
        assert ops(lambda: encoder(x, src_key_padding_mask=mask)) == ["fprop"] * 8


@pytest.mark.parametrize("layer, count", [(nn.TransformerEncoderLayer, 4), (nn.TransformerDecoderLayer, 7)])
def test_transformer_layers_train(layer, count):
    module, x, g = layer(64, 4, 96, dropout=0.0, batch_first=True), leaf(2, 10, 64), torch.randn(2, 10, 64)
    more = (leaf(2, 6, 64),) if layer is nn.TransformerDecoderLayer else ()

    def run():
        with mx.autocast(recipe=MXFP8):
            y = module(x, *more)
        y.backward(g)

    counts = ops(run)
    assert [counts.count(op) for op in ("fprop", "dgrad", "wgrad")] == [count] * 3


# ---------------------------------------------------------------------------------------------- quantized weights


def test_a_quantized_weight_in_the_format_of_the_recipe_is_used_as_it_is():
    layer, x = nn.Linear(64, 48), torch.randn(4, 64)
    with mx.autocast(recipe=MXFP8):
        expected = layer(x)
    operands = mx.quantize_(layer, "mxfp8")
    with mx.autocast(recipe=MXFP8):
        assert torch.equal(operands(x), expected)
    with mx.autocast(enabled=False):
        assert operands(x).shape == (4, 48)


@pytest.mark.parametrize("recipe", [MXFP6, DelayedScaling(), NVFP4BlockScaling(), CustomRecipe(weight=None)], ids=repr)
def test_a_quantized_weight_of_another_format_is_a_recipe_mismatch(recipe):
    layer, x = mx.quantize_(nn.Linear(64, 48), "mxfp8"), torch.randn(4, 64)
    before = layer(x)
    with mx.autocast(recipe=recipe):
        with pytest.raises(
            RuntimeError, match=r"Recipe mismatch for a weight of shape \(48, 64\).*mxfp8_e4m3.*"
        ) as error:
            layer(x)
        assert type(recipe).__name__ in str(error.value) and "use the recipe" in str(error.value)
        assert active() is recipe
    assert torch.equal(layer(x), before)


def test_a_weight_with_a_columnwise_copy_only_is_an_error():
    w = nn.Parameter(mx.quantize(torch.randn(64, 48), "mxfp8"), requires_grad=False)
    both = nn.Parameter(mx.quantize(torch.randn(64, 48), "mxfp8", orientation="both"), requires_grad=False)
    with mx.autocast():
        with pytest.raises(ValueError, match=r"\(48, 64\) has no copy blocked along in_features.*orientation='both'"):
            torch.randn(4, 64) @ w
        assert ops(lambda: torch.randn(4, 64) @ both) == ["fprop"]


# ---------------------------------------------------------------------------------------------- compiled

EAGER = dict(fullgraph=True, backend="aot_eager")


def model():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32))
    with torch.no_grad():
        net[0].weight.mul_(torch.randn_like(net[0].weight).exp())  # blocks and tiles differ
    return net


def check_compiled(fn, compiled, x, parameters, g, **around):
    assert same(step(fn, x, parameters, g, **around), step(compiled, x, parameters, g, **around))


def test_compiled_inside_the_block():
    net, x, g = model(), leaf(8, 64), torch.randn(8, 32)
    check_compiled(net, torch.compile(net, **EAGER), x, list(net.parameters()), g)


@pytest.mark.exhaustive
def test_compiled_with_the_block_inside():
    net, x, g, recipe = model(), leaf(8, 64), torch.randn(8, 32), MXFP8BlockScaling(fp8_format=Format.HYBRID)

    def fn(x):
        with mx.autocast(recipe=recipe):
            x = net[0](x)
            with mx.autocast(enabled=False):
                x = net[1](x) @ torch.eye(48)
            return net[2](x)

    check_compiled(fn, torch.compile(fn, **EAGER), x, list(net.parameters()), g, recipe=None)
    assert ops(lambda: fn(x)) == ["fprop"] * 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["autocast", "quantize_"])
def test_a_compiled_model_follows_changes_of_the_recipe(way):
    net, x, g = model(), leaf(8, 64), torch.randn(8, 32)
    if way == "quantize_":
        mx.quantize_(net, MXFP6)
    compiled, recipe, seen = torch.compile(net, **EAGER), MXFP8BlockScaling(), []

    def check(recipe=recipe):
        check_compiled(net, compiled, x, list(net.parameters()), g, recipe=recipe)
        with mx.autocast(recipe is not None, recipe):
            seen.append(compiled(x).sum().item())

    check()
    recipe.fp8_format = Format.E5M2
    check()
    recipe.fp8_format = Format.E4M3
    check()
    recipe.weight_scaling = "floor"
    check()
    check(Float8CurrentScaling())
    check(None)
    assert torch.equal(compiled(x), net(x))
    assert seen[0] == seen[2] and len(set(seen)) == 5


def test_a_graph_break_inside_the_block_leaves_it_active():
    net, x, g = model(), leaf(8, 64), torch.randn(8, 32)

    def fn(x):
        with mx.autocast(recipe=MXFP8):
            x = net[0](x)
            torch._dynamo.graph_break()
            return net[2](net[1](x))

    check_compiled(fn, torch.compile(fn, backend="aot_eager"), x, list(net.parameters()), g, recipe=None)
    assert autocast_state() is None


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_an_exported_program_trains_quantized(compiled):
    net, x, g = model(), leaf(8, 64), torch.randn(8, 32)
    program = torch.export.export(net, (x.detach(),)).module()
    names = [name for name, _ in net.named_parameters()]
    call = torch.compile(program, backend="aot_eager") if compiled else program
    expected = step(net, x, list(net.parameters()), g)
    assert same(step(call, x, [program.get_parameter(name) for name in names], g), expected)


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("kind", ["self", "cross"])
@pytest.mark.parametrize("way", ["autocast", "quantize_"])
def test_compiled_attention(kind, way):
    mha, call = attention(kind)
    if way == "quantize_":
        mx.quantize_(mha, MXFP8)
    x, g = leaf(2, 10, 64), torch.randn(2, 10, 64)
    recipe = MXFP8 if way == "autocast" else None
    around = nullcontext if way == "quantize_" else lambda: mx.autocast(recipe=recipe)
    results = []
    for fn in (call, torch.compile(call, **EAGER)):
        with around():
            y = fn(x)
        results.append((y.detach(), *torch.autograd.grad(y, [x, *mha.parameters()], g)))
    assert same(*results)
    with around():
        assert "fprop" in ops(lambda: call(x))


@pytest.mark.exhaustive
def test_compiled_products_with_parameters():
    w, b = weight_and_bias()
    x, g = leaf(20, 64), torch.randn(20, 48)

    def fn(x):
        return torch.addmm(b, x, w) + x @ w

    check_compiled(fn, torch.compile(fn, **EAGER), x, [w, b], g)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # from inductor
def test_compiled_by_inductor():
    layer, x, g = nn.Linear(64, 48), leaf(20, 64), torch.randn(20, 48)
    out = step(torch.compile(layer, fullgraph=True), x, [layer.weight, layer.bias], g)
    check_step(out, x, layer.weight, layer.bias, g, MXFP8.linear_recipe())


@pytest.mark.parametrize("block", [mx.autocast, te.quantized_model_init])
def test_a_name_passed_as_enabled_is_a_type_error(block):
    with pytest.raises(TypeError, match="enabled is 'nvfp4'"):
        block("nvfp4")
