"""Recipe classes: TransformerEngine's names, fields and questions, and the casts that they describe."""

import copy
import importlib
import pickle
import pkgutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import mxtensor as mx
from mxtensor.numerics.cast import Cast
from mxtensor.numerics.choices import ScaleCalculationMode
from mxtensor.recipe import (
    RECIPES,
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from mxtensor.recipe.linear_recipe import LinearRecipe, TensorCasts, recipe_by_key
from mxtensor.training.autocast import autocast_state
from mxtensor.training.linear import Options, linear
from tests.helpers.training_reference import check_step

KNOWN = (
    MXFP8BlockScaling,
    MXFP6BlockScaling,
    MXFP4BlockScaling,
    NVFP4BlockScaling,
    Float8CurrentScaling,
    DelayedScaling,
    Float8BlockScaling,
    CustomRecipe,
)
"""The classes of the golden tests; all other tests run over RECIPES, so that a new recipe needs no line here."""
each = pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.__name__)


def half_of_max(history):
    return history.amax() / 2


# ---------------------------------------------------------------------------------------------- TransformerEngine


def test_defaults_of_mxfp8_block_scaling():
    recipe = MXFP8BlockScaling()
    assert recipe == MXFP8BlockScaling(margin=0, fp8_format=Format.E4M3, fp8_dpa=False, fp8_mha=False)
    assert (recipe.margin, recipe.fp8_format, recipe.fp8_dpa, recipe.fp8_mha) == (0, Format.E4M3, False, False)


def test_repr_of_mxfp8_block_scaling():
    assert repr(MXFP8BlockScaling()) == "recipe_type=MXFP8BlockScaling, margin=0, format=E4M3"


def test_str_of_mxfp8_block_scaling():
    assert str(MXFP8BlockScaling()) == "recipe_type=MXFP8BlockScaling, margin=0, format=E4M3"


def test_the_questions_of_each_recipe():
    """fp8() counts the three float8 recipes, block_scaling() those whose blocks share scales."""
    questions = (
        "fp8", "mxfp8", "nvfp4", "block_scaling", "delayed", "float8_current_scaling", "float8_per_tensor_scaling",
        "float8_block_scaling", "custom",
    )  # fmt: skip
    rows = [f"{r.__name__}: {' '.join(q for q in questions if getattr(r(), q)())}" for r in KNOWN]
    assert all(getattr(r, q)() is getattr(r(), q)() for q in questions for r in KNOWN)  # TransformerEngine asks classes
    assert_expected_inline(
        "\n".join(rows),
        """\
MXFP8BlockScaling: mxfp8 block_scaling
MXFP6BlockScaling: block_scaling
MXFP4BlockScaling: block_scaling
NVFP4BlockScaling: nvfp4 block_scaling
Float8CurrentScaling: fp8 float8_current_scaling float8_per_tensor_scaling
DelayedScaling: fp8 delayed float8_per_tensor_scaling
Float8BlockScaling: fp8 block_scaling float8_block_scaling
CustomRecipe: custom""",
    )


def test_the_alignment_idiom_of_transformer_engine():
    sizes = {r.__name__: 32 if r().mxfp8() or r().nvfp4() else 16 for r in (MXFP8BlockScaling, DelayedScaling)}
    assert sizes == {"MXFP8BlockScaling": 32, "DelayedScaling": 16}


# ---------------------------------------------------------------------------------------------- repr and casts


