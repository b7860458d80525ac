"""Every op that torch tests itself, on an MXTensor: the dense result, or a refusal listed here with its reason."""

import pytest

from tests.helpers.opinfo import CHUNKS, op_database, run

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's samples use what it deprecates

REFUSED = {
    "as_strided in place": "would cut blocks",
    "as_strided.partial_views in place": "would cut blocks",
    "resize_": "blocks cannot store more values",
    "resize_ in place": "blocks cannot store more values",
    "squeeze in place": "would cut blocks",
    "squeeze.multiple in place": "would cut blocks",
    "unsqueeze in place": "would cut blocks",
}
"""Call -> what the refusal says. A call is here if any of its samples is refused."""


def op_of(call):
    return call.removesuffix(" in place").removesuffix(" out=")


@pytest.mark.exhaustive
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_an_op_gives_the_dense_result_or_says_why_not(chunk, record_property):
    tally = run(chunk)
    print(tally.line())
    record_property("tally", tally.line())
    assert tally.mismatched == {}
    assert sorted(tally.refused) == sorted(call for call in REFUSED if op_of(call) in tally.tried)
    for call, said in tally.refused.items():
        assert REFUSED[call] in said and len(said.split()) > 8, f"{call}: {said}"
    assert len(tally.tried) > 60
    assert tally.counts["samples"] > 700 and tally.counts["dequantized"] > 1000 and tally.counts["quantized"] > 120


def test_one_sample_of_every_thirtieth_op_gives_the_dense_result_or_says_why_not():
    tally = run(0, 30, {("mxfp8", "rowwise"): 1})
    assert tally.mismatched == {}
    assert set(tally.refused) <= set(REFUSED)
    assert len(tally.tried) > 15


def test_few_ops_are_refused():
    names = op_database()
    refused = {op_of(call) for call in REFUSED}
    assert refused <= names.keys() and len(refused) <= 0.03 * len(names)
