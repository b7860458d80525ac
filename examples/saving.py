"""Checkpoints of ``examples.train_lm``: one folder each, complete or absent, for any number of ranks."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_into
from torch.distributed.checkpoint.state_dict_saver import save as save_all
from torch.optim import Optimizer

from mxtensor.distributed.checkpoint import Reader, Writer, latest

BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)
"""The optimizer's state by parameter name, independent of parameter groups."""
SAVED = 2
"""Number of checkpoints on disk: the last one, and the one before it in case the last is damaged."""


def _state(model: nn.Module, optimizer: Optimizer, rest: dict[str, Any]) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer, options=BY_NAME)
    return {"model": weights, "optimizer": moments, "rest": rest}


@contextmanager
def _without_process_group() -> Iterator[None]:
    """Ignore torch's warning about saving and loading without a process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")
        yield


def save(folder: Path, step: int, model: nn.Module, optimizer: Optimizer, rest: dict[str, Any]) -> None:
    """Write ``folder/step-N``; every rank must call it. A step that exists already is not written again."""
    path = folder / f"step-{step}"
    if path.exists():
        return
    with _without_process_group():
        save_all(_state(model, optimizer, rest), storage_writer=Writer(path))
    whole = [p for p in folder.glob("step-*") if p.name[5:].isdigit()]
    for old in sorted(whole, key=lambda p: int(p.name[5:]))[:-SAVED]:
        shutil.rmtree(old, ignore_errors=True)  # the first rank deletes it


def load(folder: Path, model: nn.Module, optimizer: Optimizer, rest: dict[str, Any]) -> dict[str, Any]:
    """Load model and optimizer from the last checkpoint in ``folder``; returns its ``rest``.

    Raises ValueError on every rank, and changes no weight, if the settings in ``rest`` differ or the checkpoint is
    damaged; FileNotFoundError if there is none.
    """
    path = latest(folder)
    try:
        with _without_process_group():
            found: dict[str, Any] = {"rest": {"settings": dict(rest["settings"])}}
            load_into(found, storage_reader=Reader(path))
            for name, value in rest["settings"].items():
                was = found["rest"]["settings"][name]
                if was != value:
                    raise ValueError(f"{path} was trained with {name} {was}, not {value}")
            state = _state(model, optimizer, rest)
            load_into(state, storage_reader=Reader(path))
    except CheckpointException as error:
        reasons = sorted({str(failure[0]) for failure in error.failures.values()})
        raise ValueError("; ".join(reasons)) from error
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=BY_NAME
    )
    return state["rest"]  # type: ignore[no-any-return]
