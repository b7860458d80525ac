"""What the benchmarks recorded, as text and tables of the documentation: one function for each table.

``records_benchmarks`` has those of docs/reference/benchmarks.md.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks import fsdp as fsdp_bench
from benchmarks import generate, layers, quality, scale, training
from benchmarks.harness import VERDICT_HEADER, read_json
from benchmarks.parity_record import TARGETS, by_arm, read_all, table_of
from docs.markdown import table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
ASSETS = ROOT / "docs" / "assets"
PICTURES = {
    "layers": "Speed of linear layers over bfloat16 by the number of rows, for three formats and two GPUs",
    "generate": "Tokens per second over bfloat16 of a model that decodes, by format and batch",
    "llm_cpu": "Speed over llama.cpp of two language models on a CPU, by format and way to run them",
    "training": "Time of a training step over bfloat16, by recipe and shape",
    "cast": "Share of the copy bandwidth that each cast reaches, by format and size",
    "quality": "KL divergence over bits per value, by library, format and method",
}
"""What benchmarks/plots.py draws of records, in words."""


def section(record: str, name: str, kind: type[Any]) -> tuple[dict[str, Any], list[Any]]:
    """A section of a record: the machine, and the rows of class ``kind``."""
    return read_json(RESULTS / f"{record}.json", kind, name)


def picture(name: str) -> str:
    """A picture, with what it shows in words."""
    return f"![{PICTURES[name]}](../assets/{name}.png)"


def where_measured(device: str, machine: dict[str, Any]) -> str:
    """What the figures of a record were measured on."""
    versions = ", ".join(f"{package} {version}" for package, version in machine["versions"].items())
    return f"{device}, Python {machine['python']}, {versions}; {machine['date']}."


def llm() -> str:
    """What examples/llm.py recorded."""
    from examples.llm import HEADER, cells, read_record

    record, results = read_record(RESULTS / "llm.json")
    machine = record["machine"]
    where = where_measured(f"{machine['cpu']}, {machine['threads']} threads, {record['bandwidth']:.1f} GB/s", machine)
    return f"{table(', '.join(HEADER), map(cells, results))}\n\n{where}"


# ---------------------------------------------------------------------------------------------- quality


def calibration() -> str:
    """Methods of calibration, with the share of the KL of rounding to nearest that is gone."""
    record = json.loads((RESULTS / "quality-epyc.json").read_text())["calibration"]
    rows = quality.read(RESULTS / "quality-epyc.json", quality.MethodRow, "calibration")
    found = {(row.format, row.method): row.quality for row in rows}
    lines = []
    for row in rows:
        line = [row.format, row.method, f"{row.bits:.2f}", f"{row.seconds:.0f}"]
        base = f"nearest{quality.WITH_HEAD}" if row.method.endswith(quality.WITH_HEAD) else "nearest"
        for name, q in row.quality.items():
            nearest = found.get((row.format, base))
            gone = "" if nearest is None or row.method == base else f"{1 - q.kl / nearest[name].kl:.0%}"
            line += [f"{q.perplexity:.2f}", f"{q.kl:.4f} +- {q.kl_error:.4f}", gone]
        lines.append(line)
    figures = ", ".join(f"{name}: {figure}" for name in quality.TEXTS for figure in ("perplexity", "KL", "KL removed"))
    machine = record["machine"]
    where = where_measured(
        f"{record['sequences']} sequences of {record['window']} tokens; {machine['cpu']}, 1 thread", machine
    )
    return f"{table(f'format, method, bits/value, seconds, {figures}', lines)}\n\n{where}"


def weights() -> str:
    """Formats of several libraries, with the picture."""
    record = json.loads((RESULTS / "quality-epyc.json").read_text())["weights"]
    rows = quality.read(RESULTS / "quality-epyc.json", quality.WeightsRow, "weights")
    machine = record["machine"]
    before = ", ".join(f"{value:.2f} ({name})" for name, value in record["perplexity"].items())
    where = f"SmolLM2-135M-Instruct; perplexity before: {before}. " + where_measured(machine["cpu"], machine)
    lines = [
        [*row.key, f"{row.sequences or ''}", f"{row.bits:.2f}", *quality.figures(row.quality)]
        for row in sorted(rows, key=lambda row: (-row.bits, row.key))
    ]
    header = ["library", "format", "method", "sequences", "bits/value", *quality.FIGURES]
    return f"{picture('quality')}\n\n{where}\n\n{table(', '.join(header), lines)}"


def qat() -> str:
    """The quality of each stage, and how much of the calibrated model's KL divergence training removes."""
    record = json.loads((RESULTS / "qat.json").read_text())
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


