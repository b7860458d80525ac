"""float32 scales of float8 against TransformerEngine: multiply by largest / amax, store the reciprocal."""

import numpy as np
import pytest
import torch

import mxtensor as mx
from mxtensor.numerics.reference import encode
from mxtensor.recipe.block_scaling import RANDOM_SIGNS

FLT_MAX = np.finfo(np.float32).max
FORMATS = ["float8_e4m3_1x128", "float8_e5m2_1x128", "float8_e4m3_128x128", "float8_e4m3_row", "float8_e4m3_tensor"]
SPECIAL = [0.0, 2.0**-149, 2.0**-140, 1.31e-36, 1.33e-36, 2.0**-126, 1.0, 448.0, 3.0e38, float(FLT_MAX)]


def described(amax, largest):
    """(multiplier, stored scale) of a finite float32 amax: a multiplier that overflows is the largest float32."""
    with np.errstate(all="ignore"):
        multiplier = np.float32(largest) / amax
    multiplier = np.where(np.isinf(multiplier), FLT_MAX, multiplier).astype(np.float32)
    multiplier = np.where(amax == 0, np.float32(1), multiplier)
    return multiplier, np.float32(1) / multiplier


def values(format):
    """Blocks with 4096 random amaxes over all exponents, or one amax for a format with large blocks."""
    rng = np.random.default_rng(8)
    many = 4096 if format.block[0] == 1 else 1
    for amax in SPECIAL if many == 1 else [None]:
        bits = rng.integers(0, 0x7F800000, many, dtype=np.int32)
        bits[: len(SPECIAL)] = np.array(SPECIAL, np.float32).view(np.int32)[:many]
        amaxes = bits.view(np.float32) if amax is None else np.array([amax], np.float32)
        shape = (many, 128) if many > 1 else (128, 128)
        x = (rng.uniform(-1, 1, shape) * amaxes[:, None]).astype(np.float32)
        x[:, 3] = -amaxes
        yield torch.from_numpy(x), amaxes


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("name", FORMATS)
def test_scales_are_those_of_transformer_engine(name, kernel):
    format = mx.FORMATS[name]
    for x, amax in values(format):
        multiplier, scale = described(amax, format.element.max)
        operand = mx.quantize(x, format).rowwise if kernel == "cpu" else encode(x, mx.Cast(format))
        assert operand.scale.numpy().reshape(-1).view(np.int32).tolist() == scale.view(np.int32).tolist()
        y = torch.from_numpy(x.numpy() * multiplier[:, None]).clamp(-format.element.max, format.element.max)
        assert operand.data.view(torch.uint8).equal(y.to(format.element.dtype).view(torch.uint8))


@pytest.mark.parametrize("largest", [448.0, 57344.0])
def test_power_of_two_scales_truncate_the_same_quotient(largest):
    """The exponent of largest / amax, mantissa cut off, at every 97th mantissa and around the largest element."""
    mantissas = np.concatenate([np.arange(0, 1 << 23, 97), np.arange(0x5FFF00, 0x600100)]).astype(np.int32)
    amax = (mantissas | np.int32(127 << 23)).view(np.float32)
    quotient = (np.float32(largest) / amax).view(np.int32) & np.int32(0x7F800000)
    element = "e4m3" if largest == 448 else "e5m2"
    x = torch.from_numpy(amax).unsqueeze(-1)
    scale = encode(x, mx.Cast.of(f"float8_{element}_1x128_pow2")).scale
    assert (1 / scale.numpy().reshape(-1) == quotient.view(np.float32)).all()


def test_signs_of_the_rotation_are_transformer_engines():
    minus = [i for i, sign in enumerate("+++-+------+-+--") if sign == "-"]
    assert sum(1 << i for i in minus) == RANDOM_SIGNS
