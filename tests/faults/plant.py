"""Plant one fault in a copy of the tree and find the test that catches it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from .rows import Fault

ROOT = Path(__file__).resolve().parents[2]
NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv", "out", "build", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info"
)
FAILED = re.compile(r"^(?:FAILED|ERROR) ([^\s\[]+(?:\[.*?\])?)(?: - |$)", re.MULTILINE)
"""A line of pytest's summary. A case's id may have spaces."""
MOST_SECONDS = 1800
"""For one run of pytest; a fault may also make a test run forever, and then it is caught by that."""


class Caught(NamedTuple):
    """Which suite has caught a fault, by which test, after how many seconds; "" for neither."""

    suite: str
    test: str
    seconds: float


def planted(text: str, fault: Fault) -> str:
    """``text`` with the fault. Raises ValueError unless the old text is there exactly once."""
    count = text.count(fault.old)
    if count != 1:
        raise ValueError(f"fault {fault.name!r}: {fault.old!r} occurs {count} times in {fault.file}")
    return text.replace(fault.old, fault.new)


def run(folder: Path, arguments: list[str]) -> tuple[str, str]:
    """(the first test that failed or "", the output) of pytest in a copy of the tree."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", *arguments]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=MOST_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return "(timeout)", ""
    found = FAILED.search(done.stdout)
    if found:
        return found[1], done.stdout
    if done.returncode in (0, 5):  # all passed, nothing selected
        return "", done.stdout
    return "(import or collection)", done.stdout + done.stderr


def catch(fault: Fault, options: tuple[str, ...] = ()) -> Caught:
    """Plant ``fault`` and run the quick suite, the tests of ``near`` first; then, if it survives, the rest likewise.

    A test that fails without the fault too does not count. ``options`` go to pytest.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mxtensor-fault-") as scratch:
        folder = Path(scratch, "tree")
        shutil.copytree(ROOT, folder, ignore=NOT_COPIED)
        path = folder / "mxtensor" / fault.file
        clean = path.read_text()
        broken = planted(clean, fault)
        near = [f"tests/{name}" for name in fault.near.split()]
        skipped = ["--ignore=tests/faults"]
        for suite, paths in (("quick", near), ("quick", ["tests"]), ("rest", near), ("rest", ["tests"])):
            while True:
                path.write_text(broken)
                test, _ = run(folder, ["--suite", suite, *skipped, *options, *paths])
                if not test:
                    break
                path.write_text(clean)
                if not test.startswith("(") and run(folder, [test])[0]:
                    skipped.append(f"--deselect={test}")
                    continue
                return Caught(suite, test, time.monotonic() - start)
    return Caught("", "", time.monotonic() - start)
