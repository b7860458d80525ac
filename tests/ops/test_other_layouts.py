"""Products with sparse and nested tensors: torch's results of the dequantized values, logged, or torch's errors."""

import pytest
import torch
import torch.nn.functional as F

import mxtensor as mx

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]
X, PIECES = torch.randn(6, 96), [torch.randn(3, 96), torch.randn(5, 96)]
LAYOUTS = {
    "coo": lambda: X.to_sparse(),
    "csr": lambda: X.to_sparse_csr(),
    "csc": lambda: X.to_sparse_csc(),
    "bsr": lambda: X.to_sparse_bsr((2, 2)),
    "nested": lambda: torch.nested.nested_tensor(PIECES),
    "jagged": lambda: torch.nested.nested_tensor(PIECES, layout=torch.jagged),
}
BIAS = torch.randn(64)
PRODUCTS = {
    "linear": lambda x, w: F.linear(x, w),
    "linear with a bias": lambda x, w: F.linear(x, w, BIAS),
    "mm": lambda x, w: torch.mm(x, w.t()),
    "addmm": lambda x, w: torch.addmm(BIAS, x, w.t()),
    "@": lambda x, w: x @ w.t(),
    "matmul": lambda x, w: torch.matmul(x, w.t()),
    "on the left": lambda x, w: w @ x.t(),
}
MODES = {"gradients": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


def values(t):
    if t.is_nested:
        return torch.cat([*t.unbind()])
    return t if t.layout is torch.strided else t.to_dense()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.pairs
def test_products_of_other_layouts_are_those_of_torch(layout, product, mode):
    w = mx.quantize(torch.randn(64, 96), "mxfp8")
    plain, call = w.dequantize(), PRODUCTS[product]
    with MODES[mode]():
        x = LAYOUTS[layout]()
        try:
            expected = call(x, plain)
        except (RuntimeError, NotImplementedError) as of_torch:
            with pytest.raises(type(of_torch)) as error:
                call(x, w)
            assert str(error.value)[:30] == str(of_torch)[:30]
            return
        out = call(x, w)
        assert (out.layout, out.is_nested) == (expected.layout, expected.is_nested)
        torch.testing.assert_close(values(out), values(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["coo", "csr", "nested"])
def test_products_of_other_layouts_are_logged_and_refused_under_strict(layout):
    w, x = mx.quantize(torch.randn(64, 96), "mxfp8"), LAYOUTS[layout]()
    with mx.explain() as log, torch.no_grad():
        F.linear(x, w)
    first = log.entries[0]
    assert (first.spec.op, first.kernel) == ("aten.linear.default", "dequantized")
    assert first.refusals == {"quantized": "the other operand is sparse or nested"}
    with mx.strict(), torch.no_grad(), pytest.raises(NotImplementedError, match="operand is sparse or nested"):
        F.linear(x, w)


def test_a_stack_of_sparse_matrices_is_multiplied():
    x, w = torch.randn(2, 4, 96), mx.quantize(torch.randn(2, 64, 96), "mxfp8")
    out = torch.bmm(x.to_sparse(), w.transpose(1, 2))
    torch.testing.assert_close(out, torch.bmm(x, w.dequantize().transpose(1, 2)), rtol=1e-5, atol=1e-5)


def test_gradients_of_sparse_inputs_are_those_of_torch():
    w, x = mx.quantize(torch.randn(64, 96), "mxfp8"), X.to_sparse()
    one, two = x.clone().requires_grad_(), x.clone().requires_grad_()
    weights = torch.randn(6, 64)
    (F.linear(one, w) * weights).sum().backward()
    (F.linear(two, w.dequantize()) * weights).sum().backward()
    assert torch.equal(one.grad.to_dense(), two.grad.to_dense())
    assert one.grad.to_dense().abs().max() > 0
