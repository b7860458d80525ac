"""Errors by layer: the formula against hand-computed numbers, the rows, the errors, and the plot."""

import copy
import math
import sys

import pytest
import torch
from torch import nn

import mxtensor as mx
from mxtensor.report.model_report import LayerError, layer_errors, plot_layer_errors, short_names, sqnr_db

PNG = b"\x89PNG\r\n\x1a\n"


def two_layers(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 40, bias=False)).to(dtype)


@pytest.mark.parametrize(
    ("reference", "other", "db"),
    [
        ([3.0, 4.0], [3.0, 3.5], 20.0),  # 25 / 0.25
        ([1.0, 1.0], [2.0, 0.0], 0.0),
        ([1.0, 0.0], [11.0, 0.0], -20.0),
        ([1.0, -2.0], [1.0, -2.0], math.inf),
        ([0.0, 0.0], [0.0, 0.0], math.inf),
        ([0.0, 0.0], [0.0, 1.0], -math.inf),
        ([1e-30, 0.0], [1.1e-30, 0.0], 20.0),  # the squares are below the float32 range
        ([1e30, 0.0], [1.1e30, 0.0], 20.0),  # and these above it
        ([1.0, 2.0], [1.0, math.inf], -math.inf),
        ([1e-35, 0.0], [1e35, 0.0], -1400.0),
    ],
)
def test_sqnr_by_hand(reference, other, db):
    assert sqnr_db(torch.tensor(reference), torch.tensor(other)) == pytest.approx(db, abs=1e-4)


def test_sqnr_of_nan_and_of_nothing():
    assert math.isnan(sqnr_db(torch.ones(2), torch.tensor([1.0, math.nan])))
    assert math.isnan(sqnr_db(torch.tensor([math.nan]), torch.ones(1)))
    assert math.isnan(sqnr_db(torch.tensor([1.0, math.inf]), torch.zeros(2)))
    assert sqnr_db(torch.empty(0), torch.empty(0)) == math.inf


def test_sqnr_takes_mixed_dtypes_and_gradients():
    x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    assert sqnr_db(x, x.detach().bfloat16()) == math.inf


@pytest.mark.parametrize("which", ["model", "reference"])
def test_weights_without_values_are_refused(which):
    reference = two_layers()
    model = mx.quantize_(copy.deepcopy(reference), "mxfp8-weight-only")
    (model if which == "model" else reference).to("meta")
    with pytest.raises(ValueError, match=f"'0.weight' of the {which} is on the device meta and has no values; load"):
        layer_errors(model, reference)


def test_sqnr_refuses_to_broadcast():
    with pytest.raises(ValueError, match=r"reference \(2, 3\), other \(3,\)"):
        sqnr_db(torch.ones(2, 3), torch.ones(3))


def test_the_rows_of_a_model():
    model = two_layers()
    small = mx.quantize_(copy.deepcopy(model), "mxfp8")
    first, second = layer_errors(small, model)
    assert (first.fqn, first.format, first.shape) == ("0.weight", "mxfp8_e4m3", (96, 64))
    assert (second.fqn, second.shape) == ("2.weight", (40, 96))
    assert first.bits_per_value == 8.25
    assert (first.bytes_before, first.bytes_after) == (96 * 64 * 4, 96 * 64 + 96 * 2)
    error = model[0].weight.detach() - small[0].weight.dequantize()
    assert first.max_abs_error == error.abs().max().item() > 0
    assert first.sqnr_db == sqnr_db(model[0].weight, small[0].weight.dequantize())
    assert 30 < first.sqnr_db < 33


def test_the_reference_may_be_a_state_dict():
    model = two_layers()
    small = mx.quantize_(copy.deepcopy(model), "nvfp4-weight-only")
    assert layer_errors(small, model.state_dict()) == layer_errors(small, model)


def test_exact_values_have_no_error():
    model = nn.Linear(32, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.arange(64).reshape(2, 32) % 7 - 3)
    (row,) = layer_errors(mx.quantize_(copy.deepcopy(model), "mxfp8"), model)
    assert (row.sqnr_db, row.max_abs_error) == (math.inf, 0.0)


