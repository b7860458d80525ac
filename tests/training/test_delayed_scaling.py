"""Delayed scaling: every scale of a layer follows from the amax of earlier steps, computed here by hand."""

import copy
import itertools
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mxtensor as mx
from mxtensor.recipe import DelayedScaling, Float8CurrentScaling, Format, MXFP8BlockScaling
from mxtensor.training.delayed_scaling import DelayedState
from mxtensor.training.interception import STATE, delayed_state
from mxtensor.training.training_weight import TrainingWeight
from tests.helpers.compare import relative_error

MAXIMA = torch.tensor([448.0, 448.0, 57344.0])  # E4M3 input and weight, E5M2 gradient


def state_of(layer):
    return getattr(layer.weight, STATE)


def step(layer, x, g, recipe, **options):
    with mx.autocast(recipe=recipe, **options):
        y = layer(x)
    y.backward(g)
    return y.detach()


def sized(*amaxes):
    """(x, g) with these largest magnitudes."""
    x, g = torch.randn(20, 64), torch.randn(20, 48)
    return [t / t.abs().max() * a for t, a in zip((x, g), amaxes, strict=True)]


SEQUENCE = [(2.0, 0.5), (8.0, 0.25), (1.0, 4.0), (4.0, 1.0), (0.5, 2.0)]
"""The amax of x and g in each step."""


def expected_amaxes(recipe, weight_amax):
    """The amax that makes the scales of each step of SEQUENCE, by hand: (input, weight, grad)."""
    first = MAXIMA.tolist()
    for i in range(len(SEQUENCE)):
        seen = [(x, weight_amax, g) for x, g in SEQUENCE[:i]][-recipe.amax_history_len :]
        if not seen:
            yield torch.tensor(first)
            continue
        pick = max if recipe.amax_compute_algo == "max" else (lambda column: column[-1])
        yield torch.tensor([pick(column) * 2.0**recipe.margin for column in zip(*seen, strict=True)])


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 3, 16])
@pytest.mark.parametrize("margin", [0, 2])
def test_scales_follow_the_history(algo, length, margin):
    recipe, layer = DelayedScaling(margin, amax_history_len=length, amax_compute_algo=algo), nn.Linear(64, 48)
    weight_amax = layer.weight.detach().abs().max().item()
    for (x_amax, g_amax), amaxes in zip(SEQUENCE, expected_amaxes(recipe, weight_amax), strict=True):
        x, g = sized(x_amax, g_amax)
        step(layer, x, g, recipe)
        state = state_of(layer)
        torch.testing.assert_close(state.amax, amaxes, rtol=1e-6, atol=0)
        torch.testing.assert_close(state.scale, MAXIMA / amaxes, rtol=1e-6, atol=0)
        torch.testing.assert_close(state.record, torch.tensor([x_amax, weight_amax, g_amax]), rtol=1e-6, atol=0)
        assert state.history.shape == (length, 3)


def quantized(t, amax, maximum, dtype):
    """``t`` fake-quantized with this scale: in float64 except for the rounding."""
    scale = maximum / amax
    return (t.double() * scale).clamp(-maximum, maximum).to(dtype).double() / scale


def test_the_products_use_these_scales():
    """Values beyond the amax of the last step saturate."""
    recipe, layer = DelayedScaling(), nn.Linear(64, 48, bias=False)
    w = layer.weight.detach()
    step(layer, *sized(2.0, 0.5), recipe)
    x, g = sized(8.0, 4.0)
    layer.zero_grad()
    x.requires_grad_()
    y = step(layer, x, g, recipe)
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    x_q, g_q = quantized(x.detach(), 2.0, 448.0, e4m3), quantized(g, 0.5, 57344.0, e5m2)
    w_q = quantized(w, w.abs().max().item(), 448.0, e4m3)
    assert x_q.abs().max() == 2.0 and g_q.abs().max() == 0.5
    for mine, exact in ((y, x_q @ w_q.T), (x.grad, g_q @ w_q), (layer.weight.grad, g_q.T @ x_q)):
        assert relative_error(mine, exact) < 2e-6


