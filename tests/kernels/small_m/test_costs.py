"""The cost model of launch configs: its fit, its file, and the choices that it makes."""

import re
from pathlib import Path

import pytest
import torch

import mxtensor as mx
from mxtensor.kernels import expected_time as costs
from mxtensor.kernels.small_m import heuristics
from mxtensor.kernels.small_m.config import LaunchConfig
from mxtensor.kernels.small_m.heuristics import Measured, choose_config, gpu_of, table
from mxtensor.report.costs import FITTED, HELD_OUT, check, fit, lent, main, products, read_times, updated, write_times
from mxtensor.report.tune import is_narrow

CPU = torch.device("cpu")
GPU = gpu_of(CPU)
MXFP8 = mx.FORMATS["mxfp8"]


def wgmma_configs(rows):
    """The configs of the table for MXFP8 and this number of rows that use wgmma."""
    lines = (line for line in table((9, 0)) if line.config.wgmma and line.m == rows)
    return list(dict.fromkeys(line.config for line in lines))[:2]


CONFIGS = [line.config for line in table((9, 0)) if line.format == MXFP8.name and line.m == 16 and not line.casts][::6]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_the_fit_finds_coefficients_that_explain_all_times(config):
    true = costs.Cost(config, 2.0, 0.3, 0.25, 0.0, 0.1 * config.wgmma, 0.2 * bool(config.persistent))
    times = {
        (MXFP8.name, False, 16, config): [
            (n, k, costs.predict(true, 16, n, k, MXFP8, GPU)) for n, k in FITTED + HELD_OUT
        ]
    }
    (found,) = fit(times, GPU, lambda n, k: (n, k) in FITTED).values()
    for n, k in HELD_OUT:
        expected = costs.predict(true, 16, n, k, MXFP8, GPU)
        assert costs.predict(found, 16, n, k, MXFP8, GPU) == pytest.approx(expected, rel=1e-6)
    assert min(found[1:]) >= 0
    assert "error 0.0% median" in check(times, {next(iter(times)): found}, GPU, HELD_OUT)


def test_a_file_of_costs_is_read_as_it_was_written(tmp_path, monkeypatch):
    some = {("mxfp8_e4m3", casts, 4): [costs.Cost(CONFIGS[0], 1.5, 0.25, 0.125, 0.0)] for casts in (False, True)}
    monkeypatch.setattr(costs, "FOLDER", tmp_path)
    costs.write(costs.path_of((9, 0)), some, "a GPU")
    costs.costs_of.cache_clear()
    try:
        assert costs.costs_of((9, 0)) == {key: tuple(value) for key, value in some.items()}
        assert costs.costs_of((8, 0)) == {}
    finally:
        costs.costs_of.cache_clear()


TIMES = Path(__file__).parents[3] / "benchmarks" / "results" / "small_m_times.json"


@pytest.mark.exhaustive
def test_the_costs_are_those_of_the_times_in_the_repository(tmp_path, capsys):
    main(["--read", str(TIMES), "--json", str(tmp_path / "costs.json")])
    assert (tmp_path / "costs.json").read_text() == costs.path_of((9, 0)).read_text()
    error = float(re.search(r"held out: 10 shapes, \d+ times: error ([\d.]+)% median", capsys.readouterr().out)[1])
    assert 0 < error < 5


def test_times_are_read_as_they_were_written_and_their_costs_replace_those_of_their_formats(tmp_path):
    one, other = (costs.Cost(config, 1.0, 2.0, 3.0, 4.0, 5.0) for config in CONFIGS[:2])
    times = {(MXFP8.name, False, 16, one.config): [(4096, 4096, 1.5), (512, 2880, 2.5)]}
    write_times(tmp_path / "times", "a GPU", times)
    assert read_times(tmp_path / "times") == ("a GPU", times)
    key, of_another_format = (MXFP8.name, False, 16), ("nvfp4", False, 16)
    new = one._replace(start=9.0)
    found = updated({key: (one, other), of_another_format: (other,)}, {(*key, one.config): new})
    assert found == {key: [new], of_another_format: [other]}


def test_a_format_borrows_the_costs_of_configs_that_it_was_not_timed_with():
    shared, missing = wgmma_configs(64)
    a = costs.Cost(shared, 2.0, 0.5, 0.25, 0.0)
    known = {
        ("mxfp4_e2m1", False, 64, shared): a,
        ("mxfp4_e2m1", False, 64, missing): a._replace(config=missing),
        ("nvfp4", False, 64, shared): costs.Cost(shared, *(1.5 * value for value in a[1:])),
    }
    ((case, cost),) = lent(known, GPU).items()
    assert case == ("nvfp4", False, 64, missing)
    fourth = mx.FORMATS["nvfp4"].bits_per_value / mx.FORMATS["mxfp4"].bits_per_value
    assert 1.4 < cost.step / a.step <= 1.5 * fourth
    assert lent({case: cost for case, cost in known.items() if case[0] == "mxfp4_e2m1"}, GPU) == {}