def test_a_bfloat16_outer_dtype_adds_no_error():
    """An nvfp4 value is the product of an element and two scales, which bfloat16 would round again."""
    model = two_layers(torch.bfloat16)
    small = mx.quantize_(copy.deepcopy(model), "nvfp4")
    rows = layer_errors(small, model)
    exact = mx.quantize(model[0].weight.detach().float(), "nvfp4").dequantize()
    assert not torch.equal(small[0].weight.dequantize(), exact)
    assert rows[0].sqnr_db == sqnr_db(model[0].weight.float(), exact)
    assert rows[0].bytes_before == 96 * 64 * 2


def test_shared_weight_has_one_row():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    small = mx.quantize_(copy.deepcopy(model), "mxfp8")
    assert [row.fqn for row in layer_errors(small, model)] == ["0.weight"]


def test_plain_model_has_no_rows():
    assert layer_errors(two_layers(), {}) == []


def test_reference_quantized_in_place_is_refused():
    model = two_layers()
    with pytest.raises(ValueError, match=r"'0\.weight' of the reference is quantized itself.*copy\.deepcopy"):
        layer_errors(mx.quantize_(model, "mxfp8"), model)


def test_reference_that_does_not_fit_is_refused():
    small = mx.quantize_(two_layers(), "mxfp8")
    with pytest.raises(ValueError, match=r"no tensor '0\.weight'"):
        layer_errors(small, {})
    with pytest.raises(ValueError, match=r"\(96, 64\), the reference \(64, 96\)"):
        layer_errors(small, {"0.weight": torch.zeros(64, 96)})


@pytest.mark.parametrize(
    ("fqns", "names"),
    [
        (["0.model.a.q.weight", "0.model.a.k.weight", "0.model.out.weight"], ["a.q", "a.k", "out"]),
        (["a.in_proj_weight", "a.out.weight"], ["in_proj_weight", "out"]),
        (["a.weight", "a.b.weight"], ["a", "a.b"]),
        (["head.proj.weight"], ["proj"]),
        (["weight"], ["weight"]),
        ([], []),
    ],
)
def test_short_names(fqns, names):
    assert short_names(fqns) == names


def test_plot_is_written_with_its_folder(tmp_path):
    pytest.importorskip("matplotlib")
    model = two_layers()
    rows = {name: layer_errors(mx.quantize_(copy.deepcopy(model), name), model) for name in mx.FORMATS}
    path = plot_layer_errors(rows, tmp_path / "new" / "error.png")
    assert path == tmp_path / "new" / "error.png"
    assert path.read_bytes().startswith(PNG)


def test_a_plot_is_where_its_path_says(tmp_path):
    """matplotlib adds .png, also to the name of a folder: the plot was beside it."""
    pytest.importorskip("matplotlib")
    rows = {"a": layer_errors(mx.quantize_(two_layers(), "mxfp8-weight-only"), two_layers())}
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match=r"folder is a folder; pass the name of a file, such as .*plot\.png"):
        plot_layer_errors(rows, tmp_path / "folder")
    path = plot_layer_errors(rows, tmp_path / "errors")
    assert path == tmp_path / "errors.png" and path.read_bytes().startswith(PNG)
    assert {p.name for p in tmp_path.iterdir()} == {"errors.png", "folder"}


def test_plot_omits_exact_layers(tmp_path):
    pytest.importorskip("matplotlib")
    exact = LayerError("0.weight", "mxfp8_e4m3", (2, 32), math.inf, 0.0, 8.25, 256, 66)
    assert plot_layer_errors({"mxfp8": [exact]}, tmp_path / "exact.png").stat().st_size > 0


def test_plot_of_nothing_is_refused(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="no rows to plot"):
        plot_layer_errors({"mxfp8": []}, tmp_path / "none.png")


def test_plot_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"mxtensor\[plot\]"):
        plot_layer_errors({}, tmp_path / "error.png")
