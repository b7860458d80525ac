"""Views told by size, strides and storage offset: what a compiled graph hands out of its inputs is made so."""

import pytest
import torch
from torch import nn

import mxtensor as mx
from mxtensor.numerics.cast import Cast
from mxtensor.numerics.operand import Operand
from mxtensor.recipe.linear_recipe import LinearRecipe
from mxtensor.tensor.dequantized_view import DequantizedView
from mxtensor.tensor.mxtensor import MXTensor
from mxtensor.tensor.quantize_as import quantize_as

FORMATS = ["mxfp8", "mxfp4", "mxfp6", "mxint8", "nvfp4", "float8_row", "float8_tensor", "mxfp8[32x32]"]
SHAPE = (5, 96, 128)
ROWS = {
    "whole": lambda w: w,
    "one matrix": lambda w: w[3],
    "matrices": lambda w: w[1:3],
    "last matrix, transposed": lambda w: w[4].t(),
    "rows of one": lambda w: w[2, 32:96],
    "rows of all": lambda w: w[:, 64:],
    "a dimension more": lambda w: w[3].unsqueeze(0),
    "matrices transposed": lambda w: w[2:4].transpose(1, 2),
    "rows in another shape": lambda w: w[3].unflatten(0, (2, 48)),
    "matrices in another shape": lambda w: w[1:3].flatten(0, 1),
}
BLOCKS = {
    "columns": lambda w: w[:, :, 32:64],
    "a tile": lambda w: w[1, 32:64, 64:],
}


def same(a, b):
    assert type(a) is type(b) and a.shape == b.shape and a.stride() == b.stride()
    if not isinstance(a, mx.MXTensor):
        return torch.equal(a, b)
    for mine, other in ((a._rowwise, b._rowwise), (a._columnwise, b._columnwise)):
        assert (mine is None) == (other is None)
        for x, y in zip(() if mine is None else mine.tensors, () if other is None else other.tensors, strict=True):
            assert x.data_ptr() == y.data_ptr() and x.shape == y.shape
            assert all(n == 1 or i == j for n, i, j in zip(x.shape, x.stride(), y.stride(), strict=True))
    return True


def remade(w, v, name):
    """The view of ``w`` with the numbers of ``v``; None where they fit another as well, which slices of blocks may."""
    try:
        return w.as_strided(v.size(), v.stride(), v.storage_offset())
    except NotImplementedError as error:
        assert "more than one view" in str(error) and name in ("columns", "a tile")
        return None


def views(format):
    fmt = mx.quantize(torch.ones(1, 1, 1), format).format
    cut = fmt.block[1] != 32 or fmt.block[0] == -1
    return ROWS if cut or fmt.element.packing == (4, 3) else ROWS | BLOCKS


@pytest.mark.parametrize("orientation", ["rowwise", "columnwise", "both"])
@pytest.mark.parametrize("format", FORMATS)
def test_numbers_of_a_view_give_the_view(format, orientation):
    dense = torch.randn(SHAPE)
    w = mx.quantize(dense, format, orientation=orientation)
    for name, view in views(format).items():
        v = view(w)
        if not isinstance(v, MXTensor):
            continue
        assert v.storage_offset() == view(dense).storage_offset(), name
        replayed = remade(w, v, name)
        if replayed is None:
            assert orientation != "rowwise"
            continue
        assert torch.equal(replayed.dequantize(), v.dequantize()), name
        assert replayed.storage_offset() == v.storage_offset()
        assert type(replayed) is MXTensor and replayed.operands[0].data.data_ptr() == v.operands[0].data.data_ptr()


def handed_out(v):
    """``v`` as a compiled graph returns it: made of its components."""
    names, context = v.__tensor_flatten__()
    return MXTensor.__tensor_unflatten__({n: getattr(v, n) for n in names}, context, v.shape, v.stride())


