"""lm-eval's example: the questions, the table, and a run without a network if lm-eval is installed."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from examples import harness
from examples.tasks import load
from tests.docs.test_docs import ROOT


def test_each_question_has_four_answers_and_no_place_is_right_more_often():
    rows = load.rows()
    assert len(rows) == 48 and len({row["sentence"] for row in rows}) == 48
    assert all(len(set(row["choices"])) == 4 and row["choices"][row["answer"]] for row in rows)
    assert [sum(row["answer"] == place for row in rows) for place in range(4)] == [12] * 4


def test_the_table_has_the_numbers_of_each_task():
    results = {"facts": {"alias": "facts", "acc,none": 0.5, "acc_stderr,none": 0.1}}
    assert harness.rows_of(results) == [("facts", "acc", "0.5000")]


@pytest.mark.parametrize("arguments", [["model", "--format", "mxfp7"], []])
def test_wrong_calls(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        harness.main(arguments)
    assert end.value.code == 2


def test_a_folder_without_a_model_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        harness.main([str(tmp_path)])
    assert f"{tmp_path} is not the folder of a model: it has no config.json" in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.skipif(not (find_spec("lm_eval") and find_spec("datasets")), reason="lm-eval is not installed")
def test_a_run_without_a_network(tmp_path):
    from tests.cli.small_model import save_small_model

    save_small_model(tmp_path / "model")
    blocked = (  # every connection fails
        "import socket, runpy, sys\n"
        "def refuse(*args, **kwargs): raise OSError('no network')\n"
        "socket.socket.connect = refuse\n"
        "sys.argv = ['harness', *sys.argv[1:]]\n"
        "runpy.run_module('examples.harness', run_name='__main__')\n"
    )
    arguments = [
        str(tmp_path / "model"),
        "--format",
        "mxfp8-weight-only",
        "--limit",
        "4",
        "--json",
        str(tmp_path / "r"),
    ]
    done = subprocess.run(
        [sys.executable, "-c", blocked, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"^facts +acc +[01]\.\d{4}$", done.stdout, re.MULTILINE)
    assert 0 <= json.loads((tmp_path / "r").read_text())["facts"]["acc,none"] <= 1
