"""TrainingWeight: an ordinary parameter for everything but products, which run by its recipe."""

import copy
import importlib
import pickle
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mxtensor as mx
from mxtensor.recipe import MXFP6BlockScaling, MXFP8BlockScaling
from mxtensor.training.training_weight import TrainingWeight, values_of
from tests.helpers.compare import relative_error
from tests.helpers.training_reference import check_step, products

MXFP8, MXFP6 = MXFP8BlockScaling(), MXFP6BlockScaling()


def model(recipe=None):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 32))
    return net if recipe is None else mx.quantize_(net, recipe)


def problem():
    return torch.randn(20, 64), torch.randn(20, 32)


def same(a, b):
    a, b = list(a), list(b)
    return len(a) == len(b) and all(map(torch.equal, a, b))


def values(net):
    """Every parameter as a plain tensor."""
    return [getattr(p, "high_precision", p).detach() for p in net.parameters()]


def weight(shape=(48, 64), linear_recipe=None):
    return nn.Parameter(TrainingWeight(torch.randn(shape), linear_recipe or MXFP8.linear_recipe()))


def train(net, make, steps=4, around=None, clip=None, each=None):
    """A few steps of an optimizer; returns it."""
    torch.manual_seed(2)
    optimizer = make(net.parameters())
    for _ in range(steps):
        x, g = problem()
        with mx.autocast(around is not None, around) if around is not None else mx.explain():
            y = net(x)
        y.backward(g)
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        if each:
            each(net)
    return optimizer


# ---------------------------------------------------------------------------------------------- an ordinary parameter


def test_it_is_a_parameter_of_torchs_own_module():
    net = model(MXFP8)
    assert type(net[0]) is nn.Linear and isinstance(net[0].weight, nn.Parameter)
    assert [name for name, _ in net.named_parameters()] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    w = net[0].weight
    assert (w.shape, w.dtype, w.requires_grad, w.is_leaf) == ((48, 64), torch.float32, True, True)
    assert w.numel() == 48 * 64 and w.stride() == (64, 1) and w.is_contiguous()
    assert repr(w).startswith("Parameter") or repr(w).startswith(
        "TrainingWeight(MXFP8BlockScaling (mxfp8_e4m3), tensor("
    )


def test_a_step_is_the_reference_and_its_gradients_are_plain():
    layer = mx.quantize_(nn.Sequential(nn.Linear(70, 40)), MXFP8)[0]
    x, g = torch.randn(20, 70, requires_grad=True), torch.randn(20, 40)
    y = layer(x)
    y.backward(g)
    assert type(layer.weight.grad) is torch.Tensor
    w = layer.weight.high_precision
    check_step((y.detach(), x.grad, layer.weight.grad, layer.bias.grad), x, w, layer.bias, g, MXFP8.linear_recipe())


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, maximize=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers_train_it_as_they_train_a_plain_model_under_autocast(make):
    plain, quantized = model(), model(MXFP8)
    before = [v.clone() for v in values(quantized)]
    train(plain, make, around=MXFP8)
    optimizer = train(quantized, make)
    assert same(values(plain), values(quantized))
    assert not any(map(torch.equal, before, values(quantized)))
    operands = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    assert all(type(t) is torch.Tensor for t in operands)


@pytest.mark.parametrize("norm", [0.1, 1e-3])
def test_gradient_clipping(norm):
    plain, quantized = model(), model(MXFP8)
    train(plain, OPTIMIZERS["adamw"], around=MXFP8, clip=norm)
    train(quantized, OPTIMIZERS["adamw"], clip=norm)
    assert same(values(plain), values(quantized))


def test_gradients_accumulate_and_are_zeroed():
    net, (x, g) = model(MXFP8), problem()
    net(x).backward(g)
    once = [p.grad.clone() for p in net.parameters()]
    net(x).backward(g)
    assert all(torch.equal(p.grad, 2 * first) for p, first in zip(net.parameters(), once, strict=True))
    net.zero_grad(set_to_none=False)
    assert all(p.grad.count_nonzero() == 0 for p in net.parameters())
    net.zero_grad()
    assert all(p.grad is None for p in net.parameters())


