"""Names of formats in any spelling: accepted if they can be only one, else an error with those they could be."""

import argparse

import pytest
import torch

import mxtensor as mx
from examples.recipes import recipe_of as example_recipe
from mxtensor.convert.configs import recipe_of
from mxtensor.core import names
from mxtensor.report.tune import format_name

SPELT = [
    ("MXFP4", "mxfp4_e2m1"), ("MXFP8", "mxfp8_e4m3"), ("mx-fp8", "mxfp8_e4m3"), ("MX FP8", "mxfp8_e4m3"),
    ("MXFP6_E2M3", "mxfp6_e2m3"), ("mxfp6-e3m2", "mxfp6_e3m2"), ("MxFp8E5M2", "mxfp8_e5m2"), ("mxfloat8", "mxfp8_e4m3"),
    ("NVFP4", "nvfp4"), ("nv-fp4", "nvfp4"), ("NVFP4 single level", "nvfp4_single_level"), ("MX-INT8", "mxint8"),
    ("fp8_row", "float8_e4m3_row"),
    ("Float8-Tensor", "float8_e4m3_tensor"), ("FP8 E5M2 1x128 pow2", "float8_e5m2_1x128_pow2"),
    ("MXFP8[32x32]", "mxfp8_e4m3[32x32]"), (" mx-fp8[1X16] ", "mxfp8_e4m3[1x16]"), ("FP6_E2M3", "mxfp6_e2m3"),
]  # fmt: skip
"""As written -> the format."""
SEVERAL = {
    "fp8": ("mxfp8", "float8_tensor", "float8_row"),
    "float8": ("mxfp8", "float8_tensor"),
    "FP-8": ("mxfp8", "float8_tensor"),
    "e4m3": ("mxfp8_e4m3", "float8_e4m3_tensor"),
    "fp4": ("mxfp4", "nvfp4"),
    "fp6": ("mxfp6", "fp6_e3m2"),
    "int8": ("mxint8",),
    "mxpf8": ("mxfp8",),
    "nvfp8": ("nvfp4", "mxfp8"),
    "mxfp6_e2m2": ("mxfp6_e2m3", "mxfp6_e3m2"),
}
"""No name of a format -> names that the error lists."""


@pytest.mark.parametrize(("text", "name"), SPELT)
def test_a_spelling_that_can_be_only_one_format(text, name):
    row = mx.get_format(text)
    assert (row.name == name and row is mx.get_format(mx.get_format(name))) or row == mx.get_format(name)
    assert mx.Cast.of(text).format == row and mx.recipe.CustomRecipe(text).linear_recipe().input.rowwise.format == row
    assert mx.quantize(torch.randn(32, 64), text).format == row
    assert format_name(text) == name and example_recipe(text) is not None


@pytest.mark.parametrize(("text", "name"), [*SPELT, ("mxfp8", "mxfp8_e4m3")])
@pytest.mark.parametrize("end", ["-weight-only", "_weight_only", " Weight Only", "-wo", "_WO", "weightonly"])
def test_weight_only_in_any_spelling(text, name, end):
    recipe = recipe_of(text + end)
    assert recipe.stored.format.name == name and recipe.activation is None
    assert recipe_of(text).activation.format.name == name


@pytest.mark.parametrize("text", ["mxfp4-weight-mxint8-activation", "MXFP4_Weight_MXINT8_Activation"])
def test_the_name_of_a_recipe_with_two_formats(text):
    recipe = recipe_of(text)
    assert recipe == mx.LinearRecipe.inference("mxfp4", "mxint8")
    assert recipe_of("float8_row-weight-mxfp8-activation") == mx.LinearRecipe.inference("float8_row", "mxfp8")


def test_quantize_shows_the_canonical_name():
    layer = mx.quantize_(torch.nn.Linear(64, 64), "MXFP4_weight_only")
    assert "format=mxfp4_e2m1" in repr(layer.weight) and layer.weight.recipe.activation is None


@pytest.mark.parametrize("text", SEVERAL)
@pytest.mark.parametrize("end", ["", "-wo", "_weight_only"])
def test_other_names_raise_with_those_they_could_be(text, end):
    with pytest.raises(
        ValueError, match=r"unknown format '.*; did you mean .*\? The formats are mxfp8_e4m3, "
    ) as error:
        mx.quantize_(torch.nn.Linear(64, 64), text + end)
    hint = str(error.value).partition("; did you mean")[2].partition("?")[0]
    assert all(repr(name) in hint for name in SEVERAL[text]), hint
    with pytest.raises(argparse.ArgumentTypeError, match="did you mean"):
        format_name(text)


@pytest.mark.parametrize(
    ("text", "name"),
    [("mxfp8-weight-only", "mxfp8"), ("NVFP4_wo", "nvfp4"), ("mxfp4-weight-mxint8-activation", "mxfp4")],
)
def test_the_name_of_a_recipe_is_not_a_format(text, name):
    for call in (mx.get_format, mx.Cast.of, lambda text: mx.quantize(torch.ones(32, 32), text)):
        with pytest.raises(ValueError, match=f"^'{text}' names a recipe of quantize_, .*; did you mean '{name}'"):
            call(text)


FIRST = [
    (mx.checkpoints.get_layout, "compressed", "unknown layout 'compressed'; did you mean 'compressed-tensors'? T"),
    (lambda name: mx.kernels(name).__enter__(), "dequan", "unknown product kernel 'dequan'; did you mean 'dequant'? T"),
    (recipe_of, "mxfp8-weigth-only", "unknown format or config 'mxfp8-weigth-only'; did you mean 'mxfp8-weight-only'"),
    (recipe_of, "mxfp4-weight-mxint-activation", "unknown format 'mxint'; did you mean 'mxint8'? T"),
    (mx.get_format, "xyz", "unknown format 'xyz'; the formats are mxfp8_e4m3, "),
]


@pytest.mark.parametrize(("call", "name", "message"), FIRST)
def test_similar_names_come_first(call, name, message):
    with pytest.raises(ValueError) as error:
        call(name)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-",
        "wo",
        "weight-only",
        "weight-activation",
        "[32x32]",
        "mxfp8[32]",
        "mxfp8[0x0]",
        "mxfp8[1x99999999999]",
        "\0",
    ],
)
def test_what_is_not_a_name_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"unknown format|is not available"):
        recipe_of(text)


def test_every_canonical_name_is_found_by_itself_only():
    known = [*mx.FORMATS, *(alias for alias in mx.FORMATS.aliases if "." not in alias)]
    for name in known:
        assert names.find(name, known) == name
    assert len({names.key(name) for name in known}) == len(known)


def test_choices_of_other_arguments_in_any_spelling():
    x = torch.randn(32, 64)
    assert (
        mx.quantize(x, "mxfp8", scaling="R-CEIL", orientation="Row-wise", rounding="Nearest").recipe
        is mx.quantize(x, "mxfp8").recipe
    )
    recipe = mx.recipe.MXFP6BlockScaling(fp6_format="E3M2")
    assert recipe.linear_recipe().weight.rowwise.format.name == "mxfp6_e3m2"
    recipe = mx.recipe.MXFP4BlockScaling(grad_format="MXFP8-E5M2", stochastic_rounding=False)
    assert recipe.linear_recipe().grad.rowwise.format.name == "mxfp8_e5m2"
    assert mx.ao.MXLinearConfig.from_recipe_name("MXFP8-cublas-RCEIL") == mx.ao.MXLinearConfig.from_recipe_name(
        "mxfp8_cublas_rceil"
    )
