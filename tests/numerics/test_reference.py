"""The definition against exact arithmetic: scale rules, blocks, special content, sources and results."""

import ml_dtypes
import numpy as np
import pytest
import torch

from mxtensor import FORMATS, Cast
from mxtensor.numerics.formats import E8M0, FP32, FULL, UE4M3, ScaleCalculationMode
from mxtensor.numerics.reference import decode, e8m0_from_amax, encode, scale_to_float
from tests.helpers import oracle
from tests.helpers.oracle import as_bytes, same_floats

MX = [f for f in FORMATS.values() if f.scale is E8M0]
CASTS = [Cast.of(f, mode) for f in MX for mode in oracle.MODES] + [Cast(f) for f in FORMATS.values() if f not in MX]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]

each_mx = pytest.mark.parametrize("format", MX, ids=str)
each_cast = pytest.mark.parametrize("cast", CASTS, ids=lambda c: f"{c.format}-{c.scaling.value}")


def as_codes(operand):
    element = oracle.element_of(operand.format.element)
    return oracle.unpack(as_bytes(operand.data), element, operand.shape[-1])


def check(x, cast):
    """Encode ``x``, compare each tensor of the operand and the decoded values with the oracle; return the operand."""
    operand = encode(x, cast)
    values = oracle.check(operand, x, cast.scaling.value)
    assert same_floats(decode(operand, torch.float32).numpy(), values)
    return operand


# ---------------------------------------------------------------------------------------------- values


@each_mx
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_beside_a_known_scale(dtype, format):
    """With the largest element in the block the scale is 1, so the codes are those of test_elements.py."""
    x = oracle.every_16_bit_value(dtype).clamp(-format.element.max, format.element.max)
    x = x[~x.isnan()]
    x = torch.cat([x, x[: -len(x) % 31]]).view(-1, 31)
    x = torch.nn.functional.pad(x, (1, 0), value=format.element.max)
    expected = oracle.element_codes(x.double().numpy(), oracle.element_of(format.element))
    for mode in ("floor", "rceil", "even"):
        operand = encode(x, Cast.of(format, mode))
        assert (operand.scale == 127).all()
        np.testing.assert_array_equal(as_codes(operand), expected)


@each_cast
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_as_a_block_of_its_own(dtype, cast):
    tensor = cast.format.block == (FULL, FULL)  # no block of its own: all finite values share one
    x = oracle.every_16_bit_value(dtype)
    check(x[x.isfinite()] if tensor else x.unsqueeze(-1), cast)


