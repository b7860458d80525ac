"""The FSDP2 benchmark: rows, tables and targets from a tiny model on two ranks."""

import pytest

from benchmarks import fsdp

pytest.importorskip("transformers")
pytestmark = pytest.mark.exhaustive  # its case of two ranks takes long


def test_every_config_is_measured_and_codes_take_fewer_bytes(ranks):
    for rows in ranks("benchmark_of_fsdp"):
        by_name = {row.work: row for row in rows}
        assert list(by_name) == [fsdp.BASE, fsdp.VALUES, fsdp.CODES]
        base, values, codes = (by_name[name].gathered_bytes for name in by_name)
        assert base == values and 0.5 < codes / values < 0.65  # embeddings and head are gathered as values
        assert all(row.tokens_a_second > 0 and row.times["step"] > 0 and row.ranks == 2 for row in rows)


def test_lines_and_targets(ranks):
    rows, _ = ranks("benchmark_of_fsdp")
    lines = fsdp.lines(rows)
    assert [line[0] for line in lines] == list(fsdp.RECIPES) and all(len(line) == len(fsdp.HEADER) for line in lines)
    verdicts = {target.what: target.verdict(rows) for target in fsdp.TARGETS}
    assert verdicts["peak memory over a gather of values"][-1] == "not measured"  # on a CPU
    assert float(verdicts["bytes gathered over a gather of values"][2]) < 0.65
