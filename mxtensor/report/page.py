"""The page of ``mxtensor report``: one HTML file with plots and tables that needs no other file and no network."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from .model_report import LayerError, OutputError, light, new_figure, short_names, style_of
from .quality import Quality

NUMBER = re.compile(r"\.\d+(?=\.|$)")
"""The number of a layer in the name of a parameter."""
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
table { border-collapse: collapse; font-size: 13px } th, td { padding: .2rem .7rem; text-align: right }
th { border-bottom: 1px solid #888; font-weight: 600 } tr:nth-child(even) td { background: #f5f5f5 }
th:first-child, td:first-child { text-align: left } img { max-width: 100%; height: auto }
p { max-width: 46rem } code { font-size: 13px }
"""


@dataclass(frozen=True)
class Measured:
    """What was measured of one model. The model before quantization has neither weights nor outputs."""

    label: str
    """Its format, or its path."""
    bits: float
    """Stored bits per value over the whole model."""
    nbytes: int
    """Bytes of all parameters."""
    weights: Sequence[LayerError]
    outputs: Sequence[OutputError]
    quality: Quality | None = None
    """On the text, if there was one."""


# ---------------------------------------------------------------------------------------------- plots


def series(values: Mapping[str, float]) -> dict[str, tuple[list[int], list[float]]]:
    """Kind of layer -> (positions in this kind, values); a value that is not finite is left out."""
    kinds: dict[str, int] = {}
    out: dict[str, tuple[list[int], list[float]]] = {}
    for fqn, value in values.items():
        kind = NUMBER.sub("", fqn.removesuffix(".weight"))  # layers.q_proj for layers.3.q_proj.weight
        position = kinds[kind] = kinds.get(kind, -1) + 1
        if math.isfinite(value):
            xs, ys = out.setdefault(kind, ([], []))
            xs.append(position)
            ys.append(value)
    names = short_names([f"{kind}.weight" for kind in out])
    return {name: points for name, points in zip(names, out.values(), strict=True)}


def plot(panels: Mapping[str, Mapping[str, float]], ylabel: str) -> bytes:
    """A PNG with one panel for each label: the value of each layer by its number, one line for each kind of layer."""
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure = new_figure("a report")(figsize=(4.2 * columns + 1.6, 3.4 * rows + 0.9), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    handles: dict[str, Any] = {}
    for axes, (label, values) in zip(grid, panels.items(), strict=False):
        for i, (kind, (xs, ys)) in enumerate(series(values).items()):
            handles[kind] = axes.plot(xs, ys, linewidth=1.1, markersize=4.5, **style_of(i))[0]
        axes.set_title(label, fontsize=11)
        axes.set_xlabel("layer")
        axes.tick_params(labelbottom=True)
        light(axes)
        axes.xaxis.get_major_locator().set_params(integer=True)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    for axes in grid[::columns]:
        axes.set_ylabel(ylabel)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    out = io.BytesIO()
    figure.savefig(out, dpi=120, format="png")
    return out.getvalue()


# ---------------------------------------------------------------------------------------------- the page


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def db(value: float) -> str:
    """A ratio in dB for a table."""
    return "exact" if value == math.inf else f"{value:.1f}" if math.isfinite(value) else "-"


def summary(models: Sequence[Measured]) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of the table of models."""
    header = ["model", "bits per value", "MB", "weights, mean dB", "weights, lowest dB", "lowest in"]
    if any(m.quality for m in models):
        header += ["perplexity", "KL", "same token"]
    rows = []
    for m in models:
        ratios = {row.fqn: row.sqnr_db for row in m.weights if row.sqnr_db != math.inf}  # a NaN or Inf must be seen
        worst = min(ratios, key=lambda fqn: (not math.isnan(ratios[fqn]), ratios[fqn]), default="")
        mean = sum(ratios.values()) / len(ratios) if ratios else math.nan
        row = [m.label, f"{m.bits:.2f}", f"{m.nbytes / 1e6:.1f}", db(mean), db(ratios.get(worst, math.nan)), worst]
        if m.quality is not None:
            q = m.quality
            row += [f"{q.perplexity:.2f}", f"{q.kl:.4f} ± {q.kl_error:.4f}", f"{q.same_token:.1%}"]
        rows.append(row)
    return header, rows


PLOTS: tuple[tuple[str, str, Callable[[Measured], dict[str, float]], str], ...] = (
    (
        "Weights", "SQNR of the weights [dB]", lambda m: {row.fqn: row.sqnr_db for row in m.weights},
        "The dequantized weight compared with the weight before. Higher is better: 6 dB are one bit.",
    ),
    (
        "Outputs, each layer alone", "SQNR of the output [dB]", lambda m: {row.fqn: row.alone_db for row in m.outputs},
        "The output of the quantized layer for the inputs that the layer has in the model before quantization: "
        "what this layer adds by itself, with the rounding of activations if the format has it.",
    ),
    (
        "Outputs in the quantized model", "SQNR of the output [dB]",
        lambda m: {row.fqn: row.total_db for row in m.outputs},
        "The same output in the quantized model, whose inputs have the errors of all layers before.",
    ),
)  # fmt: skip
"""Heading, label of the axis, values by layer, explanation."""


def page(title: str, about: Mapping[str, str], models: Sequence[Measured]) -> str:
    """The text of the page. ``about``: lines at the top, such as the paths and the sample.

    Raises ImportError without matplotlib, ValueError if no model has a quantized layer.
    """
    new_figure("a report")  # raises before anything is drawn
    if not any(m.weights for m in models):
        raise ValueError("no layer is quantized, so there is nothing to report; pass --format")
    out = [f"<h1>{escape(title)}</h1>"]
    out += [f"<p>{escape(key)}: <code>{escape(text)}</code></p>" for key, text in about.items()]
    out += [_table(*summary(models))]
    for heading, label, values, text in PLOTS:
        panels = {m.label: values(m) for m in models if any(map(math.isfinite, values(m).values()))}
        if panels:
            picture = base64.b64encode(plot(panels, label)).decode()
            out += [f"<h2>{heading}</h2>", f"<p>{text}</p>"]
            out += [f'<img alt="{escape(label)} by layer" src="data:image/png;base64,{picture}">']
    for m in models:
        if not m.weights:
            continue
        out += [f"<h2>{escape(m.label)}, layer by layer</h2>", _layers(m)]
    head = f'<meta charset="utf-8">\n<title>{escape(title)}</title>\n<style>{STYLE}</style>'
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{chr(10).join(out)}\n</body>\n</html>\n'
    )


def _layers(m: Measured) -> str:
    outputs = {row.fqn: row for row in m.outputs}
    header = ["weight", "format", "shape", "bits", "weight dB", "largest error"]
    header += ["output dB, alone", "output dB, in the model"] if outputs else []
    rows = []
    for row in m.weights:
        shape = " x ".join(map(str, row.shape))
        cells = [row.fqn, row.format, shape, f"{row.bits_per_value:.4g}", db(row.sqnr_db), f"{row.max_abs_error:.3g}"]
        if outputs:
            found = outputs.get(row.fqn)
            cells += [db(found.alone_db), db(found.total_db)] if found else ["-", "-"]
        rows.append(cells)
    return _table(header, rows)
