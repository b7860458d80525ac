"""Perplexity and KL divergence by hand, where probabilities are zero, losses are large and tokens are few."""

import math
import warnings

import pytest
import torch

from mxtensor.report.quality import quality

ROWS = torch.tensor([[0, 1, 0]])


def logs(*probabilities):
    return torch.tensor([probabilities]).log()


def test_by_hand():
    found, reference = logs([0.5, 0.5], [0.25, 0.75]), logs([0.75, 0.25], [0.5, 0.5])
    q = quality(found, reference, ROWS)
    kl = [0.75 * math.log(1.5) + 0.25 * math.log(0.5), 0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)]
    assert q.perplexity == pytest.approx(math.sqrt(2 * 4)) and q.reference_perplexity == pytest.approx(math.sqrt(4 * 2))
    assert q.kl == pytest.approx(sum(kl) / 2) and q.kl_error == pytest.approx(abs(kl[0] - kl[1]) / 2, rel=1e-5)
    assert q.same_token == 0.5 and q.tokens == 2


def test_a_token_that_both_models_mask_adds_nothing():
    """Its probability is zero, and the difference of both logarithms is not a number."""
    found, reference = logs([0.0, 0.5, 0.5], [0.2, 0.8, 0.0]), logs([0.0, 0.25, 0.75], [0.5, 0.5, 0.0])
    kl = [0.25 * math.log(0.5) + 0.75 * math.log(1.5), 0.5 * math.log(0.5 / 0.2) + 0.5 * math.log(0.5 / 0.8)]
    assert quality(found, reference, ROWS).kl == pytest.approx(sum(kl) / 2)
    assert quality(found, logs([0.5, 0.25, 0.25], [0.5, 0.5, 0.0]), ROWS).kl == math.inf


def test_a_loss_beyond_the_range_of_exp_is_an_infinite_perplexity():
    assert quality(torch.full((1, 2, 2), -800.0), logs([0.5, 0.5], [0.5, 0.5]), ROWS).perplexity == math.inf


def test_the_error_of_one_token_is_unknown():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        q = quality(logs([0.5, 0.5]), logs([0.5, 0.5]), torch.tensor([[0, 1]]))
    assert q.tokens == 1 and q.kl == 0 and math.isnan(q.kl_error)