@pytest.mark.parametrize("begin", [0, 48])
@pytest.mark.parametrize("orientation", ["rowwise", "columnwise"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_view_is_found_by_where_its_codes_begin(format, orientation, begin):
    """Also if the codes of the tensor follow others in one buffer, like those that FSDP2 gathers."""
    w = mx.quantize(torch.randn(5, 96, 127), format, orientation=orientation)  # packed codes have a tail

    def moved(operand):
        buffer = torch.zeros(begin + operand.data.numel(), dtype=torch.uint8)
        data = buffer[begin:].view(operand.data.shape)
        data.copy_(operand.data.view(torch.uint8))
        return Operand(
            data.view(operand.data.dtype), operand.scale, operand.global_scale, operand.format, operand.shape
        )

    w = w.replace(*(None if o is None else moved(o) for o in (w._rowwise, w._columnwise)), tuple(w.shape), w.stride())
    seen = 0
    for name, view in (ROWS | {"columns": lambda w: w[:, :, 32:64]}).items():
        v = view(w)
        if isinstance(v, MXTensor) and (orientation == "rowwise" or "shape" not in name):
            out = handed_out(v)
            replayed = remade(w, out, name)
            if replayed is None:
                assert begin and "float8" in format  # which are cut anywhere
                continue
            assert same(replayed, v), name
            seen += 1
    assert seen >= 5


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("format", ["mxfp8", "nvfp4", "mxfp6", "mxfp8[32x32]"])
@pytest.mark.parametrize("view", ["one matrix", "last matrix, transposed", "a dimension more", "rows in another shape"])
def test_a_compiled_function_returns_the_matrix_that_was_asked_for(format, view):
    def matrix(w, i):
        picked = w[i : i + 1] if view == "matrices in another shape" else w[i]
        return {"one matrix": lambda p: p, "last matrix, transposed": lambda p: p.t()}.get(
            view, lambda p: p.unsqueeze(0) if view == "a dimension more" else p.unflatten(0, (2, 48))
        )(picked)

    w = nn.Parameter(mx.quantize(torch.randn(SHAPE), format), requires_grad=False)
    compiled = torch.compile(matrix, backend="aot_eager")
    for i in (2, 0, 3, 1, 4, 0):
        with torch.no_grad():
            assert same(compiled(w, i), matrix(w, i)), i
    torch._dynamo.reset()


def test_any_expert_is_multiplied_by_one_compiled_graph():
    recipe = LinearRecipe.inference(Cast.of("mxfp8"), Cast.of("mxfp8"))
    up, down = (
        nn.Parameter(quantize_as(torch.randn(16, *s), recipe), requires_grad=False) for s in ((96, 64), (64, 96))
    )
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph

    def expert(x, i):
        return torch.nn.functional.linear(torch.nn.functional.linear(x, up[i]).relu(), down[i])

    compiled = torch.compile(expert, backend=backend, fullgraph=True)
    with torch.no_grad():
        for i in range(16):
            x = torch.randn(3, 64)
            assert torch.equal(compiled(x, i), expert(x, i))
    assert len(graphs) <= 3  # the index 0, 1, and any
    torch._dynamo.reset()


@pytest.mark.exhaustive
@pytest.mark.parametrize("index", [torch.Tensor.item, lambda i: i], ids=["number", "tensor"])
def test_a_matrix_of_experts_crosses_a_graph_break(index):
    recipe = LinearRecipe.inference(Cast.of("mxfp8"), Cast.of("mxfp8"))
    w = nn.Parameter(quantize_as(torch.randn(6, 96, 64), recipe), requires_grad=False)

    def forward(x, experts):
        out = []
        for i in experts:
            picked = w[index(i)]
            torch._dynamo.graph_break()
            out.append(torch.nn.functional.linear(x, picked))
        return torch.stack(out)

    x, experts = torch.randn(3, 64), torch.tensor([2, 0, 3, 1, 5, 4])
    with torch.no_grad():
        assert torch.equal(torch.compile(forward, backend="aot_eager")(x, experts), forward(x, experts))
    torch._dynamo.reset()


def test_values_are_read_where_no_block_is_whole():
    dense = torch.randn(8, 64)
    w = mx.quantize(dense, "mxfp8")
    for size, stride, offset in (((3, 4), (64, 2), 5), ((2, 2), (1, 2), 1), ((8, 8), (8, 1), 64)):
        got = w.as_strided(size, stride, offset)
        assert isinstance(got, DequantizedView)
        assert torch.equal(got, w.dequantize().as_strided(size, stride, offset))
    rows = w[2:6]
    assert torch.equal(rows.as_strided((2, 4), (64, 2), 131), w.dequantize().as_strided((2, 4), (64, 2), 131))


@pytest.mark.parametrize(
    "w",
    [
        mx.quantize(torch.randn(64, 64), "mxfp8", orientation="columnwise"),
        mx.quantize(torch.randn(64, 64), "mxfp8")[:, 32:],
    ],
)
def test_a_view_that_could_be_any_is_refused(w):
    with pytest.raises(NotImplementedError, match=r"no view of whole blocks of this MXTensor of shape"):
        w.as_strided((3, 3), (64, 1), 7 * 64 + 3)


@pytest.mark.parametrize("orientation", ["rowwise", "columnwise", "both"])
def test_a_view_of_a_view_with_holes_reads_and_writes_its_values(orientation):
    w = mx.quantize(torch.randn(40, 45), "float8_row" if orientation == "rowwise" else "mxfp8", orientation=orientation)
    for piece in (lambda t: t[:, 3:35], lambda t: t[:32, 3:35].t(), lambda t: t[32:, :32]):
        v, d = piece(w), piece(w.dequantize())
        assert isinstance(v, mx.MXTensor) and not v.is_contiguous()
        diagonal = (6,), (46,), 46 + v.storage_offset()
        got = v.as_strided(*diagonal)
        assert torch.equal(got, d.as_strided(*diagonal))
        got.zero_()
        assert torch.equal(v.as_strided(*diagonal), torch.zeros(6))
        with pytest.raises(NotImplementedError, match="no view of whole blocks"):
            v.as_strided((40,), (46,), v.storage_offset())
