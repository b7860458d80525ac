"""FqnToConfig and Float8LinearConfig: torchao's own objects, where torchao is installed, and stand-ins."""

import enum
import importlib
import warnings
from dataclasses import field, make_dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

import mxtensor as mx


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.lm_head = nn.Embedding(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)
        self.a, self.b, self.attn = nn.Linear(64, 64), nn.Linear(64, 64), nn.MultiheadAttention(64, 4)

    def forward(self, x):
        return self.lm_head(self.b(self.a(x)))


def formats(model):
    out = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, mx.MXTensor):
            out[name] = parameter.format.name
        elif hasattr(parameter, "linear_recipe"):
            out[name] = parameter.linear_recipe.name
    return out


class Granularity(enum.Enum):
    TENSORWISE, AXISWISE = "tensorwise", "axiswise"


class Scaling(enum.Enum):
    DYNAMIC, DISABLED = "dynamic", "disabled"


def theirs(name, **values):
    """A stand-in for an object of torchao's class ``name``."""
    types = [(key, Any, field(default_factory=lambda value=value: value)) for key, value in values.items()]
    return make_dataclass(name, types)()


F4 = "mxfp4_e2m1"
TABLES = [
    ({"a": "mxfp4"}, {"a.weight": F4}),
    ({"a.weight": "mxfp4", "a": "mxfp8"}, {"a.weight": F4}),
    ({"re:a": "mxfp8", "re:a\\.weight": "mxfp4"}, {"a.weight": F4}),
    ({"re:attn.*": None, "re:.*": "mxfp8", "a": "mxfp4", "b": None}, {
        "a.weight": F4, "embed.weight": "mxfp8_e4m3", "lm_head.weight": "mxfp8_e4m3",
    }),
    ({"_default": "mxfp4", "b": None, "re:attn": None}, {"a.weight": F4, "attn.out_proj.weight": F4}),
    ({"attn.in_proj_weight": "mxfp4"}, {"attn.in_proj_weight": F4}),
    ({"embed": "mxfp4", "_default": mx.MXFP8TrainingOpConfig(), "re:attn.*": None}, {
        "embed.weight": F4, "a.weight": "MXFP8TrainingOpConfig", "b.weight": "MXFP8TrainingOpConfig",
    }),
    ({}, {}),
]  # fmt: skip


@pytest.mark.parametrize("table", TABLES, ids=lambda table: " ".join(table[0]))
def test_a_config_for_each_name(table):
    given, expected = table
    for config in (
        mx.FqnToConfig(given),
        mx.FqnToConfig(module_fqn_to_config=given),
        theirs("FqnToConfig", fqn_to_config=given, module_fqn_to_config={}, version=1),
    ):
        model = Model()
        if given:
            mx.quantize_(model, config)
        else:
            with pytest.warns(UserWarning, match="changed nothing"):
                mx.quantize_(model, config)
        assert formats(model) == expected
        assert torch.isfinite(model(torch.randn(4, 64))).all()


def test_names_that_match_nothing_are_named():
    model = Model()
    with pytest.warns(UserWarning, match="the name 'lm_haed', 'norm', 're:layers.*' of the FqnToConfig"):
        mx.quantize_(model, mx.FqnToConfig({"lm_haed": None, "norm": "mxfp8", "re:layers.*": "mxfp8", "a": "mxfp8"}))
    assert formats(model) == {"a.weight": "mxfp8_e4m3"}


def test_the_name_of_what_only_holds_other_modules_matches_nothing():
    """As in torchao: its layers have the default, which is not what such a key looks like."""
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), nn.Linear(64, 64))
    with pytest.warns(UserWarning, match=r"the name '0' of the FqnToConfig; .* inside 0, pass 're:0\\\.\.\*'"):
        mx.quantize_(model, mx.FqnToConfig({"0": None, "0.1": None, "_default": "mxfp8"}))
    assert formats(model).keys() == {"0.0.weight", "1.weight"}


