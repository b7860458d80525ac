"""What the benchmarks recorded, as tables of docs/reference/benchmarks.md: about ten lines each, the worst first."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks import cast, cpu, generate, layers, llm_cpu, training
from benchmarks.harness import Row
from benchmarks.plots import kind_of
from docs.markdown import table
from docs.records import picture, section

Found = tuple[float, str]
"""(figure, where)"""
VERSIONS = ("torch", "triton", "torchao", "gemlite")
H200, H100 = "layers-h200", "layers-h100"


def short(machine: dict[str, Any]) -> str:
    """The GPU of a record without its maker and its memory: H200."""
    return str(machine["gpu"]).removeprefix("NVIDIA ").split()[0]


def measured_on(machine: dict[str, Any]) -> str:
    """GPU or processor, the main versions and the date of a record; the record has all versions."""
    if machine.get("gpu") and not machine.get("of_cpu"):
        device = f"{machine['gpu']}, CUDA {machine['cuda']}"
    else:
        device = " ".join([machine["cpu"], *machine.get("instructions", ())])
    versions = [f"{name} {machine['versions'][name]}" for name in VERSIONS if name in machine["versions"]]
    return f"{device}, {', '.join(versions)}; {machine['date']}."


def worst_first(lines: Iterable[tuple[float, list[str]]], header: str) -> str:
    """A table of the lines, the one with the least figure first."""
    return table(header, [line for _, line in sorted(lines, key=lambda pair: pair[0])])


def mean(values: Iterable[float]) -> float:
    """The geometric mean."""
    return statistics.geometric_mean(values)


def speeds(rows: Sequence[Row], config: str) -> list[Found]:
    """The speeds of a format over bfloat16 in these rows, the worst first."""
    return sorted((row.speedup(config), row.work) for row in rows if config in row.relative)


# ---------------------------------------------------------------------------------------------- layers


def layers_few() -> str:
    """Layers of public models at 1 to 512 rows, on both GPUs."""
    (machine, rows), (other, of_other) = (section(name, "models", layers.LayerRow) for name in (H200, H100))
    lines = []
    for low, high in ((1, 64), (65, 512)):
        for config in layers.FORMATS:
            found, theirs = (speeds([row for row in each if low <= row.m <= high], config) for each in (rows, of_other))
            cells = []
            for each in (found, theirs):
                slower = sum(speed < 1 for speed, _ in each)
                cells += [
                    f"{mean(s for s, _ in each):.2f}",
                    f"{each[0][0]:.2f} ({each[0][1]})",
                    f"{slower} of {len(each)}",
                ]
            lines.append((found[0][0], [f"{low} to {high}", config, *cells]))
    names = ", ".join(f"{gpu}: mean, worst, slower than bf16" for gpu in (short(machine), short(other)))
    what = f"{measured_on(machine)} {measured_on(other)}"
    return "\n\n".join((picture("layers"), worst_first(lines, f"rows, format, {names}"), what))


def layers_formats() -> str:
    """Every format at few rows of five shapes: the mean, and the worst shape."""
    machine, rows = section(H200, "formats", layers.LayerRow)
    five = [row for row in rows if (row.n, row.k) in layers.FIVE]
    lines = []
    for config in layers.EVERY_FORMAT:
        cells, worst = [], []
        for m in layers.FEW:
            found = speeds([row for row in five if row.m == m], config)
            worst.append(found[0][0])
            cells.append(f"{mean(s for s, _ in found):.2f} ({found[0][0]:.2f})")
        lines.append((min(worst), [config, *cells]))
    header = "format, " + ", ".join(f"{m} row{'s' * (m > 1)}" for m in layers.FEW)
    return f"{worst_first(lines, header)}\n\n{measured_on(machine)}"


def layers_peers() -> str:
    """Two of our formats beside gemlite and torchao."""
    machine, rows = section(H200, "peers", layers.LayerRow)
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        for name in row.relative:
            found.setdefault(name, {})[row.m] = row.speedup(name)
    found.pop(layers.BASE)
    lines = [
        (min(by_m.values()), [name.replace(",", ""), *(f"{by_m[m]:.2f}" for m in layers.FEW)])
        for name, by_m in found.items()
    ]
    header = "contender, " + ", ".join(f"{m} row{'s' * (m > 1)}" for m in layers.FEW)
    return f"{worst_first(lines, header)}\n\n{measured_on(machine)}"


def layers_large() -> str:
    """Layers of thousands of rows."""
    machine, rows = section(H200, "large", layers.LayerRow)
    lines = []
    for config in layers.LARGE_FORMATS:
        found = speeds(rows, config)
        kernels = next(row.kernels[config] for row in rows if config in row.kernels)
        cells = [
            f"{mean(s for s, _ in found):.2f}",
            f"{found[0][0]:.2f}",
            found[0][1].split()[-1],
            f"{found[-1][0]:.2f}",
        ]
        lines.append((found[0][0], [config, *cells, f"`{kernels.split(', ')[0]}`"]))
    header = "format, speed over bf16: mean, worst, where (M x N x K), best, kernel"
    return f"{worst_first(lines, header)}\n\n{measured_on(machine)}"


def experts() -> str:
    """Experts that decode: by grouped products, and by bmm."""
    lines = []
    sections = [section(H100, name, layers.ExpertsRow) for name in ("experts", "picked")]
    for config in layers.EXPERT_FORMATS:
        for batch in layers.BATCHES:
            cells, worst = [], []
            for _, rows in sections:
                found = speeds([row for row in rows if row.batch == batch], config)
                worst.append(found[0][0])
                where = found[0][1].rpartition(", ")[0]
                cells += [f"{mean(s for s, _ in found):.2f}", f"{found[0][0]:.2f} ({where})"]
            lines.append((min(worst), [str(batch), config, *cells]))
    header = "tokens, format, `F.grouped_mm`: mean, worst, `bmm`: mean, worst"
    return f"{worst_first(lines, header)}\n\n{measured_on(sections[0][0])}"


# ---------------------------------------------------------------------------------------------- models that decode


def generate_decode() -> str:
    """A model with one CUDA graph per token."""
    machine, rows = section("generate-h200", "decode", generate.ModelRow)
    base = rows[0]
    lines = [
        (row.tokens_a_second, [
            row.work, f"{row.tokens_a_second:.1f}", f"{row.tokens_a_second / base.tokens_a_second:.2f}",
            f"{row.times['token']:.2f}", f"{row.weight_bytes / 1e9:.2f} ({row.weight_bytes / base.weight_bytes:.3f})",
            f"{row.times['prefill']:.0f} ({row.times['prefill'] / base.times['prefill']:.3f})",
        ])
        for row in rows
    ]  # fmt: skip
    header = "format, tokens/s, over bf16, ms per token, weights GB (over bf16), ms of 4096 tokens at once (over bf16)"
    return "\n\n".join((picture("generate"), worst_first(lines, header), measured_on(machine)))


def generate_transformers() -> str:
    """transformers' generate with a static cache."""
    machine, rows = section("generate-h100", "transformers", generate.GenerateRow)
    lines = [
        (row.speedup("token"), [
            str(row.batch), row.config, f"{row.tokens_a_second:,.1f}", f"{row.speedup('token'):.2f}",
            f"{row.times['token']:.2f}", f"{row.times['first']:.1f}", f"{row.compile_s:.1f}",
        ])
        for row in rows
    ]  # fmt: skip
    header = "batch, format, tokens/s, over bf16, ms per step, ms of prompt and 4 tokens, s of the first call"
    return f"{worst_first(lines, header)}\n\n{measured_on(machine)}"


