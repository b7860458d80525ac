"""plan: measures what formats cost a language model on a text, and writes which weight gets which format."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..calibration.planner import FORMATS, plan
from ..convert.configs import recipe_of
from ..convert.format_plan import Plan
from ..tensor.mxtensor import MXTensor
from .measure import check_device, rows_of
from .models import filter_without, load_model, read_text
from .output import check_page, note, show

BATCH = 4
"""Windows of text that the model reads at once."""


def make_plan(arguments: argparse.Namespace) -> int:
    """``plan``."""
    check_device(arguments.device)
    formats = arguments.formats or FORMATS
    smallest = min(recipe_of(format).stored.format.bits_per_value for format in formats)
    if arguments.bits < smallest:  # before the model is loaded and measured
        raise ValueError(
            f"--bits {arguments.bits:g}: the smallest of the formats has {smallest:g} bits per value; pass more"
        )
    check_page(arguments.output)
    text = read_text(arguments.text)  # before the model, which takes longer
    model, tokenizer = load_model(arguments.path, arguments.device, keeps_codes=False)
    if any(isinstance(parameter, MXTensor) for parameter in model.parameters()):
        raise ValueError(f"{arguments.path} is quantized already; pass the model before quantization")
    rows = rows_of(arguments, text, tokenizer, model)
    chosen = filter_without("plan", model, arguments.skip, arguments.include_head)
    found = plan(
        model,
        list(rows.split(BATCH)),
        arguments.bits,
        formats,
        filter_fn=chosen,
        include_head=arguments.include_head and chosen is None,
    )
    found.save(arguments.output)
    fields: dict[str, Any] = {
        "plan": str(arguments.output), "bits": found.bits, "kl": found.error, "values": found.values,
        "tokens": rows.numel(), "weights": dict(found.table()),
    }  # fmt: skip
    return show(arguments, f"{found}\nwrote {arguments.output}", fields)


def read_plan(path: str) -> Plan:
    """The plan in a file; a note of what it plans."""
    if not Path(path).is_file():
        what = "is a folder" if Path(path).is_dir() else "does not exist"
        raise FileNotFoundError(f"--plan: {path} {what}; pass a file that `mxtensor plan` has written")
    found = Plan.load(path)
    note(f"{path}: {found.bits:.3g} bits per value over {len(found.weights)} weights")
    return found
