"""The C++ casts give what the codec gives, bit for bit, whatever the values, shapes, threads and modes."""

import subprocess
import sys

import pytest
import torch

import mxtensor as mx
from mxtensor import codec
from mxtensor.kernels import native
from mxtensor.kernels.cast import quantize_operand

pytestmark = pytest.mark.skipif(isinstance(native.library(), str), reason=str(native.library()))
FORMATS = ["mxfp8", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxint8", "mxfp8[1x16]", "mxfp6_e2m3[1x128]"]
every_format = pytest.mark.parametrize("format", FORMATS)
every_mode = pytest.mark.parametrize("scaling", ["rceil", "floor", "ceil", "even"])


def bits(count, dtype, cols):
    """Every bit pattern alike: NaN, infinities and subnormals among them."""
    integers = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    info = torch.iinfo(integers)
    return torch.randint(info.min, info.max, (count // cols, cols), dtype=torch.int64).to(integers).view(dtype)


def magnitudes(rows, cols):
    return torch.randn(rows, cols) * 2.0 ** torch.randint(-149, 120, (rows, 1)).float()


SOURCES = {
    "float32 bits": lambda: bits(1 << 18, torch.float32, 512),
    "bfloat16, every value": lambda: torch.arange(65536).to(torch.int16).view(torch.bfloat16).view(-1, 128),
    "bfloat16, every value alone": lambda: torch.arange(65536).to(torch.int16).view(torch.bfloat16).view(-1, 1),
    "float16, every value": lambda: torch.arange(65536).to(torch.int16).view(torch.float16).view(-1, 64),
    "magnitudes, ragged": lambda: magnitudes(301, 37),
    "bfloat16, ragged": lambda: magnitudes(77, 131).bfloat16(),
    "one dimension": lambda: torch.randn(77),
    "four dimensions": lambda: torch.randn(2, 3, 5, 70).half(),
    "no rows": lambda: torch.randn(0, 64),
    "no columns": lambda: torch.randn(5, 0),
}


def same(a, b):
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def same_values(a, b):
    nan = a.isnan()
    return (
        torch.equal(nan, b.isnan())
        and torch.equal(a[~nan], b[~nan])
        and torch.equal(a[~nan].signbit(), b[~nan].signbit())
    )


@every_format
@every_mode
@pytest.mark.parametrize("source", SOURCES)
def test_casts_equal_the_codec_bit_for_bit(format, scaling, source):
    x, cast = SOURCES[source](), mx.Cast.of(format, scaling)
    ours, expected = native._quantize(x, cast), codec.encode(x, cast)
    assert same(ours.data, expected.data)
    assert same(ours.scale, expected.scale)
    for dtype in (torch.float32, torch.bfloat16):
        assert same_values(native._dequantize(ours, dtype), codec.decode(expected, dtype))


@every_format
def test_any_code_under_any_scale_decodes_as_the_codec_does(format):
    fmt = mx.get_format(format)
    data = torch.randint(0, 256, fmt.data_shape((256, 512)), dtype=torch.uint8).view(fmt.element.dtype)
    scale = torch.arange(256).to(torch.uint8)[:, None].expand(fmt.scale_shape((256, 512))).contiguous()
    operand = codec.Operand(data, scale, None, fmt, (256, 512))
    for dtype in (torch.float32, torch.bfloat16):
        assert same_values(native._dequantize(operand, dtype), codec.decode(operand, dtype))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_spans_of_rows_meet_without_a_seam(threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(native, "_pool", [])
    x, cast = torch.randn(1001, 384), mx.Cast.of("mxfp6")
    ours, expected = native._quantize(x, cast), codec.encode(x, cast)
    assert same(ours.data, expected.data)
    part = native.decode_rows(ours, 17, 900, torch.full((900, 384), float("nan")))
    assert torch.equal(part, codec.decode(expected, torch.float32)[17:917])


def test_it_refuses_in_a_sentence_what_it_cannot_do():
    x = torch.randn(64, 128)
    reasons = {}
    for name, source, cast in (
        ("tiles", x, mx.Cast.of("mxfp8[32x32]")),
        ("other scales", x, mx.Cast.of("nvfp4")),
        ("float64", x.double(), mx.Cast.of("mxfp8")),
        ("strides", x.t(), mx.Cast.of("mxfp8")),
        ("stochastic", x, mx.Cast.of("mxfp8", rounding="stochastic")),
    ):
        with mx.explain() as log:
            quantize_operand(source, cast)
        reasons[name] = log.entries[0].refusals["native"]
    assert reasons == {
        "tiles": "only MX formats in blocks along rows",
        "other scales": "only MX formats in blocks along rows",
        "float64": "not for float64",
        "strides": "not contiguous",
        "stochastic": "rounds to nearest only",
    }


def test_without_a_compiler_the_other_casts_do_the_work(monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    monkeypatch.setenv("XDG_CACHE_HOME", "/nonexistent")
    assert native.library.__wrapped__().startswith("native.cpp did not build: ")


def test_a_forked_child_casts_on():
    """A child has none of its parent's threads."""
    code = (
        "import os, torch, mxtensor as mx\n"
        "torch.set_num_threads(2)\n"
        "x = torch.randn(1024, 512)\n"
        "expected = mx.quantize(x, 'mxfp8').dequantize()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(0 if torch.equal(mx.quantize(x, 'mxfp8').dequantize(), expected) else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)
