"""mx.calibrate: a model is quantized block by block, wholly or not at all, and an interrupted one continues."""

import copy

import pytest
import torch
from torch import nn

import mxtensor as mx
from mxtensor.calibration.blocks import Stream
from mxtensor.calibration.methods import GPTQ, BestScales
from mxtensor.calibration.moments import Moments, groups_of, inputs_of
from tests.helpers.calibration_model import FORMS, Stopped, batches, error, model, same, stopping, weights


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("format", ["mxfp4-weight-only", "mxfp4", "nvfp4-weight-only"])
def test_outputs_are_nearer_than_by_rounding_to_nearest(form, format):
    m = model(form)
    rounded = mx.quantize_(copy.deepcopy(m), format)
    for method in ("mse", "gptq"):
        got = mx.calibrate(copy.deepcopy(m), batches(), format, method)
        assert weights(got).keys() == weights(rounded).keys()
        for name, w in weights(got).items():
            assert w.recipe == weights(rounded)[name].recipe and not w.requires_grad
        assert not same(got, rounded)
    # the rounding of activations stays
    assert error(got, m) < (0.9 if format == "mxfp4" else 0.8) * error(rounded, m)


def test_the_scales_are_those_of_a_cast_if_asked():
    m = model()
    got = mx.calibrate(copy.deepcopy(m), batches(), "mxfp8-weight-only", GPTQ(search=False, correct="none"))
    assert not same(got, mx.quantize_(copy.deepcopy(m), "mxfp8-weight-only"))
    assert error(got, m) < error(mx.quantize_(copy.deepcopy(m), "mxfp8-weight-only"), m)


@pytest.mark.parametrize("format", ["mxfp4-weight-only", "nvfp4"])
def test_a_block_is_calibrated_on_the_outputs_of_the_quantized_blocks_before(format):
    m, method = model(), GPTQ(correct="none")
    got = mx.calibrate(copy.deepcopy(m), batches(), format, method)
    w = got.layers[2].up.weight
    moments = Moments(32, w.device, w.recipe.activation)
    for ids in batches():
        inputs, _ = inputs_of([got.layers[2].up], lambda ids=ids: got(ids))
        moments.add(inputs[got.layers[2].up], ())
    expected = method.operand(m.layers[2].up.weight, w.recipe.stored, moments)
    assert all(torch.equal(a, b) for a, b in zip(w.rowwise.tensors, expected.tensors, strict=True))


@pytest.mark.parametrize(
    "batch", [lambda ids: ids, lambda ids: {"ids": ids}, lambda ids: (ids, 1.0), lambda ids: [ids]]
)
def test_a_batch_is_a_tensor_a_tuple_or_a_dict(batch):
    m = model()
    got = mx.calibrate(copy.deepcopy(m), [batch(ids) for ids in batches()], "mxfp4")
    assert same(got, mx.calibrate(copy.deepcopy(m), batches(), "mxfp4"))


@pytest.mark.parametrize("form", FORMS)
def test_the_stream_runs_the_blocks_as_the_model_does(form):
    m = model(form).train()
    m.layers[1].drop.eval()
    stream = Stream(m, batches(), [block.up for block in m.layers])
    assert len(stream.blocks) == (1 if form == "between" else 3)
    states = stream.states
    for index in range(len(stream.blocks)):
        states = [stream.run(index, batch, state) for batch, state in enumerate(states)]
    assert m.training and m.layers[0].drop.training and not m.layers[1].drop.training
    m.eval()
    for ids, state in zip(batches(), states, strict=True):
        assert torch.equal(state if form == "between" else m.lm_head(state), m(ids))


def test_a_shared_weight_stays_shared_and_heads_are_included_if_asked():
    m = model()
    m.layers[2].up.weight = m.layers[0].up.weight
    m.lm_head.weight = m.embed.weight
    m.layers[0].up.weight.mark = 3
    got = mx.calibrate(m, batches(), "mxfp4-weight-only", include_head=True)
    assert got is m and m.layers[2].up.weight is m.layers[0].up.weight and m.layers[0].up.weight.mark == 3
    assert m.lm_head.weight is m.embed.weight and isinstance(m.lm_head.weight, mx.MXTensor)
    assert weights(m).keys() == {"embed.weight", *(f"layers.{i}.{n}.weight" for i in (0, 1) for n in ("up", "down")),
                                 "layers.2.down.weight"}  # fmt: skip


