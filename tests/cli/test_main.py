"""The command: quantize, convert, inspect and compare, exit codes, and that a failure is one line."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

import mxtensor as mx
from mxtensor.checkpoints import conversion, store
from mxtensor.cli.main import COMMANDS, main
from mxtensor.cli.output import in_options
from tests.helpers.checkpoint_files import checkpoint
from tests.helpers.cli import run

RANDOM = torch.Generator().manual_seed(0)
STATE = {
    "model.layers.0.q_proj.weight": torch.randn(64, 64, generator=RANDOM),
    "lm_head.weight": torch.randn(32, 64, generator=RANDOM),
}


@pytest.fixture
def source(tmp_path):
    return str(checkpoint(tmp_path / "a", STATE))


def test_quantize_inspect_compare_and_convert(source, tmp_path, capsys):
    code, out, _ = run(capsys, "quantize", source, "-o", tmp_path / "q", "--format", "mxfp4-weight-only")
    assert code == 0 and "1 rounded" in out and f"wrote {tmp_path / 'q'}: " in out
    code, out, _ = run(capsys, "inspect", tmp_path / "q", "--tensors", "--json")
    fields = json.loads(out)
    assert code == 0 and fields["layout"] == "native" and fields["formats"]["mxfp4_e2m1"]["tensors"] == 1
    assert fields["tensors"]["lm_head.weight"]["format"] == "float32"
    assert fields["values"] == 96 * 64 and fields["bytes"] == 64 * 64 * 4.25 / 8 + 32 * 64 * 4
    code, out, _ = run(capsys, "compare", source, tmp_path / "q", "--json")
    rows = json.loads(out)["tensors"]
    assert code == 0 and 17 < rows["model.layers.0.q_proj.weight"]["sqnr_db"] < 20
    assert rows["lm_head.weight"] | {"bits": 32} == rows["lm_head.weight"] and rows["lm_head.weight"]["equal"]
    assert rows["model.layers.0.q_proj.weight"]["bits"] == 4.25
    code, out, _ = run(capsys, "convert", tmp_path / "q", "-o", tmp_path / "c", "--layout", "compressed-tensors")
    assert code == 0 and "2 tensors exact, 0 rounded" in out
    assert "mxfp4_e2m1" in run(capsys, "inspect", tmp_path / "c")[1]
    out = run(capsys, "compare", source, tmp_path / "c")[1]
    assert "1 of 2 tensors are equal" in out and "lowest SQNR: 18." in out


def test_compare_prints_the_summary_and_the_worst_tensors_first(tmp_path, capsys):
    a = {f"{i:02}.weight": torch.randn(8, 8) for i in range(30)}
    b = {name: x if i > 24 else x + 0.001 * (i + 1) for i, (name, x) in enumerate(a.items())}
    b["03.weight"][0, 0] = torch.nan
    more = {f"{i}.bias": torch.ones(1) for i in range(12)}
    paths = checkpoint(tmp_path / "a", a), checkpoint(tmp_path / "b", b | more)
    code, out, _ = run(capsys, "compare", *paths)
    lines = out.splitlines()
    assert code == 0 and lines[0].startswith("5 of 30 tensors are equal; ") and lines[0].endswith("- dB (03.weight)")
    assert lines[1] == "only in one of them: 0.bias" and lines[11] == "... and 2 more: --all prints them"
    worst = [line.split()[0] for line in lines[14:24]]
    assert worst[0] == "03.weight" and lines[24] == "... and 20 more: --all prints them" and len(lines) == 25
    every = run(capsys, "compare", *paths, "--all")[1].splitlines()
    assert len(every) == 1 + 12 + 2 + 30
    ratios = [float(line.split()[2]) for line in every[16:40]]
    assert ratios == sorted(ratios) and [line.split()[0] for line in every[15:25]] == worst
    assert all(line.split()[2] == "equal" for line in every[40:]) and "10.bias" in every[3]


def test_the_ratio_of_compare_is_that_of_the_values(source, tmp_path, capsys):
    run(capsys, "quantize", source, "-o", tmp_path / "q", "--format", "nvfp4-weight-only")
    row = json.loads(run(capsys, "compare", source, tmp_path / "q", "--json")[1])["tensors"][
        "model.layers.0.q_proj.weight"
    ]
    before = mx.checkpoints.load(source)["model.layers.0.q_proj.weight"].double()
    after = mx.checkpoints.load(tmp_path / "q")["model.layers.0.q_proj.weight"].dequantize(torch.float32).double()
    assert row["sqnr_db"] == pytest.approx(20 * torch.log10(before.norm() / (after - before).norm()).item(), abs=1e-6)
    assert row["max_error"] == (after - before).abs().max().item()


def test_a_module_is_skipped(source, tmp_path, capsys):
    code, out, _ = run(
        capsys, "quantize", source, "-o", tmp_path / "q", "--format", "mxfp8", "--skip", "q_proj", "--json"
    )
    assert code == 0 and json.loads(out)["errors"] == {}


def test_a_name_to_skip_that_matches_nothing_is_an_error(source, tmp_path, capsys):
    """A slip such as down_prj would quantize what was to stay as it is."""
    out = ("-o", tmp_path / "q", "--format", "mxfp8", "--skip", "q_proj", "--skip", "q_prj", "--skip", "lm_head")
    code, _, err = run(capsys, "quantize", source, *out)
    assert code == 1 and err.count("\n") == 1 and [p.name for p in tmp_path.iterdir()] == ["a"]
    assert err.startswith("mxtensor: error: convert: --skip q_prj matches no module; pass the whole name of one")
    with pytest.raises(ValueError, match=r"skip='q_prj' matches no module; .*: 'model.layers.0.q_proj' or 'q_proj'"):
        mx.checkpoints.convert(source, tmp_path / "r", format="mxfp8", skip=["q_prj"])


def test_the_head_is_quantized_on_request(source, tmp_path, capsys):
    rows = (("q", (), 1), ("r", ("--include-head",), 2), ("s", ("--include-head", "--skip", "lm_head"), 1))
    for out, more, count in rows:
        code, _, _ = run(capsys, "quantize", source, "-o", tmp_path / out, "--format", "mxfp8", *more)
        found = mx.checkpoints.load(tmp_path / out).values()
        assert code == 0 and sum(isinstance(t, mx.MXTensor) for t in found) == count


def test_a_destination_is_refused_before_the_source_is_loaded(source, tmp_path, capsys):
    (tmp_path / "a" / "model.safetensors").write_bytes(b"no checkpoint")
    rows = ((source + "/..", (), "contains the source"), (tmp_path / "x.gguf", (), "has the ending of the layout gguf"),
            (tmp_path / "x", ("--layout", "gguf"), "pass a name that ends in .gguf"))  # fmt: skip
    for out, more, message in rows:
        code, _, err = run(capsys, "convert", source, "-o", out, *more)
        assert code == 1 and message in err


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("pass overwrite=True", "pass --overwrite"),
        ("pass format=, which quantizes again", "pass --format, which quantizes again"),
        ("pass format='mxfp4-weight-only'", "pass --format mxfp4-weight-only"),
        ("leave it (include_head=False)", "leave it (without --include-head)"),
        ("pass max_shard_bytes=4096.", "pass --max-shard-bytes 4096."),
        ("a/format=x/b.txt and measure='layer'", "a/format=x/b.txt and measure='layer'"),
        ("reformat=True", "reformat=True"),
    ],
)
def test_messages_name_options(text, wanted):
    options = {
        name: f"--{name.replace('_', '-')}" for name in ("overwrite", "format", "include_head", "max_shard_bytes")
    }
    assert in_options(text, options) == wanted


WRONG = [
    (1, ("inspect", "/none"), "/none does not exist"),
    (1, ("compare", "SRC", "OTHER"), "have no tensor of the same name: "),
    (1, ("compare", "SRC", "LARGER"), "tensor lm_head.weight has the shape (32, 64) in A and (33, 64) in B"),
    (1, ("quantize", "SRC", "-o", "OUT", "--format", "mxint8", "--layout", "mlx"), "q_proj.weight is mxint8"),
    (1, ("convert", "SRC", "-o", "SRC"), "is the source"),
    (1, ("tune", "SRC", "--dry-run"), "has no quantized matrix; pass --format"),
    (1, ("eval", "SRC", "--text", "x.txt", "--device", "cuda"), "finds no CUDA device"),
    (2, ("quantize", "SRC", "-o", "OUT", "--format", "mxfp9"), "unknown format 'mxfp9'"),
    (1, ("quantize", "SRC", "-o", "OUT", "--plan", "/none.json"), "--plan: /none.json does not exist; pass a file"),
    (1, ("quantize", "SRC", "-o", "OUT", "--plan", "DIR"), "--plan: <DIR> is a folder; pass a file"),
    (2, ("quantize", "SRC", "-o", "OUT"), "pass either --format, or --plan with the file of a plan"),
    (2, ("quantize", "SRC", "-o", "OUT", "--plan", "a", "--format", "mxfp8"), "pass either --format, or --plan"),
    (2, ("plan", "SRC", "--bits", "5"), "required: --text"),
    (2, ("convert", "SRC", "-o", "OUT", "--layout", "awq"), "unknown layout 'awq'"),
    (2, ("convert", "SRC", "-o", "OUT", "--layout", "READ"), "can only be read; choose one of "),
    (2, ("convert", "SRC", "-o", "OUT", "--max-shard-bytes", "0"), "'0' is not a whole number of at least 1"),
    (2, ("report", "SRC"), "pass either --reference"),
    (2, ("report", "SRC", "--format", "mxfp8", "--text", "a", "--inputs", "b"), "pass --text or --inputs, not both"),
    (2, ("eval", "SRC", "--text", "x.txt", "--device", "tpu9"), "'tpu9' is not a device"),
    (2, ("convert",), "required: SRC, -o/--output"),
    (1, ("convert", "SRC", "-o", "DIR"), "<DIR> is inside the source <SRC>; choose another destination"),
    (1, ("convert", "SRC", "-o", "OUT.gguf"), "has the ending of the layout gguf, not of native; pass --layout gguf"),
    (1, ("convert", "SRC", "-o", "OUT", "--layout", "gguf"), "pass a name that ends in .gguf"),
    (
        1,
        ("quantize", "SRC", "-o", "OUT", "--format", "mxfp4", "--layout", "gpt-oss"),
        "nothing was quantized: the layout gpt-oss holds stacked experts only, and <SRC> has 1 other tensors, such as ",
    ),
    (1, ("convert", "SRC", "-o", "OUT", "--layout", "modelopt"), "pass --format, or the layout plain"),
    (1, ("quantize", "NONE", "-o", "OUT", "--format", "mxfp4"), "has no matrix of a layer, except for embeddings"),
    (1, ("quantize", "SRC", "-o", "OUT", "--plan", "EMPTY"), "<EMPTY> was not written by mx.Plan.save: it has no "),
    (1, ("quantize", "SRC", "-o", "OUT", "--plan", "SRC/a"), "--plan: <SRC/a> does not exist"),
    (2, ("quantize", "SRC", "-o", "OUT", "--plan", "a", "--include-head"), "--include-head is for --format"),
    (1, ("eval", "SRC", "--text", "/none.txt"), "--text: /none.txt does not exist; pass a text file"),
    (1, ("eval", "SRC", "--text", "DIR"), "<DIR> is a folder; pass a text file"),
    (
        1,
        ("inspect", "DIR"),
        "holds no checkpoint: no file ends in .safetensors, .gguf, .bin, .pt, .pth; it holds 1 other files",
    ),
    (1, ("inspect", "EMPTY"), "<EMPTY> is not a checkpoint; pass a folder, or a file that ends in .safetensors"),
    (1, ("inspect", "some/model"), "(from the Hugging Face hub: hf download some/model --local-dir model)"),
    (1, ("plan", "SRC", "--text", "x", "--bits", "2"), "--bits 2: the smallest of the formats has 4.25 bits per value"),
    (2, ("plan", "SRC", "--text", "x", "--bits", "-1"), "'-1' is not a number above 0"),
    (2, ("tune", "SRC", "--seconds", "nan"), "'nan' is not a number above 0"),
    (2, ("eval", "SRC", "--text", "x.txt", "--device", "meta"), "'meta' is not a device of this command"),
    (2, ("info", "SRC"), "invalid choice: 'info'"),
    (2, ("inspect", ""), "'' is not a path; is a variable of the shell empty?"),
    (2, ("convert", "SRC", "-o", ""), "'' is not a path"),
    (2, ("convert", "SRC", "-o", "OUT", "--shard", "9"), "convert: error: unrecognized arguments: --shard 9; see "),
    (1, ("inspect", "HUB"), "cache of the Hugging Face hub has of a model: pass <HUB>/snapshots/abc"),
    (1, ("inspect", "EMPTY.gguf"), "cannot be read as GGUF: cannot mmap an empty file"),
    (1, ("inspect", "EMPTY.pt"), "cannot be read by torch.load(weights_only=True): EOFError"),
]


@pytest.mark.parametrize(("code", "arguments", "message"), WRONG, ids=[" ".join(row[1]) for row in WRONG])
def test_a_failure_is_one_line_and_leaves_nothing(code, arguments, message, source, tmp_path, capsys):
    if torch.cuda.is_available() and "cuda" in arguments:
        pytest.skip("there is a CUDA device")
    places = {"SRC": source, "OUT": str(tmp_path / "out")}
    places |= {"DIR": str(tmp_path / "a" / "folder"), "EMPTY": str(tmp_path / "a" / "folder" / "empty.json")}
    places |= {"HUB": str(tmp_path / "a" / "hub")}
    places |= {"OUT.gguf": str(tmp_path / "out.gguf"), "NONE": str(tmp_path / "a" / "none"), "SRC/a": f"{source}/a"}
    if {"DIR", "EMPTY"} & {*arguments}:
        Path(places["DIR"]).mkdir()
        Path(places["EMPTY"]).write_text("{}")
    for name in {"EMPTY.gguf", "EMPTY.pt"} & {*arguments}:
        places[name] = str(tmp_path / "a" / name)
        Path(places[name]).touch()
    if "HUB" in arguments:
        (tmp_path / "a" / "hub" / "snapshots" / "abc").mkdir(parents=True)
    if "NONE" in arguments:
        checkpoint(tmp_path / "a" / "none", {"norm.weight": torch.ones(4), "lm_head.weight": torch.ones(4, 4)})
    for name, path in places.items():
        message = message.replace(f"<{name}>", path)
    places["READ"] = next(name for name, layout in mx.checkpoints.LAYOUTS.items() if layout.write is None)
    if "OTHER" in arguments:
        places["OTHER"] = str(checkpoint(tmp_path / "a" / "other", {"x.weight": torch.ones(2, 2)}))
    if "LARGER" in arguments:
        places["LARGER"] = str(checkpoint(tmp_path / "a" / "larger", STATE | {"lm_head.weight": torch.ones(33, 64)}))
    found, out, err = run(capsys, *(places.get(argument, argument) for argument in arguments))
    assert found == code and out == "" and err.count("\n") == 1
    assert err.startswith("mxtensor") and ": error: " in err and message in err
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_the_size_before_is_that_of_the_files_that_are_read(source, tmp_path, capsys):
    """Of a folder with pytorch_model.bin it was 0, and a link to nowhere was an error after all was written."""
    torch.save(STATE, file := tmp_path / "a" / "pytorch_model.bin")
    (tmp_path / "bin").mkdir()
    file.rename(tmp_path / "bin" / file.name)
    (tmp_path / "a" / "other.safetensors").symlink_to("nowhere")
    for path, size in ((source, f"{source}/model.safetensors"), (tmp_path / "bin", tmp_path / "bin" / file.name)):
        code, out, err = run(
            capsys, "quantize", path, "-o", tmp_path / "q", "--format", "mxfp8", "--overwrite", "--json"
        )
        assert code == 0 and not err and json.loads(out)["bytes_before"] == Path(size).stat().st_size


def test_a_tilde_is_the_home_folder(source, tmp_path, capsys, monkeypatch):
    """A shell leaves it in ``--output=~/q``, and a folder called ``~`` is an accident that waits for ``rm -r``."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path / "a")
    assert run(capsys, "convert", "~/a", "--output=~/q")[0] == 0
    assert (tmp_path / "q" / "model.safetensors").is_file() and not Path("~").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("name", ["q", "q.safetensors", "q.gguf"])
