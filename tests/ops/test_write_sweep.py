"""Every op that writes, on an MXTensor and on views of it: the base follows, or a sentence says why not."""

import logging

import pytest
import torch

import mxtensor as mx
from tests.helpers.write_sweep import LAYOUTS, are_near, run

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's samples use what it deprecates
REFUSED = {
    "nn.functional.dropout3d": "aten.unsqueeze_.default of a view",
    "resize_as_": "has a memory and a shape of its own",
    "squeeze": "aten.squeeze_",
    "t": "aten.t_.default",
    "transpose": "aten.transpose_",
    "swapaxes": "aten.transpose_",
    "swapdims": "aten.transpose_",
    "unsqueeze": "aten.unsqueeze_",
}
"""Op -> what its refusal says; they change the shape, which a view that cuts blocks cannot."""
RESIZES = "aten.linalg_matrix_rank"
"""The op whose overloads resize their ``out``, which an MXTensor refuses."""
SLICES = {"database": 6, "schemas": 8, "init": 1}
OPS = {"database": 20, "schemas": 80, "init": 13}
"""The least number of ops in a part. A part of the database is every sixth op, and the ops without an in-place variant
are left out afterwards, so parts are uneven: 21 to 27 ops, and 2337 to 3156 calls, with torch 2.13."""
CALLS_OF_AN_OP = {"database": 100, "schemas": 75, "init": 80}
"""The least number of calls of an op, on average of a part. An op of the database has up to two samples of 84 calls."""


def check(tally):
    logging.info(tally.line())
    assert tally.wrong == {}
    for (op, *_), said in tally.refused.items():
        assert op.partition(".")[0] in REFUSED or op in REFUSED or op.startswith(RESIZES), (op, said)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("source", "part"), [(source, part) for source, n in SLICES.items() for part in range(n)])
def test_every_write_reaches_the_base_of_a_view(source, part, record_property):
    tally = run(source, part, SLICES[source])
    record_property("tally", tally.line())
    print(tally.line())
    check(tally)
    assert len(tally.ops) >= OPS[source]
    assert tally.counts["calls"] >= CALLS_OF_AN_OP[source] * len(tally.ops)
    assert tally.counts["written"] > 0.85 * tally.counts["calls"]


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize(
    ("source", "part", "slices", "layouts"),
    [
        ("init", 0, 1, [("mxfp8", "rowwise")]),
        ("schemas", 5, 200, LAYOUTS),
        ("database", 7, 100, LAYOUTS),
    ],
)
def test_a_sample_of_all_writes_reaches_the_base_of_a_view(source, part, slices, layouts):
    tally = run(source, part, slices, layouts=layouts)
    check(tally)
    assert tally.counts["written"] > 120


@pytest.mark.parametrize(("format", "orientation"), LAYOUTS)
def test_one_step_of_a_block_is_near_and_two_are_not(format, orientation):
    w = mx.quantize(torch.randn(40, 72), format, orientation=orientation)
    columnwise = w.orientation == mx.Orientation.COLUMNWISE
    values = w.dequantize()
    top = values.abs().max()
    step = 2.0 ** (top.log2().floor() - w.format.element.mantissa_bits)
    place = (values.abs() == top).nonzero()[0].unbind()
    for steps, near in ((0, True), (-1, True), (-2.5, False)):
        other = values.clone()
        other[place] += steps * step * other[place].sign()
        assert are_near(other, values, w.format, columnwise) is near
    small = values.clone()
    small[3, 5] = 0.0
    small[3, 5] += 3 * step
    assert not are_near(small, values, w.format, columnwise)
