"""Joining, picking, repeating: whole blocks leave every code as it is; an op that cuts a block gives plain values.

One law for every case: ``op(w)`` has the values, shape, strides and dtype of ``op(w.dequantize())``, bit for bit. Where
it stays an MXTensor each of its copies follows by itself; if it does not, it is plain, logged, and an error inside
``mx.strict()``.
"""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mxtensor as mx
from mxtensor.tensor.dequantized_view import DequantizedView
from tests.helpers.compare import components_of, same_bytes

ROWS, COLS = 64, 128
INDEX = torch.tensor([5, 0, 5, -1])
MASK = torch.arange(ROWS) % 3 == 0
QUANTIZED = {  # along rows, which narrow blocks leave free
    "w[3:40]": lambda w: w[3:40],
    "w[::3]": lambda w: w[::3],
    "w[40:3]": lambda w: w[40:3],
    "w[-9:-2:2]": lambda w: w[-9:-2:2],
    "w[5]": lambda w: w[5],
    "w[-1]": lambda w: w[-1],
    "w[None, 5:7]": lambda w: w[None, 5:7],
    "narrow": lambda w: w.narrow(0, 7, 9),
    "select": lambda w: w.select(0, 4),
    "split": lambda w: w.split(24),
    "split sizes": lambda w: w.split([1, 62, 1]),
    "chunk": lambda w: w.chunk(3),
    "tensor_split": lambda w: w.tensor_split(5),
    "unbind": lambda w: w.unbind(0),
    "cat": lambda w: torch.cat([w, w[:5], w[9:]]),
    "stack": lambda w: torch.stack([w, w]),
    "stack 1": lambda w: torch.stack([w, w], 1),
    "w[tensor]": lambda w: w[INDEX],
    "w[2-D tensor]": lambda w: w[INDEX.view(2, 2)],
    "w[mask]": lambda w: w[MASK],
    "w[list]": lambda w: w[[1, 3, 3]],
    "index_select": lambda w: w.index_select(0, INDEX % ROWS),
    "flip": lambda w: w.flip(0),
    "roll": lambda w: w.roll(3, 0),
    "repeat_interleave": lambda w: w.repeat_interleave(2, 0),
    "expand": lambda w: w.expand(3, ROWS, COLS),
    "as_strided": lambda w: w.as_strided((2, ROWS // 2, COLS), (ROWS // 2 * COLS, COLS, 1)),
}
WHOLE = {  # along blocks of up to 128 values, and those of rows as well
    "columns": lambda w: w[:, :128],
    "cat 1": lambda w: torch.cat([w, w, w[:, :128]], 1),
    "stack -1": lambda w: torch.stack([w.flatten(), w.flatten()]),
    "hsplit": lambda w: torch.cat([w, w], 1).hsplit(2),
    "repeat": lambda w: w.repeat(2, 3),
    "repeat to 3-D": lambda w: w.repeat(2, 1, 1),
    "flatten": lambda w: w.flatten(),
    "pad below": lambda w: F.pad(w, (0, 0, 2, 3)),
    "pad right": lambda w: F.pad(w, (0, 17)),
}
CUTTING = {
    "column": lambda w: w[:, 3],
    "cut columns": lambda w: w[:, 3:40],
    "column step": lambda w: w[:, ::2],
    "narrow 1": lambda w: w.narrow(1, 1, 126),
    "split 1": lambda w: w.split(8, 1),
    "unbind 1": lambda w: w.unbind(1),
    "view": lambda w: w.view(ROWS, 16, 8),
    "unflatten": lambda w: w.unflatten(1, (16, 8)),
    "cat after a tail": lambda w: torch.cat([w[:, :7], w], 1),
    "cat of two kinds": lambda w: torch.cat([w, torch.ones(3, COLS)]),
    "stack of two kinds": lambda w: torch.stack([w, torch.ones(ROWS, COLS)]),
    "w[:, tensor]": lambda w: w[:, INDEX],
    "w[tensor, tensor]": lambda w: w[INDEX, INDEX],
    "w[tensor, 2:5]": lambda w: w[INDEX, 2:5],
    "w[2-D mask]": lambda w: w[MASK[:, None].expand(ROWS, COLS)],
    "index_select 1": lambda w: w.index_select(1, INDEX % COLS),
    "flip 1": lambda w: w.flip(1),
    "roll flat": lambda w: w.roll(3),
    "roll 1": lambda w: w.roll(1, 1),
    "repeat_interleave 1": lambda w: w.repeat_interleave(2, 1),
    "pad left": lambda w: F.pad(w, (1, 5)),
    "pad by a value": lambda w: F.pad(w, (0, 0, 0, 1), value=2.0),
    "crop": lambda w: F.pad(w, (-1, 0)),
    "as_strided slice": lambda w: w.as_strided((3, 4), (COLS, 2)),
    "diagonal": lambda w: w.diagonal(),
    "unfold": lambda w: w.unfold(0, 3, 2),
    "gather": lambda w: w.gather(0, torch.zeros(3, COLS, dtype=torch.long)),
    "take_along_dim": lambda w: w.take_along_dim(INDEX[None] % COLS, 1),
    "tril": lambda w: w.tril(),
}
NARROW = ["mxfp8", "mxfp4", "mxfp6_e2m3", "mxint8", "nvfp4", "float8_row", "float8_1x128"]
TILED = ["mxfp8[32x32]", "mxfp4[16x16]", "float8_tensor", "float8_128x128"]


def as_list(result):
    return list(result) if isinstance(result, (tuple, list)) else [result]


def one_copy(w, columnwise):
    return w.replace(
        None if columnwise else w._rowwise, w._columnwise if columnwise else None, tuple(w.shape), w.stride()
    )


def assert_same(got, expected):
    """Every result is what the dense op gives; one that stays quantized has well-formed operands."""
    got, expected = as_list(got), as_list(expected)
    assert len(got) == len(expected)
    for g, e in zip(got, expected, strict=True):
        assert (g.shape, g.dtype) == (e.shape, e.dtype)
        if e.numel():
            assert [s for s, n in zip(g.stride(), g.shape, strict=True) if n > 1] == [
                s for s, n in zip(e.stride(), e.shape, strict=True) if n > 1
            ]
        if isinstance(g, mx.MXTensor):
            for operand in g.operands:
                assert operand.data.shape == operand.format.data_shape(operand.shape)
                assert operand.scale.shape == operand.format.scale_shape(operand.shape)
            g = g.dequantize()
        assert type(g) in (torch.Tensor, DequantizedView) and torch.equal(g, e)


def assert_cut(op, w):
    """Values equal to the dense op's, not quantized; logged with a reason; an error under strict."""
    with mx.explain() as log:
        got = op(w)
    assert_same(got, op(w.dequantize()))
    plain = [g for g in as_list(got) if not isinstance(g, mx.MXTensor)]
    assert plain and all(type(g) in (torch.Tensor, DequantizedView) for g in plain)
    said = [e for e in log.entries if e.kernel == "dequantized"]
    assert said and all(e.spec.op.startswith("aten.") and e.refusals["quantized"] for e in said)
    assert said[0].spec.op in log.table() and said[0].refusals["quantized"] in log.table(refused=True)
    with pytest.raises(NotImplementedError, match=re.escape(f"{said[0].spec.op} would dequantize (")), mx.strict():
        op(w)


def assert_quantized(op, w):
    with mx.explain() as log, mx.strict():
        got = op(w)
    assert all(isinstance(g, mx.MXTensor) and g.recipe == w.recipe for g in as_list(got))
    assert not [e for e in log.entries if e.kernel in ("dequantized", "requantized")]
    assert_same(got, op(w.dequantize()))
    return got


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("format", NARROW)
def test_rows_of_narrow_blocks_keep_their_codes(format, name):
    op = QUANTIZED[name]
    w = mx.quantize(torch.randn(ROWS, COLS), format)
    if name == "repeat_interleave" and mx.get_format(format).scales_matrices:  # torch joins the rows of a stack
        assert_same(op(w), op(w.dequantize()))
        return
    assert_quantized(op, w)


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "mxfp6_e2m3"])
def test_rows_are_what_quantizing_the_moved_values_gives(format, name):
    """Codes and scales, not just values: no block saw other company than before."""
    x = torch.randn(ROWS, COLS, dtype=torch.bfloat16)
    w = mx.quantize(x, format)
    for got, source in zip(as_list(QUANTIZED[name](w)), as_list(QUANTIZED[name](x)), strict=True):
        assert same_bytes(got, mx.quantize(source, format))


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "mxfp6_e2m3", "mxint8", "nvfp4", "float8_1x128"])
def test_whole_blocks_move(format, name):
    assert_quantized(WHOLE[name], mx.quantize(torch.randn(ROWS, COLS).half(), format))


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("slice", lambda w: w[32:64]),
        ("columns", lambda w: w[:, 32:96]),
        ("split", lambda w: w.split(32)),
        ("cat", lambda w: torch.cat([w, w[:32]])),
        ("cat 1", lambda w: torch.cat([w, w], 1)),
        ("stack", lambda w: torch.stack([w, w])),
        ("repeat", lambda w: w.repeat(2, 2)),
        ("stacked rows", lambda w: torch.stack([w, w, w])[torch.tensor([2, 0])]),
        ("stacked flip", lambda w: torch.stack([w, w]).flip(0)),
        ("transposed", lambda w: torch.cat([w.t(), w.t()])),
        ("expand", lambda w: w.expand(2, ROWS, COLS)),
    ],
    ids=lambda value: None if callable(value) else str(value),
)  # fmt: skip
@pytest.mark.parametrize("format", ["mxfp8[32x32]", "mxfp4[16x16]", "mxfp6_e2m3[32x32]"])
def test_tiles_move_whole(format, name, op):
    assert_quantized(op, mx.quantize(torch.randn(ROWS, COLS), format))


