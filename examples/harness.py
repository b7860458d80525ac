"""Runs lm-eval on a quantized model with a task whose data is in this repository; nothing is downloaded:

    pip install -c constraints.txt '.[eval]'
    python -m examples.harness ./SmolLM2-mxfp4
    python -m examples.harness ./SmolLM2 --format mxfp8-weight-only

MODEL is a folder that transformers loads: one that ``mxtensor quantize`` wrote, or one in high precision that
``--format`` quantizes while it is loaded. ``--tasks`` takes lm-eval's own tasks too, whose data lm-eval downloads.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mxtensor as mx
from examples.minilm import columns, config_name

TASKS = Path(__file__).with_name("tasks")
OURS = "facts"


def load(path: str, format: str | None) -> tuple[Any, Any]:
    """(model, tokenizer) of transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {} if format is None else {"quantization_config": mx.TransformersConfig(format)}
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", **options).eval()
    return model, AutoTokenizer.from_pretrained(path)


def evaluate(model: Any, tokenizer: Any, tasks: Sequence[str], limit: int | None, batch_size: int) -> dict[str, Any]:
    """lm-eval's results by task."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    known = TaskManager(include_path=str(TASKS), include_defaults=set(tasks) != {OURS})
    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, device=str(model.device))
    found = simple_evaluate(model=wrapped, tasks=list(tasks), limit=limit, task_manager=known, bootstrap_iters=0)
    return dict(found["results"])


def rows_of(results: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(task, metric, value) of each number."""
    return [
        (task, name.removesuffix(",none"), f"{value:.4f}")
        for task, metrics in results.items()
        for name, value in metrics.items()
        if isinstance(value, float) and "stderr" not in name
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Load the model, run the tasks, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m examples.harness", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("model", metavar="MODEL", help="the folder of a model")
    add("--format", type=config_name, metavar="NAME", help="quantize while loading, such as mxfp4-weight-only")
    add("--tasks", nargs="+", default=[OURS], metavar="TASK", help=f"of lm-eval, or {OURS} (%(default)s)")
    add("--limit", type=int, metavar="N", help="the first N questions of each task (all)")
    add("--batch-size", type=int, default=8, metavar="N", help="sequences at once (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write lm-eval's results")
    args = parser.parse_args(argv)
    if not Path(args.model, "config.json").is_file():
        parser.error(f"{args.model} is not the folder of a model: it has no config.json")
    if set(args.tasks) == {OURS}:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before datasets is imported
        os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    logging.getLogger("mxtensor").setLevel(logging.ERROR)  # the line below says the bits
    model, tokenizer = load(args.model, args.format)
    size = mx.model_size(model)
    results = evaluate(model, tokenizer, args.tasks, args.limit, args.batch_size)
    print(f"{args.model}: {size.nbytes / 1e6:.0f} MB, {size.bits:.2f} bits per weight\n")
    print(columns(("task", "metric", "value"), rows_of(results)))
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
