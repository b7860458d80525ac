"""The table of quantization-aware training is made of the record that the example writes."""

import json
from dataclasses import asdict

from benchmarks import harness
from docs import records
from examples.distill import Training
from examples.qat import Row
from mxtensor.report.quality import Quality


def test_the_table_has_the_share_of_what_calibration_left(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    stages = {"nearest": 0.4, "calibrated": 0.2, "trained": 0.05}
    rows = [Row(name, 7.0, {"novel": Quality(20.5, kl, 0.01, 0.9, 255)}) for name, kl in stages.items()]
    options = {"format": "mxfp4-weight-only", "batch": "4", "window": "256", "rate": "0.0001"}
    training = asdict(Training(10, 10240, 60.0, [(5, 0.1)]))
    harness.write_json(tmp_path / "qat.json", rows, arguments=options, training=training, text=4096, written=0)
    page = records.qat()
    assert "| trained | 7 | 20.50 | 0.0500 +- 0.0100 | 75% |" in page and "| nearest | 7 | 20.50 | 0.4000" in page
    assert "10 steps of 4 rows of 256 tokens, 10,240 tokens in 60 s, rate 0.0001; 4,096 tokens of text" in page
    assert json.loads((tmp_path / "qat.json").read_text())["training"]["curve"] == [[5, 0.1]]
