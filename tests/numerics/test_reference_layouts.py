"""The definition for many shapes, strides and dtypes, and properties that hold for all values."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mxtensor import FORMATS, Cast, get_format, quantize
from mxtensor.numerics.formats import E8M0
from mxtensor.numerics.operand import transposed
from mxtensor.numerics.reference import decode, encode
from tests.helpers import oracle
from tests.helpers.oracle import as_bytes, same_floats

MX = [f for f in FORMATS.values() if f.scale is E8M0]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
EVERY_KIND = [
    "mxfp8",
    "mxfp6",
    "mxfp4",
    "mxint8",
    "nvfp4",
    "float8_tensor",
    "float8_row",
    "float8_128x128",
    "mxfp8[32x32]",
    "mxfp6[16x16]",
    "nvfp4[16x16]",
]
"""Formats that differ in packing, scale or block."""


def check(x, cast):
    """Encode ``x`` and compare every tensor of the operand and the decoded values with the oracle."""
    operand = encode(x, cast)
    values = oracle.check(operand, x, cast.scaling.value)
    assert same_floats(decode(operand, torch.float32).numpy(), values)


# ---------------------------------------------------------------------------------------------- layouts


LAYOUTS = {
    "contiguous": lambda make, *shape: make(*shape),
    "every other value": lambda make, *shape: make(*shape[:-1], 2 * shape[-1])[..., ::2],
    "a part of longer rows": lambda make, *shape: make(*shape[:-1], shape[-1] + 9)[..., 5:-4],
    "dimensions reversed": lambda make, *shape: make(*shape[::-1]).permute(*reversed(range(len(shape)))),
    "one row for all": lambda make, *shape: make(1, *shape[1:]).expand(shape),
    "one value for a row": lambda make, *shape: make(*shape[:-1], 1).expand(shape),
}
"""Memory layouts of a tensor of one shape; ``make`` makes contiguous ones."""


def draw(shape, dtype, layout="contiguous", seed=0, exponent=0, specials=False):
    """Normal values over some 30 binades around 2^exponent; with ``specials`` a few NaN, infinities and zeros."""
    rng = np.random.default_rng(seed)

    def make(*size):
        x = rng.standard_normal(size) * np.exp2(rng.integers(-12, 12, size) + exponent)
        if specials:
            chosen = rng.integers(0, 200, size)
            for i, special in enumerate((np.nan, np.inf, -np.inf, 0.0, -0.0)):
                x[chosen == i] = special
        return torch.from_numpy(x).to(dtype)

    return LAYOUTS[layout](make, *shape)


@pytest.mark.parametrize("format", EVERY_KIND)
@pytest.mark.parametrize("shape", [(1,), (37,), (5, 64), (1, 32), (33, 131), (3, 2, 35), (2, 3, 18, 17)], ids=str)
def test_shapes_strides_and_dtypes(shape, format):
    for i, layout in enumerate(LAYOUTS):
        x = draw(shape, DTYPES[i % 4], layout)
        assert x.shape == shape
        check(x, Cast.of(format))


@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp6_e3m2", "mxfp4", "mxint8", "nvfp4", "float8_1x128"])
def test_block_sizes_and_tiles_with_tails(name, size):
    for block in (size, (size, size)):
        for rows, cols in ((size, 2 * size), (size + 1, 2 * size - 1), (1, 1), (3, size + 16)):
            check(draw((rows, cols), torch.float32, specials=rows > 3), Cast(get_format(name).with_block(block)))


@pytest.mark.parametrize("format", [*FORMATS, "mxfp8[32x32]"])
@pytest.mark.parametrize("shape", [(0,), (0, 64), (3, 0), (2, 0, 40), (0, 0)], ids=str)
def test_empty_tensors(shape, format):
    row = get_format(format)
    operand = encode(torch.empty(shape, dtype=torch.bfloat16), Cast(row))
    assert operand.shape == shape
    assert (operand.data.dtype, operand.data.shape) == (row.element.dtype, row.data_shape(shape))
    assert (operand.scale.dtype, operand.scale.shape) == (row.scale.dtype, row.scale_shape(shape))
    assert operand.global_scale is None or bool((operand.global_scale == 1).all())
    for dtype in DTYPES:
        values = decode(operand, dtype)
        assert (values.shape, values.dtype) == (shape, dtype)


# ---------------------------------------------------------------------------------------------- properties

SIZES = st.integers(1, 70) | st.sampled_from([1, 2, 4, 16, 32, 64])
SHAPES = st.lists(st.integers(1, 5), max_size=2).flatmap(
    lambda lead: st.tuples(*map(st.just, lead), *([SIZES] if lead else []), SIZES)
)
MATRICES = st.tuples(SIZES, SIZES)
MODES = st.sampled_from(oracle.MODES)
FORMAT_NAMES = [*FORMATS, *(f"{f}[{r}x{n}]" for f in MX for n in (16, 32, 64, 128) for r in (1, n))]
every_format = st.sampled_from(FORMAT_NAMES)
mx_formats = st.sampled_from([name for name in FORMAT_NAMES if name.startswith("mx")])
square_formats = st.sampled_from([name for name in FORMAT_NAMES if get_format(name).square])
independent_blocks = st.sampled_from([n for n in FORMAT_NAMES if "tensor" not in n and n != "nvfp4"])
property_of = settings(derandomize=True, deadline=None, max_examples=80)


def tensors(shapes=SHAPES, dtypes=(torch.float32,), exponents=(-137, 110), specials=True):
    return st.builds(
        draw,
        shapes,
        st.sampled_from(dtypes),
        st.sampled_from(list(LAYOUTS)),
        st.integers(0, 2**32 - 1),
        st.integers(*exponents),
        st.booleans() if specials else st.just(False),
    )


@property_of
@given(tensors(dtypes=DTYPES[:3]) | tensors(dtypes=[torch.float16], exponents=(-16, 4)), every_format, MODES)
def test_encode_is_the_definition(x, name, mode):
    check(x, Cast.of(name, mode))


@property_of
@given(tensors(specials=False), mx_formats, MODES)
def test_requantizing_the_values_changes_none(x, name, mode):
    """With power-of-two scales each value is on the new grid too. Under FLOOR and EVEN it is the same grid."""
    first = encode(x, Cast.of(name, mode))
    values = decode(first, torch.float32)
    second = encode(values, Cast.of(name, mode))
    assert torch.equal(decode(second, torch.float32), values)
    if mode in ("floor", "even"):
        assert torch.equal(second.scale, first.scale)
        assert torch.equal(second.data.view(torch.uint8), first.data.view(torch.uint8))


@property_of
@given(tensors(specials=False), mx_formats, MODES)
def test_errors_are_bounded(x, name, mode):
    """Half a mantissa step of the value or half a subnormal step of its block, unless FLOOR or EVEN saturate it."""
    format = get_format(name)
    operand, element = encode(x, Cast.of(name, mode)), oracle.element_of(format.element)
    scale = oracle.spread(oracle.e8m0_values()[operand.scale.numpy()], x.shape, format.block)
    magnitude = x.abs().double().numpy()
    error = np.abs(decode(operand, torch.float64).numpy() - x.double().numpy())
    relative = 0.0 if element.name == "int8" else 2.0 ** -(element.mantissa_bits + 1)
    bound = np.maximum(relative * magnitude, scale * element.magnitudes[1] / 2)
    cut = magnitude > element.max * scale * (1 + 2.0**-22)
    assert (error <= np.where(cut, magnitude - element.max * scale, bound)).all()
    assert (magnitude < 2.0 ** (element.emax + 1) * scale).all()
    if mode in ("rceil", "ceil"):
        assert not cut.any()


@property_of
@given(tensors(), independent_blocks, st.randoms())
def test_blocks_do_not_see_each_other(x, name, random):
    """A shorter last block quantizes like a block padded with zeros, and a row alone like a row among others."""
    cast, cols = Cast.of(name), x.shape[-1]
    values = decode(encode(x, cast), torch.float32)
    padded = decode(encode(F.pad(x, (0, -cols % 128)), cast), torch.float32)
    assert same_floats(padded[..., :cols].contiguous().numpy(), values.numpy())
    if x.dim() > 1 and cast.format.block[0] == 1:
        row = random.randrange(x.shape[0])
        assert same_floats(decode(encode(x[row], cast), torch.float32).numpy(), values[row].numpy())


@pytest.mark.parametrize("name", ["mxfp8[16x16]", "mxfp6[16x16]", "mxfp4[16x16]", "nvfp4[16x16]"])
@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (1, 4), (32, 1), (1, 32), (17, 33)], ids=str)
def test_tiles_transpose_whatever_their_shape(shape, name):
    x = draw(shape, torch.float32)
    tile, direct = transposed(encode(x, Cast.of(name))), encode(x.t(), Cast.of(name))
    np.testing.assert_array_equal(as_bytes(tile.data), as_bytes(direct.data))
    np.testing.assert_array_equal(tile.scale.numpy(), direct.scale.numpy())


@property_of
@given(tensors(MATRICES), square_formats)
def test_a_transposed_tile_is_the_tile_of_the_transposed_values(x, name):
    tile, direct = transposed(encode(x, Cast.of(name))), encode(x.t(), Cast.of(name))
    assert tile.shape == direct.shape == tuple(x.t().shape)
    np.testing.assert_array_equal(as_bytes(tile.data), as_bytes(direct.data))
    np.testing.assert_array_equal(tile.scale.numpy(), direct.scale.numpy())


@property_of
@given(tensors(MATRICES), every_format, MODES)
def test_columnwise_is_rowwise_of_the_transpose(x, name, mode):
    columnwise, rowwise = quantize(x, name, mode, "columnwise"), quantize(x.t(), name, mode, "rowwise")
    if not rowwise.format.square:  # formats with square blocks store one copy
        np.testing.assert_array_equal(as_bytes(columnwise.columnwise.data), as_bytes(rowwise.rowwise.data))
        np.testing.assert_array_equal(columnwise.columnwise.scale.numpy(), rowwise.rowwise.scale.numpy())
    values, transposed = columnwise.to_dtype(torch.float32), rowwise.to_dtype(torch.float32).t()
    assert same_floats(values.contiguous().numpy(), transposed.contiguous().numpy())


@property_of
@given(tensors(MATRICES, exponents=(-80, 90), specials=False))
def test_nvfp4_dequantizes_by_its_formula(x):
    """q * s * amax_tensor / 2688 in exact arithmetic, to two float32 roundings."""
    operand = encode(x, Cast.of("nvfp4"))
    codes = oracle.unpack(as_bytes(operand.data), oracle.ELEMENTS["e2m1"], x.shape[-1])
    q = oracle.element_values(oracle.ELEMENTS["e2m1"])[codes]
    s = oracle.element_values(oracle.ELEMENTS["e4m3"])[operand.scale.numpy()].repeat(16, -1)[:, : x.shape[-1]]
    exact = q * s * x.double().abs().amax().item() / 2688
    error = np.abs(decode(operand, torch.float64).numpy() - exact)
    assert (error <= np.abs(exact) * 2.0**-23).all()
