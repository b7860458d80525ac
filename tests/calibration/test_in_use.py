"""Each run of a block sees what it saw when its inputs were recorded, whatever a model does with its arguments."""

import copy

import pytest
import torch
from torch import nn

import mxtensor as mx
from mxtensor.calibration.blocks import Call, Stream, as_in_use
from mxtensor.calibration.moments import groups_of, inputs_of
from mxtensor.report.model_report import output_errors
from tests.helpers.calibration_model import batches, error, model, same, weights

SMALL = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 2}  # fmt: skip


def linear(m):
    return [module for module in m.modules() if isinstance(module, nn.Linear)]


def check_stream(m, data, run):
    """Two runs of all blocks give what the last block gives in the model. Returns the number of blocks."""
    stream = Stream(m, data, linear(m))
    seen = []
    with stream.blocks[-1].register_forward_hook(lambda module, args, out: seen.append(out)):
        for batch in data:
            run(batch)
    expected = [out[0] if isinstance(out, tuple) else out for out in seen]
    for _ in range(2):
        states = list(stream.states)
        for index in range(len(stream.blocks)):
            states = [stream.run(index, batch, state) for batch, state in enumerate(states)]
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(states, expected, strict=True))
    return len(stream.blocks)


# ---------------------------------------------------------------------------------------------- caches


class Config:
    def __init__(self, **nested):
        self.use_cache = True
        self.__dict__ |= nested


def test_every_config_of_a_model_and_of_its_parts_caches_nothing_and_then_does_again():
    text, decoder = Config(), Config()
    m = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    m.config, m[0].config, m[1].config = Config(text_config=text), decoder, object()
    off = Config()
    off.use_cache = False
    m[0][0].config = off
    with pytest.raises(KeyError), as_in_use(m):
        assert not (m.config.use_cache or text.use_cache or decoder.use_cache)
        raise KeyError
    assert m.config.use_cache and text.use_cache and decoder.use_cache and not off.use_cache


def test_a_model_whose_stacks_have_configs_of_their_own():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=50, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    m = transformers.T5ForConditionalGeneration(config).eval().requires_grad_(False)
    data = [{"input_ids": ids[:, :20], "decoder_input_ids": ids[:, :9]} for ids in batches()]
    assert check_stream(m, data, lambda batch: m(**batch, use_cache=False)) == 2
    assert m.decoder.config.use_cache


class OwnCache(nn.Module):
    """Passes a cache to its language model, whatever the config says."""

    def __init__(self, m):
        super().__init__()
        self.m = m

    def forward(self, ids):
        return self.m(ids, past_key_values=pytest.importorskip("transformers").DynamicCache(), use_cache=True).logits


@pytest.mark.parametrize("form", ["of the model", "of the data"])
def test_a_cache_is_as_it_was_in_each_run(form):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    m = (
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, attn_implementation="eager"))
        .eval()
        .requires_grad_(False)
    )
    ids = [ids[:, :20] for ids in batches()]
    if form == "of the model":
        whole = OwnCache(m)
        data, run = ids, whole
    else:
        whole, data = m, []
        for batch in ids:
            cache = transformers.DynamicCache()
            m(batch, past_key_values=cache)
            data.append({"input_ids": batch, "past_key_values": cache})

        def run(batch):
            m(**batch | {"past_key_values": copy.deepcopy(batch["past_key_values"])})

    assert check_stream(whole, data, run) == 2
    mx.calibrate(copy.deepcopy(whole), data, "mxfp4-weight-only", ["gptq", "bias"])
    mx.plan(whole, data, 6)
    assert form == "of the model" or all(batch["past_key_values"].get_seq_length() == 20 for batch in data)


def test_one_cache_in_two_arguments_is_one_copy():
    class StateCache:
        pass

    cache = StateCache()
    call = Call((torch.ones(1), cache), {"cache": cache, "other": 3}).fresh()
    assert call.args[1] is call.kwargs["cache"] is not cache and call.kwargs["other"] == 3


