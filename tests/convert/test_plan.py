"""mx.Plan: choices under a budget equal a search of all choices; a plan is a file that quantize_ takes."""

import itertools
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import mxtensor as mx
from mxtensor.convert import format_plan
from mxtensor.convert.format_plan import Choice, PlannedWeight, hull, planned_for, within

FORMATS = ("mxfp4-weight-only", "mxfp6_e2m3-weight-only", "mxfp8-weight-only")


def made_up(seed, weights=4, choices=4):
    rng = random.Random(seed)
    return {
        f"w{i}": {f"c{j}": Choice(rng.randint(1, 40), rng.randint(0, 1000) / 8) for j in range(choices)}
        for i in range(weights)
    }


def best(most, weights):
    """The least sum of errors by trying all choices."""
    fits = (
        sum(weights[w][c].error for w, c in zip(weights, names, strict=True))
        for names in itertools.product(*(weights[w] for w in weights))
        if sum(weights[w][c].nbytes for w, c in zip(weights, names, strict=True)) <= most
    )
    return min(fits)


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_the_best_of_all(seed):
    weights = made_up(seed)
    least = sum(min(c.nbytes for c in choices.values()) for choices in weights.values())
    most = sum(max(c.nbytes for c in choices.values()) for choices in weights.values())
    for most_bytes in range(least, most + 1, 3):
        chosen = within(most_bytes, weights)
        assert chosen.keys() == weights.keys()
        assert sum(weights[w][c].nbytes for w, c in chosen.items()) <= most_bytes
        assert sum(weights[w][c].error for w, c in chosen.items()) == best(most_bytes, weights)


def test_the_first_weight_of_three_does_not_take_the_bytes_of_the_two_others():
    """Its step has the largest gain for a byte, and leaves bytes that nothing fills."""
    step = {"small": Choice(10, 1.0), "large": Choice(15, 0.0)}
    weights = {"a": {"small": Choice(10, 1.3), "large": Choice(16, 0.0)}, "b": step, "c": step}
    assert within(40, weights) == {"a": "small", "b": "large", "c": "large"}
    assert within(36, weights) == {"a": "large", "b": "small", "c": "small"}


def many(count):
    """Weights of all sizes, in four formats whose errors fall by four with each bit."""
    rng = random.Random(count)
    made = {}
    for i in range(count):
        values, scale = rng.randint(10**6, 10**8), rng.lognormvariate(0, 1)
        made[f"w{i}"] = {
            str(bits): Choice(int(values * bits / 8), scale * rng.uniform(0.8, 1.2) * 4.0**-bits)
            for bits in (4.25, 4.5, 6.25, 8.25)
        }
    return made


@pytest.mark.parametrize("states", [1, 64])
def test_a_search_that_is_cut_off_is_never_worse_than_the_greedy_choice(states, monkeypatch):
    monkeypatch.setattr(format_plan, "STATES", states)
    weights = many(40)
    for bits in (4.4, 5.0, 6.0, 7.5):
        most = int(sum(c["4.25"].nbytes for c in weights.values()) / 4.25 * bits)
        chosen, (greedy, _) = within(most, weights), format_plan._greedy(most, weights)
        assert sum(weights[w][c].nbytes for w, c in chosen.items()) <= most
        assert format_plan._error(weights, chosen) <= format_plan._error(weights, greedy)


def test_a_thousand_weights_take_less_than_two_seconds():
    weights = many(1000)
    most = int(sum(c["4.25"].nbytes for c in weights.values()) / 4.25 * 5)
    begin = time.process_time()
    chosen = within(most, weights)
    assert time.process_time() - begin < 2
    assert 0.9999 * most < sum(weights[w][c].nbytes for w, c in chosen.items()) <= most


