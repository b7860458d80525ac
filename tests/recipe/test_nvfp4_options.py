"""NVFP4BlockScaling's options of TransformerEngine: which tensor each of them casts, and what is refused."""

import pytest
import torch

import mxtensor as mx
import mxtensor.te as te
from mxtensor.numerics.cast import Cast
from mxtensor.numerics.choices import FourOverSix
from mxtensor.numerics.formats import get_format
from mxtensor.recipe import CustomRecipe, NVFP4BlockScaling
from mxtensor.recipe.linear_recipe import LinearRecipe, recipe_from_row, recipe_to_row

SCOPES = ("none", "weights", "activations", "all")


@pytest.mark.parametrize("bound", SCOPES)
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("error", ["MAE", "MSE"])
def test_scopes(scope, bound, error):
    recipe = NVFP4BlockScaling(
        disable_rht=True, nvfp4_4over6=scope, nvfp4_4over6_e4m3_use_256=bound, nvfp4_4over6_err_mode=error
    ).linear_recipe()

    def wanted(tensor):
        if scope not in (tensor, "all"):
            return None
        return FourOverSix(error.lower() if bound in (tensor, "all") else f"{error.lower()}_448")

    assert recipe.input.rowwise.four_over_six is recipe.input.columnwise.four_over_six is wanted("activations")
    assert recipe.weight.rowwise.four_over_six is recipe.weight.columnwise.four_over_six is wanted("weights")
    assert recipe.grad.rowwise.four_over_six is None
    assert recipe.weight.rowwise.format.name == "nvfp4[16x16]"


def test_the_defaults_are_those_of_transformer_engine():
    recipe = NVFP4BlockScaling()
    assert recipe.nvfp4_4over6 == "none" and recipe.row_scaled_activation is False
    assert recipe.nvfp4_4over6_e4m3_use_256 == "all" and recipe.nvfp4_4over6_err_mode == "MAE"
    plain = recipe.linear_recipe()
    recipe.nvfp4_4over6 = "weights"
    assert recipe.linear_recipe().weight.rowwise.four_over_six is FourOverSix.MAE
    assert recipe.linear_recipe().input == plain.input and recipe.linear_recipe().grad == plain.grad


def test_row_scaled_activations_are_inputs_only():
    recipe = NVFP4BlockScaling(disable_rht=True, row_scaled_activation=True).linear_recipe()
    rows = get_format("nvfp4[row_scaled]")
    assert recipe.input.rowwise == recipe.input.columnwise == Cast(rows)
    assert recipe.weight == NVFP4BlockScaling().linear_recipe().weight
    assert recipe.grad.rowwise.format is get_format("nvfp4")
    assert str(recipe) == "NVFP4BlockScaling (nvfp4[16x16]/nvfp4[row_scaled]/nvfp4)"


def test_wrong_values_are_refused():
    for field, value, choices in (
        ("nvfp4_4over6", "gradients", "none, weights, activations, all"),
        ("nvfp4_4over6", True, "none, weights, activations, all"),
        ("nvfp4_4over6_e4m3_use_256", "both", "none, weights, activations, all"),
        ("nvfp4_4over6_err_mode", "RMS", "MAE, MSE"),
    ):
        with pytest.raises(ValueError, match=f"NVFP4BlockScaling: {field} is {value!r}; choose one of {choices}"):
            NVFP4BlockScaling(disable_rht=True, **{field: value}).linear_recipe()
    with pytest.raises(ValueError, match="NVFP4BlockScaling: row_scaled_activation"):
        NVFP4BlockScaling(disable_rht=True, row_scaled_activation="yes").linear_recipe()


@pytest.mark.parametrize(
    "option", [{"row_scaled_activation": True}, {"nvfp4_4over6": "activations"}, {"nvfp4_4over6": "all"}]
)
def test_inputs_that_are_rotated_are_refused(option):
    name, value = next(iter(option.items()))
    with pytest.raises(ValueError, match=f"{name}={value!r} is for inputs that are not rotated.*set disable_rht=True"):
        NVFP4BlockScaling(**option).linear_recipe()
    assert NVFP4BlockScaling(nvfp4_4over6="weights").linear_recipe().input.signs is not None


