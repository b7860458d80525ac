"""NVFP4 recipes with four over six and row-scaled activations, rounded to nearest, for tests of training."""

from mxtensor.recipe import NVFP4BlockScaling

NVFP4_OPTIONS = {
    "nvfp4 four over six, weights": NVFP4BlockScaling(disable_stochastic_rounding=True, nvfp4_4over6="weights"),
    "nvfp4 four over six": NVFP4BlockScaling(
        disable_rht=True, disable_stochastic_rounding=True, nvfp4_4over6="all", nvfp4_4over6_err_mode="MSE"
    ),
    "nvfp4 row-scaled": NVFP4BlockScaling(
        disable_rht=True, disable_stochastic_rounding=True, row_scaled_activation=True
    ),
    "nvfp4 row-scaled four over six": NVFP4BlockScaling(
        disable_rht=True,
        disable_stochastic_rounding=True,
        disable_2d_quantization=True,
        row_scaled_activation=True,
        nvfp4_4over6="activations",
        nvfp4_4over6_e4m3_use_256="none",
    ),
}
