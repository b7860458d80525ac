"""The table of launch configs: a new measurement replaces the old one of its case, and nothing else is lost."""

import json
import random

from mxtensor.kernels.small_m.heuristics import COLUMNS, FALLBACK, Measured, path_of, read, row_of
from mxtensor.report import tune

WGMMA, PERSISTENT = FALLBACK._replace(wgmma=True), FALLBACK._replace(persistent=1)


def measured(format="mxfp8_e4m3", m=1, n=4096, k=4096, us=1.0, config=FALLBACK, casts=False):
    return Measured(format, casts, m, n, k, us, config)


OLD = [
    measured("nvfp4"), measured(m=16), measured(), measured(m=32), measured(m=32, us=2.0, config=WGMMA),
    measured(n=1024), measured(k=14336), measured("mxfp4_e2m1"), measured(casts=True),
]  # fmt: skip


def test_a_new_row_replaces_that_of_its_format_rows_shape_and_kind_alone():
    new = measured(m=32, us=0.5, config=WGMMA._replace(stages=3))
    found = tune.merged(OLD, [new])
    assert len(found) == len(OLD) and new in found
    assert [r for r in OLD if r not in found] == [measured(m=32, us=2.0, config=WGMMA)]


def test_a_new_case_is_added():
    new = [measured("mxfp6_e2m3", m=4), measured(m=1, config=WGMMA), measured(m=1, config=PERSISTENT)]
    found = tune.merged(OLD, new)
    assert len(found) == len(OLD) + 3 and all(r in found for r in (*OLD, *new))
    assert tune.merged([], OLD) == tune.merged(OLD, []) == tune.merged(OLD, OLD)


def test_the_order_depends_on_the_cases_alone():
    rng, found = random.Random(0), tune.merged(OLD, [])
    for _ in range(5):
        assert tune.merged(rng.sample(OLD, len(OLD)), []) == found
    assert [row_of(r)[:5] for r in found[:2]] == [["mxfp4_e2m1", 0, 1, 4096, 4096], ["mxfp8_e4m3", 0, 1, 1024, 4096]]


def test_a_table_is_read_and_written_one_row_a_line_under_named_columns(tmp_path):
    path = tmp_path / "table.json"
    tune.update(path, [measured("nvfp4", n=64, k=64, us=1.234)])
    tune.update(
        path, [measured("nvfp4", m=4, n=64, k=64, us=2.0, config=WGMMA), measured("nvfp4", n=64, k=64, us=1.111)]
    )
    content = json.loads(path.read_text())
    assert content["columns"] == [*COLUMNS] and len(content["rows"]) == 2
    assert path.read_text().count("\n") == 5 + len(content["rows"])
    assert [(line.m, line.us, line.config.wgmma) for line in read(path)] == [(1, 1.11, False), (4, 2.0, True)]


def test_the_table_of_sm90_is_as_it_would_be_written(tmp_path):
    path = tmp_path / "table.json"
    tune.update(path, read(path_of((9, 0))))
    assert path.read_text() == path_of((9, 0)).read_text()
