"""mx.optim: any torch optimizer over float32 master weights of quantized parameters."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import lr_scheduler

import mxtensor as mx
import mxtensor.te as te
from mxtensor import optim
from mxtensor.te.contexts import quantized_model_init, weight_parameter
from mxtensor.training.training_weight import TrainingWeight
from tests.helpers.compare import components_of, same_bytes

BATCH, INSIDE, OUTSIDE = 5, 65, 33
OPTIMIZERS = {
    "SGD": {"lr": 0.05},
    "SGD momentum": {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "SGD foreach": {"lr": 0.05, "momentum": 0.9, "foreach": True},
    "SGD fused": {"lr": 0.05, "momentum": 0.9, "fused": True},
    "AdamW": {"lr": 2e-3},
    "AdamW single": {"lr": 2e-3, "foreach": False, "amsgrad": True},
    "AdamW foreach": {"lr": 2e-3, "foreach": True},
    "AdamW fused": {"lr": 2e-3, "fused": True},
    "Adam tensor lr": {"lr": torch.tensor(2e-3)},
    "Adafactor": {"lr": 0.02},
    "Adagrad": {"lr": 0.02},
    "Rprop": {"lr": 0.01},
    "NAdam": {"lr": 2e-3},
    "LBFGS": {"lr": 0.1, "max_iter": 4},
}
FORMATS = ["mxfp8", "mxfp4", "nvfp4", "mxfp8[32x32]", "float8_tensor", "float8_row"]


class Net(nn.Module):
    """Two quantized weights, one plain bias, one plain weight."""

    def __init__(self, format="mxfp8", orientation="both", dtype=torch.float32):
        super().__init__()
        values = torch.randn(OUTSIDE, INSIDE).to(dtype) / 8, torch.randn(16, OUTSIDE).to(dtype) / 6
        self.first, self.second = (nn.Parameter(mx.quantize(v, format, orientation=orientation)) for v in values)
        self.bias = nn.Parameter(torch.zeros(OUTSIDE, dtype=dtype))
        self.last = nn.Parameter(torch.randn(3, 16).to(dtype) / 4)

    def forward(self, x):
        return F.linear(torch.tanh(F.linear(torch.tanh(F.linear(x, self.first, self.bias)), self.second)), self.last)


def batches(n, dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(2, BATCH, INSIDE, generator=generator).to(dtype) for _ in range(n)]


def loss_of(model, batch):
    x, target = batch
    return F.mse_loss(model(x), target[:, :3])


def train(model, optimizer, data, scheduler=None):
    losses = []
    for batch in data:

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        if isinstance(getattr(optimizer, "optimizer", None), torch.optim.LBFGS):
            loss = optimizer.step(closure)
        else:
            loss = closure()
            optimizer.step()
        losses.append(loss.item())
        if scheduler is not None:
            scheduler.step()
    return losses


def make(name, params, **more):
    return getattr(optim, name.split()[0])(params, **OPTIMIZERS[name], **more)


def same_model(a, b):
    return all(
        same_bytes(p, q) if isinstance(p, mx.MXTensor) else torch.equal(p, q)
        for p, q in zip(a.parameters(), b.parameters(), strict=True)
    )


# ---------------------------------------------------------------------------------------------- the definition


@pytest.mark.parametrize("format", FORMATS)
def test_sgd_equals_a_handwritten_loop_over_float32_masters(format):
    model = Net(format)
    hand, masters = copy.deepcopy(model), {}
    momentum = {}
    for name, p in hand.named_parameters():
        masters[name] = p.detach().dequantize() if isinstance(p, mx.MXTensor) else p.detach().clone()
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for batch in batches(6):
        train(model, optimizer, [batch])
        loss_of(hand, batch).backward()
        for name, p in list(hand.named_parameters()):
            momentum[name] = p.grad.clone() if name not in momentum else momentum[name] * 0.9 + p.grad
            masters[name] = torch.add(masters[name], momentum[name], alpha=-0.05)
            new = masters[name]
            new = mx.quantize(new, format, orientation="both") if isinstance(p, mx.MXTensor) else new.clone()
            setattr(hand, name, nn.Parameter(new))
        assert same_model(model, hand)
        torch.testing.assert_close(optimizer.state[model.first]["master_weight"], masters["first"], rtol=0, atol=0)


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n != "LBFGS"])
def test_every_optimizer_equals_torchs_own_over_masters(name):
    model = Net()
    hand = copy.deepcopy(model)
    masters = [nn.Parameter(p.detach().dequantize() if isinstance(p, mx.MXTensor) else p.detach().clone())
               for p in hand.parameters()]  # fmt: skip
    reference = getattr(torch.optim, name.split()[0])(masters, **OPTIMIZERS[name])
    optimizer = make(name, model.parameters())
    for batch in batches(5):
        train(model, optimizer, [batch])
        hand.zero_grad()
        loss_of(hand, batch).backward()
        for p, master in zip(hand.parameters(), masters, strict=True):
            master.grad = p.grad.clone()
        reference.step()
        with torch.no_grad():
            for p, master in zip(hand.parameters(), masters, strict=True):
                p.copy_(master)
    assert same_model(model, hand)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_loss_falls(name):
    model = Net()
    data = batches(1) * 25
    losses = train(model, make(name, model.parameters()), data)
    assert losses[-1] < 0.7 * losses[0]


def test_steps_smaller_than_a_code_add_up():
    """Plain SGD on the codes makes no progress."""

    def walked(optimizer_class):
        p = nn.Parameter(mx.quantize(torch.ones(2, 32), "mxfp8"))
        optimizer = optimizer_class([p], lr=1e-3)
        for _ in range(500):
            p.grad = torch.ones(2, 32)
            optimizer.step()
        return p.detach().dequantize()

    assert walked(torch.optim.SGD).equal(torch.ones(2, 32))
    assert walked(optim.SGD).equal(torch.full((2, 32), 0.5))


@pytest.mark.parametrize("orientation", ["rowwise", "columnwise", "both"])
def test_identity_memory_and_orientation_stay_and_both_copies_have_the_same_values(orientation):
    model = Net(orientation=orientation)
    p, components = model.first, [t.data_ptr() for t in components_of(model.first)]
    view = p.detach()
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    p.grad = torch.randn(OUTSIDE, INSIDE)
    optimizer.step()
    assert model.first is p and optimizer.param_groups[0]["params"][0] is p
    assert [t.data_ptr() for t in components_of(p)] == components and same_bytes(view, p)
    assert same_bytes(p, mx.quantize(optimizer.state[p]["master_weight"], "mxfp8", orientation=orientation))
    assert type(p.grad) is torch.Tensor and p.requires_grad


def test_a_bfloat16_parameter_has_a_float32_master_and_its_gradient_is_widened():
    model = Net(dtype=torch.bfloat16)
    optimizer = optim.SGD(model.parameters(), lr=0.03)
    before = model.first.detach().dequantize(torch.float32)
    loss_of(model, batches(1, torch.bfloat16)[0]).backward()
    assert model.first.grad.dtype is torch.bfloat16
    optimizer.step()
    master = optimizer.state_dict()["state"][0]["master_weight"]
    assert master.dtype is torch.float32
    assert torch.equal(master, torch.add(before, model.first.grad.float(), alpha=-0.03))
    assert set(optimizer.state_dict()["state"]) == {0, 1}


def test_masters_for_all_serve_bfloat16_parameters_too():
    p = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    carrier = nn.Parameter(
        TrainingWeight(torch.ones(4, 8, dtype=torch.bfloat16), mx.recipe.MXFP8BlockScaling().linear_recipe())
    )
    wide = nn.Parameter(torch.ones(8))
    optimizer = optim.SGD([p, carrier, wide], lr=2**-10, master_weights_for="all")
    for _ in range(64):
        for q in (p, carrier, wide):
            q.grad = torch.ones_like(q)
        optimizer.step()
    masters = optimizer.state_dict()["state"]
    assert set(masters) == {0, 1}
    for q in (p, wide, carrier.high_precision):
        assert torch.equal(q.float(), torch.full(q.shape, 1 - 64 * 2**-10))


# ---------------------------------------------------------------------------------------------- where masters start


def preserved(values):
    with quantized_model_init(preserve_high_precision_init_val=True):
        return weight_parameter(values)


def master_of(optimizer, index=0):
    return optimizer.state_dict()["state"][index]["master_weight"].clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masters_start_as_the_preserved_initial_values(dtype):
    values = torch.randn(33, 65).to(dtype)
    p = preserved(values)
    assert torch.equal(master_of(optim.AdamW([p], lr=0.1)), values.float())


def test_masters_start_as_the_values_if_nothing_was_preserved():
    p = preserved(torch.randn(33, 65))
    p.clear_high_precision_init_val()
    assert torch.equal(master_of(optim.AdamW([p], lr=0.1)), p.detach().dequantize())


def test_preserved_values_that_do_not_fit_the_parameter_are_ignored():
    p = preserved(torch.rand(33, 65) + 1)
    with torch.no_grad():
        p.copy_(torch.randn(33, 65) - 8)
    assert torch.equal(master_of(optim.AdamW([p], lr=0.1)), p.detach().dequantize())


def test_elements_written_to_a_parameter_enter_its_master_and_the_others_stay():
    values = torch.randn(4, 64)
    p = preserved(values)
    optimizer = optim.SGD([p], lr=1.0)
    with torch.no_grad():
        p[2, :32] = 0.5
    p.grad = torch.zeros(4, 64)
    optimizer.step()
    expected = values.clone()
    expected[2, :32] = 0.5
    assert torch.equal(optimizer.state_dict()["state"][0]["master_weight"], expected)
    assert torch.equal(p.detach().dequantize()[2, :32], torch.full((32,), 0.5))


# ---------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_resumes_bitwise(name, model_first, tmp_path):
    data = batches(7)
    model = Net()
    optimizer = make(name, model.parameters())
    schedule = lr_scheduler.CosineAnnealingLR(optimizer, 10)
    train(model, optimizer, data[:3], schedule)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
    torch.save(state, tmp_path / "state.pt")
    losses = train(model, optimizer, data[3:], schedule)

    fresh = Net()
    restored = make(name, fresh.parameters())
    restored_schedule = lr_scheduler.CosineAnnealingLR(restored, 10)
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    if model_first:
        fresh.load_state_dict(loaded["model"])
    restored.load_state_dict(loaded["optimizer"])
    restored_schedule.load_state_dict(loaded["schedule"])
    fresh.load_state_dict(loaded["model"])
    assert train(fresh, restored, data[3:], restored_schedule) == losses
    assert same_model(fresh, model)
    assert torch.equal(master_of(restored), master_of(optimizer))


@pytest.mark.parametrize("steps", [0, 2])
def test_the_state_dict_is_torchs_with_the_masters(steps):
    model = Net()
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, batches(steps))
    state = optimizer.state_dict()
    moments = {"step", "exp_avg", "exp_avg_sq"} if steps else set()
    assert [set(state["state"].get(i, ())) for i in range(4)] == [
        moments | {"master_weight"}, moments | {"master_weight"}, moments, moments
    ]  # fmt: skip
    assert state["param_groups"] == torch.optim.AdamW(model.parameters(), lr=0.01).state_dict()["param_groups"]


def test_a_checkpoint_of_step_0_has_masters_more_precise_than_the_weights():
    values = torch.randn(4, 64)
    p = preserved(values)
    state = optim.AdamW([p], lr=0.1).state_dict()
    q = nn.Parameter(p.detach().clone())
    optimizer = optim.AdamW([q], lr=0.1)
    optimizer.load_state_dict(state)
    assert torch.equal(master_of(optimizer), values)


def test_the_state_of_a_plain_optimizer_loads_and_masters_start_from_the_weights():
    model, plain = Net(), Net()
    adam = torch.optim.AdamW(plain.parameters(), lr=0.25)
    train(plain, adam, batches(2))
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    with torch.no_grad():
        model.first.mul_(2)
    optimizer.load_state_dict(adam.state_dict())
    assert torch.equal(master_of(optimizer), model.first.detach().dequantize())
    assert torch.equal(optimizer.state[model.first]["exp_avg"], adam.state[plain.first]["exp_avg"])
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_hooks_of_the_state_dict_see_the_masters():
    model = Net()
    optimizer = optim.AdamW(model.parameters())
    seen = []
    optimizer.register_state_dict_post_hook(lambda o, state: seen.append(sorted(state["state"])))
    optimizer.register_load_state_dict_pre_hook(lambda o, state: seen.append(o is optimizer))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [[0, 1], True, "loaded"]


def test_distributed_checkpoints_resume_bitwise():
    model, data = Net(), batches(6)
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, data[:3])
    states = copy.deepcopy(get_state_dict(model, optimizer))
    assert set(states[1]["state"]["first"]) == {"step", "exp_avg", "exp_avg_sq", "master_weight"}
    fresh = Net()
    restored = optim.AdamW(fresh.parameters(), lr=0.5)
    assert get_state_dict(fresh, restored)[1]["state"].keys() == states[1]["state"].keys()
    set_state_dict(fresh, restored, model_state_dict=states[0], optim_state_dict=states[1])
    assert train(fresh, restored, data[3:]) == train(model, optimizer, data[3:])
    assert same_model(fresh, model)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_model_and_optimizer_can_be_copied_together(copied):
    model = Net()
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, batches(2))
    other, its = copied((model, optimizer))
    assert train(other, its, batches(5)) == train(model, optimizer, batches(5))
    assert same_model(other, model) and its.param_groups[0]["params"][0] is other.first


# ---------------------------------------------------------------------------------------------- an optimizer to torch


def test_schedulers_change_the_hyperparameters_of_the_inner_optimizer():
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    schedule = lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)  # lr and momentum
    for batch in batches(3):
        before = [p.detach().clone() for p in (model.last, optimizer.state_dict()["state"][0]["master_weight"])]
        buffers = [
            optimizer.state[p].get("momentum_buffer", torch.zeros(())).clone() for p in (model.last, model.first)
        ]
        group = dict(optimizer.param_groups[0])
        train(model, optimizer, [batch], schedule)
        after = [model.last, optimizer.state_dict()["state"][0]["master_weight"]]
        for old, new, buffer, grad in zip(before, after, buffers, [model.last.grad, model.first.grad], strict=True):
            momentum = group["momentum"] * buffer + grad
            torch.testing.assert_close(new.detach(), old - group["lr"] * momentum, rtol=1e-6, atol=1e-7)
    assert optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0] != 1.0


def test_groups_have_their_own_hyperparameters_and_can_be_added():
    model = Net()
    optimizer = optim.SGD([{"params": [model.first], "lr": 0.5}, {"params": [model.bias]}], lr=0.25)
    optimizer.add_param_group({"params": [model.second], "lr": 0.0})
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 0.25, 0.0]
    assert [
        g["params"][0] is p
        for g, p in zip(optimizer.param_groups, (model.first, model.bias, model.second), strict=True)
    ]
    starts = [p.detach().dequantize() for p in (model.first, model.second)]
    loss_of(model, batches(1)[0]).backward()
    optimizer.step()
    assert torch.equal(master_of(optimizer), starts[0] - 0.5 * model.first.grad)
    assert torch.equal(model.bias, -0.25 * model.bias.grad)
    assert torch.equal(master_of(optimizer, 2), starts[1])


def test_named_parameters_keep_their_names():
    model = Net()
    optimizer = optim.AdamW(model.named_parameters())
    assert optimizer.param_groups[0]["param_names"] == ["first", "second", "bias", "last"]
    assert optimizer.optimizer.param_groups[0]["param_names"] == ["first", "second", "bias", "last"]


def test_a_parameter_without_gradient_is_left_alone():
    model = Net()
    model.first.requires_grad_(False)
    before = copy.deepcopy(model.first)
    train(model, optim.AdamW(model.parameters(), lr=0.1), batches(2))
    assert same_bytes(model.first, before)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_clears_the_gradients_of_the_model(set_to_none):
    model = Net()
    optimizer = optim.AdamW(model.parameters())
    loss_of(model, batches(1)[0]).backward()
    optimizer.zero_grad(set_to_none)
    assert all(p.grad is None if set_to_none else not p.grad.any() for p in model.parameters())


def test_clipping_and_step_hooks_work_on_the_model():
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    start, calls = master_of(optimizer), []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: calls.append("before"))
    optimizer.register_step_post_hook(lambda o, args, kwargs: calls.append("after"))
    loss_of(model, batches(1)[0]).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    total = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters()))
    assert total == pytest.approx(1e-3, rel=1e-3)
    assert torch.equal(master_of(optimizer), start - model.first.grad) and calls == ["before", "after"]


def test_a_closure_sees_the_current_values_of_the_masters():
    model = Net()
    optimizer = optim.LBFGS(model.parameters(), lr=0.1, max_iter=5)
    seen = []

    def closure():
        inside = optimizer.optimizer.param_groups[0]["params"][0]
        seen.append(same_bytes(model.first, mx.quantize(inside, "mxfp8", orientation="both")))
        optimizer.zero_grad()
        loss = loss_of(model, batches(1)[0])
        loss.backward()
        return loss

    optimizer.step(closure)
    assert len(seen) == 5 and all(seen[1:])


def test_a_compiled_step_is_the_same_step():
    torch._dynamo.reset()
    model = Net()
    twin = copy.deepcopy(model)
    optimizer, other = (optim.AdamW(m.parameters(), lr=0.01) for m in (model, twin))
    step = torch.compile(optimizer.step, backend="aot_eager")
    for batch in batches(3):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        step()
    train(twin, other, batches(3))
    assert same_model(model, twin)


def test_tied_weights_have_one_master():
    p = nn.Parameter(mx.quantize(torch.randn(32, 32), "mxfp8", orientation="both"))
    model = nn.ParameterList([p, p])
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    x = torch.randn(4, 32)
    F.linear(F.linear(x, model[0]), model[1]).backward(torch.randn(4, 32))
    start = p.detach().dequantize()
    optimizer.step()
    assert torch.equal(master_of(optimizer), start - p.grad)


def test_a_new_dtype_or_class_of_optimizer_goes_through_the_general_wrapper():
    class Plainest(torch.optim.Optimizer):
        def __init__(self, params, rate):
            super().__init__(params, {"rate": rate})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad.sign(), alpha=group["rate"])

    p = nn.Parameter(mx.quantize(torch.randn(4, 32, dtype=torch.float64), "mxfp8"))
    start = p.detach().dequantize()
    optimizer = optim.MasterWeights(Plainest, [p], 0.125)
    p.grad = torch.randn(4, 32, dtype=torch.float64)
    optimizer.step()
    assert torch.equal(master_of(optimizer), start - 0.125 * p.grad.sign())
    assert master_of(optimizer).dtype is torch.float64


def test_every_optimizer_of_torch_is_there():
    made = [getattr(optim, name) for name in dir(optim) if name not in ("MasterWeights", "FusedAdam")]
    theirs = {k for k, v in vars(torch.optim).items() if isinstance(v, type) and issubclass(v, torch.optim.Optimizer)}
    assert {c.__name__ for c in made} == theirs - {"Optimizer"}
    assert all(issubclass(c, optim.MasterWeights) for c in made) and optim.AdamW is optim.AdamW


# ---------------------------------------------------------------------------------------------- mistakes


class OneGroup(torch.optim.SGD):
    def add_param_group(self, param_group):
        if self.param_groups:
            raise NotImplementedError("one group only")
        super().add_param_group(param_group)


def test_errors_name_the_argument_and_change_nothing():
    model = Net()
    with pytest.raises(ValueError, match="master_weights_for is 'none'; choose quantized or all"):
        optim.SGD(model.parameters(), lr=0.1, master_weights_for="none")
    with pytest.raises(ValueError, match="differentiable=True: master weights are rounded"):
        optim.SGD(model.parameters(), lr=0.1, differentiable=True)
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        optim.SGD(model.parameters(), lr=-1)
    with pytest.raises(ValueError, match="empty parameter list"):
        optim.SGD([])
    with pytest.raises(AttributeError, match=r"mxtensor.optim has no 'Adan'; it has MasterWeights"):
        optim.Adan  # noqa: B018
    optimizer = optim.MasterWeights(OneGroup, [model.first], lr=0.1)
    with pytest.raises(NotImplementedError, match="one group only"):
        optimizer.add_param_group({"params": [model.second]})
    assert len(optimizer.param_groups) == 1 and set(optimizer.state_dict()["state"]) == {0}
    model.first.grad = torch.randn(OUTSIDE, INSIDE)
    optimizer.step()


def test_a_state_that_does_not_fit_changes_nothing():
    optimizer, other = (optim.AdamW([nn.Parameter(mx.quantize(torch.randn(4, n), "mxfp8"))]) for n in (32, 64))
    before = master_of(optimizer)
    with pytest.raises(
        ValueError, match=r"the master_weight of parameter 0 has shape \(4, 64\), the parameter \(4, 32\)"
    ):
        optimizer.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({**other.state_dict(), "param_groups": []})
    assert torch.equal(master_of(optimizer), before)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:OptimState.* does not implement _stable_hash:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("masters", [False, True])
def test_torchao_optimizers_train_quantized_weights(masters):
    """Their compiled step writes ``p.detach()``."""
    optimizers = pytest.importorskip("torchao.optim")
    with te.quantized_model_init(recipe=mx.recipe.MXFP8BlockScaling(), preserve_high_precision_init_val=masters):
        layer = te.Linear(128, 64)
    x, target = torch.randn(32, 128), torch.randn(32, 64)
    make = mx.optim.MasterWeights if masters else lambda kind, *args, **options: kind(*args, **options)
    optimizer, losses = make(optimizers.AdamW8bit, layer.parameters(), lr=1e-2), []
    for _ in range(8):
        loss = (layer(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    columnwise = layer.weight.t().dequantize().t()  # both copies are written
    assert (columnwise - layer.weight.dequantize()).norm() < 0.1 * columnwise.norm()