def test_hooks_see_plain_gradients():
    net, (x, g), seen = model(MXFP8), problem(), []
    net[0].weight.register_hook(lambda grad: seen.append(type(grad)) or 2 * grad)
    net[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p is net[0].weight))
    net(x).backward(g)
    twin = model(MXFP8)
    twin(x).backward(g)
    assert seen == [torch.Tensor, True]
    assert torch.equal(net[0].weight.grad, 2 * twin[0].weight.grad)


def test_an_optimizer_may_step_in_the_backward_pass():
    net, (x, g) = model(MXFP8), problem()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in net.parameters()}
    for p in optimizers:
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    before = [v.clone() for v in values(net)]
    net(x).backward(g)
    assert not any(map(torch.equal, before, values(net)))


def test_a_change_between_forward_and_backward_is_an_error():
    net, (x, g) = model(MXFP8), problem()
    y = net(x)
    with torch.no_grad():
        net[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(g)


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_an_optimizer_step_between_forward_and_backward_is_an_error(options):
    """Ops that write many tensors at a time return none, and torch counts no write to a wrapper."""
    net, (x, g) = model(MXFP8), problem()
    optimizer = torch.optim.AdamW([net[2].weight], **options)
    net(x).backward(g)
    y = net(x)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(g)


def test_a_frozen_weight_has_no_gradient_and_adapters_beside_it_train():
    """LoRA: the frozen layer runs quantized, in fprop and dgrad."""
    base = mx.quantize_(nn.Sequential(nn.Linear(64, 48)), MXFP8)[0].requires_grad_(False)
    down, up = nn.Linear(64, 4, bias=False), nn.Linear(4, 48, bias=False)
    x, g = torch.randn(20, 64, requires_grad=True), torch.randn(20, 48)
    before = base.weight.high_precision.clone()
    with mx.explain() as log:
        (base(x) + up(down(x))).backward(g)
    assert products(log) == ["fprop", "dgrad"]
    assert base.weight.grad is None and up.weight.grad is not None and x.grad is not None
    optimizer = torch.optim.AdamW([p for m in (base, down, up) for p in m.parameters() if p.requires_grad])
    optimizer.step()
    assert torch.equal(base.weight.high_precision, before)


def test_two_weights_multiply_in_high_precision():
    """The product of a merged adapter is not a layer."""
    a, b = weight((48, 4)), weight((4, 64))
    with mx.explain() as log:
        merged = a @ b
        other = F.linear(a, b.t())
    expected = a.high_precision @ b.high_precision
    assert products(log) == [] and torch.equal(merged, expected) and torch.allclose(other, expected)


# ---------------------------------------------------------------------------------------------- what is done to it


VIEWS = {
    "t": lambda w: w.t(),
    "T": lambda w: w.T,
    "transpose": lambda w: w.transpose(0, 1),
    "permute": lambda w: w.permute(1, 0),
    "view": lambda w: w.view(24, 128),
    "reshape": lambda w: w.reshape(-1),
    "flatten": lambda w: w.flatten(),
    "expand": lambda w: w.expand(2, 48, 64),
    "unsqueeze": lambda w: w[None],
    "squeeze": lambda w: w.squeeze(),
    "slice": lambda w: w[3:17, ::2],
    "row": lambda w: w[3],
    "narrow": lambda w: w.narrow(1, 2, 5),
    "diagonal": lambda w: w.diagonal(),
    "unfold": lambda w: w.unfold(0, 4, 2),
    "bits": lambda w: w.detach().view(torch.int32),
    "detach": lambda w: w.detach(),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_are_views_of_the_values(view):
    w = weight()
    out, plain = view(w), view(w.high_precision)
    assert isinstance(out, TrainingWeight) and out.linear_recipe == w.linear_recipe
    assert (out.shape, out.stride(), out.storage_offset()) == (plain.shape, plain.stride(), plain.storage_offset())
    assert torch.equal(out + 0, plain)
    with torch.no_grad():
        out.zero_()
    assert plain.count_nonzero() == 0 and torch.equal(w + 0, w.high_precision)


@pytest.mark.parametrize(
    "split", [lambda w: w.split(16), lambda w: w.chunk(3), lambda w: w.unbind(), torch.tensor_split]
)
def test_chunks_are_weights(split):
    w = weight()
    chunks = split(w, 3) if split is torch.tensor_split else split(w)
    theirs = split(w.high_precision, 3) if split is torch.tensor_split else split(w.high_precision)
    assert all(isinstance(p, TrainingWeight) for p in chunks)
    assert same((p + 0 for p in chunks), theirs)


def test_gradients_flow_through_views_to_the_whole():
    w, x, g = weight(), torch.randn(5, 64), torch.randn(5, 16)
    rows = w[16:32]
    y = F.linear(x, rows)
    y.backward(g)
    assert w.grad[:16].count_nonzero() == w.grad[32:].count_nonzero() == 0
    check_step((y.detach(), None, w.grad[16:32], None), x, w.high_precision[16:32], None, g, MXFP8.linear_recipe())


COMPUTED = {
    "add": lambda w: w + 1,
    "norm": lambda w: w.norm(),
    "compare": lambda w: w == 0,
    "cat": lambda w: torch.cat([w, w]),
    "einsum": lambda w: torch.einsum("nk,mk->nm", w, torch.ones(2, 64)),
    "bmm of an expression": lambda w: torch.bmm((w + 1).expand(2, 48, 64), torch.ones(2, 64, 3)),
    "embedding": lambda w: F.embedding(torch.tensor([1, 2]), w),
    "svd": lambda w: torch.linalg.svdvals(w),
    "zeros_like": lambda w: torch.zeros_like(w),
    "vector times": lambda w: torch.ones(48) @ w,
}


@pytest.mark.parametrize("compute", COMPUTED.values(), ids=COMPUTED)
def test_results_computed_from_it_are_plain(compute):
    w = weight()
    with mx.explain() as log:
        out = compute(w)
    assert type(out) is torch.Tensor and products(log) == []
    torch.testing.assert_close(out, compute(w.high_precision))  # torch's SVD with a gradient is a different one


def test_its_values_leave_torch():
    w = weight((2, 3))
    plain = w.high_precision
    assert w.tolist() == plain.tolist() and f"{w[0, 0]:.3f}" == f"{plain[0, 0]:.3f}"
    assert (w.detach().numpy() == plain.numpy()).all() and w[1, 2].item() == plain[1, 2].item()
    assert w.data_ptr() == w.detach().data_ptr()
    before = plain.clone()
    w.detach().apply_(lambda x: x + 1)
    assert plain.equal(before + 1)


@pytest.mark.parametrize(
    "init",
    [
        nn.init.zeros_, nn.init.normal_, nn.init.trunc_normal_, nn.init.xavier_uniform_, nn.init.kaiming_normal_,
        nn.init.orthogonal_, nn.init.eye_, lambda w: nn.init.sparse_(w, 0.5),
    ],
)  # fmt: skip
def test_initialization(init):
    w, plain = weight(), nn.Parameter(torch.empty(48, 64))
    for t in (w, plain):
        torch.manual_seed(3)
        assert init(t) is t
    assert torch.equal(w.high_precision, plain) and isinstance(w, TrainingWeight)


def test_reset_parameters():
    net, plain = model(MXFP8), model()
    for each in (net, plain):
        torch.manual_seed(8)
        each[0].reset_parameters()
    assert same(values(net), values(plain))


def test_writing_to_data():
    w = weight()
    w.data.mul_(2)
    doubled = w.high_precision.clone()
    new = torch.randn(48, 64)
    w.data = new
    assert not torch.equal(doubled, new) and torch.equal(w + 0, new) and w.high_precision.data_ptr() == new.data_ptr()
    assert isinstance(w, TrainingWeight) and isinstance(w, nn.Parameter)
    w.data = torch.randn(32, 16)
    assert w.shape == (32, 16) and (w + 0).shape == (32, 16)
    assert F.linear(torch.randn(3, 16), w).shape == (3, 32)


def test_parameters_as_one_vector_and_back():
    net, plain = model(MXFP8), model()
    vector = nn.utils.parameters_to_vector(net.parameters())
    assert torch.equal(vector, nn.utils.parameters_to_vector(plain.parameters()))
    nn.utils.vector_to_parameters(2 * vector, net.parameters())
    assert all(torch.equal(a, 2 * b.detach()) for a, b in zip(values(net), plain.parameters(), strict=True))
    x, _ = problem()
    assert not torch.equal(net(x), model(MXFP8)(x))


# ---------------------------------------------------------------------------------------------- what is done to modules


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_another_dtype(dtype):
    layer = mx.quantize_(nn.Sequential(nn.Linear(70, 40)), MXFP8).to(dtype)[0]
    assert isinstance(layer.weight, TrainingWeight) and layer.weight.high_precision.dtype is dtype
    x, g = torch.randn(20, 70, dtype=dtype, requires_grad=True), torch.randn(20, 40, dtype=dtype)
    y = layer(x)
    y.backward(g)
    assert y.dtype is layer.weight.grad.dtype is dtype
    if dtype is not torch.float64:
        w = layer.weight.high_precision
        check_step((y.detach(), x.grad, layer.weight.grad, layer.bias.grad), x, w, layer.bias, g, MXFP8.linear_recipe())


def test_to_meta_and_back_empty():
    net = model(MXFP8).to("meta")
    assert net[0].weight.device.type == net[0].weight.high_precision.device.type == "meta"
    assert net(torch.randn(3, 64, device="meta")).shape == (3, 32)
    net.to_empty(device="cpu").load_state_dict(model().state_dict())
    assert isinstance(net[0].weight, TrainingWeight) and net[0].weight.linear_recipe == MXFP8.linear_recipe()
    x, _ = problem()
    assert torch.equal(net(x), model(MXFP8)(x))


def test_quantized_on_meta_and_filled_later():
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 32))
    mx.quantize_(net, MXFP8).load_state_dict(model().state_dict(), assign=True)
    x, _ = problem()
    assert torch.equal(net(x), model(MXFP8)(x))