def test_a_signal_that_ends_the_command_leaves_nothing(number, code, name, source, tmp_path, capsys, monkeypatch):
    """A scheduler sends SIGTERM: gigabytes stayed in a hidden folder."""

    def store_tensor(*arguments):
        assert len(list(tmp_path.iterdir())) == 2
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    monkeypatch.setattr(conversion, "store_tensor", store_tensor)
    layout = ("--layout", "gguf", "--format", "mxfp4-weight-only") if name == "q.gguf" else ("--format", "mxfp8")
    assert run(capsys, "quantize", source, "-o", tmp_path / name, *layout) == (code, "", "")
    assert [p.name for p in tmp_path.iterdir()] == ["a"] and signal.getsignal(number) is before


def test_a_name_that_the_terminal_cannot_show_is_not_a_failure(source, tmp_path):
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with redirect_stdout(screen):
        assert main(["convert", source, "-o", str(tmp_path / "é")]) == 0 and screen.errors == "strict"
    screen.flush()
    assert rb"\xe9: " in screen.buffer.getvalue()


def test_values_that_are_not_finite_or_not_real_are_compared(source, tmp_path, capsys):
    nan, inf = torch.randn(32, 32), torch.randn(32, 32)
    nan[0, 0], inf[0, 0] = torch.nan, torch.inf
    state = {"nan": nan, "inf": inf, "finite": inf.nan_to_num(posinf=1.0), "complex": torch.randn(4, 4).cfloat()}
    path = checkpoint(tmp_path / "odd", {f"{name}.weight": value for name, value in state.items()})
    code, out, err = run(capsys, "compare", path, path)
    assert code == 0 and not err and "4 of 4 tensors are equal" in out
    state["nan"], state["finite"], state["complex"] = nan.nan_to_num(), inf.clone(), state["complex"] + 1j
    other = checkpoint(tmp_path / "other", {f"{name}.weight": value for name, value in state.items()})
    code, out, err = run(capsys, "compare", path, other, "--json")
    rows = json.loads(out)["tensors"]
    assert code == 0 and not err and {name: row["equal"] for name, row in rows.items()} == {
        "nan.weight": False, "inf.weight": True, "finite.weight": False, "complex.weight": False
    }  # fmt: skip
    assert rows["complex.weight"]["max_error"] == 1.0 and abs(rows["complex.weight"]["sqnr_db"]) < 9