# ---------------------------------------------------------------------------------------------- parity


def _study(size: str) -> str:
    results = read_all(RESULTS / "parity", size)
    first = results[0].header
    gpus = Counter(result.header.machine["gpu"] or result.header.machine["cpu"] for result in results)
    shape = (
        f"{first.parameters / 1e6:.0f} million parameters, {max(r.header.quantized for r in results) / 1e6:.0f} "
        f"million of them quantized; {first.steps * first.batch_tokens / 1e6:.1f} million tokens an arm in "
        f"{first.steps} steps of {first.batch_tokens:,}; {first.training_bytes / 1e6:.0f} MB of text for training, "
        f"{first.held_out_bytes / 1e6:.1f} MB held out. "
    )
    paragraphs = [shape + where_measured(" and ".join(gpus), first.machine)]
    paragraphs.append(f"![Held-out loss and its distance from bfloat16 over tokens](../assets/parity_{size}.png)")
    products = {arm: ", ".join(sorted(runs[0].header.products)) for arm, runs in by_arm(results).items()}
    verdicts = [verdict for verdict in (t.verdict(results) for t in TARGETS) if verdict[2]]
    header, lines = table_of(results)
    paragraphs += [
        table(", ".join(header), lines),
        table(", ".join(VERDICT_HEADER), verdicts),
        "The products of a block, by the kernel that ran:",
        table("arm, products", [row for row in products.items() if row[1]]),
    ]
    return "\n\n".join(paragraphs)


def parity_large() -> str:
    """The study of the large size."""
    return _study("large")


def parity_medium() -> str:
    """The study of the medium size."""
    return _study("medium")


# ---------------------------------------------------------------------------------------------- many GPUs


def _scale(header: list[str], lines: list[list[str]]) -> str:
    names = ", ".join(name.replace(",", ";") for name in header)
    return table(names, lines)


def scale_check() -> str:
    """The formulas of ``benchmarks.scale`` beside a measurement."""
    return _scale(scale.CHECK_HEADER, scale.check_lines())


def scale_layouts() -> str:
    """Its table of models and layouts."""
    return _scale(scale.HEADER, scale.lines())


def scale_formats() -> str:
    """Its table of formats."""
    return _scale(scale.FORMAT_HEADER, scale.format_lines())


def fsdp() -> str:
    """FSDP2 training on two GPUs."""
    machine, rows = section("fsdp-h200", "train", fsdp_bench.FsdpRow)
    return "\n\n".join((
        where_measured(f"{machine['gpu']}, CUDA {machine['cuda']}", machine), f"On {rows[0].ranks} GPUs:",
        table(", ".join(fsdp_bench.HEADER), fsdp_bench.lines(rows)),
        table(", ".join(VERDICT_HEADER), [target.verdict(rows) for target in fsdp_bench.TARGETS]),
    ))  # fmt: skip


def sharding() -> str:
    """When computation hides the communication of FSDP2."""
    return table(", ".join(scale.SHARDING_HEADER), scale.sharding_lines())


# ---------------------------------------------------------------------------------------------- README.md

FIGURES = {"mxfp8": "MXFP8", "mxfp4": "MXFP4", "nvfp4": "NVFP4"}
"""Columns of the table of figures: the name in the records, and the name in the table."""


def _short(machine: dict[str, Any]) -> str:
    """The GPU of a record without its maker and its memory: H200."""
    return machine["gpu"].removeprefix("NVIDIA ").split()[0]  # type: ignore[no-any-return]


def _listed(values: Iterable[Any]) -> str:
    return " / ".join(map(str, values))


