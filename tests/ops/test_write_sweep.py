"""Every op that writes, on an MXTensor and on views of it: the base follows, or a sentence says why not."""

import logging

import pytest

from tests.helpers.write_sweep import LAYOUTS, run

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
CALLS = {"database": 2200, "schemas": 4500, "init": 1100}
"""The least number of calls of a part."""


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
    assert tally.counts["calls"] > CALLS[source]
    assert tally.counts["written"] > 0.85 * tally.counts["calls"]


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
