"""eval, report and plan: commands that run a language model on a text."""

from __future__ import annotations

import argparse
import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..calibration.planner import FORMATS, plan
from ..checkpoints.store import opened
from ..convert.configs import recipe_of
from ..convert.model_size import model_size
from ..convert.quantize import quantize_
from ..report.model_report import layer_errors, output_errors
from ..report.page import Measured, page, summary
from ..report.quality import Quality, evaluate, windows
from ..tensor.mxtensor import MXTensor
from .models import filter_without, gguf_file, load_model, load_tokenizer, read_text, stored_size
from .output import check_page, columns, one_line, progress, show


def check_device(device: str) -> None:
    """Raise ValueError for a CUDA device where torch finds none."""
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: torch finds no CUDA device here")


def rows_of(arguments: argparse.Namespace, text: str, tokenizer: Any, model: Any) -> Tensor:
    """The tokens of a text in windows, on the device, by the tokenizer of the model or that of ``--tokenizer``.

    Raises ValueError that names the text for one that is too short, and for tokens that the model does not know.
    """
    if arguments.tokenizer is not None:
        tokenizer = load_tokenizer(arguments.tokenizer)
    path = arguments.path if arguments.tokenizer is None else arguments.tokenizer
    if tokenizer is None:
        raise ValueError(f"{path} has no tokenizer; pass --tokenizer with a folder that has one")
    try:
        rows = windows(tokenizer, text, arguments.tokens, arguments.window)
    except ValueError as error:
        raise ValueError(f"{arguments.text if arguments.text != '-' else 'standard input'}: {error}") from error
    vocabulary, largest = model.get_input_embeddings().weight.shape[0], int(rows.max())
    if largest >= vocabulary:
        raise ValueError(
            f"the tokenizer of {path} makes token {largest} of the text, and the model knows {vocabulary} tokens; pass "
            "--tokenizer with that of the model"
        )
    return rows.to(arguments.device)


# ---------------------------------------------------------------------------------------------- eval


def eval_model(arguments: argparse.Namespace) -> int:
    """``eval``."""
    check_device(arguments.device)
    text = read_text(arguments.text)  # before the model, which takes longer
    model, tokenizer = load_model(arguments.path, arguments.device, arguments.format, arguments.skip)
    rows = rows_of(arguments, text, tokenizer, model)
    reference = None
    if arguments.reference is not None:  # in high precision also where a GGUF file has codes
        reference = load_model(arguments.reference, arguments.device, keeps_codes=False)[0]
    with progress(len(rows), "evaluating", "window") as step:
        found = evaluate(model, rows, reference, step)
    bits, nbytes = _size(arguments.path, model, arguments.format)
    fields: dict[str, Any] = {
        "model": arguments.path, "bits": bits, "bytes": nbytes, "tokens": found.tokens,
        "window": arguments.window, "perplexity": found.perplexity,
    }  # fmt: skip
    header = ["model", "bits per value", "MB", "tokens", "perplexity"]
    lines = [[arguments.path, f"{bits:.2f}", f"{nbytes / 1e6:.1f}", f"{found.tokens}", f"{found.perplexity:.2f}"]]
    if reference is not None:
        fields |= {"reference": arguments.reference, "reference_perplexity": found.reference_perplexity,
                   "kl": found.kl, "kl_error": found.kl_error, "same_token": found.same_token}  # fmt: skip
        header += ["KL", "+-", "same token"]
        lines[0] += [f"{found.kl:.4f}", f"{found.kl_error:.4f}", f"{found.same_token:.1%}"]
        bits, nbytes = _size(arguments.reference, reference)
        before = [arguments.reference, f"{bits:.2f}", f"{nbytes / 1e6:.1f}", f"{found.tokens}"]
        lines.append([*before, f"{found.reference_perplexity:.2f}", "", "", ""])
    return show(arguments, columns(header, lines), fields)


def _size(path: str, model: nn.Module, format: str | None = None) -> tuple[float, int]:
    """Bits a value and bytes of the weights, scales included; those of the file for a GGUF file, whose values are
    decoded to run them."""
    stored = None if format is not None else stored_size(path)
    size = model_size(model)
    return (size.bits, size.nbytes) if stored is None else stored


# ---------------------------------------------------------------------------------------------- report