@pytest.mark.parametrize("with_state", [False, True])
def test_an_interrupted_calibration_leaves_the_model_as_it_was_and_continues(with_state, tmp_path):
    m, state = model(), tmp_path / "state" if with_state else None
    before = dict(m.named_parameters())
    with pytest.raises(Stopped):
        mx.calibrate(m, batches(), "mxfp4", stopping(BestScales(), "operand", 3), state=state)
    assert all(p is before[name] for name, p in m.named_parameters()) and not weights(m)
    whole = mx.calibrate(copy.deepcopy(m), batches(), "mxfp4", BestScales())
    if with_state:
        assert [f.name for f in sorted(state.iterdir())] == ["block_00000.pt", "calibration.json"]
    assert same(mx.calibrate(m, batches(), "mxfp4", BestScales(), state=state), whole)


def test_gptq_continues_with_the_same_bits(tmp_path):
    m = model()
    whole = mx.calibrate(copy.deepcopy(m), batches(), "nvfp4", state=tmp_path)
    (tmp_path / "block_00002.pt").unlink()
    assert same(mx.calibrate(copy.deepcopy(m), batches(), "nvfp4", state=str(tmp_path)), whole)
    with pytest.raises(ValueError, match=r"with other weights; pass another folder"):
        mx.calibrate(copy.deepcopy(m), batches(), "mxfp4", state=tmp_path)
    with pytest.raises(ValueError, match=r"with other data and method"):
        mx.calibrate(copy.deepcopy(m), batches(5), "nvfp4", "mse", state=tmp_path)
    m.layers[0].up.weight[3, 4] += 1
    with pytest.raises(ValueError, match=r"with other weights"):
        mx.calibrate(m, batches(), "nvfp4", state=tmp_path)


@pytest.mark.parametrize("trains", [True, False])
def test_norms_and_biases_train_afterwards_as_before(trains):
    m = model().requires_grad_(trains)
    mx.calibrate(m, batches(), "mxfp4-weight-only", ["smooth", "bias"])
    plain = {name: p.requires_grad for name, p in m.named_parameters() if not isinstance(p, mx.MXTensor)}
    made = {f"{name}.bias" for name, x in m.named_modules() if isinstance(x, nn.Linear)}
    assert {name: trains for name in plain if "norm" in name} == {n: v for n, v in plain.items() if "norm" in n} != {}
    assert made & plain.keys()


def test_a_model_without_anything_to_calibrate_is_a_warning():
    with pytest.warns(UserWarning, match="calibrate changed nothing: no nn.Linear, .* of ReLU passed the filter"):
        mx.calibrate(nn.ReLU(), [torch.ones(1)])
    m = mx.quantize_(model(), "mxfp8-weight-only", lambda module, fqn: isinstance(module, nn.Linear))
    with pytest.warns(UserWarning, match="calibrate changed nothing: its weights are quantized already"):
        mx.calibrate(m, batches(), filter_fn=lambda module, fqn: isinstance(module, nn.Linear))


