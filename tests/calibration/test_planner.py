"""mx.plan: measured errors equal what quantizing one layer changes, and are those of a small reference."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mxtensor as mx
from mxtensor.calibration.blocks import Stream
from mxtensor.calibration.planner import Candidate, Sums, errors_of_model
from tests.helpers.calibration_model import FORMS, Stopped, batches, model

FORMATS = ("mxfp4-weight-only", "mxfp6_e2m3-weight-only")


def quantized(m, name, format):
    return mx.quantize_(copy.deepcopy(m), {name: format})


def kl(m, reference, data):
    pairs = [(reference(ids).log_softmax(-1), m(ids).log_softmax(-1)) for ids in data]
    return torch.stack([F.kl_div(q, p, reduction="none", log_target=True).sum(-1).mean() for p, q in pairs]).mean()


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("form", FORMS)
def test_errors_are_those_of_the_model_with_one_layer_quantized(form):
    m = model(form)
    m.lm_head.weight.mul_(3)
    data = batches()
    plan = mx.plan(m, data, 5, FORMATS, filter_fn=lambda module, fqn: isinstance(module, nn.Linear))
    assert set(plan.weights) == {f"{name}.weight" for name, x in m.named_modules() if isinstance(x, nn.Linear)}
    measured, true = [], []
    for name, weight in plan.weights.items():
        assert not weight.estimated
        for format in FORMATS:
            measured.append(weight.errors[format])
            true.append(kl(quantized(m, name, format), m, data).item())
    measured, true = torch.tensor(measured), torch.tensor(true)
    assert 0.8 < measured.sum() / true.sum() < 1.25
    assert ((measured / true).log().abs() < 0.8).all()


@pytest.mark.parametrize("form", ["plain", "between"])
def test_squared_errors_are_those_of_the_output(form):
    m, data = model(form), batches()
    plan = mx.plan(m, data, 5, FORMATS, measure="squared")
    for name, weight in plan.weights.items():
        small = quantized(m, name, FORMATS[0])
        true = torch.stack([(small(x) - m(x)).square().sum() / m(x).square().sum() for x in data]).mean().item()
        assert 0.6 < weight.errors[FORMATS[0]] / true < 1.6


@pytest.mark.parametrize("formats", [FORMATS, ("mxfp4", "mxfp8-weight-only")])
def test_errors_of_layers_equal_a_reference(formats):
    m, data = model(), batches()
    plan = mx.plan(m, data, 8, formats, measure="layer")
    inputs = []
    m.layers[1].down.register_forward_pre_hook(lambda layer, args: inputs.append(args[0]))
    for ids in data:
        m(ids)
    x, w = torch.cat(inputs), m.layers[1].down.weight
    for format in formats:
        small = quantized(m, "layers.1.down.weight", format).layers[1].down
        change = small(x) - m.layers[1].down(x)
        expected = change.square().sum() / (x @ w.T).square().sum()
        assert plan.weights["layers.1.down.weight"].errors[format] == pytest.approx(expected.item(), rel=1e-3)


def test_probes_of_a_linear_model_are_exact_in_the_mean():
    """One layer, whose output is the model's: the mean of (g d)^2 over labels is d (diag(p) - p p^T) d."""
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(8, 5, bias=False)).requires_grad_(False)
    x, change = torch.randn(4, 8), 0.1 * torch.randn(5, 8)
    p, d = m(x).softmax(-1), x @ change.T
    expected = ((p * d.square()).sum(-1) - (p * d).sum(-1).square()).mean() / 2
    found = errors_of_model(
        Stream(m, [x.repeat(5000, 1)], [m[0]]), [m[0]], lambda layer: {"f": Candidate(layer.weight + change, None)},
        "kl", torch.Generator().manual_seed(0),
    )  # fmt: skip
    assert found[m[0]]["f"] == pytest.approx(expected.item(), rel=0.05)


def test_an_input_is_cast_as_the_layer_casts_it():
    torch.manual_seed(0)
    layer, x = nn.Linear(32, 16).requires_grad_(False), torch.randn(3, 5, 32)
    small = mx.quantize_(nn.Sequential(copy.deepcopy(layer)), "mxfp4")[0]
    sums = Sums()
    sums.add(layer, x, None, {"f": Candidate(small.weight.dequantize(), small.weight.recipe.activation)})
    expected = (small(x) - layer(x)).square().sum() / (layer(x) - layer.bias).square().sum()
    assert sums.result(1)[layer]["f"] == pytest.approx(expected.item(), rel=1e-3)