def _inputs(arguments: argparse.Namespace, rows: Tensor | None) -> list[dict[str, Any]]:
    """The keyword arguments of each call of the models: the rows of the text, or the tensors of a file in one call."""
    if rows is not None:
        return [{"input_ids": row, "use_cache": False} for row in rows.split(1)]
    if arguments.inputs is None:
        return []
    with opened(arguments.inputs) as file:
        return [{name: file.tensor(name).to(arguments.device) for name in file.tensors}]


def _check_quantized(arguments: argparse.Namespace, model: nn.Module) -> None:
    """Raise ValueError for a model without a quantized layer, before it is measured."""
    if any(isinstance(parameter, MXTensor) for parameter in model.parameters()):
        return
    if gguf_file(arguments.path) is not None and not arguments.formats:
        raise ValueError(
            f"{arguments.path} has no tensor in a format of this package, so that no layer is quantized once it is "
            "decoded; compare the models by `mxtensor eval --reference`, or pass --format"
        )
    raise ValueError(
        f"no layer is quantized in {arguments.path}; pass the quantized model, and the model before quantization as "
        "--reference, or pass --format"
    )


def _outputs(arguments: argparse.Namespace, model: Any, reference: Any, inputs: Any, step: Any) -> Any:
    """The errors of outputs. Raises ValueError that names the file of ``--inputs`` if the model does not take it."""
    try:
        return output_errors(model, reference, inputs, step)
    except (ValueError, TypeError, RuntimeError, IndexError) as error:
        if arguments.inputs is None:
            raise
        names = ", ".join(sorted(inputs[0])[:3])
        raise ValueError(
            f"--inputs {arguments.inputs}: the model cannot be called with its tensors, such as {names}: "
            f"{one_line(error)}"
        ) from error


def report(arguments: argparse.Namespace) -> int:
    """``report``: of a quantized checkpoint beside its reference, or of a model in some formats."""
    check_device(arguments.device)
    check_page(arguments.output)
    text = None if arguments.text is None else read_text(arguments.text)
    before = arguments.path if arguments.reference is None else arguments.reference
    reference, tokenizer = load_model(before, arguments.device, keeps_codes=False)
    labels = arguments.formats or [arguments.path]
    chosen = filter_without("report", reference, arguments.skip)
    rows = None if text is None else rows_of(arguments, text, tokenizer, reference)
    inputs, models = _inputs(arguments, rows), []
    steps = 1 + len(inputs) + (0 if rows is None else len(rows))
    with progress(len(labels) * steps, "measuring", "step") as step:
        for label in labels:
            if arguments.formats:  # a copy, which shares the memory of what stays in high precision
                small = copy.deepcopy(reference, {id(parameter): parameter for parameter in reference.parameters()})
                quantize_(small, label, chosen)
            else:
                small = load_model(arguments.path, arguments.device)[0]
            bits, nbytes = _size(arguments.path, small, label if arguments.formats else None)
            _check_quantized(arguments, small)
            outputs = _outputs(arguments, small, reference, inputs, step)
            found = None if rows is None else evaluate(small, rows, reference, step)
            errors = layer_errors(small, reference)
            models.append(Measured(label, bits, nbytes, errors, outputs, found))
            step()
    (bits, nbytes), found = _size(before, reference), models[0].quality
    if found is not None and found.reference_perplexity is not None:
        found = Quality(found.reference_perplexity, 0.0, 0.0, 1.0, found.tokens)
    models.insert(0, Measured(before, bits, nbytes, [], [], found))
    sample = "none: the outputs of layers were not measured; pass --text or --inputs"
    if rows is not None:
        sample = f"{rows.numel()} tokens of {arguments.text} in windows of {arguments.window}"
    elif arguments.inputs is not None:
        sample = f"the tensors of {arguments.inputs}"
    about = {"model before": before, "sample": sample}
    html = page(f"Quantization report of {Path(arguments.path).resolve().name}", about, models)
    Path(arguments.output).write_text(html, encoding="utf-8")
    fields = {"page": arguments.output, "models": [asdict(m) for m in models], **about}
    return show(arguments, f"{columns(*summary(models))}\nwrote {arguments.output}", fields)


# ---------------------------------------------------------------------------------------------- plan


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
        "plan": arguments.output, "bits": found.bits, "kl": found.error, "values": found.values,
        "tokens": rows.numel(), "weights": found.formats,
    }  # fmt: skip
    return show(arguments, f"{found}\nwrote {arguments.output}", fields)
