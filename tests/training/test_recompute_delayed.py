"""Activation recomputation with delayed scaling: each recomputation starts from the history of its own first pass.

Results, gradients and histories are compared bit for bit with those of the same steps without checkpoints.
"""

import copy
import functools
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import mxtensor as mx
import mxtensor.te as te
from mxtensor.recipe import DelayedScaling
from mxtensor.training import recompute
from mxtensor.training.delayed_scaling import STATE, delayed_states

WAYS = {
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "not reentrant": functools.partial(checkpoint, use_reentrant=False),
    "without early stop": functools.partial(checkpoint, use_reentrant=False, early_stop=False),
}
ways = pytest.mark.parametrize("checkpointed", WAYS.values(), ids=WAYS)
both = pytest.mark.parametrize("checkpointed", [*WAYS.values()][:2], ids=[*WAYS][:2])
not_reentrant = WAYS["not reentrant"]


def recipe(**options):
    return DelayedScaling(**{"amax_history_len": 2, **options})


class Net(nn.Module):
    """Layers with biases, one of them used twice in a pass, which is a step each time."""

    def __init__(self):
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(64, 48), nn.Linear(48, 48), nn.Linear(48, 32)

    def forward(self, x):
        h = self.twice(self.first(x).relu())
        return self.last(self.twice(4 * h).tanh())


def net(make=Net):
    torch.manual_seed(1)
    return make()


def histories(model):
    states = [s for _, p in sorted(model.named_parameters()) for s in delayed_states(p).values()]
    states += [p.delayed for m in model.modules() for p in getattr(m, "_products", ())]
    return [t.clone() for state in states for t in state.state_dict().values()]


def data(step, i):
    generator = torch.Generator().manual_seed(10 * step + i)
    x, g = torch.randn(12, 64, generator=generator), torch.randn(12, 32, generator=generator)
    return (2.0 ** (step + 3 * i) * x).requires_grad_(), g / 2.0 ** (step + i)


def train(model, fn, active, order=(0, 1, 2), steps=3, between=lambda: None):
    """Everything that steps of three forward passes and then three backward passes, in this order, give.

    Each backward pass has gradients of its own: reentrant checkpoints add to ``grad`` in another order.
    """
    out = []
    for step in range(steps):
        batches = [data(step, i) for i in range(3)]
        ys = []
        for x, _ in batches:
            with mx.autocast(recipe=active):
                ys.append(fn(x))
        between()
        for i in order:
            model.zero_grad()
            ys[i].backward(batches[i][1])
            out += [ys[i].detach(), batches[i][0].grad, *(p.grad for p in model.parameters()), *histories(model)]
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad / (1e-6 + p.grad.norm())
    return out


def same(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


def check(wrap, active=None, make=Net, **options):
    """Training with ``wrap(model)`` in the place of the model is bitwise training without."""
    plain, mine = net(make), net(make)
    active = active or recipe()
    expected = train(plain, plain, active, **options)
    assert len(histories(plain)) >= 6  # something is compared
    assert same(expected, train(mine, wrap(mine), copy.deepcopy(active), **options))


# ---------------------------------------------------------------------------------------------- several passes


@ways
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)], ids=str)
def test_passes_before_their_backward_passes(checkpointed, order):
    check(lambda model: functools.partial(checkpointed, model), order=order)


@pytest.mark.exhaustive(quick=4)
@both
@pytest.mark.parametrize(
    "options",
    [
        {"amax_history_len": 1},
        {"amax_compute_algo": "most_recent"},
        {"margin": 2},
        {"amax_compute_algo": lambda history: history.mean()},
        {"scaling_factor_compute_algo": lambda amax, scale, fp8_max, recipe: (scale + fp8_max / amax) / 2},
    ],
    ids=["short", "newest", "margin", "function of history", "function of scale"],
)
def test_every_kind_of_history(checkpointed, options):
    check(lambda model: functools.partial(checkpointed, model), recipe(**options))


@both
def test_weights_that_quantize_prepared(checkpointed):
    results = []
    for wrap in (lambda model: model, lambda model: functools.partial(checkpointed, model)):
        model = mx.quantize_(net(), recipe())
        results.append(train(model, wrap(model), None))
    assert same(*results)


