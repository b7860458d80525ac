"""The Triton casts of both copies of a matrix are bitwise the reference, run by Triton's interpreter.

``test_triton_rows.py`` has the casts of one copy; ``conftest.py`` has the fixtures.
"""

import itertools

import pytest
import torch

from mxtensor import FORMATS, Cast, get_format
from mxtensor.kernels.operands import FakeQuantized, Form
from mxtensor.kernels.quantize import triton_columns, triton_rows
from mxtensor.kernels.quantize.definition import encode_with_amax
from mxtensor.numerics.formats import FULL
from mxtensor.numerics.reference import decode_local, encode
from tests.helpers.compare import assert_same_operand, assert_same_values
from tests.kernels.quantize.test_triton_rows import (
    DTYPES,
    MODES,
    blocks_of,
    every_bfloat16,
    pytestmark,  # noqa: F401  (pytest reads it)
    stochastic,
    surrounded,
    values,
)

CODES, VALUES = Form.CODES, Form.VALUES
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BLOCKS = ["mxfp8_e5m2[1x64]", "mxfp6_e3m2[1x128]", "mxfp6_e2m3[1x16]", "mxfp4[1x64]", "mxint8[1x16]", "nvfp4[1x32]"]
NAMES = [n for n in (*FORMATS, *BLOCKS) if get_format(n).block[0] == 1 and get_format(n).block[1] != FULL]
KINDS = ["mxfp8", "mxfp8_e5m2[1x64]", "mxfp6[1x16]", "mxint8", "nvfp4", "float8_1x128", "float8_1x128_pow2"]
"""One format for each path through the kernels."""
FORMS = [(VALUES, CODES), (VALUES, VALUES), (CODES, VALUES), (CODES, CODES)]
ONE_SCALE = [n for n in FORMATS if get_format(n).block == (FULL, FULL)]

small, large = (pytest.mark.usefixtures(f"{size}_tiles") for size in ("small", "large"))
each_format = pytest.mark.parametrize("name", NAMES)
each_kind = pytest.mark.parametrize("name", KINDS)
each_with_one_scale = pytest.mark.parametrize("name", ONE_SCALE)


def assert_is(copy, operand, dtype=None):
    """``copy`` is the operand, or the values of the operand without its global scale."""
    if not isinstance(copy, FakeQuantized):
        assert_same_operand(copy, operand)
        return
    expected = decode_local(operand).to(dtype)
    assert_same_values(copy.values.contiguous(), expected)
    global_scale = operand.global_scale
    assert (copy.global_scale is None) == (global_scale is None) and copy.format == operand.format
    assert global_scale is None or torch.equal(copy.global_scale, global_scale)


def assert_pair(x, cast, forms=(VALUES, VALUES), dtype=BF16, columns=None):
    row, column = triton_columns.pair(x, cast, *forms, dtype, None, None)
    assert_is(row, encode(x, cast), dtype)
    assert_is(column, encode(x.t(), columns or cast), dtype)
    if forms[1] is VALUES:
        assert column.values.t().is_contiguous()  # the layout of x


# ---------------------------------------------------------------------------------------------- blocks along rows


@pytest.mark.parametrize("forms", FORMS, ids=lambda f: "-".join(form.value for form in f))
@each_format
@small
def test_every_format_in_every_pair_of_forms(name, forms):
    """36 rows are whole groups of four, as stored words need; 134 columns are pairs, with a tail for every block."""
    assert_pair(surrounded(values(36, 134, BF16)), Cast.of(name), forms)


@pytest.mark.parametrize(("dtype", "target"), [(FP32, FP32), (FP16, BF16), (BF16, FP16), (BF16, FP32)], ids=str)
@pytest.mark.parametrize("name", ["mxfp8", "mxfp6[1x16]", "nvfp4"])
@small
def test_dtypes(name, dtype, target):
    assert_pair(values(35, 132, dtype), Cast.of(name), (VALUES, VALUES), target)
    assert_pair(values(36, 132, dtype), Cast.of(name), (VALUES, CODES), target)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e5m2", "mxfp6", "mxfp6_e3m2", "mxfp4", "mxint8"])
