"""Each cast kernel is bitwise the definition, or refuses with a sentence."""

import dataclasses
import sys

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mxtensor import FORMATS, Cast, Operand, explain, get_format
from mxtensor.kernels.quantize import definition
from mxtensor.kernels.quantize.choose_cast import dequantize_operand, quantize_operand
from mxtensor.numerics.operand import transposed
from mxtensor.numerics.reference import decode, encode
from tests.helpers import oracle
from tests.helpers.compare import assert_same_operand, assert_same_values
from tests.helpers.oracle import as_bytes, same_floats

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
NAMES = [*FORMATS, "mxfp8[32x32]", "mxfp6[16x16]", "mxfp4[1x128]", "mxint8[64x64]", "nvfp4[16x16]"]
ROWS, COLS = 263, 384  # an odd number of rows; about 100,000 values

each_format = pytest.mark.parametrize("name", NAMES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def poison():
    """Memory from torch.empty is full of NaN and largest integers, so that a missing write shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def without_cpp(monkeypatch):
    """As on a machine without a C++ compiler; test_cpu.py tests the C++ casts."""
    casts = sys.modules["mxtensor.kernels.quantize.choose_cast"]
    for name in ("QUANTIZE", "DEQUANTIZE"):
        kernels = getattr(casts, name)
        monkeypatch.setattr(casts, name, kernels[kernels.index(getattr(definition, f"{name}_SLICES")) :])


@pytest.fixture
def thin_slices(monkeypatch):
    """A slice ends every 24 rows or so, and the last one is short."""
    for name in ("ENCODE_SLICE", "DECODE_SLICE"):
        monkeypatch.setattr(definition, name, 24 * COLS)


def values(rows=ROWS, cols=COLS, specials=True):
    """Values of many magnitudes with, in some rows, NaN, infinities, zeros, subnormals and the largest floats."""
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, cols)) * np.exp2(rng.integers(-30, 30, (rows, cols // 16)).repeat(16, 1))
    if specials:
        special = [np.nan, np.inf, -np.inf, oracle.FLT_MAX, -oracle.FLT_MAX, 2.0**-149, 2.0**-133]
        for row, value in enumerate(special):
            x[3 * row, rng.integers(0, cols, 5)] = value
        x[rows // 2, :64], x[rows // 2, 64:128], x[rows // 3] = 0.0, -0.0, x[rows // 3] * 2.0**-120
    return torch.from_numpy(x)


def chosen(log):
    return [(e.spec.op, e.kernel, e.refusals) for e in log.entries]


# ---------------------------------------------------------------------------------------------- quantize


@each_dtype
@each_format
def test_blocked_quantize_is_encode(name, dtype, thin_slices):
    cast = Cast.of(name)
    for specials in (True, False):
        x = values(specials=specials).to(dtype)
        with explain() as log:
            operand = quantize_operand(x, cast)
        assert chosen(log) == [("quantize", "sliced", {})]
        assert_same_operand(operand, encode(x, cast))


@each_format
def test_blocked_quantize_takes_tails_of_slices_and_blocks(name, thin_slices):
    x = values(ROWS, COLS + 16)[:, : COLS - 5].contiguous().float()
    with explain() as log:
        operand = quantize_operand(x, Cast.of(name, "floor"))
    assert chosen(log) == [("quantize", "sliced", {})]
    assert_same_operand(operand, encode(x, Cast.of(name, "floor")))


@pytest.mark.parametrize("name", ["mxfp8", "mxfp6", "nvfp4", "float8_tensor", "float8_row"])
def test_blocked_quantize_takes_more_dimensions(name, thin_slices):
    x = values(6 * 44, COLS).view(2, 3, 44, COLS).bfloat16()
    assert_same_operand(definition.QUANTIZE_SLICES.run(x, Cast.of(name)), encode(x, Cast.of(name)))


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "mxfp8[32x32]", "nvfp4"])
def test_slices_of_the_real_size(name):
    """Three slices, the last one short, against the outside oracle."""
    x = values(1031, 1024).bfloat16()
    operand = quantize_operand(x, Cast.of(name))
    expected = oracle.check(operand, x)
    assert same_floats(decode(operand, torch.float32).numpy(), expected)
    if x.shape[0] % operand.format.block[0]:
        operand = quantize_operand(x[:1024], Cast.of(name))
        expected = oracle.check(operand, x[:1024])
    with explain() as log:
        assert same_floats(dequantize_operand(operand, torch.float32).numpy(), expected)
    assert chosen(log) == [("dequantize", "sliced", {})]


# ---------------------------------------------------------------------------------------------- dequantize

SCALES = torch.tensor([0, 1, 2, 3, 20, 100, 126, 127, 128, 150, *range(244, 256)]).to(torch.uint8)
"""E8M0 bytes: both ends, where products are subnormal or overflow, and NaN."""


def operand_of_codes(name, rows=384, cols=384, nan_codes=True, scales=SCALES):
    """Random codes and random scales; nothing is encoded."""
    format, generator = get_format(name), torch.Generator().manual_seed(7)

    def random(shape, high=256):
        return torch.randint(high, shape, generator=generator)

    data = random(format.data_shape((rows, cols))).to(torch.uint8)
    shape = format.scale_shape((rows, cols))
    if format.scale.name == "e8m0":
        scale = scales[random(shape, len(scales))]
    elif format.scale.name == "ue4m3":
        scale = random(shape).to(torch.uint8)
    else:
        scale = torch.exp2(random(shape, 250).float() - 126) * (1 + random(shape) / 256)
        scale.view(-1)[3::11] = float("nan")
    if not nan_codes and format.element.name == "e4m3":
        data[(data & 0x7F) == 0x7F] = 0x12
    global_scale = torch.tensor(0.37) if format.global_scale else None
    return Operand(data.view(format.element.dtype), scale, global_scale, format, (rows, cols))


@each_dtype
@each_format
@pytest.mark.parametrize("nan_codes", [True, False])
@pytest.mark.pairs
def test_blocked_dequantize_is_decode(name, dtype, nan_codes, thin_slices):
    operand = operand_of_codes(name, nan_codes=nan_codes)
    with explain() as log:
        out = dequantize_operand(operand, dtype)
    assert chosen(log) == [("dequantize", "sliced", {})]
    assert_same_values(out, decode(operand, dtype))
    if dtype == torch.float32:
        scale = None if operand.global_scale is None else operand.global_scale.numpy()
        encoded = oracle.Encoded(as_bytes(operand.data), operand.scale.numpy(), scale)
        assert same_floats(out.numpy(), oracle.decode(encoded, operand.format, operand.shape))


@pytest.mark.parametrize("byte", [0, 1, 9, 127, *range(246, 256)])
@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp4_e2m1", "mxint8"])
def test_one_scale_byte_throughout(name, byte):
    """A kernel may skip a step if no scale of a slice is extreme; here all scales are extreme."""
    operand = operand_of_codes(name, rows=192, nan_codes=False, scales=torch.tensor([byte]).to(torch.uint8))
    for dtype in DTYPES:
        assert_same_values(definition.DEQUANTIZE_SLICES.run(operand, dtype), decode(operand, dtype))


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_one_nan_code_under_an_ordinary_scale(code):
    operand = operand_of_codes("mxfp8_e4m3", nan_codes=False, scales=torch.tensor([126]).to(torch.uint8))
    operand.data.view(torch.uint8)[100, 33] = code
    for dtype in DTYPES:
        out = definition.DEQUANTIZE_SLICES.run(operand, dtype)
        assert out.isnan().nonzero().tolist() == [[100, 33]]
        assert_same_values(out, decode(operand, dtype))


@pytest.mark.parametrize(("code", "value"), [(0x7C, float("inf")), (0xFC, -float("inf")), (0x7E, None), (0xFD, None)])
def test_e5m2_has_infinities_and_nans(code, value):
    operand = operand_of_codes("mxfp8_e5m2", scales=torch.tensor([126]).to(torch.uint8))
    operand.data.view(torch.uint8)[100, 33] = code
    for dtype in DTYPES:
        out = definition.DEQUANTIZE_SLICES.run(operand, dtype)
        assert out[100, 33].isnan() if value is None else out[100, 33] == value
        assert_same_values(out, decode(operand, dtype))


@pytest.mark.parametrize("name", ["mxfp8", "mxfp6", "mxfp4", "nvfp4", "float8_row", "float8_tensor"])
def test_blocked_dequantize_takes_more_dimensions(name, thin_slices):
    flat = operand_of_codes(name)
    shape = (2, 4, 48, 384)
    scale = flat.scale.view(flat.format.scale_shape(shape))
    operand = dataclasses.replace(flat, data=flat.data.view(*shape[:-1], -1), scale=scale, shape=shape)
    for dtype in DTYPES:
        assert_same_values(definition.DEQUANTIZE_SLICES.run(operand, dtype), decode(operand, dtype))


# ---------------------------------------------------------------------------------------------- refusals


def why_not_sliced(log):
    """Why the only decision in ``log`` refused the definition kernel and took the definition."""
    (entry,) = log.entries
    assert entry.kernel == "reference"
    return entry.refusals["sliced"]


@pytest.mark.parametrize(
    ("source", "name", "reason"),
    [
        (lambda: torch.randn(100, 655), "mxfp8", "too small to slice"),
        (lambda: torch.randn(70000), "mxfp8", "too small to slice"),
        (lambda: torch.randn(384, 256).t(), "mxfp8", "not contiguous"),
        (lambda: torch.randn(256, 1).expand(256, 384), "nvfp4", "not contiguous"),
        (lambda: torch.randn(2, 256, 384), "mxfp8[32x32]", "slices square blocks of matrices only"),
    ],
)
def test_blocked_says_why_it_does_not_quantize(source, name, reason):
    x = source()
    with explain() as log:
        operand = quantize_operand(x, Cast.of(name))
    assert why_not_sliced(log) == reason
    assert_same_operand(operand, encode(x, Cast.of(name)))


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("mxfp8", (100, 640), "too small to slice"),
        ("mxfp8", (256, 383), "the last block of a row of 383 values is shorter than 32"),
        ("nvfp4", (256, 392), "the last block of a row of 392 values is shorter than 16"),
        ("mxfp8[32x32]", (250, 384), "the last block of 250 rows is shorter than 32"),
        ("mxfp8[32x32]", (2, 256, 384), "slices square blocks of matrices only"),
        ("mxfp8[32x32]", (70016,), "too small to slice"),
    ],
)
def test_blocked_says_why_it_does_not_dequantize(name, shape, reason):
    operand = encode(torch.randn(shape), Cast.of(name))
    with explain() as log:
        out = dequantize_operand(operand, torch.bfloat16)
    assert why_not_sliced(log) == reason
    assert_same_values(out, decode(operand, torch.bfloat16))


def test_blocked_does_not_dequantize_parts_that_are_not_contiguous():
    operand = encode(torch.randn(256, 768), Cast.of("mxfp8"))
    part = Operand(operand.data[:, :384], operand.scale[:, :12], None, operand.format, (256, 384))
    with explain() as log:
        out = dequantize_operand(part, torch.float32)
    assert why_not_sliced(log) == "not contiguous"
    assert torch.equal(out, decode(operand, torch.float32)[:, :384])


@pytest.mark.parametrize("name", ["mxfp8[32x32]", "mxint8[16x16]", "float8_tensor", "float8_128x128"])
@pytest.mark.parametrize("shape", [(256, 384), (260, 390), (3, 96, 64), (1, 64)])
def test_codes_in_transposed_layout_are_decoded_in_that_layout(name, shape):
    """Transposed square blocks, which dgrad reads of a weight with one copy."""
    operand = quantize_operand(torch.randn(shape), Cast.of(name))
    columnwise = transposed(operand)
    with explain() as log:
        out = dequantize_operand(columnwise, torch.bfloat16)
    (entry,) = log.entries
    assert entry.spec.shapes == (columnwise.shape,) and "not contiguous" not in entry.refusals.values()
    assert_same_values(out.contiguous(), decode(columnwise, torch.bfloat16))
    assert out.transpose(-1, -2).is_contiguous()


def test_other_devices_are_refused():
    with explain() as log:
        operand = quantize_operand(torch.empty(256, 384, device="meta"), Cast.of("mxfp8"))
    assert why_not_sliced(log) == "runs on cpu, this tensor is on meta"
    assert (operand.data.device.type, operand.data.shape, operand.scale.shape) == ("meta", (256, 384), (256, 12))
    with explain() as log:
        out = dequantize_operand(operand, torch.bfloat16)
    assert why_not_sliced(log) == "runs on cpu, this tensor is on meta"
    assert (out.device.type, out.shape, out.dtype) == ("meta", (256, 384), torch.bfloat16)


@each_dtype
def test_fake_tensors_go_to_the_reference(dtype):
    with FakeTensorMode():
        x = torch.empty(256, 384, dtype=dtype)
        with explain() as log:
            operand = quantize_operand(x, Cast.of("nvfp4"))
        assert why_not_sliced(log) == "being traced: the reference fuses better"
        with explain() as log:
            out = dequantize_operand(operand, dtype)
        assert why_not_sliced(log) == "being traced: the reference fuses better"
    assert (operand.data.shape, operand.scale.shape, out.shape) == ((256, 192), (256, 24), (256, 384))
    assert out.dtype == dtype


def test_sources_are_checked_before_any_kernel_is_asked():
    with explain() as log:
        with pytest.raises(TypeError, match="cannot quantize a tensor of dtype int32"):
            quantize_operand(torch.ones(256, 384, dtype=torch.int32), Cast.of("mxfp8"))
        with pytest.raises(ValueError, match="cannot quantize a 0-dimensional tensor"):
            quantize_operand(torch.tensor(1.0), Cast.of("mxfp8"))
    assert not log.entries


# ---------------------------------------------------------------------------------------------- in graphs


@pytest.mark.parametrize("name", ["mxfp6", "nvfp4", "nvfp4[16x16]", "float8_tensor", "float8_1x128"])
def test_the_opaque_op_is_encode(name):
    x, finite, format = values(35, 160).float(), values(35, 160, specials=False).float(), get_format(name)
    data, scale, global_scale = definition.encode_op(x, format.name, "floor", "nearest", 0.0)
    operand = Operand(data, scale, global_scale if format.global_scale else None, format, (35, 160))
    assert_same_operand(operand, encode(x, Cast.of(name, "floor")))
    torch.library.opcheck(
        definition.encode_op, (finite, format.name, "floor", "nearest", 0.0)
    )  # which takes no NaN for another


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # inductor's own
@pytest.mark.parametrize(
    "names",
    [("mxfp8_e4m3", "nvfp4", "mxfp8_e5m2[32x32]"), ("mxfp6_e2m3", "mxint8", "float8_e4m3_1x128")],
    ids=lambda names: names[0],
)
def test_compiled_casts_are_the_eager_ones(names):
    """With tails, NaN, infinities and subnormals, and of a slice that inductor could compute in part."""
    casts = [Cast.of(name) for name in names]

    def cast_and_dequantize(x):
        results = []
        for cast in casts:
            operand = quantize_operand(x, cast)
            decoded = dequantize_operand(operand, torch.float32)
            bf16 = dequantize_operand(operand, torch.bfloat16)
            results.append((operand.tensors, decoded, decoded[:, :100] * 2.0, bf16))
        return results

    x = values(ROWS, COLS + 16)[:, : COLS - 5].contiguous().float()
    torch.compiler.reset()
    for (components, *got), cast in zip(torch.compile(cast_and_dequantize, fullgraph=True)(x), casts, strict=True):
        operand = encode(x, cast)
        assert_same_operand(Operand(*components, *[None] * (3 - len(components)), cast.format, tuple(x.shape)), operand)
        decoded = decode(operand, torch.float32)
        for ours, theirs in zip(got, (decoded, decoded[:, :100] * 2.0, decode(operand, torch.bfloat16)), strict=True):
            assert_same_values(ours, theirs.contiguous())
