"""What the command ``mxtensor`` needs before torch is imported, which takes seconds: ``mxtensor/__init__`` imports this
module first, and that is what starts it. Programs that import the package are left alone.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType

COMMANDS = ("mxtensor", "mxtensor.exe", "mxtensor-script.py")


def is_command() -> bool:
    """Whether this process is the command: its script, or ``python -m mxtensor``."""
    arguments = sys.argv or [""]
    if arguments[0] == "-m":  # while the package is imported
        return "mxtensor" in sys.orig_argv[1:]
    return os.path.basename(arguments[0]) in COMMANDS


def _without_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """An interrupt is one line, also while torch is imported."""
    if issubclass(kind, KeyboardInterrupt):
        print("mxtensor: interrupted", file=sys.stderr, flush=True)
    else:
        sys.__excepthook__(kind, error, trace)


def open_standard_files() -> None:
    """Open /dev/null for standard input, output and error where they are closed (``2>&-``): otherwise the next file
    that is opened, such as a checkpoint, gets their number and what libraries print there."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            found = os.open(os.devnull, os.O_RDWR)
            if found != number:
                os.dup2(found, number)
                os.close(found)
    if sys.stderr is None:
        sys.stderr = open(2, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115


def prepare() -> None:
    """Say an interrupt in one line, also while torch is imported, and open the standard files."""
    sys.excepthook = _without_traceback
    open_standard_files()


if is_command():
    prepare()
