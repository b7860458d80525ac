"""Structural ops: what torch does to a dense tensor, done to codes and scales without touching one.

For each: ``op(w)`` has the shape and strides of ``op(dense)``, dequantizes to ``op(w.dequantize())`` bit for bit, and
shares memory where torch's result is a view. A tensor with both copies, which differ by their rounding, does to each
what it would do to that copy alone. An op that would cut a block gives plain values.
"""

import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import mxtensor as mx
from mxtensor.tensor.dequantized_view import DequantizedView
from mxtensor.training.training_weight import values_of
from tests.helpers.compare import components_of

aten = torch.ops.aten
FORMATS = [*mx.FORMATS, "mxfp4[32x32]", "mxfp6[16x16]"]
NARROW = [name for name in mx.FORMATS if mx.FORMATS[name].block[0] == 1 and mx.FORMATS[name].block[1] > 0]


def as_list(result):
    return list(result) if isinstance(result, (tuple, list)) else [result]


def memory(w):
    return {t.untyped_storage().data_ptr() for t in components_of(w)}


def strides(t):
    """Strides that move: torch is free in those of dimensions of size 1."""
    return [(stride, size) for stride, size in zip(t.stride(), t.shape, strict=True) if size != 1]


def alone(w, side):
    """``w`` with one of its two copies."""
    rowwise, columnwise = (w.rowwise, None) if side is mx.Orientation.ROWWISE else (None, w.columnwise)
    return w.replace(rowwise, columnwise, tuple(w.shape), w.stride())


def assert_dense_op(op, w, dense):
    """``op`` of a tensor with one copy is ``op`` of the dense tensor. Returns both results as lists."""
    expected, got = as_list(op(dense)), as_list(op(w))
    assert len(got) == len(expected)
    for g, e in zip(got, expected, strict=True):
        assert isinstance(g, mx.MXTensor)
        assert (g.shape, strides(g), g.dtype) == (e.shape, strides(e), e.dtype)
        plain = g.dequantize()
        assert torch.equal(plain, e) and strides(plain) == strides(e.clone())
        (operand,) = g.operands
        assert operand.data.shape == operand.format.data_shape(operand.shape)
        assert operand.scale.shape == operand.format.scale_shape(operand.shape)
        if e.numel() and e.untyped_storage().data_ptr() == dense.untyped_storage().data_ptr():
            assert memory(g) <= memory(w)
    return got, expected


def copies_of(w):
    """``w`` as tensors with one copy each, beside the dense tensors they stand for."""
    sides = [mx.Orientation.ROWWISE, mx.Orientation.COLUMNWISE]
    ones = [w] if len(w.operands) == 1 else [alone(w, side) for side in sides]
    return [(one, one.dequantize()) for one in ones]


def assert_same_op(op, w, copies=None):
    """As ``assert_dense_op``; a tensor with two copies does to each what it does to that copy alone, where it can.

    Returns the result and its copies beside their dense tensors; raises NotImplementedError where no copy can follow.
    """
    before = [t.clone() for t in components_of(w)]
    followers, refusal = [], None
    for one, dense in copies or copies_of(w):
        try:
            with mx.strict():
                op(one)
        except NotImplementedError as error:
            assert " cuts " in str(error)
            refusal = error
        else:
            followers.append(assert_dense_op(op, one, dense))
    if not followers:
        with mx.strict(), pytest.raises(NotImplementedError, match=re.escape(str(refusal)[:30])):
            op(w)
        raise refusal
    result = as_list(op(w))
    for g, *ones in zip(result, *(got for got, _ in followers), strict=True):
        assert len(g.operands) == len(ones)
        for one in ones:
            assert (g.shape, g.stride()) == (one.shape, one.stride())
            saved = g if len(ones) == 1 else alone(g, one.orientation)
            assert torch.equal(saved.dequantize(), one.dequantize())
    assert all(torch.equal(a, b) for a, b in zip(components_of(w), before, strict=True))
    return result[-1], [(got[-1], expected[-1]) for got, expected in followers]