@pytest.mark.parametrize("name", CUTTING)
@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "mxfp6_e2m3", "nvfp4"])
def test_what_cuts_a_block_is_dequantized(format, name):
    assert_cut(CUTTING[name], mx.quantize(torch.randn(ROWS, COLS), format))


@pytest.mark.parametrize("name", [*QUANTIZED, *WHOLE, *CUTTING])
@pytest.mark.parametrize("orientation", ["rowwise", "columnwise", "both"])
@pytest.mark.parametrize("format", ["mxfp8", "nvfp4", *TILED])
@pytest.mark.pairs
def test_every_op_gives_the_dense_values(format, orientation, name):
    """Quantized or not. Two copies differ by their rounding: each that is left goes its own way."""
    op = (QUANTIZED | WHOLE | CUTTING)[name]
    w = mx.quantize(torch.randn(ROWS, COLS), format, orientation=orientation)
    before = [t.clone() for t in components_of(w)]
    got = as_list(op(w))
    if len(w.operands) == 1:
        assert_same(got, op(w.dequantize()))
    else:
        copies = [as_list(op(one_copy(w, columnwise).dequantize())) for columnwise in (False, True)]
        for g, a, b in zip(got, *copies, strict=True):
            if isinstance(g, mx.MXTensor):
                for columnwise, operand in ((False, g._rowwise), (True, g._columnwise)):
                    if operand is not None:
                        values = one_copy(g, columnwise).dequantize()
                        assert torch.equal(values, a) or torch.equal(values, b)
            else:
                assert g.shape == a.shape and ((g == a) | (g == b)).all()
    assert all(torch.equal(a, b) for a, b in zip(before, components_of(w), strict=True))


