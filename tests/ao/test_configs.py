"""torchao's own config objects, by the names of their classes and fields, and the classes of the same names."""

import enum
from dataclasses import dataclass, field, fields, make_dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import mxtensor as mx
from mxtensor import ao
from mxtensor.convert.configs import recipe_of
from tests.helpers.configs import assert_refused, quantized_by


class Kernel(str, enum.Enum):
    AUTO, TORCH, MSLK, EMULATED, TRITON = "auto", "torch", "mslk", "emulated", "triton"


class Mode(enum.Enum):
    FLOOR, RCEIL = "floor", "rceil"


PerRow, PerTensor = make_dataclass("PerRow", []), make_dataclass("PerTensor", [])
PerGroup, PerBlock = make_dataclass("PerGroup", ["group_size"]), make_dataclass("PerBlock", ["block_size"])


def torchaos(name, **values):
    """An object like torchao's: a mutable dataclass of that name, with fields and defaults of its own."""
    kind = make_dataclass(
        name, [(key, Any, field(default_factory=lambda value=value: value)) for key, value in values.items()]
    )
    return kind()


f8, f5, f4 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2
THEIRS = [
    (torchaos("MXDynamicActivationMXWeightConfig", block_size=32, activation_dtype=f4, weight_dtype=f4,
              kernel_preference=Kernel.EMULATED, scaling_mode=Mode.FLOOR), "mxfp4_e2m1", "mxfp4_e2m1"),
    (torchaos("NVFP4DynamicActivationNVFP4WeightConfig", use_triton_kernel=True, use_dynamic_per_tensor_scale=False),
     "nvfp4_single_level", "nvfp4_single_level"),
    (torchaos("NVFP4WeightOnlyConfig", use_dynamic_per_tensor_scale=True), "nvfp4", None),
    (torchaos("Float8WeightOnlyConfig", weight_dtype=f5, version=2, granularity=PerRow()), "float8_e5m2_row", None),
    (torchaos("Float8WeightOnlyConfig", weight_dtype=f8, granularity=PerGroup(128)), "float8_e4m3_1x128", None),
    (torchaos("Float8DynamicActivationFloat8WeightConfig", activation_dtype=f8, weight_dtype=f8,
              granularity=[PerTensor(), PerTensor()], kernel_preference=Kernel.TORCH, mm_config=(False, True, False)),
     "float8_e4m3_tensor", "float8_e4m3_tensor"),
    (torchaos("Float8DynamicActivationFloat8WeightConfig", granularity=[PerBlock((1, 128)), PerBlock([128, 128])]),
     "float8_e4m3_128x128", "float8_e4m3_1x128"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "weight", "activation"), THEIRS, ids=lambda value: type(value).__name__)
def test_inference_by_torchaos_objects(config, weight, activation):
    layer = nn.Linear(256, 128)
    expected = mx.quantize_(nn.Linear(256, 128), "mxfp8")
    ao.quantize_(layer, config)
    recipe = layer.weight.recipe
    assert recipe.stored.format.name == weight
    assert (recipe.activation and recipe.activation.format.name) == activation
    assert type(layer.weight) is type(expected.weight) and torch.isfinite(layer(torch.randn(4, 256))).all()


def _named(recipe):
    casts = [getattr(t, side) for t in (recipe.input, recipe.weight, recipe.grad) for side in ("rowwise", "columnwise")]
    return " ".join("-" if cast is None else cast.format.name.removeprefix("float8_") for cast in casts)


