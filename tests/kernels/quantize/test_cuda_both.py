"""The CUDA cast of both copies is bitwise the reference: its sources, run on the CPU by ``cuda_on_cpu``."""

from dataclasses import replace

import pytest
import torch

import mxtensor as mx
from mxtensor import FORMATS, Cast, get_format
from mxtensor.kernels.operands import Form
from mxtensor.kernels.quantize import choose_pair, cuda_both
from mxtensor.kernels.quantize.cuda_both import SHARED_BYTES, TILE, Tile, shared_bytes, tile_for
from mxtensor.kernels.runtime import nvrtc
from mxtensor.kernels.runtime.nvrtc import RESERVED
from mxtensor.numerics.formats import E8M0, FULL, UE4M3
from mxtensor.numerics.reference import encode, tensor_amax
from tests.helpers import cuda_on_cpu
from tests.helpers.compare import assert_same_operand
from tests.kernels.quantize.test_triton_pair import PLACES
from tests.kernels.quantize.test_triton_rows import blocks_of, every_bfloat16, values

pytestmark = pytest.mark.skipif(cuda_on_cpu.compiler() is None, reason="needs a C++ compiler")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BLOCKS = ["mxfp8_e4m3[1x16]", "mxfp6_e3m2[1x64]", "mxfp4[1x128]", "nvfp4[1x32]", "mxint8[1x128]"]
NAMES = [n for n in (*FORMATS, *BLOCKS) if get_format(n).block[0] == 1 and get_format(n).scale in (E8M0, UE4M3)]
KINDS = ["mxfp8", "mxfp6", "mxfp4", "mxint8", "nvfp4"]
"""One format for each kind of tile."""
PAIRED = ["mxfp4", "mxint8"]
"""Formats to which bfloat16 is cast in words of two values."""
SM80, SM90 = (8, 0), (9, 0)
SMALL = Tile(64, 64, 64, 1, 1, 2)

each_kind = pytest.mark.parametrize("name", KINDS)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch, guarded_memory):
    """The instructions of sm_90, and memory that shows missing and stray writes."""
    monkeypatch.setattr(nvrtc, "function", cuda_on_cpu.function)
    monkeypatch.setattr(cuda_both, "amax_of", lambda x: (tensor_amax(x).view(torch.int32) & 0x7FFFFFFF).view(1))
    as_device(monkeypatch, SM90)
    yield
    cuda_both._kernel.cache_clear()


def as_device(monkeypatch, capability):
    cuda_both._kernel.cache_clear()
    monkeypatch.setattr(cuda_both, "device_capability", lambda device: capability)


def check(x, cast, tile=None):
    row, column = cuda_both.quantize_both(x, cast, given=tile)
    assert_same_operand(row, encode(x, cast))
    assert_same_operand(column, encode(x.t(), cast))


# ---------------------------------------------------------------------------------------------- values


