"""What each subcommand of ``mxtensor`` does: it calls the package and prints lines, or JSON."""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from ..checkpoints import store
from ..checkpoints.registry import layout_of, opened
from ..core.shapes import readable_size
from ..tensor.mxtensor import MXTensor

PACKAGES = ("mxtensor", "torch", "triton", "numpy", "safetensors", "transformers", "gguf", "compressed-tensors")


def _show(arguments: argparse.Namespace, text: str, fields: Any) -> int:
    print(json.dumps(fields, indent=2) if arguments.json else text)
    return 0


def convert(arguments: argparse.Namespace) -> int:
    """``quantize`` and ``convert``."""
    report = store.convert(
        arguments.source,
        arguments.output,
        layout=arguments.layout,
        format=arguments.format,
        skip=arguments.skip,
        max_shard_bytes=arguments.max_shard_bytes,
        overwrite=arguments.overwrite,
    )
    fields = {"source": report.source, "layout": report.layout, "errors": report.errors, "exact": report.exact,
              "dropped": report.dropped}  # fmt: skip
    return _show(arguments, f"{report}\nwrote {arguments.output}", fields)


def info(arguments: argparse.Namespace) -> int:
    """``info``."""
    found = store.info(arguments.path)
    lines = [f"{found.path}: layout {found.layout}"]
    for format, (count, values, size) in found.by_format.items():
        bits = 8 * size / max(values, 1)
        lines.append(
            f"  {format:<24} {count:>6} tensors  {values:>14,} values  {readable_size(size)} ({bits:.4g} bits)"
        )
    if arguments.tensors:
        lines += [f"  {row.name}  {row.format}  {row.shape}  {readable_size(row.nbytes)}" for row in found.rows]
    fields = {
        "path": str(found.path),
        "layout": found.layout,
        "formats": {
            format: {"tensors": count, "values": values, "bytes": size}
            for format, (count, values, size) in found.by_format.items()
        },
    }
    if arguments.tensors:
        fields["tensors"] = {
            row.name: {"format": row.format, "shape": row.shape, "bytes": row.nbytes} for row in found.rows
        }
    return _show(arguments, "\n".join(lines), fields)


def _values(t: Tensor) -> Tensor:
    return (t.dequantize() if isinstance(t, MXTensor) else t).to(torch.float32)


def _compared(a: Tensor, b: Tensor) -> dict[str, Any]:
    """Signal-to-quantization-noise ratio in dB, largest difference, and bits of a value of ``b``."""
    true, other = _values(a), _values(b)
    noise = float((other - true).norm())
    signal = float(true.norm())
    ratio = math.inf if noise == 0 else 20 * math.log10(signal / noise) if signal > 0 else -math.inf
    return {
        "sqnr_db": ratio if math.isfinite(ratio) else None,
        "equal": noise == 0,
        "max_error": float((other - true).abs().max()) if true.numel() else 0.0,
        "bits": 8 * b.nbytes / max(b.numel(), 1),
    }


def compare(arguments: argparse.Namespace) -> int:
    """``compare``. Tensors are read one pair at a time."""
    rows: dict[str, dict[str, Any]] = {}
    with opened(arguments.a) as a, opened(arguments.b) as b:
        mine, theirs = layout_of(a).read(a), layout_of(b).read(b)
        missing = sorted(mine.keys() ^ theirs.keys())
        for name in (name for name in mine if name in theirs):
            x, y = a.load(name, mine[name]), b.load(name, theirs[name])
            if x.shape != y.shape:
                raise ValueError(f"tensor {name} has the shape {tuple(x.shape)} in A and {tuple(y.shape)} in B")
            rows[name] = _compared(x, y)
    lines = [f"{'tensor':<56} {'SQNR dB':>8} {'max error':>10} {'bits':>6}"]
    for name, row in rows.items():
        ratio = "equal" if row["equal"] else "-" if row["sqnr_db"] is None else f"{row['sqnr_db']:.2f}"
        lines.append(f"{name:<56} {ratio:>8} {row['max_error']:>10.3g} {row['bits']:>6.4g}")
    lines += [f"only in one of them: {name}" for name in missing]
    return _show(arguments, "\n".join(lines), {"tensors": rows, "only_in_one": missing})


def doctor(arguments: argparse.Namespace) -> int:
    """``doctor``."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or ["cpu"]
    ran = {device: _kernels("cuda" if device != "cpu" else "cpu") for device in devices[:1]}
    lines = [f"python {platform.python_version()} on {platform.machine()}"]
    lines += [f"{name} {version}" for name, version in versions.items()]
    for device, table in ran.items():
        lines += [f"device {device}", table]
    fields = {"python": sys.version.split()[0], "packages": versions, "devices": devices, "kernels": ran}
    return _show(arguments, "\n".join(lines), fields)


def _kernels(device: str) -> str:
    """Which kernels run a quantization and a product of few and of many rows here, and why others do not."""
    from ..core.explain import explain
    from ..tensor.quantize import quantize

    weight = quantize(torch.randn(128, 128, dtype=torch.bfloat16, device=device), "mxfp8")
    with explain() as log:
        for rows in (1, 128):
            torch.nn.functional.linear(torch.randn(rows, 128, dtype=torch.bfloat16, device=device), weight)
    return str(log.table(refused=True))
