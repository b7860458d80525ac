"""The example of quantization-aware training: its loss, where it starts, and that it learns, on a made-up model."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")

import mxtensor as mx
from benchmarks import quality
from examples import distill, qat, qat_text, smollm2
from examples.minilm import SENTENCES, load_sentences
from tests.examples.small_llm import Bytes, small_llm


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--format", "mxfp7"], "unknown format 'mxfp7'"), (["--model", "nowhere"], "there is no file or folder nowhere")],
)
def test_mistakes_are_named_before_anything_is_loaded(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(smollm2, "load_model", lambda *args: pytest.fail("the model is loaded"))
    with pytest.raises(SystemExit):
        qat.main(arguments)
    assert message in capsys.readouterr().err


def test_no_text_both_trains_and_is_measured():
    assert not set(qat_text.MODULES) & set(quality.EVALUATION) and len(set(qat_text.MODULES)) == len(qat_text.MODULES)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_the_divergence_and_its_gradient_equal_a_reference(monkeypatch, compiled):
    monkeypatch.setattr(distill, "TOKENS", {"cpu": 5})
    head, teacher = torch.randn(30, 8), torch.randn(13, 8)
    hidden = torch.randn(13, 8, requires_grad=True)
    got = distill.divergence(hidden, teacher, head, compiled)
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


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, when it compiles
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_the_student_learns_in_the_format(compiled):
    teacher, _ = small_llm()
    teacher = teacher.float()
    before = {name: parameter.clone() for name, parameter in teacher.named_parameters()}
    rows = torch.randint(1, 256, (16, 24))
    student = qat.start(teacher, list(rows.split(8)), "mxfp4-weight-only", "gptq")
    mx.quantize_(student, "mxfp4-weight-only", step="prepare")
    distiller = distill.Distiller(student, teacher, 1e-3, compiled)
    assert len(distiller.parameters) == 7 + 3 and all(p.requires_grad for p in distiller.parameters)
    distiller.warm_up(rows)
    losses = [distiller.step(rows, step / 30).item() for step in range(30)]
    assert losses[-1] < 0.7 * losses[0]
    student = mx.quantize_(copy.deepcopy(student), "mxfp4-weight-only", step="convert")
    with torch.no_grad():
        found = distill.divergence(
            distill.hidden_states(student, rows), distill.hidden_states(teacher, rows), distiller.head.float()
        )
    assert found.item() == pytest.approx(losses[-1], rel=0.3)
    assert all(parameter.equal(before[name]) for name, parameter in teacher.named_parameters())


def test_progress_is_printed_and_ctrl_c_ends_the_training(monkeypatch, capsys):
    teacher, _ = small_llm()
    student = mx.quantize_(copy.deepcopy(teacher).float(), "mxfp4-weight-only", step="prepare")
    rows, steps = torch.randint(1, 256, (4, 16)), []

    def step(self, batch, done, expected):
        if len(steps) == 4:
            raise KeyboardInterrupt
        steps.append(done)
        return torch.tensor(0.25 * len(steps))

    monkeypatch.setattr(distill.Distiller, "step", step)
    distiller = distill.Distiller(student, teacher.float(), 1e-4)
    done = distill.train(distiller, distill.Batches(rows, distill.endless(torch.arange(4), 2)), 3600.0, every=2)
    assert (done.steps, done.tokens, done.curve) == (4, 4 * 2 * 16, [(2, 0.375), (4, 0.875)])
    out = capsys.readouterr().out
    assert "step 4, 0% of the time: KL 0.8750" in out and "stopped after 4 steps" in out
    assert steps == sorted(steps) and all(0 <= done < 1 for done in steps)


def test_batches_are_endless_full_and_have_every_row_once_in_an_epoch():
    rows = torch.arange(10).view(5, 2)
    batches = distill.endless(rows, 2)
    order = torch.cat([next(batches) for _ in range(5)])[:, 0].split(5)
    assert all(sorted(epoch.tolist()) == [0, 2, 4, 6, 8] for epoch in order) and not order[0].equal(order[1])


def test_a_batch_has_a_share_of_written_rows():
    index = next(qat.mixed(6, 4, 4))
    assert index.shape == (4,) and (index >= 6).sum() == 2 and len(index.unique()) == 4 and index.max() < 10
    assert (next(qat.mixed(6, 4, 4, 0.75)) >= 6).sum() == 3
    assert (next(qat.mixed(6, 0, 4)) < 6).all() and next(qat.mixed(0, 4, 4)).sort().values.tolist() == [0, 1, 2, 3]


def test_the_teachers_states_are_computed_once_and_are_those_of_a_step():
    teacher, _ = small_llm()
    student = mx.quantize_(copy.deepcopy(teacher).float(), "mxfp4-weight-only", step="prepare")
    rows = torch.randint(1, 256, (5, 16))
    distiller = distill.Distiller(student, teacher.float(), 1e-4)
    batches = distill.Batches(rows, distill.endless(torch.arange(5), 2))
    batches.remember(distiller, 3)
    some, states = next(batches)
    assert states.shape == (2, 16, 64) and torch.allclose(states.flatten(0, 1), distiller.expected(some), atol=0.05)
    losses = [distiller.backward(some, known).item() for known in (None, states)]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


class Tokenizer(Bytes):
    """Also of several texts at once, as tokenizers of transformers."""

    def __call__(self, text, return_tensors=None):
        if isinstance(text, str):
            return super().__call__(text, return_tensors)
        return {"input_ids": [list(one.encode()) for one in text]}


def test_files_are_read_once_without_the_text_that_is_measured(tmp_path):
    docstring, novel = "It adds. " * 79 + "It adds.", load_sentences(SENTENCES)
    code = f'"""{docstring}"""\n\ndef add(x, y=2):\n    """{docstring}"""\n    return x + y\n'
    (tmp_path / "json").mkdir()
    for name in ("a.py", "logging.py", "json/encoder.py"):
        (tmp_path / name).write_text(code)
    (tmp_path / "b.md").write_text("A page. " * 100)
    (tmp_path / "same.txt").write_text("A page. " * 100)
    (tmp_path / "novel.txt").write_text(" ".join(novel))
    (tmp_path / "short.md").write_text("A page.")
    (tmp_path / "other.md").write_text("Страница. " * 100)
    texts = sorted(qat_text.files([tmp_path]), key=lambda text: not text.startswith("A page"))
    assert texts[0] == "A page. " * 100 and len(texts) == 2
    assert texts[1] in (code, qat_text.docstrings(code))
    assert qat_text.docstrings(code) == f"{docstring}\n\nadd(x, y=2)\n{docstring}"
    assert qat_text.docstrings("def") == ""
    rows = qat_text.rows_of(Tokenizer(), iter(texts), 100, 1450)
    assert rows.shape == (14, 100) and bytes(rows[0].tolist()).decode() == texts[0][:100]
    assert qat_text.rows_of(Tokenizer(), iter(texts[:1]), 100, 10**6).shape == (8, 100)


def test_one_in_four_written_rows_begins_with_the_first_token():
    model, _ = small_llm()
    rows = qat_text.sampled(model, 8, 6, torch.tensor([5, 6, 7]), at_once=2)
    assert rows.shape == (8, 6) and (rows[:, 0] == 1).sum() == 2 and set(rows[:, 0].tolist()) <= {1, 5, 6, 7}


@pytest.mark.exhaustive
def test_the_example_runs_from_the_start_to_the_record(tmp_path, monkeypatch, capsys):
    model, _ = small_llm()
    monkeypatch.setattr(smollm2, "load_model", lambda dtype, path: (model.to(dtype), Tokenizer()))
    monkeypatch.setattr(qat_text, "MODULES", ("random", "no_such_module"))
    monkeypatch.setattr(quality, "EVALUATION", ("json",))
    files = {name: tmp_path / name for name in ("cache", "texts", "record.json")}
    options = ["--minutes", "0.02", "--threads", "1", "--batch", "2", "--window", "64", "--sampled", "4"]
    options += ["--text-tokens", "4000", "--calibration", "8", "--cache", str(files["cache"])]
    options += ["--texts", str(files["texts"]), "--json", str(files["record.json"])]
    for more in ([], ["--remember"]):  # the second run reads the two files
        qat.main(options + more)
        record = json.loads(files["record.json"].read_text())
        assert [row["weights"] for row in record["rows"]] == ["nearest", "calibrated", "trained"]
        kl = {row["weights"]: row["quality"]["novel"]["kl"] for row in record["rows"]}
        assert kl["calibrated"] < kl["nearest"] and kl["trained"] > 0
        assert record["training"]["tokens"] == record["training"]["steps"] * 2 * 64 > 0
        assert (record["text"], record["written"]) == (62 * 64, 4 * 64)
    assert "steps," in capsys.readouterr().out