def test_the_first_step_has_scale_one():
    layer = nn.Linear(64, 48, bias=False)
    x, g = sized(2.0, 0.5)
    y = step(layer, x, g, DelayedScaling())
    assert state_of(layer).scale.tolist() == [1, 1, 1]
    x_q, w_q = (quantized(t, 448.0, 448.0, torch.float8_e4m3fn) for t in (x, layer.weight.detach()))
    assert relative_error(y, x_q @ w_q.T) < 2e-6


def test_amax_and_scale_may_be_functions():
    """amax_compute_algo(history, newest first); scaling_factor_compute_algo(amax, scale, fp8_max, recipe)."""
    histories, calls = [], []

    def mean(history):
        histories.append(history.clone())
        return history[:2].mean()

    def power_of_two(amax, scale, fp8_max, recipe):
        calls.append((amax.item(), scale.item(), fp8_max.item(), recipe.margin))
        return torch.exp2(torch.floor(torch.log2(fp8_max / amax)) - recipe.margin)

    recipe, layer = (
        DelayedScaling(1, amax_compute_algo=mean, scaling_factor_compute_algo=power_of_two),
        nn.Linear(64, 48),
    )
    for amaxes in ((2.0, 0.5), (8.0, 0.25), (1.0, 1.0)):
        step(layer, *sized(*amaxes), recipe)
    assert histories[-3][:3].tolist() == pytest.approx([8.0, 2.0, 0.0])  # of x
    assert state_of(layer).scale[0].item() == 2.0 ** (6 - 1)  # 448 / 5 is 89.6
    assert calls[-3] == pytest.approx((5.0, 2.0**7, 448.0, 1))  # 448 / 1, the mean of 2 and 0, halved by the margin


@pytest.mark.parametrize("bad", [0.0, float("inf"), float("nan")])
def test_without_a_usable_amax_the_last_scale_stays(bad):
    recipe, layer = DelayedScaling(amax_compute_algo="most_recent"), nn.Linear(64, 48)
    step(layer, *sized(2.0, 0.5), recipe)
    step(layer, *sized(2.0, 0.5), recipe)
    before = state_of(layer).amax.clone()
    step(layer, torch.full((20, 64), bad), torch.full((20, 48), bad), recipe)
    step(layer, *sized(8.0, 4.0), recipe)
    torch.testing.assert_close(state_of(layer).amax, before)
    step(layer, *sized(1.0, 1.0), recipe)
    assert state_of(layer).amax[[0, 2]].tolist() == pytest.approx([8.0, 4.0])


def test_a_tiny_amax_gives_finite_results():
    recipe, layer = DelayedScaling(amax_compute_algo="most_recent"), nn.Linear(64, 48)
    for _ in range(3):
        y = step(layer, *sized(1e-42, 1e-42), recipe)
    assert y.isfinite().all() and layer.weight.grad.isfinite().all()


def test_two_forwards_before_a_backward_record_both():
    recipe, layer = DelayedScaling(), nn.Linear(64, 48)
    (small, g), (large, h) = sized(1.0, 2.0), sized(4.0, 8.0)
    with mx.autocast(recipe=recipe):
        first, second = layer(small), layer(large)
    assert state_of(layer).history[0, 0].item() == pytest.approx(1.0)
    second.backward(h)
    first.backward(g)
    assert state_of(layer).record[[0, 2]].tolist() == pytest.approx([4.0, 8.0])


# ---------------------------------------------------------------------------------------------- what is not a step