class Module(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.mlp = te.LayerNormMLP(64, 96, **options)
        self.out = te.Linear(64, 32, bias=False)

    def forward(self, x):
        return self.out(self.mlp(x))


@both
def test_modules_of_transformer_engine(checkpointed):
    check(lambda model: functools.partial(checkpointed, model), make=Module)


def test_a_layer_that_checkpoints_itself():
    plain, mine = net(Module), net(functools.partial(Module, checkpoint=True))
    assert same(train(plain, plain, recipe()), train(mine, mine, recipe()))


def test_an_input_that_is_cast_again_in_the_backward_pass():
    """It has been recorded in the forward pass: what the backward pass of an older step casts does not change the next
    amax."""
    layer = te.Linear(64, 32, save_original_input=True)
    active, (x, g), (y, h) = recipe(amax_compute_algo="most_recent"), data(0, 2), data(0, 0)
    with mx.autocast(recipe=active):
        first, second = layer(x), layer(y)
    first.backward(g)
    second.backward(h)
    record = layer._products[0].delayed.record
    assert record[0] == y.abs().max() and record[0] < x.abs().max()
    assert record[2] == max(g.abs().max(), h.abs().max())


@both
@pytest.mark.parametrize("segments", [2, 3])
def test_segments_of_a_sequence_with_a_shared_layer(checkpointed, segments):
    def make():
        shared = nn.Linear(64, 64)
        return nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(64, 32))

    use_reentrant = checkpointed.keywords["use_reentrant"]
    check(lambda model: lambda x: checkpoint_sequential([*model], segments, x, use_reentrant=use_reentrant), make=make)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch, of the inner first pass
@pytest.mark.parametrize("outer", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("inner", WAYS.values(), ids=WAYS)
def test_nested_checkpoints(outer, inner):
    """Three deep: the innermost function is recomputed in a recomputation of a recomputation."""

    def wrap(model):
        def last(x):
            return model.last(inner(model.twice, x).tanh())

        def rest(x):
            return outer(last, model.twice(x))

        return lambda x: outer(lambda x: inner(rest, model.first(x).relu()), x)

    def plain(model):
        return lambda x: model.last(model.twice(model.twice(model.first(x).relu())).tanh())

    results = []
    for ways_of_calling in (plain, wrap):
        model = net()
        results.append(train(model, ways_of_calling(model), recipe()))
    assert same(*results)


@both
def test_two_models_one_of_which_has_another_recipe(checkpointed):
    def make():
        return nn.ModuleList([nn.Linear(64, 32), nn.Linear(64, 32)])

    def wrap(call):
        def run(model, x):
            y = call(model[0], x)
            with mx.autocast(recipe=recipe(margin=1)):
                return y + call(lambda x: model[1](x) + model[0](x), x)

        return run

    results = []
    for call in (lambda fn, x: fn(x), checkpointed):
        model = net(make)
        results.append(train(model, functools.partial(wrap(call), model), recipe()))
    assert same(*results)


def test_a_copy_of_a_state_is_that_of_another_layer():
    model, x = net(), data(0, 0)[0]
    with mx.autocast(recipe=recipe()):
        model(x)
        model(x)
    state, layers = getattr(model.first.weight, STATE), set()
    ways_of_copying = copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state)), lambda state: state.to("cpu")
    copies = [copied(state) for copied in ways_of_copying]
    for one in (state, *copies):
        layers.add(one.layer)
        assert all(map(torch.equal, one.state_dict().values(), state.state_dict().values()))
    assert len(layers) == 4


# ---------------------------------------------------------------------------------------------- between and around


@both
@pytest.mark.parametrize("make", [Net, Module])
def test_an_evaluation_under_another_recipe_between_the_passes(checkpointed, make):
    """It replaces the state of each layer, and the recomputation puts another in its place."""

    def evaluate(model):
        with torch.no_grad(), mx.autocast(recipe=recipe(margin=3, amax_history_len=4)):
            model(data(9, 3)[0].detach())

    results = []
    for wrap in (lambda model: model, lambda model: functools.partial(checkpointed, model)):
        model = net(make)
        results.append(train(model, wrap(model), recipe(), between=functools.partial(evaluate, model)))
    assert same(*results)


def assert_two_graphs_are_as_without(checkpointed, backward):
    """``backward`` gets what runs backward through each of two graphs of a model."""
    results = []
    for wrap in (lambda model: model, lambda model: functools.partial(checkpointed, model)):
        model = net()
        (x, g), (y, h) = data(0, 0), data(0, 1)
        with mx.autocast(recipe=recipe()):
            first, second = wrap(model)(x), wrap(model)(y)
        backward(functools.partial(first.backward, g), functools.partial(second.backward, h))
        results.append([x.grad, y.grad, *(p.grad for p in model.parameters()), *histories(model)])
    assert same(*results)