# ---------------------------------------------------------------------------------------------- what every format can

SIDES = ("rowwise", "columnwise", "both")
EVERYWHERE = {
    "detach": lambda w, n: w.detach(),
    "alias": lambda w, n: aten.alias.default(w),
    "clone": lambda w, n: w.clone(),
    "transpose": lambda w, n: w.transpose(1, 2),
    "mT": lambda w, n: w.mT,
    "permute_last_two": lambda w, n: w.permute(0, 2, 1),
    "permute_nothing": lambda w, n: w.permute(0, 1, 2),
    "there_and_back": lambda w, n: w.mT.mT,
    "transposed_contiguous": lambda w, n: w.mT.contiguous(),
    "unsqueeze": lambda w, n: w.unsqueeze(0),
    "unsqueeze_inside": lambda w, n: w.unsqueeze(1),
    "none_index": lambda w, n: w[None, :, None],
    "squeeze": lambda w, n: w[None, :, None].squeeze(),
    "squeeze_dim": lambda w, n: w.unsqueeze(0).squeeze(0),
    "squeeze_dims": lambda w, n: w[None, :, None].squeeze((0, 2)),
    "select": lambda w, n: w[2],
    "select_negative": lambda w, n: w.select(0, -1),
    "slice": lambda w, n: w[1:3],
    "slice_step": lambda w, n: w[::2],
    "slice_rows": lambda w, n: w[:, n:],
    "slice_columns": lambda w, n: w[..., n:],
    "slice_both": lambda w, n: w[2, :n, n:],
    "split": lambda w, n: w.split(3),
    "split_rows": lambda w, n: w.split(n, 1),
    "split_columns": lambda w, n: w.split(n, dim=-1),
    "split_sizes": lambda w, n: w.split([1, 3]),
    "chunk": lambda w, n: w.chunk(2, 1),
    "tensor_split": lambda w, n: w.tensor_split(3),
    "unbind": lambda w, n: w.unbind(),
    "view": lambda w, n: w.view(2, 2, 2 * n, 2 * n),
    "view_infers": lambda w, n: w.view(2, -1, 2 * n, 2 * n),
    "reshape": lambda w, n: w.reshape(2, 2, 2 * n, 2 * n),
    "unflatten_leading": lambda w, n: w.unflatten(0, (2, 2)),
    "expand": lambda w, n: w[:1].expand(3, 2 * n, 2 * n),
    "expand_fresh": lambda w, n: w.expand(5, -1, -1, -1),
    "expand_select": lambda w, n: w.expand(2, 4, 2 * n, 2 * n)[1],
}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", EVERYWHERE)
def test_every_format_and_orientation_follows(name, format):
    n = max(*mx.get_format(format).block, 32)  # whole blocks in halves of rows and columns

    def op(w):
        return EVERYWHERE[name](w, n)

    x = torch.randn(4, 2 * n, 2 * n)
    for orientation in SIDES:
        assert_same_op(op, mx.quantize(x, format, orientation=orientation))


@pytest.mark.parametrize("format", FORMATS)
def test_two_dimensions_turn(format):
    for orientation in SIDES:
        w = mx.quantize(torch.randn(128, 256), format, orientation=orientation)
        for op in (lambda w: w.t(), lambda w: w.T, lambda w: w.t().t(), lambda w: w.t().contiguous(), torch.t):
            assert_same_op(op, w)
        assert w.t().t().orientation is w.orientation
    vector = mx.quantize(torch.randn(128), format)
    assert_same_op(lambda w: w.t(), vector)


def test_transpose_swaps_the_copies_and_moves_no_byte():
    w = mx.quantize(torch.randn(64, 96), "mxfp8", orientation="both")
    transposed = w.t()
    assert transposed.rowwise.data.data_ptr() == w.columnwise.data.data_ptr()
    assert transposed.columnwise.data.data_ptr() == w.rowwise.data.data_ptr()
    assert transposed._base is w and not transposed.is_contiguous()


