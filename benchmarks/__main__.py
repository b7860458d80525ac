"""List the benchmarks, or run some of them and write their records: ``python -m benchmarks [NAME... | all]``.

A record is benchmarks/results/NAME-MACHINE.json; MACHINE is the GPU, such as h200, or the processor. Afterwards
``python -m benchmarks.plots && make docs`` brings pictures and pages up to date.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module

import torch

from .harness import RESULTS, Progress, Section, machine

SCRIPTS = (
    "layers", "generate", "training", "cast", "host", "cpu", "llm_cpu", "kv_cache", "quality", "models", "fsdp",
    "scale", "fp8_rows_errors",
)  # fmt: skip
"""In the order of the documentation. ``parity``, which trains for hours, has a command of its own."""
WITHOUT_MACHINE = ("models",)
"""Their figures are the same everywhere."""
WITHOUT_RECORD = ("scale", "fp8_rows_errors")


def sections_of(name: str) -> dict[str, Section]:
    """The sections of a script."""
    return import_module(f"benchmarks.{name}").SECTIONS  # type: ignore[no-any-return]


def machine_name(gpu: str | None, cpu: str) -> str:
    """A short name of a GPU or a processor, for the name of a file."""
    words = (gpu or cpu).replace("(R)", "").lower().removeprefix("nvidia ").removeprefix("amd ").split()
    return words[1] if words[0] == "intel" and len(words) > 1 else words[0]


def listed() -> list[str]:
    """For each script its records in the repository; for each section whether it needs a GPU, and its question."""
    found = []
    for name in SCRIPTS:
        found.append(" ".join([name, *sorted(path.name for path in RESULTS.glob(f"{name}[-.]*json"))]))
        for section, row in sections_of(name).items():
            found.append(f"    {section:13} {'GPU' if row.gpu else '':4} {row.question}")
    return [*found, f"parity parity/*.jsonl\n    {'':13} GPU  does quantized training reach the loss of bfloat16?"]


def command_of(name: str) -> list[str]:
    """The command that measures all sections of a script that can run here; empty if none can."""
    sections = [section for section, row in sections_of(name).items() if torch.cuda.is_available() or not row.gpu]
    if not sections:
        return []
    info = machine()
    of_gpu = any(row.gpu for row in sections_of(name).values())
    where = "" if name in WITHOUT_MACHINE else f"-{machine_name(info['gpu'] if of_gpu else None, info['cpu'])}"
    record = [] if name in WITHOUT_RECORD else ["--json", str(RESULTS / f"{name}{where}.json")]
    return [sys.executable, "-m", f"benchmarks.{name}", *sections, *record]


def main(argv: Sequence[str] | None = None) -> int:
    """List, or run. The exit status is the number of scripts that failed."""
    options = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").partition("\n")[0])
    options.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(SCRIPTS)}; all")
    names = options.parse_args(argv).names
    if not names:
        print(*listed(), sep="\n")
        return 0
    names = list(SCRIPTS) if names == ["all"] else names
    if unknown := [name for name in names if name not in SCRIPTS]:
        options.error(f"there is no benchmark {', '.join(unknown)}; the benchmarks are {', '.join(SCRIPTS)}")
    progress, failed = Progress(len(names), "scripts"), []
    for name in names:
        command = command_of(name)
        if command and subprocess.run(command, check=False).returncode:
            failed.append(name)
        progress.step(name if command else f"{name} needs a GPU, and was left out")
    progress.close()
    print(f"failed: {', '.join(failed)}" if failed else "all done")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
