"""torchao's configs of training: MXLinearConfig, Float8LinearConfig, and convert_to_float8_training."""

import enum
import importlib
import warnings
from dataclasses import field, make_dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import mxtensor as mx
from mxtensor import ao
from tests.helpers.configs import assert_refused


def row(config):
    """The formats of input, weight and grad, the scaling and the kernel preference."""
    linear_recipe = config.linear_recipe()
    casts = [casts.rowwise for casts in (linear_recipe.input, linear_recipe.weight, linear_recipe.grad)]
    assert all(
        casts.rowwise == casts.columnwise for casts in (linear_recipe.input, linear_recipe.weight, linear_recipe.grad)
    )
    return " ".join([*(c.format.name for c in casts), casts[0].scaling.value, linear_recipe.kernel_preference.value])


def test_mx_linear_config_fields():
    """torchao's fields and their defaults."""
    f8, f5, f4 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2
    kernel, modes = ao.KernelPreference, ao.ScaleCalculationMode
    configs = [
        ao.MXLinearConfig(),
        ao.MXLinearConfig(32, f8, kernel_preference=kernel.AUTO, scale_calculation_mode=modes.FLOOR),
        ao.MXLinearConfig(elem_dtype=f8, elem_dtype_grad_output_override=f5, kernel_preference="emulated"),
        ao.MXLinearConfig(elem_dtype_weight_override=ao.DTYPE_FP6_E3M2, scale_calculation_mode="even"),
        ao.MXLinearConfig(elem_dtype=f4, scale_calculation_mode="ceil"),
        ao.MXLinearConfig(block_size=16, elem_dtype="mxfp6_e2m3"),
    ]
    assert_expected_inline(
        "\n".join(map(row, configs)),
        """\
mxfp8_e4m3 mxfp8_e4m3 mxfp8_e4m3 rceil auto
mxfp8_e4m3 mxfp8_e4m3 mxfp8_e4m3 floor auto
mxfp8_e4m3 mxfp8_e4m3 mxfp8_e5m2 rceil emulated
mxfp8_e4m3 mxfp6_e3m2 mxfp8_e4m3 even auto
mxfp4_e2m1 mxfp4_e2m1 mxfp4_e2m1 ceil auto
mxfp6_e2m3[1x16] mxfp6_e2m3[1x16] mxfp6_e2m3[1x16] rceil auto""",
    )


def test_recipe_names():
    names = [
        f"{e}_{k}{m}" for e in ("mxfp8", "mxfp4") for k in ("emulated", "cublas", "cutlass") for m in ("", "_rceil")
    ]
    assert_expected_inline(
        "\n".join(f"{name}: {row(ao.MXLinearConfig.from_recipe_name(name))}" for name in names),
        """\
mxfp8_emulated: mxfp8_e4m3 mxfp8_e4m3 mxfp8_e4m3 rceil emulated
mxfp8_emulated_rceil: mxfp8_e4m3 mxfp8_e4m3 mxfp8_e4m3 rceil emulated
mxfp8_cublas: mxfp8_e4m3 mxfp8_e4m3 mxfp8_e4m3 rceil auto
mxfp8_cublas_rceil: mxfp8_e4m3 mxfp8_e4m3 mxfp8_e4m3 rceil auto
mxfp8_cutlass: mxfp8_e4m3 mxfp8_e4m3 mxfp8_e4m3 rceil auto
mxfp8_cutlass_rceil: mxfp8_e4m3 mxfp8_e4m3 mxfp8_e4m3 rceil auto
mxfp4_emulated: mxfp4_e2m1 mxfp4_e2m1 mxfp4_e2m1 rceil emulated
mxfp4_emulated_rceil: mxfp4_e2m1 mxfp4_e2m1 mxfp4_e2m1 rceil emulated
mxfp4_cublas: mxfp4_e2m1 mxfp4_e2m1 mxfp4_e2m1 rceil auto
mxfp4_cublas_rceil: mxfp4_e2m1 mxfp4_e2m1 mxfp4_e2m1 rceil auto
mxfp4_cutlass: mxfp4_e2m1 mxfp4_e2m1 mxfp4_e2m1 rceil auto
mxfp4_cutlass_rceil: mxfp4_e2m1 mxfp4_e2m1 mxfp4_e2m1 rceil auto""",
    )


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_", "mxfp8_rceil", "mxfp8_fast", "mxfp9_emulated", "float8", "", None])
def test_an_unknown_recipe_name_is_a_value_error(name):
    with pytest.raises(
        ValueError, match=r"unknown recipe name .* choose mxfp8 or mxfp4 with one of _emulated, _cublas"
    ):
        ao.MXLinearConfig.from_recipe_name(name)


