"""``mx.monitor``: what the casts of a model do to its inputs, weights and gradients while it trains.

A cast of an operand is measured by five sums, which stay on the device until somebody reads them.
"""

from __future__ import annotations

import math
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.arguments import COUNT, INTEGER, MODULE, TEXT, Kind, check, optional
from ..core.autograd import without_autocast
from ..core.compat import local_of
from ..core.explain import LOGS, text_table
from ..core.shapes import as_matrix
from ..kernels.operands import Form
from ..kernels.quantize.choose_cast import dequantize_operand
from ..kernels.quantize.choose_pair import cast_pair
from ..numerics.cast import Cast
from ..numerics.formats import Rounding
from ..numerics.operand import Operand
from ..numerics.reference import crop, join_blocks, scale_to_float, split_blocks, spread
from ..recipe.linear_recipe import TensorCasts
from ..tensor.mxtensor import MXTensor
from ..training.casts import columnwise_source
from ..training.delayed_scaling import GRAD, INPUT, WEIGHT
from ..training.linear import SHARDS, LayerCall, add, remove
from ..training.training_weight import values_of
from .model_report import FILE, decibels, file_of_plot, new_figure, short_names

SIDES = ("rowwise", "columnwise")
OPERANDS = ("input", "weight", "grad")
SEED = 20240613
"""Of stochastic rounding while it is measured, so that the generator of the training goes on undisturbed."""
MEASUREMENTS = 1000
"""The latest measurements that a monitor stores."""
WRITER = Kind(
    "a SummaryWriter of torch.utils.tensorboard",
    lambda writer: not isinstance(writer, type) and callable(getattr(writer, "add_scalar", None)),
)


FIGURES = {
    "sqnr_db": ("SQNR [dB]", 1.0, "viridis"),
    "saturated": ("saturated [%]", 100.0, "magma_r"),
    "underflowed": ("became zero [%]", 100.0, "magma_r"),
}
"""Field of MonitorRow -> label, unit, colors."""
MOST_INCHES = 40.0
"""Of the height of a picture."""
Cell = tuple[str, str, str, str]
"""One copy of one operand of one layer: name of the weight, operand, side, format."""


@dataclass(frozen=True)
class MonitorRow:
    """What the cast of one copy of an operand did to its values in one step."""

    step: int
    """Counted by ``Monitor.step``, from 0."""
    fqn: str
    """The name of the weight in ``named_parameters()``; names of the parameters of one weight are joined by ``+``, and
    a slice of a stack has its number in brackets."""
    operand: str
    """``input``, ``weight`` or ``grad``."""
    side: str
    """``rowwise`` or ``columnwise``: the copy for the first or the second product that the operand enters."""
    format: str
    saturated: float
    """Fraction of the values above the largest one that their block represents."""
    underflowed: float
    """Fraction of the values that became zero and were not."""
    sqnr_db: float
    """SQNR in dB; see ``sqnr_db``."""


# ---------------------------------------------------------------------------------------------- one cast


class CastStats(NamedTuple):
    """What a cast did to the values of one operand, in numbers of the host."""

    saturated: float
    """Fraction of the values above the largest one that their block represents."""
    underflowed: float
    """Fraction of the values that became zero and were not."""
    sqnr_db: float
    """10 log10 of the sum of squares over that of the errors; inf without errors."""

    @classmethod
    def of(cls, sums: list[float]) -> CastStats:
        """From the five sums of ``sums_of``, or from sums of such sums."""
        values, saturated, underflowed, signal, noise = sums
        return cls(saturated / max(values, 1), underflowed / max(values, 1), decibels(signal, noise))


def largest_values(operand: Operand) -> Tensor:
    """The largest magnitude that each value of an operand can have, in float32: that of its element times its scale."""
    format, shape = operand.format, operand.shape
    whole = operand.scale.new_full(shape, format.element.max, dtype=torch.float32)
    blocks, dims = split_blocks(whole, format)
    values = join_blocks(blocks * spread(scale_to_float(operand.scale, format.scale), dims), dims)
    values = crop(values, shape[-2] if dims == (-3, -1) else None, shape[-1])
    return values if operand.global_scale is None else values * operand.global_scale


