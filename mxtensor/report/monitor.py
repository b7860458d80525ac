"""``mx.monitor``: what the casts of a model do to its inputs, weights and gradients while it trains."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.arguments import COUNT, INTEGER, MODULE, Kind, check, optional
from ..core.local import local_of
from ..core.shapes import as_matrix
from ..core.text_table import text_table
from ..tensor.mxtensor import MXTensor
from ..training.observe import SHARDS, LayerCall, add, remove
from ..training.operands import GRAD, INPUT, WEIGHT
from ..training.training_weight import values_of
from .cast_stats import SIDES, CastStats, measured
from .model_report import short_names
from .monitor_plot import OPERANDS, MonitorRow, plot_history

MEASUREMENTS = 1000
"""The latest measurements that a monitor stores."""
WRITER = Kind(
    "a SummaryWriter of torch.utils.tensorboard",
    lambda writer: not isinstance(writer, type) and callable(getattr(writer, "add_scalar", None)),
)


class Cell(NamedTuple):
    """One copy of one operand of one layer."""

    fqn: str
    operand: str
    side: str
    format: str


class _Measurement:
    """The sums of one step: added up while it runs, and stacked into one tensor for each device at its end."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.sums: dict[Cell, Tensor] = {}
        self.stacked: list[tuple[list[Cell], Tensor]] = []

    def add(self, cell: Cell, sums: Tensor) -> None:
        before = self.sums.get(cell)
        self.sums[cell] = sums if before is None else before + sums

    def close(self) -> None:
        """Stack the sums."""
        devices: dict[torch.device, list[Cell]] = {}
        for cell, sums in self.sums.items():
            devices.setdefault(sums.device, []).append(cell)
        self.stacked += [(cells, torch.stack([self.sums[cell] for cell in cells])) for cells in devices.values()]
        self.sums = {}

    def rows(self) -> list[MonitorRow]:
        """Read the sums, which synchronizes with the devices."""
        found: dict[Cell, list[float]] = {}
        for cells, sums in [*self.stacked, *(([cell], sums[None]) for cell, sums in self.sums.items())]:
            for cell, numbers in zip(cells, sums.tolist(), strict=True):
                before = found.get(cell, [0.0] * len(numbers))
                found[cell] = [a + b for a, b in zip(before, numbers, strict=True)]
        layers = {fqn: i for i, fqn in enumerate(dict.fromkeys(cell.fqn for cell in found))}

        def place(cell: Cell) -> tuple[int, int, int]:
            return layers[cell.fqn], OPERANDS.index(cell.operand), SIDES.index(cell.side)

        return [
            MonitorRow(self.step, *cell, **CastStats.of(found[cell])._asdict()) for cell in sorted(found, key=place)
        ]


