"""What ``benchmarks.users`` recorded, as text and tables of the documentation."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.harness import read_json
from docs.markdown import table
from docs.records import RESULTS, on_gpu

BASE = "bfloat16"


def figures_of_users(short: Callable[[dict[str, Any]], str]) -> list[tuple[str, ...]]:
    """The lines of README's table that ``benchmarks.users`` measured: layers, experts, generate, training steps."""
    from benchmarks import users_experts, users_generate, users_layers, users_train
    from benchmarks.decode import DecodeRow

    machine, layers = read_json(RESULTS / "users_layers.json", DecodeRow)
    found = users_layers.figures(layers)
    few = {line[1]: line for line in users_layers.summary(found, users_layers.band_of) if line[0] == "1 to 64"}
    few_rows = (f"{few[name][2]}x, at worst {few[name][3]}x" for name in ("mxfp8-weight-only", "mxfp4-weight-only"))
    of_experts, experts = read_json(RESULTS / "users_experts.json", users_experts.ExpertsRow)
    speeds = ([row.speedup(name) for row in experts] for name in users_experts.FORMATS)
    decoding = (f"{statistics.geometric_mean(each):.2f}x, at worst {min(each):.2f}x" for each in speeds)
    lines = [
        (f"Linear layers of public models, 1 to 64 rows, one {short(machine)}", "", *few_rows, ""),
        (
            f"Experts of public models, one decoding step of 1 to 64 sequences, one {short(of_experts)}",
            "",
            *decoding,
            "",
        ),
    ]
    of_generate, rows = read_json(RESULTS / "users_generate.json", users_generate.GenerateRow)
    batches = sorted({row.batch for row in rows})
    many = {name: {row.batch: row for row in rows if row.config == name} for name in (BASE, *users_experts.FORMATS)}
    what = f"transformers' `generate`, static cache, shape of Llama 3 8B, batch {_listed(batches)}, "
    what += f"one {short(of_generate)}"
    usual = f"{_listed(f'{many[BASE][batch].tokens_a_second:,.0f}' for batch in batches)} tokens/s"
    faster = (
        _listed(f"{1 / many[name][batch].relative['token']:.2f}x" for batch in batches)
        for name in users_experts.FORMATS
    )
    lines.append((what, usual, *faster, ""))
    of_steps, steps = read_json(RESULTS / "users_train.json", users_train.StepRow)
    for row in steps:
        base, ours = row.times[users_train.BASE], row.times["mxfp8"]
        what = f"Compiled training step of a GPT, {row.size.replace('x', ' layers of width ')}, one {short(of_steps)}"
        lines.append((what, f"{base:.1f} ms", f"{ours:.1f} ms ({base / ours:.2f}x)", "", ""))
    return lines


def _listed(values: Iterable[Any]) -> str:
    return " / ".join(map(str, values))


def users_layers() -> str:
    """What ``benchmarks.users layers`` recorded."""
    from benchmarks import users_layers as bench
    from benchmarks.decode import DecodeRow

    def sections(rows: list[DecodeRow]) -> list[str]:
        found, names = bench.figures(rows), bench.model_shapes()
        return [
            table(", ".join(bench.WORST_HEADER), bench.worst_lines(found, names, 10)),
            table(", ".join(bench.SUMMARY_HEADER), bench.summary(found, bench.band_of)),
            table(", ".join(bench.SUMMARY_HEADER), bench.summary(found, str)),
        ]

    names = "users_layers", "users_layers_h200"
    return "\n\n".join(on_gpu(name, DecodeRow, sections, "users layers") for name in names)


def users_experts() -> str:
    """What ``benchmarks.users experts`` recorded."""
    from benchmarks import users_experts as bench

    def sections(rows: list[bench.ExpertsRow]) -> list[str]:
        header, lines = bench.table(rows, bench.FORMATS)
        return [table(", ".join(header), lines), table(", ".join(bench.MEANS_HEADER), bench.means(rows, bench.FORMATS))]

    return on_gpu("users_experts", bench.ExpertsRow, sections, "users experts")


def users_experts_batched() -> str:
    """What ``benchmarks.users experts --batched`` recorded."""
    from benchmarks import users_experts as bench

    def sections(rows: list[bench.ExpertsRow]) -> list[str]:
        return [table(", ".join(bench.MEANS_HEADER), bench.means(rows, bench.FORMATS))]

    return on_gpu("users_experts_batched", bench.ExpertsRow, sections, "users experts --batched")


def users_train() -> str:
    """What ``benchmarks.users train`` recorded."""
    from benchmarks import users_train as bench

    def sections(rows: list[bench.StepRow]) -> list[str]:
        return [table(", ".join(bench.HEADER), bench.lines(rows))]

    return on_gpu("users_train", bench.StepRow, sections, "users train")


def users_generate() -> str:
    """What ``benchmarks.users generate`` recorded."""
    from benchmarks import users_generate as bench

    def sections(rows: list[bench.GenerateRow]) -> list[str]:
        return [table(", ".join(bench.HEADER), [bench.line(row) for row in bench.ordered(rows)])]

    return on_gpu("users_generate", bench.GenerateRow, sections, "users generate")


def users_first() -> str:
    """What ``benchmarks.users first-token`` recorded."""
    from benchmarks import users_first as bench

    def sections(rows: list[bench.FirstRow]) -> list[str]:
        return [table(", ".join(bench.HEADER), bench.lines(rows))]

    return on_gpu("users_first", bench.FirstRow, sections, "users first-token")
