"""SmoothQuant: the model computes the same before its weights are rounded, and less of it is lost afterwards."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import mxtensor as mx
from mxtensor.calibration.blocks import Stream
from mxtensor.calibration.layers import calibrated, in_place
from mxtensor.calibration.smoothing import AWQ, SmoothQuant, pairs_of
from mxtensor.convert.changes import checked_changes
from mxtensor.convert.configs import choose
from tests.helpers.calibration_model import Stopped, stopping

transformers = pytest.importorskip("transformers")


def llama(kind="Llama", **settings):
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=50, **settings,
    )  # fmt: skip
    torch.manual_seed(0)
    m = getattr(transformers, f"{kind}ForCausalLM")(config).eval().requires_grad_(False)
    for name, p in m.named_parameters():
        if name.endswith("norm.weight"):
            p.copy_(torch.randn(p.shape).exp())  # some channels are large
        elif "up_proj" in name or "v_proj" in name:
            p.mul_(torch.randn(len(p), *[1] * (p.dim() - 1)).mul(1.5).exp() * 2)
    return m


def ids(seed=1):
    return torch.randint(0, 50, (6, 24), generator=torch.Generator().manual_seed(seed))


def data():
    return list(ids().split(2))


def layers_of(m, format):
    changes = checked_changes(m, choose(m, format, None)[0])
    return calibrated(changes)


def lost(q, m):
    expected = m(ids(2)).logits
    return ((q(ids(2)).logits - expected).norm() / expected.norm()).item()


def test_the_pairs_of_a_llama_are_norms_values_and_the_gated_branch():
    m = llama()
    layers, block = layers_of(m, "mxfp4"), m.model.layers[0]
    stream = Stream(m, data(), layers)
    attention, mlp = block.self_attn, block.mlp
    pairs = pairs_of(block, layers, lambda: stream.run(0, 0, stream.states[0]))
    assert [(pair.producer, pair.consumers, pair.copies) for pair in pairs] == [
        (block.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj], 1),
        (block.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj], 1),
        (attention.v_proj, [attention.o_proj], 2),
        (mlp.up_proj, [mlp.down_proj], 1),
    ]
    channels = torch.arange(32.0)
    read = pairs[2].as_read(channels).view(4, 16)  # each of 2 heads of 16 channels is read by 2 heads
    assert torch.equal(read, torch.stack([channels[:16], channels[:16], channels[16:], channels[16:]]))
    assert torch.equal(pairs[2].as_made(read.flatten() - torch.arange(64) % 32 // 16), channels)


@pytest.mark.parametrize("method", [SmoothQuant(), SmoothQuant(0.5), SmoothQuant(1.0), AWQ()])
def test_a_smoothed_block_computes_the_same_with_other_weights(method):
    m = llama(attention_bias=True)
    for layer in m.model.layers:
        layer.self_attn.v_proj.bias.normal_()
    layers = layers_of(m, "mxfp4")
    stream = Stream(m, data(), layers)
    inside = {layer: change for layer, change in layers.items() if ".0." in change.fqn}
    edits = method.edits(stream, 0, stream.states, inside)
    expected = stream.run(0, 1, stream.states[1])
    with in_place(edits):
        got = stream.run(0, 1, stream.states[1])
        block = m.model.layers[0]
        x = block.input_layernorm.weight
    assert torch.allclose(got, expected, rtol=1e-3, atol=1e-3) and len(edits) >= 9
    assert x is not block.input_layernorm.weight and not torch.equal(x, block.input_layernorm.weight)


def reference(x, weights, alpha):
    """SmoothQuant's formula, with the geometric mean of the scales taken out."""
    s = x.abs().amax(0) ** alpha / torch.stack([w.abs().amax(0) for w in weights]).amax(0) ** (1 - alpha)
    return s / torch.exp(torch.log(s).mean())


def test_the_scales_are_those_of_the_formula():
    m = llama()
    got = mx.calibrate(copy.deepcopy(m), data(), "mxfp8", mx.SmoothQuant(0.4))
    found = {}
    block = m.model.layers[0]
    with block.self_attn.q_proj.register_forward_pre_hook(lambda layer, args: found.update(x=args[0].flatten(0, -2))):
        m(ids())
    attention = block.self_attn
    s = reference(found["x"], [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight], 0.4)
    assert torch.allclose(got.model.layers[0].input_layernorm.weight, block.input_layernorm.weight / s, rtol=1e-4)
    expected = mx.quantize(attention.q_proj.weight * s, "mxfp8")
    same = got.model.layers[0].self_attn.q_proj.weight.rowwise.data == expected.rowwise.data
    assert same.float().mean() > 0.999  # s is summed in another order


