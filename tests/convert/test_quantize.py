"""quantize_: which weights become MXTensor parameters, under which recipe, and what does not change."""

import copy
import warnings

import pytest
import torch
from torch import nn

import mxtensor as mx
from mxtensor.numerics.choices import ScaleCalculationMode
from mxtensor.recipe.linear_recipe import KernelPreference
from tests.helpers.compare import assert_same_product, relative_error, same_bytes
from tests.helpers.configs import quantized_by


class Block(nn.Module):
    """A small language model: embedding, attention, an expert router, a gated unit, and a tied or untied head."""

    def __init__(self, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.router = nn.Linear(64, 4)
        self.mlp = nn.ModuleDict({"gate": nn.Linear(64, 96), "up": nn.Linear(64, 96), "gate_proj": nn.Linear(64, 96)})
        self.down = nn.Linear(96, 64, bias=False)
        self.norm = nn.LayerNorm(64)
        self.conv = nn.Conv1d(64, 64, 3)
        self.lm_head = nn.Linear(64, 50, bias=False)
        if tied:
            self.lm_head.weight = self.embedding.weight


def quantized_names(model):
    return {name for name, p in model.named_parameters(remove_duplicate=False) if isinstance(p, mx.MXTensor)}


EVERYTHING = lambda module, fqn: True  # noqa: E731


# ---------------------------------------------------------------------------------------------- what changes


def test_the_default_filter_accepts_linear_and_attention_but_not_embedding_head_or_router():
    model = Block()
    untouched = {name: p for name, p in model.named_parameters()}
    assert mx.quantize_(model, "mxfp8") is model
    names = {
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "mlp.gate.weight",  # of an MLP: it has the shape of the layer beside it
        "mlp.up.weight",
        "mlp.gate_proj.weight",
        "down.weight",
    }
    assert quantized_names(model) == names
    assert all(p is untouched[name] for name, p in model.named_parameters() if name not in names)


def test_modules_stay_torchs_own_and_parameters_are_frozen_parameters():
    model = Block()
    classes, keys = [type(m) for m in model.modules()], list(model.state_dict())
    mx.quantize_(model, "mxfp8")
    assert [type(m) for m in model.modules()] == classes and list(model.state_dict()) == keys
    for name in quantized_names(model):
        parameter = model.get_parameter(name)
        assert isinstance(parameter, nn.Parameter) and isinstance(parameter, mx.MXTensor)
        assert not parameter.requires_grad and parameter.is_leaf
    assert model.down.weight.shape == (64, 96) and model.norm.weight.requires_grad


def test_a_weight_is_quantized_from_its_own_values():
    model = Block()
    original = copy.deepcopy(model)
    mx.quantize_(model, "mxfp4")
    for name in quantized_names(model):
        assert same_bytes(model.get_parameter(name), mx.quantize(original.get_parameter(name), "mxfp4"))


def test_filter_fn_is_called_for_every_candidate_with_its_name():
    model, seen = Block(), {}

    def only_down(module, fqn):
        seen[fqn] = module
        return fqn == "down"

    mx.quantize_(model, "mxfp8", only_down)
    assert all(model.get_submodule(fqn) is module for fqn, module in seen.items())
    candidates = {"embedding", "attention", "attention.out_proj", "router", "down", "lm_head"}
    assert set(seen) == candidates | {"mlp.gate", "mlp.up", "mlp.gate_proj"}
    assert quantized_names(model) == {"down.weight"}


def test_a_filter_may_ask_for_the_head_and_the_router():
    model = Block()
    mx.quantize_(model, "mxfp8", lambda module, fqn: isinstance(module, nn.Linear))
    assert {"lm_head.weight", "router.weight", "mlp.gate.weight"} <= quantized_names(model)


def test_separate_projections_of_cross_attention_are_weights_too():
    attention = nn.MultiheadAttention(64, 4, kdim=32, vdim=96)
    mx.quantize_(attention, "mxfp8")
    assert quantized_names(attention) == {"q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"}


def test_a_shared_weight_stays_shared():
    model = Block(tied=True)
    mx.quantize_(model, "mxfp8", EVERYTHING)
    assert model.lm_head.weight is model.embedding.weight and isinstance(model.lm_head.weight, mx.MXTensor)
    model = Block(tied=True)
    mx.quantize_(model, "mxfp8")  # neither of the two passes the default filter
    assert model.lm_head.weight is model.embedding.weight and not isinstance(model.lm_head.weight, mx.MXTensor)
    twins = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    twins[1].weight = twins[0].weight
    mx.quantize_(twins, "mxfp8")
    assert twins[0].weight is twins[1].weight


class Experts(nn.Module):
    def __init__(self, gate_up, down, **told):
        super().__init__()
        self.gate_up_proj, self.down_proj = (nn.Parameter(torch.randn(2, *shape)) for shape in (gate_up, down))
        self.__dict__.update(told)


@pytest.mark.parametrize(
    ("experts", "orientation"),
    [
        (Experts((192, 64), (64, 96)), "ROWWISE"),
        (Experts((64, 192), (96, 64)), "COLUMNWISE"),  # as in Llama 4
        (Experts((64, 64), (64, 32)), "ROWWISE"),
        (Experts((64, 64), (32, 64)), "COLUMNWISE"),
        (Experts((64, 192), (96, 64), is_transposed=False), "ROWWISE"),
        (Experts((192, 64), (64, 96), is_transposed=True), "COLUMNWISE"),
    ],
)
def test_experts_are_blocked_along_what_their_products_contract(experts, orientation):
    mx.quantize_(experts, "mxfp8")
    assert {w.orientation.name for w in experts.parameters()} == {orientation}


def test_a_quantized_model_keeps_its_weights_when_more_of_it_is_quantized():
    model = Block()
    mx.quantize_(model, "mxfp4", lambda module, fqn: fqn == "down")
    down = model.down.weight
    mx.quantize_(model, "mxfp8")
    assert model.down.weight is down and down.format.name == "mxfp4_e2m1"
    assert model.mlp["up"].weight.format.name == "mxfp8_e4m3"


# ---------------------------------------------------------------------------------------------- embeddings


@pytest.mark.parametrize("format", [*mx.FORMATS, "mxfp8[16x16]"])
def test_an_embedding_asked_for_looks_up_the_dequantized_rows(format):
    embedding = nn.Embedding(50, 96, padding_idx=3)
    mx.quantize_(embedding, format, EVERYTHING)
    assert embedding.weight.recipe.activation is None  # a lookup has no activation to cast
    indices = torch.tensor([[3, 0, 49], [7, 7, 12]])
    rows = embedding.weight.dequantize()
    assert torch.equal(embedding(indices), rows[indices])
    assert embedding(indices[:, :0]).shape == (2, 0, 96) and torch.equal(embedding(indices[0, 1]), rows[0])


# ---------------------------------------------------------------------------------------------- configs

FP8, AUTO, RCEIL = torch.float8_e4m3fn, KernelPreference.AUTO, ScaleCalculationMode.RCEIL

CONFIGS = {
    # config -> weight format, activation format, scaling, kernel preference
    "mxfp8": ("mxfp8", "mxfp8_e4m3", "mxfp8_e4m3", RCEIL, AUTO),
    "weight_only": ("mxfp6-weight-only", "mxfp6_e2m3", None, RCEIL, AUTO),
    "block": ("mxfp4[1x16]-weight-only", "mxfp4_e2m1[1x16]", None, RCEIL, AUTO),
    "dtype": (FP8, "mxfp8_e4m3", "mxfp8_e4m3", RCEIL, AUTO),
    "format": (mx.FORMATS["nvfp4"], "nvfp4", "nvfp4", RCEIL, AUTO),
    "recipe": (
        mx.LinearRecipe.inference(mx.Cast.of("mxint8", "even")),
        "mxint8",
        None,
        ScaleCalculationMode.EVEN,
        AUTO,
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_is_a_recipe_and_the_layer_computes_by_it(name):
    config, weight, activation, scaling, preference = CONFIGS[name]
    linear, original = quantized_by(config, weight, activation, scaling, preference)
    assert same_bytes(linear.weight, mx.quantize(original, weight, scaling=scaling))
    x = torch.randn(7, 64)
    inputs = x if activation is None else mx.quantize(x, activation, scaling=scaling).dequantize(torch.float64)
    tensors = inputs, linear.weight.dequantize(torch.float64), linear.bias.detach()
    assert_same_product(linear(x), lambda x, w, b: x @ w.t() + b, *tensors)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ("mxfp9", ValueError, "unknown format 'mxfp9'"),
        ("mxfp9-weight-only", ValueError, "unknown format 'mxfp9'"),
        (torch.float16, ValueError, "unknown format torch.float16"),
        (8, TypeError, "cannot quantize with 8"),
        (None, TypeError, "cannot quantize with None"),
    ],
    ids=str,
)
def test_an_unknown_config_changes_nothing(config, error, message):
    model = Block()
    before = dict(model.named_parameters())
    with pytest.raises(error, match=message):
        mx.quantize_(model, config)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)


