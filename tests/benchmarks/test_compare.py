"""The comparison of two folders of records."""

import json

import pytest

from benchmarks import compare


def write(folder, name, rows):
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({"machine": {}, "rows": rows}))


@pytest.fixture
def folders(tmp_path):
    """A function that writes both folders: the times before, and the times after on a machine 10 % slower."""

    def make(slower=1.0):
        for folder, drift, slowdown in (("before", 1.0, 1.0), ("after", 1.1, slower)):
            times = {"bfloat16": 2.0 * drift, "mxfp8": drift * slowdown, "nvfp4": 0.5 * drift, "mxfp4": 0.4 * drift}
            write(tmp_path / folder, "decode", [{"work": "1x64x64", "times": times | {"torchao mxfp8": 9.0 / drift}}])
            host = {"work": "mxfp8 host time", "times": {"mxtensor": 0.03, "torchao": 0.5 / drift}}
            write(tmp_path / folder, "cast", [host])
        return [str(tmp_path / "before"), str(tmp_path / "after")]

    return make


def test_times_are_divided_by_the_drift_of_the_control_and_the_worst_comes_first(folders, tmp_path):
    folders(slower=1.2)
    figures, missing = compare.compare(tmp_path / "before" / "decode.json", tmp_path / "after" / "decode.json")
    assert [f.contender for f in figures] == ["mxfp8", "mxfp4", "nvfp4"] and missing == []
    assert [f.ratio for f in figures] == pytest.approx([1.2, 1.0, 1.0])
    assert [f.control for f in figures] == pytest.approx([1.1] * 3)


def test_a_row_without_control_compares_the_times_themselves(folders, tmp_path):
    folders()
    (figure,), _ = compare.compare(tmp_path / "before" / "cast.json", tmp_path / "after" / "cast.json")
    assert figure.contender == "mxtensor" and figure.ratio == 1.0 and compare.lines([figure])[0][4] == ""


def test_one_slow_figure_is_counted_and_fails_only_if_strict(folders, capsys):
    args = folders(slower=1.2)
    assert compare.main(args) == 0
    out = capsys.readouterr().out
    assert "decode: 3 figures, geometric mean 1.063, median 1.000, 1 over 1.03" in out
    assert "4 figures in 2 records, 1 over 1.03" in out and "torchao" not in out
    assert compare.main([*args, "--strict"]) == 1
    assert compare.main([*args, "--strict", "--limit", "1.25"]) == 0


def test_a_slow_record_fails_and_is_printed_first(folders, tmp_path, capsys):
    args = folders()
    write(tmp_path / "after", "cast", [{"work": "mxfp8 host time", "times": {"mxtensor": 0.04}}])
    assert compare.main(args) == 1
    out = capsys.readouterr().out
    assert out.index("cast: 1 figures, geometric mean 1.333") < out.index("decode: 3 figures")


def test_a_figure_that_is_missing_after_fails(folders, tmp_path, capsys):
    args = folders()
    write(tmp_path / "after", "decode", [{"work": "1x64x64", "times": {"bfloat16": 2.0, "mxfp8": 1.0, "nvfp4": 0.5}}])
    assert compare.main(args) == 1
    assert "missing after: 1x64x64, mxfp4" in capsys.readouterr().out


def test_a_row_of_a_peer_is_not_compared_and_ours_is(tmp_path):
    rows = [
        {"work": f"{name} 4x4x4", "times": {"bfloat16": 1.0, "eager": 2.0}, "contender": name}
        for name in ("mxfp8", "torchao mxfp8")
    ]
    write(tmp_path, "train_linear", rows)
    assert compare.read_times(tmp_path / "train_linear.json")[0] == {("mxfp8 4x4x4", "eager"): 2.0}


def test_the_control_of_a_decoding_model_is_the_same_time_of_bfloat16(tmp_path):
    rows = [{"work": "bfloat16", "times": {"token": 5.0, "prefill": 100.0}}, {"work": "mxfp8", "times": {"token": 2.5}}]
    write(tmp_path, "decode_model", rows)
    assert compare.read_times(tmp_path / "decode_model.json") == ({("mxfp8", "token"): 2.5}, {("mxfp8", "token"): 5.0})


def test_folders_without_common_records_have_nothing_to_compare(tmp_path, capsys):
    write(tmp_path / "before", "cast", [])
    (tmp_path / "after").mkdir()
    assert compare.main([str(tmp_path / "before"), str(tmp_path / "after")]) == 2
    out = capsys.readouterr().out
    assert "cast: not compared, since only" in out and "nothing to compare" in out


def test_the_records_of_the_repository_can_be_read():
    results = compare.Path(compare.__file__).parent / "results"
    for name in compare.RECORDS:
        times, controls = compare.read_times(results / f"{name}.json")
        assert times and controls.keys() <= times.keys()
        assert not any("torchao" in word or "gemlite" in word for key in times for word in key)
