"""A GGUF file that becomes values: what is called exact is equal bit for bit, and the rest has its error."""

import json

import pytest
import torch

pytest.importorskip("gguf")
pytest.importorskip("transformers")

import mxtensor as mx
from tests.cli.small_gguf import KINDS, gguf_name, save_small_gguf, save_small_lfm2
from tests.helpers.cli import run

TYPES = [*(kind for kind in KINDS if kind not in ("F32", "F16", "BF16")), "F32", "F16", "BF16"]


def error_of(values, rounded):
    """||rounded - values|| / ||values||."""
    return float((rounded.double() - values.double()).norm() / values.double().norm())


def check(fields, values, folder):
    """The report names each tensor that the folder does not hold bit for bit. Returns how many there are."""
    stored = mx.checkpoints.load(folder)
    assert sorted([*fields["exact"], *fields["errors"]]) == sorted(values) == sorted(stored)
    for name, t in values.items():
        found = stored[name].dequantize(torch.float32) if isinstance(stored[name], mx.MXTensor) else stored[name]
        assert torch.equal(found.float(), t) == (name in fields["exact"]), name
        if name in fields["errors"]:
            assert fields["errors"][name] == pytest.approx(error_of(t, found), rel=1e-4), name
    return len(fields["errors"])


@pytest.mark.parametrize("kind", TYPES)
def test_the_command_calls_exact_what_bfloat16_holds(kind, tmp_path, capsys):
    values = save_small_gguf(tmp_path / "a.gguf", kind)
    arguments = ("convert", tmp_path / "a.gguf", "-o", tmp_path / "out", "--layout", "plain")
    code, out, _ = run(capsys, *arguments, "--json")
    assert code == 0
    if kind == "MXFP4":  # codes stay codes: llama.cpp's names
        fields = json.loads(out)
        assert fields["errors"] == {} and sorted(fields["exact"]) == sorted(map(gguf_name, values))
        return
    count = check(json.loads(out), values, tmp_path / "out")
    assert count == (0 if kind == "BF16" else 8)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and {t.dtype for t in mx.checkpoints.load(tmp_path / "out").values()} == {
        torch.bfloat16
    }
    code, out, _ = run(capsys, *arguments, "--overwrite")
    assert code == 0 and f"{len(values) - count} tensors exact, {count} rounded" in out
    assert ("a.gguf was decoded to bfloat16, which rounds the values of 8 tensors (relative error up to" in out) == (
        count > 0
    )


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_0", "Q6_K", "Q8_0"])
@pytest.mark.parametrize("layout", ["plain", "gguf", "native"])
def test_convert_decodes_in_float32(kind, layout, tmp_path):
    """Without transformers, values stay float32, and bytes stay bytes: nothing is rounded."""
    values = save_small_gguf(tmp_path / "a.gguf", kind)
    out = tmp_path / ("b.gguf" if layout == "gguf" else "b")
    report = mx.checkpoints.convert(tmp_path / "a.gguf", out, layout=layout)
    before, after = (mx.checkpoints.load(path) for path in (tmp_path / "a.gguf", out))
    assert sorted(report.exact) == sorted(before) == sorted(after) == sorted(map(gguf_name, values))
    assert report.errors == {}
    assert all(t.dtype == torch.float32 and torch.equal(t, after[name]) for name, t in before.items())


def test_quantized_from_a_rounded_file(tmp_path, capsys):
    """Errors of quantized tensors are those of their format; the embedding is rounded to bfloat16 alone."""
    values = save_small_gguf(tmp_path / "a.gguf", "Q6_K")
    arguments = (tmp_path / "a.gguf", "-o", tmp_path / "out", "--format", "mxfp8-weight-only", "--json")
    fields = json.loads(run(capsys, "quantize", *arguments)[1])
    stored = mx.checkpoints.load(tmp_path / "out")
    assert fields["errors"].keys() == {name for name, t in values.items() if t.dim() == 2}
    for name, error in fields["errors"].items():
        t = stored[name].dequantize() if isinstance(stored[name], mx.MXTensor) else stored[name]
        assert error == pytest.approx(error_of(values[name], t), rel=0.01), name
    assert fields["errors"]["model.embed_tokens.weight"] < 0.003 < fields["errors"]["model.layers.0.mlp.up_proj.weight"]


def test_a_file_of_an_architecture_that_transformers_decodes_by_other_code(tmp_path, capsys):
    down = save_small_lfm2(tmp_path / "a.gguf", "Q8_0")
    arguments = ("convert", tmp_path / "a.gguf", "-o", tmp_path / "out", "--layout", "plain", "--json")
    fields = json.loads(run(capsys, *arguments)[1])
    stored = mx.checkpoints.load(tmp_path / "out")
    name = "model.layers.0.feed_forward.w2.weight"
    assert torch.equal(stored[name], down.bfloat16())
    assert fields["errors"][name] == pytest.approx(error_of(down, stored[name]), rel=1e-4)
    assert len(fields["errors"]) == 8 and len(fields["exact"]) == len(stored) - 8


def test_compare_says_what_was_rounded_before(tmp_path, capsys):
    save_small_gguf(tmp_path / "a.gguf", "Q4_K")
    run(capsys, "convert", tmp_path / "a.gguf", "-o", tmp_path / "plain", "--layout", "plain")
    code, out, _ = run(capsys, "compare", tmp_path / "a.gguf", tmp_path / "plain")
    assert code == 0 and "11 of 11 tensors are equal" in out
    assert "a.gguf was decoded to bfloat16, which rounds the values of 8 tensors (relative error up to 0.00" in out
    fields = json.loads(run(capsys, "compare", tmp_path / "a.gguf", tmp_path / "plain", "--json")[1])
    assert len(fields["rounded"][str(tmp_path / "a.gguf")]) == 8 and len(fields["rounded"]) == 1
    fields = json.loads(run(capsys, "compare", tmp_path / "a.gguf", tmp_path / "a.gguf", "--json")[1])
    assert fields["rounded"] == {} and fields["equal"] == 11
