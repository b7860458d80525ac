"""quantize, convert, inspect and compare: commands that read checkpoints tensor by tensor, and run no model."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoints import convert as convert_checkpoint
from ..checkpoints import store
from ..checkpoints.destination import check_separate
from ..checkpoints.gguf import GGUF
from ..checkpoints.registry import layout_of, opened
from ..checkpoints.source import Encoded
from ..core.shapes import readable_size
from ..report.model_report import sqnr_db
from ..tensor.mxtensor import MXTensor
from .gguf_models import gguf_file, stored_size, without_gguf
from .output import columns, progress, show
from .plan import read_plan


def convert(arguments: argparse.Namespace) -> int:
    """``quantize`` and ``convert``."""
    plan = read_plan(arguments.plan) if getattr(arguments, "plan", None) is not None else None
    check_separate(arguments.output, arguments.source)  # of a GGUF file, convert sees a temporary folder
    store.check_destination(arguments.output, arguments.layout, arguments.overwrite)  # loading takes longer
    with ExitStack() as stack:
        source: str | Path = arguments.source
        if arguments.layout != GGUF.name:  # a GGUF file has llama.cpp's names, whatever it is made from
            source = stack.enter_context(without_gguf(source, arguments.output, plan is None))
        report = convert_checkpoint(
            source,
            arguments.output,
            layout=arguments.layout,
            format=arguments.format if plan is None else plan,
            skip=arguments.skip,
            max_shard_bytes=arguments.max_shard_bytes,
            overwrite=arguments.overwrite,
            include_head=getattr(arguments, "include_head", False),
        )
    before, after = _size(arguments.source), _size(arguments.output)
    fields = {
        "source": report.source, "layout": report.layout, "errors": report.errors, "exact": report.exact,
        "dropped": report.dropped, "stacks": report.stacks, "misread": report.misread,
        "not_finite": report.not_finite, "bytes_before": before, "bytes_after": after,
    }  # fmt: skip
    text = f"{report}\nwrote {arguments.output}: {readable_size(after)}, before {readable_size(before)}"
    return show(arguments, text, fields)


def _size(path: str) -> int:
    """Bytes of the files of a checkpoint that hold its tensors."""
    with opened(path) as checkpoint:
        files = {stored.file for stored in checkpoint.tensors.values()}
    return sum(file.stat().st_size for file in files)


# ---------------------------------------------------------------------------------------------- inspect


def inspect(arguments: argparse.Namespace) -> int:
    """``inspect``."""
    found = store.info(arguments.path, progress=True)
    values, size = sum(math.prod(row.shape) for row in found.rows), sum(row.nbytes for row in found.rows)
    rows = [
        (format, f"{count}", f"{n:,}", readable_size(nbytes), f"{8 * nbytes / max(n, 1):.4g}")
        for format, (count, n, nbytes) in found.by_format.items()
    ]
    rows.append(("all", f"{len(found.rows)}", f"{values:,}", readable_size(size), f"{8 * size / max(values, 1):.4g}"))
    text = f"{found.path}: layout {found.layout}\n\n"
    text += columns(("format", "tensors", "values", "size", "bits per value"), rows)
    fields: dict[str, Any] = {
        "path": str(found.path), "layout": found.layout, "values": values, "bytes": size,
        "formats": {
            format: {"tensors": count, "values": n, "bytes": nbytes}
            for format, (count, n, nbytes) in found.by_format.items()
        },
    }  # fmt: skip
    if arguments.tensors:
        lines = [(r.name, r.format, " x ".join(map(str, r.shape)), readable_size(r.nbytes)) for r in found.rows]
        text += "\n\n" + columns(("tensor", "format", "shape", "size"), lines)
        fields["tensors"] = {r.name: {"format": r.format, "shape": r.shape, "bytes": r.nbytes} for r in found.rows}
    return show(arguments, text, fields)


# ---------------------------------------------------------------------------------------------- compare


def _values(t: Tensor) -> Tensor:
    """The values as real numbers."""
    t = t.dequantize(torch.float32) if isinstance(t, MXTensor) else t
    return torch.view_as_real(t) if t.is_complex() else t


def compared(a: Tensor, b: Tensor, encoded: Encoded | None = None) -> dict[str, Any]:
    """SQNR in dB, largest difference, whether all values are equal, and the format and bits of a value of ``b``.

    ``encoded``: how ``b`` is stored, if it was decoded to be read.
    """
    if a.is_complex() != b.is_complex():
        a, b = a.to(torch.complex128), b.to(torch.complex128)
    true, other = _values(a).double(), _values(b).double()
    same = (true == other) | (true.isnan() & other.isnan())
    errors = (other - true).abs().masked_fill(same, 0.0)
    return {
        "sqnr_db": sqnr_db(true, other),
        "equal": bool(same.all()),
        "max_error": float(errors.max()) if errors.numel() else 0.0,
        "bits": 8 * (b.nbytes if encoded is None else encoded.nbytes) / max(b.numel(), 1),
        "format": store.format_name(b) if encoded is None else encoded.kind,
    }


Rows = dict[str, dict[str, Any]]
"""Name of a tensor -> ``compared``."""


def compare(arguments: argparse.Namespace) -> int:
    """``compare``. Tensors are read one pair at a time."""
    rows, missing, bits = _compared_checkpoints(arguments.a, arguments.b)
    ordered = dict(sorted(rows.items(), key=lambda item: _quality(item[1])))
    changed = [name for name, row in ordered.items() if not row["equal"]]
    worst = next(iter(changed), None)
    fields = {"tensors": rows, "only_in_one": missing, "equal": len(rows) - len(changed), "bits": bits, "lowest": worst}
    return show(arguments, _comparison(ordered, changed, missing, bits, arguments.all), fields)


def _compared_checkpoints(of_a: str, of_b: str) -> tuple[Rows, list[str], float]:
    """The rows of all tensors that both checkpoints have, the names of those that one has, bits per value of B."""
    rows: Rows = {}
    paths, values, size = [Path(of_a), Path(of_b)], 0, 0
    with ExitStack() as stack:
        if (gguf_file(paths[0]) is None) != (gguf_file(paths[1]) is None):
            paths = [stack.enter_context(without_gguf(path, keeps_codes=False)) for path in paths]
        a, b = (stack.enter_context(opened(path)) for path in paths)
        mine, theirs = layout_of(a).read(a), layout_of(b).read(b)
        common, missing = [name for name in mine if name in theirs], sorted(mine.keys() ^ theirs.keys())
        if not common:
            raise ValueError(
                f"{of_a} and {of_b} have no tensor of the same name: {next(iter(mine), 'nothing')} and "
                f"{next(iter(theirs), 'nothing')}; compare two checkpoints of one model"
            )
        step = stack.enter_context(progress(len(common), "comparing", "tensor"))
        for name in common:
            x, y = a.load(name, mine[name]), b.load(name, theirs[name])
            if x.shape != y.shape:
                raise ValueError(f"tensor {name} has the shape {tuple(x.shape)} in A and {tuple(y.shape)} in B")
            rows[name] = compared(x, y, theirs[name].encoded)
            values, size = values + y.numel(), size + rows[name]["bits"] * y.numel() / 8
            step()
    stored = stored_size(of_b) if paths[1] != Path(of_b) else None  # decoded to bfloat16 for this
    return rows, missing, 8 * size / max(values, 1) if stored is None else stored[0]


def _comparison(rows: Rows, changed: list[str], missing: list[str], bits: float, every: bool) -> str:
    """The text of ``compare``: ``rows`` and, of these, the ``changed`` ones in the order in which they are shown."""
    text = f"{len(rows) - len(changed)} of {len(rows)} tensors are equal; B has {bits:.4g} bits per value"
    if changed:
        text += f"; lowest SQNR: {_ratio(rows[changed[0]])} dB ({changed[0]})"
    lines = [
        (name, row["format"], _ratio(row), f"{row['max_error']:.3g}", f"{row['bits']:.4g}")
        for name, row in rows.items()
    ]
    missed = [f"only in one of them: {name}" for name in missing]
    shown = len(rows) + len(missing) if every else SHOWN
    table = columns(("tensor", "format of B", "SQNR dB", "max error", "bits"), lines[:shown])
    return "\n".join([text, *missed[:shown], *_more(missed[shown:]), "", table, *_more(lines[shown:])])


SHOWN = 10
"""So many tensors, those with the lowest SQNR first, are printed without ``--all``."""


def _more(left: Sequence[Any]) -> list[str]:
    return [f"... and {len(left)} more: --all prints them"] if left else []


def _quality(row: dict[str, Any]) -> tuple[bool, bool, float]:
    """Sorts rows: those whose SQNR is not a number first, then from the lowest SQNR to the highest, then equal ones."""
    ratio = row["sqnr_db"]
    return row["equal"], not math.isnan(ratio), 0.0 if row["equal"] or math.isnan(ratio) else ratio


def _ratio(row: dict[str, Any]) -> str:
    return "equal" if row["equal"] else f"{row['sqnr_db']:.2f}" if math.isfinite(row["sqnr_db"]) else "-"