def test_a_model_without_a_matching_layer_warns_and_stays():
    for model, filter_fn in (
        (nn.LayerNorm(8), None),
        (Block(), lambda module, fqn: False),
        (nn.Embedding(4, 32), None),
    ):
        with pytest.warns(
            UserWarning, match=f"quantize_ changed nothing: .* of {type(model).__name__} passed the filter"
        ):
            mx.quantize_(model, "mxfp8", filter_fn)
        assert not quantized_names(model)


def test_a_matching_layer_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mx.quantize_(Block(), "mxfp8")


# ---------------------------------------------------------------------------------------------- what it is for


@pytest.mark.parametrize(
    ("format", "of_bfloat16"),
    [("mxfp8", 0.516), ("mxfp6", 0.391), ("mxfp4", 0.266), ("nvfp4", 0.2813), ("mxint8", 0.516)],
)
def test_memory_of_the_weights(format, of_bfloat16):
    model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256)).bfloat16()
    dense = sum(layer.weight.nbytes for layer in model)
    mx.quantize_(model, format)
    operands = sum(layer.weight.nbytes for layer in model)
    components = [t for layer in model for operand in layer.weight.operands for t in operand.tensors]
    assert operands == sum(t.numel() * t.itemsize for t in components)
    assert operands == sum(t.untyped_storage().nbytes() for t in components)  # no larger buffer behind a view
    assert operands / dense == pytest.approx(of_bfloat16, abs=5e-4)


@pytest.mark.parametrize(("config", "error"), [("mxfp8", 0.07), ("mxint8", 0.03), ("nvfp4", 0.25), ("mxfp4", 0.3)])
def test_a_quantized_model_still_computes_what_it_did(config, error):
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 64))
    x = torch.randn(32, 128)
    before = model(x)
    mx.quantize_(model, config)
    assert 0 < relative_error(model(x), before) < error


def test_a_model_on_the_meta_device_is_quantized_without_values():
    with torch.device("meta"):
        model = Block()
    mx.quantize_(model, "mxfp4")
    assert model.down.weight.device.type == "meta" and model.down.weight.rowwise.data.shape == (64, 48)
