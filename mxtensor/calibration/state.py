"""State: the finished blocks of a calibration in a folder, so that an interrupted one continues.

``calibration.json`` identifies the calibration: the method, the weights with their recipes, digests of them and of all
other parameters and buffers, the data. A block is one file, written under another name first.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..convert.changes import Change
from ..core.arguments import described
from ..core.compat import tree_leaves
from ..tensor.mxtensor import MXTensor
from ..training.training_weight import values_of
from .blocks import Call
from .methods import Steps

SAMPLE = 4096
"""Values of a weight that its digest is made of."""


class State:
    """The folder of one calibration. Raises ValueError if it is that of another one, or damaged."""

    def __init__(
        self, folder: Path, model: nn.Module, batches: Sequence[Any], changes: Sequence[Change], method: Steps
    ) -> None:
        self._folder = folder
        calls = [Call.of(batch) for batch in batches]
        arguments = [part for call in calls for part in (*call.kwargs, *tree_leaves(list(call)))]
        wanted = {
            "model": type(model).__name__, "method": repr(method), "data": _digest(arguments),
            "weights": _weights(model, changes),
        }  # fmt: skip
        self._changes = {change.fqn: change for change in changes}
        self._model = model
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "calibration.json"
        if file.exists():
            found = self._read(file)
            other = sorted(key for key in wanted if found.get(key) != wanted[key])
            if other:
                raise ValueError(
                    f"calibrate: {folder} has the state of a calibration with other {' and '.join(other)}; pass "
                    "another folder, or remove it"
                )
        else:
            new = file.with_suffix(".new")
            new.write_text(json.dumps(wanted, indent=1), encoding="utf-8")
            os.replace(new, file)

    def _file(self, index: int) -> Path:
        return self._folder / f"block_{index:05d}.pt"

    def load(self, index: int, changes: Iterable[Change]) -> dict[str, Tensor] | None:
        """The new parameters of a block, by name; None if it is not finished. ``changes``: those of the block.

        Raises ValueError for a file whose tensors are not those of the model: other names, shapes, dtypes or formats,
        or values that are not finite.
        """
        file = self._file(index)
        if not file.exists():
            return None
        found = self._read(file)
        missing = [change.fqn for change in changes if change.fqn not in found]
        why = f"it lacks {missing[0]}" if missing else None
        for name, value in found.items():
            why = why or self._why_not(name, value)
        if why is not None:
            raise ValueError(f"calibrate: {file} is damaged: {why:.300}; remove {self._folder}, or pass another folder")
        return found

    def _why_not(self, name: Any, value: Any) -> str | None:
        """Why ``value`` is not what a calibration makes of the parameter called ``name``; None if it may be."""
        if not isinstance(name, str) or not isinstance(value, Tensor):
            return f"it holds {described(value)} as {name!r:.80}"
        module, _, leaf = name.rpartition(".")
        holder = dict(self._model.named_modules()).get(module)
        if holder is None or leaf not in holder._parameters:
            return f"the model has no parameter {name!r:.80}"
        old, change = values_of(holder._parameters[leaf]), self._changes.get(name)
        if change is None and isinstance(value, MXTensor):
            return f"{name} is quantized, and no change of this call"
        if change is not None and isinstance(value, MXTensor) and value.format != change.recipe.stored.format:
            return f"{name} is {value.format.name}, not {change.recipe.stored.format.name}"
        if change is not None and not isinstance(value, MXTensor):
            return f"{name} is not quantized"
        shape = (holder.weight.shape[0],) if old is None else tuple(old.shape)  # a bias that is made
        if tuple(value.shape) != shape or (old is not None and value.dtype != old.dtype):
            return f"{name} is {described(value)}, and the parameter has the shape {shape}"
        values = value.dequantize() if isinstance(value, MXTensor) else value
        finite = values.is_floating_point() and values.isfinite().all()
        return None if finite else f"{name} has values that are not finite"

    def _read(self, file: Path) -> dict[str, Any]:
        """The entries of ``calibration.json``, or the tensors of a block. Raises ValueError for a damaged file.

        Records of a block are as long as its file: nothing in it is compressed.
        """
        try:
            if not file.is_file():
                raise ValueError("a folder or a pipe")
            if file.suffix == ".json":
                return dict(json.loads(file.read_text(encoding="utf-8")))
            with zipfile.ZipFile(file) as archive:
                if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                    raise ValueError("a compressed record")
            return dict(torch.load(file, weights_only=True))
        except Exception as error:  # a file that is not valid raises whatever its words lead to
            raise ValueError(
                f"calibrate: {file} is damaged ({type(error).__name__}); remove {self._folder}, or pass another folder"
            ) from error

    def save(self, index: int, made: dict[str, Tensor]) -> None:
        """Save the new parameters of a finished block."""
        new = self._file(index).with_suffix(".new")
        torch.save(made, new)
        os.replace(new, self._file(index))


def _weights(model: nn.Module, changes: Sequence[Change]) -> dict[str, str]:
    """A digest of each parameter and each buffer that is saved: inputs of layers depend on all of them. And recipes."""
    saved = model.state_dict().keys()
    found: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    found |= {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name in saved}
    digests = {}
    for name, parameter in found.items():
        value = values_of(parameter)
        seen: list[Any] = [tuple(value.shape)]  # and some values of each tensor, and the sum of all of its bytes
        for t in value.components if isinstance(value, MXTensor) else () if value.is_meta else (value,):
            flat = t.detach().contiguous().flatten()
            octets = flat.view(torch.uint8)
            some = octets if isinstance(value, MXTensor) else flat
            seen += [some[:: max(len(some) // SAMPLE, 1)], int(octets.sum(dtype=torch.int64))]
        digests[name] = _digest(seen)
    return digests | {change.fqn: f"{change.recipe} {digests[change.fqn]}" for change in changes}


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