def generate_first() -> str:
    """What the first token waits for."""
    machine, rows = section("generate-h100", "first", generate.FirstRow)
    base = {row.cache: row.wait_s for row in rows if row.config == generate.BASE}
    lines = [
        (-row.wait_s, [
            row.config, row.cache, *(f"{row.times[name] / 1e3:.2f}" for name in generate.TIMES[:3]),
            f"{row.wait_s:.2f}", f"{row.wait_s - base[row.cache]:+.2f}",
        ])
        for row in rows
    ]  # fmt: skip
    header = "format, caches of compiled kernels, `quantize_` s, first token s, second token s, sum s, above bf16 s"
    return f"{worst_first(lines, header)}\n\n{measured_on(machine)}"


# ---------------------------------------------------------------------------------------------- CPU


def _llm_cpu(name: str) -> str:
    """Language models on one processor: the worst and the best of each model and mode, over batches and threads."""
    machine, rows = section(name, "decode", llm_cpu.LlmRow)
    kinds: dict[str, list[llm_cpu.LlmRow]] = {}
    for row in rows:
        kinds.setdefault(kind_of(row).partition(", 16")[0], []).append(row)
    lines = []
    for kind, of_kind in kinds.items():
        peer = [
            (row.ratio(ours, theirs), f"{ours}, batch {row.batch}, {row.threads} thread{'s' * (row.threads > 1)}")
            for row in of_kind
            for ours, theirs in llm_cpu.EQUAL_BITS.items()
        ]
        peer = sorted(pair for pair in peer if not math.isnan(pair[0]))
        plain = sorted(
            (row.over_plain(ours), row.tokens_a_second(ours))
            for row in of_kind
            for ours in row.times
            if ours in llm_cpu.FORMATS
        )
        cells = [f"{peer[0][0]:.2f}", peer[0][1], f"{peer[-1][0]:.2f}"] if peer else ["", "not beside it", ""]
        lines.append((peer[0][0] if peer else math.inf, [kind, *cells, f"{plain[0][0]:.2f}", f"{plain[-1][0]:.2f}"]))
    header = "model and way to run it, over llama.cpp: worst, where, best, over the faster of bf16 and f32: worst, best"
    best: dict[int, float] = {}
    for row in rows:
        best[row.threads] = max(row.bandwidth, best.get(row.threads, 0.0))
    reads = ", ".join(f"{gbps:.1f} GB/s on {n} thread{'s' * (n > 1)}" for n, gbps in best.items())
    where = measured_on(machine | {"of_cpu": True})
    load = f"the system's load was {min(row.load for row in rows):.1f} to {max(row.load for row in rows):.1f}"
    return f"{worst_first(lines, header)}\n\n{where} Memory is read at {reads}; {load}."