def test_columnwise_blocks_leave_columns_free():
    w = mx.quantize(torch.randn(ROWS, COLS), "mxfp8", orientation="columnwise")
    for op in (
        lambda w: w[:, 3:40:5],
        lambda w: torch.cat([w, w], 1),
        lambda w: w.index_select(1, INDEX % COLS),
        lambda w: w.flip(1),
        lambda w: w.roll(1, 1),
        lambda w: w.repeat(1, 2),
        lambda w: F.pad(w, (1, 2)),
    ):
        assert_quantized(op, w)
    for op in (lambda w: w[3], lambda w: w.flip(0), lambda w: F.pad(w, (0, 0, 1, 0))):
        assert_cut(op, w)


def test_views_share_memory_and_copies_do_not():
    w = mx.quantize(torch.randn(ROWS, COLS), "mxfp8")
    memory = {t.untyped_storage().data_ptr() for t in components_of(w)}
    source = torch.ones(ROWS, COLS)
    for name in QUANTIZED:
        for dense, got in zip(as_list(QUANTIZED[name](source)), as_list(QUANTIZED[name](w)), strict=True):
            shares = bool(memory & {t.untyped_storage().data_ptr() for t in components_of(got)})
            expected = dense.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
            assert not got.numel() or shares == expected, name