def test_a_plan_is_better_than_one_format_of_the_same_bits():
    m, data = model(), batches()
    plan = mx.plan(m, data, 4.5, ("mxfp4-weight-only", "nvfp4-weight-only", "mxfp8-weight-only"))
    assert plan.bits <= 4.5
    planned, whole = (mx.quantize_(copy.deepcopy(m), config) for config in (plan, "nvfp4-weight-only"))
    assert kl(planned, m, data) <= kl(whole, m, data)
    assert kl(mx.calibrate(copy.deepcopy(m), data, plan), m, data) < kl(planned, m, data)


def test_the_same_seed_gives_the_same_plan_and_nothing_changes():
    m = model().requires_grad_(True).train()
    before = {name: (p, p.clone()) for name, p in m.named_parameters()}
    a, b, c = (mx.plan(m, batches(), 5, FORMATS, seed=seed) for seed in (0, 0, 1))
    assert a.weights == b.weights and a.weights != c.weights
    for name, p in m.named_parameters():
        assert p is before[name][0] and p.equal(before[name][1]) and p.requires_grad and p.grad is None
    assert m.training and not any(module._forward_hooks or module._forward_pre_hooks for module in m.modules())


def test_an_interrupt_leaves_the_model_as_it_was():
    m = model().requires_grad_(True).train()
    calls = 0

    class Stops(nn.Linear):
        def forward(self, x):
            nonlocal calls
            calls += 1
            if calls > 5:
                raise Stopped
            return super().forward(x)

    m.layers[1].down.__class__ = Stops
    before = dict(m.named_parameters())
    with pytest.raises(Stopped):
        mx.plan(m, batches(), 5, FORMATS)
    assert all(p is before[name] and p.requires_grad for name, p in m.named_parameters()) and m.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in m.modules())


def test_a_tied_head_is_measured_by_its_product_and_an_unused_layer_is_estimated():
    m = model()
    m.lm_head.weight = m.embed.weight
    m.layers[1].unused = nn.Linear(32, 32)
    plan = mx.plan(m, batches(), 6, FORMATS, include_head=True)
    assert not plan.weights["embed.weight"].estimated and plan.weights["embed.weight"].values == 1600
    unused = plan.weights["layers.1.unused.weight"]
    assert unused.estimated and unused.errors[FORMATS[0]] > unused.errors[FORMATS[1]] > 0
    mx.quantize_(m, plan)
    assert m.lm_head.weight is m.embed.weight and isinstance(m.embed.weight, mx.MXTensor)


def test_attention_and_experts_are_estimated():
    torch.manual_seed(0)
    m = nn.Sequential(nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True), nn.Linear(32, 9)).eval()
    plan = mx.plan(m, [torch.randn(2, 8, 32)], 5, FORMATS, measure="kl")
    assert plan.weights["0.self_attn.in_proj_weight"].estimated and not plan.weights["0.linear1.weight"].estimated
    assert sum(weight.values for weight in plan.weights.values()) == plan.values
    mx.quantize_(m, plan)
    assert isinstance(m[0].self_attn.in_proj_weight, mx.MXTensor)


def test_blocks_that_no_gradient_reaches_are_estimated():
    """Mimi rounds what its blocks return; others read what earlier blocks returned (Mask2Former)."""

    class Rounds(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.decoder = nn.ModuleList(nn.Linear(32, 32) for _ in range(3)), nn.Linear(32, 9)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.decoder(x.argmax(-1, keepdim=True).expand(x.shape).float())

    plan = mx.plan(Rounds(), [torch.randn(4, 32)], 5, FORMATS)
    assert [weight.estimated for weight in plan.weights.values()] == [True, True, True, False]


def test_a_loss_before_the_logits_is_passed_over():
    class WithLoss(nn.Sequential):
        def forward(self, x):
            y = super().forward(x)
            return y.sum(), y

    torch.manual_seed(0)
    layers, x = [nn.Linear(32, 32), nn.Linear(32, 9)], torch.randn(64, 32)
    a, b = (mx.plan(kind(*layers).requires_grad_(False), [x], 6) for kind in (WithLoss, nn.Sequential))
    assert a.weights == b.weights


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x):
        return "text"


def test_a_budget_that_is_too_small_is_an_error_before_the_model_runs():
    m = model()
    m.register_forward_pre_hook(lambda module, args: pytest.fail("the model runs"))
    with pytest.raises(ValueError, match=r"bits is 2, and the smallest formats take 4\.25 bits"):
        mx.plan(m, batches(), 2)