def test_repr_shows_what_transformer_engine_shows_and_every_field_that_is_not_the_default():
    shown = [
        *(r() for r in KNOWN),
        MXFP8BlockScaling(fp8_format=Format.HYBRID, two_dimensional_weights=True, grad_scaling="floor"),
        NVFP4BlockScaling(disable_rht=True),
        DelayedScaling(margin=1, amax_history_len=16, amax_compute_algo="most_recent"),
        CustomRecipe("mxfp8", None, grad=Cast.of("mxfp4", rounding="stochastic"), high_precision_wgrad=True),
    ]
    assert_expected_inline(
        "\n".join(map(repr, shown)).replace(", ", ",\n  "),
        """\
recipe_type=MXFP8BlockScaling,
  margin=0,
  format=E4M3
recipe_type=MXFP6BlockScaling,
  format=e2m3
recipe_type=MXFP4BlockScaling,
  format=E2M1
recipe_type=NVFP4BlockScaling,
  fp4_format=E2M1,
  fp8_format=E4M3
recipe_type=Float8CurrentScaling,
  format=HYBRID,
  use_power_2_scales=False
recipe_type=DelayedScaling,
  margin=0,
  format=HYBRID,
  amax_history_len=1024,
  reduce_amax=True,
  fp8_dpa=False,
  fp8_mha=False
recipe_type=Float8BlockScaling,
  format=E4M3,
  use_f32_scales=False
recipe_type=CustomRecipe,
  input=mxfp8_e4m3,
  weight=mxfp8_e4m3,
  grad=mxfp8_e4m3
recipe_type=MXFP8BlockScaling,
  margin=0,
  format=HYBRID,
  grad_scaling=floor,
  two_dimensional_weights=True
recipe_type=NVFP4BlockScaling,
  fp4_format=E2M1,
  fp8_format=E4M3,
  disable_rht=True
recipe_type=DelayedScaling,
  margin=1,
  format=HYBRID,
  amax_history_len=16,
  reduce_amax=True,
  fp8_dpa=False,
  fp8_mha=False,
  amax_compute_algo=most_recent
recipe_type=CustomRecipe,
  input=mxfp8,
  weight=None,
  grad=Cast(format=Format('mxfp4_e2m1'),
  scaling=<ScaleCalculationMode.RCEIL: 'rceil'>,
  rounding=<Rounding.STOCHASTIC: 'stochastic'>,
  seed=None,
  amax_epsilon=0.0,
  four_over_six=None),
  high_precision_wgrad=True""",
    )


def test_formats_name_the_elements_of_both_passes():
    assert {f.name: (f.fwd, f.bwd) for f in Format} == {
        "E4M3": ("e4m3", "e4m3"),
        "E5M2": ("e5m2", "e5m2"),
        "HYBRID": ("e4m3", "e5m2"),
        "E2M1": ("e2m1", "e2m1"),
    }


GOLDEN = {
    "mxfp8": MXFP8BlockScaling(),
    "mxfp8 hybrid": MXFP8BlockScaling(fp8_format=Format.HYBRID),
    "mxfp8 e5m2": MXFP8BlockScaling(fp8_format=Format.E5M2),
    "mxfp8 32x32": MXFP8BlockScaling(two_dimensional_weights=True),
    "mxfp8 modes": MXFP8BlockScaling(input_scaling="floor", weight_scaling="ceil", grad_scaling="even"),
    "mxfp8 plain wgrad": MXFP8BlockScaling(high_precision_wgrad=True),
    "mxfp8 plain backward": MXFP8BlockScaling(high_precision_backward=True),
    "mxfp6": MXFP6BlockScaling(),
    "mxfp6 e3m2 grad": MXFP6BlockScaling(fp6_format_grad="e3m2"),
    "mxfp4": MXFP4BlockScaling(),
    "mxfp4 mxfp8 grad": MXFP4BlockScaling(grad_format="mxfp8_e5m2", stochastic_rounding=False),
    "mxfp4 plain backward": MXFP4BlockScaling(high_precision_backward=True),
    "nvfp4": NVFP4BlockScaling(),
    "nvfp4 all off": NVFP4BlockScaling(True, True, True),
    "nvfp4 plain wgrad": NVFP4BlockScaling(high_precision_wgrad=True),
    "float8 current": Float8CurrentScaling(),
    "float8 current pow2": Float8CurrentScaling(Format.E4M3, use_power_2_scales=True),
    "delayed": DelayedScaling(),
    "float8 block": Float8BlockScaling(),
    "float8 block f32": Float8BlockScaling(use_f32_scales=True, w_block_scaling_dim=1, grad_block_scaling_dim=2),
    "custom": CustomRecipe("mxfp8", "mxfp6_e3m2", grad=None),
}


def row(linear_recipe):
    """``input | weight | grad``; of each, the rowwise and the columnwise cast."""

    def cast(c):
        if c is None:
            return "-"
        scaling = "" if c.scaling.value == "rceil" else f":{c.scaling.value}"
        return f"{c.format.name}{scaling}{'~' if c.rounding.value == 'stochastic' else ''}"

    def casts(r):
        both = cast(r.rowwise) if r.rowwise == r.columnwise else f"{cast(r.rowwise)}/{cast(r.columnwise)}"
        return both + (f" signs {r.signs:#x}" if r.signs is not None else "")

    return " | ".join(map(casts, (linear_recipe.input, linear_recipe.weight, linear_recipe.grad)))