def snapshot(state):
    return [t.clone() for t in state.state_dict().values()]


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_evaluation_uses_the_scales_and_records_nothing(without):
    recipe, layer = DelayedScaling(), nn.Linear(64, 48)
    for amaxes in SEQUENCE:
        step(layer, *sized(*amaxes), recipe)
    before = snapshot(state_of(layer))
    x = sized(100.0, 1.0)[0]
    with without(), mx.autocast(recipe=recipe):
        y = layer(x)
    assert all(map(torch.equal, before, snapshot(state_of(layer))))
    x_q = quantized(x, 8.0, 448.0, torch.float8_e4m3fn)
    w_q = quantized(layer.weight.detach(), layer.weight.abs().max().item(), 448.0, torch.float8_e4m3fn)
    assert relative_error(y - layer.bias, x_q @ w_q.T) < 1e-5


def test_training_continues_after_a_first_pass_in_inference_mode():
    recipe, layer = DelayedScaling(), nn.Linear(64, 48)
    with torch.inference_mode(), mx.autocast(recipe=recipe):
        layer(torch.randn(4, 64))
    for amaxes in SEQUENCE:
        step(layer, *sized(*amaxes), recipe)
    assert state_of(layer).amax[0].item() == pytest.approx(8.0)


# ---------------------------------------------------------------------------------------------- whose state it is


def test_another_recipe_makes_a_new_state_and_an_equal_recipe_does_not():
    layer = nn.Linear(64, 48)
    recipe = DelayedScaling(amax_history_len=4)
    step(layer, *sized(2.0, 2.0), recipe)
    first = state_of(layer)
    step(layer, *sized(2.0, 2.0), DelayedScaling(amax_history_len=4))
    step(layer, *sized(2.0, 2.0), MXFP8BlockScaling())
    step(layer, *sized(2.0, 2.0), recipe)
    assert state_of(layer) is first and first.history.count_nonzero() == 6
    for name, value in (("amax_history_len", 2), ("margin", 1), ("fp8_format", Format.E4M3), ("reduce_amax", False)):
        before = state_of(layer)
        setattr(recipe, name, value)
        step(layer, *sized(2.0, 2.0), recipe)
        maxima = torch.tensor([448.0, 448.0, 448.0 if name in ("fp8_format", "reduce_amax") else 57344.0])
        amaxes = torch.tensor([2.0, layer.weight.detach().abs().max(), 2.0]) * 2.0**recipe.margin
        assert state_of(layer) is not before and torch.equal(state_of(layer).scale, maxima / amaxes)
        assert len(state_of(layer).history) == recipe.amax_history_len


class Products(nn.Module):
    """A weight (in, out), as in the Conv1D of transformers."""

    def __init__(self, call):
        super().__init__()
        self.weight, self.call = nn.Parameter(torch.randn(64, 48)), call

    def forward(self, x):
        return self.call(x, self.weight)


@pytest.mark.parametrize("way", ["autocast", "quantize_"])
@pytest.mark.parametrize(
    "call",
    [lambda x, w: x @ w, lambda x, w: torch.addmm(torch.zeros(48), x, w), lambda x, w: nn.functional.linear(x, w.t())],
)
def test_a_transposed_weight_has_one_history(call, way):
    layer, recipe = Products(call), DelayedScaling()
    if way == "quantize_":
        layer.weight = nn.Parameter(TrainingWeight(layer.weight.detach(), recipe.linear_recipe()))
    for amaxes in SEQUENCE:
        x, g = sized(*amaxes)
        with mx.autocast(recipe=recipe):
            layer(x).backward(g)
    assert state_of(layer).amax[[0, 2]].tolist() == pytest.approx([8.0, 4.0])


@pytest.mark.parametrize("way", ["autocast", "quantize_"])
def test_slices_of_a_weight_have_their_own_histories(way):
    """Cross attention splits its one input projection into two layers."""
    mha, recipe = nn.MultiheadAttention(64, 4, batch_first=True), DelayedScaling()
    if way == "quantize_":
        mx.quantize_(mha, recipe)
    for size in (1.0, 2.0, 1.0):
        x, memory = torch.randn(2, 5, 64), torch.randn(2, 7, 64)
        x, memory = size * x / x.abs().max(), 10 * size * memory / memory.abs().max()
        with mx.autocast(recipe=recipe):
            y = mha(x, memory, memory, need_weights=False)[0]
        y.backward(torch.randn_like(y))
    query, rest = (delayed_state(part, recipe.linear_recipe()) for part in mha.in_proj_weight.split([64, 128]))
    assert [query.amax[0].item(), rest.amax[0].item()] == pytest.approx([2.0, 20.0])