@pytest.mark.exhaustive
def test_shared_memory():
    code = """
import torch, mxtensor as mx
net = mx.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 48)), mx.recipe.MXFP8BlockScaling()).share_memory()
w = net[0].weight
assert w.is_shared() and w.high_precision.is_shared() and net(torch.randn(3, 64)).shape == (3, 48)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_are_independent(copied):
    net = model(MXFP8)
    net[2].weight.requires_grad_(False)
    twin, (x, _) = copied(net), problem()
    assert [type(p) for p in twin.parameters()] == [type(p) for p in net.parameters()]
    assert [p.requires_grad for p in twin.parameters()] == [True, True, False, True]
    assert twin[0].weight.linear_recipe == MXFP8.linear_recipe() and torch.equal(twin(x), net(x))
    with torch.no_grad():
        twin[0].weight.zero_()
    assert net[0].weight.high_precision.count_nonzero() > 0
    assert type(twin.state_dict()["0.weight"]) is torch.Tensor


def test_copies_keep_ties():
    net = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
    net[1].weight = net[0].weight
    mx.quantize_(net, MXFP8)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), copy.deepcopy(net).to(torch.bfloat16)):
        assert twin[0].weight is twin[1].weight and isinstance(twin[0].weight, TrainingWeight)


def test_moving_averages_of_weights():
    """torch.optim.swa_utils: the averaged model is quantized like the model."""
    results = []
    for net, around in ((model(), MXFP8), (model(MXFP8), None)):
        average = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
        train(net, OPTIMIZERS["sgd"], around=around, each=lambda net, a=average: a.update_parameters(net))
        results.append((net, average))
    (plain, plain_average), (_, average) = results
    assert same(values(plain_average), values(average)) and not same(values(plain), values(average))
    x, _ = problem()
    with torch.no_grad(), mx.autocast(recipe=MXFP8):
        expected = plain_average(x)
    with torch.no_grad():
        assert torch.equal(average(x), expected)


def test_parametrization_of_a_quantized_weight_says_what_it_needs():
    """The computed weight is plain: it has no recipe, but autocast reaches it."""
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(64, 48))
    x = torch.randn(4, 64)
    with mx.autocast(recipe=MXFP8), mx.explain() as log:
        layer(x).backward(torch.randn(4, 48))
    assert products(log) == ["fprop", "wgrad"]
    assert all(p.grad is not None for p in layer.parameters())


# ---------------------------------------------------------------------------------------------- state dicts


def test_state_dicts_hold_plain_tensors_over_the_parameters_memory():
    net = model(MXFP8)
    state = net.state_dict()
    assert {type(t) for t in state.values()} == {torch.Tensor}
    assert list(state) == list(model().state_dict())
    assert state["0.weight"].data_ptr() == net[0].weight.high_precision.data_ptr()


@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_load_both_ways(assign):
    x, _ = problem()
    plain, quantized = model(), model(MXFP8)
    train(plain, OPTIMIZERS["sgd"], around=MXFP8)
    quantized.load_state_dict(copy.deepcopy(plain.state_dict()), assign=assign)
    assert (
        isinstance(quantized[0].weight, TrainingWeight) and quantized[0].weight.linear_recipe == MXFP8.linear_recipe()
    )
    assert quantized[0].weight.requires_grad and isinstance(quantized[0].weight, nn.Parameter)
    with mx.autocast(recipe=MXFP8):
        assert torch.equal(plain(x), quantized(x))
    assert torch.equal(quantized(x), quantized(x))
    loaded = model()
    loaded.load_state_dict(quantized.state_dict(), assign=assign)
    assert type(loaded[0].weight) is nn.Parameter and same(values(loaded), values(plain))


def test_assign_keeps_a_frozen_weight_frozen():
    net = model(MXFP8)
    net[0].weight.requires_grad_(False)
    net.load_state_dict(model().state_dict(), assign=True)
    assert isinstance(net[0].weight, TrainingWeight) and not net[0].weight.requires_grad


def test_strict_loading_names_what_does_not_fit():
    net = model(MXFP8)
    before = [v.clone() for v in values(net)]
    state = net.state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key.*0.weight"):
        net.load_state_dict({k: v for k, v in state.items() if k != "0.weight"})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*extra"):
        net.load_state_dict(state | {"extra": torch.zeros(1)})
    for assign in (False, True):
        with pytest.raises(RuntimeError, match=r"size mismatch for 0.weight"):
            net.load_state_dict(state | {"0.weight": torch.zeros(3, 3)}, assign=assign)
    assert same(values(net), before)
    assert net.load_state_dict({}, strict=False).missing_keys == list(state)


@pytest.mark.exhaustive
def test_a_saved_state_dict_loads_without_mxtensor_installed(tmp_path):
    net = model(MXFP8)
    optimizer = train(net, OPTIMIZERS["adamw"])
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "step.pt")
    code = f"""
