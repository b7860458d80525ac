"""The table of measured configs: what is measured anew takes the place of what was there, and nothing else is lost."""

import json
import random

from mxtensor.kernels.small_m.config import LaunchConfig
from mxtensor.kernels.small_m.heuristics import FALLBACK, Measured, line
from mxtensor.report import tune

WGMMA, PERSISTENT = FALLBACK._replace(wgmma=True), FALLBACK._replace(persistent=1)


def row(format="mxfp8_e4m3", m=1, n=4096, k=4096, us=1.0, config=FALLBACK, casts=False):
    return line(Measured(format, casts, m, n, k, us, config))


OLD = [
    row("nvfp4"), row(m=16), row(), row(m=32), row(m=32, us=2.0, config=WGMMA), row(n=1024), row(k=14336),
    row("mxfp4_e2m1"), row(casts=True),
]  # fmt: skip


def test_a_new_line_replaces_that_of_its_format_rows_shape_and_kind_alone():
    new = row(m=32, us=0.5, config=WGMMA._replace(stages=3))
    found = tune.merged(OLD, [new])
    assert len(found) == len(OLD) and new in found
    assert [r for r in OLD if r not in found] == [row(m=32, us=2.0, config=WGMMA)]


def test_a_case_that_was_not_there_is_added():
    new = [row("mxfp6_e2m3", m=4), row(m=1, config=WGMMA), row(m=1, config=PERSISTENT)]
    found = tune.merged(OLD, new)
    assert len(found) == len(OLD) + 3 and all(r in found for r in (*OLD, *new))
    assert tune.merged([], OLD) == tune.merged(OLD, []) == tune.merged(OLD, OLD)


def test_the_order_depends_on_the_cases_alone():
    rng, found = random.Random(0), tune.merged(OLD, [])
    for _ in range(5):
        assert tune.merged(rng.sample(OLD, len(OLD)), []) == found
    assert [r[:5] for r in found[:2]] == [["mxfp4_e2m1", 0, 1, 4096, 4096], ["mxfp8_e4m3", 0, 1, 1024, 4096]]


def test_a_table_is_read_and_written_a_line_a_case(tmp_path):
    path = tmp_path / "table.json"
    tune.write(path, [Measured("nvfp4", False, 1, 64, 64, 1.234, FALLBACK)])
    tune.write(
        path, [Measured("nvfp4", False, 4, 64, 64, 2.0, WGMMA), Measured("nvfp4", False, 1, 64, 64, 1.111, FALLBACK)]
    )
    assert path.read_text().count("\n") == 4
    rows = json.loads(path.read_text())
    assert [(r[2], r[5], LaunchConfig._make(r[6:]).wgmma) for r in rows] == [(1, 1.11, 0), (4, 2.0, 1)]