def test_a_weight_that_is_computed_in_each_step_is_an_error():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(64, 48))
    x = torch.randn(4, 64)
    with (
        mx.autocast(recipe=DelayedScaling()),
        pytest.raises(RuntimeError, match=r"\(48, 64\) is computed in each step.*Float8Cur"),
    ):
        layer(x)
    with mx.autocast(recipe=Float8CurrentScaling()):
        layer(x)


def test_two_layers_of_one_weight_share_a_state():
    a, b = nn.Linear(64, 48), nn.Linear(64, 48)
    b.weight = a.weight
    mx.quantize_(nn.ModuleList([a, b]), DelayedScaling())
    a(sized(2.0, 1.0)[0])
    b(sized(8.0, 1.0)[0])
    assert state_of(a) is state_of(b) and state_of(a).history[0, 0].item() == pytest.approx(2.0)


def trained(layer, recipe=None):
    for amaxes in SEQUENCE:
        x, g = sized(*amaxes)
        layer(x).backward(g)
    return layer


def test_copies_of_a_quantized_layer_copy_the_history():
    layer = trained(mx.quantize_(nn.Sequential(nn.Linear(64, 48)), DelayedScaling(amax_history_len=4)))[0]
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert all(map(torch.equal, snapshot(state_of(twin)), snapshot(state_of(layer))))
        before = snapshot(state_of(layer))
        twin(torch.randn(4, 64)).backward(torch.randn(4, 48))
        assert all(map(torch.equal, before, snapshot(state_of(layer))))
        assert not torch.equal(state_of(twin).history, state_of(layer).history)


@pytest.mark.parametrize("to", [torch.bfloat16, "meta"], ids=str)
@pytest.mark.parametrize("way", ["autocast", "quantize_"])
def test_the_history_moves_with_the_layer(to, way):
    layer, recipe = nn.Sequential(nn.Linear(64, 48)), DelayedScaling()
    if way == "quantize_":
        mx.quantize_(layer, recipe)
    with mx.autocast(recipe=recipe):
        trained(layer)
    before = snapshot(state_of(layer[0]))
    layer.to(to)
    state = delayed_state(layer[0].weight, recipe.linear_recipe())
    assert state.amax.device == layer[0].weight.device
    if to != "meta":
        assert all(map(torch.equal, before, snapshot(state)))


# ---------------------------------------------------------------------------------------------- saved and loaded


def test_saving_and_loading_continues_the_history():
    recipe = DelayedScaling(amax_history_len=4)
    linear_recipe = recipe.linear_recipe()
    layer = trained(mx.quantize_(nn.Sequential(nn.Linear(64, 48)), recipe))[0]
    saved = copy.deepcopy(state_of(layer).state_dict())
    assert {name: tuple(t.shape) for name, t in saved.items()} == {"history": (4, 3), "record": (3,), "amax": (3,)}
    restored = DelayedState(linear_recipe, torch.device("cpu"))
    restored.load_state_dict(saved)
    for mine, theirs in zip(restored.step()[:2], state_of(layer).step()[:2], strict=True):
        assert torch.equal(mine, theirs)


def test_loading_copies_the_tensors():
    linear_recipe = DelayedScaling(amax_history_len=4).linear_recipe()
    saved = {"history": torch.rand(4, 3), "record": torch.rand(3), "amax": torch.rand(3)}
    before = copy.deepcopy(saved)
    states = [DelayedState(linear_recipe, torch.device("cpu")) for _ in range(2)]
    for state in states:
        state.load_state_dict(saved)
    states[0].step()
    assert all(torch.equal(saved[name], before[name]) for name in saved)
    assert torch.equal(states[1].record, before["record"])