import sys, torch
saved = torch.load({str(tmp_path / "step.pt")!r}, weights_only=True)
net = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.GELU(), torch.nn.Linear(48, 32))
net.load_state_dict(saved["model"])
torch.optim.AdamW(net.parameters()).load_state_dict(saved["optimizer"])
assert "mxtensor" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr.decode()


def test_training_resumes_bit_for_bit(tmp_path):
    whole = model(MXFP8)
    torch.manual_seed(4)
    data = [problem() for _ in range(6)]

    def run(net, optimizer, batches):
        for x, g in batches:
            net(x).backward(g)
            optimizer.step()
            optimizer.zero_grad()

    run(whole, OPTIMIZERS["adamw"](whole.parameters()), data)
    first = model(MXFP8)
    optimizer = OPTIMIZERS["adamw"](first.parameters())
    run(first, optimizer, data[:3])
    torch.save((first.state_dict(), optimizer.state_dict()), tmp_path / "half.pt")
    second = model(MXFP8)
    optimizer = OPTIMIZERS["adamw"](second.parameters())
    states = torch.load(tmp_path / "half.pt", weights_only=True)
    second.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    run(second, optimizer, data[3:])
    assert same(values(whole), values(second))


@pytest.mark.exhaustive
def test_a_pickled_model_trains_on_in_another_process(tmp_path):
    """It compiles there too: the recipe is registered again when it is unpickled."""
    net, (x, _) = model(MXFP8BlockScaling(two_dimensional_weights=True, grad_scaling="even")), problem()
    torch.save((net, x, net(x).detach()), tmp_path / "model.pt")
    code = f"""
import torch
net, x, y = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
assert torch.equal(net(x), y)
assert torch.equal(torch.compile(net, fullgraph=True, backend="aot_eager")(x), y)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


# ---------------------------------------------------------------------------------------------- torch.func


def test_functional_call_with_the_models_own_parameters_is_quantized():
    net, (x, _) = model(MXFP8), problem()
    assert torch.equal(torch.func.functional_call(net, dict(net.named_parameters()), x), net(x))


def test_functional_call_with_plain_tensors_takes_autocast():
    """The recipe belongs to the parameter: a tensor that replaces it has none."""
    net, (x, _) = model(MXFP8), problem()
    state = net.state_dict()
    with mx.explain() as log:
        torch.func.functional_call(net, state, x)
    assert products(log) == []
    with mx.autocast(recipe=MXFP8):
        assert torch.equal(torch.func.functional_call(net, state, x), net(x))


def test_torch_func_transforms_do_not_go_through():
    net, (x, _) = model(MXFP8), problem()
    with pytest.raises(RuntimeError, match=r"transforms of torch\.func"):
        torch.vmap(net)(x[None])
    with pytest.raises(RuntimeError, match=r"transforms of torch\.func"):
        torch.func.vjp(net, x)


# ---------------------------------------------------------------------------------------------- compiled


@pytest.fixture
def compiled_anew():
    torch._dynamo.reset()


def test_a_compiled_model_trains_as_the_eager_one(compiled_anew):
    eager, net = model(MXFP8), model(MXFP8)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    train(eager, OPTIMIZERS["adamw"])
    train(compiled, OPTIMIZERS["adamw"])
    assert same(values(eager), values(net))


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # torch's own
def test_a_whole_training_step_compiles_with_its_optimizer(compiled_anew):
    """The values change as in eager code, except where the compiled optimizer's rounding changes later casts."""

    def run(compiled):
        net = model(MXFP8)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)

        def step(x, g):
            optimizer.zero_grad()
            (net(x) * g).sum().backward()
            optimizer.step()

        fn = torch.compile(step, backend="aot_eager") if compiled else step
        torch.manual_seed(6)
        for _ in range(3):
            fn(*problem())
        return values(net)

    start = values(model(MXFP8))
    for before, eager, compiled in zip(start, run(False), run(True), strict=True):
        assert relative_error(compiled - before, eager - before) < 0.02


