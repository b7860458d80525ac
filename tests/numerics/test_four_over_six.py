"""Four over six against exact arithmetic: NVFP4 chooses for each block whether its amax becomes 6 or 4."""

from fractions import Fraction

import pytest
import torch

from mxtensor.core.kernel import Spec
from mxtensor.kernels.operands import Form
from mxtensor.kernels.quantize import cpu_casts, definition, triton_columns, triton_rows
from mxtensor.kernels.quantize.choose_cast import fake_quantize, quantize_operand
from mxtensor.numerics.cast import Cast
from mxtensor.numerics.choices import FourOverSix
from mxtensor.numerics.reference import decode, encode, least_error

E2M1 = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]
E4M3 = [Fraction(int(v * 512), 512) for v in torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).tolist()]
"""The finite values that are not negative, by code."""
KINDS = [kind.value for kind in FourOverSix]


def float32(x):
    """A Fraction rounded to the nearest float32, ties to even."""
    if not x:
        return x
    exponent = abs(x.numerator).bit_length() - x.denominator.bit_length()
    exponent -= abs(x) < Fraction(2) ** exponent
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    return round(x / unit) * unit  # Python rounds ties to even


def code_of(x, values):
    """The code of the nearest value, of the even code in a tie; the largest value if x is beyond it."""
    return min(range(len(values)), key=lambda code: (abs(values[code] - x), code % 2))


def candidate(rows, amax, tensor_amax, kind, multiple):
    """(error, scale code, codes) of a block, given as a list of rows, by TransformerEngine's order of roundings."""
    largest = 6 * (448 if kind.endswith("448") else 256)
    encode_scale = float32(largest / tensor_amax)
    base = float32(float32(float32(amax / 6) * encode_scale) * multiple)
    scale_code = code_of(min(base, Fraction(448)), E4M3)
    scale = E4M3[scale_code]
    if not scale:
        multiplier = Fraction(torch.finfo(torch.float32).max)
    else:
        multiplier = float32(1 / float32(scale * float32(1 / encode_scale)))
    sums, codes = [], []
    for row in rows:
        error = Fraction(0)
        for x in row:
            code = code_of(abs(float32(x * multiplier)), E2M1)
            value = float32(float32(float32(E2M1[code] * scale) * tensor_amax) / largest)
            difference = float32(value - abs(x))
            error = float32(error + (float32(difference**2) if kind.startswith("mse") else abs(difference)))
            codes.append(code + 8 * (x < 0))
        sums.append(error)
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [float32(a + b) for a, b in zip(sums[:half], sums[half:], strict=True)]
    return sums[0], scale_code, codes


def expected(block, tensor_amax, kind):
    """(scale code, codes) of a block (rows, 16): those for 6 unless those for 4 have the smaller error."""
    rows = [[Fraction(v) for v in row] for row in block.tolist()]
    amax = max(abs(x) for row in rows for x in row)
    six, four = (candidate(rows, amax, tensor_amax, kind, Fraction(m)) for m in (1, Fraction(3, 2)))
    return four[1:] if four[0] < six[0] else six[1:]


def codes_of(operand):
    low, high = operand.data & 15, operand.data >> 4
    return torch.stack((low, high), -1).flatten(-2)


def values(rows, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 48, generator=generator) * torch.randn(rows, 1, generator=generator).exp()
    return x.to(dtype)


# ---------------------------------------------------------------------------------------------- the definition


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_a_row_are_those_of_exact_arithmetic(kind, dtype):
    x = values(8, dtype)
    operand = encode(x, Cast.of("nvfp4", four_over_six=kind))
    codes, tensor_amax = codes_of(operand), Fraction(x.abs().max().item())
    for i, block in enumerate(x.float().view(-1, 1, 16)):
        scale, wanted = expected(block, tensor_amax, kind)
        assert operand.scale.flatten()[i] == scale
        assert codes.view(-1, 16)[i].tolist() == wanted
    largest = torch.tensor(6.0 * (448 if kind.endswith("448") else 256))
    assert operand.global_scale == x.abs().max().float() / largest


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_are_those_of_exact_arithmetic(kind):
    x = values(32, torch.bfloat16)
    operand = encode(x, Cast.of("nvfp4[16x16]", four_over_six=kind))
    codes, tensor_amax = codes_of(operand), Fraction(x.abs().max().item())
    for i in range(2):
        for j in range(3):
            tile = slice(16 * i, 16 * i + 16), slice(16 * j, 16 * j + 16)
            scale, wanted = expected(x[tile].float(), tensor_amax, kind)
            assert operand.scale[i, j] == scale
            assert codes[tile].flatten().tolist() == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_both_choices_occur_and_the_error_is_smaller(kind):
    x = values(256, torch.float32)
    power = 2 if kind.startswith("mse") else 1

    def error(operand):
        return (decode(operand, torch.float32) - x).abs().pow(power).sum()

    chosen = encode(x, Cast.of("nvfp4", four_over_six=kind))
    largest = (codes_of(chosen) & 7).view(256, 3, 16).amax(-1)
    assert (largest == 7).any() and (largest == 6).any()  # the codes of 6 and of 4
    assert error(chosen) < 0.97 * error(encode(x, Cast.of("nvfp4")))