def sums_of(x: Tensor, operand: Operand) -> Tensor:
    """float64 (5,) on the device of x: the number of values, how many saturated, how many underflowed, the sum of their
    squares, and that of the errors. ``operand``: x after its cast."""
    wanted, values = x.to(torch.float32), dequantize_operand(operand, torch.float32)
    sums = (
        torch.full((), wanted.numel(), dtype=torch.float64, device=x.device),
        (wanted.abs() > largest_values(operand)).sum(dtype=torch.float64),
        ((values == 0) & (wanted != 0)).sum(dtype=torch.float64),
        wanted.square().sum(dtype=torch.float64),
        (wanted - values).square().sum(dtype=torch.float64),
    )
    return torch.stack(sums)


def _one(x: Tensor, cast: Cast, side: int, amax: Tensor | None) -> Operand:
    """One copy of a matrix as codes."""
    if cast.rounding is Rounding.STOCHASTIC and cast.seed is None:
        cast = replace(cast, seed=SEED)
    row, column = (Form.CODES, None) if side == 0 else (None, Form.CODES)
    operand = cast_pair(x, cast, row, column, torch.bfloat16, amax)[side]
    assert isinstance(operand, Operand)
    return operand


def measured(
    x: Tensor, casts: TensorCasts, amax: Tensor | None = None, sides: tuple[str, ...] = SIDES
) -> Iterator[tuple[str, str, Tensor]]:
    """(side, format, ``sums_of``) of each copy of a matrix, or of a stack, that a layer casts.

    ``amax``: that of delayed scaling, a float32 scalar. A rotated copy is compared with the rotated values, and one
    that is cast from the other copy with the values before both casts. Nothing waits for the device, nothing is logged,
    and no random number is drawn.
    """
    row, column = casts.rowwise, casts.columnwise
    with torch.no_grad(), LOGS.block(None), without_autocast(x.device):
        operand = None
        if row is not None:
            operand = _one(x, row, 0, amax)
            if "rowwise" in sides:
                yield "rowwise", row.format.name, sums_of(x, operand)
        if column is None or "columnwise" not in sides:
            return
        source, side = columnwise_source(x, casts, operand)
        wanted = x.transpose(-1, -2) if side == 1 else source
        yield "columnwise", column.format.name, sums_of(wanted, _one(source, column, side, amax))