def _few_rows() -> list[tuple[str, ...]]:
    """Layers and experts at few rows: the mean, and the worst."""
    lines = []
    for what, name, kind, most in (
        ("Linear layers of public models, 1 to 64 rows", "models", layers.LayerRow, 64),
        ("Experts of public models, one decoding step of 1 to 64 sequences", "experts", layers.ExpertsRow, 64),
    ):
        machine, rows = section("layers-h100", name, kind)
        rows = [row for row in rows if getattr(row, "m", 0) <= most]
        speeds = ([row.speedup(config) for row in rows] for config in layers.EXPERT_FORMATS)
        cells = (f"{statistics.geometric_mean(each):.2f}x, at worst {min(each):.2f}x" for each in speeds)
        lines.append((f"{what}, one {_short(machine)}", "", *cells, ""))
    return lines


def _generate() -> tuple[str, ...]:
    """transformers' generate: tokens per second, and how many times as fast, by batch."""
    machine, rows = section("generate-h100", "transformers", generate.GenerateRow)
    batches = sorted({row.batch for row in rows})
    many = {name: {row.batch: row for row in rows if row.config == name} for name in generate.FORMATS}
    what = f"transformers' `generate`, static cache, shape of Llama 3 8B, batch {_listed(batches)}, "
    usual = f"{_listed(f'{many[generate.BASE][batch].tokens_a_second:,.0f}' for batch in batches)} tokens/s"
    faster = (
        _listed(f"{many[name][batch].speedup('token'):.2f}x" for batch in batches) for name in generate.FORMATS[1:]
    )
    return (f"{what}one {_short(machine)}", usual, *faster, "")


def figures() -> str:
    """The table of figures in README.md: what the formats save, and what they cost."""
    rows: list[tuple[str, ...]] = [*_few_rows(), _generate()]
    machine, steps = section("training-h100", "step", training.StepRow)
    for row in steps:
        base, ours = row.times[training.BASE], row.times["mxfp8"]
        what = f"Compiled training step of a GPT, {row.size.replace('x', ' layers of width ')}, one {_short(machine)}"
        rows.append((what, f"{base:.1f} ms", f"{ours:.1f} ms ({base / ours:.2f}x)", "", ""))

    def add(what: str, unit: str, base: float, values: Callable[[str], float | None], faster: bool = False) -> None:
        cells = [f"{base:.4g} {unit}"]
        for value in map(values, FIGURES):
            ratio = value and (value / base if faster else base / value)
            cells.append("" if value is None else f"{value:.4g} {unit} ({ratio:.2f}x)")
        rows.append((what, *cells))

    machine, models = section("generate-h200", "decode", generate.ModelRow)
    decoded = {row.work: row for row in models}
    weights_gb = {name: float(f"{row.weight_bytes / 1e9:.2f}") for name, row in decoded.items()}
    speed = {name: float(f"{row.tokens_a_second:.1f}") for name, row in decoded.items()}
    shape, graph = "Weights of a model with the shape of Llama 3 8B", "Decoding with its layers in one CUDA graph"
    add(shape, "GB", weights_gb["bfloat16"], lambda name: weights_gb[f"{name}-weight-only"])
    what = f"{graph}, batch 1, one {_short(machine)}"
    add(what, "tokens/s", speed["bfloat16"], lambda name: speed[f"{name}-weight-only"], faster=True)

    host, ranks = section("fsdp-h200", "train", fsdp_bench.FsdpRow)
    gathered = {line[0]: float(line[5]) for line in fsdp_bench.lines(ranks)}
    codes = {"mxfp8": gathered["mxfp8, codes gathered"]}
    add(f"All-gathers of FSDP2 in one step, 1B parameters, 2 {_short(host)}", "MB", gathered["bfloat16"], codes.get)
    return table("figure, bfloat16, " + ", ".join(FIGURES.values()), rows)


TABLES = (
    figures, llm, calibration, weights, qat, parity_large, parity_medium, scale_check, scale_layouts, scale_formats,
    fsdp, sharding,
)  # fmt: skip
"""The tables of README.md, the guides, and the pages of studies."""