TRAINING = [
    (torchaos("MXFP8TrainingOpConfig", kernel_preference=Kernel.AUTO, out_dtype=torch.bfloat16, wgrad_with_hp=False,
              scale_calculation_mode=Mode.FLOOR), "mxfp8_e4m3 " * 6),
    (torchaos("MXFP8TrainingOpConfig", wgrad_with_hp=True), "mxfp8_e4m3 - mxfp8_e4m3 mxfp8_e4m3 mxfp8_e4m3 -"),
    (torchaos("Float8TrainingOpConfig", float8_dtype=f8), "e4m3_row_pow2 " * 6),
    (torchaos("Float8TrainingOpConfig", float8_linear_recipe="tensorwise"),
     "e4m3_tensor " * 4 + "e5m2_tensor e5m2_tensor"),
    (torchaos("Float8TrainingOpConfig", float8_linear_recipe="rowwise_with_gw_hp"),
     "e4m3_row_pow2 - e4m3_row_pow2 e4m3_tensor_pow2 e4m3_row_pow2 -"),
    (torchaos("NVFP4TrainingConfig", kernel_preference=Kernel.TRITON, process_group=None, world_size=None,
              rht_sign_vector=(1, -1) * 8), "nvfp4 nvfp4 nvfp4[16x16] nvfp4[16x16] nvfp4 nvfp4"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "casts"), TRAINING, ids=lambda value: type(value).__name__)
def test_training_by_torchaos_objects(config, casts):
    layer = ao.quantize_(nn.Linear(64, 32), config)
    recipe = layer.weight.linear_recipe
    assert _named(recipe) == casts.strip() and recipe.name == type(config).__name__ and recipe.trains
    x = torch.randn(16, 64, requires_grad=True)
    y = layer(x)
    y.square().sum().backward()
    exact = nn.functional.linear(x, layer.weight.detach().high_precision, layer.bias)
    assert (y - exact).norm() < 0.2 * exact.norm() and layer.weight.grad.norm() > 0 and x.grad.norm() > 0


def test_signs_and_scaling_reach_the_casts():
    assert TRAINING[-1][0].rht_sign_vector[1] == -1
    recipe = recipe_of(ao.config_of(TRAINING[-1][0]))
    assert recipe.input.signs == recipe.grad.signs == 0xAAAA
    assert recipe_of(ao.config_of(TRAINING[0][0])).input.rowwise.scaling is ao.ScaleCalculationMode.FLOOR
    assert recipe_of(ao.config_of(THEIRS[0][0])).kernel_preference is ao.KernelPreference.EMULATED
    signs = torch.tensor([-1] + [1] * 15, dtype=torch.int8)
    assert ao.NVFP4TrainingConfig(rht_sign_vector=signs).linear_recipe().input.signs == 1


def test_a_change_counts_at_the_next_call():
    config = torchaos("Float8WeightOnlyConfig", weight_dtype=f8, granularity=PerRow())
    assert ao.quantize_(nn.Linear(64, 32), config).weight.format.name == "float8_e4m3_row"
    config.weight_dtype = f5
    assert ao.quantize_(nn.Linear(64, 32), config).weight.format.name == "float8_e5m2_row"
    ours = ao.MXDynamicActivationMXWeightConfig()
    ours.weight_dtype, ours.activation_dtype = "mxfp6", "mxfp8"
    assert ao.quantize_(nn.Linear(64, 32), ours).weight.format.name == "mxfp6_e2m3"


def test_recipes_of_training():
    every = [ao.MXFP8TrainingOpConfig.from_recipe(recipe) for recipe in ao.MXFP8TrainingRecipe]
    assert [(c.wgrad_with_hp, c.linear_recipe().kernel_preference.value) for c in every] == [
        (False, "auto"), (True, "auto"), (False, "emulated"),
    ]  # fmt: skip
    assert ao.MXFP8TrainingOpConfig.from_recipe("mxfp8_rceil") == every[0]
    scalings = {c.linear_recipe().input.rowwise.scaling for c in (*every, ao.MXLinearConfig())}
    assert scalings == {ao.ScaleCalculationMode.RCEIL}


@dataclass
class WithField:
    use_dynamic_per_tensor_scale: bool = True
    rotate: bool = False