def test_the_casts_of_each_recipe():
    assert_expected_inline(
        "\n".join(f"{name}: {row(recipe.linear_recipe())}" for name, recipe in GOLDEN.items()),
        """\
mxfp8: mxfp8_e4m3 | mxfp8_e4m3 | mxfp8_e4m3
mxfp8 hybrid: mxfp8_e4m3 | mxfp8_e4m3 | mxfp8_e5m2
mxfp8 e5m2: mxfp8_e5m2 | mxfp8_e5m2 | mxfp8_e5m2
mxfp8 32x32: mxfp8_e4m3 | mxfp8_e4m3[32x32] | mxfp8_e4m3
mxfp8 modes: mxfp8_e4m3:floor | mxfp8_e4m3:ceil | mxfp8_e4m3:even
mxfp8 plain wgrad: mxfp8_e4m3/- | mxfp8_e4m3 | mxfp8_e4m3/-
mxfp8 plain backward: mxfp8_e4m3/- | mxfp8_e4m3/- | -
mxfp6: mxfp6_e2m3 | mxfp6_e2m3 | mxfp6_e2m3
mxfp6 e3m2 grad: mxfp6_e2m3 | mxfp6_e2m3 | mxfp6_e3m2
mxfp4: mxfp4_e2m1 | mxfp4_e2m1 | mxfp4_e2m1~
mxfp4 mxfp8 grad: mxfp4_e2m1 | mxfp4_e2m1 | mxfp8_e5m2
mxfp4 plain backward: mxfp4_e2m1/- | mxfp4_e2m1/- | -
nvfp4: nvfp4 signs 0xd7e8 | nvfp4[16x16] | nvfp4~ signs 0xd7e8
nvfp4 all off: nvfp4 | nvfp4 | nvfp4
nvfp4 plain wgrad: nvfp4/- | nvfp4[16x16] | nvfp4~/-
float8 current: float8_e4m3_tensor | float8_e4m3_tensor | float8_e5m2_tensor
float8 current pow2: float8_e4m3_tensor_pow2 | float8_e4m3_tensor_pow2 | float8_e4m3_tensor_pow2
delayed: float8_e4m3_tensor | float8_e4m3_tensor | float8_e5m2_tensor
float8 block: float8_e4m3_1x128_pow2 | float8_e4m3_128x128_pow2 | float8_e4m3_1x128_pow2
float8 block f32: float8_e4m3_1x128 | float8_e4m3_1x128 | float8_e4m3_128x128
custom: mxfp8_e4m3 | mxfp6_e3m2 | -""",
    )


def test_delayed_scaling_passes_its_fields_on():
    delayed = DelayedScaling(2, Format.E4M3, 16, half_of_max, None, False).linear_recipe().delayed
    assert (delayed.margin, delayed.history_len, delayed.reduce) == (2, 16, False)
    assert delayed.amax_of is half_of_max and delayed.scale_of is None


def test_recipes_with_equal_fields_share_one_linear_recipe():
    assert MXFP8BlockScaling().linear_recipe() is MXFP8BlockScaling().linear_recipe()
    assert MXFP8BlockScaling().linear_recipe() is not MXFP8BlockScaling(fp8_format=Format.E5M2).linear_recipe()


def test_a_linear_recipe_names_its_recipe_and_formats():
    assert str(MXFP8BlockScaling().linear_recipe()) == "MXFP8BlockScaling (mxfp8_e4m3)"
    assert (
        str(CustomRecipe("mxfp8", None, "mxint8").linear_recipe()) == "CustomRecipe (high precision/mxfp8_e4m3/mxint8)"
    )


def modules():
    return [importlib.import_module(f"mxtensor.recipe.{m.name}") for m in pkgutil.iter_modules(mx.recipe.__path__)]


def test_every_class_that_makes_a_linear_recipe_is_public():
    """A class that is missing from ``__all__`` of its file would be missing from the documentation and these tests."""
    classes = {k for m in modules() for k in vars(m).values() if isinstance(k, type) and issubclass(k, Recipe)}
    assert {k for k in classes if "_linear_recipe" in vars(k)} - {Recipe} == set(RECIPES)
    assert all(getattr(mx.recipe, k.__name__) is k and k.__name__ in mx.recipe.__all__ for k in RECIPES)