def test_tensors_of_different_scales_do_not_join():
    """A global scale belongs to one tensor, a per-tensor scale too."""
    for format in ("nvfp4", "float8_tensor"):
        a, b = (mx.quantize(torch.randn(ROWS, COLS) * k, format) for k in (1.0, 3.0))
        with mx.explain() as log:
            got = torch.cat([a, b])
        assert type(got) is torch.Tensor and torch.equal(got, torch.cat([a.dequantize(), b.dequantize()]))
        assert [e.refusals["quantized"] for e in log.entries if e.kernel == "dequantized"] == [
            "not one format throughout"
        ]
    a, b = mx.quantize(torch.randn(ROWS, COLS), "mxfp8"), mx.quantize(torch.randn(ROWS, COLS), "mxfp4")
    assert torch.equal(torch.cat([a, b]), torch.cat([a.dequantize(), b.dequantize()]))


@pytest.mark.parametrize("orientation", ["rowwise", "columnwise", "both"])
@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "mxfp6_e2m3", "nvfp4", "mxfp8[32x32]", "float8_row"])
def test_an_embedding_reads_rows(format, orientation):
    w = mx.quantize(torch.randn(ROWS, COLS), format, orientation=orientation)
    tokens = torch.tensor([[3, 0, 63], [5, 5, 1]])
    assert torch.equal(F.embedding(tokens, w), F.embedding(tokens, w.dequantize()))
    module = nn.Embedding(ROWS, COLS, padding_idx=0, _weight=w)
    assert torch.equal(module(tokens), w.dequantize()[tokens])


def test_another_dtype_of_the_bytes_is_refused():
    w = mx.quantize(torch.randn(ROWS, COLS), "mxfp8")
    with pytest.raises(NotImplementedError, match=r"aten\.view\.dtype of an MXTensor is refused: its bytes"):
        w.view(torch.int32)


def test_the_log_names_the_blocks_that_would_be_cut():
    w = mx.quantize(torch.randn(ROWS, COLS), "mxfp8")
    with mx.explain() as log:
        w[:, 3:40]
    (entry,) = [e for e in log.entries if e.kernel == "dequantized"]
    assert (entry.spec.op, entry.refusals["quantized"]) == (
        "aten.slice.Tensor", "[3:40:1] along dimension 1 cuts 1x32 blocks of rowwise",
    )  # fmt: skip
    with mx.explain() as log:
        w.abs()
    assert [e.refusals for e in log.entries if e.kernel == "dequantized"] == [{"quantized": "no rule of its own"}]


@pytest.mark.parametrize("offset", [0, 1, 4, 8])
@pytest.mark.parametrize("start", [0, 3, 4])
def test_matrices_are_picked_from_memory_of_any_alignment(start, offset):
    """``start``: of the memory, as in a file that is mapped; ``offset``: of the codes in it. Only their sum is seen in
    the address."""
    w = mx.quantize(torch.randn(4, 32, 64), "mxfp8")

    def placed(t):
        memory = torch.frombuffer(bytearray(t.numel() + 64), dtype=torch.uint8, offset=start)
        place = memory[offset : offset + t.numel()].view(t.shape)
        place.copy_(t.view(torch.uint8))
        return place.view(t.dtype)

    moved = mx.MXTensor.from_components(*map(placed, w.components), "mxfp8", dtype=torch.float32)
    assert moved.rowwise.data.storage_offset() == offset
    picked = moved[torch.tensor([2, 0, 2])]
    assert isinstance(picked, mx.MXTensor) and torch.equal(picked.dequantize(), w.dequantize()[[2, 0, 2]])
