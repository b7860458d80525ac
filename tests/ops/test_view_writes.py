"""Views that cut blocks: they read what the MXTensor stores, and write to it or say why not."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mxtensor as mx
import mxtensor.te as te
from mxtensor.tensor.dequantized_view import DequantizedView
from tests.helpers.compare import same_bytes

FORMATS = ["mxfp8", "mxfp4", "nvfp4", "mxfp8[32x32]", "float8_row", "float8_tensor"]
WRITES = {
    "fill_diagonal_": lambda w: w.fill_diagonal_(9.0),
    "diagonal": lambda w: torch.diagonal(w).fill_(3.0),
    "flat": lambda w: w.view(-1)[7:9].fill_(2.0),
    "column": lambda w: w[:, 3].mul_(-2.0),
    "row": lambda w: w[0].mul_(2.0),
    "iterate": lambda w: list(w)[5].mul_(2.0),
    "rows of the transpose": lambda w: w.T.__setitem__(slice(3, 5), 1.5),
    "unbind": lambda w: w.unbind(1)[5].add_(1.0),
    "chunk": lambda w: w.chunk(5, 1)[3].mul_(4.0),
    "split": lambda w: w.split([3, 40, 21], 1)[1].zero_(),
    "unsafe_split": lambda w: w.unsafe_split(5, 1)[1].zero_(),
    "tensor_split": lambda w: w.tensor_split(7, 1)[2].neg_(),
    "narrow": lambda w: w.narrow(1, 3, 4).copy_(torch.arange(32.0).view(8, 4)),
    "select": lambda w: w.select(1, 63).fill_(0.25),
    "unfold": lambda w: w.unfold(1, 3, 3)[2].add_(1.0),
    "movedim": lambda w: w.view(2, 4, 64).movedim(2, 0)[3].fill_(1.0),
    "flatten": lambda w: w.flatten()[100:101].fill_(5.0),
    "reshape": lambda w: w.reshape(16, 32)[3, 1:4].fill_(5.0),
    "unflatten": lambda w: w.unflatten(1, (16, 4))[:, 2].add_(1.0),
    "view as": lambda w: w.view_as(w)[2:3, 5:].mul_(0.5),
    "data": lambda w: w.data[2:4].data.mul_(100.0),
    "detached": lambda w: w.detach()[1:5][:, 3:9].t()[1].mul_(-3.0),
    "transposed": lambda w: w.t().mul_(3.3),
    "rows of a transpose": lambda w: w.t()[3:5].mul_(3.0),
    "a dimension more": lambda w: w.unsqueeze(0)[0, :, 5].fill_(2.0),
    "out": lambda w: torch.add(torch.ones(8), 2, out=w[:, 3]),
    "a list": lambda w: torch._foreach_mul_([w[:, 1]], 2.0),
    "advanced indices": lambda w: w[:, 3:40].__setitem__(torch.tensor([1, 2]), 7.0),
    "item": lambda w: w[2].__setitem__(5, 3.0),
    "a cut view's item": lambda w: w[:, 3:20].__setitem__((2, slice(1, 4)), 3.0),
    "swapped in place": lambda w: w.data.t_()[2].fill_(1.0),
}


def tensor(format, orientation="rowwise", shape=(8, 64), dtype=torch.float32):
    return mx.quantize(torch.randn(shape).to(dtype), format, orientation=orientation)


def assert_base_is(w, dense, orientation):
    expected = mx.quantize(dense, w.format, orientation=orientation)
    assert torch.equal(w.dequantize(), expected.dequantize())
    if len(w.operands) > 1:
        assert torch.equal(w.t().dequantize(), expected.t().dequantize())


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("orientation", ["rowwise", "columnwise", "both"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.pairs
def test_a_write_to_a_view_is_the_write_to_the_values(name, orientation, format, dtype):
    w = tensor(format, orientation, dtype=dtype)
    dense, pointers = w.dequantize(), [t.data_ptr() for t in w.components]
    write = WRITES[name] if dtype is torch.float32 or name != "out" else WRITES["column"]
    with torch.no_grad():
        write(w), write(dense)
    assert_base_is(w, dense, orientation)
    assert [t.data_ptr() for t in w.components] == pointers


def test_initializers_write_every_value():
    for init, shape in ((nn.init.dirac_, (8, 8, 32)), (nn.init.eye_, (8, 64)), (nn.init.zeros_, (8, 64))):
        w = tensor("mxfp8", shape=shape)
        assert torch.equal(init(w).dequantize(), init(torch.empty(shape)))


def test_a_loop_over_rows_or_columns_writes_each():
    for orientation in ("rowwise", "columnwise", "both"):
        for dim in (0, 1):
            w = tensor("mxfp8", orientation)
            dense = w.dequantize()
            for row in w.unbind(dim):
                row.mul_(2.0)
            assert torch.equal(w.dequantize(), dense * 2)


def test_several_views_in_one_call_are_all_written():
    w = tensor("mxfp8")
    dense = w.dequantize()
    for t in (w, dense):
        torch._foreach_mul_([t[:, 1], t[:, 2], t[3:5, 8:]], 2.0)
    assert_base_is(w, dense, "rowwise")
    with pytest.raises(ValueError, match=r"the result has shape \(4,\), and out= is a view \(8,\) of an MXTensor"):
        torch.add(torch.ones(4), 1, out=w[:, 3])


@pytest.mark.parametrize("orientation", ["rowwise", "both"])
def test_a_view_follows_every_write_to_its_base(orientation):
    w = tensor("nvfp4", orientation)
    view, inner = w[:, 3:9], w[:, 3:9][1]
    for write in (
        lambda: w.mul_(2), lambda: w.data.fill_(3.0), lambda: w[:, 5].fill_(1.0), lambda: w.t()[4].neg_(),
        lambda: w.rowwise.data.view(torch.uint8).zero_(),
    ):  # fmt: skip
        write()
        expected = w[:, 3:9].dequantize()  # of the copy that the view has
        assert torch.equal(view + 0, expected) and torch.equal(inner + 0, expected[1])
        assert view.tolist() == expected.tolist()
    other = tensor("nvfp4")
    read = view.clone()
    other.fill_(1.0)
    assert torch.equal(view, read)


def test_a_view_is_plain_to_everything_else():
    w = tensor("mxfp8")
    view, plain = w[:, 3:35], w.dequantize()[:, 3:35]
    assert type(view) is DequantizedView and view.stride() == plain.stride() and view.dtype is plain.dtype
    x = torch.randn(2, 32)
    for read in (
        lambda t: t + 1,
        lambda t: F.linear(x, t),
        lambda t: t.sum(0),
        lambda t: t[torch.tensor([2, 1])],
        lambda t: t.clone(),
    ):
        got = read(view)
        assert type(got) is torch.Tensor and torch.equal(got, read(plain))
    assert (view.numpy() == plain.numpy()).all() and (view.__array__() == plain.numpy()).all()
    assert same_bytes(mx.quantize(view, "mxfp4"), mx.quantize(plain, "mxfp4"))
    for copied in (copy.deepcopy(view), pickle.loads(pickle.dumps(view))):
        assert type(copied) is torch.Tensor and torch.equal(copied, plain)
        copied.zero_()
    file = io.BytesIO()
    torch.save({"view": view}, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["view"], plain)
    assert torch.equal(w.dequantize()[:, 3:35], plain)


def test_gradients_flow_through_a_view():
    p = nn.Parameter(tensor("mxfp8"))
    twin = p.dequantize().detach().requires_grad_()
    for t in (p, twin):
        (t[:, 3].square().sum() + t.diagonal().sum() + t[2, 5:9].prod()).backward()
    assert torch.equal(p.grad, twin.grad)


def test_a_parameter_that_is_a_view_trains_its_base():
    w = tensor("mxfp8")
    before, p = w.dequantize(), nn.Parameter(w[:, 3:9])
    assert isinstance(p, nn.Parameter) and type(copy.deepcopy(p)) is nn.Parameter
    p.sum().backward()
    torch.optim.SGD([p], lr=0.5).step()
    dense = before.clone()
    dense[:, 3:9] -= 0.5
    assert_base_is(w, dense, "rowwise")
    layer = nn.Linear(6, 8)
    layer.weight = p
    layer.half()  # exchanges the data of the parameter
    original = w.dequantize()
    with torch.no_grad():
        layer.weight.zero_()
    assert layer.weight.dtype is torch.float16 and not layer.weight.any() and torch.equal(w.dequantize(), original)


def test_inference_tensors_are_written_in_inference_mode():
    with torch.inference_mode():
        for format in ("mxfp8", "nvfp4"):
            for orientation in ("rowwise", "both"):
                w = tensor(format, orientation)
                dense = w.dequantize()
                view = w[:, 5]
                for t in (w, dense):
                    t[2:4].mul_(3.0)
                dense = mx.quantize(dense, format).dequantize()
                assert torch.equal(view.dequantize(), w[:, 5].dequantize())
                view.fill_(2.0)
                dense[:, 5].fill_(2.0)
                assert_base_is(w, dense, orientation)


def test_what_cannot_be_written_through_says_so():
    w = tensor("mxfp8")
    view = w[:, 3]
    before = w.dequantize()
    for op, said in (
        (lambda: view.resize_(20), "its values have a memory and a shape of their own"),
        (lambda: view.unsqueeze_(0), "its values have a memory and a shape of their own"),
        (lambda: view.set_(torch.ones(8)), "its values have a memory and a shape of their own"),
        (lambda: torch._neg_view(w).fill_(1.0), "or a lazy minus sign has separated it from the tensor"),
        (lambda: w.set_(torch.ones(8, 64).untyped_storage()), "its storage is codes and scales"),
        (lambda: w.resize_as_(torch.ones(3)), "its blocks cannot store more values"),
    ):
        with pytest.raises(NotImplementedError, match=said):
            op()
    assert w.resize_as_(before) is w and view.resize_(8) is view
    with mx.strict(), pytest.raises(NotImplementedError, match="writes a view that cuts blocks"):
        view.fill_(1.0)
    assert torch.equal(w.dequantize(), before)
    with mx.explain() as log:
        view.fill_(1.0)
    assert ("aten.fill_.Scalar", "requantized") in [(e.spec.op, e.kernel) for e in log.entries]


def test_running_statistics_are_written():
    mean, var = (mx.quantize(torch.rand(64), "mxfp8") for _ in range(2))
    plain, x = (mean.dequantize(), var.dequantize()), torch.randn(16, 64)
    got = F.batch_norm(x, mean, var, training=True)
    assert torch.equal(got, F.batch_norm(x, *plain, training=True))
    for t, values in zip((mean, var), plain, strict=True):
        assert torch.equal(t.dequantize(), mx.quantize(values, "mxfp8").dequantize())


# ---------------------------------------------------------------------------------------------- compiled


def fill_whole(w):
    w.fill_(2.0)
    return w + 0


def fill_column(w):
    w[:, 3].fill_(2.0)
    w.diagonal().mul_(2.0)
    return w + 0


def fill_rows(w):
    w[2:4].mul_(3.0)
    return w[:, 1] + 0


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("function", [fill_whole, fill_column, fill_rows])
@pytest.mark.parametrize(("format", "orientation"), [("mxfp8", "rowwise"), ("nvfp4", "both"), ("mxfp4", "columnwise")])
def test_a_compiled_write_is_the_eager_one(function, format, orientation):
    torch._dynamo.reset()
    w = tensor(format, orientation)
    twin, view = w.clone(), w[:, 3]
    got = torch.compile(function, backend="aot_eager", fullgraph=True)(w)
    assert torch.equal(got, function(twin)) and same_bytes(w, twin)
    assert torch.equal(view.dequantize(), w[:, 3].dequantize())


@pytest.mark.parametrize("alias", [torch.Tensor.detach, lambda w: w.view(w.shape), lambda w: w.t().t()])
def test_a_write_to_all_values_reaches_the_copy_after_the_hadamard_transform(alias):
    """``detach`` has this copy, and a view has not."""
    w = te.NVFP4Quantizer(with_rht=True)(torch.randn(64, 96).bfloat16())
    twin = w.clone()
    part = alias(w)
    part.copy_(part * 1.5)
    twin.copy_(twin * 1.5)
    rotated, expected = w._rotated.operand, twin._rotated.operand
    assert torch.equal(rotated.data, expected.data) and torch.equal(rotated.scale, expected.scale)
    assert torch.equal(w.dequantize(), twin.dequantize())


@pytest.mark.parametrize("alias", [torch.Tensor.detach, lambda w: w.view(w.shape)], ids=["detach", "view"])
@pytest.mark.parametrize(("format", "orientation"), [("mxfp8", "rowwise"), ("mxfp8", "both"), ("nvfp4", "both")])
def test_a_graph_writes_an_alias_of_the_whole_tensor(format, orientation, alias):
    """torchao's optimizers pass ``p.detach()`` to a compiled step: it has every value and copy of ``p``."""
    torch._dynamo.reset()
    w = tensor(format, orientation)
    twin, before = w.clone(), w.dequantize()
    torch.compile(lambda v: v.copy_(v * 1.5), backend="aot_eager", fullgraph=True)(alias(w))
    twin.copy_(twin * 1.5)
    assert same_bytes(w, twin) and not torch.equal(w.dequantize(), before)


def test_a_graph_that_has_only_the_view_reads_it_and_refuses_to_write():
    torch._dynamo.reset()
    w = tensor("nvfp4")
    compiled = lambda function: torch.compile(function, backend="aot_eager", fullgraph=True)  # noqa: E731
    double, view = compiled(lambda v: v * 2), w[:, 3]
    for _ in range(2):
        assert torch.equal(double(view), w.dequantize()[:, 3] * 2)
        w.add_(1.0)
    returned = compiled(lambda w: w[:, 3])(w)
    assert torch.equal(returned, w.dequantize()[:, 3])
    before = w.dequantize()
    with pytest.raises(NotImplementedError, match=r"torch\.compile or a lazy minus sign has separated it"):
        returned.fill_(1.0)
    for part in (w[:, 3], w[2:4]):
        with pytest.raises(Exception, match=r"(cannot write to this view|cannot be written in a graph that has only)"):
            compiled(lambda v: v.mul_(2))(part)
    with pytest.raises(Exception, match="a graph cannot return a view"):
        compiled(lambda w: (w[:, 3], w.mul_(2))[0])(w)
    assert torch.equal(w.dequantize(), before)