# ---------------------------------------------------------------------------------------------- writes


class Writes(nn.Module):
    """A block that writes into its input, and into what its layers read."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        y = torch.relu(self.up(self.norm(x)))
        z = self.down(y)
        y.zero_()
        x += z
        return x


class WritingModel(nn.Module):
    def __init__(self, reverse=False):
        super().__init__()
        self.layers, self.reverse = nn.ModuleList(Writes() for _ in range(2)), reverse

    def forward(self, x):
        for layer in reversed(self.layers) if self.reverse else self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("reverse", [False, True])
def test_blocks_that_write_into_their_inputs(reverse):
    m = WritingModel(reverse).eval().requires_grad_(False)
    data = [torch.randn(64, 32) for _ in range(2)]
    before = [x.clone() for x in data]
    assert check_stream(m, data, lambda x: m(x.clone())) == (1 if reverse else 2)
    x = data[0]
    rounded = mx.quantize_(copy.deepcopy(m), "mxfp4-weight-only")
    got = mx.calibrate(copy.deepcopy(m), data, "mxfp4-weight-only")
    assert all(torch.equal(a, b) for a, b in zip(data, before, strict=True))
    lost, lost_by_rounding = ((q(x.clone()) - m(x.clone())).norm() for q in (got, rounded))
    assert lost < 0.8 * lost_by_rounding
    mx.plan(m, data, 6, measure="layer")


def test_inputs_are_those_at_the_time_of_the_call():
    m, x = Writes().requires_grad_(False), torch.randn(8, 32)
    expected = torch.relu(m.up(m.norm(x)))
    found, _ = inputs_of([m.up, m.down], lambda: m(x.clone()))
    assert torch.equal(found[m.down][0], expected) and torch.equal(found[m.up][0], m.norm(x))
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)

    def run():
        y = torch.ones(2, 4)
        a(y)
        b(y.add_(1))

    assert [group for group, _ in groups_of([a, b], run)] == [[a], [b]]


# ---------------------------------------------------------------------------------------------- layers that are called


class Named(nn.Module):
    """Calls its layers with the name of their argument."""

    def __init__(self):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return self.b(input=torch.relu(self.a(input=self.norm(x))))


@pytest.mark.parametrize("method", ["gptq", "smooth", "bias"])
def test_layers_that_are_called_by_name(method):
    torch.manual_seed(0)
    m, data = Named().requires_grad_(False), [torch.randn(64, 32)]
    got = mx.calibrate(copy.deepcopy(m), data, "mxfp4-weight-only", method)
    assert not same(got, mx.quantize_(copy.deepcopy(m), "mxfp4-weight-only")) or got.b.bias is not m.b.bias
    assert not any(weight.estimated for weight in mx.plan(m, data, 6).weights.values())


@pytest.mark.parametrize("method", ["gptq", ["smooth", "gptq"], "bias"])
def test_layers_of_compiled_blocks_see_their_inputs(method):
    m = model()
    expected = mx.calibrate(copy.deepcopy(m), batches(), "mxfp4-weight-only", method)
    compiled = copy.deepcopy(m)
    for layer in compiled.layers:
        layer.compile(backend="eager")
    with torch.no_grad():
        compiled(batches()[0])
    plan = mx.plan(compiled, batches(), 6)
    assert plan.weights == mx.plan(m, batches(), 6).weights
    got = mx.calibrate(compiled, batches(), "mxfp4-weight-only", method)
    assert same(got, expected) and error(got, m) == pytest.approx(error(expected, m), rel=1e-4)
    reference = copy.deepcopy(m)
    reference.layers[0].compile(backend="eager")
    with torch.no_grad():
        reference(batches()[0])
    rows = output_errors(got, reference, [{"ids": ids} for ids in batches()])
    assert [row.fqn for row in rows] == list(weights(got))


def test_layers_of_a_padded_encoder_see_their_inputs():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True)
    m = nn.TransformerEncoder(layer, 2).eval().requires_grad_(False)
    padding = torch.zeros(2, 16, dtype=torch.bool)
    padding[0, 9:] = True
    data = [{"src": torch.randn(2, 16, 32), "src_key_padding_mask": padding} for _ in range(2)]
    rounded = mx.quantize_(copy.deepcopy(m), "mxfp4-weight-only")
    got = mx.calibrate(copy.deepcopy(m), data, "mxfp4-weight-only")
    assert not torch.equal(got.layers[0].linear1.weight.dequantize(), rounded.layers[0].linear1.weight.dequantize())


class Routed(nn.Module):
    """A linear layer for each of three experts; the last one gets no token, the middle one an empty tensor."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, x):
        return self.experts[0](x) + self.experts[1](x[:0]).sum()