@pytest.mark.parametrize(
    ("config", "filter_fn", "error", "message"),
    [
        (lambda: mx.FqnToConfig({"a": "mxfp9"}), None, ValueError, "FqnToConfig, 'a': unknown format"),
        (lambda: mx.FqnToConfig({"a": 8}), None, TypeError, "FqnToConfig, 'a': cannot quantize with 8"),
        (lambda: mx.FqnToConfig({"a": mx.FqnToConfig()}), None, TypeError, "its values are single configs or None"),
        (lambda: mx.FqnToConfig({"re:(": "mxfp8"}), None, ValueError, "is not a valid regular expression"),
        (lambda: mx.FqnToConfig({3: "mxfp8"}), None, TypeError, "with strings as keys"),
        (lambda: mx.FqnToConfig("mxfp8"), None, TypeError, "takes a dict of names"),
        (lambda: mx.FqnToConfig({"a": "mxfp8"}, {"a": "mxfp4"}), None, ValueError, "differ; pass only one of them"),
        (lambda: mx.FqnToConfig({"a": "mxfp8"}), lambda m, n: True, ValueError, "leave filter_fn out"),
        (lambda: mx.FqnToConfig({"a": "mxfp8", "b": "mxfp4"}), None, ValueError, "a.weight and b.weight are one"),
    ],
)
def test_what_cannot_be_honoured_is_refused(config, filter_fn, error, message):
    model = Model()
    model.b.weight = model.a.weight
    with pytest.raises(error, match=message):
        mx.quantize_(model, config(), filter_fn)
    assert not formats(model)


NAMES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


@pytest.mark.parametrize("name", NAMES)
def test_float8_linear_recipes(name):
    config = mx.Float8LinearConfig.from_recipe_name(name)
    recipe, same = config.linear_recipe(), mx.Float8TrainingOpConfig(float8_linear_recipe=name).linear_recipe()
    assert (recipe.input, recipe.weight, recipe.grad) == (same.input, same.weight, same.grad)
    layer, x = nn.Linear(64, 32), torch.randn(16, 64, requires_grad=True)
    exact = layer(x).detach()
    mx.quantize_(layer, config)
    y = layer(x)
    y.square().sum().backward()
    assert (y - exact).norm() < 0.1 * exact.norm() and layer.weight.grad.norm() > 0 and x.grad.norm() > 0


def test_float8_linear_config_by_its_fields():
    cast = theirs("CastConfig", scaling_type=Scaling.DYNAMIC, scaling_granularity=Granularity.AXISWISE,
                  target_dtype=torch.float8_e5m2)  # fmt: skip
    off = theirs("CastConfig", scaling_type=Scaling.DISABLED, scaling_granularity=Granularity.TENSORWISE,
                 target_dtype=None)  # fmt: skip
    config = theirs("Float8LinearConfig", cast_config_input=cast, cast_config_input_for_grad_weight=off,
                    cast_config_grad_output_for_grad_weight=off, emulate=True,
                    enable_fsdp_float8_all_gather=True)  # fmt: skip
    recipe = mx.quantize_(nn.Linear(64, 32), config).weight.linear_recipe
    assert recipe.input.rowwise.format.name == "float8_e5m2_row" and recipe.input.columnwise is None
    assert recipe.grad.rowwise.format.name == "float8_e5m2_tensor" and recipe.grad.columnwise is None
    assert recipe.kernel_preference is mx.KernelPreference.EMULATED and recipe.quantized_gather


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (mx.Float8LinearConfig(mx.CastConfig("disabled")), ValueError, "one operand of output is disabled"),
        (mx.Float8LinearConfig(mx.CastConfig("delayed")), ValueError, "scaling_type 'delayed' of cast_config_input"),
        (mx.Float8LinearConfig(mx.CastConfig(target_dtype=torch.int8)), ValueError, "target_dtype torch.int8"),
        (mx.Float8LinearConfig(mx.CastConfig("dynamic", "block")), ValueError, "choose one of tensorwise, axiswise"),
        (mx.Float8LinearConfig("rowwise"), TypeError, "cast_config_input is 'rowwise'; pass a CastConfig"),
    ],
)
def test_casts_that_are_not_available(config, error, message):
    with pytest.raises(error, match=message):
        mx.quantize_(nn.Linear(64, 32), config)


def test_an_unknown_float8_recipe():
    with pytest.raises(ValueError, match="recipe 'fast' is not available; choose one of tensorwise, rowwise"):
        mx.Float8LinearConfig.from_recipe_name("fast")


if find_spec("torchao") is not None:

    @pytest.mark.exhaustive
    def test_torchaos_own_objects():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            float8, ao = (importlib.import_module(f"torchao.{name}") for name in ("float8", "quantization"))
            own = {name: float8.Float8LinearConfig.from_recipe_name(name) for name in NAMES}
            table = ao.FqnToConfig({"a": ao.Float8WeightOnlyConfig(granularity=ao.PerRow()), "b": own["rowwise"]})
        for name, config in own.items():
            ours = mx.quantize_(nn.Linear(64, 32), mx.Float8LinearConfig.from_recipe_name(name))
            assert mx.quantize_(nn.Linear(64, 32), config).weight.linear_recipe == ours.weight.linear_recipe
        expected = {"a.weight": "float8_e4m3_row", "b.weight": "Float8LinearConfig"}
        assert formats(mx.quantize_(Model(), table)) == expected