def test_weights_that_are_not_finite_are_named(tmp_path, capsys):
    bad = torch.randn(512, 2048)
    bad[300, 7] = torch.inf  # not in the tiles whose error is measured
    path = checkpoint(tmp_path / "a", {"a.weight": torch.full((64, 64), 60000.0).half(), "b.weight": bad})
    code, out, err = run(capsys, "quantize", path, "-o", tmp_path / "q", "--format", "mxfp8", "--json")
    assert code == 0 and json.loads(out)["not_finite"] == ["b.weight"] and err.count("\n") == 1
    assert "warning: convert: 1 tensors hold NaN or Inf, such as b.weight; " in err


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "guide" / "serve.md").read_text()
SERVED = [
    (layout, format)
    for _, layout, formats in re.findall(r"^\| ([\w -]+) \| `([\w-]+)` \| (`.+?`) \| ", PAGE, re.MULTILINE)
    for format in re.findall(r"`([\w-]+)`", formats)
]


@pytest.mark.parametrize(("layout", "format"), sorted(set(SERVED)))
def test_what_the_page_serves_is_written_and_read(layout, format, tmp_path, capsys):
    path = checkpoint(tmp_path / "a", {"model.layers.0.q_proj.weight": torch.randn(64, 256).bfloat16()})
    code, out, _ = run(capsys, "quantize", path, "-o", tmp_path / "b", "--format", format, "--layout", layout)
    assert code == 0 and "1 rounded" in out
    fields = json.loads(run(capsys, "inspect", tmp_path / "b", "--json")[1])
    stored = mx.get_format(format.removesuffix("-weight-only")).name
    assert fields["layout"] == layout and list(fields["formats"]) == [stored]