def llm_cpu_2_cores() -> str:
    """Language models on two cores, with the picture of both processors."""
    return f"{picture('llm_cpu')}\n\n{_llm_cpu('llm_cpu-epyc')}"


def llm_cpu_16_cores() -> str:
    """Language models on 16 cores."""
    return _llm_cpu("llm_cpu-xeon")


def cpu_casts() -> str:
    """Casts and layers on a CPU: one line for each format."""
    machine, rows = section("cpu-epyc", "casts", Row)
    by_work = {row.work.split()[0] + " " + row.work.split()[-1]: row for row in rows}
    lines = []
    for format in cpu.CASTS:
        cells = []
        for work, base in (("cast", "torchao"), ("dequantize", "torchao")):
            row = by_work[f"{work} {format}"]
            cells += [f"{row.ratio(name, base):.1f}" for name in ("mxtensor", "mxtensor compiled")]
        row = by_work[f"linear {format}"]
        cells += [f"{row.ratio(name, 'bfloat16'):.2f}" for name in ("mxtensor", "mxtensor compiled", "torchao")]
        lines.append((row.ratio("mxtensor", "bfloat16"), [format, *(cell.replace("nan", "") for cell in cells)]))
    header = (
        "format, cast over torchao, compiled, dequantize over torchao, compiled, layer over bf16, compiled, torchao's"
    )
    return f"{worst_first(lines, header)}\n\n{machine['threads']} threads. {measured_on(machine)}"


def cpu_sweep() -> str:
    """Products of all sizes on a CPU: by the number of rows, and those that are slower than the whole weight."""
    machine, rows = section("cpu-epyc", "sweep", Row)
    by_band: dict[str, list[float]] = {}
    bands = ((1, 4), (5, 16), (24, 32), (33, 128))
    for work, ratio in cpu.ratios(rows):
        m = int(work.split(", ")[1].split()[0])
        low, high = next(band for band in bands if band[0] <= m <= band[1])
        by_band.setdefault(f"{low} to {high}", []).append(ratio)
    lines = [(-max(each), [n, str(len(each)), f"{mean(each):.2f}", f"{max(each):.2f}"]) for n, each in by_band.items()]
    slower = sorted(((ratio, work) for work, ratio in cpu.ratios(rows) if ratio > 1.05), reverse=True)
    where = measured_on(machine)
    named = "; ".join(f"{work} ({ratio:.2f})" for ratio, work in slower)
    return "\n\n".join((
        worst_first(lines, "rows, products, time over that of the whole weight: mean, worst"),
        f"Of {len(rows):,} products {len(slower)} took more than 1.05 of the time: {named}.", where,
    ))  # fmt: skip


# ---------------------------------------------------------------------------------------------- training


def train_layer() -> str:
    """Forward and backward of a linear layer."""
    machine, rows = section("training-h200", "layer", training.TrainRow)
    return "\n\n".join((picture("training"), _recipes(rows), measured_on(machine)))


def train_experts() -> str:
    """Forward and backward of a stack of experts."""
    machine, rows = section("training-h200", "experts", training.TrainRow)
    return f"{_recipes(rows)}\n\n{measured_on(machine)}"


