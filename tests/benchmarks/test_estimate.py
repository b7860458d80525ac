"""The estimate of sharded training: properties that hold under all assumptions."""

import pytest

from benchmarks import estimate as e


def test_eighty_layers_have_the_parameters_of_a_70b_model_without_embeddings():
    assert pytest.approx(68.5e9, rel=0.01) == 80 * e.PARAMETERS


@pytest.mark.parametrize("setup", e.SETUPS, ids=lambda s: s.name)
def test_more_gpus_never_take_less_time_nor_fewer_tokens(setup):
    times, tokens = ([f(setup, gpus) for gpus in e.GPUS] for f in (e.gather, e.tokens_to_hide))
    assert times == sorted(times) and tokens == sorted(tokens)


@pytest.mark.parametrize("gpus", e.GPUS)
def test_codes_halve_the_bytes_but_not_the_latency(gpus):
    plain, codes = e.SETUPS[:2]
    hops = e.HOP * (max(gpus // e.NODE, 1) - 1)
    assert (e.gather(codes, gpus) - hops) / (e.gather(plain, gpus) - hops) == pytest.approx(1025 / 2048)


@pytest.mark.parametrize("setup", e.SETUPS, ids=lambda s: s.name)
def test_at_the_tokens_of_the_table_products_take_as_long_as_communication(setup):
    tokens = e.tokens_to_hide(setup, 64)
    reduced = e.collective(e.PARAMETERS * e.GRADIENT, 64, setup.link)
    slack = e.forward(setup, tokens) - e.gather(setup, 64), 2 * e.forward(setup, tokens) - e.gather(setup, 64) - reduced
    assert min(slack) == pytest.approx(0, abs=1e-9)


def test_one_gpu_sends_nothing():
    assert e.collective(1e9, 1, 450e9) == 0