def test_equal_inference_recipes_are_one_object():
    assert LinearRecipe.inference("mxfp8", "mxfp8") is LinearRecipe.inference(Cast.of("mxfp8"), "mxfp8_e4m3", "auto")
    assert LinearRecipe.inference("mxfp8") is not LinearRecipe.inference("mxfp8", "mxfp8")


# ---------------------------------------------------------------------------------------------- custom


@pytest.mark.parametrize(
    "given",
    [
        "mxfp6_e3m2",
        mx.get_format("mxfp6_e3m2"),
        Cast.of("mxfp6_e3m2"),
        TensorCasts.of("mxfp6_e3m2"),
        TensorCasts(Cast.of("mxfp6_e3m2"), Cast.of("mxfp6_e3m2")),
    ],
    ids=lambda p: type(p).__name__,
)
def test_custom_recipe_takes_a_name_a_format_a_cast_or_tensor_casts(given):
    assert CustomRecipe(given, given, given).linear_recipe() == CustomRecipe(*["mxfp6_e3m2"] * 3).linear_recipe()


def test_custom_recipe_takes_torch_dtypes():
    recipe = CustomRecipe(torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e5m2)
    assert row(recipe.linear_recipe()) == row(CustomRecipe("mxfp8_e5m2", "mxfp8_e4m3", "mxfp8_e5m2").linear_recipe())


def test_each_copy_may_have_its_own_cast():
    """y from MXFP4, gradients from MXFP8."""
    fine, coarse = Cast.of("mxfp8"), Cast.of("mxfp4")
    recipe = CustomRecipe(TensorCasts(coarse, fine), TensorCasts(coarse, fine), fine)
    step(recipe, nn.Linear(64, 48))


@pytest.mark.parametrize(
    "casts",
    [
        {"input": TensorCasts(Cast.of("nvfp4"), Cast.of("nvfp4"), 5)},
        {
            "input": TensorCasts(Cast.of("nvfp4"), Cast.of("nvfp4"), 5),
            "grad": TensorCasts(Cast.of("nvfp4"), Cast.of("nvfp4"), 6),
        },
        {"input": TensorCasts(Cast.of("nvfp4"), None, 5), "grad": TensorCasts(Cast.of("nvfp4"), Cast.of("nvfp4"), 5)},
        {"weight": TensorCasts(Cast.of("nvfp4"), Cast.of("nvfp4"), 5)},
    ],
)
def test_rotating_one_operand_of_a_product_is_an_error(casts):
    with pytest.raises(ValueError, match="only the two operands of wgrad can be rotated, and both by the same signs"):
        CustomRecipe(**casts)


# ---------------------------------------------------------------------------------------------- in effect


def step(recipe, layer):
    """One step of ``layer`` under ``recipe``, compared with the reference for the current fields of the recipe."""
    x, g = torch.randn(20, layer.in_features, requires_grad=True), torch.randn(20, layer.out_features)
    layer.zero_grad()
    with mx.autocast(recipe=recipe):
        y = layer(x)
    y.backward(g)
    b = layer.bias
    check_step((y.detach(), x.grad, layer.weight.grad, b.grad), x, layer.weight, b, g, recipe.linear_recipe())
    return y.detach()


def nearest(casts):
    """The casts with rounding to nearest, which the reference can compute."""
    rowwise, columnwise = (c and replace(c, rounding=mx.Rounding.NEAREST) for c in (casts.rowwise, casts.columnwise))
    return replace(casts, rowwise=rowwise, columnwise=columnwise)


@each
def test_a_training_step_equals_the_reference(recipe):
    """Without stochastic rounding and delayed scales, which have their own tests."""
    made = recipe().linear_recipe()
    made = replace(made, **{n: nearest(getattr(made, n)) for n in ("input", "weight", "grad")}, delayed=None)
    x, w, b = (torch.randn(shape, requires_grad=True) for shape in ((20, 70), (40, 70), (40,)))
    g = torch.randn(20, 40)
    y = linear(x, w, b, Options(made))
    y.backward(g)
    check_step((y.detach(), x.grad, w.grad, b.grad), x, w, b, g, made)