def test_a_history_of_another_length_is_an_error_that_changes_nothing():
    state = DelayedState(DelayedScaling(amax_history_len=4).linear_recipe(), torch.device("cpu"))
    other = DelayedState(DelayedScaling(amax_history_len=8).linear_recipe(), torch.device("cpu"))
    other.record += 5
    with pytest.raises(ValueError, match=r"amax history is \(8, 3\), the recipe's \(4, 3\); use amax_history_len=8"):
        state.load_state_dict(other.state_dict())
    assert state.record.count_nonzero() == 0


# ---------------------------------------------------------------------------------------------- shared by processes


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("reduce", [True, False])
def test_a_group_takes_the_largest_amax(group, reduce, monkeypatch):
    seen = []

    def all_reduce(t, op, group):
        seen.append(op)
        t.mul_(2)  # as if another process had recorded twice the amax

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    recipe, layer = DelayedScaling(reduce_amax=reduce), nn.Linear(64, 48)
    for _ in range(2):
        step(layer, *sized(2.0, 0.5), recipe, amax_reduction_group=group)
    assert state_of(layer).amax[0].item() == pytest.approx(4.0 if reduce else 2.0)
    assert seen == [dist.ReduceOp.MAX] * (2 if reduce else 0)


def test_a_group_of_one_process_changes_nothing(group):
    results = []
    for options in ({}, {"amax_reduction_group": group}):
        torch.manual_seed(0)
        layer, recipe = nn.Linear(64, 48), DelayedScaling()
        for amaxes in SEQUENCE:
            y = step(layer, *sized(*amaxes), recipe, **options)
        results.append([y, layer.weight.grad, *snapshot(state_of(layer))])
    assert all(map(torch.equal, *results))


# ---------------------------------------------------------------------------------------------- compiled


@pytest.mark.exhaustive
@pytest.mark.parametrize("length, algo", list(itertools.product([1, 3], ["max", "most_recent"])))
def test_compiled_steps_equal_eager_steps(length, algo):
    """The first step is eager and creates the states."""
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        torch.manual_seed(4)
        net, recipe = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48)), DelayedScaling()
        recipe.amax_history_len, recipe.amax_compute_algo = length, algo
        step(net, *sized(1.0, 1.0), recipe)
        fn, out = torch.compile(net, fullgraph=True, backend="aot_eager") if compiled else net, []
        for amaxes in SEQUENCE:
            x, g = sized(*amaxes)
            net.zero_grad()
            y = step(fn, x.requires_grad_(), g, recipe)
            out += [y, x.grad, *(p.grad for p in net.parameters())]
            out += [*snapshot(state_of(net[0])), *snapshot(state_of(net[2]))]
        results.append(out)
    assert all(map(torch.equal, *results))


def test_compiled_products_record_their_history():
    torch._dynamo.reset()
    layer, recipe = Products(lambda x, w: x @ w), DelayedScaling()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for i, amaxes in enumerate(SEQUENCE):
        x, g = sized(*amaxes)
        with mx.autocast(recipe=recipe):
            (layer if i == 0 else compiled)(x).backward(g)
    assert state_of(layer).amax[[0, 2]].tolist() == pytest.approx([8.0, 4.0])


@pytest.mark.parametrize("way", ["autocast", "quantize_"])
def test_a_compiled_first_step_asks_for_an_eager_step(way):
    torch._dynamo.reset()
    layer, recipe = nn.Sequential(nn.Linear(64, 48)), DelayedScaling()
    if way == "quantize_":
        mx.quantize_(layer, recipe)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="run one step in eager mode before compiling"):
        if way == "quantize_":
            compiled(torch.randn(4, 64))
        else:
            with mx.autocast(recipe=recipe):
                compiled(torch.randn(4, 64))