WithField.__name__ = "NVFP4DynamicActivationNVFP4WeightConfig"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (WithField(rotate=True), "rotate=True is not available; leave it at its default, False"),
        (ao.Float8WeightOnlyConfig(granularity="PerColumn"), "granularity 'PerColumn' is not available"),
        (ao.Float8WeightOnlyConfig(weight_dtype=torch.int8), "torch.int8 is not available"),
        (torchaos("Float8WeightOnlyConfig", granularity=PerGroup(64)), "is not available; choose PerTensor"),
        (ao.Float8DynamicActivationFloat8WeightConfig(activation_value_lb=1.0), "bounds of activations"),
        (ao.Float8TrainingOpConfig(float8_linear_recipe="fast"), "float8_linear_recipe 'fast' is not available"),
        (ao.Float8TrainingOpConfig(float8_dtype=f5), "float8_dtype torch.float8_e5m2 is not available"),
        (ao.MXFP8TrainingOpConfig(out_dtype=torch.float16), "out_dtype torch.float16 is not available"),
        (ao.NVFP4TrainingConfig(process_group=object()), "use mx.parallel.ColwiseParallel"),
        (ao.NVFP4TrainingConfig(rht_sign_vector=[1, 0]), "use 16 values of -1 or 1"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_what_is_not_available_is_refused(config, message):
    assert_refused(config, message, ao.quantize_)


def test_an_unknown_recipe_of_training():
    with pytest.raises(ValueError, match="recipe 'mxfp8_floor' is not available; choose one of mxfp8_rceil"):
        ao.MXFP8TrainingOpConfig.from_recipe("mxfp8_floor")


def test_fields_are_torchaos_in_their_order():
    assert [f.name for f in fields(ao.MXFP8TrainingOpConfig)] == [
        "kernel_preference", "out_dtype", "wgrad_with_hp", "scale_calculation_mode", "pad_token_groups_for_grouped_mm",
    ]  # fmt: skip
    assert [f.name for f in fields(ao.Float8WeightOnlyConfig)] == [
        "weight_dtype", "set_inductor_config", "version", "granularity",
    ]  # fmt: skip


def test_to_mx_has_torchaos_default_and_quantize_its_own():
    x = torch.randn(32, 64)
    floor, rceil = mx.quantize(x, "mxfp8", "floor"), mx.quantize(x, "mxfp8", "rceil")
    assert not torch.equal(floor.rowwise.scale, rceil.rowwise.scale)
    assert torch.equal(mx.MXTensor.to_mx(x).rowwise.scale, floor.rowwise.scale)
    assert torch.equal(mx.quantize(x, "mxfp8").rowwise.scale, rceil.rowwise.scale)


# ---------------------------------------------------------------------------------------------- MX and NVFP4

i8 = torch.int8
AUTO, EMULATED = ao.KernelPreference.AUTO, ao.KernelPreference.EMULATED
RCEIL, FLOOR = ao.ScaleCalculationMode.RCEIL, ao.ScaleCalculationMode.FLOOR
MXConfig = ao.MXDynamicActivationMXWeightConfig
NVConfig, NVWeightOnly = ao.NVFP4DynamicActivationNVFP4WeightConfig, ao.NVFP4WeightOnlyConfig
CONFIGS = {
    # config -> weight format, activation format, scaling, kernel preference
    "mx": (MXConfig(), "mxfp8_e4m3", "mxfp8_e4m3", RCEIL, AUTO),
    "mx_dtypes": (MXConfig(32, i8, ao.DTYPE_FP6_E3M2), "mxfp6_e3m2", "mxint8", RCEIL, AUTO),
    "mx_fp4_block": (MXConfig(16, f4, f4), "mxfp4_e2m1[1x16]", "mxfp4_e2m1[1x16]", RCEIL, AUTO),
    "mx_fields": (
        MXConfig(scaling_mode=FLOOR, kernel_preference=EMULATED),
        "mxfp8_e4m3",
        "mxfp8_e4m3",
        FLOOR,
        EMULATED,
    ),
    "mx_words": (
        MXConfig(scaling_mode="floor", kernel_preference="emulated"),
        "mxfp8_e4m3",
        "mxfp8_e4m3",
        FLOOR,
        EMULATED,
    ),
    "nv": (NVConfig(), "nvfp4", "nvfp4", RCEIL, AUTO),
    "nv_single_level": (
        NVConfig(use_triton_kernel=False, use_dynamic_per_tensor_scale=False),
        "nvfp4_single_level",
        "nvfp4_single_level",
        RCEIL,
        AUTO,
    ),
    "nv_weight_only": (NVWeightOnly(kernel_preference=EMULATED), "nvfp4", None, RCEIL, EMULATED),
    "nv_weight_only_single": (
        NVWeightOnly(use_dynamic_per_tensor_scale=False),
        "nvfp4_single_level",
        None,
        RCEIL,
        AUTO,
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_is_a_recipe(name):
    config, weight, activation, scaling, preference = CONFIGS[name]
    linear, original = quantized_by(config, weight, activation, scaling, preference)
    expected = mx.quantize(original, weight, scaling=scaling)
    assert all(map(torch.equal, linear.weight.components, expected.components))


class TorchaoEnum:
    """Members of torchao's enums are different objects with the same values."""

    def __init__(self, value):
        self.value = value


def test_members_of_torchaos_enums_are_accepted_by_value():
    config = MXConfig(scaling_mode=TorchaoEnum("floor"), kernel_preference=TorchaoEnum("emulated"))
    assert config.linear_recipe() == MXConfig(scaling_mode="floor", kernel_preference="emulated").linear_recipe()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MXConfig(block_size=48), "block 48 is not available"),
        (MXConfig(weight_dtype=torch.float16), "unknown format torch.float16"),
        (MXConfig(scaling_mode="up"), "unknown scaling 'up'"),
        (MXConfig(kernel_preference="fast"), "unknown kernel_preference 'fast'"),
        (NVConfig(kernel_preference="fast"), "unknown kernel_preference 'fast'"),
    ],
    ids=str,
)
def test_an_impossible_config_changes_nothing(config, message):
    assert_refused(config, message)


