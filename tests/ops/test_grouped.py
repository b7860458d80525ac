"""Products with stacks of codes that are read once: ``bmm`` of few rows, and matrices picked out of a stack."""

import pytest
import torch

import mxtensor as mx
from mxtensor.numerics.operand import Operand
from mxtensor.tensor.mxtensor import MXTensor

FORMATS = ["mxfp8", "mxfp6", "mxfp4", "mxint8", "nvfp4", "float8_row"]


def stack_of(name, *shape, orientation="rowwise", dtype=torch.float32):
    return mx.quantize(torch.randn(shape).to(dtype), name, orientation=orientation)


def kernels(log):
    return [entry.kernel for entry in log.entries if entry.spec.op == "bmm"]


def assert_close(out, expected, size):
    assert out.shape == expected.shape and out.is_contiguous()
    assert ((out.double() - expected).abs() <= 2.0**-18 * size + 2.0**-8 * expected.abs()).all()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", FORMATS)
def test_bmm_of_few_rows_reads_the_codes_on_either_side(name, rows):
    w, x = stack_of(name, 4, 40, 64), torch.randn(4, rows, 64)
    values = w.dequantize().double()
    expected, size = x.double() @ values.mT, x.double().abs() @ values.abs().mT
    with torch.no_grad(), mx.explain() as log:
        assert_close(torch.bmm(x, w.mT), expected, size)
        assert_close(torch.bmm(w, x.mT), expected.mT, size.mT)
    assert kernels(log) == ["cpu_codes"] * 2


def test_a_cast_of_activations_is_that_of_the_whole_product():
    operand = stack_of("mxfp8", 4, 40, 64).rowwise
    w = MXTensor(operand, None, mx.LinearRecipe.inference("mxfp8", "nvfp4"), torch.float32)
    x = torch.randn(4, 2, 64)
    rounded = mx.quantize(x.view(8, 64), "nvfp4").dequantize().double().view(x.shape)
    values = w.dequantize().double()
    with torch.no_grad():
        assert_close(torch.bmm(x, w.mT), rounded @ values.mT, rounded.abs() @ values.abs().mT)


def test_a_kernel_that_is_asked_for_runs():
    w, x = stack_of("mxfp8", 4, 40, 64), torch.randn(4, 1, 64)
    with torch.no_grad(), mx.explain() as log, mx.kernels("emulated"):
        torch.bmm(x, w.mT)
    assert kernels(log) == ["emulated"]
    with pytest.raises(RuntimeError, match="bmm"):
        torch.bmm(x[:3], w.mT)


def test_gradients_of_the_rows_are_those_of_the_values():
    w, x = stack_of("mxfp8", 4, 40, 64), torch.randn(4, 2, 64, requires_grad=True)
    g = torch.randn(4, 2, 40)
    (found,) = torch.autograd.grad(torch.bmm(x, w.mT), x, g)
    torch.testing.assert_close(found, g @ w.dequantize(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("index", [[0, 3, 3, 1], [-1, 0], [2], []], ids=str)
@pytest.mark.parametrize("orientation", ["rowwise", "columnwise", "both"])
@pytest.mark.parametrize("name", ["mxfp8", "mxfp6", "mxfp4", "nvfp4", "mxfp8[32x32]", "float8_row"])
def test_matrices_of_a_stack_are_picked_with_their_codes(name, orientation, index):
    w = stack_of(name, 4, 32, 96, orientation=orientation)
    index = torch.tensor(index, dtype=torch.int64)
    picked = w[index]
    assert type(picked) is MXTensor and (picked._rowwise is None) == (w._rowwise is None)
    assert torch.equal(picked.dequantize(), w.dequantize()[index])
    for got, whole in zip(picked.operands, w.operands, strict=True):
        for one, all_of_them in zip(got.tensors[:2], whole.tensors[:2], strict=True):
            assert torch.equal(one.view(torch.uint8), all_of_them.view(torch.uint8)[index])
    with pytest.raises(IndexError):
        w[torch.tensor([4])]


def test_a_matrix_that_is_not_a_multiple_of_eight_bytes_is_picked():
    codes, scales = torch.arange(3 * 3 * 5, dtype=torch.uint8).view(3, 3, 5), torch.full((3, 3, 1), 127).byte()
    operand = Operand(codes.view(torch.float8_e4m3fn), scales, None, mx.get_format("mxfp8"), (3, 3, 5))
    w = MXTensor(operand, None, mx.LinearRecipe.inference("mxfp8"), torch.float32)
    picked = w[torch.tensor([2, 0])]
    assert torch.equal(picked._rowwise.data.view(torch.uint8), codes[[2, 0]])


@pytest.mark.exhaustive
def test_experts_of_each_token_are_one_graph_with_the_bits_of_eager_code():
    from torch._inductor.utils import run_and_get_code

    w = stack_of("mxfp4", 6, 48, 64, dtype=torch.bfloat16)

    def experts(x, index):
        return torch.bmm(w[index], x.unsqueeze(-1)).squeeze(-1)

    x, index = torch.randn(5, 64).bfloat16(), torch.tensor([5, 0, 2, 2, 1])
    with torch.no_grad():
        got, code = run_and_get_code(torch.compile(experts, fullgraph=True), x, index)
        assert torch.equal(got, experts(x, index)) and "mxtensor.cpu_linear_groups.default" in "".join(code)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("ends", [torch.int32, torch.int64])
@pytest.mark.parametrize("casts", [("mxfp8", "mxfp8"), ("nvfp4", "nvfp4"), ("mxfp4",)])
def test_the_op_that_transformers_compiles_in_place_of_grouped_mm_is_the_same_product(casts, ends, dtype):
    pytest.importorskip("transformers.integrations.moe")
    torch._dynamo.reset()
    w = MXTensor(stack_of(casts[0], 3, 40, 64).rowwise, None, mx.LinearRecipe.inference(*casts), dtype)
    x, offs = torch.randn(9, 64, dtype=dtype), torch.tensor([4, 4, 9])
    fallback = torch.ops.transformers.grouped_mm_fallback

    def run(x, w, offs):
        return fallback(x, w.mT, offs)

    with torch.no_grad(), mx.strict(), mx.explain() as log:
        expected = torch._grouped_mm(x, w.mT, offs=offs.to(torch.int32))
        assert torch.equal(run(x, w, offs.to(ends)), expected)
        assert torch.equal(torch.compile(run, fullgraph=True, backend="aot_eager")(x, w, offs.to(ends)), expected)
    assert {entry.spec.op for entry in log.entries if len(entry.spec.shapes) == 2} == {"_grouped_mm"}


def test_the_op_of_transformers_has_the_values_of_a_stack_that_it_cannot_multiply():
    pytest.importorskip("transformers.integrations.moe")
    x, w, offs = mx.quantize(torch.randn(9, 64), "mxfp8"), torch.randn(3, 64, 40), torch.tensor([4, 4, 9])
    fallback = torch.ops.transformers.grouped_mm_fallback
    with torch.no_grad():
        assert torch.equal(fallback(x, w, offs), fallback(x.dequantize(), w, offs))
