"""State: the finished blocks of a calibration in a folder, so that an interrupted one continues.

``calibration.json`` says what was calibrated: the method, the weights with their recipes and digests, the data. A block
is one file, written under another name first.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..convert.plan import Change
from ..core.compat import tree_leaves
from ..training.training_weight import values_of
from .methods import Steps

SAMPLE = 4096
"""Values of a weight that its digest is made of."""


class State:
    """The folder of one calibration. Raises ValueError if it is that of another one."""

    def __init__(
        self, folder: Path, model: nn.Module, batches: Sequence[Any], changes: Sequence[Change], method: Steps
    ) -> None:
        self._folder = folder
        wanted = {
            "model": type(model).__name__, "method": repr(method), "data": _digest(tree_leaves(list(batches))),
            "weights": {c.fqn: f"{c.recipe} {_digest([_values(c)])}" for c in changes},
        }  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "calibration.json"
        if file.exists():
            found = json.loads(file.read_text(encoding="utf-8"))
            other = sorted(key for key in wanted if found.get(key) != wanted[key])
            if other:
                raise ValueError(
                    f"calibrate: {folder} has the state of a calibration with other {' and '.join(other)}; pass "
                    "another folder, or remove it"
                )
        else:
            file.write_text(json.dumps(wanted, indent=1), encoding="utf-8")

    def _file(self, index: int) -> Path:
        return self._folder / f"block_{index:05d}.pt"

    def load(self, index: int) -> dict[str, Tensor] | None:
        """The new parameters of a block, by name; None if it is not finished."""
        if not self._file(index).exists():
            return None
        return torch.load(self._file(index), weights_only=True)  # type: ignore[no-any-return]

    def save(self, index: int, made: dict[str, Tensor]) -> None:
        """Save the new parameters of a finished block."""
        new = self._file(index).with_suffix(".new")
        torch.save(made, new)
        os.replace(new, self._file(index))


def _values(change: Change) -> Tensor:
    module, name = change.places[0]
    flat = values_of(getattr(module, name)).detach().flatten()
    return flat[:: max(len(flat) // SAMPLE, 1)]


def _digest(values: Sequence[Any]) -> str:
    """A digest of tensors and other values."""
    digest = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(value).encode())
    return digest.hexdigest()