def static(prepare, convert):
    """The outputs of a model with static scales of inputs, by the two steps."""
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16)).requires_grad_(False)
    x = torch.randn(6, 64)
    prepare(m)
    m(x)
    return convert(m)(x)


def test_a_step_is_the_step_of_mx():
    expected = static(*(lambda m, step=step: mx.quantize_(m, "nvfp4", step=step) for step in ("observe", "convert")))
    for function in (mx.quantize_, ao.quantize_):
        prepare, convert = (partial(function, config=NVConfig(step=step)) for step in ("prepare", ao.QATStep.CONVERT))
        assert torch.equal(static(prepare, convert), expected)
    for call, message in (
        (lambda: mx.quantize_(nn.Linear(64, 64), NVConfig(step="observe")), "choose one of 'prepare', 'convert', or"),
        (lambda: NVConfig(step="prepare").linear_recipe(), "step='prepare' is for quantize_ alone"),
        (lambda: mx.calibrate(nn.Linear(64, 64), [torch.ones(2, 64)], NVConfig(step="prepare")), "for quantize_ alone"),
        (lambda: mx.quantize_(nn.Linear(64, 64), NVConfig(step="prepare"), step="observe"), "leave step='observe' out"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_steps_of_torchaos_own_config():
    formats = pytest.importorskip("torchao.prototype.mx_formats")
    kind = formats.NVFP4DynamicActivationNVFP4WeightConfig
    found = static(*(lambda m, step=step: ao.quantize_(m, kind(step=step)) for step in ("prepare", "convert")))
    expected = static(*(lambda m, step=step: mx.quantize_(m, "nvfp4", step=step) for step in ("observe", "convert")))
    assert torch.equal(found, expected)