# ---------------------------------------------------------------------------------------------- 1 x n blocks

ROWS_ARE_FREE = {
    "swap_leading": lambda w: w.transpose(0, 1),
    "permute_leading": lambda w: w.permute(1, 0, 2),
    "permute_leading_contiguous": lambda w: w.permute(1, 0, 2).contiguous(),
    "permuted_view": lambda w: w.permute(1, 0, 2).unflatten(0, (16, 5)),
    "odd_rows": lambda w: w[:, 5:77],
    "every_third_row": lambda w: w[:, 1::3],
    "one_row_of_each": lambda w: w[:, -7],
    "uneven_row_split": lambda w: w.split(30, 1),
    "rows_as_a_list": lambda w: w.unbind(1),
    "all_rows": lambda w: w.view(-1, 256),
    "vector": lambda w: w.view(-1),
    "flatten_columns": lambda w: w.flatten(1),
    "columns_in_two": lambda w: w.unflatten(-1, (2, 128)),
    "columns_merged": lambda w: w.reshape(2, 20, 1024),
    "column_dimension_last": lambda w: w.unsqueeze(-1),
    "expand_rows": lambda w: w[:, :1].expand(2, 7, 256),
    "head_split": lambda w: w.view(2, 80, 2, 128).transpose(1, 2),
}


ROWS_OF_SEVERAL = {
    "swap_leading", "permute_leading", "permute_leading_contiguous", "permuted_view", "one_row_of_each",
    "rows_as_a_list", "all_rows", "vector", "flatten_columns",
}  # fmt: skip
"""Views of which a matrix has rows of several matrices, which have several global scales."""


@pytest.mark.parametrize("format", NARROW)
@pytest.mark.parametrize("name", ROWS_ARE_FREE)
def test_rows_of_narrow_blocks_are_free(name, format):
    if format == "nvfp4" and name in ROWS_OF_SEVERAL:
        return  # of several global scales: tests/ops/test_stack_scales.py
    for orientation in ("rowwise", "both"):
        assert_same_op(ROWS_ARE_FREE[name], mx.quantize(torch.randn(2, 80, 256), format, orientation=orientation))


@pytest.mark.parametrize("format", NARROW)
def test_columns_of_columnwise_blocks_are_free(format):
    w = mx.quantize(torch.randn(4, 256, 256), format, orientation="columnwise")
    one = () if format == "nvfp4" else (lambda w: w[..., -7],)  # a row of each matrix has several global scales
    for op in (lambda w: w[:, :, 5:77], lambda w: w[..., ::3], lambda w: w.split(100, -1), *one):
        assert_same_op(op, w)


def test_tails_stay_with_their_rows():
    w = mx.quantize(torch.randn(2, 3, 5, 77), "mxfp6")
    for op in (lambda w: w.flatten(0, 2), lambda w: w.transpose(0, 2), lambda w: w[..., 32:], lambda w: w[1, :, 2:4]):
        assert_same_op(op, w)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.preserve_format, torch.channels_last], ids=str)
def test_clone_takes_a_memory_format(layout):
    w = mx.quantize(torch.randn(2, 3, 40, 64), "mxfp8", orientation="both")
    for op in (lambda w: w, lambda w: w.mT, lambda w: w.transpose(0, 1), lambda w: w.mT[:, ::2]):
        assert_same_op(lambda w, op=op: op(w).clone(memory_format=layout), w)


def test_a_clone_shares_nothing():
    w = mx.quantize(torch.randn(64, 64), "nvfp4", orientation="both")
    assert not memory(w.clone()) & memory(w)