def _recipes(rows: Sequence[training.TrainRow]) -> str:
    """The worst and the best shape of each recipe."""
    lines = []
    for name in dict.fromkeys(row.contender for row in rows):
        found = sorted((row.over_base(training.EAGER), row) for row in rows if row.contender == name)
        (best, _), (worst, row) = found[0], found[-1]
        compiled = max(r.over_base(training.COMPILED) for _, r in found)
        ms = f"{row.times[training.EAGER]:.2f} ({row.times[training.BASE]:.2f})"
        kernels = ", ".join(dict.fromkeys(f"`{kernel}`" for kernel in row.kernels[name].split(", ")))
        lines.append((-worst, [name.replace(",", ";"), f"{worst:.2f}", row.shape.replace(",", ";"), ms, f"{best:.2f}",
                               f"{compiled:.2f}", kernels]))  # fmt: skip
    header = "recipe, time over bf16: worst, where, ms there (bf16), best, compiled: worst, kernels"
    return worst_first(lines, header)


def train_step() -> str:
    """Whole training steps of a GPT."""
    machine, rows = section("training-h100", "step", training.StepRow)
    lines = [
        (row.ratio(name, training.BASE), [
            row.size, name, f"{ms:.1f}", f"{row.tokens / ms * 1e3:,.0f}", f"{row.ratio(name, training.BASE):.2f}",
            f"{row.prepare_s[name]:.1f}",
        ])
        for row in rows for name, ms in row.times.items()
    ]  # fmt: skip
    header = "layers x width, recipe, ms per step, tokens/s, over bf16, s of the first step"
    return f"{worst_first(lines, header)}\n\n{measured_on(machine)}"


def train_memory() -> str:
    """The memory of a step of eight layers."""
    machine, rows = section("training-h200", "memory", training.MemoryRow)
    by_recipe: dict[str, dict[int, training.MemoryRow]] = {}
    for row in rows:
        by_recipe.setdefault(row.recipe, {})[row.tokens] = row
    few, many = sorted({row.tokens for row in rows})
    lines = []
    for name, found in by_recipe.items():
        kinds = [(few, "saved"), (few, "peak"), (few, "new"), (many, "saved"), (many, "peak"), (many, "new")]
        cells = [f"{found[m].mib[k]:,.0f} ({found[m].over_bf16[k]:.2f})" for m, k in kinds]
        lines.append((-found[few].over_bf16["peak"], [name.replace(",", ";"), *cells]))
    names = ", ".join(f"{m:,} rows: saved".replace(",", "") + ", peak, peak with new gradients" for m in (few, many))
    return f"{worst_first(lines, f'recipe, {names}')}\n\nMiB (over bfloat16's). {measured_on(machine)}"


# ---------------------------------------------------------------------------------------------- casts and host


def casts() -> str:
    """Casts on a GPU: the share of a copy's bandwidth, at the worse of two sizes, and the host time of a small one."""
    machine, rows = section("cast-h100", "casts", cast.CastRow)
    _, host = section("cast-h100", "host", cast.CastRow)
    us = {row.format: row.times[cast.OURS] * 1e3 for row in host}
    lines = []
    for format in dict.fromkeys(row.format for row in rows):
        cells, worst = [], []
        for work in cast.WORKS:
            same = [row for row in rows if (row.format, row.kind) == (format, work)]
            if not same:
                cells.append("")
                continue
            row = min(same, key=lambda row: row.fraction(cast.OURS))
            once, twice = row.fraction(cast.OURS), row.fraction(cast.OURS, twice=True)
            worst.append(once)
            cells.append(f"{once:.2f}" + ("" if math.isnan(twice) else f" to {twice:.2f}"))
        lines.append((min(worst), [format, *cells, f"{us[format]:.1f}"]))
    header = f"format, {', '.join(cast.WORKS)}, us of host time of a small cast"
    return "\n\n".join((picture("cast"), worst_first(lines, header), measured_on(machine)))


def host() -> str:
    """Host time of a call: on a CPU, and of a decoding layer on a GPU."""
    tables = []
    for name, of in (("host-epyc", "cpu"), ("host-h200", "gpu")):
        machine, rows = section(name, of, Row)
        lines = []
        for row in rows:
            plain = row.times["plain torch"]
            lines += [
                (plain - ms, [row.work, contender, f"{ms / 500 * 1e3:.1f}", f"{(ms - plain) / 500 * 1e3:+.1f}"])
                for contender, ms in row.times.items()
                if contender != "plain torch again"
            ]
        tables += [worst_first(lines, "call, weight, us, over plain torch"), measured_on(machine)]
    return "\n\n".join(tables)


TABLES = (
    layers_few, layers_formats, layers_peers, layers_large, experts, generate_decode, generate_transformers,
    generate_first, llm_cpu_2_cores, llm_cpu_16_cores, cpu_casts, cpu_sweep, train_layer, train_experts, train_step,
    train_memory, casts, host,
)  # fmt: skip
"""The tables of the page."""
