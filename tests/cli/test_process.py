"""The command as a process: signals, interrupts while it starts, standard files that are closed, other encodings."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import mxtensor as mx
from mxtensor.checkpoints import conversion, destination
from mxtensor.cli import main as cli_main
from mxtensor.cli.output import visible
from mxtensor.cli.startup import is_command
from tests.helpers.checkpoint_files import checkpoint
from tests.helpers.cli import run

STATE = {"model.layers.0.q_proj.weight": torch.randn(64, 64, generator=torch.Generator().manual_seed(0))}
POSIX = pytest.mark.skipif(os.name != "posix", reason="signals and descriptors of POSIX")


@pytest.fixture
def source(tmp_path):
    return str(checkpoint(tmp_path / "a", STATE))


def started(*arguments, shell="", **environment):
    """A process of the command. ``shell``: what follows it in a line of a shell."""
    words = [sys.executable, "-m", "mxtensor", *map(str, arguments)]
    words = ["sh", "-c", f'exec "$@" {shell}', "sh", *words] if shell else words
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )


@POSIX
@pytest.mark.parametrize("numbers", [("SIGTERM", "SIGTERM"), ("SIGINT", "SIGTERM"), ("SIGINT", "SIGINT")])
def test_a_second_signal_does_not_interrupt_the_removal(numbers, source, tmp_path, capsys, monkeypatch):
    """A scheduler sends SIGTERM again, and an impatient person presses Ctrl-C again."""
    first, second = (getattr(signal, number) for number in numbers)
    original, removed = destination.shutil.rmtree, []

    def rmtree(path, *arguments, **more):
        removed.append(path)
        os.kill(os.getpid(), second)
        time.sleep(0.01)
        original(path, *arguments, **more)

    def store_tensor(*arguments):
        monkeypatch.setattr(destination.shutil, "rmtree", rmtree)
        os.kill(os.getpid(), first)

    before = signal.getsignal(first)
    monkeypatch.setattr(conversion, "store_tensor", store_tensor)
    code, out, _ = run(capsys, "quantize", source, "-o", tmp_path / "q", "--format", "mxfp8")
    assert (code, out) == (130 if first == signal.SIGINT else 143, "") and removed
    assert [p.name for p in tmp_path.iterdir()] == ["a"] and signal.getsignal(first) is before


@POSIX
def test_a_signal_after_the_time_for_the_removal_ends_the_command(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(cli_main.time, "monotonic", lambda: now[0])
    with cli_main.ended_by_signals():
        for at, raised in ((0, True), (cli_main.GRACE / 2, False), (2 * cli_main.GRACE, True)):
            now[0] = at
            if raised:
                with pytest.raises(SystemExit):
                    os.kill(os.getpid(), signal.SIGTERM), time.sleep(0.01)
            else:
                os.kill(os.getpid(), signal.SIGTERM), time.sleep(0.01)


def test_the_interrupt_of_a_removal_leaves_nothing(tmp_path, monkeypatch):
    """Without the command, too: in a notebook there is Ctrl-C."""
    original, calls = destination.shutil.rmtree, []

    def rmtree(*arguments, **more):
        calls.append(arguments)
        if len(calls) == 1:
            raise KeyboardInterrupt
        original(*arguments, **more)

    monkeypatch.setattr(destination.shutil, "rmtree", rmtree)
    with pytest.raises(KeyboardInterrupt), destination.Destination(tmp_path / "x.safetensors"):
        raise ValueError
    assert list(tmp_path.iterdir()) == []


@POSIX
@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("delay", [0.3, 0.6, 1.2])
def test_an_interrupt_while_torch_is_imported_is_one_line(delay):
    process = started("doctor")
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT) and (out, err) == ("", "mxtensor: interrupted\n")


def test_only_the_command_is_changed(monkeypatch):
    rows = [("/usr/bin/mxtensor", True), ("mxtensor.exe", True), ("train.py", False), ("", False), ("-c", False)]
    for name, wanted in rows:
        monkeypatch.setattr(sys, "argv", [name, "mxtensor"])
        assert is_command() == wanted
    monkeypatch.setattr(sys, "argv", ["-m", "x"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "mxtensor", "x"])
    assert is_command()
    assert sys.excepthook.__module__ != "mxtensor.cli.startup"


@POSIX
@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("closed", ["2>&-", "0<&- 2>&-"])
def test_standard_error_that_is_closed_takes_no_file(closed, source, tmp_path):
    """The next file that was opened got the number of standard error, and what a library prints there."""
    arguments = ("quantize", source, "-o", tmp_path / "q", "--format", "mxfp8", "--json")
    process = started(*arguments, shell=closed)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and err == "" and len(json.loads(out)["errors"]) == 1
    assert isinstance(mx.checkpoints.load(tmp_path / "q")["model.layers.0.q_proj.weight"], mx.MXTensor)
    process = started("inspect", tmp_path / "none", "--json", shell=closed)
    assert (*process.communicate(timeout=120), process.returncode) == ("", "", 1)


@POSIX
@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("name", ["é", "quoted\udcff"])
def test_names_in_an_ascii_locale(name, tmp_path):
    """Python has no letters but those of ASCII for arguments, files and the screen there."""
    path = os.fsencode(tmp_path / "a")
    checkpoint(tmp_path / "a", STATE)
    os.rename(path, os.fsencode(tmp_path) + b"/" + os.fsencode(name))
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    process = started("inspect", tmp_path / name, "--tensors", **environment)
    out, err = process.communicate(timeout=120)
    assert "Traceback" not in err and err.count("\n") == process.returncode
    assert "q_proj" in out if process.returncode == 0 else "cannot be read" in err


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a\x1b[2J\x07b", r"a\x1b[2J\x07b"),
        ("\x9b31m\x7f\x00\r", r"\x9b31m\x7f\x00\x0d"),
        ("x\u202egnp", r"x\u202egnp"),
        ("é 日本 \n\t", "é 日本 \n\t"),
    ],
)
def test_control_characters_are_shown(text, wanted):
    assert visible(text) == wanted


def test_names_of_tensors_do_not_command_the_terminal(tmp_path, capsys):
    name = "model.\x1b[2J\x1b]0;owned\x07.weight"
    a = checkpoint(tmp_path / "a", {name: torch.randn(64, 64), "other\n.weight": torch.ones(4, 4)})
    b = checkpoint(tmp_path / "b", {name: torch.full((64, 64), torch.nan), "third\x9b.weight": torch.ones(4, 4)})
    commands = [
        ("inspect", a, "--tensors"), ("compare", a, b), ("compare", a, a),
        ("quantize", b, "-o", tmp_path / "q", "--format", "mxfp8"), ("inspect", "no\x1b[2Jne"),
        ("quantize", a, "-o", tmp_path / "r", "--format", "mxfp8", "--skip", "\x1b[2J"),
        ("convert", a, "--layout", "\x1b[2J"),
    ]  # fmt: skip
    for command in commands:
        _, out, err = run(capsys, *command)
        assert not {"\x1b", "\x07", "\x9b"} & {*out, *err} and (r"\x1b[2J" in out + err), command
    assert len(run(capsys, *commands[0])[1].splitlines()) == 9
