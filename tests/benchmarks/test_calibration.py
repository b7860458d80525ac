"""The benchmark of calibration: its texts, rows, shares and record, on a made-up model."""

import json

import pytest
import torch

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import calibration
from mxtensor.report.quality import Quality


def model():
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=50,
    )  # fmt: skip
    torch.manual_seed(0)
    m = LlamaForCausalLM(config).eval().requires_grad_(False)
    for layer in m.model.layers:
        layer.mlp.up_proj.weight.mul_(20)
    return m


def test_no_text_both_calibrates_and_is_predicted():
    assert not set(calibration.CALIBRATION) & set(calibration.EVALUATION)
    calibrates, predicted = (calibration.documentation(m) for m in (("random",), ("json",)))
    assert "Mersenne Twister" in calibrates and "JSON (JavaScript Object Notation)" in predicted
    assert "\b" not in calibrates  # pydoc prints bold letters twice


@pytest.mark.exhaustive
def test_a_method_is_measured_beside_rounding_to_nearest(tmp_path):
    m = model()
    rows = {name: torch.randint(0, 50, (2, 16)) for name in calibration.WINDOWS}
    measure = calibration.Measure(m, rows)
    assert all(q.kl == 0 for q in measure.quality(m).values())
    data = [torch.randint(0, 50, (4, 16)) for _ in range(4)]
    found = [measure.row("mxfp4-weight-only", method, data) for method in calibration.METHODS]
    assert [row.method for row in found] == list(calibration.METHODS)
    assert all(row.seconds > 0 for row in found)
    bits = {row.method: row.bits for row in found}
    assert bits["nearest, head"] == bits["gptq, head"] < bits["nearest"]
    makes_biases = {method for method, value in bits.items() if value > bits["nearest"]}
    assert makes_biases == {method for method in bits if "bias" in method}
    assert all(
        value == bits["nearest"] for method, value in bits.items() if "bias" not in method and "head" not in method
    )
    assert all(q.kl > 0 and q.tokens == 30 for row in found for q in row.quality.values())
    file = tmp_path / "record.json"
    calibration.harness.write_json(file, found)
    assert calibration.read(file) == found and json.loads(file.read_text())["machine"]


def test_the_table_has_the_share_of_kl_that_is_gone():
    def row(method, kl):
        return calibration.Row("mxfp4", method, 4.25, 60.0, {"novel": Quality(20.0, kl, 0.01, 0.9, 100)})

    alone, before = [row("gptq", 0.2)], [row("nearest", 0.5), row("gptq", 0.2)]
    assert calibration.cells(before)[1] == ["mxfp4", "gptq", "4.25", "60", "20.00", "0.2000 +- 0.0100", "60%"]
    assert calibration.cells(before)[0][-1] == calibration.cells(alone)[0][-1] == ""
    assert len(calibration.HEADER) == 4 + 3 * len(calibration.WINDOWS)
