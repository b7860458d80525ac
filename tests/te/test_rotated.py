"""The rotated columnwise copy of NVFP4: alone, beside a rowwise copy, written, copied, saved and compiled."""

import copy
import io
import pickle

import pytest
import torch

import mxtensor as mx
import mxtensor.te as te
from mxtensor.tensor.rotated import RotatedTensor

ALONE, BESIDE = te.NVFP4Quantizer(with_rht=True, rowwise=False), te.NVFP4Quantizer(with_rht=True)
QUANTIZERS = {"alone": ALONE, "beside": BESIDE}
SHAPES = [(64, 48), (37, 20), (2, 20, 40), (0, 32), (32, 0)]


def columnwise(w):
    return w._rotated.operand.tensors


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip(columnwise(a), columnwise(b), strict=True))


def error(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_columnwise_copy_alone_has_the_bits_of_the_one_beside_a_rowwise_copy(shape, dtype):
    x = torch.randn(shape, dtype=dtype)
    alone, beside = ALONE(x), BESIDE(x)
    assert same(alone, beside) and isinstance(alone, mx.MXTensor)
    assert torch.equal(alone._columnwise_data, beside._columnwise_data)
    assert torch.equal(alone._columnwise_scale_inv, beside._columnwise_scale_inv)
    assert alone._rowwise_data is None and alone.rowwise is None and alone.orientation is mx.Orientation.COLUMNWISE
    assert alone.shape == x.shape and alone.dtype is dtype and alone.nbytes + beside.rowwise.nbytes == beside.nbytes


OPTIONS = ({}, {"signs": 0b1010}, {"with_random_sign_mask": False}, {"stochastic_rounding": True})


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_other_settings_and_usages(options):
    x, quantizer = torch.randn(64, 48), te.NVFP4Quantizer(with_rht=True, **options)
    torch.manual_seed(3)
    expected = ALONE.copy()
    expected.cast, expected.signs = quantizer.cast, quantizer.signs
    expected = expected(x)
    quantizer.set_usage(rowwise=False)
    torch.manual_seed(3)
    assert same(quantizer(x), expected)
    quantizer.set_usage(columnwise=False, rowwise=True)
    assert quantizer(x)._rotated is None


def test_products_of_two_rotated_copies():
    x, g = torch.randn(64, 48), torch.randn(64, 32)
    y = te.general_gemm(ALONE(x), ALONE(g), layout="NT")[0]
    assert torch.equal(y, te.general_gemm(BESIDE(x), BESIDE(g), layout="NT")[0])
    assert torch.equal(y, te.general_gemm(BESIDE(x), ALONE(g), layout="NT")[0])
    assert error(y, g.t() @ x) < 0.25
    with pytest.raises(ValueError, match="needs a rowwise copy"):
        te.general_gemm(ALONE(x), torch.randn(3, 48), layout="TN")
    with pytest.raises(ValueError, match="rotated differently"):
        te.general_gemm(ALONE(x), te.NVFP4Quantizer()(g), layout="NT")


READS = (
    torch.sum,
    lambda t: t + 1,
    lambda t: t[..., 1:, :],
    lambda t: t.transpose(-1, -2) * 2,
    torch.Tensor.numpy,
    lambda t: torch.nn.functional.linear(torch.ones(3, t.shape[-1]), t.flatten(0, -2)),
    lambda t: torch.einsum("...ij,...kj->...ik", t, t),
    lambda t: torch.cat([t, t]),
)


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_values_are_rotated_back(shape):
    x = torch.randn(shape)
    w = ALONE(x)
    values = w.dequantize()
    assert error(values, x) < 0.12 and values.shape == x.shape
    for op in READS:
        got, expected = op(w), op(values)
        assert torch.equal(torch.as_tensor(got).clone(), torch.as_tensor(expected))
    with pytest.raises(NotImplementedError, match=r"aten\.sum"), mx.strict():
        w.sum()


@pytest.mark.parametrize("kind", QUANTIZERS)
@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.mul_(2),
        lambda t: t.detach().mul_(2),
        lambda t: t.t().mul_(2),
        lambda t: t[0:16].zero_(),
        lambda t: t.view(-1)[7:9].fill_(3),
        lambda t: t.__setitem__(slice(3), 5),
        lambda t: t.copy_(t.dequantize() + 1),
        lambda t: t.diagonal().fill_(4),
    ],
)
def test_a_write_changes_the_rotated_copy(kind, write):
    x = torch.randn(64, 48)
    w = QUANTIZERS[kind](x)
    values = w.dequantize()
    write(w), write(values)
    assert same(w, ALONE(values)) and error(w.dequantize(), values) < 0.12


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_make_empty_then_update(shape):
    x = torch.randn(shape, dtype=torch.bfloat16)
    w = ALONE.make_empty(shape, dtype=torch.bfloat16, requires_grad=True).detach()
    memory = [t.data_ptr() for t in columnwise(w)]
    ALONE.update_quantized(x, w)
    assert same(w, ALONE(x)) and [t.data_ptr() for t in columnwise(w)] == memory
    ALONE.quantize(x + 1, out=w)
    assert same(w, ALONE(x + 1))
    with pytest.raises(ValueError, match="rotated differently"):
        te.NVFP4Quantizer(with_rht=True, signs=5, rowwise=False).update_quantized(x, w)