@both
def test_backward_inside_no_grad(checkpointed):
    def backward(first, second):
        with torch.no_grad():
            first()
            second()

    assert_two_graphs_are_as_without(checkpointed, backward)


def test_a_block_without_gradients_inside_a_checkpoint():
    """It reads the scales of that time, and records nothing."""

    def wrap(call):
        def run(model, x):
            def inside(x):
                with torch.no_grad():
                    gate = model.first(x).sigmoid()
                return model.last(gate * model.twice(model.first(x)))

            return call(inside, x)

        return run

    results = []
    for call in (lambda fn, x: fn(x), not_reentrant):
        model = net()
        results.append(train(model, functools.partial(wrap(call), model), recipe()))
    assert same(*results)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@both
def test_a_checkpoint_without_gradients_is_an_evaluation(checkpointed):
    model = net()
    train(model, model, recipe())
    before, x = histories(model), data(9, 3)[0].detach()
    with torch.no_grad(), mx.autocast(recipe=recipe()):
        expected, y = model(x), checkpointed(model, x)
    assert torch.equal(y, expected) and same(before, histories(model))


@both
def test_a_graph_that_runs_backward_twice(checkpointed):
    def backward(first, second):
        for _ in range(2):
            second(retain_graph=True)
            first(retain_graph=True)

    assert_two_graphs_are_as_without(checkpointed, backward)


def test_gradients_that_a_checkpointed_function_takes_itself():
    """The recomputation takes them again, and records them no second time."""

    def wrap(call):
        def run(model, x):
            def inside(x):
                h = x.detach().requires_grad_()
                slope = torch.autograd.grad(model.first(h).sum(), h)[0]
                return model.last(model.twice(model.first(x + slope)))

            return call(inside, x)

        return run

    results = []
    for call in (lambda fn, x: fn(x), functools.partial(not_reentrant, early_stop=False)):
        model = net()
        results.append(train(model, functools.partial(wrap(call), model), recipe(amax_history_len=1)))
    assert same(*results)


# ---------------------------------------------------------------------------------------------- selective checkpoints

aten = torch.ops.aten
POLICIES = {
    "saves products": [aten.mm.default, aten.addmm.default, aten.bmm.default, aten._unsafe_view.default],
    "saves what a step computes with": [
        aten.mul.Tensor, aten.where.self, aten.amax.default, aten.cat.default, aten.gt.Scalar, aten.clone.default,
        aten.select.int, aten.slice.Tensor, aten.unsqueeze.default, aten.zeros_like.default,
    ],
    "saves nothing": [],
}  # fmt: skip


@pytest.mark.parametrize("saved", POLICIES.values(), ids=POLICIES)
def test_selective_checkpoints(saved):
    """The ops of a recomputation are those of its first pass, which torch counts by their names."""

    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    def wrap(model):
        def inside(x):
            return model.last((2.0 * model.twice(model.first(x)) * 0.25).where(x[:, :1] > 0, x[:, :1] * 3.0))

        context_fn = functools.partial(create_selective_checkpoint_contexts, policy, True)
        return lambda x: checkpoint(inside, x, use_reentrant=False, context_fn=context_fn)

    def plain(model):
        return lambda x: model.last((2.0 * model.twice(model.first(x)) * 0.25).where(x[:, :1] > 0, x[:, :1] * 3.0))

    results = []
    for way in (plain, wrap):
        model, active = net(), recipe()
        with mx.autocast(recipe=active):  # torch would count the ops that make the histories, too
            model(data(0, 0)[0])
        results.append(train(model, way(model), active))
    assert same(*results)


# ---------------------------------------------------------------------------------------------- errors, leaks


class BrokenError(Exception):
    pass


@pytest.mark.parametrize(
    "checkpointed", [WAYS["reentrant"], WAYS["without early stop"]], ids=["reentrant", "not reentrant"]
)
@pytest.mark.parametrize("where", ["first pass", "recomputation"])
def test_a_function_that_raises(checkpointed, where):
    """The history goes on as it would without the pass that failed: a step that has begun counts."""
    results, calls = [], []

    def raises(model, x):
        calls.append(model)
        y = model(x)
        if len(calls) == {"first pass": 1, "recomputation": 2}[where]:
            raise BrokenError
        return y

    for call in (lambda fn, x: fn(x), checkpointed):
        model, active = net(), recipe()
        with mx.autocast(recipe=active):
            model(data(0, 0)[0])
        calls.clear()
        x, g = data(1, 1)
        if where == "first pass":
            with pytest.raises(BrokenError), mx.autocast(recipe=active):
                call(functools.partial(raises, model), x)
        elif call is checkpointed:
            with mx.autocast(recipe=active):
                y = call(functools.partial(raises, model), x)
            before = histories(model)
            with pytest.raises(BrokenError):
                y.backward(g)
            assert same(before, histories(model))
            y.backward(g)
        else:
            with mx.autocast(recipe=active):
                model(x).backward(g)
        gc.collect()
        assert recompute.OPEN["passes"] == 0
        model.zero_grad()
        results.append(train(model, functools.partial(call, model), active))
    assert same(*results)