@pytest.mark.parametrize("seed", range(20))
def test_a_hull_has_the_best_choice_for_every_price_of_a_byte(seed):
    choices = made_up(seed, 1, 7)["w0"]
    names = hull(choices)
    assert [choices[n].nbytes for n in names] == sorted({choices[n].nbytes for n in names})
    for price in [0.0, *(2.0**i for i in range(-8, 12)), 1e9]:
        cost = {name: choice.error + price * choice.nbytes for name, choice in choices.items()}
        assert min(cost[name] for name in names) == pytest.approx(min(cost.values()))


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))


def weights():
    def row(values, errors):
        nbytes = {f: values * bits // 32 for f, bits in zip(FORMATS, (17, 25, 33), strict=True)}
        return PlannedWeight(values, nbytes, dict(zip(FORMATS, errors, strict=True)))

    return {"0.weight": row(2048, (0.4, 0.2, 0.1)), "1.weight": row(2048, (3.0, 0.3, 0.01))}


def test_a_plan_is_written_through_links_and_to_pipes(tmp_path):
    """As /dev/stdout is: a link to a pipe or a terminal, which must stay one."""
    plan = planned_for(weights(), 5.25, "kl")
    (tmp_path / "link.json").symlink_to("plan.json")
    plan.save(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink() and mx.Plan.load(tmp_path / "plan.json").bits == plan.bits
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor() as pool:
        read = pool.submit((tmp_path / "pipe").read_text)
        plan.save(tmp_path / "pipe")
        assert read.result(10) == (tmp_path / "plan.json").read_text()
    assert (tmp_path / "pipe").is_fifo() and len(list(tmp_path.iterdir())) == 3


def test_a_plan_spends_the_budget_where_it_takes_away_most():
    plan = planned_for(weights(), 5.25, "kl")
    assert plan.formats == {"0.weight": FORMATS[0], "1.weight": FORMATS[1]}
    assert plan.bits == 5.25 and plan.error == pytest.approx(0.7) and plan.values == 4096
    assert plan.with_bits(4.25).error == pytest.approx(3.4) and plan.with_bits(100).bits == 8.25
    m = mx.quantize_(two_layers(), plan)
    assert [str(layer.weight.format) for layer in m] == ["mxfp4_e2m1", "mxfp6_e2m3"]
    assert 8 * sum(layer.weight.nbytes for layer in m) / 4096 == plan.bits
    assert str(plan).splitlines()[-1].split() == ["all", "4,096", "5.25", "0.7000"]
    with pytest.raises(ValueError, match=r"bits is 4, and the smallest formats take 4.25 bits per value"):
        plan.with_bits(4)


def test_a_plan_is_saved_loaded_and_edited(tmp_path):
    plan = planned_for(weights(), 5.25, "squared")
    plan.save(tmp_path / "plan.json")
    loaded = mx.Plan.load(str(tmp_path / "plan.json"))
    assert loaded.formats == plan.formats and loaded.weights == plan.weights and loaded.measure == "squared"
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]
    loaded.formats["0.weight"] = FORMATS[2]
    assert loaded.bits == 7.25 and plan.bits == 5.25
    assert str(mx.quantize_(two_layers(), loaded)[0].weight.format) == "mxfp8_e4m3"
    loaded.formats["0.weight"] = "mxint8"
    message = r"the format of 0.weight is 'mxint8', which was not measured; choose one of mxfp4-weight"
    with pytest.raises(ValueError, match=message):
        _ = loaded.bits
    assert "2 weights" not in repr(plan) and "0.weight" in repr(plan)


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 2, "measure": "kl", "weights": {}}', '{"version": 1}'])
def test_a_file_that_is_not_a_plan_is_refused(text, tmp_path):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ValueError, match=r"plan.json was not written by mx.Plan.save: "):
        mx.Plan.load(tmp_path / "plan.json")


def test_layers_of_blocks_are_one_line():
    rows = {f"layers.{i}.mlp.weight": weights()["0.weight"] for i in range(3)}
    text = str(planned_for(rows, 5, "kl"))
    assert "layers.*.mlp.weight  2 mxfp4-weight-only, 1 mxfp6_e2m3-weight-only" in text
