"""The benchmark of caches, on a model of a moment."""

import pytest

from benchmarks import harness, kv_cache

pytest.importorskip("transformers")
SIZES = {"tokens": 40, "layers": 1, "hidden": 32, "heads": 4, "kv-heads": 2, "head-dim": 32, "repeats": 2}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_table_has_times_and_bytes_of_each_cache(dtype, tmp_path, capsys):
    options = SIZES | {"formats": "mxfp8", "dtype": dtype, "json": tmp_path / "x.json"}
    kv_cache.main([word for k, v in options.items() for word in (f"--{k}", str(v))])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[6:]]
    assert [line[:3] for line in lines] == [[work, "40", name] for work in ("attention", "step")
                                            for name in ("plain", "mxfp8")]  # fmt: skip
    assert all(float(line[3]) > 0 for line in lines) and lines[2][-1] == "1.0000" and 0 < float(lines[3][-1]) < 2
    _, rows = harness.read_json(tmp_path / "x.json", kv_cache.CacheRow, "decode")
    assert [row.work for row in rows] == ["attention 40", "step 40"] and rows[1].cache_bytes.keys() == {
        "plain",
        "mxfp8",
    }
