"""eval and report on a made-up language model: their numbers are those of the model, and the page stands alone."""

import base64
import json
import math
import os
import re

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import mxtensor as mx
from mxtensor.cli.models import read_text, without_gguf
from tests.cli.small_model import TEXT, save_small_model
from tests.docs.error_rows import without
from tests.helpers.checkpoint_files import checkpoint
from tests.helpers.cli import run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model, its quantized form, and a text."""
    folder = tmp_path_factory.mktemp("models")
    save_small_model(folder / "plain")
    mx.checkpoints.convert(folder / "plain", folder / "mxfp4", format="mxfp4-weight-only")
    (folder / "text.txt").write_text(TEXT)
    return folder


def loss(path, ids):
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(model(ids[None]).logits[0, :-1].float(), ids[1:]))


def test_eval_is_the_loss_of_the_model(folder, capsys):
    ids = AutoTokenizer.from_pretrained(folder / "plain")(TEXT, return_tensors="pt").input_ids[0, :64]
    arguments = ("--text", folder / "text.txt", "--tokens", 64, "--window", 64, "--json")
    code, out, _ = run(capsys, "eval", folder / "mxfp4", "--reference", folder / "plain", *arguments)
    fields = json.loads(out)
    assert code == 0 and fields["tokens"] == 63
    assert fields["perplexity"] == pytest.approx(math.exp(loss(folder / "mxfp4", ids)), rel=1e-5)
    assert fields["reference_perplexity"] == pytest.approx(math.exp(loss(folder / "plain", ids)), rel=1e-5)
    assert 0 < fields["kl"] < 10 and fields["kl_error"] > 0 and 0 <= fields["same_token"] <= 1
    while_loading = json.loads(run(capsys, "eval", folder / "plain", "--format", "mxfp4-weight-only", *arguments)[1])
    assert while_loading["perplexity"] == fields["perplexity"] and "kl" not in while_loading
    table = run(capsys, "eval", folder / "plain", "--reference", folder / "plain", *arguments[:-1])[1].splitlines()
    assert table[1].split()[-3:] == ["0.0000", "0.0000", "100.0%"]


def test_a_plan_is_made_and_quantizes_the_checkpoint(folder, tmp_path, capsys):
    plan, text = tmp_path / "plan.json", ("--text", folder / "text.txt", "--tokens", 256, "--window", 64)
    formats = ("--format", "mxfp4-weight-only", "mxfp8-weight-only")
    code, out, _ = run(capsys, "plan", folder / "plain", *text, "--bits", 5, *formats, "-o", plan, "--json")
    fields = json.loads(out)
    assert code == 0 and 4.25 < fields["bits"] <= 5 and set(fields["weights"].values()) == set(formats[1:])
    code, out, err = run(capsys, "quantize", folder / "plain", "-o", tmp_path / "q", "--plan", plan)
    assert code == 0 and f"{plan}: {fields['bits']:.3g} bits per value over {len(fields['weights'])} weights" in err
    state = mx.checkpoints.load(tmp_path / "q")
    stored = {name: f"{t.format.name.split('_')[0]}-weight-only" for name, t in state.items() if hasattr(t, "format")}
    assert stored == fields["weights"]
    measured = json.loads(run(capsys, "eval", tmp_path / "q", "--reference", folder / "plain", *text, "--json")[1])
    assert 0.4 < fields["kl"] / measured["kl"] < 2.5


@pytest.mark.parametrize("name", ["up_prog", "model.layers.9.mlp"])
def test_a_name_to_skip_that_matches_no_module_is_an_error(name, folder, tmp_path, capsys):
    error = f"error: convert: --skip {name} matches no module"
    out = ("-o", tmp_path / "q", "--format", "mxfp8", "--skip", name, "--skip", "lm_head", "--skip", "up_proj")
    code, _, err = run(capsys, "quantize", folder / "plain", *out)
    assert code == 1 and error in err and err.count("\n") == 1 and not (tmp_path / "q").exists()
    for command in (
        ("eval", "--format", "mxfp8"),
        ("report", "--format", "mxfp8"),
        ("plan", "-o", tmp_path / "p.json"),
    ):
        arguments = (*command[1:], "--skip", name, "--text", folder / "text.txt", "--tokens", 256)
        code, _, err = run(capsys, command[0], folder / "plain", *arguments)
        assert code == 1 and f"--skip {name} matches no module" in err and err.count("\n") == 1, err


@pytest.mark.parametrize("name", ["model.layers.0.mlp", "mlp", "model.layers.0.mlp.up_proj.weight"])
def test_all_that_is_inside_a_module_is_skipped_by_every_command(name, folder, tmp_path, capsys):
    model, text = folder / "plain", ("--text", folder / "text.txt", "--tokens", 256, "--window", 64)
    every = mx.quantize_(AutoModelForCausalLM.from_pretrained(model), "mxfp8-weight-only")
    wanted = {n for n, p in every.named_parameters() if isinstance(p, mx.MXTensor) and f".{name}." not in f".{n}."}
    options = ("--format", "mxfp8-weight-only", "--skip", name, "lm_head")
    assert run(capsys, "quantize", model, "-o", tmp_path / "q", *options)[0] == 0
    state = mx.checkpoints.load(tmp_path / "q")
    assert {n for n, t in state.items() if isinstance(t, mx.MXTensor)} == wanted
    config = mx.TransformersConfig("mxfp8-weight-only", skip=[name])
    loaded = AutoModelForCausalLM.from_pretrained(model, quantization_config=config)
    assert {n for n, p in loaded.named_parameters() if isinstance(p, mx.MXTensor)} == wanted
    code, out, err = run(capsys, "report", model, *options, "-o", tmp_path / "r.html", "--json")
    assert code == 0 and not err
    assert {row["fqn"] for row in json.loads(out)["models"][1]["weights"]} == wanted
    options = ("--format", "mxfp4-weight-only", "mxfp8-weight-only", "--skip", name)
    assert run(capsys, "plan", model, *text, *options, "-o", tmp_path / "plan.json")[0] == 0
    assert set(mx.Plan.load(tmp_path / "plan.json").weights) == wanted


@pytest.mark.parametrize("command", ["eval", "plan", "report"])
def test_tokens_that_the_model_does_not_know_are_refused(command, folder, tmp_path, capsys):
    config = AutoConfig.from_pretrained(folder / "plain", vocab_size=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "a")
    capsys.readouterr()
    output = () if command == "eval" else ("-o", tmp_path / "out")
    format = ("--format", "mxfp4-weight-only")
    text = ("--text", folder / "text.txt", "--tokenizer", folder / "plain", "--window", 64)
    code, out, err = run(capsys, command, tmp_path / "a", *text, *format, *output)
    assert code == 1 and not out and err.count("\n") == 1
    assert "makes token 220 of the text, and the model knows 64 tokens; pass --tokenizer" in err


@pytest.mark.parametrize(("text", "count"), [("", 0), ("A", 1)])
def test_a_text_without_two_tokens_is_refused(text, count, folder, tmp_path, capsys):
    (tmp_path / "short.txt").write_text(text)
    code, _, err = run(capsys, "eval", folder / "plain", "--text", tmp_path / "short.txt")
    assert code == 1 and f"short.txt: the text has {count} tokens, and at least 2 are needed: pass a longer" in err


@pytest.mark.parametrize("command", ["eval", "report"])
def test_names_to_skip_need_a_format(command, folder, capsys):
    options = ("--text", folder / "text.txt", *(("--reference", folder / "plain") if command == "report" else ()))
    assert run(capsys, command, folder / "plain", *options, "--skip", "mlp")[0] == 2


def test_a_plan_of_another_checkpoint_is_noticed(folder, tmp_path):
    plan = {"model.layers.0.mlp.up_proj": "mxfp8", "other.weight": "mxfp4", "lm_head": "mxfp8"}
    with pytest.warns(UserWarning, match=r"no tensor of the checkpoint has the name 'other.weight'"):
        mx.checkpoints.convert(folder / "plain", tmp_path / "q", format=plan, skip=["lm_head"])
    state = mx.checkpoints.load(tmp_path / "q")
    assert [name for name, t in state.items() if isinstance(t, mx.MXTensor)] == ["model.layers.0.mlp.up_proj.weight"]
    general = {"_default": "mxfp8", "re:.*up_proj": None}
    mx.checkpoints.convert(folder / "plain", tmp_path / "d", format=general)
    state = mx.checkpoints.load(tmp_path / "d")
    quantized = {name for name, t in state.items() if isinstance(t, mx.MXTensor)}
    assert quantized and not any("up_proj" in name or "embed" in name for name in quantized)


def test_a_layout_that_transformers_does_not_load_is_converted(folder, tmp_path, capsys):
    mx.checkpoints.convert(folder / "mxfp4", tmp_path / "c", layout="modelopt", format="nvfp4-weight-only")
    code, out, err = run(capsys, "eval", tmp_path / "c", "--text", folder / "text.txt", "--tokens", 256, "--json")
    assert code == 0 and "has the layout modelopt; it is converted to native" in err
    assert json.loads(out)["bits"] < 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("eval", "mxfp4", "--text", "none.txt"), "none.txt"),
        (("eval", "mxfp4", "--text", "binary"), "binary is not a text in UTF-8"),
        (("eval", "mxfp4", "--text", "text.txt", "--tokens", 5000), "text.txt: the text has 780 tokens; 5000"),
        (("eval", "mxfp4", "--text", "text.txt", "--format", "mxfp8"), "mxfp4 is quantized already"),
        (("eval", "mxfp4/model.safetensors", "--text", "text.txt"), "has no config.json"),
        (("eval", "bare", "--text", "text.txt"), "bare has no tokenizer; pass --tokenizer"),
        (("report", "plain", "--reference", "plain", "-o", "r.html"), "no layer is quantized"),
    ],
)  # fmt: skip
def test_failures_are_one_line(folder, arguments, message, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "binary").write_bytes(b"\xff\xfe\x00")
    if not (folder / "bare").exists():
        AutoModelForCausalLM.from_pretrained("plain").save_pretrained("bare")
        capsys.readouterr()
    code, out, err = run(capsys, *arguments)
    assert (code, out, err.count("\n")) == (1, "", 1) and message in err
    assert not (folder / "r.html").exists()


@pytest.mark.parametrize(("package", "extra"), [("transformers", "cli"), ("matplotlib", "plot")])
def test_a_missing_package_is_named(package, extra, folder, tmp_path, capsys):
    arguments = ("report", folder / "plain", "--format", "mxfp8", "-o", tmp_path / "r.html")
    code, _, err = without(package, lambda: run(capsys, *arguments))
    assert code == 1 and f"needs {package}: pip install 'mxtensor[{extra}]'" in err


def test_models_of_two_vocabularies_are_not_compared(folder, tmp_path, capsys):
    config = AutoConfig.from_pretrained(folder / "plain", vocab_size=300)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    code, _, err = run(capsys, "eval", folder / "plain", "--text", folder / "text.txt", "--reference", tmp_path)
    assert code == 1 and "the model has a vocabulary of 256 tokens, the reference one of 300" in err


def test_what_transformers_does_not_know_is_one_line(tmp_path, capsys):
    checkpoint(tmp_path / "a", {"x.weight": torch.ones(2, 2)}, model_type="unheard-of")
    (tmp_path / "text").write_text("text")
    code, _, err = run(capsys, "eval", tmp_path / "a", "--text", tmp_path / "text")
    assert code == 1 and err.count("\n") == 1 and "unheard-of" in err


def test_a_tokenizer_from_elsewhere(folder, capsys):
    AutoModelForCausalLM.from_pretrained(folder / "plain").save_pretrained(folder / "bare")
    arguments = ("--text", folder / "text.txt", "--tokenizer", folder / "plain", "--tokens", 256)
    assert run(capsys, "eval", folder / "bare", *arguments)[0] == 0


def test_a_report_has_numbers_pictures_and_nothing_from_elsewhere(folder, tmp_path, capsys):
    arguments = ("--text", folder / "text.txt", "--tokens", 256, "-o", tmp_path / "new" / "r.html", "--json")
    code, out, _ = run(capsys, "report", folder / "plain", "--format", "mxfp8-weight-only", "nvfp4", *arguments)
    fields = json.loads(out)
    text = (tmp_path / "new" / "r.html").read_text()
    assert code == 0 and [m["label"] for m in fields["models"][1:]] == ["mxfp8-weight-only", "nvfp4"]
    eight, four = ({row["fqn"]: row for row in m["outputs"]} for m in fields["models"][1:])
    assert len(eight) == 7 and all(eight[name]["alone_db"] > four[name]["alone_db"] > 0 for name in eight)
    assert all(name in text for name in eight)
    pictures = [base64.b64decode(found) for found in re.findall(r'src="data:image/png;base64,([^"]+)"', text)]
    assert len(pictures) == 3 and all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert re.findall(r"(?:https?:|<link|<script|src=\"(?!data:))", text) == []
    before, q = (m["quality"] for m in fields["models"][:2])
    assert before["perplexity"] == q["reference_perplexity"] and fields["models"][0]["bits"] == 16
    assert q["tokens"] == 255 and f"{q['perplexity']:.2f}" in text

    code, out, _ = run(capsys, "report", folder / "mxfp4", "--reference", folder / "plain", "-o", tmp_path / "s.html")
    assert code == 0 and "mxfp4" in out and "outputs of layers were not measured" in (tmp_path / "s.html").read_text()


def test_given_inputs_are_what_the_text_would_be(folder, tmp_path, capsys):
    ids = AutoTokenizer.from_pretrained(folder / "plain")(TEXT, return_tensors="pt").input_ids[:, :256]
    save_file({"input_ids": ids}, tmp_path / "inputs.safetensors")
    model = (folder / "plain", "--format", "mxfp8", "-o", tmp_path / "r.html", "--json")
    by_text = json.loads(run(capsys, "report", *model, "--text", folder / "text.txt", "--tokens", 256)[1])["models"][1]
    by_file = json.loads(run(capsys, "report", *model, "--inputs", tmp_path / "inputs.safetensors")[1])["models"][1]
    assert by_file["outputs"] == by_text["outputs"] != [] and by_file["quality"] is None
    (tmp_path / "bad.safetensors").write_bytes(b"12345678")
    code, _, err = run(capsys, "report", *model, "--inputs", tmp_path / "bad.safetensors")
    assert code == 1 and err.count("\n") == 1 and "bad.safetensors cannot be read as safetensors" in err


def test_gguf_becomes_a_model_of_transformers_unless_it_has_codes(tmp_path, capsys):
    gguf = pytest.importorskip("gguf")
    weight = torch.randn(32, 32).numpy()

    def write(name, kind):
        writer = gguf.GGUFWriter(str(tmp_path / name), "unknown")
        writer.add_tensor("blk.0.attn_q.weight", gguf.quantize(weight, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / name

    kinds = gguf.GGMLQuantizationType
    with without_gguf(write("codes.gguf", kinds.MXFP4)) as found:
        assert found == (tmp_path / "codes.gguf", {})
    assert "keeps llama.cpp's names of tensors: it holds MXFP4 codes" in capsys.readouterr().err
    code, _, err = run(capsys, "convert", write("a.gguf", kinds.Q8_0), "-o", tmp_path / "out", "--layout", "plain")
    assert code == 0 and "keeps llama.cpp's names of tensors: transformers cannot read it" in err
    assert list(mx.checkpoints.load(tmp_path / "out")) == ["blk.0.attn_q.weight"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.gguf", "codes.gguf", "out"]
    code, _, err = run(capsys, "convert", tmp_path / "a.gguf", "-o", tmp_path, "--layout", "plain", "--overwrite")
    assert code == 1 and "contains the source" in err and (tmp_path / "a.gguf").exists()


@pytest.mark.skipif(mx.checkpoints.LAYOUTS["gguf"].write is None, reason="GGUF is only read")
def test_from_gguf_to_gguf_names_stay(tmp_path, capsys):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(tmp_path / "a.gguf"), "llama")
    writer.add_tensor("blk.0.attn_q.weight", torch.randn(32, 32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    arguments = ("-o", tmp_path / "b.gguf", "--layout", "gguf", "--format", "mxfp4-weight-only")
    code, _, err = run(capsys, "quantize", tmp_path / "a.gguf", *arguments)
    assert code == 0 and err == ""
    assert list(mx.checkpoints.load(tmp_path / "b.gguf")) == ["blk.0.attn_q.weight"]


def test_a_text_may_be_a_pipe():
    """A shell passes one for ``--text <(head book.txt)``."""
    reads, writes = os.pipe()
    os.write(writes, b"a text")
    os.close(writes)
    assert read_text(f"/dev/fd/{reads}") == "a text"
    os.close(reads)
    with pytest.raises(FileNotFoundError, match="--text: none does not exist"):
        read_text("none")