def test_views_work_alike_in_inference_mode_and_outside():
    made_outside = mx.quantize(torch.randn(4, 64, 64), "mxfp8")
    with torch.inference_mode():
        made_inside = mx.quantize(torch.randn(4, 64, 64), "mxfp8")
        for op in EVERYWHERE.values():
            assert_same_op(lambda w, op=op: op(w, 32), made_outside)
            assert_same_op(lambda w, op=op: op(w, 32), made_inside)
    assert made_outside[0].is_inference() is False and made_inside[0].is_inference() is True
    assert made_inside.clone().is_inference() is False  # torch's way out of inference mode


def test_what_cuts_a_block_or_trains_works_in_inference_mode_as_outside():
    w, layer = (
        mx.quantize(torch.randn(64, 96), "mxfp8"),
        mx.quantize_(nn.MultiheadAttention(64, 4), mx.recipe.MXFP8BlockScaling()),
    )
    weight, x = layer.in_proj_weight, torch.randn(5, 2, 64)
    cuts = (lambda t: t[:, :20], lambda t: t[:, ::2], lambda t: t[:64].diagonal(), lambda t: t.reshape(-1))
    of_weight = (*cuts, torch.t, torch.detach, lambda t: t.split(64)[1], lambda t: t.chunk(3)[2], lambda t: t[:32])
    outside = [op(w) for op in cuts] + [values_of(op(weight)) for op in of_weight]
    with torch.no_grad():
        y = layer(x, x + 1, x + 2)[0]
    with torch.inference_mode():
        inside = [op(w) for op in cuts] + [values_of(op(weight)) for op in of_weight]
        assert torch.equal(layer(x, x + 1, x + 2)[0], y)
        layer.load_state_dict(layer.state_dict())
    for ours, theirs in zip(inside, outside, strict=True):
        assert torch.equal(ours, theirs) and not ours.is_inference()
    layer(x, x, x)[0].square().mean().backward()
    assert layer.in_proj_weight.grad.norm() > 0


# ---------------------------------------------------------------------------------------------- what cuts a block

CUTS = {
    ("mxfp8", "rowwise"): [
        ("[16:64:1] along dimension 1", lambda w: w[:, 16:64]),
        ("[0:40:1] along dimension 1", lambda w: w[:, :40]),
        ("[0:128:2] along dimension 1", lambda w: w[:, ::2]),
        ("index 3 of dimension 1", lambda w: w[:, 3]),
        ("index 127 of dimension 1", lambda w: w[:, -1]),
        ("the shape (64, 8, 16)", lambda w: w.view(64, 8, 16)),
        ("the shape (512, 16)", lambda w: w.reshape(512, 16)),
        ("the permutation (2, 0, 1)", lambda w: w.unsqueeze(0).permute(2, 0, 1)),
    ],
    ("mxfp8", "columnwise"): [
        ("[0:40:1] along dimension 0", lambda w: w[:40]),
        ("index 0 of dimension 0", lambda w: w[0]),
        ("the shape (8192,)", lambda w: w.view(-1)),
    ],
    ("mxfp4[32x32]", "both"): [
        ("[0:40:1] along dimension 0", lambda w: w[:40]),
        ("index 0 of dimension 0", lambda w: w[0]),
        ("the shape (32, 256)", lambda w: w.view(32, 256)),
        ("the permutation (1, 0, 2)", lambda w: w.unflatten(0, (2, 32)).transpose(0, 1)),
    ],
    ("float8_row", "rowwise"): [("the shape (128, 64)", lambda w: w.view(128, 64))],
    ("nvfp4", "rowwise"): [
        ("[0:8:1] along dimension 1", lambda w: w[:, :8]),
        ("the shape (64, 16, 8)", lambda w: w.unflatten(1, (16, 8))),
    ],
}


CUT_CASES = [(key, *case) for key, cases in CUTS.items() for case in cases]


