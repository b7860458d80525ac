"""Products of weights in shapes that a kernel does not expect: one row for all, and no values at all."""

import pytest
import torch
import torch.nn.functional as F

import mxtensor as mx
from tests.helpers.compare import relative_error

FORMATS = ["mxfp8", "mxfp4", "mxfp6_e2m3", "mxint8", "nvfp4", "float8_e4m3_row", "float8_e4m3_tensor"]


@pytest.mark.parametrize("shape", [(33,), (1, 64), (3, 1, 32), (1, 7, 32)], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_expanded_weights_multiply_as_their_values(name, shape):
    """The rows of such a weight share memory."""
    size = (*shape[:-2], 5, shape[-1]) if len(shape) < 3 else (3, 7, shape[-1])
    w = mx.quantize(torch.randn(shape), name).expand(size)
    dense, x = w.dequantize(), torch.randn(*size[:-2], 4, size[-1])
    assert isinstance(w, mx.MXTensor)
    for inputs in (x, x[..., :1, :]):
        assert relative_error(inputs @ w.mT, inputs @ dense.mT) < 1e-6
        assert relative_error(w @ inputs.mT, dense @ inputs.mT) < 1e-6
    if w.dim() == 2:
        with torch.no_grad():
            for _ in range(3):  # the later calls may take the launch of the first one
                assert relative_error(F.linear(x, w), F.linear(x, dense)) < 1e-6


@pytest.mark.parametrize("shape", [(0, 33), (7, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_stacks_without_values_multiply_as_torch(name, shape):
    for w in (mx.quantize(torch.randn(3, *shape), name), mx.quantize(torch.randn(shape), name).expand(3, *shape)):
        x = torch.randn(3, 4, shape[1])
        y = torch.bmm(x, w.mT)
        assert y.shape == (3, 4, shape[0]) and not y.any()
        assert w[torch.tensor([2, 0])].shape == (2, *shape)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 7), (5, 1), (1, 7)], ids=str)
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4-weight-only"])
def test_a_bias_of_a_linear_layer_broadcasts(name, shape):
    w, x, bias = mx.quantize_(torch.nn.Linear(32, 7), name).weight, torch.randn(5, 32), torch.randn(shape)
    with torch.no_grad():
        expected = F.linear(x, w) + bias
        for _ in range(3):  # the later calls may take the launch of the first one
            torch.testing.assert_close(F.linear(x, w, bias), expected)