EDITS = [
    (MXFP8BlockScaling(), "fp8_format", Format.E5M2),
    (MXFP8BlockScaling(), "input_scaling", "floor"),
    (MXFP8BlockScaling(), "weight_scaling", "even"),
    (MXFP8BlockScaling(), "grad_scaling", ScaleCalculationMode.CEIL),
    (MXFP8BlockScaling(), "two_dimensional_weights", True),
    (MXFP8BlockScaling(), "high_precision_wgrad", True),
    (MXFP8BlockScaling(), "high_precision_backward", True),
    (MXFP8BlockScaling(), "kernel_preference", "emulated"),
    (MXFP6BlockScaling(), "fp6_format", "e3m2"),
    (MXFP6BlockScaling(), "fp6_format_grad", "e3m2"),
    (MXFP4BlockScaling(stochastic_rounding=False), "grad_format", "mxfp8_e4m3"),
    (NVFP4BlockScaling(disable_stochastic_rounding=True), "disable_rht", True),
    (NVFP4BlockScaling(disable_stochastic_rounding=True), "disable_2d_quantization", True),
    (Float8CurrentScaling(), "fp8_format", Format.E4M3),
    (Float8CurrentScaling(), "use_power_2_scales", True),
    (Float8BlockScaling(), "use_f32_scales", True),
    (Float8BlockScaling(), "x_block_scaling_dim", 2),
    (Float8BlockScaling(), "w_block_scaling_dim", 1),
    (Float8BlockScaling(), "grad_block_scaling_dim", 2),
    (CustomRecipe(), "input", "mxfp4"),
    (CustomRecipe(), "weight", None),
    (CustomRecipe(), "grad", "mxint8"),
]


@pytest.mark.parametrize("recipe, name, value", EDITS, ids=[f"{type(r).__name__}-{n}" for r, n, _ in EDITS])
def test_an_edit_of_any_field_takes_effect_at_the_next_forward(recipe, name, value):
    recipe, layer = copy.copy(recipe), nn.Linear(70, 40)
    step(recipe, layer)
    before = recipe.linear_recipe()
    setattr(recipe, name, value)
    assert recipe.linear_recipe() != before
    step(recipe, layer)


def test_an_edit_inside_the_block_takes_effect_there():
    recipe, layer, x = MXFP8BlockScaling(), nn.Linear(64, 48), torch.randn(8, 64)
    with mx.autocast(recipe=recipe):
        fine = layer(x)
        recipe.fp8_format = Format.E5M2
        coarse = layer(x)
        recipe.fp8_format = Format.E4M3
        assert torch.equal(layer(x), fine) and not torch.equal(coarse, fine)


# ---------------------------------------------------------------------------------------------- mistakes

IMPOSSIBLE = [
    (MXFP8BlockScaling, "margin", 1, "choose one of 0"),
    (MXFP8BlockScaling, "fp8_format", "E4M3", "choose one of Format.E4M3, Format.HYBRID, Format.E5M2"),
    (MXFP8BlockScaling, "fp8_format", Format.E2M1, "choose one of Format.E4M3"),
    (MXFP8BlockScaling, "fp8_dpa", True, "leave it False"),
    (MXFP8BlockScaling, "fp8_mha", True, "leave it False"),
    (MXFP8BlockScaling, "input_scaling", "nearest", "choose one of floor, rceil, ceil, even"),
    (MXFP8BlockScaling, "weight_scaling", ["floor"], "choose one of floor, rceil, ceil, even"),
    (MXFP8BlockScaling, "grad_scaling", None, "choose one of floor, rceil, ceil, even"),
    (MXFP8BlockScaling, "kernel_preference", "fast", "choose one of auto, emulated"),
    (MXFP6BlockScaling, "fp6_format", "e4m3", "choose one of e2m3, e3m2"),
    (MXFP6BlockScaling, "fp6_format_grad", None, "choose one of e2m3, e3m2"),
    (MXFP4BlockScaling, "fp4_format", Format.E4M3, "choose one of Format.E2M1"),
    (MXFP4BlockScaling, "grad_format", "nvfp4", "choose one of mxfp8_e4m3, "),
    (NVFP4BlockScaling, "fp4_format", Format.E4M3, "choose one of Format.E2M1"),
    (NVFP4BlockScaling, "fp8_format", Format.E5M2, "choose one of Format.E4M3"),
    (Float8CurrentScaling, "fp8_format", Format.E2M1, "choose one of Format.HYBRID"),
    (DelayedScaling, "amax_history_len", 0, "use an integer of 1 or more"),
    (DelayedScaling, "amax_history_len", 2.5, "use an integer of 1 or more"),
    (DelayedScaling, "amax_history_len", "16", "use an integer of 1 or more"),
    (DelayedScaling, "amax_compute_algo", "mean", "choose one of max, most_recent"),
    (DelayedScaling, "scaling_factor_compute_algo", "max", "use a function or None"),
    (DelayedScaling, "margin", "1", "use a number"),
    (DelayedScaling, "fp8_mha", True, "leave it False"),
    (Float8BlockScaling, "x_block_scaling_dim", 3, "choose one of 1, 2"),
    (Float8BlockScaling, "w_block_scaling_dim", 0, "choose one of 1, 2"),
    (CustomRecipe, "input", "mxfp9", "did you mean .*The formats are mxfp8_e4m3, "),
    (CustomRecipe, "weight", ["mxfp8"], "the formats are mxfp8_e4m3, "),
    (CustomRecipe, "grad", torch.int32, "the formats are mxfp8_e4m3, "),
]