@pytest.mark.parametrize("m", [64, 512])
def test_tiles_narrower_than_the_rows_are_tried_for_weights_so_small_that_two_waves_do(m):
    tried = list(products(MXFP8, [(512, 2880), (28672, 8192)], GPU))
    narrow = {(n, config) for rows, n, _, config, _ in tried if rows == m and is_narrow(config, m)}
    assert {n for n, _ in narrow} == {512}
    assert all(costs.tiles_of(config, m, n) <= 2 * costs.tiles_at_a_time(config, GPU) for n, config in narrow)


def test_clusters_that_do_not_run_at_a_time_and_rows_of_no_whole_chunks_take_longer():
    config = LaunchConfig(1, 4, 12, 1, 4, 12, 1, 4, False, True, 3)
    cost = costs.Cost(config, 1.0, 0.0, 0.0, 10.0, 0.5)
    assert costs.predict(cost, 32, 30 * 192, 5120, MXFP8, GPU) == 11
    assert costs.predict(cost, 32, 30 * 192 + 1, 5120, MXFP8, GPU) == 21
    alone = cost._replace(config=config._replace(reduce_global=True))
    assert costs.predict(alone, 32, 33 * 192, 5120, MXFP8, GPU) == 11
    assert costs.predict(alone, 32, 33 * 192 + 1, 5120, MXFP8, GPU) == 21
    assert costs.predict(cost, 32, 512, 2880, MXFP8, GPU) == 11 + 0.5 * 6


def test_a_config_is_taken_for_sizes_about_which_it_was_measured():
    """Whatever its coefficients say of others; sizes beyond all count as the nearest."""
    of_large = costs.Cost(CONFIGS[0], 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 6144, 28672, 4096, 8192)
    of_small = costs.Cost(CONFIGS[1], 5.0, 0.0, 0.0, 0.0, 0.0, 0.0, 512, 4096, 512, 8192)

    def order(n, k):
        return [us for us, _ in costs.by_expected_time([of_small, of_large], 16, n, k, MXFP8, GPU)]

    assert order(1024, 4096) == [5.0, 1.0] and order(8192, 4096) == order(100_000, 100_000) == [1.0, 5.0]
    assert order(4096, 4096) == [1.0, 5.0]  # 1.5 times less than the least
    assert order(8192, 1024) == [1.0, 5.0]  # no config knows it: the expected time decides


def test_every_number_of_rows_has_costs_and_a_shape_that_was_not_measured_takes_the_cheapest_that_runs():
    for name in ("mxfp8_e4m3", "mxfp4_e2m1"):
        for m in costs.ROWS:
            known = [cost for cost in costs.costs_of((9, 0))[name, False, m] if not cost.config.direct]
            chosen = choose_config(CPU, mx.FORMATS[name], m, 5760, 2880, m, lambda config: not config.direct)
            cheapest = sorted(known, key=lambda cost: costs.predict(cost, m, 5760, 2880, mx.FORMATS[name], GPU))
            runs = [c.config for c in cheapest if heuristics.layout_of(mx.FORMATS[name], c.config, m, 5760, 2880, GPU)]
            assert chosen == runs[0]


def test_what_tune_saved_comes_first(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gpu = GPU._replace(name="a GPU of this test")
    monkeypatch.setattr(heuristics, "gpu_of", lambda device: gpu)
    usual = choose_config(CPU, MXFP8, 16, 5760, 2880, 16)
    beside = choose_config(CPU, MXFP8, 16, 5760, 2912, 16)
    other = next(c for c in CONFIGS if c not in (usual, beside) and heuristics.layout_of(MXFP8, c, 16, 5760, 2880, gpu))
    heuristics.store_tuned(gpu.name, [Measured(MXFP8.name, False, 16, 5760, 2880, 9.0, other)])
    heuristics.store_tuned(gpu.name, [Measured(MXFP8.name, False, 8, 5760, 2880, 9.0, other)])
    try:
        assert choose_config(CPU, MXFP8, 16, 5760, 2880, 16) == other
        assert choose_config(CPU, MXFP8, 16, 5760, 2912, 16) == beside
        assert len(heuristics.tuned(gpu.name)) == 2
    finally:
        heuristics.tuned.cache_clear()


def test_tune_needs_quantized_layers_on_a_gpu():
    with pytest.raises(ValueError, match="tune needs a model with quantized layers on a CUDA device"):
        mx.tune(mx.quantize_(torch.nn.Linear(64, 64), "mxfp8"))
