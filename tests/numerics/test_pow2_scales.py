"""float8 formats with power-of-two float32 scales: each cast kernel follows one rule, products run in bfloat16."""

import numpy as np
import pytest
import torch

from mxtensor import FORMATS, Cast, get_format
from mxtensor.kernels.gemm import dequant
from mxtensor.kernels.gemm.spec import GemmArgs
from mxtensor.numerics.reference import decode, encode, scale_to_float
from tests.helpers import oracle
from tests.helpers.every_kernel import KERNELS
from tests.helpers.stand_in import BF16, quantized_pair, spec_of

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")  # numpy's about NaN

POW2 = [name for name in FORMATS if name.endswith("_pow2")]
BY_BLOCK = ["float8_e4m3_1x128_pow2", "float8_e5m2_1x128_pow2"]


def corners(largest):
    """Every positive float32 that is a power of two or ``largest`` times one, and its neighbours."""
    exponents = np.arange(-149, 128)
    with np.errstate(over="ignore"):
        exact = np.concatenate([np.exp2(exponents), largest * np.exp2(exponents)]).astype(np.float32)
    bits = exact[np.isfinite(exact)].view(np.int32).astype(np.int64)
    bits = np.unique(bits[:, None] + [-1, 0, 1])
    return torch.from_numpy(bits[(bits > 0) & (bits < 0x7F800000)].astype(np.int32)).view(torch.float32)


@pytest.mark.parametrize("mode", oracle.MODES)
@pytest.mark.parametrize("quantize", KERNELS)
@pytest.mark.parametrize("name", BY_BLOCK)
def test_every_kernel_follows_the_rule_of_the_oracle(name, quantize, mode):
    amax = corners(get_format(name).element.max)
    amax = torch.cat([amax, torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf")])])
    amax = torch.cat([amax, amax.new_ones(-amax.numel() % 64)])
    x = torch.stack([amax * 0.3, -amax, amax * 1e-4, *[amax * 0] * 13], -1).view(-1, 64 * 16)
    oracle.check(quantize(x, Cast.of(f"{name}[1x16]", mode)), x, mode)


@pytest.mark.parametrize(
    "value, name, mode, scale, code",
    [
        (0.0, "float8_1x128_pow2", "rceil", 1.0, 0x00),
        (-0.0, "float8_1x128_pow2", "floor", 1.0, 0x80),
        (448.0, "float8_1x128_pow2", "rceil", 1.0, 0x7E),
        (449.0, "float8_row_pow2", "rceil", 2.0, 0x76),
        (500.0, "float8_tensor_pow2", "floor", 1.0, 0x7E),
        (-57345.0, "float8_e5m2_128x128_pow2", "rceil", 2.0, 0xF7),
        (oracle.FLT_MAX, "float8_1x128_pow2", "rceil", 2.0**120, 0x78),
        (oracle.FLT_MAX, "float8_e5m2_row_pow2", "rceil", 2.0**113, 0x78),
        (2.0**-120, "float8_tensor_pow2", "rceil", 2.0**-127, 0x70),
        (2.0**-135, "float8_tensor_pow2", "floor", 2.0**-127, 0x02),
        (2.0**-149, "float8_1x128_pow2", "ceil", 2.0**-127, 0x00),
        (float("nan"), "float8_1x128_pow2", "rceil", float("nan"), 0x7F),
        (float("-inf"), "float8_e5m2_row_pow2", "even", float("nan"), 0x7F),
    ],
)
def test_blocks_by_hand(value, name, mode, scale, code):
    operand = encode(torch.tensor([[0.0, float(value), 0.0]]), Cast.of(name, mode))
    assert operand.scale.dtype is operand.scale_view.dtype is torch.float32
    np.testing.assert_array_equal(operand.scale.numpy(), [[scale]])
    assert operand.data.view(torch.uint8)[0, 1] == code


@pytest.mark.parametrize("name", BY_BLOCK)
def test_the_default_rule_is_the_one_of_transformer_engine_and_torchao(name):
    """Both divide max by amax in float32 and round down to a power of two; the scale is its reciprocal.

    TransformerEngine takes the largest float32 for a quotient that overflows. One amax differs: the float32 above
    max * 2^-127, whose product with 1 / max is rounded to the subnormal 2^-127.
    torchao does so through a float32 log2: for a few amax just above max * 2^e its scale is half, and they saturate.
    """
    largest = get_format(name).element.max
    amax = torch.cat(
        [corners(largest), torch.randint(1, 0x7F800000, (1 << 16,), dtype=torch.int32).view(torch.float32)]
    )
    amax = amax[amax.view(torch.int32) != torch.tensor(largest * 2.0**-127).view(torch.int32) + 1]
    quotient = (torch.full_like(amax, largest) / amax).clamp(max=oracle.FLT_MAX)
    _, exponent = torch.frexp(quotient)
    scale = encode(amax[:, None], Cast.of(name)).scale[:, 0]
    assert torch.equal(scale, torch.ldexp(torch.ones_like(amax), 1 - exponent))


@pytest.mark.parametrize("mode", oracle.MODES)
@pytest.mark.parametrize("name, mx", [(BY_BLOCK[0], "mxfp8[1x128]"), (BY_BLOCK[1], "mxfp8_e5m2[1x128]")])
def test_codes_and_scales_are_those_of_mx_over_the_same_block(name, mx, mode):
    x = torch.randn(200, 300) * 2.0 ** torch.randint(-100, 120, (200, 1)).float()
    ours, theirs = encode(x, Cast.of(name, mode)), encode(x, Cast.of(mx, mode))
    assert torch.equal(ours.data.view(torch.uint8), theirs.data.view(torch.uint8))
    assert torch.equal(ours.scale, scale_to_float(theirs.scale, theirs.format.scale))


@pytest.mark.parametrize("name", POW2)
def test_values_are_exact_in_bfloat16_so_that_bfloat16_products_take_them(name):
    format = get_format(name)
    operand = encode(torch.randn(130, 300) * 2.0 ** torch.randint(-9, 9, (130, 1)).float(), Cast(format))
    assert torch.equal(decode(operand, BF16).float(), decode(operand, torch.float32))
    a, b = quantized_pair(name, name, 16, 32, 64)
    for left in (a, a.x):
        assert dequant.refuses(spec_of(left, b, BF16), left, b, GemmArgs(BF16)) is None
    a, b = quantized_pair(name, name.removesuffix("_pow2"), 16, 32, 64)
    sentence = "has float32 scales: its values are not exact in bfloat16"
    assert dequant.refuses(spec_of(a, b, BF16), a, b, GemmArgs(BF16)).endswith(sentence)
