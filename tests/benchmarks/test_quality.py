"""The benchmark of quality: texts, methods, contenders, llama.cpp's files, the record and its picture."""

from importlib.util import find_spec

import pytest
import torch

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM

import mxtensor as mx
from benchmarks import harness, llama_cpp, plots, quality
from benchmarks.llama_cpp import write_gguf
from mxtensor.report.quality import Quality

needs_gguf = pytest.mark.skipif(find_spec("gguf") is None, reason="gguf is not installed")
needs_llama_cpp = pytest.mark.skipif(find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")


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


def tied_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=96, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@needs_gguf
def test_a_file_of_llama_cpp_has_the_values_of_the_model(tmp_path):
    m = tied_model()
    values = llama_cpp.values_of(write_gguf(m, tmp_path / "m.gguf", "F32"), m)
    assert all(values[name].equal(p) for name, p in m.named_parameters())
    values = llama_cpp.values_of(write_gguf(m, tmp_path / "q.gguf", "Q8_0"), m)
    for name, p in m.named_parameters():
        assert (values[name] - p).norm() < 0.01 * p.norm()


@needs_gguf
@needs_llama_cpp
@pytest.mark.parametrize(("name", "bits", "error"), [("Q8_0", 8.5, 0.01), ("MXFP4", 4.25, 0.16), ("Q4_0", 4.5, 0.12)])
def test_llama_cpp_quantizes_the_matrices(name, bits, error, tmp_path):
    m = tied_model()
    small, found, kinds = llama_cpp.quantized(m, tmp_path, name)
    norms = sum(p.numel() for p in m.parameters() if p.dim() == 1)
    whole = sum(p.numel() for p in m.parameters())
    assert name in kinds and small.lm_head.weight is small.model.embed_tokens.weight
    if name == "MXFP4":
        assert kinds == name and found == pytest.approx((bits * (whole - norms) + 32 * norms) / whole)
    for (fqn, p), q in zip(m.named_parameters(), small.parameters(), strict=True):
        if p.dim() == 2:
            assert 0 < (q - p).norm() < error * p.norm(), fqn
    assert [file.name for file in tmp_path.iterdir()] == ["model.F32.gguf"]
    if name == "MXFP4":
        w = m.model.layers[0].mlp.up_proj.weight
        ours = mx.quantize(w, "mxfp4", scaling="floor").dequantize()
        assert (ours - small.model.layers[0].mlp.up_proj.weight).norm() < 0.1 * w.norm()


@pytest.fixture
def contenders(tmp_path, monkeypatch):
    monkeypatch.setattr(quality, "calibration_data", lambda model, tokenizer, n: [torch.randint(0, 96, (4, 16))] * 4)
    return quality.Contenders(tied_model(), None, 16, tmp_path)


@pytest.mark.exhaustive
def test_every_contender_of_ours_is_made(contenders):
    bits = {}
    for (library, format, method), make in contenders.rows.items():
        if library == quality.OURS:
            small, bits[format, method] = make()
            assert small.lm_head.weight is small.model.embed_tokens.weight
            assert isinstance(small.lm_head.weight, mx.MXTensor)
            assert bits[format, method] == pytest.approx(mx.model_size(small).bits)
    assert bits["mxfp4", "nearest"] == bits["mxfp4", "gptq"] < bits["nvfp4", "gptq"] < bits["mxfp8", "nearest"]
    first = f"{quality.BITS[0]:g} bits"
    assert bits[first, quality.PLANNED] == bits[first, quality.BOTH] > bits["mxfp4", "nearest"]


def test_torchaos_values_are_put_into_the_model(contenders):
    pytest.importorskip("torchao")
    for name, error, bits in ((quality.TORCHAO[0], 0.01, 8.5), (quality.TORCHAO[1], 0.13, 5.5)):
        small, found = contenders.rows["torchao", name, quality.NEAREST]()
        w, q = (m.model.layers[1].mlp.up_proj.weight for m in (contenders.model, small))
        assert 0 < (q - w).norm() < error * w.norm() and bits - 1 < found < bits + 1
        assert small.lm_head.weight is small.model.embed_tokens.weight


def rows():
    def row(library, format, method, bits, kl):
        found = {text: Quality(20.0, kl, 0.01, 0.9, 100) for text in quality.TEXTS}
        return quality.WeightsRow(library, format, method, bits, 32, found)

    return [row("mxtensor", "mxfp4", "nearest", 5.1, 0.5), row("mxtensor", "mxfp4", "gptq", 5.1, 0.2),
            row("llama.cpp", "Q8_0", "nearest", 8.5, 0.001)]  # fmt: skip


def test_the_record_is_read_and_continued(tmp_path, monkeypatch, capsys):
    file = tmp_path / "quality.json"
    harness.write_json(file, rows(), "weights", window=16, perplexity={"novel": 20.0})
    read = lambda: quality.read(file, quality.WeightsRow, "weights")  # noqa: E731
    assert read() == rows() and quality.read(file, quality.MethodRow, "calibration") == []
    made = []

    class Few(quality.Contenders):
        def __init__(self, *args):
            self.rows = {row.key: lambda key=row.key: made.append(key) or (model(), 4.0) for row in rows()}
            self.rows["torchao", "int8", "nearest"] = lambda: made.append("int8") or (model(), 8.0)

    monkeypatch.setattr(quality, "Contenders", Few)
    monkeypatch.setattr(quality.smollm2, "load_model", lambda dtype: (model(), None))
    monkeypatch.setattr(
        quality, "evaluation_rows", lambda _: {text: torch.randint(0, 50, (1, 16)) for text in quality.TEXTS}
    )
    quality.main(["weights", "--json", str(file)])
    assert made == ["int8"] and [row.key for row in read()][-1] == ("torchao", "int8", "nearest")
    assert read()[-1].quality["novel"].kl == 0 and "int8" in capsys.readouterr().out


def test_the_picture_has_a_marker_for_each_row():
    pytest.importorskip("matplotlib")
    figure = plots.draw_quality(
        ({"versions": {"torch": "2.11.0"}, "gpu": None, "cpu": "a CPU", "date": "2026-01-02"}, rows())
    )
    assert [axes.get_title() for axes in figure.axes] == list(quality.TEXTS)
    for axes in figure.axes:
        assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines] == [
            (5.1, 0.5),
            (5.1, 0.2),
            (8.5, 0.001),
        ]
    assert len(figure.legends[0].get_texts()) == 3


# ---------------------------------------------------------------------------------------------- methods


def test_no_text_both_calibrates_and_is_predicted():
    assert not set(quality.CALIBRATION) & set(quality.EVALUATION)
    calibrates, predicted = (quality.documentation(m) for m in (("random",), ("json",)))
    assert "Mersenne Twister" in calibrates and "JSON (JavaScript Object Notation)" in predicted
    assert "\b" not in calibrates  # pydoc prints bold letters twice


@pytest.mark.exhaustive
def test_a_method_is_measured_beside_rounding_to_nearest(tmp_path):
    m = model()
    rows = {name: torch.randint(0, 50, (2, 16)) for name in quality.WINDOWS}
    measure = quality.Measure(m, rows)
    assert all(q.kl == 0 for q in measure.quality(m).values())
    data = [torch.randint(0, 50, (4, 16)) for _ in range(4)]
    found = [quality.method_row(measure, "mxfp4-weight-only", method, data) for method in quality.METHODS]
    assert [row.method for row in found] == list(quality.METHODS)
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
    harness.write_json(file, found, "calibration")
    assert quality.read(file, quality.MethodRow, "calibration") == found