class Monitor:
    """The measurements of a model in training; ``mx.monitor`` makes one."""

    def __init__(self, model: nn.Module, every: int) -> None:
        self._model, self._every, self._step = model, every, 0
        self._names: dict[int, str] = {}
        """Identity of a parameter, or of the part of it that this rank has -> its name."""
        self._local: dict[int, str] = {}
        """Address of the part of a DTensor -> its name: a layer gets another tensor over the same memory."""
        self._done: deque[_Measurement] = deque(maxlen=MEASUREMENTS)
        self._now: _Measurement | None = _Measurement(0)
        self._written = -1
        self._reference: weakref.ref[Any] | None = add(self)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop measuring. Earlier measurements can still be read."""
        if self._reference is not None:
            remove(self._reference)
        self._reference = None
        self._end()

    def _end(self) -> None:
        if self._now is not None and self._now.sums:
            self._now.close()
            self._done.append(self._now)
        self._now = None

    def step(self) -> None:
        """Call it after each optimizer step. Does not synchronize with the device."""
        self._end()
        self._step += 1
        if self._reference is not None and self._step % self._every == 0:
            self._now = _Measurement(self._step)
            self._names, self._local = {}, {}  # FSDP2 makes parameters anew

    # ------------------------------------------------------------------------------------------ a call of a layer

    def _name(self, weight: Tensor) -> str | None:
        """The name of a weight; None if it is of another model. The names of several parameters are joined."""
        found = [self._name_of(part) for part in getattr(weight, SHARDS, (weight,))]
        names = [name for name in found if name is not None]
        if len(names) < len(found):
            return None
        module = names[0].rpartition(".")[0]
        return "+".join([names[0], *(name.removeprefix(f"{module}.") for name in names[1:])])

    def _find_names(self) -> None:
        parameters = [(fqn, p, local_of(p)) for fqn, p in self._model.named_parameters()]
        self._names = {id(each): fqn for fqn, *both in parameters for each in both}
        self._local = {values_of(part).data_ptr(): fqn for fqn, p, part in parameters if part is not p and part.numel()}

    def _name_of(self, weight: Tensor) -> str | None:
        """The name of the parameter that a weight is, or is a view or a part of; None if it is of another model."""
        base = weight if weight._base is None else weight._base
        address = values_of(base).data_ptr()
        if id(base) not in self._names and address not in self._local:
            self._find_names()
        name = self._names.get(id(base)) or self._local.get(address)
        if name is None or base.numel() == weight.numel():
            return name
        return f"{name}[{(weight.storage_offset() - base.storage_offset()) // weight.numel()}]"

    def of_call(self, call: LayerCall) -> Callable[[Tensor], None] | None:
        """Measure the input and the weight of a layer. Returns what measures the gradient of its result."""
        now = self._now
        if now is None:
            return None
        name, recipe, stacked = self._name(call.weight), call.recipe, call.weight.dim() > 2
        if name is None or (stacked and recipe.has_tensor_scales):
            return None
        scales, grouped = call.scales, call.ends is not None
        sides = ("rowwise",) if grouped else SIDES  # columns of groups are blocked group by group

        def note(operand: int, x: Tensor, sides: tuple[str, ...]) -> None:
            casts = (recipe.input, recipe.weight, recipe.grad)[operand]
            amax = None if scales is None else scales.amax[operand]
            for side, format, sums in measured(x, casts, amax, sides):
                now.add(Cell(name, OPERANDS[operand], side, format), sums)

        def as_cast(x: Tensor) -> Tensor:
            """The stack of matrices, or the matrix, that the layer casts."""
            return x if stacked and not grouped else as_matrix(x)

        def sees(grad: Tensor) -> None:  # without a reference to x, which would stay in memory until then
            if grad.numel():
                note(GRAD, as_cast(grad), sides)

        if call.x.numel():
            note(INPUT, as_cast(call.x.detach()), sides)
        values = values_of(call.weight)
        if not isinstance(values, MXTensor):
            note(WEIGHT, values.detach(), SIDES)
        return sees

    # ------------------------------------------------------------------------------------------ reading

    def rows(self) -> list[MonitorRow]:
        """The latest measurement, layer by layer in the order in which they ran. Synchronizes.

        Empty if no layer has trained quantized in a measured step.
        """
        latest = self._now if self._now is not None and self._now.sums else self._done[-1] if self._done else None
        return [] if latest is None else latest.rows()

    def history(self) -> list[MonitorRow]:
        """The rows of the last 1000 measurements, the oldest first. Synchronizes."""
        return [row for one in (*self._done, *([] if self._now is None else [self._now])) for row in one.rows()]

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """The latest measurement, one line for each operand of a layer. Fractions are percentages."""
        rows = self.rows()
        if not rows:
            return "no layer has trained quantized in a measured step"
        names = dict(zip(fqns := list(dict.fromkeys(row.fqn for row in rows)), short_names(fqns), strict=True))
        lines: dict[tuple[str, str], dict[str, MonitorRow]] = {}
        for row in rows:
            lines.setdefault((names[row.fqn], row.operand), {})[row.side] = row
        header = ["layer", "operand", "format"]
        for side in SIDES:
            header += [f"{side} dB", "saturated %", "to zero %"]
        body = []
        for (name, operand), sides in lines.items():
            cells = [name, operand, next(iter(sides.values())).format]
            for side in SIDES:
                one = sides.get(side)
                cells += ["", "", ""] if one is None else [
                    f"{one.sqnr_db:.1f}", f"{100 * one.saturated:.3g}", f"{100 * one.underflowed:.3g}"
                ]  # fmt: skip
            body.append(cells)
        return f"step {rows[0].step}\n\n" + text_table(header, body, left=(0, 1, 2))

    def plot(self, path: str | os.PathLike[str], figure: str = "sqnr_db", title: str | None = None) -> Path:
        """Draw a heat map of all measurements: layers over steps, one panel for each copy of an operand.

        ``figure``: ``sqnr_db``, ``saturated`` or ``underflowed``. The suffix of ``path`` chooses the file type (png if
        there is none); its folder is created. Returns the path. Raises ValueError for another figure or without a
        measurement, IsADirectoryError for a folder, ImportError without matplotlib.
        """
        return plot_history(self.history(), path, figure, title)

    def to_tensorboard(self, writer: Any, step: int | None = None) -> None:
        """Write the latest measurement to a ``torch.utils.tensorboard.SummaryWriter``, once.

        Tags are ``sqnr_db/LAYER/OPERAND.SIDE``, ``saturated/...`` and ``underflowed/...``. ``step``: the number on the
        horizontal axis; None takes that of the measurement. Without a new measurement nothing is written and nothing
        waits, so that it can be called in every step.
        """
        check("to_tensorboard", "writer", writer, WRITER)
        check("to_tensorboard", "step", step, optional(INTEGER))
        latest = self._done[-1] if self._done else None
        if latest is None or latest.step <= self._written:
            return
        self._written = latest.step
        for row in latest.rows():
            for figure in ("sqnr_db", "saturated", "underflowed"):
                tag = f"{figure}/{row.fqn}/{row.operand}.{row.side}"
                writer.add_scalar(tag, getattr(row, figure), row.step if step is None else step)


def monitor(model: nn.Module, every: int = 100) -> Monitor:
    """Measure the errors of the casts of inputs, weights and gradients, in one of ``every`` training steps.

    Call ``step()`` of the result after each step of the optimizer; then ``rows()``, ``print``, ``to_tensorboard`` and
    ``plot`` show fractions of saturated and underflowed values and the SQNR in dB, for each layer, operand and copy.
    Measures every linear layer that trains quantized, by ``quantize_``, ``autocast`` or ``mx.nn``, in eager code. Not
    measured are layers in a compiled graph, weights that are computed in each step, and layers of tensor parallelism
    whose ranks share a scale (NVFP4, float8 per tensor). A measured step casts each operand once more and needs memory
    for three float32 copies of the largest one. Results, gradients and random numbers of the training do not change,
    and nothing synchronizes with the device until a result is read. Rows are those of this rank.

    Ends with ``close()``, at the end of a ``with`` block, or when the monitor is no longer referenced. Raises TypeError
    for an object that is not a module, ValueError for ``every`` below 1.
    """
    check("monitor", "model", model, MODULE)
    check("monitor", "every", every, COUNT)
    return Monitor(model, every)
