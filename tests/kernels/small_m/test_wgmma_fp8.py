"""Products of E4M3 codes under the scales of rows: the CUDA sources on the CPU, within the bound of ``fp8_rows``."""

import pytest
import torch

import mxtensor as mx
from mxtensor.kernels.runtime import nvrtc
from mxtensor.kernels.small_m import launch
from mxtensor.kernels.small_m.config import LaunchConfig
from mxtensor.numerics.reference import encode
from tests.helpers import cuda_on_cpu
from tests.helpers.row_scaled import assert_within_the_bound, stored, values

pytestmark = pytest.mark.skipif(cuda_on_cpu.compiler() is None, reason="needs a C++ compiler")
FP8 = LaunchConfig(1, 2, 4, 1, 4, 4, 1, 1, False, True, 2, float8=True)
"""One warpgroup of four warps, 16 rows of activations."""
CONFIGS = {
    "one": FP8,
    "cluster": FP8._replace(split=2),
    "through global memory": FP8._replace(wr=8, stages=6, ahead=3, split=2, reduce_global=True),
    "sent": FP8._replace(split=2, reduce_dsmem=True),
    "groups": FP8._replace(wk=2, nt=3),
    "groups, sent": FP8._replace(wk=2, split=2, reduce_dsmem=True, ahead=1),
}
BF16 = torch.bfloat16
PAIRS = [("mxfp8", "mxfp8"), ("mxfp8", "mxfp4"), ("mxfp4", "mxfp4"), ("mxfp6_e2m3", "mxfp8"), ("mxfp8", "mxfp6_e2m3"),
         ("mxfp6_e3m2", "mxfp6_e3m2"), ("mxfp8", "mxfp8[32x32]")]  # fmt: skip
"""(activations, weight)."""


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(nvrtc, "function", cuda_on_cpu.function)


def product(x, b, cast, config, bias=None, dtype=BF16):
    weight = launch.Weight(b.data, b.scale, None, bias)
    return launch.launch(x, (weight,), b.format, b.shape[-1], None, None, 1.0, 1.0, dtype, cast, config)[0]


def crafted_weight(name, rows, cols, device="cpu"):
    """A stored weight as no cast makes it: blocks of zeros under the largest and the smallest scale, scales far apart,
    a NaN scale, tiny blocks."""
    b = encode(torch.randn(rows, cols).to(device), mx.Cast.of(name))
    data, scale = b.data.view(torch.uint8), b.scale
    block = data.shape[1] * 32 // cols
    data[1, :block], scale[1, 0] = 0, scale[1, 1:].max() + 9  # zeros, nine octaves above the others
    data[2, :block], scale[2, 0] = 0, 0  # zeros as a cast of zeros writes them
    scale[3, 0] = 0  # values of 2^-127
    data[4], scale[4] = 0, 0  # a row of zeros
    scale[5, 1], scale[6, 2] = 255, 230  # NaN, and far above the others
    scale[7, 3] = scale[7, 2] - 13
    scale[8] = 0  # a row of tiny values
    return b


def plain_values(rows, cols, dtype=BF16):
    """Rows with channel outliers, none of which is beyond the bound."""
    return (torch.randn(rows, cols) * torch.exp(torch.randn(cols))).to(dtype)


@pytest.mark.exhaustive(quick=4)
@pytest.mark.parametrize("cols", [384, 320])
@pytest.mark.parametrize("left, right", PAIRS)
@pytest.mark.parametrize("config", CONFIGS)
def test_every_product_is_within_the_bound(config, left, right, cols):
    cast, bias = mx.Cast.of(left), torch.randn(96, dtype=BF16)
    for x in (values(22, cols, BF16), plain_values(22, cols)):
        for b in (stored(right, 96, cols), encode(plain_values(96, cols, torch.float32), mx.Cast.of(right))):
            y = product(x, b, cast, CONFIGS[config], bias)
            assert_within_the_bound(y, encode(x, cast), b, bias)


@pytest.mark.parametrize("right", ["mxfp8", "mxfp6_e2m3", "mxfp4"])
def test_weights_that_no_cast_makes(right):
    cast, x, b = mx.Cast.of("mxfp8"), plain_values(18, 256, torch.float16), crafted_weight(right, 64, 256)
    assert_within_the_bound(product(x, b, cast, FP8, dtype=torch.float16), encode(x, cast), b)