@both
def test_notes_live_as_long_as_the_graph(checkpointed, monkeypatch):
    made = []

    class Watched(recompute.Checkpoint):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(weakref.ref(self))

    monkeypatch.setattr(recompute, "Checkpoint", Watched)
    model, active = net(), recipe()
    gc.disable()  # no cycles: freed as soon as nothing refers to them
    try:
        for _ in range(2):
            x, g = data(0, 0)
            with mx.autocast(recipe=active):
                y, thrown_away = checkpointed(model, x), checkpointed(model, x)
            assert [ref() is not None for ref in made] == [True, True]
            history = next(iter(made[0]().notes.values())).history
            seen = weakref.ref(history)
            del history, thrown_away
            assert [ref() is not None for ref in made] == [True, False]
            y.backward(g)
            del y
            assert [ref() is not None for ref in made] == [False, False]
            made.clear()
        assert seen() is None
    finally:
        gc.enable()
    assert recompute.OPEN["passes"] == 0


# ---------------------------------------------------------------------------------------------- compiled


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # from each graph break
@both
@pytest.mark.parametrize("inside", [True, False], ids=["compiled function", "compiled checkpoint"])
def test_compiled(checkpointed, inside):
    """Layers inside of a checkpoint run uncompiled. The first step is eager and makes the histories."""
    torch._dynamo.reset()
    results = []
    for compiles in (False, True):
        model, active = net(), recipe()
        with mx.autocast(recipe=active):
            model(data(0, 0)[0])
        fn = functools.partial(checkpointed, model)
        if compiles and inside:
            fn = functools.partial(checkpointed, torch.compile(model, backend="aot_eager"))
        elif compiles:
            fn = torch.compile(lambda x, model=model: checkpointed(model, x), backend="aot_eager")
        results.append(train(model, fn, active))
    assert same(*results)
    with mx.autocast(recipe=active):  # and a compiled model outside of one runs compiled again
        y = torch.compile(model, fullgraph=True, backend="aot_eager")(data(0, 0)[0])
    y.backward(data(0, 0)[1])
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # from each graph break
@both
def test_a_compiled_function_that_calls_the_backward_passes(checkpointed):
    torch._dynamo.reset()
    results = []
    for compiles in (False, True):
        model, active, out = net(), recipe(), []
        with mx.autocast(recipe=active):
            model(data(0, 0)[0])

        def step(x, y, g, h, model=model, active=active):
            with mx.autocast(recipe=active):
                first, second = checkpointed(model, x), checkpointed(model, y)
            first.backward(g)
            second.backward(h)

        step = torch.compile(step, backend="aot_eager") if compiles else step
        for i in range(3):
            model.zero_grad()
            (x, g), (y, h) = data(i, 0), data(i, 1)
            step(x, y, g, h)
            out += [x.grad, y.grad, *(p.grad for p in model.parameters()), *histories(model)]
        results.append(out)
    assert same(*results) and recompute.OPEN["passes"] == 0
    torch._dynamo.reset()


@both
@pytest.mark.parametrize("inside", [True, False], ids=["compiled function", "compiled checkpoint"])
def test_a_whole_graph_says_why_it_cannot_be(checkpointed, inside):
    torch._dynamo.reset()
    model, active, (x, _) = net(), recipe(), data(0, 0)
    with mx.autocast(recipe=active):
        model(x)
    options = {"fullgraph": True, "backend": "aot_eager"}
    fn = (
        functools.partial(checkpointed, torch.compile(model, **options))
        if inside
        else torch.compile(lambda x: checkpointed(model, x), **options)
    )
    reason = "inside a checkpoint, layers with delayed scaling run uncompiled"
    with mx.autocast(recipe=active), pytest.raises(torch._dynamo.exc.Unsupported, match=reason):
        fn(x)
    torch._dynamo.reset()
