"""Bags of embeddings read the rows that they need; results and gradients are those of the dequantized table."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mxtensor as mx

ROWS, COLS = 48, 96
MODES = ("sum", "mean", "max")
PADDING = 7
OFFSETS = [0, 5, 5, 9, 12, 20]
"""The second bag is empty; the fourth has padding only; the last bag is empty if the last offset is an end."""


def bags(dtype=torch.int64):
    """(indices, offsets), with rows that occur more than once."""
    indices = torch.randint(0, ROWS, (20,), dtype=dtype)
    indices[[1, 9, 10, 11, 13]], indices[[14, 15]] = PADDING, 21
    return indices, torch.tensor(OFFSETS, dtype=dtype)


def lookups(log):
    """The rows of each table that was dequantized."""
    return [entry.spec.shapes[0][0] for entry in log.entries if entry.spec.op == "dequantize"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", [*mx.FORMATS, "mxfp8[16x16]"])
def test_bags_decode_only_their_rows(format, dtype):
    w = mx.quantize(torch.randn(ROWS, COLS, dtype=dtype) * torch.linspace(0.1, 9, ROWS, dtype=dtype)[:, None], format)
    dense = w.dequantize()
    for mode, padding, ends, kind in itertools.product(
        MODES, (None, PADDING, PADDING - ROWS), (False, True), (torch.int64, torch.int32)
    ):
        indices, offsets = bags(kind)
        weights = torch.rand(20, dtype=dtype) if mode == "sum" and ends else None
        options = {
            "mode": mode, "padding_idx": padding, "include_last_offset": ends, "per_sample_weights": weights
        }  # fmt: skip
        with mx.strict(), mx.explain() as log:
            got = F.embedding_bag(indices, w, offsets, **options)
        assert type(got) is torch.Tensor and got.dtype is dtype
        assert torch.equal(got, F.embedding_bag(indices, dense, offsets, **options)), options
        assert lookups(log) == [20 + (padding is not None)]


@pytest.mark.parametrize("padding", [-1, PADDING])
@pytest.mark.parametrize("mode", range(len(MODES)), ids=MODES)
@pytest.mark.parametrize("op", [torch.ops.aten._embedding_bag, torch.ops.aten._embedding_bag_forward_only], ids=str)
def test_every_result_of_the_op_is_that_of_the_dequantized_table(op, mode, padding):
    w, (indices, offsets) = mx.quantize(torch.randn(ROWS, COLS), "mxfp8"), bags()
    got, expected = (
        op(t, indices, offsets, mode=mode, padding_idx=padding) for t in (w, w.dequantize())
    )  # keywords: the other arguments have the defaults of the schema
    assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))


@pytest.mark.parametrize("padding", [None, PADDING])
def test_the_gradient_of_sample_weights_decodes_only_the_rows(padding):
    w, (indices, offsets) = mx.quantize(torch.randn(ROWS, COLS), "mxfp4"), bags()
    weights, grad, found = torch.rand(20), torch.randn(len(OFFSETS), COLS), []
    for table in (w, w.dequantize()):
        p = weights.clone().requires_grad_()
        with mx.strict(), mx.explain() as log:
            y = F.embedding_bag(indices, table, offsets, mode="sum", per_sample_weights=p, padding_idx=padding)
            y.backward(grad)
        found.append(p.grad)
        assert lookups(log) == ([20 + (padding is not None)] * 2 if table is w else [])
    assert torch.equal(*found) and found[0].ne(0).any()


@pytest.mark.parametrize(
    ("mode", "sparse"), [("sum", False), ("sum", True), ("mean", False), ("mean", True), ("max", False)]
)
def test_gradients_of_a_quantized_table(mode, sparse):
    w, (indices, offsets) = nn.Parameter(mx.quantize(torch.randn(ROWS, COLS), "mxfp8")), bags()
    dense, grad = w.detach().dequantize().requires_grad_(), torch.randn(len(OFFSETS), COLS)
    for table in (w, dense):
        F.embedding_bag(indices, table, offsets, mode=mode, sparse=sparse, padding_idx=PADDING).backward(grad)
    assert type(w.grad) is torch.Tensor and torch.equal(w.grad.to_dense(), dense.grad.to_dense())


def test_a_table_that_is_stored_columnwise_is_dequantized_with_the_reason():
    w = mx.quantize(torch.randn(ROWS, COLS), "mxfp8", orientation="columnwise")
    p, indices = torch.rand(3, 4, requires_grad=True), torch.arange(12).view(3, 4)
    with mx.explain() as log:
        y = F.embedding_bag(indices, w, mode="sum", per_sample_weights=p)
        y.sum().backward()
    assert torch.equal(y, F.embedding_bag(indices, w.dequantize(), mode="sum", per_sample_weights=p))
    read = [entry for entry in log.entries if entry.kernel == "dequantized"]
    assert [entry.spec.op for entry in read] == [
        "aten._embedding_bag.default", "aten._embedding_bag_per_sample_weights_backward.default"
    ]  # fmt: skip
    assert all(entry.refusals["quantized"].startswith("is stored columnwise") for entry in read)


def test_an_index_that_is_not_a_row_raises():
    w = mx.quantize(torch.randn(ROWS, COLS), "mxfp8")
    for index in (ROWS, -1):
        with pytest.raises(IndexError):
            F.embedding_bag(torch.tensor([[index]]), w)


def test_no_bag_and_no_index():
    w, none = mx.quantize(torch.randn(ROWS, COLS), "mxfp8"), torch.zeros(0, dtype=torch.int64)
    for mode in MODES:
        assert F.embedding_bag(none, w, none, mode=mode).shape == (0, COLS)
        assert torch.equal(F.embedding_bag(none, w, none.new_zeros(2), mode=mode), torch.zeros(2, COLS))