def test_a_layer_trains_by_the_config_and_the_kernel_that_it_names():
    layer, x = mx.quantize_(nn.Linear(64, 48), ao.MXLinearConfig(kernel_preference="emulated")), torch.randn(5, 64)
    with mx.explain() as log:
        y = layer(x)
        y.sum().backward()
    kernels = {e.kernel for e in log.entries if e.spec.op in ("fprop", "dgrad", "wgrad")}
    assert kernels == {"emulated"}
    rounded = [mx.quantize(t.detach(), "mxfp8").dequantize() for t in (x, layer.weight.high_precision)]
    torch.testing.assert_close(y, nn.functional.linear(*rounded, layer.bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "config, message",
    [
        (ao.MXLinearConfig(block_size=0), "block 0 is not available; choose one of 16, 32"),
        (ao.MXLinearConfig(elem_dtype=torch.int32), "torch.int32"),
        (ao.MXLinearConfig(elem_dtype_grad_output_override="mxfp9"), "mxfp9"),
        (ao.MXLinearConfig(scale_calculation_mode="nearest"), "unknown scaling 'nearest'"),
        (ao.MXLinearConfig(kernel_preference="fast"), "unknown kernel_preference 'fast'"),
    ],
    ids=str,
)
def test_an_impossible_config_changes_nothing(config, message):
    assert_refused(config, message)


# ---------------------------------------------------------------------------------------------- Float8LinearConfig


class Granularity(enum.Enum):
    TENSORWISE, AXISWISE = "tensorwise", "axiswise"


class Scaling(enum.Enum):
    DYNAMIC, DISABLED = "dynamic", "disabled"


def stand_in(name, **values):
    """A stand-in for an object of torchao's class ``name``."""
    types = [(key, Any, field(default_factory=lambda value=value: value)) for key, value in values.items()]
    return make_dataclass(name, types)()


NAMES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


@pytest.mark.parametrize("name", NAMES)
def test_float8_linear_recipes(name):
    config = ao.Float8LinearConfig.from_recipe_name(name)
    recipe, same = config.linear_recipe(), ao.Float8TrainingOpConfig(float8_linear_recipe=name).linear_recipe()
    assert (recipe.input, recipe.weight, recipe.grad) == (same.input, same.weight, same.grad)
    layer, x = nn.Linear(64, 32), torch.randn(16, 64, requires_grad=True)
    exact = layer(x).detach()
    mx.quantize_(layer, config)
    y = layer(x)
    y.square().sum().backward()
    assert (y - exact).norm() < 0.1 * exact.norm() and layer.weight.grad.norm() > 0 and x.grad.norm() > 0


def test_float8_linear_config_by_its_fields():
    cast = stand_in("CastConfig", scaling_type=Scaling.DYNAMIC, scaling_granularity=Granularity.AXISWISE,
                  target_dtype=torch.float8_e5m2)  # fmt: skip
    off = stand_in("CastConfig", scaling_type=Scaling.DISABLED, scaling_granularity=Granularity.TENSORWISE,
                 target_dtype=None)  # fmt: skip
    config = stand_in("Float8LinearConfig", cast_config_input=cast, cast_config_input_for_grad_weight=off,
                    cast_config_grad_output_for_grad_weight=off, emulate=True,
                    enable_fsdp_float8_all_gather=True)  # fmt: skip
    recipe = ao.quantize_(nn.Linear(64, 32), config).weight.linear_recipe
    assert recipe.input.rowwise.format.name == "float8_e5m2_row" and recipe.input.columnwise is None
    assert recipe.grad.rowwise.format.name == "float8_e5m2_tensor" and recipe.grad.columnwise is None
    assert recipe.kernel_preference is ao.KernelPreference.EMULATED and recipe.quantized_gather


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (ao.Float8LinearConfig(ao.CastConfig("disabled")), ValueError, "one operand of output is disabled"),
        (ao.Float8LinearConfig(ao.CastConfig("delayed")), ValueError, "scaling_type 'delayed' of cast_config_input"),
        (ao.Float8LinearConfig(ao.CastConfig(target_dtype=torch.int8)), ValueError, "target_dtype torch.int8"),
        (ao.Float8LinearConfig(ao.CastConfig("dynamic", "block")), ValueError, "choose one of tensorwise, axiswise"),
        (ao.Float8LinearConfig("rowwise"), TypeError, "cast_config_input is 'rowwise'; pass a CastConfig"),
    ],
)
def test_casts_that_are_not_available(config, error, message):
    with pytest.raises(error, match=message):
        mx.quantize_(nn.Linear(64, 32), config)


def test_an_unknown_float8_recipe():
    with pytest.raises(ValueError, match="recipe 'fast' is not available; choose one of tensorwise, rowwise"):
        ao.Float8LinearConfig.from_recipe_name("fast")


def test_convert_to_float8_training():
    m = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 16))
    config = ao.Float8LinearConfig.from_recipe_name(ao.Float8LinearRecipeName.ROWWISE)
    found = ao.convert_to_float8_training(m, module_filter_fn=lambda module, fqn: fqn == "1", config=config)
    assert found is m and type(m[0].weight) is nn.Parameter and m[1].weight.linear_recipe == config.linear_recipe()
    assert ao.convert_to_float8_training(m)[0].weight.linear_recipe == ao.Float8LinearConfig().linear_recipe()


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.exhaustive
def test_torchaos_own_objects():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        float8, theirs = (importlib.import_module(f"torchao.{name}") for name in ("float8", "quantization"))
        own = {name: float8.Float8LinearConfig.from_recipe_name(name) for name in NAMES}
        table = theirs.FqnToConfig(
            {"a": theirs.Float8WeightOnlyConfig(granularity=theirs.PerRow()), "b": own["rowwise"]}
        )
    for name, config in own.items():
        ours = ao.quantize_(nn.Linear(64, 32), ao.Float8LinearConfig.from_recipe_name(name))
        assert ao.quantize_(nn.Linear(64, 32), config).weight.linear_recipe == ours.weight.linear_recipe
    model = ao.quantize_(nn.ModuleDict({"a": nn.Linear(64, 32), "b": nn.Linear(64, 32), "c": nn.Linear(64, 32)}), table)
    assert model["a"].weight.format.name == "float8_e4m3_row" and type(model["c"].weight) is nn.Parameter
    assert model["b"].weight.linear_recipe.name == "Float8LinearConfig"
