"""What ``examples.qat --json`` recorded, as a table of the documentation."""

from __future__ import annotations

import json

from docs.markdown import table
from docs.records import RESULTS, where_measured

COMMAND = "python -m examples.qat --device cuda --minutes 5 --batch 64 --compile --json benchmarks/results/qat.json"


def qat() -> str:
    """The quality of each stage, and how much of the calibrated model's KL divergence training removes."""
    path = RESULTS / "qat.json"
    if not path.exists():
        return f"Not recorded yet: `{COMMAND}` writes the record."
    record = json.loads(path.read_text())
    rows, machine, done = record["rows"], record["machine"], record["training"]
    names = list(rows[0]["quality"])
    before = {row["weights"]: row["quality"] for row in rows}
    lines = []
    for row in rows:
        line = [row["weights"], f"{row['seconds']:.0f}"]
        for name in names:
            q = row["quality"][name]
            left = before.get("calibrated", before["nearest"])[name]["kl"]
            gone = f"{1 - q['kl'] / left:.0%}" if row["weights"] == "trained" else ""
            line += [f"{q['perplexity']:.2f}", f"{q['kl']:.4f} +- {q['kl_error']:.4f}", gone]
        lines.append(line)
    figures = ("perplexity", "KL", "KL removed")
    header = ["weights", "seconds", *(f"{name}: {figure}" for name in names for figure in figures)]
    options = record["arguments"]
    what = (
        f"{options['format']}; {done['steps']} steps of {options['batch']} rows of {options['window']} tokens, "
        f"{done['tokens']:,} tokens in {done['seconds']:.0f} s, rate {options['rate']}; {record['text']:,} tokens of "
        f"text, {record['written']:,} written by the model. "
    )
    where = where_measured(machine["gpu"] or machine["cpu"], machine)
    return f"{table(', '.join(header), lines)}\n\n{what}{where}"