@pytest.mark.exhaustive
def test_a_compiled_model_follows_another_recipe(compiled_anew):
    net, (x, _) = model(MXFP8), problem()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), net(x))
    fine = compiled(x)
    mx.quantize_(net, MXFP6)
    assert torch.equal(compiled(x), net(x)) and not torch.equal(compiled(x), fine)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_optimizers_update_many_weights_at_once_as_they_do_plain_ones(kind, monkeypatch):
    """The default of a GPU: ``foreach``."""
    optimizers, many = importlib.import_module("torch.optim.optimizer"), []
    monkeypatch.setattr(optimizers, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
    plain = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)).bfloat16()
    ours = mx.quantize_(copy.deepcopy(plain), MXFP8BlockScaling())
    dispatch = TrainingWeight.__torch_dispatch__.__func__

    def seen(cls, func, types, args=(), kwargs=None):
        many.append("_foreach_" in str(func))
        return dispatch(cls, func, types, args, kwargs)

    both = [kind(model.parameters(), lr=0.1, weight_decay=0.1) for model in (plain, ours)]
    with monkeypatch.context() as patch:
        patch.setattr(TrainingWeight, "__torch_dispatch__", classmethod(seen))
        for _ in range(2):
            for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
                one.grad = other.grad = torch.randn(one.shape).bfloat16()
            many.clear()  # the first step makes the states, one weight at a time
            for optimizer in both:
                optimizer.step()
    assert many and all(many)
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(one, values_of(other))