def test_every_scale_byte_decodes():
    scale = torch.arange(256).to(torch.uint8)
    e8m0 = scale_to_float(scale, E8M0).numpy()
    assert same_floats(e8m0, oracle.e8m0_values().astype(np.float32))
    assert same_floats(e8m0, scale.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    assert (e8m0[0], e8m0[127], e8m0[254]) == (2.0**-127, 1.0, 2.0**127)
    ue4m3 = scale_to_float(scale, UE4M3).numpy()
    assert same_floats(ue4m3, scale.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    saved = torch.tensor([1.5, -0.0, 2.0**-149, float("inf"), float("nan")])
    assert same_floats(scale_to_float(saved, FP32).numpy(), saved.numpy())


def wide(rows, cols, specials):
    """Values of every magnitude of float32, in squares of 16x16; 2 % of the squares contain a special value."""
    rng = np.random.default_rng(20 + specials)
    squares = (-(-rows // 16), -(-cols // 16))

    def spread(a):
        return a.repeat(16, 0).repeat(16, 1)[:rows, :cols]

    with np.errstate(over="ignore"):
        x = rng.standard_normal((rows, cols)) * np.exp2(-rng.integers(0, 20, (rows, cols)))
        x = (x * np.exp2(spread(rng.integers(-149, 128, squares)))).astype(np.float32)
    x = np.clip(x, -oracle.FLT_MAX, oracle.FLT_MAX)
    pick = spread(rng.integers(0, 300, squares))
    x[pick == 0] = 0.0
    x[pick == 1] = -0.0
    x[pick == 2] = oracle.FLT_MAX
    x[pick == 3] = np.float32(2.0**-149)
    for i, special in enumerate((np.nan, np.inf, -np.inf) if specials else ()):
        x[(pick == 4 + i) & (rng.random(x.shape) < 0.02)] = special
    return torch.from_numpy(x)


SPECIAL = wide(1009, 1003, specials=True)
FINITE = wide(1003, 1009, specials=False)
GAUSSIAN = torch.randn(1009, 1003, generator=torch.Generator().manual_seed(21))


@pytest.mark.exhaustive(quick=14)
@each_cast
@pytest.mark.parametrize("orientation", ["rowwise", "columnwise"])
def test_a_million_values(orientation, cast):
    format = cast.format
    operands = []
    # If the whole tensor shares a scale, NaN or the largest magnitude would hide everything else.
    shared = format.global_scale or format.block == (FULL, FULL)
    for x in (FINITE, GAUSSIAN * 2.0**-130, GAUSSIAN) if shared else (SPECIAL,):
        assert x.numel() > 10**6
        operands.append(check(x if orientation == "rowwise" else x.t(), cast))
    assert len(np.unique(as_codes(operands[-1]))) > 2 ** (format.element.bits - 1)
    if format.scale is E8M0:
        assert len(operands[0].scale.unique()) > 240


def around(values, ulps):
    """Positive float32 ``values`` and their neighbours up to that many ulps away, if positive and finite."""
    with np.errstate(over="ignore"):
        values = np.asarray(values, np.float64).astype(np.float32)
    bits = values[np.isfinite(values)].view(np.int32).astype(np.int64)
    bits = (bits[:, None] + np.asarray(ulps)).ravel()
    return np.unique(bits[(bits > 0) & (bits < 0x7F800000)]).astype(np.int32).view(np.float32)


@each_mx
@pytest.mark.parametrize("mode", oracle.MODES)
def test_scales_at_the_borders(mode, format):
    """Powers of two (log2 in float32 misreads up to 44 ulps below one), multiples of max, and EVEN's carry."""
    element = format.element
    exponents = np.arange(-149, 128)
    corners = np.concatenate([np.exp2(exponents), element.max * np.exp2(exponents)])
    carries = (2 - 2.0 ** -(element.mantissa_bits + 1)) * np.exp2(exponents)
    amax = np.concatenate([around(corners, [-44, -2, -1, 0, 1, 2, 44]), around(carries, [-1, 0, 1])])
    reference = oracle.element_of(element)
    expected = oracle.scale_bytes(amax, reference, mode)
    byte = e8m0_from_amax(torch.from_numpy(amax), element, ScaleCalculationMode.of(mode))
    np.testing.assert_array_equal(byte.numpy(), expected)
    operand = check(torch.from_numpy(amax).unsqueeze(-1), Cast.of(format, mode))
    np.testing.assert_array_equal(operand.scale[:, 0].numpy(), expected)

    # The rules as the specification states them, for bytes that are not clamped and amax that is not subnormal.
    free = (expected > 0) & (expected < 254) & (amax >= 2.0**-125)
    amax, scale = amax[free].astype(np.float64), np.exp2(expected[free].astype(np.float64) - 127)
    power, ulp = 2.0**element.emax, 2.0**-22
    if mode == "floor":
        assert ((power * scale <= amax) & (amax < 2 * power * scale)).all()
    elif mode == "ceil":
        assert ((power * scale / 2 < amax) & (amax <= power * scale)).all()
    elif mode == "rceil":
        assert ((element.max * scale / 2 < amax * (1 + ulp)) & (amax <= element.max * scale * (1 + ulp))).all()
    else:
        below = 1 - 2.0 ** -(element.mantissa_bits + 2)
        assert ((power * scale * below <= amax) & (amax < 2 * power * scale * below)).all()


@pytest.mark.parametrize(
    ("value", "format", "mode", "byte", "code"),
    [
        (oracle.FLT_MAX, "mxfp8_e4m3", "floor", 246, 0x7E),
        (oracle.FLT_MAX, "mxfp8_e4m3", "rceil", 247, 0x78),
        (oracle.FLT_MAX, "mxint8", "rceil", 254, 0x7F),
        (-oracle.FLT_MAX, "mxint8", "floor", 254, 0x81),
        (oracle.FLT_MAX, "mxint8", "ceil", 254, 0x7F),
        (oracle.FLT_MAX, "mxint8", "even", 254, 0x7F),
        (2.0**-133, "mxfp8_e4m3", "rceil", 0, 0x08),
        (2.0**-149, "mxfp8_e4m3", "rceil", 0, 0x00),
        (2.0**-136, "mxfp8_e4m3", "floor", 0, 0x01),
        (0.0, "mxfp8_e4m3", "rceil", 0, 0x00),
        (-0.0, "mxfp8_e4m3", "rceil", 0, 0x80),
        (-0.0, "mxfp4_e2m1", "rceil", 0, 0x08),
        (-0.0, "mxint8", "rceil", 0, 0x00),
        (np.nan, "mxfp8_e4m3", "rceil", 255, 0x7F),
        (-np.inf, "mxfp8_e4m3", "floor", 255, 0x7F),
        (np.inf, "mxfp8_e5m2", "ceil", 255, 0x7F),
        (np.inf, "mxfp6_e2m3", "even", 255, 0x00),
        (-np.nan, "mxint8", "rceil", 255, 0x00),
        (np.nan, "nvfp4", "rceil", 0x7F, 0x00),
        (-np.inf, "nvfp4_single_level", "rceil", 0x7F, 0x00),
        (448.0, "mxfp8_e4m3", "rceil", 127, 0x7E),
        (449.0, "mxfp8_e4m3", "rceil", 128, 0x76),
        (500.0, "mxfp8_e4m3", "floor", 127, 0x7E),
        (-7.0, "mxfp4_e2m1", "floor", 127, 0x0F),
        (-7.0, "mxfp4_e2m1", "rceil", 128, 0x0E),
    ],
)
def test_blocks_by_hand(value, format, mode, byte, code):
    """One value among zeros, from the table of special values in the definitions."""
    x = torch.zeros(2, 32)
    x[1, 5] = float(value)
    operand = check(x, Cast.of(format, mode))
    blocks = operand.scale.view(2, -1)
    assert (blocks[1, 0], blocks[0, 0]) == (byte, 0)
    assert as_codes(operand)[1, 5] == code
    if not np.isfinite(value):
        assert decode(operand, torch.float32)[1, : operand.format.block[1]].isnan().all()
        assert not decode(operand, torch.float32)[0].isnan().any()


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_single_level"])
def test_nvfp4_scales_for_a_tensor_of_every_magnitude(name):
    """In bfloat16 ties of block scales are common, so a global scale that is one ulp off is detected."""
    generator = torch.Generator().manual_seed(22)
    for exponent in range(-149, 127):
        x = torch.randn(4, 300, generator=generator) * 0.25 * 2.0**exponent
        check(x.bfloat16(), Cast.of(name))
        check(x.bfloat16()[:, :7] * 1.5, Cast.of(name))


# ---------------------------------------------------------------------------------------------- sources and results


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype):
    message = (
        f"cannot quantize a tensor of dtype {str(dtype)[6:]}; convert it first to one of "
        "float32, bfloat16, float16, float64"
    )
    with pytest.raises(TypeError, match=f"^{message}$"):
        encode(torch.ones(2, 32).to(dtype), Cast.of("mxfp8"))


def test_zero_dimensions_are_refused():
    with pytest.raises(ValueError, match=r"^cannot quantize a 0-dimensional tensor: .*; use x\.reshape\(1\)$"):
        encode(torch.tensor(1.5), Cast.of("mxfp8"))


def test_float64_goes_through_float32():
    """Half an ulp of e4m3 plus 2^-40 rounds up from float64 and to even from float32."""
    x = torch.tensor([[1.0625 + 2.0**-40, 1e300, -1e-300]], dtype=torch.float64)
    assert check(x[:, :1], Cast.of("mxfp8")).data.float().tolist() == [[256.0]]
    assert decode(check(x, Cast.of("mxfp8")), torch.float64).isnan().all()  # 1e300 is Inf in float32
    assert check(x[:, 2:], Cast.of("mxfp8")).data.view(torch.uint8).tolist() == [[0x80]]


@pytest.mark.parametrize("format", [*FORMATS, "mxfp8[32x32]"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_rounds_once(dtype, format):
    for x in (SPECIAL[:99, :99], GAUSSIAN[:99, :99]):
        operand = encode(x, Cast.of(format))
        values = oracle.decode(oracle.encode(x.contiguous().numpy(), operand.format), operand.format, x.shape)
        kind = {torch.bfloat16: ml_dtypes.bfloat16}.get(dtype, str(dtype)[6:])
        with np.errstate(over="ignore"):
            expected = values.astype(kind).astype(np.float32)
        decoded = decode(operand, dtype)
        assert decoded.dtype == dtype and decoded.is_contiguous()
        assert same_floats(decoded.float().numpy(), expected)


def test_an_operand_does_not_keep_its_source_alive():
    x = torch.randn(4, 64, requires_grad=True)
    before = x.detach().clone()
    for format in FORMATS:
        operand = encode(x, Cast.of(format))
        assert not any(t.requires_grad for t in operand.tensors)
        assert torch.equal(x, before)


def test_slices_of_a_tensor_take_the_scale_of_the_whole():
    x, whole = GAUSSIAN[:64, :100], GAUSSIAN[:64, :100].abs().amax()
    for format in ("nvfp4", "float8_tensor"):
        complete = check(x, Cast.of(format))
        operands = [encode(rows, Cast.of(format), whole) for rows in x.split(24)]
        assert torch.equal(torch.cat([o.data.view(torch.uint8) for o in operands]), complete.data.view(torch.uint8))
        for operand in operands:
            assert operand.global_scale == complete.global_scale
            assert format == "nvfp4" or torch.equal(operand.scale, complete.scale)


def test_operands_count_their_bytes_and_show_their_scales():
    operand = encode(GAUSSIAN[:8, :100], Cast.of("nvfp4"))
    assert operand.nbytes == 8 * 50 + 8 * 7 + 4 and len(operand.tensors) == 3
    assert operand.scale_view.dtype == torch.float8_e4m3fn
    assert operand.scale_view.data_ptr() == operand.scale.data_ptr()
    operand = encode(GAUSSIAN[:8, :100], Cast.of("mxfp6"))
    assert operand.nbytes == 8 * 75 + 8 * 4 and len(operand.tensors) == 2
    assert operand.scale_view.dtype == torch.float8_e8m0fnu


# ---------------------------------------------------------------------------------------------- stochastic rounding


def stochastic(format, seed):
    return Cast.of(format, rounding="stochastic", seed=seed)


@pytest.mark.parametrize("format", [*FORMATS, "mxfp8[32x32]", "mxfp4[1x64]"])
def test_a_seed_determines_every_code_by_its_index(format):
    """Padding, strides and another dtype of the same values do not change a random number."""
    x = GAUSSIAN[:37, :300].bfloat16()
    first = encode(x, stochastic(format, 11))
    for same in (x.clone(), x.float(), x.t().contiguous().t()):
        repeated = encode(same, stochastic(format, 11))
        assert np.array_equal(as_bytes(repeated.data), as_bytes(first.data))
    assert not np.array_equal(as_codes(encode(x, stochastic(format, 12))), as_codes(first))
    nearest = encode(x, Cast.of(format))
    assert torch.equal(nearest.scale.view(torch.uint8), first.scale.view(torch.uint8))


@pytest.mark.parametrize("format", ["mxfp8", "mxfp6", "mxfp4", "mxint8", "nvfp4", "float8_row"])
def test_the_mean_over_seeds_is_the_value_where_the_nearest_is_not(format):
    x = GAUSSIAN[:8, :256]
    mean = torch.stack([decode(encode(x, stochastic(format, s)), torch.float64) for s in range(200)]).mean(0)
    bias = (mean - x).norm() / x.norm()
    nearest = (decode(encode(x, Cast.of(format)), torch.float64) - x).norm() / x.norm()
    assert bias < 0.2 * nearest  # about sqrt(2 / 200) of it if unbiased


def test_without_a_seed_rounding_draws_from_torchs_generator():
    x = GAUSSIAN[:8, :256]
    torch.manual_seed(1)
    first, second = (as_codes(encode(x, stochastic("mxfp4", None))) for _ in range(2))
    assert not np.array_equal(first, second)
    torch.manual_seed(1)
    assert np.array_equal(as_codes(encode(x, stochastic("mxfp4", None))), first)
    before = torch.get_rng_state()
    encode(x, stochastic("mxfp4", 3))
    encode(x, Cast.of("mxfp4", seed=3))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_seed_changes_nothing_when_rounding_is_to_nearest():
    one, other = (encode(GAUSSIAN[:8, :256], Cast.of("mxfp4", seed=s)) for s in (None, 5))
    assert np.array_equal(as_bytes(one.data), as_bytes(other.data))