BAD = {
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-100]),
    "a header that is too long": lambda file: file.write_bytes((1 << 62).to_bytes(8, "little") + file.read_bytes()[8:]),
    "empty": lambda file: file.write_bytes(b""),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
}


@pytest.mark.parametrize("damage", BAD)
@pytest.mark.parametrize(
    "arguments",
    [("inspect", "SRC"), ("compare", "SRC", "SRC"), ("convert", "SRC", "-o", "OUT"), ("tune", "SRC", "--dry-run"),
     ("quantize", "SRC", "-o", "OUT", "--format", "mxfp8"), ("eval", "SRC", "--text", "TEXT"),
     ("report", "SRC", "--format", "mxfp8")],
    ids=lambda arguments: arguments[0],
)  # fmt: skip
def test_a_damaged_file_is_named_in_one_line(damage, arguments, source, tmp_path, capsys):
    file = tmp_path / "a" / "model.safetensors"
    BAD[damage](file)
    (tmp_path / "a" / "text").write_text("text")
    places = {"SRC": source, "OUT": str(tmp_path / "out"), "TEXT": str(tmp_path / "a" / "text")}
    code, out, err = run(capsys, *(places.get(argument, argument) for argument in arguments))
    assert (code, out, err.count("\n")) == (1, "", 1) and (str(file) in err or source in err)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_scale_that_is_missing_is_named_with_its_file(tmp_path, capsys):
    checkpoint(tmp_path / "a", {"m.q.weight_packed": torch.zeros(4, 16, dtype=torch.uint8)},
               {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"})  # fmt: skip
    for arguments in (("inspect",), ("tune", "--dry-run"), ("convert", "-o", tmp_path / "out")):
        code, _, err = run(capsys, arguments[0], tmp_path / "a", *arguments[1:])
        assert code == 1 and "model.safetensors" in err and "m.q" in err and err.count("\n") == 1, err
    checkpoint(tmp_path / "b", {"w": torch.zeros(4)}, {"quant_method": "unheard-of"})
    code, _, err = run(capsys, "inspect", tmp_path / "b")
    assert code == 1 and "quant_method 'unheard-of', which no layout reads" in err


def test_an_interrupt_and_a_defect(source, capsys, monkeypatch):
    def raising(error):
        def info(path, progress):
            raise error

        monkeypatch.setattr(store, "info", info)

    raising(KeyboardInterrupt())
    assert run(capsys, "inspect", source)[0] == 130
    raising(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main(["inspect", source])


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_that_parse(command, capsys):
    code, out, _ = run(capsys, command, "--help")
    assert code == 0 and "examples:" in out and "exit codes:" in out and "--json" in out
    for example in COMMANDS[command].examples:
        name, *arguments = example.split()
        assert name == "mxtensor"
        mx.cli.main.parser().parse_args(arguments)


@pytest.mark.exhaustive
def test_the_module_runs(source):
    done = subprocess.run(
        [sys.executable, "-m", "mxtensor", "inspect", source], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "layout plain" in done.stdout