@pytest.mark.exhaustive(quick=3)
@pytest.mark.parametrize("capability", [SM90, SM80], ids=["conversions", "integers"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_format_from_every_dtype(name, dtype, capability, monkeypatch):
    """Tails of rows and columns; every magnitude. NaN and infinities would decide a global scale."""
    as_device(monkeypatch, capability)
    for specials in (True, False) if get_format(name).global_scale else (True,):
        check(values(133, 260, dtype, specials), Cast.of(name))


@pytest.mark.exhaustive(quick=2)
@pytest.mark.parametrize("capability", [SM90, SM80], ids=["conversions", "integers"])
@pytest.mark.parametrize("mode", ["rceil", "floor", "ceil", "even"])
@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e5m2", "mxfp6", "mxfp6_e3m2", "mxfp4", "mxint8"])
def test_every_scale_rule(name, mode, capability, monkeypatch):
    as_device(monkeypatch, capability)
    for dtype in (BF16, FP32):
        check(values(64, 128, dtype), Cast.of(name, mode), SMALL)


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("mode", ["rceil", "floor"])
@pytest.mark.parametrize("name", [*(f"{name}[1x16]" for name in PAIRED), "mxfp6_e3m2[1x16]", "nvfp4_single_level"])
def test_every_bfloat16_below_a_larger_one(name, mode):
    """Each value next to one up to 2^8 times as large, which decides its scale; both signs of each."""
    v = every_bfloat16()
    word = v.view(torch.int16).to(torch.int32)
    larger = word + (torch.randint(0, 9, word.shape) << 7) + torch.randint(0, 128, word.shape)
    w = torch.where((larger & 0x7FFF) < 0x7F80, larger, word).to(torch.int16).view(BF16)
    w = torch.where((w.sign() == v.sign()) | w.isnan(), w, v)
    check(blocks_of(v, -w, v.neg().roll(1) * 0), Cast.of(name, mode))


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("amax", [3e38, 2.0**-120, 1e-44, 0.0])
def test_global_scales_at_the_ends_of_float32(amax):
    """Products that underflow to zero lose their sign; a scale of zero has the largest multiplier."""
    x = torch.randn(64, 64) * 2.0 ** torch.randint(-149, 1, (64, 64)).float()
    x = (x / x.abs().max() * amax).nan_to_num(0.0)
    x[3, 7] = -amax
    check(x, Cast.of("nvfp4"), SMALL)
    check(x.bfloat16(), Cast.of("nvfp4"), SMALL)


# ---------------------------------------------------------------------------------------------- tiles

TILES_TO_TRY = [
    Tile(128, 128, 256, 4, 1, 8),
    Tile(128, 64, 128, 8, 2, 4),
    Tile(256, 64, 256, 3, 3, 2),
    Tile(128, 256, 256, 3, 1, 1),
    SMALL,
]


@pytest.mark.exhaustive(quick=2)
@pytest.mark.parametrize("tile", TILES_TO_TRY, ids=lambda tile: ",".join(map(str, tile)))
@each_kind
def test_tiles(name, tile):
    """Several strips, the last one shorter; whole tiles, and a tail of each."""
    for rows, cols in ((tile.rows, 3 * tile.cols), (tile.rows + 5, 2 * tile.cols + 33)):
        check(values(rows, cols, BF16, specials=False), Cast.of(name), tile)


@pytest.mark.exhaustive(quick=2)
@pytest.mark.parametrize("shape", [(1, 1), (3, 140), (132, 2), (67, 131), (64, 130), (66, 128), (65, 192), (128, 64)])
@each_kind
def test_shapes(name, shape):
    x = torch.randn(shape) * 2.0 ** torch.randint(-9, 9, shape).float()
    for dtype in (BF16, FP32):
        check(x.to(dtype), Cast.of(name), SMALL)


@pytest.mark.exhaustive(quick=2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_strides_and_offsets(name, place):
    check(PLACES[place](values(36, 142, BF16, specials=False)), Cast.of(name), SMALL)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [2, 4])
def test_the_chosen_tile_fits(name, size):
    format = get_format(name)
    for rows, cols in ((1, 1), (4096, 4096), (8192, 14336)):
        tile = tile_for(format, size, rows, cols)
        assert 1 <= tile.blocks <= SHARED_BYTES // (shared_bytes(tile, format, size) + RESERVED)
        assert tile.strip <= TILE.strip


def test_a_small_matrix_has_more_blocks_with_shorter_strips(monkeypatch):
    monkeypatch.setattr(cuda_both, "TILE", Tile(128, 128, 256, 4, 1, 8))
    strips = [tile_for(FORMATS["mxfp8"], 2, n, n).strip for n in (256, 2048, 4096, 16384)]
    assert strips == sorted(strips) and strips[0] == 1 and strips[-1] == 8


# ---------------------------------------------------------------------------------------------- the kernel


def spec_of(x):
    from mxtensor.kernels.quantize.choose_cast import cast_spec

    return cast_spec("quantize both", x, Cast.of("mxfp8"))


def test_refusals_give_the_reason(monkeypatch):
    class Device(type(spec_of(torch.randn(2, 2)))):
        @property
        def capability(self):
            return SM90

    def why(cast, x=None):
        x = torch.randn(4, 64, dtype=BF16) if x is None else x
        return cuda_both.refuses(Device(*spec_of(x)), x, Cast.of(cast) if isinstance(cast, str) else cast)

    monkeypatch.setattr(nvrtc, "library", lambda: object())
    monkeypatch.setattr(nvrtc, "unknown", lambda capability: None)
    assert why("mxfp8") is None and why("mxfp6[1x16]") is None
    assert why("mxfp8", torch.randn(2, 4, 64)) == "matrices only"
    assert why("mxfp8", torch.randn(0, 64)) == "the tensor is empty"
    assert why("mxfp8", torch.randn(4, 64).double()) == "not for float64"
    assert why(Cast.of("mxfp8", rounding="stochastic")) == "rounds to nearest only"
    assert why("mxfp8[32x32]") == "has no code for blocks of 32x32"
    assert why("float8_row").startswith("has no code for elements of e4m3 with float32 scales")
    assert why("nvfp4[row_scaled]") == "has one global scale, not one for each row"
    assert why("nvfp4") == "runs on cuda, this tensor is on cpu"  # the pass for the amax is Triton's
    monkeypatch.setattr(nvrtc, "library", lambda: "NVRTC is not installed; a CUDA build of torch installs it")
    assert why("mxfp8").startswith("NVRTC is not installed")


def test_pairs_are_codes_both_ways():
    x = torch.randn(4, 64)
    for forms in ((Form.VALUES, Form.CODES), (None, Form.CODES), (Form.CODES, Form.VALUES)):
        reason = cuda_both.KERNEL.refuses(spec_of(x), x, Cast.of("mxfp8"), *forms, BF16, None, None)
        assert reason == "casts to codes, both ways"


@pytest.fixture
def chosen(monkeypatch):
    """The kernel accepts tensors on the CPU."""

    def refuses(spec, x, cast, *rest):
        return cuda_both.why_not(cast, x.dtype)

    for name in ("QUANTIZE_BOTH", "PAIR"):
        kernels = tuple(
            replace(k, device=None, refuses=refuses) if k.name == "cuda" else k for k in getattr(choose_pair, name)
        )
        monkeypatch.setattr(choose_pair, name, kernels)


@pytest.mark.exhaustive(quick=2)
@each_kind
def test_both_copies_are_those_of_the_kernel(name, chosen):
    x, cast = values(36, 132, BF16, specials=False), Cast.of(name)
    with mx.explain() as log:
        operands = choose_pair.quantize_operands(x, cast, mx.Orientation.BOTH)
        pair = choose_pair.cast_pair(x, cast, Form.CODES, Form.CODES, BF16)
    assert [e.kernel for e in log.entries] == ["cuda", "cuda"]
    for row, column in (operands, pair):
        assert_same_operand(row, encode(x, cast))
        assert_same_operand(column, encode(x.t(), cast))


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_compiled_code_calls_the_op(name, chosen, interpreted):
    torch._dynamo.reset()
    cast, graphs = Cast.of(name, "floor"), []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    def both(x):
        row, column = choose_pair.quantize_operands(x, cast, mx.Orientation.BOTH)
        return row.tensors, column.tensors

    x = torch.randn(12, 140)
    got = torch.compile(both, backend=keep, fullgraph=True)(x)
    called = [str(n.target) for n in graphs[0].graph.nodes if n.op == "call_function" and "mxtensor" in str(n.target)]
    assert called == ["mxtensor.cast_both.default"]
    for ours, theirs in zip(got, (encode(x, cast), encode(x.t(), cast)), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs.tensors, strict=True))


def test_the_op_refuses_what_the_kernel_cannot_cast():
    with pytest.raises(
        ValueError, match=r"mxtensor::cast_both cannot cast to mxfp8_e4m3\[32x32\]: has no code for blocks"
    ):
        cuda_both.cast_both_op(torch.randn(32, 32), "mxfp8[32x32]", "rceil")
    with pytest.raises(TypeError, match="x must be"):
        cuda_both.cast_both_op(torch.randn(32, 32).double(), "mxfp8", "rceil")


@pytest.mark.parametrize("name", NAMES)
def test_what_traced_code_sees_has_the_shapes_and_dtypes_of_the_reference(name, cuda, monkeypatch):
    monkeypatch.setattr(nvrtc, "unknown", lambda capability: None)
    monkeypatch.setattr(nvrtc, "library", lambda: object())
    x = torch.empty(37, 300, dtype=BF16, device=cuda)
    with mx.explain() as log:
        rowwise, columnwise = choose_pair.quantize_operands(x, Cast.of(name), mx.Orientation.BOTH)
    assert [(e.spec.op, e.kernel) for e in log.entries] == [("quantize both", "cuda")]
    for operand, shape in ((rowwise, (37, 300)), (columnwise, (300, 37))):
        expected = encode(torch.empty(shape, device="meta"), Cast.of(name))
        assert [(t.shape, t.dtype) for t in operand.tensors] == [(t.shape, t.dtype) for t in expected.tensors]


# ---------------------------------------------------------------------------------------------- the compiler


@pytest.mark.skipif(isinstance(nvrtc.library(), str), reason="needs NVRTC")
@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
@each_kind
def test_the_sources_compile(name, capability):
    cast, conversions = Cast.of(name), capability >= cuda_both.CONVERSIONS
    for dtype, even, pieces in (
        (BF16, True, (16, 16, 16, 16, 4)),
        (FP16, False, (2, 1, 1, 1, 1)),
        (FP32, False, (4, 2, 1, 8, 2)),
    ):
        tile = tile_for(cast.format, dtype.itemsize, 8192, 8192)
        row = cuda_both.constants(cast, dtype, tile, even, pieces, conversions)
        assert nvrtc.compiled(cuda_both.SOURCES, row, capability)


def test_formats_with_one_scale_a_tensor_are_left_to_others():
    assert all(get_format(n).block[1] != FULL for n in NAMES)