@pytest.mark.parametrize("method", [[], "mse", "gptq", "smooth", "bias", ["gptq", "bias"]])
def test_layers_without_an_input_are_named_and_get_no_bias(method, capsys):
    m = nn.Sequential(Routed(), nn.Linear(32, 32)).requires_grad_(False)
    got = mx.calibrate(copy.deepcopy(m), [torch.randn(64, 32) + 1], "mxfp4-weight-only", method)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "saw no input" in line]
    assert line.startswith(
        "calibrate: 2 of 4 layers saw no input, and are rounded by their values alone: 0.experts.*.weight; pass data"
    )
    first, *others = got[0].experts
    assert all(expert.bias is None for expert in others) and (first.bias is not None) == ("bias" in method)
    assert got(torch.randn(4, 32)).isfinite().all()


def test_plan_names_layers_without_an_input(capsys):
    m = nn.Sequential(Routed(), nn.Linear(32, 32)).requires_grad_(False)
    plan = mx.plan(m, [torch.randn(64, 32)], 6)
    assert plan.weights["0.experts.2.weight"].estimated
    assert "plan: 2 of 4 layers saw no input, and have errors that are estimated" in capsys.readouterr().err
    mx.calibrate(model(), batches(), "mxfp4-weight-only")
    assert "saw no input" not in capsys.readouterr().err


def test_means_that_are_not_finite_name_the_layer():
    m = nn.Sequential(nn.Linear(32, 32)).requires_grad_(False)
    with pytest.raises(ValueError, match=r"calibrate: 0.weight: the inputs of the layer are not all finite"):
        mx.calibrate(m, [torch.full((4, 32), torch.inf)], "mxfp4-weight-only", "bias")


@pytest.mark.parametrize("measure", ["kl", "squared", "layer"])
def test_plan_of_a_model_that_is_called_row_by_row(measure):
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(32, 8)

        def forward(self, x):
            return {"loss": x.sum(), "ids": x.long(), "rows": torch.stack([self.layer(row) for row in x])}

    torch.manual_seed(0)
    m, x = Rows().requires_grad_(False), torch.randn(16, 32)
    found = mx.plan(m, [x], 6, measure=measure).weights["layer.weight"]
    expected = mx.plan(m.layer, [x], 6, measure=measure).weights["weight"]
    assert not found.estimated and found.errors == pytest.approx(expected.errors, rel=0.6)


def test_a_list_may_have_places_without_a_module():
    """Informer has a list of convolutions, with None after the last layer."""
    m, data = model(), batches()
    wanted = mx.calibrate(copy.deepcopy(m), data, "mxfp4-weight-only")
    m.between = nn.ModuleList([nn.Identity(), nn.Identity()])
    m.between._modules["1"] = None
    found = mx.calibrate(m, data, "mxfp4-weight-only")
    assert torch.equal(found(data[0]), wanted(data[0])) and isinstance(found.layers[0].up.weight, mx.MXTensor)