def spoiled(value):
    m = model()
    m.layers[1].up.weight[2, 3] = value
    return m


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: mx.calibrate(None, batches()), TypeError, "calibrate: model is None; pass a torch.nn.Module"),
        (lambda: mx.calibrate(model(), []), ValueError, "calibrate: data is empty; pass batches"),
        (lambda: mx.calibrate(model(), "text"), TypeError, "data is 'text'; pass a list of batches, such as"),
        (lambda: mx.calibrate(model(), {"ids": 1}), TypeError, "data is {'ids': 1}; pass a list of batches, such as"),
        (lambda: mx.calibrate(model(), 3), TypeError, "data is 3; pass a list of batches"),
        (lambda: mx.calibrate(model().to("meta"), batches()), ValueError, "is on the device meta and has no values"),
        (lambda: mx.calibrate(model(), batches(), method="omni"), ValueError, "no method 'omni'; choose one of 'mse'"),
        (lambda: mx.calibrate(model(), batches(), method=3), TypeError, "method is 3; pass 'mse', 'gptq'"),
        (lambda: mx.calibrate(model(), batches(), "mxfp9"), ValueError, "unknown format"),
        (lambda: mx.calibrate(model(), batches(), mx.recipe.MXFP8BlockScaling()), ValueError, "trains .*use quantize_"),
        (
            lambda: mx.calibrate(spoiled(torch.nan), batches()),
            ValueError,
            "layers.1.up.weight has values",
        ),
        (lambda: GPTQ(damping=-1), ValueError, "damping"),
        (lambda: GPTQ(search=2), TypeError, "search"),
        (lambda: GPTQ(correct="all"), ValueError, "correct is 'all'; choose one of 'auto', 'model', 'cast', 'none'"),
        (lambda: BestScales(weighted=None), TypeError, "weighted"),
    ],
)
def test_wrong_calls(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_inputs_that_are_not_finite_name_the_layer_and_change_nothing():
    m = model()
    m.embed.weight[3] = torch.inf
    with pytest.raises(ValueError, match=r"calibrate: layers.0.up.weight: the inputs of the layer are not all finite"):
        mx.calibrate(m, batches())
    assert not weights(m)


def test_a_layer_without_inputs_is_rounded():
    m = model()
    m.layers[1].unused = nn.Linear(32, 32, bias=False)
    expected = mx.quantize(m.layers[1].unused.weight, "mxint8")
    for method in (GPTQ(search=False), BestScales()):
        got = mx.calibrate(copy.deepcopy(m), batches(), "mxint8", method)
        assert torch.allclose(got.layers[1].unused.weight.dequantize(), expected.dequantize(), atol=2e-3)


def test_a_language_model_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=50,
    )  # fmt: skip
    torch.manual_seed(0)
    m = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    for layer in m.model.layers:
        layer.mlp.up_proj.weight.mul_(20)
    reference = copy.deepcopy(m)
    data = [{"input_ids": ids} for ids in batches()]
    layers = [module for module in m.modules() if isinstance(module, nn.Linear)]
    assert len(Stream(m, data, layers).blocks) == 2
    rounded = mx.quantize_(copy.deepcopy(m), "mxfp4-weight-only")
    mx.calibrate(m, data, "mxfp4-weight-only")
    assert m.config.use_cache and len(weights(m)) == 14
    ids = torch.cat(batches(2))
    errors = [(q(ids).logits - reference(ids).logits).norm() for q in (m, rounded)]
    assert errors[0] < 0.9 * errors[1]


