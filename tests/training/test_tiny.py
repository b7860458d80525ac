"""A short tour: quantize, view, multiply, convert a model, save it, load it."""

import io

import pytest
import torch
from torch import nn

import mxtensor as mx
from tests.helpers.compare import relative_error


def test_quantize_a_tensor():
    x = torch.randn(64, 128)
    w = mx.quantize(x, "mxfp8")
    assert isinstance(w, torch.Tensor) and (w.shape, w.dtype) == (x.shape, x.dtype)
    assert w.bits_per_value == 8.25 and w.nbytes * 8 == 8.25 * x.numel()
    assert 0.02 < relative_error(w.dequantize(), x) < 0.03
    assert w.rowwise.data.dtype is torch.float8_e4m3fn and w.rowwise.scale.shape == (64, 4)


def test_views_keep_the_bytes():
    w = mx.quantize(torch.randn(64, 128), "mxfp4")
    for view in (lambda t: t.t(), lambda t: t[8:24], lambda t: t[:, 32:96], lambda t: t.view(2, 32, 128).mT):
        assert torch.equal(view(w).dequantize(), view(w.dequantize()))
        assert view(w).operands[0].data.untyped_storage().data_ptr() == w.rowwise.data.untyped_storage().data_ptr()
    assert torch.equal(w[:, 16:], w.dequantize()[:, 16:])  # the slice cuts blocks, so the result is plain
    with mx.strict(), pytest.raises(NotImplementedError, match="cuts 1x32 blocks"):
        w[:, 16:]


def test_products_are_those_of_the_dequantized_values():
    w, x = mx.quantize(torch.randn(64, 128), "nvfp4"), torch.randn(3, 5, 128)
    values = w.dequantize()
    assert relative_error(x @ w.t(), x @ values.t()) < 1e-6
    assert relative_error(torch.einsum("bik,jk->bij", x, w), torch.einsum("bik,jk->bij", x, values)) < 1e-6


@pytest.mark.parametrize("format", mx.FORMATS)
def test_an_unmodified_model_runs_saves_and_loads(format):
    def build():
        return nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 64))

    model, x = build(), torch.randn(16, 128)
    dense, size = model(x), sum(p.nbytes for p in model.parameters())
    mx.quantize_(model, format)
    assert [type(m) for m in model] == [nn.Linear, nn.GELU, nn.Linear]
    assert sum(p.nbytes for p in model.parameters()) < 0.27 * size
    y = model(x)
    coarse = mx.get_format(format).element.mantissa_bits == 0  # powers of two: their steps are twice as wide
    assert 0 < relative_error(y, dense) < (0.6 if coarse else 0.3)

    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = mx.quantize_(build(), format)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(x), y)


def test_explain_records_every_product():
    linear = mx.quantize_(nn.Linear(128, 64), "mxfp8")
    with mx.explain() as log:
        linear(torch.randn(5, 128))
    assert [e.spec.op for e in log.entries] == ["addmm"]
    linear.double()
    with mx.explain() as log:
        linear(torch.randn(5, 128, dtype=torch.float64))
    assert [e.spec.op for e in log.entries][:2] == ["addmm", "quantize"]
    assert "dequant: computes in bfloat16, the result is float64" in log.table(refused=True)