@small
def test_every_scale_rule(name, mode):
    assert_pair(values(36, 132, BF16), Cast.of(name, mode))


SHAPES = [(64, 256), (64, 130), (67, 132), (66, 131), (3, 140), (132, 2), (1, 1)]


@pytest.mark.exhaustive(quick=3)
@pytest.mark.parametrize("shape", SHAPES)
@each_kind
@small
def test_whole_tiles_and_tails(name, shape):
    x = (torch.randn(shape) * 2.0 ** torch.randint(-9, 9, shape).float()).bfloat16()
    for forms in ((VALUES, CODES), (VALUES, VALUES)):
        assert_pair(x, Cast.of(name), forms)


PLACES = {
    "columns from an odd one": lambda x: surrounded(x, 3),
    "every other row": lambda x: x.repeat_interleave(2, 0)[::2],
    "rows an odd stride apart": lambda x: torch.cat([x, x[:, :1]], 1)[:, :-1],
    "every other column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "stored by columns": lambda x: x.t().contiguous().t(),
    "one row many times": lambda x: x[1:2].expand(x.shape[0], -1),
    "one value many times": lambda x: x[1:2, 1:2].expand(x.shape),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "float8_tensor"])
@small
def test_strides_and_offsets(name, place):
    x = PLACES[place](values(36, 142, BF16, specials=False))
    for forms in ((VALUES, CODES), (VALUES, VALUES)) if name != "float8_tensor" else ((CODES, CODES),):
        assert_pair(x, Cast.of(name), forms)


@pytest.mark.exhaustive(quick=1)
@each_kind
def test_pairs_with_the_tiles_of_a_device(name):
    x = values(141, 150, BF16)
    for forms in ((VALUES, CODES), (VALUES, VALUES)):
        assert_pair(x, Cast.of(name, "floor"), forms)


@pytest.mark.parametrize("forms", FORMS, ids=lambda f: "-".join(form.value for form in f))
@pytest.mark.parametrize("name", ["mxfp8", "mxfp6[1x64]", "mxint8", "nvfp4", "float8_1x128"])
@small
def test_columns_round_by_the_seed_after_that_of_rows(name, forms):
    x = values(38, 132, FP32, specials=False)
    assert_pair(x, stochastic(name, 99), forms, FP32, stochastic(name, 100))


# ---------------------------------------------------------------------------------------------- values in words

ELEMENTS = ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxint8"]


@pytest.fixture
def in_words(monkeypatch):
    """Every value of columns is computed by ``triton_device/quantize.py``; otherwise the test would not test it."""
    device_code = triton_columns.device_code

    def checked(name):
        assert name == "quantize.round_tiles"
        return device_code(name)

    monkeypatch.setattr(triton_columns, "device_code", checked)


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("mode", ["rceil", "floor"])
@pytest.mark.parametrize("name", [*(f"{name}[1x16]" for name in ELEMENTS), "float8_1x128_pow2"])
@large
def test_every_bfloat16_below_a_larger_one_rounds_as_its_code(name, mode, in_words):
    """Each value v next to a value up to 2^8 times as large, which decides its scale; both signs of each."""
    v = every_bfloat16()
    word = v.view(torch.int16).to(torch.int32)
    larger = word + (torch.randint(0, 9, word.shape) << 7) + torch.randint(0, 128, word.shape)
    w = torch.where((larger & 0x7FFF) < 0x7F80, larger, word).to(torch.int16).view(BF16)
    w = torch.where((w.sign() == v.sign()) | w.isnan(), w, v)
    x, cast = blocks_of(v, -w, w.neg().roll(1) * 0), Cast.of(name, mode)
    expected = decode_local(encode(x, cast)).bfloat16()
    assert_same_values(triton_rows.fake_quantize(x, cast, BF16)[0], expected)
    transposed = x.t().contiguous().t()
    got, _ = triton_rows.fake_quantize(transposed, cast, BF16)
    assert got.t().is_contiguous()
    assert_same_values(got.contiguous(), expected)