@pytest.mark.parametrize(
    ("key", "what", "op"), CUT_CASES, ids=[f"{key[0]} {key[1]} {what}" for key, what, _ in CUT_CASES]
)
def test_an_op_that_cuts_a_block_gives_plain_values_and_says_so(key, what, op):
    format, orientation = key
    w = mx.quantize(torch.randn(64, 128), format, orientation=orientation)
    before = [t.clone() for t in components_of(w)]
    with mx.explain() as log:
        plain = op(w)
    expected = op(w.dequantize())
    assert type(plain) in (torch.Tensor, DequantizedView)
    assert torch.equal(plain, expected) and plain.stride() == expected.stride()
    assert re.search(re.escape(what) + r" cuts \S+ blocks of (rowwise|columnwise|both)", log.table(refused=True))
    with mx.strict(), pytest.raises(NotImplementedError, match=re.escape(what) + " cuts "):
        op(w)
    assert all(torch.equal(a, b) for a, b in zip(components_of(w), before, strict=True))


def test_a_shape_that_loses_the_blocked_dimension_is_plain():
    w = mx.quantize(torch.randn(1), "mxfp8")
    for op in (lambda w: w.view(()), lambda w: w.squeeze(), lambda w: w[0]):
        assert torch.equal(op(w), op(w.dequantize())) and type(op(w)) is DequantizedView


# ---------------------------------------------------------------------------------------------- any chain of them


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 16, 32, 33, 64]), min_size=1, max_size=4))
    shape[-1] = draw(st.sampled_from([1, 5, 16, 32, 48, 64, 96, 128]))
    format = draw(st.sampled_from(["mxfp8", "mxfp6", "mxfp4", "nvfp4", "mxfp8[16x16]", "float8_row", "float8_tensor"]))
    orientation = draw(st.sampled_from(SIDES)) if len(shape) > 1 else "rowwise"
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    return mx.quantize(torch.randn(shape, generator=generator), format, orientation=orientation)


@st.composite
def operations(draw, shape):
    """One structural op on a tensor of this shape."""
    ndim = len(shape)
    dim = draw(st.integers(-ndim, ndim - 1))
    kind = draw(st.sampled_from(["permute", "transpose", "slice", "select", "unsqueeze", "view", "expand", "split"]))
    if kind == "permute":
        order = draw(st.permutations(range(ndim)))
        return lambda w: w.permute(order)
    if kind == "transpose":
        other = draw(st.integers(-ndim, ndim - 1))
        return lambda w: w.transpose(dim, other)
    if kind == "slice":
        ends = st.sampled_from([None, 0, 1, 16, 32, 64, -16, -32, shape[dim]])
        bounds = slice(draw(ends), draw(ends), draw(st.sampled_from([1, 1, 1, 2])))
        return lambda w: w[tuple(bounds if d == dim % ndim else slice(None) for d in range(ndim))]
    if kind == "select" and shape[dim]:
        index = draw(st.integers(-shape[dim], shape[dim] - 1))
        return lambda w: w.select(dim, index)
    if kind == "unsqueeze":
        return draw(st.sampled_from([lambda w: w.unsqueeze(dim), lambda w: w.squeeze(dim), lambda w: w.squeeze()]))
    if kind == "expand":
        return lambda w: w.expand(2, *(3 if d == 1 else d for d in shape))
    if kind == "split":
        return lambda w: w.split(32, dim)
    merged = [d for d in shape if d != 1] or [1]
    split = [size for d in shape for size in ((d // 32, 32) if d and d % 32 == 0 else (d,))]
    return draw(st.sampled_from([lambda w: w.reshape(merged), lambda w: w.view(split), lambda w: w.flatten(0, -2)]))


@settings(max_examples=120, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_chain_of_structural_ops_equals_the_dense_one_or_is_refused(data):
    w = data.draw(tensors())
    copies = copies_of(w)
    for _ in range(3):
        op = data.draw(operations(tuple(w.shape)))
        try:
            op(copies[0][1])
        except (RuntimeError, IndexError):  # torch itself refuses, so must we
            with pytest.raises((RuntimeError, IndexError, ValueError)):
                op(w)
            return
        try:
            w, copies = assert_same_op(op, w, copies)
        except NotImplementedError as error:
            assert "which mx.strict() forbids" in str(error)
            return