def awq_reference(x, weights, format, grid):
    """The paper's search: for each alpha, the error of the layers' outputs after the scaled weights are rounded."""
    best, least = None, float("inf")
    for step in range(grid):
        s = x.abs().mean(0) ** (step / grid)
        s = s / s.log().mean().exp()
        outs = [(x / s) @ mx.quantize(w * s, format).dequantize().T for w in weights]
        error = sum(((out - x @ w.T).norm() / (x @ w.T).norm()) ** 2 for out, w in zip(outs, weights, strict=True))
        if error < least:
            best, least = s, error
    return best


@pytest.mark.parametrize("grid", [1, 5])
def test_awq_takes_the_scale_of_the_papers_search(grid):
    m = llama()
    got = mx.calibrate(copy.deepcopy(m), data(), "mxfp4-weight-only", mx.AWQ(grid))
    found = {}
    block = m.model.layers[0]
    with block.mlp.gate_proj.register_forward_pre_hook(lambda layer, args: found.update(x=args[0].flatten(0, -2))):
        m(ids())
    s = awq_reference(found["x"], [block.mlp.gate_proj.weight, block.mlp.up_proj.weight], "mxfp4", grid)
    norm = got.model.layers[0].post_attention_layernorm.weight
    assert torch.allclose(norm, block.post_attention_layernorm.weight / s, rtol=1e-3)
    assert (grid == 1) == torch.equal(norm, block.post_attention_layernorm.weight)


@pytest.mark.parametrize("rounding", [[], ["mse"], ["gptq"]])
def test_less_is_lost_with_awq(rounding):
    """Not so in nvfp4, whose blocks of 16 need no scaling on this model."""
    m, format = llama(), "mxfp4-weight-only"
    alone = (
        mx.calibrate(copy.deepcopy(m), data(), format, rounding) if rounding else mx.quantize_(copy.deepcopy(m), format)
    )
    assert lost(mx.calibrate(copy.deepcopy(m), data(), format, ["awq", *rounding]), m) < 0.95 * lost(alone, m)


@pytest.mark.exhaustive(quick=2)
@pytest.mark.parametrize(
    ("format", "rounding"),
    [("mxfp4", "nearest"), ("mxfp4-weight-only", "nearest"), ("nvfp4", "nearest"),
     ("mxfp4", "gptq"), ("mxfp4-weight-only", "gptq")],
)  # fmt: skip
def test_less_is_lost_than_without(format, rounding):
    """Not so GPTQ in nvfp4, whose blocks of 16 need no smoothing: on this model more is lost with it."""
    m = llama()
    alone = mx.quantize_(copy.deepcopy(m), format)
    steps = ["smooth"]
    if rounding == "gptq":
        alone, steps = mx.calibrate(copy.deepcopy(m), data(), format), ["smooth", "gptq"]
    smoothed = mx.calibrate(copy.deepcopy(m), data(), format, steps)
    assert lost(smoothed, m) < 0.96 * lost(alone, m)
    assert all(not p.requires_grad for p in smoothed.parameters())


def test_an_interrupted_calibration_leaves_every_parameter_and_continues(tmp_path):
    m = llama()
    before = {name: (p, p.clone()) for name, p in m.named_parameters()}
    whole = mx.calibrate(copy.deepcopy(m), data(), "mxfp4", ["smooth", "gptq"])
    smooth = stopping(SmoothQuant(), "scales", 6)  # in the second block: each has four pairs
    with pytest.raises(Stopped):
        mx.calibrate(m, data(), "mxfp4", [smooth, "gptq"], state=tmp_path)
    assert all(p is before[name][0] and torch.equal(p, before[name][1]) for name, p in m.named_parameters())
    got = mx.calibrate(m, data(), "mxfp4", [smooth, "gptq"], state=tmp_path)
    assert len(smooth.calls) == 6 + 4 and torch.equal(got(ids()).logits, whole(ids()).logits)


def test_a_failure_while_weights_are_replaced_restores_all():
    m = llama()
    before = dict(m.named_parameters())
    first = m.model.layers[0].self_attn.q_proj

    class Fails(nn.Linear):
        def __setattr__(self, name, value):
            if isinstance(value, mx.MXTensor) and isinstance(first.weight, mx.MXTensor):  # of another block: at the end
                raise MemoryError
            super().__setattr__(name, value)

    m.model.layers[1].mlp.down_proj.__class__ = Fails
    with pytest.raises(MemoryError):
        mx.calibrate(m, data(), "mxfp4", "smooth")
    assert all(p is before[name] for name, p in m.named_parameters())


def test_a_norm_that_scales_otherwise_is_refused():
    m = llama("Gemma", head_dim=16)  # it multiplies by 1 + weight
    before = dict(m.named_parameters())
    with pytest.raises(ValueError, match=r"SmoothQuant: block 0 \(GemmaDecoderLayer\) computes something else"):
        mx.calibrate(m, data(), "mxfp4", ["smooth", "gptq"])
    assert all(p is before[name] for name, p in m.named_parameters())


class Odd:
    """An output of a kind that nobody knows."""


@dataclass
class Output:
    values: torch.Tensor
    loss: torch.Tensor | None = None