def test_of_equal_errors_six_is_chosen():
    x = torch.zeros(2, 16)
    x[0, 0] = 6.0  # 6 and 4 both represent it exactly
    x[1, 0] = 1536.0  # its own scale for 6 is the bound, 256
    codes = codes_of(encode(x, Cast.of("nvfp4", four_over_six="mae")))
    assert codes[:, 0].tolist() == [7, 7]
    assert not codes[:, 1:].any()


def test_the_block_with_the_largest_value_has_a_scale_for_four_only_below_the_bound_of_256():
    x = torch.zeros(1, 16)
    x[0, :4] = torch.tensor([4.0, 3.0, 2.0, 1.0])  # exact if 4 becomes 4
    bound = encode(x, Cast.of("nvfp4", four_over_six="mae"))
    assert codes_of(bound)[0, :4].tolist() == [6, 5, 4, 2] and bound.scale_view.item() == 384
    full = encode(x, Cast.of("nvfp4", four_over_six="mae_448"))
    assert codes_of(full)[0, 0] == 7 and full.scale_view.item() == 448


def test_the_errors_differ_in_what_they_choose():
    x = values(256, torch.float32)
    one, other = (encode(x, Cast.of("nvfp4", four_over_six=kind)).scale for kind in ("mae", "mse"))
    assert (one != other).any() and (one == other).any()


def test_special_blocks():
    x = values(4, torch.float32)
    x[0, :16], x[1, 3], x[2, 40] = 0.0, torch.nan, 1e-30
    operand = encode(x, Cast.of("nvfp4", four_over_six="mae"))
    back = decode(operand, torch.float32)
    assert (back[0, :16] == 0).all() and operand.scale[0, 0] == 0
    assert back[1, :16].isnan().all()


def test_least_error_takes_the_first_of_equals():
    errors = (torch.tensor([1.0, 2.0, torch.nan]), torch.tensor([1.0, 1.0, 0.0]))
    found = least_error((error, torch.full((3,), i)) for i, error in enumerate(errors))
    assert found[1].tolist() == [0, 1, 0]


# ---------------------------------------------------------------------------------------------- kernels


@pytest.mark.parametrize("shape", [(48,), (5, 40), (3, 20, 33), (0, 32), (300, 256)])
@pytest.mark.parametrize("format", ["nvfp4", "nvfp4[16x16]", "nvfp4[row_scaled]"])
def test_every_way_of_a_cast_gives_the_bits_of_the_definition(format, shape):
    x = torch.randn(shape, dtype=torch.bfloat16)
    cast = Cast.of(format, four_over_six="mae")
    made, wanted = quantize_operand(x, cast), encode(x, cast)
    assert all(map(torch.equal, made.tensors, wanted.tensors)) and made.shape == wanted.shape
    data, *_ = definition.encode_op(x, cast.format.name, "rceil", "nearest", 0.0, "mae")
    assert torch.equal(data, wanted.data)
    rounded, scale = fake_quantize(x, cast, torch.float32)
    assert torch.equal(rounded * scale, decode(wanted, torch.float32))


def test_kernels_that_cannot_choose_refuse():
    x = torch.randn(32, 32, dtype=torch.bfloat16)
    spec = Spec("quantize", ((32, 32),), (), x.dtype, torch.device("cuda"))
    for cast in (Cast.of("nvfp4", four_over_six="mse"), Cast.of("nvfp4[row_scaled]")):
        assert cast.why_not_plain is not None
        assert cpu_casts._refuses_quantize(spec, x, cast) == cast.why_not_plain
        assert triton_rows.refuses_quantize(spec, x, cast) == cast.why_not_plain
        assert triton_columns.refuses_both(spec, x, cast) == cast.why_not_plain
        assert triton_rows.refuses_quantize(spec, x, cast, x.dtype) == cast.why_not_plain
        forms = Form.VALUES, Form.VALUES
        assert triton_columns.refuses_pair(spec, x, cast, *forms, x.dtype, None, None) == cast.why_not_plain
    assert Cast.of("nvfp4").why_not_plain is None


# ---------------------------------------------------------------------------------------------- the cast


def test_wrong_casts_are_refused():
    with pytest.raises(ValueError, match="four_over_six='mae' is for NVFP4 with a global scale, not for mxfp8_e4m3"):
        Cast.of("mxfp8", four_over_six="mae")
    with pytest.raises(ValueError, match="not for nvfp4_single_level"):
        Cast.of("nvfp4_single_level", four_over_six="mae")
    with pytest.raises(ValueError, match="four_over_six='mse' compares errors of rounding to nearest"):
        Cast.of("nvfp4", rounding="stochastic", four_over_six="mse")
    with pytest.raises(ValueError, match="unknown four_over_six 'rms'; choose one of mae, mse, mae_448, mse_448"):
        Cast.of("nvfp4", four_over_six="rms")
    with pytest.raises(TypeError, match="four_over_six"):
        Cast(Cast.of("nvfp4").format, four_over_six="mae")
    assert Cast.of("nvfp4[16x16]", four_over_six="mse").label == "nvfp4[16x16] four over six (mse)"
    assert Cast.of("nvfp4").label == "nvfp4"
