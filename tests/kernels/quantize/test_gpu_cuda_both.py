"""The CUDA cast of both copies on a device is bitwise the reference: eager, compiled, captured and repeated calls."""

import pytest
import torch

import mxtensor as mx
from mxtensor import Cast
from mxtensor.kernels.operands import Form
from mxtensor.kernels.quantize import cuda_both
from mxtensor.kernels.quantize.choose_pair import cast_pair, quantize_operands
from mxtensor.kernels.quantize.cuda_both import Tile
from mxtensor.numerics.reference import encode

pytestmark = pytest.mark.gpu
FORMATS = [
    "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4_e2m1", "mxint8", "nvfp4", "nvfp4_single_level",
    "mxfp8_e4m3[1x16]", "mxfp6_e2m3[1x64]", "mxfp4_e2m1[1x128]",
]  # fmt: skip
KINDS = ["mxfp8", "mxfp6", "mxfp4", "mxint8", "nvfp4"]
BF16 = torch.bfloat16

each_format = pytest.mark.parametrize("format", FORMATS)
each_kind = pytest.mark.parametrize("format", KINDS)


def values(rows, cols, dtype=torch.bfloat16):
    """Rows of every magnitude, with zeros of both signs, the largest value, NaN and infinities."""
    x = torch.randn(rows, cols) * 2.0 ** torch.randint(-140, 120, (rows, 1)).float()
    x[rows // 2 :] = torch.randn(rows - rows // 2, cols) * 2.0 ** torch.randint(-4, 5, (1, cols)).float()
    top = torch.finfo(dtype).max
    x = x.clamp(-top, top)
    x[0, : cols // 2], x[1, ::40] = -0.0, -top
    x[4, cols // 3], x[5, cols // 2], x[6, -1] = float("nan"), float("inf"), float("-inf")
    return x.to(dtype)


def same(got, expected):
    assert (got.format, got.shape) == (expected.format, expected.shape)
    for ours, theirs in zip(got.tensors, expected.tensors, strict=True):
        assert (ours.dtype, ours.shape, ours.is_contiguous()) == (theirs.dtype, theirs.shape, True)
        assert torch.equal(ours.cpu().reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))


def check(operands, x, cast):
    for got, source in zip(operands, (x, x.t()), strict=True):
        same(got, encode(source, cast))


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@each_format
def test_both_copies_equal_the_cpu_reference(format, dtype):
    """Whole tiles, tails of aligned rows, odd rows and columns; with special values, and without."""
    for rows, cols, first in ((256, 512, 8), (312, 416, 8), (131, 419, 0), (131, 419, 8), (1, 1, 8)):
        x = values(rows + first, cols, dtype)[first:] if rows > 1 else torch.randn(1, 1).to(dtype)
        with mx.explain() as log:
            operands = quantize_operands(x.cuda(), Cast.of(format), mx.Orientation.BOTH)
        assert [e.kernel for e in log.entries] == ["cuda"]
        check(operands, x, Cast.of(format))


@pytest.mark.parametrize("scaling", ["rceil", "floor", "ceil", "even"])
@pytest.mark.parametrize("format", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4_e2m1", "mxint8"])
def test_every_scale_rule_and_every_bfloat16(format, scaling):
    words = torch.arange(65536, dtype=torch.int32)[torch.randperm(65536)].to(torch.int16).view(BF16)
    for x in (values(256, 256), torch.stack([words.view(256, 256), torch.randn(256, 256).bfloat16()]).view(512, 256)):
        cast = Cast.of(format, scaling)
        check(cuda_both.quantize_both(x.cuda(), cast), x, cast)


@pytest.mark.parametrize(
    "tile", [Tile(128, 64, 128, 4, 3, 2), Tile(256, 64, 256, 2, 2, 4), Tile(128, 256, 256, 2, 1, 2)]
)
@each_kind
def test_strides_and_tiles(format, tile):
    cast, wide = Cast.of(format), values(700, 1100)[8:]
    for x in (wide, wide[::2, 3:], wide[:, :1000], wide.t(), wide[1:2].expand(300, -1)):
        check(cuda_both.quantize_both(x.cuda(), cast, given=tile), x, cast)


@each_kind
def test_a_pair_of_codes_is_both_copies(format):
    x = values(300, 500)
    with mx.explain() as log:
        operands = cast_pair(x.cuda(), Cast.of(format), Form.CODES, Form.CODES, BF16)
    assert [e.kernel for e in log.entries] == ["cuda"]
    check(operands, x, Cast.of(format))


@each_kind
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_compiled_and_repeated_calls_equal_the_cpu_reference(format):
    """The second call of the op is recorded, the third runs the recorded program."""
    torch._dynamo.reset()
    cast = Cast.of(format)

    def both(x):
        row, column = quantize_operands(x, cast, mx.Orientation.BOTH)
        return row.tensors, column.tensors

    compiled = torch.compile(both, fullgraph=True)
    for _ in range(4):
        x = values(136, 416)[8:]
        for got, source in zip(compiled(x.cuda()), (x, x.t()), strict=True):
            for ours, theirs in zip(got, encode(source, cast).tensors, strict=True):
                assert torch.equal(ours.cpu().reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))
        tensors = cuda_both.cast_both_op(x.cuda(), cast.format.name, cast.scaling.value)
        assert torch.equal(tensors[2].cpu().view(torch.uint8), encode(x.t(), cast).data.view(torch.uint8))


@each_kind
def test_a_captured_graph_casts_new_values(format):
    cast, x = Cast.of(format), torch.randn(300, 520, dtype=BF16, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        quantize_operands(x, cast, mx.Orientation.BOTH)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        operands = quantize_operands(x, cast, mx.Orientation.BOTH)
    for _ in range(2):
        x.copy_(torch.randn_like(x))
        for t in (t for operand in operands for t in operand.tensors):
            t.view(torch.uint8).fill_(0xAA) if t.dim() else t.fill_(-1.0)
        graph.replay()
        check(operands, x.cpu(), cast)


@each_kind
def test_a_cast_waits_for_the_kernel_before_it(format):
    """Kernels of the package may start before the one before them ends; the values come from such a stream of work."""
    cast, a = Cast.of(format), torch.randn(2048, 2048, device="cuda")
    expected = None
    for _ in range(20):
        x = (a @ a).bfloat16()
        operands = quantize_operands(x, cast, mx.Orientation.BOTH)
        copies = [t.clone() for operand in operands for t in operand.tensors]
        expected = expected or [t.clone() for o in operands for t in o.tensors]
        for ours, theirs in zip(copies, expected, strict=True):
            assert torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))
    check(operands, x.cpu(), cast)
