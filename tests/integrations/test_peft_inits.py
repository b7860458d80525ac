"""peft: initializations that take a part out of a quantized weight say what the second rounding costs."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mxtensor as mx

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
TAKES_PART = (
    r"peft: 2 weights are in {}, and the initialization of the adapters took a part out of them: .* norm of that"
)
INITS = ["pissa", "pissa_niter_4", "olora"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.out = nn.Linear(64, 96), nn.Linear(96, 64, bias=False), nn.Linear(64, 8)

    def forward(self, x):
        return self.out(self.down(self.up(x).relu()))


def config(init):
    return peft.LoraConfig(target_modules=["up", "down"], r=4, lora_alpha=8, init_lora_weights=init)


def layers(model):
    return {name: getattr(model.base_model.model, name) for name in ("up", "down")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", ["mxfp8", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("init", INITS)
def test_the_rest_is_rounded_once_and_the_loss_is_said(init, format, dtype):
    model = mx.quantize_(Net().to(dtype), f"{format}-weight-only", lambda module, name: name in ("up", "down"))
    before = {name: getattr(model, name).weight.detach().clone() for name in ("up", "down")}
    plain = copy.deepcopy(model)
    for name in before:
        getattr(plain, name).weight = nn.Parameter(before[name].dequantize(), requires_grad=False)
    name = mx.get_format(format).name
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match=TAKES_PART.format(name)) as caught:
        adapted = layers(peft.get_peft_model(model, config(init)))
    torch.manual_seed(0)
    wanted = layers(peft.get_peft_model(plain, config(init)))  # what peft makes of the same values in high precision
    lost = {}
    for name, layer in adapted.items():
        rest = wanted[name].weight.detach()
        assert torch.equal(layer.weight.dequantize(), mx.quantize(rest, format).dequantize())
        assert layer.weight.recipe == before[name].recipe and not layer.weight.requires_grad
        delta, change = (one.get_delta_weight("default") for one in (layer, wanted[name]))
        assert torch.equal(delta, change)
        part = rest.float() - before[name].dequantize().float()
        lost[name] = float((layer.weight.dequantize().float() - rest.float())[:64].norm() / part[:64].norm())
    (said,) = [str(w.message) for w in caught if "peft: 2 weights" in str(w.message)]
    worst = max(lost, key=lost.__getitem__)
    assert f"has {sum(lost.values()) / 2:.2g} of the norm" in said
    assert f"{lost[worst]:.2g} in {worst}." in said


@pytest.mark.parametrize("init", [True, False, "gaussian", "orthogonal"])
def test_other_initializations_leave_the_codes_and_say_nothing(init):
    model = mx.quantize_(Net(), "mxfp8-weight-only")
    before = {name: p for name, p in model.named_parameters() if isinstance(p, mx.MXTensor)}
    operands = {name: [t.clone() for t in p.components] for name, p in before.items()}
    adapted = peft.get_peft_model(model, config(init))
    for name, layer in layers(adapted).items():
        assert layer.weight is before[f"{name}.weight"]
        assert all(map(torch.equal, layer.weight.components, operands[f"{name}.weight"]))


def test_the_way_out_rounds_once():
    """Adapters of the model in high precision, whose base layers are quantized afterwards."""
    model = Net()
    original = {name: getattr(model, name).weight.detach().clone() for name in ("up", "down")}
    adapted = peft.get_peft_model(model, config("pissa"))
    rest = {name: layer.weight.detach().clone() for name, layer in layers(adapted).items()}
    mx.quantize_(adapted, "mxfp4-weight-only", lambda module, name: name.endswith("base_layer"))
    twice = mx.quantize_(Net(), "mxfp4-weight-only", lambda module, name: name in original)
    for name, weight in original.items():
        getattr(twice, name).weight.data = mx.quantize(weight, "mxfp4")
    with pytest.warns(UserWarning, match="rounded again"):
        twice = layers(peft.get_peft_model(twice, config("pissa")))
    for name, layer in layers(adapted).items():
        assert isinstance(layer.weight, mx.MXTensor) and type(layer.lora_A["default"].weight) is nn.Parameter
        assert torch.equal(layer.weight.dequantize(), mx.quantize(rest[name], "mxfp4").dequantize())
        once, second = (one.weight.dequantize() + one.get_delta_weight("default") for one in (layer, twice[name]))
        assert (once - original[name]).norm() < (second - original[name]).norm()


def test_a_second_adapter_warns_and_computes_with_the_weight_as_it_is():
    model = peft.get_peft_model(mx.quantize_(Net(), "mxfp8-weight-only"), config(True))
    before = layers(model)["up"].weight.dequantize()
    with pytest.warns(UserWarning, match="took a part"):
        model.add_adapter("second", config("pissa"))
    layer = layers(model)["up"]
    error = layer.weight.dequantize() + layer.get_delta_weight("second") - before
    assert 0 < error.norm() < 0.03 * before.norm()


def test_a_failure_leaves_the_weight():
    model = mx.quantize_(Net(), "mxfp8-weight-only")
    weight, before = model.up.weight, model.up.weight.dequantize()
    with pytest.raises(ValueError, match="pissa"):
        peft.get_peft_model(model, config("pissa_wrong_4"))
    left = [p for p in model.parameters() if p is weight]
    assert left and torch.equal(weight.dequantize(), before)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
def test_shira_adds_to_the_values():
    model = mx.quantize_(Net(), "mxfp4-weight-only").requires_grad_(False)
    adapted = peft.get_peft_model(model, peft.ShiraConfig(target_modules=["up"], r=2, init_weights=False))
    layer, x = adapted.base_model.model.up, torch.randn(5, 64)
    delta = layer.get_delta_weight("default").detach().to_dense()
    with mx.explain() as log:
        y = layer(x)
    assert not any(entry.kernel == "requantized" for entry in log.entries)
    assert torch.equal(y, F.linear(x, layer.weight.dequantize() + delta, layer.base_layer.bias))
    y.square().sum().backward()
    assert layer.shira_weight["default"].grad.ne(0).any()