class Normed(nn.Module):
    """``form``: what it returns, and what else reads the output of its norm or its layer ``up_proj``."""

    def __init__(self, form="plain"):
        super().__init__()
        self.form = form
        self.norm, self.first, self.second = nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.norm.weight.data = torch.randn(32).exp()
        self.up_proj, self.down_proj = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        y = self.norm(x)
        x = self.first(y)
        if self.form == "residual":
            x = x + y
        if self.form == "in place":
            self.second(y.mul_(y))
        if self.form == "twice":
            self.second(self.norm(x))
        z = self.up_proj(x)
        z = torch.nn.functional.gelu(z) if self.form == "gelu" else z * torch.sigmoid(x.repeat(1, 2))
        x = self.down_proj(z)
        if self.form == "mask":
            x = torch.cat([x, torch.full_like(x, -torch.inf)])
        return {
            "dict": {"a": [x], "b": None}, "tuple": (x.long(), (x,)), "norm returned": (x, {"y": y}), "odd": Odd(),
            "dataclass": Output(x),
        }.get(self.form, x)  # fmt: skip


def normed(form):
    torch.manual_seed(0)
    return Normed(form).requires_grad_(False)


def pairs_in(m):
    layers = [module for module in m.modules() if isinstance(module, nn.Linear)]
    stream = Stream(m, [torch.randn(64, 32)], layers)
    pairs = pairs_of(m, layers, lambda: stream.run(0, 0, stream.states[0]))
    return {(pair.producer, *pair.consumers) for pair in pairs}


@pytest.mark.parametrize("form", ["plain", "dict", "tuple", "dataclass", "mask"])
@pytest.mark.parametrize("method", ["smooth", "awq"])
def test_a_model_of_one_block_returns_anything(form, method):
    m = normed(form)
    got = mx.calibrate(copy.deepcopy(m), [torch.randn(64, 32)], "mxfp4-weight-only", [method, "gptq"])
    assert pairs_in(m) == {(m.norm, m.first), (m.up_proj, m.down_proj)}
    assert not torch.equal(got.norm.weight, m.norm.weight)


def test_an_output_without_a_tensor_cannot_be_compared():
    with pytest.raises(ValueError, match=r"SmoothQuant: block 0 \(Normed\) returns .*Odd.*, which has no floating-p"):
        mx.calibrate(normed("odd"), [torch.randn(64, 32)], "mxfp4-weight-only", "smooth")


@pytest.mark.parametrize("form", ["residual", "in place", "twice", "norm returned"])
def test_a_norm_that_something_else_reads_is_in_no_pair(form):
    m = normed(form)
    assert pairs_in(m) == {(m.up_proj, m.down_proj)}
    got = mx.calibrate(copy.deepcopy(m), [torch.randn(64, 32)], "mxfp4-weight-only", SmoothQuant(0.5))
    assert torch.equal(got.norm.weight, m.norm.weight)


def test_layers_with_an_activation_between_them_are_not_a_pair():
    m = normed("gelu")
    assert pairs_in(m) == {(m.norm, m.first)}
    mx.calibrate(m, [torch.randn(64, 32)], "mxfp4-weight-only", SmoothQuant(0.5))


def test_a_bert_and_a_model_of_one_block_of_transformers():
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    torch.manual_seed(0)
    m = transformers.BertForMaskedLM(config).eval().requires_grad_(False)
    mx.calibrate(m, data(), "mxfp4-weight-only", ["smooth", "gptq"])
    single = llama()
    single.model.layers = single.model.layers[:1]
    single.config.num_hidden_layers = 1
    before = single.model.layers[0].input_layernorm.weight
    mx.calibrate(single, data(), "mxfp4-weight-only", ["smooth", "gptq"])
    assert not torch.equal(single.model.layers[0].input_layernorm.weight, before)


def test_shared_parameters_are_left_as_they_are():
    m = llama()
    first, second = m.model.layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    got = mx.calibrate(copy.deepcopy(m), data(), "mxfp8", mx.SmoothQuant(0.5))
    a, b = got.model.layers
    assert a.mlp.up_proj.weight is b.mlp.up_proj.weight
    assert torch.equal(a.post_attention_layernorm.weight, first.post_attention_layernorm.weight)
    assert not torch.equal(a.input_layernorm.weight, first.input_layernorm.weight)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: mx.calibrate(llama(), data(), "mxfp4", ["gptq", "smooth"]), ValueError, "scale channels come first"),
        (lambda: mx.calibrate(llama(), data(), "mxfp4", ["mse", "gptq"]), ValueError, "at most one that rounds"),
        (lambda: mx.calibrate(llama(), data(), "mxfp4", ["smooth", "omni"]), ValueError, "no method 'omni'"),
        (lambda: AWQ(0), ValueError, "grid"),
        (lambda: SmoothQuant(2), ValueError, "alpha"),
    ],
)
def test_wrong_calls(call, error, message):
    with pytest.raises(error, match=message):
        call()
