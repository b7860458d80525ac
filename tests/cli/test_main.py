"""The command: what it prints, its exit codes, and that a failure is one line."""

import json
import subprocess
import sys

import pytest
import torch

import mxtensor as mx
from mxtensor.cli import commands
from mxtensor.cli.main import COMMANDS, main
from tests.checkpoints.test_peers import checkpoint

STATE = {"model.layers.0.q_proj.weight": torch.randn(64, 64), "lm_head.weight": torch.randn(32, 64)}


@pytest.fixture
def source(tmp_path):
    return str(checkpoint(tmp_path / "a", STATE))


def run(capsys, *arguments):
    """(exit code, standard output, standard error)."""
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_quantize_info_compare_and_convert(source, tmp_path, capsys):
    code, out, _ = run(capsys, "quantize", source, "-o", tmp_path / "q", "--format", "mxfp4-weight-only")
    assert code == 0 and "1 rounded" in out
    code, out, _ = run(capsys, "inspect", tmp_path / "q", "--tensors", "--json")
    fields = json.loads(out)
    assert code == 0 and fields["layout"] == "native" and fields["formats"]["mxfp4_e2m1"]["tensors"] == 1
    assert fields["tensors"]["lm_head.weight"]["format"] == "float32"
    code, out, _ = run(capsys, "compare", source, tmp_path / "q", "--json")
    rows = json.loads(out)["tensors"]
    assert code == 0 and 17 < rows["model.layers.0.q_proj.weight"]["sqnr_db"] < 20
    assert rows["lm_head.weight"]["equal"] and rows["model.layers.0.q_proj.weight"]["bits"] == 4.25
    code, out, _ = run(capsys, "convert", tmp_path / "q", "-o", tmp_path / "c", "--layout", "compressed-tensors")
    assert code == 0 and "2 tensors exact, 0 rounded" in out
    assert "mxfp4_e2m1" in run(capsys, "info", tmp_path / "c")[1]
    assert "18." in run(capsys, "compare", source, tmp_path / "c")[1]


def test_a_module_is_skipped(source, tmp_path, capsys):
    code, out, _ = run(
        capsys, "quantize", source, "-o", tmp_path / "q", "--format", "mxfp8", "--skip", "q_proj", "--json"
    )
    assert code == 0 and json.loads(out)["errors"] == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("info", "/none"), "/none does not exist"),
        (("quantize", "SRC", "-o", "OUT", "--format", "mxfp9"), "unknown format 'mxfp9'"),
        (("convert", "SRC", "-o", "OUT", "--layout", "awq"), "unknown layout 'awq'"),
        (("convert", "SRC", "-o", "OUT", "--layout", "pickle"), "the layout pickle is only read"),
        (("convert", "SRC", "-o", "OUT", "--layout", "gguf"), "pass a name that ends in .gguf"),
        (("quantize", "SRC", "-o", "OUT", "--format", "mxint8", "--layout", "mlx"), "q_proj.weight is mxint8"),
        (("convert", "SRC", "-o", "SRC"), "is the source"),
    ],
)
def test_a_failure_is_one_line_and_leaves_nothing(arguments, message, source, tmp_path, capsys):
    places = {"SRC": source, "OUT": str(tmp_path / "out")}
    code, out, err = run(capsys, *(places.get(argument, argument) for argument in arguments))
    assert code == 1 and out == "" and err.count("\n") == 1
    assert err.startswith("mxtensor: error: ") and message in err
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_an_interrupt_and_a_defect(source, tmp_path, capsys, monkeypatch):
    def raising(error):
        def info(path):
            raise error

        monkeypatch.setattr(commands.store, "info", info)

    raising(KeyboardInterrupt())
    assert run(capsys, "info", source)[0] == 130
    raising(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main(["info", source])


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_that_parse(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0 and "examples:" in capsys.readouterr().out
    for example in COMMANDS[command].examples:
        name, *arguments = example.split()
        assert name == "mxtensor"
        mx.cli.main.parser().parse_args(arguments)


def test_wrong_usage_is_two(capsys):
    with pytest.raises(SystemExit) as end:
        main(["convert"])
    assert end.value.code == 2


def test_doctor_names_versions_and_refusals(capsys):
    code, out, _ = run(capsys, "doctor")
    assert code == 0 and f"torch {torch.__version__}" in out and "linear" in out


def test_the_module_runs(source):
    done = subprocess.run(
        [sys.executable, "-m", "mxtensor", "info", source], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "layout plain" in done.stdout