class Branches(nn.Module):
    """Two layers of one input, then one of their product, and one that is not called."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down, self.unused = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        return self.down(self.gate(x).sigmoid() * self.up(x))


def test_layers_of_one_input_are_a_group_in_the_order_of_their_calls():
    m = Branches()
    layers = [m.unused, m.down, m.up, m.gate]
    groups = groups_of(layers, lambda: m(torch.randn(3, 32)))
    assert [group for group, _ in groups] == [[m.gate, m.up], [m.down], [m.unused]]
    assert [once for _, once in groups] == [True, True, False]
    twice = groups_of(layers, lambda: m(m(torch.randn(3, 32))))
    assert [group for group, _ in twice] == [[m.gate, m.up], [m.down], [m.unused]] and not twice[0][1]
    found, out = inputs_of([m.gate, m.up], lambda: m(torch.ones(3, 32)), stop=True)
    assert out is None and found[m.gate][0] is found[m.up][0]


@pytest.mark.parametrize("format", ["mxfp4-weight-only", "mxfp4"])
def test_a_layer_is_calibrated_on_the_outputs_of_the_quantized_layers_before_it_in_its_block(format):
    m, method = model(), GPTQ(correct="model")
    got = mx.calibrate(copy.deepcopy(m), batches(), format, method)
    w = got.layers[0].down.weight
    moments = Moments(64, w.device, w.recipe.activation, "model")
    for ids in batches():
        now, before = (
            inputs_of([model.layers[0].down], lambda ids=ids, model=model: model(ids))[0] for model in (got, m)
        )
        moments.add(now[got.layers[0].down], before[m.layers[0].down])
    expected = method.operand(m.layers[0].down.weight, w.recipe.stored, moments)
    assert all(torch.equal(a, b) for a, b in zip(w.rowwise.tensors, expected.tensors, strict=True))


def test_a_weight_makes_up_for_the_cast_of_its_input():
    m, method = model(), GPTQ(correct="cast")
    got = mx.calibrate(copy.deepcopy(m), batches(), "mxfp4", method)
    layer = m.layers[0].up
    x = torch.cat([inputs_of([layer], lambda ids=ids: m(ids))[0][layer][0].flatten(0, -2) for ids in batches()])
    rounded = mx.quantize(x, "mxfp4").dequantize()
    h = rounded.T @ rounded + 0.01 * rounded.square().sum(0).mean() * torch.eye(32)
    wanted = layer.weight + layer.weight @ ((x - rounded).T @ rounded) @ torch.linalg.inv(h)
    only = Moments(32, x.device, got.layers[0].up.weight.recipe.activation)
    only.add([x], ())
    expected = GPTQ(correct="none").operand(wanted, got.layers[0].up.weight.recipe.stored, only)
    same = expected.data == got.layers[0].up.weight.rowwise.data
    assert same.float().mean() > 0.99 and not torch.equal(wanted, layer.weight)
    weights_only = [
        mx.calibrate(copy.deepcopy(m), batches(), "mxfp4-weight-only", GPTQ(correct=c)) for c in ("cast", "none")
    ]
    assert all(
        torch.equal(a.rowwise.data, b.rowwise.data)
        for a, b in zip(*(weights(q).values() for q in weights_only), strict=True)
    )


@pytest.mark.parametrize(("format", "same_as"), [("mxfp4-weight-only", "model"), ("mxfp4", "none")])
def test_the_default_follows_the_model_for_weights_only(format, same_as):
    m = model()
    default, other = (
        mx.calibrate(copy.deepcopy(m), batches(), format, method) for method in ("gptq", GPTQ(correct=same_as))
    )
    assert same(default, other)
    assert not same(default, mx.calibrate(m, batches(), format, GPTQ(correct="model" if same_as == "none" else "none")))


def test_layers_with_and_without_a_cast_of_one_input_have_their_own_moments():
    m = model()
    formats = {"_default": "mxfp4-weight-only", "layers.0.down": "mxfp4"}
    got = mx.calibrate(copy.deepcopy(m), batches(), formats)
    whole = mx.calibrate(copy.deepcopy(m), batches(), "mxfp4-weight-only")
    a, b = got.layers[0], whole.layers[0]
    assert torch.equal(a.up.weight.rowwise.data, b.up.weight.rowwise.data)
    assert not torch.equal(a.down.weight.rowwise.data, b.down.weight.rowwise.data)


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_is_calibrated_after_the_blocks(tied):
    m, method = model(), GPTQ(correct="none")
    if tied:
        m.lm_head.weight = m.embed.weight
    got = mx.calibrate(copy.deepcopy(m), batches(), "mxfp4-weight-only", method, include_head=True)
    without = mx.calibrate(copy.deepcopy(m), batches(), "mxfp4-weight-only", method)
    for name, w in weights(without).items():
        assert torch.equal(w.dequantize(), got.get_parameter(name).dequantize())
    w = got.lm_head.weight
    assert isinstance(w, mx.MXTensor) and (got.embed.weight is w) == tied
    moments = Moments(32, w.device, None)
    for ids in batches():  # the embedding of the blocks is the one before: the head is the last to be quantized
        inputs, _ = inputs_of([without.lm_head], lambda ids=ids: without(ids))
        moments.add(inputs[without.lm_head], ())
    expected = method.operand(m.lm_head.weight, w.recipe.stored, moments)
    assert all(torch.equal(a, b) for a, b in zip(w.rowwise.tensors, expected.tensors, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_a_calibrated_head_loses_less(form):
    m = model(form)
    alone = mx.calibrate(copy.deepcopy(m), batches(), "mxfp4-weight-only", "gptq")
    errors = []
    for method in ("gptq", "nearest"):
        got = copy.deepcopy(alone)
        if method == "gptq":
            got = mx.calibrate(copy.deepcopy(m), batches(), "mxfp4-weight-only", method, include_head=True)
        else:
            mx.quantize_(got, "mxfp4-weight-only", lambda module, name: name == "lm_head")
        errors.append(error(got, m))
    assert errors[0] < errors[1]