@pytest.mark.parametrize(
    "recipe, name, value, choices", IMPOSSIBLE, ids=[f"{r.__name__}-{n}-{v}" for r, n, v, _ in IMPOSSIBLE]
)
def test_an_impossible_field_is_a_value_error_that_names_it_and_what_is_possible(recipe, name, value, choices):
    with pytest.raises(ValueError, match=rf"^{recipe.__name__}: {name}\b.*{choices}"):
        recipe(**{name: value})
    edited = recipe()
    good = getattr(edited, name)
    setattr(edited, name, value)
    with pytest.raises(ValueError, match=rf"^{recipe.__name__}: {name}\b.*{choices}"), mx.autocast(recipe=edited):
        pytest.fail("the block must not run")
    assert autocast_state() is None
    setattr(edited, name, good)
    assert edited.linear_recipe() is recipe().linear_recipe()


@each
def test_unknown_fields_are_type_errors(recipe):
    with pytest.raises(TypeError, match="unexpected keyword argument 'block'"):
        recipe(block=32)


def test_a_subclass_must_define_its_linear_recipe():
    class Mine(Recipe):
        pass

    with pytest.raises(NotImplementedError, match=r"Mine must define _linear_recipe\(\)"):
        Mine()


# ---------------------------------------------------------------------------------------------- copies


@each
def test_recipes_are_equal_by_their_fields_and_survive_copies_and_pickle(recipe):
    one, other = recipe(), recipe(high_precision_wgrad=True)
    assert one == recipe() and one != other
    for copied in (copy.copy(other), copy.deepcopy(other), pickle.loads(pickle.dumps(other))):
        assert copied == other and copied is not other and copied.linear_recipe() == other.linear_recipe()


def test_recipes_of_different_types_are_not_equal():
    assert len({repr(r()) for r in RECIPES}) == len(RECIPES)
    assert MXFP8BlockScaling() != CustomRecipe() != MXFP6BlockScaling()


@each
def test_linear_recipes_survive_copies_and_pickle(recipe):
    linear_recipe = recipe().linear_recipe()
    for copied in (copy.copy(linear_recipe), copy.deepcopy(linear_recipe), pickle.loads(pickle.dumps(linear_recipe))):
        assert isinstance(copied, LinearRecipe) and copied == linear_recipe and hash(copied) == hash(linear_recipe)
        assert copied.key == linear_recipe.key and recipe_by_key(copied.key) == linear_recipe


@pytest.mark.exhaustive
def test_a_process_that_unpickles_a_linear_recipe_finds_it_by_its_key():
    """A traced graph stores the key."""
    data = pickle.dumps(MXFP8BlockScaling(fp8_format=Format.HYBRID, grad_scaling="even").linear_recipe())
    code = (
        "import pickle, sys, mxtensor.recipe.linear_recipe as r\n"
        "recipe = pickle.loads(sys.stdin.buffer.read())\nassert r.recipe_by_key(recipe.key) is recipe"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], input=data, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
