"""GGUF files of every type in the command: they run, keep their codes and types, and say what is wrong."""

import json
import subprocess
import sys

import pytest
import torch

pytest.importorskip("gguf")
pytest.importorskip("transformers")

import gguf

import mxtensor as mx
from mxtensor.checkpoints.gguf import header_of, headers_cached
from mxtensor.cli.models import gguf_file, load_model
from tests.checkpoints.test_gguf import by_gguf
from tests.cli.small_gguf import KINDS, NAMES, gguf_name, save_small_gguf, save_small_lfm2
from tests.cli.small_model import TEXT, save_small_model
from tests.helpers.cli import run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer, a text, and a file in Q4_1."""
    folder = tmp_path_factory.mktemp("gguf")
    save_small_model(folder / "small")
    (folder / "text.txt").write_text(TEXT)
    save_small_gguf(folder / "q4.gguf", "Q4_1")
    return folder


def reading(folder):
    return ("--text", folder / "text.txt", "--tokens", 256, "--tokenizer", folder / "small")


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_becomes_the_model_of_its_values(kind, tmp_path):
    values = save_small_gguf(tmp_path / "a.gguf", kind)
    model, tokenizer = load_model(tmp_path / "a.gguf", "cpu")
    assert tokenizer is None
    for name, t in values.items():
        found = model.get_parameter(name)
        assert isinstance(found, mx.MXTensor) == (kind == "MXFP4" and t.dim() == 2)
        found = found.dequantize() if isinstance(found, mx.MXTensor) else found
        assert torch.equal(found, t.bfloat16()), name


@pytest.mark.parametrize("kind", ["Q8_0", "MXFP4"])
def test_a_type_that_transformers_does_not_know_is_decoded_for_it(kind, tmp_path):
    down = save_small_lfm2(tmp_path / "a.gguf", kind)
    found = load_model(tmp_path / "a.gguf", "cpu")[0].model.layers[0].feed_forward.w2.weight
    assert isinstance(found, mx.MXTensor) == (kind == "MXFP4")
    found = found.dequantize() if kind == "MXFP4" else found
    assert torch.equal(found, down.bfloat16())  # decoded in float32: transformers would round the scale of a block
    assert [p.name for p in tmp_path.iterdir()] == ["a.gguf"]


WRITTEN = {"mxfp4-weight-only": "mxfp4_e2m1", "nvfp4_single_level-weight-only": "nvfp4_single_level",
           "mxint8-weight-only": "mxint8"}  # fmt: skip


@pytest.mark.parametrize("format", WRITTEN)
def test_what_the_command_writes_runs_with_its_codes(format, folder, tmp_path, capsys):
    path = tmp_path / "q.gguf"
    code, _, err = run(capsys, "quantize", folder / "q4.gguf", "-o", path, "--layout", "gguf", "--format", format)
    assert code == 0 and err == ""
    model, _ = load_model(path, "cpu")
    stored = {name: t.dequantize() for name, t in mx.checkpoints.load(path).items() if hasattr(t, "dequantize")}
    values = {t.tensor_type.name for t in gguf.GGUFReader(path).tensors}
    for name, parameter in model.named_parameters():
        is_layer = parameter.dim() == 2 and "embed" not in name
        assert isinstance(parameter, mx.MXTensor) == is_layer, (name, values)
        if is_layer:
            assert parameter.format.name == WRITTEN[format]
            if not name.endswith(("q_proj.weight", "k_proj.weight")) and gguf_name(name) in stored:
                assert torch.equal(parameter.dequantize(), stored[gguf_name(name)].to(parameter.dtype))
    code, out, _ = run(capsys, "eval", path, "--reference", folder / "q4.gguf", *reading(folder), "--json")
    fields = json.loads(out)
    tensors = gguf.GGUFReader(path).tensors
    assert code == 0 and 0 < fields["kl"] < 5 and fields["bytes"] == sum(int(t.n_bytes) for t in tensors)
    assert fields["bits"] == 8 * fields["bytes"] / sum(int(t.n_elements) for t in tensors)
    code, out, _ = run(capsys, "report", path, "--reference", folder / "q4.gguf", "-o", tmp_path / "r.html", "--json")
    assert code == 0 and len(json.loads(out)["models"][1]["weights"]) == 7


def test_a_plan_is_made_of_codes_and_applied_to_them(folder, tmp_path, capsys):
    path, plan = tmp_path / "q.gguf", tmp_path / "new" / "plan.json"
    mx.checkpoints.convert(folder / "q4.gguf", path, "gguf", "mxfp4-weight-only")
    formats = ("--format", "mxfp4-weight-only", "mxfp8-weight-only", "--bits", 6, "-o", plan)
    assert run(capsys, "plan", path, *formats, *reading(folder))[0] == 0
    code, out, _ = run(capsys, "quantize", path, "-o", tmp_path / "out", "--plan", plan)
    assert code == 0 and "8 rounded" in out  # the embedding in Q4_1, to bfloat16
    code, _, err = run(capsys, "quantize", path, "-o", tmp_path / "b.gguf", "--layout", "gguf", "--plan", plan)
    assert code == 1 and "no tensor of the checkpoint has a name of the plan, such as 'model.layers.0." in err
    assert not (tmp_path / "b.gguf").exists()


def test_tensors_that_are_not_quantized_keep_their_type_and_bytes(folder, tmp_path, capsys):
    path, out = folder / "q4.gguf", tmp_path / "q.gguf"
    run(capsys, "quantize", path, "-o", out, "--layout", "gguf", "--format", "mxfp4-weight-only", "--skip", "ffn_up")
    before, after = ({t.name: t for t in gguf.GGUFReader(p).tensors} for p in (path, out))
    rounded = {f"blk.0.{NAMES[name]}.weight" for name in NAMES if "proj" in name} - {"blk.0.ffn_up.weight"}
    for name, t in before.items():
        kind = "MXFP4" if name in rounded else t.tensor_type.name
        assert after[name].tensor_type.name == kind
        assert name in rounded or after[name].data.tobytes() == t.data.tobytes()
    assert out.stat().st_size < path.stat().st_size
    run(capsys, "convert", path, "-o", tmp_path / "same.gguf", "--layout", "gguf")
    assert by_gguf(tmp_path / "same.gguf").keys() == by_gguf(path).keys()
    assert (tmp_path / "same.gguf").stat().st_size <= path.stat().st_size + 64


def test_inspect_and_compare_name_the_stored_types(folder, tmp_path, capsys):
    out = json.loads(run(capsys, "inspect", folder / "q4.gguf", "--tensors", "--json")[1])
    assert out["formats"]["Q4_1"] == {"tensors": 8, "values": 8 * 256 * 256, "bytes": 8 * 256 * 256 * 5 // 8}
    assert out["tensors"]["blk.0.attn_q.weight"] == {"format": "Q4_1", "shape": [256, 256], "bytes": 256 * 256 * 5 // 8}
    assert out["tensors"]["output_norm.weight"]["format"] == "float32"
    mx.checkpoints.convert(folder / "q4.gguf", tmp_path / "q.gguf", "gguf", "mxfp4-weight-only")
    row = json.loads(run(capsys, "compare", tmp_path / "q.gguf", folder / "q4.gguf", "--json")[1])
    assert row["tensors"]["blk.0.attn_q.weight"]["format"] == "Q4_1" and row["bits"] == pytest.approx(5, abs=0.1)
    run(capsys, "convert", folder / "q4.gguf", "-o", tmp_path / "plain", "--layout", "plain")
    code, out, _ = run(capsys, "compare", tmp_path / "plain", tmp_path / "q.gguf", "--json")
    assert code == 0 and json.loads(out)["bits"] == pytest.approx(4.34, abs=0.1)


def test_the_head_and_its_embedding_are_quantized_on_request(folder, tmp_path, capsys):
    arguments = ("--layout", "gguf", "--format", "mxfp4-weight-only", "--include-head")
    code, out, _ = run(capsys, "quantize", folder / "q4.gguf", "-o", tmp_path / "q.gguf", *arguments)
    assert code == 0 and "8 rounded" in out
    model, _ = load_model(tmp_path / "q.gguf", "cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight and isinstance(model.lm_head.weight, mx.MXTensor)


def test_a_file_that_cannot_be_run_says_why(folder, tmp_path, capsys):
    mx.checkpoints.convert(folder / "small", tmp_path / "names.gguf", "gguf", "mxfp4-weight-only")
    code, _, err = run(capsys, "eval", tmp_path / "names.gguf", *reading(folder))
    assert code == 1 and err.count("\n") == 1
    assert "cannot be run: transformers cannot read it: its header lacks llama.block_count" in err
    raw = (folder / "q4.gguf").read_bytes().replace(b"blk.0.ffn_up.weight", b"blk.0.ffn_no.weight")
    (tmp_path / "lacks.gguf").write_bytes(raw)
    code, _, err = run(capsys, "eval", tmp_path / "lacks.gguf", *reading(folder))
    assert code == 1 and "it finds no model.layers.0.mlp.up_proj.weight" in err
    (tmp_path / "other.gguf").write_bytes(raw.replace(b"llama", b"alpac"))
    code, _, err = run(capsys, "eval", tmp_path / "other.gguf", *reading(folder))
    assert code == 1 and err.count("\n") == 1 and "alpac" in err
    code, _, err = run(capsys, "eval", folder / "q4.gguf", "--text", folder / "text.txt")
    assert code == 1 and "has no tokenizer; pass --tokenizer" in err
    arguments = ("--reference", folder / "q4.gguf", "-o", tmp_path / "r.html")
    code, _, err = run(capsys, "report", folder / "q4.gguf", *arguments)
    assert code == 1 and "has no tensor in a format of this package" in err


# ---------------------------------------------------------------------------------------------- the header


def vocabulary(path, tokens):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_token_list(tokens)
    writer.add_token_scores([float(i) for i in range(len(tokens))])
    writer.add_token_types([1] * len(tokens))
    writer.add_array("general.tags", ["a", ""])
    writer.add_bool("general.flag", True)
    writer.add_tensor("output_norm.weight", torch.ones(4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_header_is_that_of_the_package(tmp_path):
    path = vocabulary(tmp_path / "a.gguf", [f"tökén{i}" for i in range(500)] + ["", " "])
    mine, theirs = header_of(path), gguf.GGUFReader(path)
    assert list(mine.fields) == list(theirs.fields)
    for name, field in theirs.fields.items():
        found = mine.fields[name]
        assert (found.offset, found.types, found.data) == (field.offset, field.types, field.data), name
        assert found.contents() == field.contents() and len(found.parts) == len(field.parts)
        assert all(a.dtype == b.dtype and (a == b).all() for a, b in zip(found.parts, field.parts, strict=True))
    assert all((a.data == b.data).all() for a, b in zip(mine.tensors, theirs.tensors, strict=True))


def test_a_header_is_read_once_by_a_command(folder, tmp_path, capsys, monkeypatch):
    read = []
    monkeypatch.setattr(gguf.GGUFReader, "_build_fields", counted(gguf.GGUFReader._build_fields, read))
    before = vars(gguf).copy()
    assert run(capsys, "eval", folder / "q4.gguf", *reading(folder))[0] == 0
    assert len(read) == 1 and vars(gguf) == before
    with headers_cached():  # a file that has changed is read again
        path = vocabulary(tmp_path / "a.gguf", ["a", "b"])
        vocabulary(path.with_name("b.gguf"), ["c", "d", "e"]).replace(path)
        assert header_of(path).fields["tokenizer.ggml.tokens"].contents() == ["c", "d", "e"]


def counted(function, calls):
    def wrapper(*arguments):
        calls.append(1)
        return function(*arguments)

    return wrapper


@pytest.mark.exhaustive
def test_pipes_get_the_result_and_nothing_else(folder):
    command = [sys.executable, "-m", "mxtensor", "eval", str(folder / "q4.gguf"), *map(str, reading(folder))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == "" and done.stdout.startswith("model ")
    assert gguf_file(folder / "q4.gguf") == folder / "q4.gguf"
