"""What ``benchmarks.users`` recorded, as text and tables of the documentation."""

from __future__ import annotations

from docs.markdown import table
from docs.records import on_gpu


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

    return on_gpu("users_layers", DecodeRow, sections, "users layers")


def users_generate() -> str:
    """What ``benchmarks.users generate`` recorded."""
    from benchmarks import users_generate as bench

    def sections(rows: list[bench.GenerateRow]) -> list[str]:
        lines = [bench.line(row, rows) + bench.profile_cells(row) for row in bench.ordered(rows)]
        return [table(", ".join([*bench.HEADER, *bench.PROFILE_HEADER]), lines)]

    return on_gpu("users_generate", bench.GenerateRow, sections, "users generate")


def users_first() -> str:
    """What ``benchmarks.users first-token`` recorded."""
    from benchmarks import users_first as bench

    def sections(rows: list[bench.FirstRow]) -> list[str]:
        return [table(", ".join(bench.HEADER), bench.lines(rows))]

    return on_gpu("users_first", bench.FirstRow, sections, "users first-token")