def saved(w):
    file = io.BytesIO()
    torch.save(w, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("kind", QUANTIZERS)
@pytest.mark.parametrize("copied", [copy.deepcopy, saved, lambda w: pickle.loads(pickle.dumps(w))])
def test_copies_and_files_have_the_rotated_copy(kind, copied):
    w = QUANTIZERS[kind](torch.randn(37, 20, dtype=torch.float16))
    out = copied(w)
    assert type(out) is type(w) and same(out, w) and torch.equal(out.dequantize(), w.dequantize())
    w.zero_()
    assert out.dequantize().abs().sum() > 0


def test_a_file_with_a_wrong_rotated_copy_is_refused():
    _, (components, *rest) = ALONE(torch.randn(37, 20)).__reduce_ex__(2)
    rebuild = ALONE(torch.randn(2, 2)).__reduce_ex__(2)[0]
    data, scale, whole = components["_rotated"]
    cut = (data[:5], scale, whole), (data, scale[:, :1], whole), (data, scale), (data, scale, whole.to("meta"))
    for wrong in cut:
        with pytest.raises(ValueError, match="holds no valid MXTensor"):
            rebuild({"_rotated": wrong}, *rest)
    for signs in ("x", 1.5, None):
        with pytest.raises(ValueError, match="holds no valid MXTensor"):
            rebuild(components, *rest[:-1], signs)


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_torch_ops_that_keep_all_of_it(kind):
    w = QUANTIZERS[kind](torch.randn(64, 48))
    narrow = w.with_dtype(torch.float16)
    for out in (w.detach(), w.clone(), narrow, torch.nn.Parameter(w), copy.copy(w), w.data, w.cpu()):
        assert type(out) is type(w) and same(out, w)
    with torch.inference_mode():
        assert same(w.detach(), w)


def test_without_a_rowwise_copy_shape_and_device_change_as_they_may():
    w = ALONE(torch.randn(64, 48))
    assert torch.empty_like(w, device="meta").device.type == "meta" and w.to("meta")._columnwise_data.is_meta
    with torch.inference_mode():
        assert same(w.detach(), w) and same(ALONE(torch.ones(16, 16)), ALONE(torch.ones(16, 16)))
    with pytest.raises(NotImplementedError, match="t_"):
        w.t_()


def test_data_is_bound_to_another_tensor():
    x, w = torch.randn(64, 48), ALONE(torch.randn(64, 48))
    w.data = x
    assert same(w, ALONE(x))
    other = ALONE(x + 1)
    w.data = other
    assert w._columnwise_data.data_ptr() == other._columnwise_data.data_ptr()
    w.data = mx.quantize(x, "mxfp8")
    assert same(w, ALONE(mx.quantize(x, "mxfp8").dequantize()))
    with pytest.raises(TypeError, match="use copy_"):
        mx.quantize(x, "nvfp4").data = w
    with pytest.raises(ValueError, match="two dimensions"):
        w.data = x[0]


def test_a_gradient_passes_through():
    x = torch.randn(32, 32, requires_grad=True)
    w = ALONE(x)
    assert w.requires_grad and isinstance(w, RotatedTensor)
    w.dequantize().sum().backward()
    assert torch.equal(x.grad, torch.ones(32, 32))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", QUANTIZERS)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(kind, backend):
    torch._dynamo.reset()
    q, x, g = QUANTIZERS[kind], torch.randn(64, 48), torch.randn(64, 32)

    def compiled(fn):
        return torch.compile(fn, backend=backend, fullgraph=True)

    w = compiled(q)(x)
    assert type(w) is type(q(x)) and same(w, q(x))
    read = compiled(lambda x: (q(x)._columnwise_data, q(x)._columnwise_scale_inv, q(x)._rotated.signs * x))(x)
    assert torch.equal(read[0], w._columnwise_data) and torch.equal(read[1], w._columnwise_scale_inv)
    product = compiled(lambda a, b: te.general_gemm(a, b, layout="NT")[0])
    torch.testing.assert_close(product(w, q(g)), te.general_gemm(w, q(g), layout="NT")[0])
    product = compiled(lambda x, g: te.general_gemm(q(x), q(g), layout="NT")[0])
    torch.testing.assert_close(product(x, g), te.general_gemm(q(x), q(g), layout="NT")[0])
    torch.testing.assert_close(compiled(lambda w: w.dequantize() + 1)(w), w.dequantize() + 1)
    out = q.make_empty((64, 48))
    compiled(lambda x: q.update_quantized(x, out) + 0)(x)
    assert same(out, w)
