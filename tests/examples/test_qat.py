"""The example of quantization-aware training: its loss, where it starts, and that it learns, on a made-up model."""

import copy

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")

import mxtensor as mx
from benchmarks import calibration
from examples import qat
from tests.examples.small_llm import small_llm


def test_no_text_both_trains_and_is_measured():
    assert not set(qat.MODULES) & set(calibration.EVALUATION) and len(set(qat.MODULES)) == len(qat.MODULES)


def test_the_divergence_and_its_gradient_equal_a_reference(monkeypatch):
    monkeypatch.setattr(qat, "TOKENS", 5)
    head, teacher = torch.randn(30, 8), torch.randn(13, 8)
    hidden = torch.randn(13, 8, requires_grad=True)
    got = qat.divergence(hidden, teacher, head)
    (gradient,) = torch.autograd.grad(got, hidden)
    q, p = (F.linear(h, head).log_softmax(-1) for h in (hidden, teacher))
    expected = F.kl_div(q, p, reduction="batchmean", log_target=True)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, hidden)[0])


@pytest.mark.parametrize("format", ["mxfp4-weight-only", "nvfp4-weight-only"])
def test_training_starts_from_the_codes_of_the_calibration(format):
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 48).requires_grad_(False)
    data = [torch.randn(300, 64) @ torch.randn(64, 64)]
    calibrated = mx.calibrate(torch.nn.Sequential(copy.deepcopy(layer)), data, format)[0].weight
    near = qat.nearest_that_rounds(layer.weight, calibrated.dequantize(), calibrated.recipe.stored)
    rounded = mx.quantize(near, format.removesuffix("-weight-only")).dequantize()
    if not format.startswith("mx"):
        assert near.equal(calibrated.dequantize())
        return
    assert (rounded == calibrated.dequantize()).float().mean() > 0.99
    assert (near - layer.weight).norm() < 0.9 * (calibrated.dequantize() - layer.weight).norm()
    grown = mx.quantize(near * (1 + 1e-5), "mxfp4").dequantize()  # no amax is at the edge of its scale
    assert (grown == calibrated.dequantize()).float().mean() > 0.99


def test_the_student_learns_in_the_format():
    teacher, _ = small_llm()
    teacher = teacher.float()
    rows = torch.randint(1, 256, (16, 24))
    student = qat.start(teacher, list(rows.split(8)), "mxfp4-weight-only", "gptq")
    mx.quantize_(student, mx.QATConfig("mxfp4-weight-only", step="prepare"))
    weights = [layer.weight for layer in qat.mx_layers(student)]
    distiller = qat.Distiller(student, teacher, 2e-3)
    assert len(weights) == 7 and all(weight.requires_grad for weight in weights)
    losses = [distiller.step(rows, step / 30) for step in range(30)]
    assert losses[-1] < 0.7 * losses[0] and not teacher.lm_head.weight.requires_grad
    mx.quantize_(student, mx.QATConfig("mxfp4-weight-only", step="convert"))
    with torch.no_grad():
        found = qat.divergence(
            qat.hidden_states(student, rows), qat.hidden_states(teacher, rows), distiller.head.float()
        )
    assert found.item() == pytest.approx(losses[-1], rel=0.3)


def test_progress_is_printed_and_ctrl_c_ends_the_training(monkeypatch, capsys):
    teacher, _ = small_llm()
    student = mx.quantize_(copy.deepcopy(teacher).float(), mx.QATConfig("mxfp4-weight-only"))
    rows, steps = torch.randint(1, 256, (4, 16)), []

    def step(self, batch, done):
        if len(steps) == 4:
            raise KeyboardInterrupt
        steps.append(done)
        return 0.5

    monkeypatch.setattr(qat.Distiller, "step", step)
    assert qat.train(student, teacher.float(), rows, 3600.0, 2, 1e-4, every=2) == 4
    out = capsys.readouterr().out
    assert "step 4, 0% of the time: KL 0.5000" in out and "stopped after 4 steps" in out
    assert steps == sorted(steps) and all(0 <= done < 1 for done in steps)


def test_batches_are_endless_and_have_every_row_once_in_an_epoch():
    rows = torch.arange(10).view(5, 2)
    batches = qat.endless(rows, 2)
    epochs = [torch.cat([next(batches) for _ in range(3)]) for _ in range(2)]
    assert all(sorted(epoch[:, 0].tolist()) == [0, 2, 4, 6, 8] for epoch in epochs) and not epochs[0].equal(epochs[1])
