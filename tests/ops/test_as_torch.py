"""What a user who knows torch expects of calls that few tests name: errors of torch, writes of any dtype, formats and
layouts of other widths, and what a fast path must leave to torch."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import mxtensor as mx
from mxtensor.kernels.runtime import native_build

needs_compiler = pytest.mark.skipif(native_build.compiler() is None, reason="needs a C++ compiler")


@pytest.mark.parametrize("block", [(1, 8), (1, 24), (1, 48), (1, 256), (2, 2), (8, 8), (1, 32)])
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "mxint8"])
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_products_with_blocks_of_any_width(name, block, rows):
    format = replace(mx.get_format(name), name=f"{name}_of_{block[0]}x{block[1]}", block=block)
    w, x = mx.quantize(torch.randn(40, 192), format), torch.randn(rows, 192)
    with torch.no_grad():
        y = F.linear(x, w)
    torch.testing.assert_close(y, x @ w.dequantize().t(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("k", [1, 3, 4, 8, 10, 16, 21, 33, 40])
@pytest.mark.parametrize("name", ["float8_e4m3_row", "float8_e4m3_tensor", "float8_e5m2_row_pow2"])
def test_one_scale_for_rows_shorter_than_a_step(name, k):
    w, x = mx.quantize(torch.randn(9, k), name), torch.randn(2, k)
    with torch.no_grad():
        torch.testing.assert_close(F.linear(x, w), x @ w.dequantize().t(), rtol=1e-5, atol=1e-5)


def test_forward_mode_differentiates_a_product():
    w, x = mx.quantize(torch.randn(32, 64), "mxfp8"), torch.randn(5, 64)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        tangent = forward_ad.unpack_dual(F.linear(dual, w)).tangent
    torch.testing.assert_close(tangent, torch.ones(5, 64) @ w.dequantize().t())


@needs_compiler
def test_one_causal_query_of_a_graph_reads_the_first_key():
    layer = mx.quantize_(torch.nn.Linear(32, 32), "mxfp8")

    def attend(q, k, v):
        return F.scaled_dot_product_attention(layer(q), k, v, is_causal=True)

    q, k, v = torch.randn(1, 2, 1, 32), torch.randn(1, 2, 10, 32), torch.randn(1, 2, 10, 32)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(attend)(q, k, v), v[:, :, :1])


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t.split([32, 32]), lambda t: t.split(-1), lambda t: t.split(0), lambda t: t.split(32, 2),
        lambda t: torch.cat([t, t], 2), lambda t: t.select(2, 0), lambda t: t.select(0, 96),
    ],
)  # fmt: skip
def test_wrong_sizes_and_dimensions_raise_the_errors_of_torch(call):
    plain = torch.randn(96, 64)
    with pytest.raises((RuntimeError, IndexError)) as of_torch:
        call(plain)
    with pytest.raises(type(of_torch.value)):
        call(mx.quantize(plain, "mxfp8"))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_values_of_any_dtype_are_written(dtype):
    w, values = mx.quantize(torch.randn(64, 64), "mxfp8"), torch.randint(0, 2, (64, 64)).to(dtype)
    w.copy_(values)
    assert torch.equal(w.dequantize(), values.float())
    w[0] = torch.arange(64)
    w[:, 0] = torch.ones(64, dtype=dtype)
    assert torch.equal(w.dequantize()[0, :16], torch.cat([torch.ones(1), torch.arange(1.0, 16)]))


@needs_compiler
@pytest.mark.parametrize("freed", ["x", "bias"])
def test_freed_memory_is_an_error_and_not_read(freed):
    w, x, bias = mx.quantize(torch.randn(32, 64), "mxfp8"), torch.randn(3, 64), torch.randn(32)
    with torch.no_grad():
        for _ in range(3):
            F.linear(x, w, bias)
        {"x": x, "bias": bias}[freed].untyped_storage().resize_(0)
        with pytest.raises((RuntimeError, ValueError)):
            F.linear(x, w, bias)


@pytest.mark.parametrize("rows", [32, 64, 96])
@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "nvfp4", "float8_tensor"])
def test_new_tensors_are_plain(format, rows):
    w = mx.quantize(torch.randn(64, 96).bfloat16(), format)
    for new in (w.new_zeros((rows, 96)), w.new_ones(rows, 96), w.new_full((rows, 96), 0.3), w.new_empty((rows, 96))):
        assert type(new) is torch.Tensor and new.shape == (rows, 96) and new.dtype is torch.bfloat16
    sums = w.new_zeros((rows, 96)).add_(0.3).sub_(0.3001)
    assert torch.equal(sums, torch.zeros(rows, 96, dtype=torch.bfloat16).add_(0.3).sub_(0.3001))


def test_fsdp2_alone_gets_a_quantized_shard_from_new_zeros():
    """What FSDP2 calls: the rank of a single process stores codes, also where another tensor is made inside."""
    layer = mx.quantize_(torch.nn.Linear(96, 64), "mxfp8-weight-only")
    before, x = layer.weight.dequantize(), torch.randn(3, 96)
    with torch.no_grad():
        expected = layer(x)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with torch.device("cpu"):  # a mode that intercepts every call first
            fully_shard(layer)
        shard = layer.weight.to_local()
        assert type(shard) is mx.MXTensor and torch.equal(shard.dequantize(), before)
        assert type(shard.new_zeros(64, 96)) is type(layer.weight.detach().to_local().new_zeros(64, 96)) is torch.Tensor
        with torch.no_grad():
            assert torch.equal(layer(x), expected)
    finally:
        torch.distributed.destroy_process_group()


def logged(log, *kernels):
    return [(e.spec.op, e.spec.shapes[0], e.kernel) for e in log.entries if e.kernel in kernels]


@pytest.mark.parametrize(
    ("op", "reason", "call"),
    [
        ("aten.embedding.default", "is stored columnwise", lambda c: F.embedding(c.tokens, c.columns)),
        ("addmm", "is the bias", lambda c: F.linear(c.x, c.rows, c.bias)),
        ("addmm", "is the bias", lambda c: torch.addmm(c.bias, c.x, c.rows.t())),
        ("Tensor.__setitem__", "at indices that are not a view", lambda c: c.rows.__setitem__([0], 1.5)),
        ("Tensor.__setitem__", "at indices that are not a view", lambda c: c.rows.__setitem__(c.tokens, c.x[0])),
        ("Tensor.__setitem__", "at indices that are not a view", lambda c: c.rows.__setitem__(c.mask, c.rows[:2])),
        ("aten.copy_.default", "shares scales or copies", lambda c: c.both.__setitem__(3, c.x[0])),
        ("aten.copy_.default", "shares scales or copies", lambda c: c.one_scale[3].copy_(c.x[0])),
    ],
)
def test_strict_refuses_what_decodes_a_whole_tensor_on_the_way(op, reason, call):
    """Without ``strict`` the log says it, once."""
    values = torch.randn(64, 96)
    case = SimpleNamespace(
        tokens=torch.tensor([5, 0, 5]), mask=torch.arange(64) % 32 == 3, x=torch.randn(3, 96),
        rows=mx.quantize(values, "mxfp8"), columns=mx.quantize(values, "mxfp8", orientation="columnwise"),
        both=mx.quantize(values, "mxfp8", orientation="both"), one_scale=mx.quantize(values, "nvfp4"),
        bias=mx.quantize(torch.randn(64), "mxfp8"),
    )  # fmt: skip
    before = {name: t.dequantize() for name, t in vars(case).items() if isinstance(t, mx.MXTensor)}
    with mx.strict(), pytest.raises(NotImplementedError) as refused, torch.no_grad():
        call(case)
    assert str(refused.value).startswith(f"{op} would dequantize (") and reason in str(refused.value)
    assert all(torch.equal(getattr(case, name).dequantize(), t) for name, t in before.items())
    with mx.explain() as log, torch.no_grad():
        call(case)
    shape = (64,) if "bias" in reason else (64, 96)
    assert logged(log, "dequantized", "requantized", "high precision") == [
        (op, shape, {"aten.embedding.default": "dequantized", "addmm": "high precision"}.get(op, "requantized"))
    ]


def test_strict_allows_writes_that_read_nothing():
    w, both = mx.quantize(torch.randn(64, 96), "mxfp8"), mx.quantize(torch.randn(64, 96), "mxfp8", orientation="both")
    values = torch.randn(64, 96)
    with mx.strict():
        w[3] = values[3]
        w[:, 32:64] = values[:, 32:64]
        both.copy_(values)
        both.t().copy_(values.t())
    assert torch.equal(w[3].dequantize(), mx.quantize(values, "mxfp8")[3].dequantize())
    assert torch.equal(both.dequantize(), mx.quantize(values, "mxfp8").dequantize())


@pytest.mark.parametrize("orientation", ["rowwise", "columnwise"])
@pytest.mark.parametrize(("format", "length"), [("mxfp4", 33), ("nvfp4", 47), ("mxfp6_e2m3", 33), ("mxfp6_e3m2", 62),
                                                ("mxfp6_e2m3", 67), ("mxfp4", 1)])  # fmt: skip
def test_pad_of_foreign_codes_shows_zeros_and_not_the_bits_after_the_last_value(format, length, orientation):
    shape, spans = ((8, length), (0, 3, 1, 0)) if orientation == "rowwise" else ((length, 8), (1, 0, 0, 3))
    w = mx.quantize(torch.randn(shape), format, orientation=orientation)
    operand, element = w.operands[0], w.format.element
    values, size = element.packing
    foreign = torch.full((8, size), 255, dtype=torch.uint8)
    for byte in range(size):
        used = max(0, min(8, length % values * element.bits - 8 * byte))  # bits of values in this byte
        foreign[:, byte] = 255 << used & 255
    before = w.dequantize()
    operand.data[:, -size:] |= foreign
    assert torch.equal(w.dequantize(), before)
    padded = F.pad(w, spans)
    assert isinstance(padded, mx.MXTensor) and torch.equal(padded.dequantize(), F.pad(before, spans))
    assert torch.equal(operand.data[:, -size:] & foreign, foreign)  # the tensor itself is not written


@pytest.mark.parametrize("spec", [".2f", "", ">12", ".3e", "+"])
def test_one_value_is_formatted_as_a_number(spec):
    w = mx.quantize(torch.randn(64, 96), "mxfp8")
    plain = w.dequantize()
    assert format(w[3, 5], spec) == format(plain[3, 5], spec) == format(w[3][5], spec)
    w[3, 5] = 2 * plain[3, 5]
    assert float(format(w[3, 5], spec)) == pytest.approx(2 * plain[3, 5].item(), rel=0.1)
    for many in (w, w[:, 3], plain):
        with pytest.raises(TypeError, match="unsupported format string"):
            format(many, ".2f")


@pytest.mark.parametrize("pad", [(), (0, 0), (0, 0, 0, 0)])
@pytest.mark.parametrize("format", ["mxfp8", "nvfp4", "float8_row", "float8_tensor", "mxfp8[32x32]"])
def test_pad_by_nothing_is_a_copy(format, pad):
    w = mx.quantize(torch.randn(64, 96), format)
    copy = F.pad(w, pad)
    assert isinstance(copy, mx.MXTensor) and torch.equal(copy.dequantize(), w.dequantize())
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(copy.components, w.components, strict=True))
    for wrong in ((1,), (0, 0) * 3):
        with pytest.raises(RuntimeError) as of_torch:
            F.pad(w.dequantize(), wrong)
        with pytest.raises(RuntimeError) as error:
            F.pad(w, wrong)
        assert str(error.value) == str(of_torch.value)


@pytest.mark.parametrize("call", [
    lambda x, w: torch.matmul(x, other=w.t()), lambda x, w: torch.matmul(input=x, other=w.t()),
    lambda x, w: x.matmul(other=w.t()), lambda x, w: torch.mm(input=x, mat2=w.t()), lambda x, w: x @ w.t(),
])  # fmt: skip
def test_products_take_their_arguments_by_name(call):
    x, w = torch.randn(3, 64), mx.quantize(torch.randn(32, 64), "mxfp8")
    assert torch.equal(call(x, w), F.linear(x, w))
