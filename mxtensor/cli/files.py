"""quantize, convert, inspect and compare: commands that read checkpoints tensor by tensor, and run no model."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoints import convert as convert_checkpoint
from ..checkpoints import store
from ..checkpoints.destination import check_separate
from ..checkpoints.gguf import GGUF
from ..checkpoints.reading import Stored
from ..checkpoints.store import layout_of, opened
from ..convert.format_plan import Plan
from ..core.shapes import readable_size
from ..report.model_report import sqnr_db
from ..tensor.mxtensor import MXTensor
from .models import Decoded, gguf_file, stored_size, without_gguf
from .output import columns, note, progress, show, visible


def convert(arguments: argparse.Namespace) -> int:
    """``quantize`` and ``convert``."""
    plan = read_plan(arguments.plan) if getattr(arguments, "plan", None) is not None else None
    check_separate(arguments.output, arguments.source)  # of a GGUF file, convert sees a temporary folder
    store.check_destination(arguments.output, arguments.layout, arguments.overwrite)  # loading takes longer
    with ExitStack() as stack:
        source = Decoded(arguments.source, {})
        if arguments.layout != GGUF.name:  # a GGUF file has llama.cpp's names, whatever it is made from
            source = stack.enter_context(without_gguf(arguments.source, arguments.output, plan is None))
        report = convert_checkpoint(
            source.path,
            arguments.output,
            layout=arguments.layout,
            format=arguments.format if plan is None else plan,
            skip=arguments.skip,
            max_shard_bytes=arguments.max_shard_bytes,
            overwrite=arguments.overwrite,
            include_head=getattr(arguments, "include_head", False),
        )
    report.add_rounding(source.rounded)
    before, after = _size(arguments.source), _size(arguments.output)
    fields = asdict(report) | {"bytes_before": before, "bytes_after": after}
    lines = [str(report), *_rounding(arguments.source, source.rounded)]
    lines.append(f"wrote {arguments.output}: {readable_size(after)}, before {readable_size(before)}")
    return show(arguments, "\n".join(lines), fields)


def _rounding(path: str, rounded: Mapping[str, float]) -> list[str]:
    """The line about tensors of a GGUF file that bfloat16 does not hold."""
    if not rounded:
        return []
    worst = max(rounded, key=lambda name: rounded[name])
    return [
        f"{Path(path).name} was decoded to bfloat16, which rounds the values of {len(rounded)} tensors (relative error "
        f"up to {rounded[worst]:.3g}: {visible(worst)})"
    ]


def _size(path: str) -> int:
    """Bytes of the files of a checkpoint that hold its tensors."""
    with opened(path) as checkpoint:
        files = {stored.file for stored in checkpoint.tensors.values()}
    return sum(file.stat().st_size for file in files)


def read_plan(path: str) -> Plan:
    """The plan in a file; a note of what it plans."""
    if not Path(path).is_file():
        what = "is a folder" if Path(path).is_dir() else "does not exist"
        what = "is a pipe or a device" if Path(path).exists() and not Path(path).is_dir() else what
        raise FileNotFoundError(f"--plan: {path} {what}; pass a file that `mxtensor plan` has written")
    found = Plan.load(path)
    note(f"{path}: {found.bits:.3g} bits per value over {len(found.weights)} weights")
    return found


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


def compared(a: Tensor, b: Tensor, encoded: Stored | None = None) -> dict[str, Any]:
    """SQNR in dB, largest difference, whether all values are equal, and the format and bits of a value of ``b``.

    ``encoded``: how ``b`` is stored, if it was decoded to be read.
    """
    if a.is_complex() != b.is_complex():
        a, b = a.to(torch.complex128), b.to(torch.complex128)
    plain = [t.dequantize(torch.float32) if isinstance(t, MXTensor) else t for t in (a, b)]
    true, other = ((torch.view_as_real(t) if t.is_complex() else t).double() for t in plain)
    same = (true == other) | (true.isnan() & other.isnan())
    errors = (other - true).abs().masked_fill(same, 0.0)
    return {
        "sqnr_db": sqnr_db(true, other),
        "equal": bool(same.all()),
        "max_error": float(errors.max()) if errors.numel() else 0.0,
        "bits": 8 * (b.nbytes if encoded is None else encoded.nbytes) / max(b.numel(), 1),
        "format": store.format_name(b) if encoded is None else encoded.dtype,
    }


SHOWN = 10
"""So many tensors, those with the lowest SQNR first, are printed without ``--all``."""
Rows = dict[str, dict[str, Any]]
"""Name of a tensor -> ``compared``."""


def compare(arguments: argparse.Namespace) -> int:
    """``compare``. Tensors are read one pair at a time."""
    rows, missing, bits, rounded = _compared_checkpoints(arguments.a, arguments.b)
    by_sqnr = sorted(rows, key=lambda name: -math.inf if math.isnan(rows[name]["sqnr_db"]) else rows[name]["sqnr_db"])
    changed = [name for name in by_sqnr if not rows[name]["equal"]]
    same = [name for name in rows if rows[name]["equal"]]
    ordered = {name: rows[name] for name in (*changed, *same)}
    fields = {"tensors": rows, "only_in_one": missing, "equal": len(same), "bits": bits,
              "lowest": next(iter(changed), None),
              "rounded": {path: errors for path, errors in rounded.items() if errors}}  # fmt: skip
    text = f"{len(same)} of {len(rows)} tensors are equal; B has {bits:.4g} bits per value"
    if changed:
        text += f"; lowest SQNR: {_ratio(rows[changed[0]])} dB ({changed[0]})"
    lines = [
        (name, row["format"], _ratio(row), f"{row['max_error']:.3g}", f"{row['bits']:.4g}")
        for name, row in ordered.items()
    ]
    missed = [f"only in one of them: {visible(name)}" for name in missing]
    shown = len(rows) + len(missing) if arguments.all else SHOWN
    table = columns(("tensor", "format of B", "SQNR dB", "max error", "bits"), lines[:shown])
    hidden = [len(left) - shown for left in (missed, lines)]
    of_missed, of_lines = ([f"... and {n} more: --all prints them"] if n > 0 else [] for n in hidden)
    rounding = [line for path, errors in rounded.items() for line in _rounding(path, errors)]
    return show(arguments, "\n".join([text, *missed[:shown], *of_missed, "", table, *of_lines, *rounding]), fields)


def _compared_checkpoints(of_a: str, of_b: str) -> tuple[Rows, list[str], float, dict[str, dict[str, float]]]:
    """The rows of all tensors that both checkpoints have, the names of those that one has, bits per value of B, and
    what is rounded to bfloat16 before: path -> tensor -> relative error."""
    rows: Rows = {}
    paths, rounded, values, size = [Path(of_a), Path(of_b)], {}, 0, 0
    with ExitStack() as stack:
        if (gguf_file(paths[0]) is None) != (gguf_file(paths[1]) is None):
            decoded = [stack.enter_context(without_gguf(path, keeps_codes=False)) for path in paths]
            paths, rounded = [one.path for one in decoded], {of_a: decoded[0].rounded, of_b: decoded[1].rounded}
        a, b = (stack.enter_context(opened(path)) for path in paths)
        mine, theirs = layout_of(a).entries(a), layout_of(b).entries(b)
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
    return rows, missing, 8 * size / max(values, 1) if stored is None else stored[0], rounded


def _ratio(row: dict[str, Any]) -> str:
    return "equal" if row["equal"] else f"{row['sqnr_db']:.2f}" if math.isfinite(row["sqnr_db"]) else "-"
