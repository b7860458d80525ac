"""What the benchmarks recorded, as text and tables of the documentation: one function for each record."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, RowT, read_json
from docs.markdown import table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
ASSETS = ROOT / "docs" / "assets"


def where_measured(device: str, machine: dict[str, Any]) -> str:
    """What the figures of a record were measured on."""
    versions = ", ".join(f"{package} {version}" for package, version in machine["versions"].items())
    return f"{device}, Python {machine['python']}, {versions}; {machine['date']}."


def processor(machine: dict[str, Any]) -> str:
    """The processor of a record, with its instruction sets if the record has them."""
    return " ".join([machine["cpu"], *machine.get("instructions", ())])


def _recorded(name: str, header: list[str], cells: Callable[[Row], list[list[str]]]) -> str:
    machine, rows = read_json(RESULTS / f"{name}.json", Row)
    where = where_measured(f"{machine['cpu']}, {machine['threads']} threads", machine)
    return f"{where}\n\n" + table(", ".join(header), [line for row in rows for line in cells(row)])


def on_gpu(name: str, kind: type[RowT], sections: Callable[[list[RowT]], list[str]], command: str | None = None) -> str:
    """The record of a GPU benchmark as text, tables and its picture; a sentence where there is none yet.

    ``command``: of ``python -m benchmarks``, if it is not ``name``.
    """
    path = RESULTS / f"{name}.json"
    if not path.exists():
        line = f"python -m benchmarks.{command or name} --json benchmarks/results/{name}.json"
        return f"Not recorded yet: `{line}` writes the record."
    machine, rows = read_json(path, kind)
    paragraphs = [where_measured(f"{machine['gpu']}, CUDA {machine['cuda']}", machine), *sections(rows)]
    if (ASSETS / f"{name}.png").exists():
        paragraphs.insert(1, f"![{PICTURES[name]}](../assets/{name}.png)")
    return "\n\n".join(paragraphs)


PICTURES = {
    "cast": "Share of the copy bandwidth that each cast reaches, by format and size",
    "decode": "Time of a linear layer over the number of rows, bfloat16 and weight-only MXFP8 and MXFP4",
    "linear": "Time of a linear layer over that of bfloat16, by format and shape",
    "quality": "KL divergence over bits per value, by library, format and method",
    "train_linear": "Time of forward and backward of a linear layer over that of bfloat16, by recipe and shape",
}
"""What benchmarks/plots.py draws of a record, in words."""


def cpu() -> str:
    """What benchmarks/cpu.py recorded."""
    from benchmarks.cpu import HEADER, cells

    return _recorded("cpu", HEADER, cells)


def llm() -> str:
    """What examples/llm.py recorded."""
    from examples.llm import HEADER, cells, read_record

    record, results = read_record(RESULTS / "llm.json")
    machine = record["machine"]
    where = where_measured(f"{machine['cpu']}, {machine['threads']} threads, {record['bandwidth']:.1f} GB/s", machine)
    return f"{table(', '.join(HEADER), map(cells, results))}\n\n{where}"


def llm_cpu(name: str = "llm_cpu", options: str = "") -> str:
    """What benchmarks/llm_cpu.py recorded; a sentence where there is none yet. ``options``: of its command."""
    from benchmarks.cuda import VERDICT_HEADER
    from benchmarks.llm_cpu import HEADER, TARGETS, LlmRow, bandwidths, lines

    path = RESULTS / f"{name}.json"
    if not path.exists():
        line = f"python -m benchmarks.llm_cpu{options} --json benchmarks/results/{name}.json"
        return f"Not recorded yet: `{line}` writes the record."
    machine, rows = read_json(path, LlmRow)
    verdicts = [target.verdict(rows) for target in sorted(TARGETS, key=lambda target: target.margin(rows))]
    loads = f"the system's load was {min(row.load for row in rows):.1f} to {max(row.load for row in rows):.1f}"
    paragraphs = [
        where_measured(f"{processor(machine)}, memory is read at {bandwidths(rows)}, {loads}", machine),
        table(", ".join(VERDICT_HEADER), verdicts),
        table(", ".join(HEADER), lines(rows)),
    ]
    return "\n\n".join(paragraphs)


def llm_cpu_16_cores() -> str:
    """What benchmarks/llm_cpu.py recorded on 16 cores."""
    return llm_cpu("llm_cpu_16_cores", " --threads 1 16 --compiled-batches 1")


def cpu_sweep() -> str:
    """What benchmarks/cpu_sweep.py recorded: for each number of rows the mean and the worst of all products."""
    from benchmarks.cpu_sweep import BY_ROWS, TARGETS, by_rows, ratios

    machine, rows = read_json(RESULTS / "cpu_sweep.json", Row)
    (target,) = TARGETS
    slower = sorted(((ratio, work) for work, ratio in ratios(rows) if ratio > target.limit), reverse=True)
    return "\n\n".join([
        where_measured(f"{processor(machine)}, {machine['threads']} threads", machine),
        table(", ".join(BY_ROWS), by_rows(rows)),
        f"Of {len(rows):,} products {len(slower)} took more than {target.limit} of the time: "
        + "; ".join(f"{work} ({ratio:.2f})" for ratio, work in slower) + ".",
    ])  # fmt: skip


def calibration() -> str:
    """What benchmarks/calibration.py recorded."""
    from benchmarks.calibration import HEADER, cells, read

    path = RESULTS / "calibration.json"
    record, rows = json.loads(path.read_text()), read(path)
    machine = record["machine"]
    where = where_measured(
        f"{record['sequences']} sequences of {record['window']} tokens; {machine['cpu']}, 1 thread", machine
    )
    return f"{table(', '.join(HEADER), cells(rows))}\n\n{where}"


def quality() -> str:
    """What benchmarks/quality.py recorded, with its picture."""
    from benchmarks.quality import HEADER, cells, read

    path = RESULTS / "quality.json"
    record, rows = json.loads(path.read_text()), read(path)
    machine = record["machine"]
    before = ", ".join(f"{value:.2f} ({name})" for name, value in record["perplexity"].items())
    where = f"SmolLM2-135M-Instruct; perplexity before: {before}. " + where_measured(machine["cpu"], machine)
    picture = f"![{PICTURES['quality']}](../assets/quality.png)"
    return f"{picture}\n\n{where}\n\n{table(', '.join(HEADER), cells(rows))}"


def host() -> str:
    """What benchmarks/host.py recorded, on CPU and with ``--cuda``."""
    from benchmarks.host import HEADER, cells

    def sections(rows: list[Row]) -> list[str]:
        return [table(", ".join(HEADER), [line for row in rows for line in cells(row)])]

    return "\n\n".join((_recorded("host", HEADER, cells), on_gpu("host_gpu", Row, sections)))


def cast() -> str:
    """What benchmarks/cast.py recorded."""
    from benchmarks import cast as bench
    from benchmarks.cuda import VERDICT_HEADER

    def sections(rows: list[bench.CastRow]) -> list[str]:
        by_torchao = [line for row in rows for line in bench.peer_cells(row)]
        host = [bench.host_cells(row) for row in rows if row.kind == bench.HOST]
        return [
            table(", ".join(VERDICT_HEADER), [t.verdict(rows) for t in bench.TARGETS]),
            "Share of the copy bandwidth, and time:",
            table(", ".join(bench.SUMMARY_HEADER), bench.summary(rows)),
            *(["Beside torchao:", table(", ".join(bench.PEER_HEADER), by_torchao)] if by_torchao else []),
            f"Microseconds of host time of one `mx.quantize` of a {bench.SMALL}x{bench.SMALL} tensor:",
            table("format, rowwise, both, torchao", host),
        ]

    return on_gpu("cast", bench.CastRow, sections)


def linear() -> str:
    """What benchmarks/linear.py recorded."""
    from benchmarks import linear as bench
    from benchmarks.cuda import VERDICT_HEADER

    def sections(rows: list[bench.LinearRow]) -> list[str]:
        header, lines = bench.summary(rows)
        return [
            table(", ".join(VERDICT_HEADER), [t.verdict(rows) for t in bench.TARGETS]),
            "Time over bfloat16 by shape (M x N x K), lower is better:",
            table(", ".join(header), lines),
        ]

    return on_gpu("linear", bench.LinearRow, sections)


def train_linear() -> str:
    """What benchmarks/train_linear.py recorded."""
    from benchmarks import train_linear as bench
    from benchmarks.cuda import VERDICT_HEADER

    def sections(rows: list[bench.TrainRow]) -> list[str]:
        memory = json.loads((RESULTS / "train_linear.json").read_text())["chain_memory"]
        return [
            table(", ".join(VERDICT_HEADER), [t.verdict(rows) for t in bench.TARGETS]),
            "Forward and backward of one layer, M x N x K:",
            table(", ".join(bench.HEADER), [bench.cells(row) for row in rows]),
            f"Memory of a step of {bench.CHAIN} layers 8192x8192, parameters and gradients in bfloat16:",
            table(", ".join(h.replace(",", "") for h in bench.MEMORY_HEADER), memory),
        ]

    return on_gpu("train_linear", bench.TrainRow, sections)


def train_grouped() -> str:
    """What benchmarks/train_grouped.py recorded."""
    from benchmarks import train_grouped as bench
    from benchmarks.cuda import VERDICT_HEADER

    def sections(rows: list[bench.GroupedRow]) -> list[str]:
        return [
            table(", ".join(VERDICT_HEADER), [t.verdict(rows) for t in bench.TARGETS]),
            table(", ".join(bench.HEADER), [[cell.replace(", ", "; ") for cell in bench.cells(row)] for row in rows]),
        ]

    return on_gpu("train_grouped", bench.GroupedRow, sections)


def decode() -> str:
    """What benchmarks/decode.py recorded."""
    from benchmarks import decode as bench
    from benchmarks.cuda import VERDICT_HEADER

    def sections(rows: list[bench.DecodeRow]) -> list[str]:
        return [
            table(", ".join(VERDICT_HEADER), [t.verdict(rows) for t in bench.TARGETS]),
            "Times as fast as bfloat16 by shape (N x K), and microseconds:",
            table(", ".join(bench.HEADER), bench.lines(rows)),
        ]

    def beside_peers(rows: list[bench.DecodeRow]) -> list[str]:
        return [
            "Comparison with other libraries, at {}x{}, times as fast as bfloat16:".format(*bench.PEER_SHAPE),
            table(", ".join(["rows", *(name.replace(",", "") for name in bench.peer_names())]), bench.peer_lines(rows)),
        ]

    return "\n\n".join(
        (on_gpu("decode", bench.DecodeRow, sections), on_gpu("decode_peers", bench.DecodeRow, beside_peers))
    )


def decode_model() -> str:
    """What benchmarks/decode_model.py recorded."""
    from benchmarks import decode_model as bench
    from benchmarks.cuda import VERDICT_HEADER

    def sections(rows: list[bench.ModelRow]) -> list[str]:
        return [
            table(", ".join(VERDICT_HEADER), [t.verdict(rows) for t in bench.TARGETS]),
            table(", ".join(bench.HEADER), bench.lines(rows)),
        ]

    return on_gpu("decode_model", bench.ModelRow, sections)


def fsdp() -> str:
    """What benchmarks/fsdp.py recorded."""
    from benchmarks import fsdp as bench
    from benchmarks.cuda import VERDICT_HEADER

    def sections(rows: list[bench.FsdpRow]) -> list[str]:
        return [
            f"On {rows[0].ranks} GPUs:",
            table(", ".join(bench.HEADER), bench.lines(rows)),
            table(", ".join(VERDICT_HEADER), [t.verdict(rows) for t in bench.TARGETS]),
        ]

    return on_gpu("fsdp", bench.FsdpRow, sections)


def sharding() -> str:
    """The estimate of benchmarks/estimate.py."""
    from benchmarks import estimate

    return table(", ".join(estimate.HEADER), estimate.lines())


FIGURES = {"mxfp8": "MXFP8", "mxfp4": "MXFP4", "nvfp4": "NVFP4"}
"""Columns of the table of figures: the name in the records, and the name in the table."""


def _weight_only(decoded: dict[str, Any], column: int, name: str) -> float:
    return float(decoded[f"{name}-weight-only"][column])


def _short(machine: dict[str, Any]) -> str:
    """The GPU of a record without its maker and its memory: H200."""
    return machine["gpu"].removeprefix("NVIDIA ").split()[0]  # type: ignore[no-any-return]


def figures() -> str:
    """The table of figures in README.md: what the formats save, and what they cost."""
    from benchmarks import decode_model, fsdp
    from docs.records_users import figures_of_users

    machine, models = read_json(RESULTS / "decode_model.json", decode_model.ModelRow)
    rows: list[tuple[str, ...]] = []

    def add(what: str, unit: str, base: float, values: Callable[[str], float | None], faster: bool = False) -> None:
        cells = [f"{base:.4g} {unit}"]
        for value in map(values, FIGURES):
            ratio = value and (value / base if faster else base / value)
            cells.append("" if value is None else f"{value:.4g} {unit} ({ratio:.2f}x)")
        rows.append((what, *cells))

    decoded = {line[0]: line for line in decode_model.lines(models)}
    for what, unit, column, faster in (
        ("Weights of a model with the shape of Llama 3 8B", "GB", 4, False),
        (f"Decoding with its layers in one CUDA graph, batch 1, one {_short(machine)}", "tokens/s", 1, True),
    ):
        base = float(decoded["bfloat16"][column])
        add(what, unit, base, partial(_weight_only, decoded, column), faster)

    host, ranks = read_json(RESULTS / "fsdp.json", fsdp.FsdpRow)
    gathered = {line[0]: float(line[5]) for line in fsdp.lines(ranks)}
    codes = {"mxfp8": gathered["mxfp8, codes gathered"]}
    add(f"All-gathers of FSDP2 in one step, 1B parameters, 2 {_short(host)}", "MB", gathered["bfloat16"], codes.get)

    header = "figure, bfloat16, " + ", ".join(FIGURES.values())
    return table(header, [*figures_of_users(_short), *rows])