# ---------------------------------------------------------------------------------------------- a training


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
        layers = {fqn: i for i, fqn in enumerate(dict.fromkeys(fqn for fqn, *_ in found))}

        def place(cell: Cell) -> tuple[int, int, int]:
            fqn, operand, side, _ = cell
            return layers[fqn], OPERANDS.index(operand), SIDES.index(side)

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

    def _name_of(self, weight: Tensor) -> str | None:
        """The name of the parameter that a weight is, or is a view or a part of; None if it is of another model."""
        base = weight if weight._base is None else weight._base
        address = values_of(base).data_ptr()
        if id(base) not in self._names and address not in self._local:
            parameters = [(fqn, p, local_of(p)) for fqn, p in self._model.named_parameters()]
            self._names = {id(each): fqn for fqn, *both in parameters for each in both}
            shards = [(fqn, local) for fqn, p, local in parameters if local is not p and local.numel()]
            self._local = {values_of(shard).data_ptr(): fqn for fqn, shard in shards}
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
                now.add((name, OPERANDS[operand], side, format), sums)

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

    __str__ = table

    def plot(self, path: str | os.PathLike[str], figure: str = "sqnr_db", title: str | None = None) -> Path:
        """Draw a heat map of all measurements: layers over steps, one panel for each copy of an operand.

        ``figure``: ``sqnr_db``, ``saturated`` or ``underflowed``. The suffix of ``path`` chooses the file type (png if
        there is none); its folder is created. Returns the path. Raises ValueError for another figure or without a
        measurement, IsADirectoryError for a folder, ImportError without matplotlib.
        """
        check("plot", "path", path, FILE)
        check("plot", "figure", figure, TEXT)
        check("plot", "title", title, optional(TEXT))
        if figure not in FIGURES:
            raise ValueError(f"plot: figure is {figure!r}; choose one of {', '.join(FIGURES)}")
        figure_of, rows = new_figure("plot"), self.history()
        if not rows:
            raise ValueError("plot: nothing was measured; train a layer with a recipe in eager code, then call step()")
        label, _, colors = FIGURES[figure]
        fqns, steps = list(dict.fromkeys(row.fqn for row in rows)), sorted({row.step for row in rows})
        panels = [(o, s, [r for r in rows if (r.operand, r.side) == (o, s)]) for o in OPERANDS for s in SIDES]
        panels = [panel for panel in panels if panel[2]]
        grids = [grid_of(chosen, figure, fqns, steps) for _, _, chosen in panels]
        finite = [value for grid in grids for line in grid for value in line if math.isfinite(value)] or [0.0]
        height = min(1.9 + 0.19 * len(fqns), MOST_INCHES)
        picture = figure_of(figsize=(2.6 + 1.75 * len(panels), max(height, 3.0)), layout="constrained")
        image: Any = None
        grid_axes = picture.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (operand, side, _), grid in zip(grid_axes, panels, grids, strict=True):
            image = axes.imshow(
                grid, aspect="auto", interpolation="nearest", cmap=colors, vmin=min(finite), vmax=max(finite)
            )  # fmt: skip
            axes.set_title(f"{operand}\n{side}", fontsize=9)
            shown = sorted({0, len(steps) // 2, len(steps) - 1})
            axes.set_xticks(shown, [str(steps[i]) for i in shown], fontsize=8)
            axes.tick_params(length=0)
        grid_axes[0].set_yticks(range(len(fqns)), short_names(fqns), fontsize=7 if len(fqns) > 40 else 8)
        picture.supxlabel("step", fontsize=9)
        picture.colorbar(image, ax=list(grid_axes), label=label, fraction=0.04, pad=0.01)
        if title is not None:
            picture.suptitle(title, fontsize=12)
        path = file_of_plot(path)
        picture.savefig(path, dpi=150)
        return path

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


def grid_of(rows: Sequence[MonitorRow], figure: str, fqns: Sequence[str], steps: Sequence[int]) -> list[list[float]]:
    """The figure of each layer (rows) in each step (columns), in the unit of the picture; nan where there is none."""
    layers, places = ({name: i for i, name in enumerate(names)} for names in (fqns, steps))
    grid = [[math.nan] * len(steps) for _ in fqns]
    for row in rows:
        value = getattr(row, figure) * FIGURES[figure][1]
        if math.isfinite(value):
            grid[layers[row.fqn]][places[row.step]] = value
    return grid


def monitor(model: nn.Module, every: int = 100) -> Monitor:
    """Measure the errors of the casts of inputs, weights and gradients, in one of ``every`` training steps.

    Call ``step()`` of the result after each step of the optimizer; then ``rows()``, ``print``, ``to_tensorboard`` and
    ``plot`` show fractions of saturated and underflowed values and the SQNR in dB, for each layer, operand and copy.
    Measures every linear layer that trains quantized, by ``quantize_``, ``autocast`` or ``mxtensor.te``, in eager code.
    Not measured are layers in a compiled graph, weights that are computed in each step, and layers of tensor
    parallelism whose ranks share a scale (NVFP4, float8 per tensor). A measured step casts each operand once more and
    needs memory for three float32 copies of the largest one. Results, gradients and random numbers of the
    training do not change, and nothing synchronizes with the device until a result is read. Rows are those of this
    rank.

    Ends with ``close()``, at the end of a ``with`` block, or when the monitor is no longer referenced. Raises TypeError
    for an object that is not a module, ValueError for ``every`` below 1.
    """
    check("monitor", "model", model, MODULE)
    check("monitor", "every", every, COUNT)
    return Monitor(model, every)