def test_sizes_are_those_of_the_quantized_weights():
    m, formats = nn.Linear(100, 70), list(mx.FORMATS)
    plan = mx.plan(m, [torch.randn(8, 100)], 16, formats, measure="layer")
    wanted = {name: mx.quantize_(copy.deepcopy(m), name).weight.nbytes for name in formats}
    assert plan.weights["weight"].nbytes == wanted and len(set(wanted.values())) > 5


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: mx.plan(None, batches()), TypeError, "plan: model is None; pass a torch.nn.Module"),
        (lambda: mx.plan(model(), batches(), -1), ValueError, "bits"),
        (lambda: mx.plan(model(), batches(), 2), ValueError, "bits is 2, and the smallest formats take 4.25 bits"),
        (lambda: mx.plan(model(), batches(), measure="mse"), ValueError, "measure is 'mse'; choose one of 'kl'"),
        (lambda: mx.plan(model(), batches(), formats="mxfp4"), TypeError, "formats is 'mxfp4'; pass a list of names"),
        (lambda: mx.plan(model(), batches(), formats=["MXFP8BlockScaling"]), ValueError, "names a class"),
        (lambda: mx.plan(model(), []), ValueError, "plan: data is empty"),
        (lambda: mx.plan(model(), {"ids": batches()[0]}), TypeError, r"plan: data is .*; pass a list of batches, such"),
        (lambda: mx.plan(model().to("meta"), batches()), ValueError, "is on the device meta and has no values; load"),
        (lambda: mx.plan(nn.ReLU(), [torch.ones(1)]), ValueError, "no weight of ReLU passed the filter"),
        (lambda: mx.plan(Odd(), [torch.ones(1, 32)]), ValueError, "returns 'text', which has no gradient; pass"),
    ],
)
def test_wrong_calls(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("measure", ["kl", "squared"])
def test_gradients_flow_whatever_the_caller_has_switched_off(measure):
    """All errors were estimated there, without a word."""
    m, data = model(), batches()
    m.lm_head.requires_grad_(True)
    plain = mx.plan(m, data, measure=measure)
    with torch.no_grad():
        assert mx.plan(m, data, measure=measure).weights == plain.weights
    with torch.inference_mode():
        assert mx.plan(m, [ids.clone() for ids in data], measure=measure).weights == plain.weights
        with pytest.raises(ValueError, match=r"the model was made inside torch.inference_mode\(\)"):
            mx.plan(model(), data, measure=measure)
        assert mx.plan(model(), data, measure="layer").bits <= 5
    assert m.lm_head.weight.requires_grad and all(p.grad is None for p in m.parameters())
    assert not any(weight.estimated for weight in plain.weights.values())


class HasCut(nn.Module):
    """A layer that no gradient reaches, one that reads no row, and one that both reach."""

    def __init__(self):
        super().__init__()
        self.cut, self.empty, self.head = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        y = self.cut(x).detach()
        self.empty(y[:0])
        return self.head(y)


def test_layers_without_a_gradient_or_a_row_are_estimated_and_named(capsys):
    torch.manual_seed(0)
    m = HasCut()
    plan = mx.plan(m, [torch.randn(16, 32)])
    assert {fqn: weight.estimated for fqn, weight in plan.weights.items()} == {
        "cut.weight": True, "empty.weight": True, "head.weight": False
    }  # fmt: skip
    assert all(error > 0 for weight in plan.weights.values() for error in weight.errors.values())
    saw, reached = (line for line in capsys.readouterr().err.splitlines() if "of 3 layers" in line)
    assert "1 of 3 layers saw no input" in saw and "their values: empty.weight; pass data" in saw
    assert "no gradient of the output reaches 1 of 3 layers" in reached and "values: cut.weight; they" in reached


@pytest.mark.parametrize("measure", ["kl", "squared"])
def test_an_output_that_is_not_finite_is_named(measure):
    m = model()
    m.layers[0].up.weight[1, 2] = torch.inf
    with pytest.raises(ValueError, match="plan: the output of the model has NaN or Inf"):
        mx.plan(m, batches(), measure=measure)


def test_a_masked_token_has_no_share_in_the_divergence():
    class Masked(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, ids):
            return torch.cat((self.inner(ids), torch.full((*ids.shape, 1), -torch.inf)), -1)

    m, data = model(), batches()
    errors = [sum(w.errors[f] for w in mx.plan(n, data).weights.values() for f in w.errors) for n in (m, Masked(m))]
    assert 0.5 < errors[1] / errors[0] < 2


def test_values_that_are_not_finite_are_named():
    m = model()
    m.layers[0].up.weight[1, 2] = torch.nan
    with pytest.raises(ValueError, match=r"plan: the errors of layers.0.up.weight are not finite"):
        mx.plan(m, batches(), measure="layer")
