"""What ``benchmarks.parity`` recorded and ``benchmarks.scale`` calculates, as text and tables of the documentation."""

from __future__ import annotations

from collections import Counter

from docs.markdown import table
from docs.records import ASSETS, RESULTS, where_measured

COMMANDS = {
    "large": "python -m benchmarks.parity --size large --tokens 80M --arms bf16:2,mxfp8:2,nvfp4",
    "medium": "python -m benchmarks.parity --size medium --arms bf16:2,mxfp8:2,mxfp8-dequant:2,nvfp4,mxfp4",
}


def _study(size: str) -> str:
    from benchmarks.cuda import VERDICT_HEADER
    from benchmarks.parity_record import by_arm, read_all, table_of
    from benchmarks.parity_targets import TARGETS

    results = read_all(RESULTS / "parity", size)
    if not results:
        return f"Not recorded yet: `{COMMANDS[size]}` writes the records."
    first = results[0].header
    gpus = Counter(result.header.machine["gpu"] or result.header.machine["cpu"] for result in results)
    shape = (
        f"{first.parameters / 1e6:.0f} million parameters, {max(r.header.quantized for r in results) / 1e6:.0f} "
        f"million of them quantized; {first.steps * first.batch_tokens / 1e6:.1f} million tokens an arm in "
        f"{first.steps} steps of {first.batch_tokens:,}; {first.training_bytes / 1e6:.0f} MB of text for training, "
        f"{first.held_out_bytes / 1e6:.1f} MB held out. "
    )
    paragraphs = [shape + where_measured(" and ".join(gpus), first.machine)]
    if (ASSETS / f"parity_{size}.png").exists():
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


def _scale(header: list[str], lines: list[list[str]]) -> str:
    names = ", ".join(name.replace(",", ";") for name in header)
    return table(names, lines)


def scale_check() -> str:
    """The formulas of ``benchmarks.scale`` beside a measurement."""
    from benchmarks import scale

    return _scale(scale.CHECK_HEADER, scale.check_lines())


def scale_layouts() -> str:
    """Its table of models and layouts."""
    from benchmarks import scale

    return _scale(scale.HEADER, scale.lines())


def scale_formats() -> str:
    """Its table of formats."""
    from benchmarks import scale

    return _scale(scale.FORMAT_HEADER, scale.format_lines())


STUDIES = (parity_large, parity_medium, scale_check, scale_layouts, scale_formats)
"""The tables of these pages."""
