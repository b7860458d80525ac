"""The error of the output of each layer, by hand."""

import copy
import math

import pytest
import torch
from torch import nn

import mxtensor as mx
from mxtensor.report.model_report import LayerError, OutputError, output_errors, sqnr_db
from mxtensor.report.page import Measured, page, series, summary


def two_layers():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)).requires_grad_(False)
    return model, mx.quantize_(copy.deepcopy(model), "mxfp4")


def test_alone_and_total_by_hand():
    model, small = two_layers()
    x, y = torch.randn(5, 64), torch.randn(7, 64)
    first, second = output_errors(small, model, [{"input": x}, {"input": y}])
    both = torch.cat((x, y))
    inner = model[:2](both)
    assert (first.fqn, second.fqn) == ("0.weight", "2.weight")
    assert first.alone_db == first.total_db == pytest.approx(sqnr_db(model[0](both), small[0](both)))
    assert second.alone_db == pytest.approx(sqnr_db(model(both), small[2](inner)))
    assert second.total_db == pytest.approx(sqnr_db(model(both), small(both))) != second.alone_db
    assert not model[0]._forward_hooks and not small[0]._forward_hooks


def test_an_exact_layer_is_infinite_and_one_that_does_not_run_has_no_row():
    model, _ = two_layers()
    model[0].weight.fill_(1.0)
    small = mx.quantize_(copy.deepcopy(model), "mxfp8-weight-only")
    assert [row.alone_db for row in output_errors(small[:1], model[:1], [{"input": torch.ones(2, 64)}])] == [math.inf]
    assert output_errors(small, model, []) == []


def test_the_reference_is_another_model():
    model, small = two_layers()
    with pytest.raises(ValueError, match="the reference has no layer '0' of its own"):
        output_errors(small, small, [])
    with pytest.raises(ValueError, match="the reference has no layer '2' of its own"):
        output_errors(small, model[:1], [])


def test_models_run_in_evaluation_mode_and_stay_in_theirs():
    """Dropout of the two models differs, which was their error."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(), nn.BatchNorm1d(64), nn.Linear(64, 32)).requires_grad_(False)
    small, x = mx.quantize_(copy.deepcopy(model), "mxfp8"), [{"input": torch.randn(8, 64)}]
    expected = output_errors(small.eval(), model.eval(), x)
    small.train()
    assert output_errors(small, model.train(), x) == expected and expected[1].total_db > 20
    assert all(module.training for m in (model, small) for module in m.modules())
    assert model[2].num_batches_tracked == 0


@pytest.mark.parametrize(
    ("inputs", "message"),
    [({"input": 1}, "inputs is {'input': 1}; pass a list of dicts"), ([torch.ones(2)], "inputs has a tensor .* dict")],
)
def test_inputs_that_are_not_dicts_are_refused(inputs, message):
    model, small = two_layers()
    with pytest.raises(TypeError, match=message):
        output_errors(small, model, inputs)


def test_outputs_are_those_before_something_writes_into_them():
    def model(inplace):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace=inplace), nn.Linear(64, 32)).requires_grad_(False)

    x = [{"input": torch.randn(8, 64)}]
    plain, writing = (output_errors(mx.quantize_(model(kind), "mxfp4"), model(kind), x) for kind in (False, True))
    assert plain == writing


class HasCache(nn.Module):
    """Adds the output of its layer to a cache, and returns the sum."""

    def __init__(self):
        super().__init__()
        self.layer, self.next = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x, cache):
        cache.sum = cache.sum + self.layer(x)
        return self.next(cache.sum)


class SumCache:
    def __init__(self, start):
        self.sum = start


def test_both_models_get_a_cache_as_it_was():
    model, x = HasCache().requires_grad_(False), torch.randn(8, 64)
    small, cache = mx.quantize_(copy.deepcopy(model), "mxfp8"), SumCache(torch.randn(8, 64))
    start = cache.sum
    rows = output_errors(small, model, [{"x": x, "cache": cache}])
    assert cache.sum is start and rows[1].total_db == pytest.approx(
        sqnr_db(model(x, SumCache(start)), small(x, SumCache(start)))
    )


class Routed(nn.Module):
    """Gives its layer another number of rows on each call."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(64, 64), 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x[: self.calls])


def test_a_layer_with_other_rows_has_no_total():
    model = Routed().requires_grad_(False)
    small = mx.quantize_(copy.deepcopy(model), "mxfp8")
    small.calls = 1
    (row,) = output_errors(small, model, [{"x": torch.randn(4, 64)}])
    assert row.alone_db > 20 and math.isnan(row.total_db)


# ---------------------------------------------------------------------------------------------- the page


def test_layers_of_one_kind_are_one_line():
    found = series({"m.layers.0.q.weight": 1.0, "m.layers.0.k.weight": math.inf, "m.layers.1.q.weight": 2.0,
                    "m.layers.1.k.weight": 3.0})  # fmt: skip
    assert found == {"q": ([0, 1], [1.0, 2.0]), "k": ([1], [3.0])}


def measured(**changes):
    weights = [LayerError("a.0.<q>.weight", "mxfp8_e4m3", (4, 4), 30.0, 0.5, 8.25, 64, 17)]
    return Measured(**{"label": "a & b", "bits": 8.25, "nbytes": 17, "weights": weights, "outputs": []} | changes)


def test_the_page_escapes_names_and_has_no_plot_without_values():
    pytest.importorskip("matplotlib")
    text = page("T <1>", {"model": "x<y"}, [measured()])
    assert "a.0.&lt;q&gt;.weight" in text and "a &amp; b" in text and "x&lt;y" in text and "<q>" not in text
    assert text.count("<img") == 1 and "output dB" not in text
    text = page("T", {}, [measured(outputs=[OutputError("a.0.<q>.weight", 25.0, math.nan)])])
    assert text.count("<img") == 2 and "<td>25.0</td><td>-</td>" in text
    assert summary([measured()])[1][0][3:6] == ["30.0", "30.0", "a.0.<q>.weight"]


def test_a_weight_that_is_not_finite_is_the_lowest():
    weights = [LayerError(name, "mxfp8_e4m3", (4, 4), db, 0.5, 8.25, 64, 17)
               for name, db in (("a", 30.0), ("nan", math.nan), ("b", 20.0), ("exact", math.inf))]  # fmt: skip
    assert summary([measured(weights=weights)])[1][0][3:6] == ["-", "-", "nan"]
    assert summary([measured(weights=[weights[0], *weights[2:]])])[1][0][3:6] == ["25.0", "20.0", "b"]


def test_a_page_without_a_quantized_layer_is_refused():
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="no layer is quantized"):
        page("T", {}, [measured(weights=[])])