# ---------------------------------------------------------------------------------------------- a transposed source


@pytest.mark.exhaustive(quick=1)
@each_kind
@small
def test_values_of_a_transposed_source_have_its_layout(name):
    for dtype, target in itertools.product((BF16, FP32), repeat=2):
        for cast in (Cast.of(name), stochastic(name, 7)):
            x = values(36, 134, dtype, specials=False).t()
            got, global_scale = triton_rows.fake_quantize(x, cast, target)
            assert got.t().is_contiguous() and got.shape == (134, 36)
            assert_is(FakeQuantized(got, global_scale, cast.format), encode(x, cast), target)


@small
def test_values_of_whole_columns_that_share_a_scale():
    x = values(36, 134, BF16)[:, 8:].t()
    got, _ = triton_rows.fake_quantize(x, Cast.of("float8_row"), FP32)
    assert got.t().is_contiguous()
    assert_same_values(got.contiguous(), decode_local(encode(x, Cast.of("float8_row"))))


# ---------------------------------------------------------------------------------------------- one scale per tensor


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_with_one_scale
@small
def test_codes_and_their_transpose_by_one_scale(name, dtype):
    for specials in (True, False):
        for shape in ((36, 134), (37, 131)):
            x, cast = values(*shape, dtype, specials), Cast.of(name)
            for forms in ((CODES, CODES), (None, CODES)):
                row, column = triton_columns.pair(x, cast, *forms, dtype, None, None)
                assert row is None if forms[0] is None else assert_same_operand(row, encode(x, cast)) is None
                assert_same_operand(column, encode(x.t(), cast))


@pytest.mark.parametrize("amax", [1.0, 0.0, 3e-44, 448.0 * 3, 1e30, float("inf"), float("nan"), -float("nan")])
@each_with_one_scale
@small
def test_a_given_amax_makes_the_scale_and_the_own_one_is_recorded(name, amax):
    """With a finite amax a NaN or an infinity becomes NaN alone; larger values saturate."""
    cast, amax = Cast.of(name), torch.tensor(amax)
    for specials, dtype, operands in ((True, BF16, 0.0), (False, FP16, 0.0), (False, FP32, 1e32), (False, BF16, 1e39)):
        x, record = values(21, 132, dtype, specials), torch.tensor(operands)
        row, column = triton_columns.pair(x, cast, CODES, CODES, dtype, amax, record)
        assert_same_operand(row, encode_with_amax(x, cast, amax))
        assert_same_operand(column, encode_with_amax(x.t().contiguous(), cast, amax))
        own = torch.maximum(x.abs().amax().float(), torch.tensor(operands))
        assert record == own or (record.isnan() and own.isnan())


@each_with_one_scale
@small
def test_without_an_amax_the_record_takes_the_one_that_was_used(name):
    x, record = values(21, 132, BF16, specials=False), torch.tensor(0.5)
    row, column = triton_columns.pair(x, Cast.of(name), CODES, None, x.dtype, None, record)
    assert_same_operand(row, encode(x, Cast.of(name)))
    assert column is None and record == x.abs().amax().float().clamp(min=0.5)


@each_with_one_scale
@small
def test_the_transpose_is_not_rounded_again(name):
    x, cast = values(37, 132, FP32, specials=False), stochastic(name, 5)
    row, column = triton_columns.pair(x, cast, CODES, CODES, x.dtype, torch.tensor(3.0), None)
    assert_same_operand(row, encode_with_amax(x, cast, torch.tensor(3.0)))
    assert torch.equal(column.data.view(torch.uint8), row.data.view(torch.uint8).t())


def test_one_scale_with_the_tiles_of_a_device():
    x = values(141, 150, BF16)
    row, column = triton_columns.pair(x, Cast.of("float8_tensor"), CODES, CODES, x.dtype, torch.tensor(9.0), None)
    assert_same_operand(row, encode_with_amax(x, Cast.of("float8_tensor"), torch.tensor(9.0)))
    assert torch.equal(column.data.view(torch.uint8), row.data.view(torch.uint8).t())
