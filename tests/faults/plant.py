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
MOST_FAILURES = 10
"""After which a run of pytest stops: some tests may fail without the fault too."""
FAIL_ANYWAY: set[str] = set()
"""Tests that fail without a fault, found while faults were planted; later runs leave them out."""
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


def failures(folder: Path, arguments: list[str]) -> list[str]:
    """The tests that fail in a copy of the tree; something in parentheses where pytest does not come that far."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": ""}
    options = ["-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", f"--maxfail={MOST_FAILURES}"]
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=MOST_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return ["(timeout)"]
    found = FAILED.findall(done.stdout)
    return found or ([] if done.returncode in (0, 5) else ["(import or collection)"])  # 5: nothing was selected


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
        for suite, paths in (("quick", near), ("quick", ["tests"]), ("rest", near), ("rest", ["tests"])):
            failed = ["(the first run)"]
            while failed:
                path.write_text(broken)
                skipped = ["--ignore=tests/faults", *(f"--deselect={test}" for test in sorted(FAIL_ANYWAY))]
                failed = failures(folder, ["--suite", suite, *skipped, *options, *paths])
                path.write_text(clean)
                for test in failed:
                    if test.startswith("(") or not failures(folder, [test]):
                        return Caught(suite, test, time.monotonic() - start)
                    FAIL_ANYWAY.add(test)
    return Caught("", "", time.monotonic() - start)