@pytest.mark.parametrize("four", [None, *FourOverSix])
def test_a_stored_recipe_keeps_the_choice(four):
    recipe = LinearRecipe.inference(Cast.of("nvfp4[16x16]", four_over_six=four), Cast.of("nvfp4[row_scaled]"))
    row = recipe_to_row(recipe)
    assert recipe_from_row(row) == recipe and ("weight_four_over_six" in row) == (four is not None)
    with pytest.raises(ValueError, match="unknown four_over_six 'six'"):
        recipe_from_row(row | {"weight_four_over_six": "six"})


# ---------------------------------------------------------------------------------------------- quantizers


def test_a_module_shows_the_quantizers_of_its_recipe():
    layer = te.Linear(64, 48, device="cpu")
    with mx.autocast(recipe=NVFP4BlockScaling(disable_rht=True, row_scaled_activation=True, nvfp4_4over6="weights")):
        layer(torch.randn(4, 64))
    made, weight = layer.quantizers["scaling_fwd"]
    assert isinstance(made, te.NVFP4Quantizer) and made.cast == Cast.of("nvfp4[row_scaled]")
    assert weight.cast == Cast.of("nvfp4[16x16]", four_over_six="mae")


def test_quantizers_take_the_options_of_transformer_engine():
    four = te.NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=256, nvfp4_4over6_err_mode="mse")
    assert four.cast == Cast.of("nvfp4", four_over_six="mse")
    assert te.NVFP4Quantizer(nvfp4_use_4over6=True).cast.four_over_six is FourOverSix.MAE_448
    assert te.NVFP4Quantizer(nvfp4_e4m3_max=256).cast == Cast.of("nvfp4")
    tiles = te.NVFP4Quantizer(nvfp4_use_4over6=True, with_2d_quantization=True)
    x = torch.randn(32, 48)
    assert not torch.equal(four(x).rowwise.scale, te.NVFP4Quantizer()(x).rowwise.scale)
    assert tiles(x).rowwise.scale.shape == (2, 3) and "four_over_six='mae_448'" in repr(tiles)
    assert "row_scaled_nvfp4=True" in repr(te.NVFP4Quantizer(row_scaled_nvfp4=True))


def test_a_factory_of_row_scaled_quantizers_makes_a_recipe():
    def factory(slot):
        if slot.tensor_type == "input":
            return te.NVFP4Quantizer(row_scaled_nvfp4=True, nvfp4_use_4over6=True, nvfp4_e4m3_max=256)
        return te.NVFP4Quantizer(with_2d_quantization=slot.tensor_type == "weight")

    made = CustomRecipe(qfactory=factory).linear_recipe()
    assert made.input.rowwise == Cast.of("nvfp4[row_scaled]", four_over_six="mae")
    with mx.autocast(recipe=CustomRecipe(qfactory=factory)):
        y = torch.nn.Linear(32, 16)(torch.randn(4, 32))
    assert y.isfinite().all()


def test_wrong_quantizers_are_refused():
    x = torch.randn(32, 48)
    for options in (
        {"row_scaled_nvfp4": True, "with_rht": True}, {"row_scaled_nvfp4": True, "with_2d_quantization": True},
        {"row_scaled_nvfp4": True, "stochastic_rounding": True}, {"nvfp4_use_4over6": True, "with_rht": True},
        {"nvfp4_use_4over6": True, "stochastic_rounding": True},
    ):  # fmt: skip
        first, second = options
        with pytest.raises(ValueError, match=f"{first} and {second} do not go together"):
            te.NVFP4Quantizer(**options)
    with pytest.raises(ValueError, match="nvfp4_e4m3_max is 300; choose 448 or 256"):
        te.NVFP4Quantizer(nvfp4_e4m3_max=300)
    with pytest.raises(ValueError, match="nvfp4_4over6_err_mode is 'RMS'; choose MAE or MSE"):
        te.NVFP4Quantizer(nvfp4_4over6_err_mode="RMS")
    rows = te.NVFP4Quantizer(row_scaled_nvfp4=True)
    for call, given in ((rows, x), (rows.make_empty, (32, 48))):
        with pytest.raises(NotImplementedError, match="a tensor has one global scale"):
            call(given)
