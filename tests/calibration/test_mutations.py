"""Plans, states of calibrations and cached files with changes: each is read, or raises a sentence that names the file.

`python -m pytest tests/calibration/test_mutations.py --suite rest` reads 20,000 of them in about half a minute.
"""

import copy
import json
import logging
import os
import random

import pytest

import mxtensor as mx
from mxtensor.calibration.methods import steps_of
from mxtensor.calibration.state import State
from mxtensor.convert.changes import checked_changes
from mxtensor.convert.configs import choose
from mxtensor.convert.format_plan import PlannedWeight, planned_for
from mxtensor.kernels.runtime import disk_cache
from mxtensor.kernels.small_m import heuristics
from tests.helpers.calibration_model import batches, model
from tests.helpers.mutations import flipped, of_zip, replanted

COUNTS = {"plan": 8000, "block": 5000, "calibration": 2000, "table": 4000, "cache": 1000}
"""How many files of a kind: 20,000."""
FORMATS = ("mxfp4-weight-only", "mxfp6_e2m3-weight-only", "mxfp8-weight-only")


def of_json(raw, rng):
    """Another JSON file, or other bytes."""
    if rng.random() < 0.3:
        return flipped(raw, rng, len(raw))
    if rng.random() < 0.05:
        return b"[" * rng.choice([100, 100_000])
    return json.dumps(replanted(json.loads(raw), rng)).encode()


def plan(folder):
    """(file, what changes it, what reads it, what it returns)"""
    sizes, errors = dict(zip(FORMATS, (544, 800, 1056), strict=True)), dict(zip(FORMATS, (0.5, 0.2, 0.1), strict=True))
    weights = {f"layers.{i}.up.weight": PlannedWeight(1024, sizes, errors, i == 2) for i in range(3)}
    file = folder / "plan.json"
    planned_for(weights, 6.0, "kl").save(file)

    def read():
        found = mx.Plan.load(file)
        assert found.bits >= 0 and abs(found.error) < 1 << 64 and str(found)
        mx.Plan.load(file).with_bits(1e18 if found.weights else 1)
        return found

    return file, of_json, read, mx.Plan


def calibrated(folder):
    m = model()
    changes = checked_changes(m, choose(m, "mxfp8-weight-only", None, False)[0])
    mx.calibrate(copy.deepcopy(m), batches(), "mxfp8-weight-only", "mse", state=folder)
    return lambda: State(folder, m, batches(), changes, steps_of("mse"))


def block(folder):
    state = calibrated(folder)()
    file, original = folder / "block_00001.pt", folder / "original"

    def change(raw, rng):
        original.write_bytes(raw)
        return of_zip(original, raw, rng)

    def read():
        found = state.load(1, ())
        values = (t.dequantize() if isinstance(t, mx.MXTensor) else t for t in found.values())
        assert all(value.isfinite().all() for value in values)
        return found

    return file, change, read, dict


def calibration(folder):
    return folder / "calibration.json", of_json, calibrated(folder), State


def table(folder):
    file = folder / "sm90.json"
    heuristics.write(file, heuristics.table((9, 0))[:5])
    return file, of_json, lambda: heuristics.read(file), list


def cache(folder):
    """A damaged file is noticed by its digest, and removed."""
    os.environ["XDG_CACHE_HOME"] = str(folder)
    made = disk_cache.store("kernel", 1, "so", lambda path: path.write_bytes(bytes(range(256)) * 4))
    raw = made.read_bytes()

    def read():
        found = disk_cache.find("kernel", 1, "so")
        assert found is None or found[1] == raw
        return found

    return made, lambda raw, rng: flipped(raw, rng, len(raw)), read, (tuple, type(None))


KINDS = {"plan": plan, "block": block, "calibration": calibration, "table": table, "cache": cache}


def many_changes(kind, folder, count):
    rng = random.Random(kind)
    file, change, read, result = KINDS[kind](folder)
    raw, refused = file.read_bytes(), 0
    assert read()
    for _ in range(count):
        file.write_bytes(change(raw, rng))
        try:
            assert isinstance(read(), result)
        except ValueError as error:
            assert str(file) in str(error) or str(folder) in str(error), error
            assert str(error).isprintable() and len(str(error)) < 1000, error
            refused += 1
    assert refused > count // 4 or kind == "cache"


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", os.environ.get("XDG_CACHE_HOME", ""))
    logging.getLogger("mxtensor").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("mxtensor").setLevel(logging.NOTSET)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.exhaustive(quick=0)
@pytest.mark.parametrize("kind", KINDS)
def test_every_change_of_a_file_is_read_or_raises_a_sentence(kind, tmp_path):
    many_changes(kind, tmp_path, COUNTS[kind])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_some_changes_of_a_file(kind, tmp_path):
    many_changes(kind, tmp_path, 40)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("errors", {"mxfp4-weight-only": float("nan")}, "not finite"),
        ("errors", {"mxfp4-weight-only": True}, "not numbers"),
        ("nbytes", {"mxfp4-weight-only": -1}, "not numbers"),
        ("nbytes", {"mxfp4-weight-only": 5.5}, "not numbers"),
        ("nbytes", {"mxfp8-weight-only": 5}, "for other formats"),
        ("values", "1024", "other types"),
        ("format", ["mxfp4-weight-only"], "other types"),
        ("format", "mxfp8-weight-only", "was not measured"),
        ("estimated", 1, "other types"),
        ("more", 1, "needs a format, values, nbytes and errors"),
    ],
)
def test_a_plan_is_validated(key, value, why, tmp_path):
    row = {"format": "mxfp4-weight-only", "values": 9, "nbytes": {"mxfp4-weight-only": 5},
           "errors": {"mxfp4-weight-only": 0.5}}  # fmt: skip
    fields = {"version": 1, "measure": "kl", "weights": {"a.weight": row}}
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(fields))
    assert mx.Plan.load(file).error == 0.5
    row[key] = value
    file.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=rf"plan\.json was not written by mx\.Plan\.save: .*{why}"):
        mx.Plan.load(file)


def test_a_plan_of_an_unknown_format_is_refused(tmp_path):
    row = {"format": "mxfp9", "values": 9, "nbytes": {"mxfp9": 5}, "errors": {"mxfp9": 0.5}}
    (tmp_path / "plan.json").write_text(json.dumps({"version": 1, "measure": "kl", "weights": {"a.weight": row}}))
    with pytest.raises(ValueError, match="has the format 'mxfp9', which there is not"):
        mx.Plan.load(tmp_path / "plan.json")


def test_a_tuned_table_of_another_version_is_left_alone(tmp_path, logged):
    os.environ["XDG_CACHE_HOME"] = str(tmp_path)
    heuristics.tuned.cache_clear()
    disk_cache.store(heuristics.TUNED, "gpu", "json", lambda path: path.write_text('{"columns": ["m"], "rows": [[1]]}'))
    assert heuristics.tuned("gpu") == ()
    assert len(logged.records) == 1
    assert "is not a table of launch configs" in logged.text and "measure again" in logged.text
    heuristics.tuned.cache_clear()
