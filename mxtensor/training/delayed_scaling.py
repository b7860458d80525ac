"""Delayed scaling: the state of one linear layer, with three amax histories and the scales from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.compat import in_backward
from ..core.compat_compile import break_at_checkpoint
from ..kernels.quantize.amax_history import advance
from ..recipe.linear_recipe import LinearRecipe
from .recompute import OPEN, Checkpoint, Pass, in_first_pass, open_passes

# ---------------------------------------------------------------------------------------------- the scales of a step


class Scales(NamedTuple):
    """Delayed scaling: float32 (3,), one value for each of input, weight and grad."""

    amax: Tensor
    """gives the scales of this step"""
    record: Tensor
    """becomes the larger of its value and the amax of this step"""
    grad_record: Tensor | None = None
    """what the backward pass writes instead; None: ``record``"""


INPUT, WEIGHT, GRAD = range(3)


def scales_of(scales: Scales | None, index: int) -> tuple[Tensor, ...]:
    """The amax and the record of delayed scaling for the cast of a tensor in its first pass: of an input or a weight in
    the forward pass, of a gradient in the backward pass. Empty without delayed scaling."""
    if scales is None:
        return ()
    record = scales.grad_record if index == GRAD and scales.grad_record is not None else scales.record
    return scales.amax.select(0, index), record.select(0, index)


def amax_of(scales: Scales | None, index: int) -> tuple[Tensor, ...]:
    """``scales_of`` for the cast of an input or a weight in the backward pass: the forward pass has recorded it, and
    later steps may have read the record since."""
    return () if scales is None else (scales.amax.select(0, index),)


# ------------------------------------------------------------------------------------------- the attributes of a weight

# The amax histories of a layer are attributes of its weight. A view of a weight has the same histories, a copy has
# copies of them. FSDP2 makes a new tensor of what it gathers of a weight; its histories are those of the shard, which
# the module, its state dict and ``share_amax`` see between steps.

aten = torch.ops.aten

STATE = "_mxtensor_delayed_state"
"""The attribute of a weight that stores the DelayedState of its layer."""
LOADED = "_mxtensor_loaded_state"
"""The attribute of a plain weight that stores the tensors of a loaded state, until a recipe is known; then the name
goes on as that of STATE does."""
OWNER = "_mxtensor_history_owner"
"""The attribute of a gathered weight, and of views of it, that stores the shard."""
GATHERS = {aten.index.Tensor, aten.index_select.default}
"""Ops whose results are stacks of some of the matrices of a stack, in any order, and weights too."""
COPIES = {aten.clone.default, aten._to_copy.default}
SHARDS = {aten.new_zeros.default}
"""Ops whose results get the amax history of delayed scaling: a copy of it, or, as all views do, the same one. FSDP2
makes a shard by ``new_zeros``."""


def owner_of(weight: Tensor) -> Tensor:
    """The tensor whose attributes are the histories of ``weight``: itself, or the shard of a gathered weight."""
    owner: Tensor = getattr(weight, OWNER, weight)
    return owner


def delayed_states(weight: Tensor) -> dict[str, Any]:
    """Name of the attribute -> DelayedState, of all layers that ``weight`` serves: it, and slices of it."""
    return {name: state for name, state in vars(owner_of(weight)).items() if name.startswith(STATE)}


def with_states(out: Tensor, weight: Tensor, func: Any) -> Any:
    """``out``, the result of ``func``, with the histories of ``weight`` if it stands for the same weight."""
    if func in COPIES or func in SHARDS or func in GATHERS or func.is_view:
        owner = owner_of(weight)
        if owner is not weight and func not in COPIES:
            setattr(out, OWNER, owner)
            return out
        for name, state in delayed_states(weight).items():
            setattr(out, name, state.to(out.device) if func in COPIES else state)
    return out


# ---------------------------------------------------------------------------------------------- delayed scaling

DELAYED = ("history", "record", "amax")
"""The tensors of a DelayedState that change from step to step."""


@dataclass
class _Rewound:
    """What a layer starts from in a recomputation."""

    history: Tensor
    amax: Tensor
    record: Tensor
    """Of the forward pass, which has been recorded already: nobody reads what is added."""
    steps: Iterator[bool]
    """Whether each call is a step."""
    grad_record: Tensor | None = None
    used: bool = False


class _Note:
    """What a checkpoint keeps of a layer: what its first pass found, and whether each call was a step."""

    def __init__(self, history: Tensor, amax: Tensor) -> None:
        self.history, self.amax, self.steps = history, amax, list[bool]()
        self.following: Tensor | None = None
        """The history after the first step, whose newest row is the record of that time."""

    def add(self, counts: bool, following: Tensor) -> None:
        """Note a call, and the history after it."""
        self.steps.append(counts)
        if counts and self.following is None:
            self.following = following

    def rewound(self) -> _Rewound:
        """The same for one recomputation."""
        record = torch.zeros_like(self.amax) if self.following is None else self.following[0].clone()
        return _Rewound(self.history, self.amax, record, iter(self.steps))


class DelayedState:
    """The amax histories of input, weight and grad of one layer: (history_len, 3) float32 with the newest row first.

    Each forward pass calls ``step`` once: the amax recorded by the casts of the last step enters the history, and the
    history gives the amax of this step. TransformerEngine does the same at the end of its autocast.
    """

    @torch.inference_mode(False)  # training may continue with a state that an evaluation created
    def __init__(self, linear_recipe: LinearRecipe, device: torch.device) -> None:
        assert linear_recipe.delayed is not None
        self.linear_recipe, self.delayed = linear_recipe, linear_recipe.delayed
        casts = (casts.rowwise for casts in (linear_recipe.input, linear_recipe.weight, linear_recipe.grad))
        maxima = [cast.format.element.max if cast else 1.0 for cast in casts]
        self.maxima = torch.tensor(maxima, dtype=torch.float32, device=device)
        self.history = torch.zeros(linear_recipe.delayed.history_len, 3, dtype=torch.float32, device=device)
        self.record = torch.zeros(3, dtype=torch.float32, device=device)
        self.amax = self.maxima.clone()
        self.layer = object()
        """Stands for the layer, in this state and in those that continue it."""

    @property
    def scale(self) -> Tensor:
        """fp8_max / amax (3,): values are multiplied by it before they are rounded."""
        return self.maxima / self.amax

    def step(self, group: object = None) -> Scales:
        """The scales of this forward pass and of its backward pass.

        A pass without gradients leaves the history unchanged. A recomputation by torch.utils.checkpoint runs from the
        history that its first pass found, and leaves the present one unchanged; one that another function makes inside
        a backward pass leaves it unchanged, too, and uses the newest scales.
        """
        if torch.compiler.is_dynamo_compiling():
            return self._traced_step(group)
        firsts, around = open_passes()
        rewound = None if around is None else self._rewind(around)
        reads = not torch.is_grad_enabled() and not in_first_pass()
        counts = not (reads or in_backward()) if rewound is None else next(rewound.steps, False)
        notes = [self._note(first.checkpoint) for first in firsts]
        if counts:
            if rewound is None:
                self._reduce(group)
            self._advance()
        for note in notes:
            note.add(counts, self.history)
        record = torch.zeros_like(self.record) if reads else self.record
        return Scales(self.amax, record, None if rewound is None else rewound.grad_record)

    def _traced_step(self, group: object) -> Scales:
        """``step`` in a compiled graph, outside of checkpoints."""
        if OPEN["passes"]:
            break_at_checkpoint()
        if not torch.is_grad_enabled():
            return Scales(self.amax, torch.zeros_like(self.record))
        self._reduce(group)
        self._advance()
        return Scales(self.amax, self.record)

    def _reduce(self, group: object) -> None:
        """Share the record with the other ranks of the group."""
        if group is not None and self.delayed.reduce:
            torch.distributed.all_reduce(self.record, torch.distributed.ReduceOp.MAX, group=group)

    def _note(self, checkpoint: Checkpoint) -> _Note:
        """What a checkpoint keeps of this layer."""
        note = checkpoint.notes.get(self.layer)
        if note is None:
            note = checkpoint.notes[self.layer] = _Note(self.history, self.amax)
        assert isinstance(note, _Note)
        return note

    def _rewind(self, recomputation: Pass) -> _Rewound:
        """Go back to what the first pass found, until the recomputation ends. A layer that was not in the first pass
        has its newest scales."""
        found: _Rewound | None = recomputation.found.get(self.layer)
        if found is None:
            found = recomputation.found[self.layer] = _Note(self.history, self.amax).rewound()
        if found.used:
            return found
        present = self.history, self.amax, self.record

        def restore() -> None:
            self.history, self.amax, self.record = present

        found.used = True
        if recomputation.checkpoint.reentrant:  # its graph gets the gradient; that of another checkpoint is thrown away
            found.grad_record = self.record
        self.history, self.amax, self.record = found.history, found.amax, found.record
        recomputation.at_end.append(restore)
        return found

    def _advance(self) -> None:
        """Move the recorded amax into the history and compute the amax of this step from it.

        If the result is zero or not finite, the last amax stays. ``record`` is zeroed in place, because later backward
        passes write to it.
        """
        delayed = self.delayed
        margin = 2.0**delayed.margin
        newest = delayed.amax_of == "most_recent"
        last = self.amax
        self.history, self.amax = advance(self.history, self.record, last, margin, newest)
        if isinstance(delayed.amax_of, str) and delayed.scale_of is None:
            return
        if isinstance(delayed.amax_of, str):
            amax = self.history[0] if newest else self.history.amax(0)
        else:
            amax = torch.stack([delayed.amax_of(self.history[:, i]).reshape(()) for i in range(3)])
        usable = (amax > 0) & amax.isfinite()
        if delayed.scale_of is None:
            amax = amax * margin
        else:
            scale, maxima = self.maxima / last, self.maxima
            scales = [delayed.scale_of(amax[i], scale[i], maxima[i], delayed).reshape(()) for i in range(3)]
            amax = maxima / torch.stack(scales)
        self.amax = torch.where(usable, amax, last)

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors for a checkpoint."""
        return {name: getattr(self, name) for name in DELAYED}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load copies of the tensors of ``state_dict``. Raises ValueError, with nothing changed, for a history of
        another length and for missing tensors."""
        missing = [name for name in DELAYED if name not in state]
        if missing:
            raise ValueError(f"the checkpoint's state of delayed scaling has no {', '.join(missing)}; load a whole one")
        if state["history"].shape != self.history.shape:
            raise ValueError(
                f"the checkpoint's amax history is {tuple(state['history'].shape)}, the recipe's "
                f"{tuple(self.history.shape)}; use amax_history_len={state['history'].shape[0]}"
            )
        for name, mine in ((name, getattr(self, name)) for name in DELAYED):
            if state[name].dtype is not torch.float32 or state[name].shape != mine.shape:
                raise ValueError(
                    f"the checkpoint's {name} is {state[name].dtype} {tuple(state[name].shape)}, delayed scaling's is "
                    f"torch.float32 {tuple(mine.shape)}; load the state of the same layer"
                )
        for name in DELAYED:
            setattr(self, name, state[name].detach().to(self.history.device, copy=True))

    @torch.inference_mode(False)
    @torch.no_grad()
    def under(self, linear_recipe: LinearRecipe, device: torch.device) -> DelayedState:
        """The state that continues this one under another recipe of delayed scaling, as in TransformerEngine: with the
        newest rows of the history that fit, and the present amax. A backward pass still to come records in both.
        """
        out = DelayedState(linear_recipe, device)
        if self.history.is_meta or torch.device(device).type == "meta":
            return out
        out.layer = self.layer
        rows = min(len(self.history), len(out.history))
        out.history[:rows] = self.history[:rows]
        out.record = self.record.to(device)
        more = 2.0 ** (out.delayed.margin - self.delayed.margin)
        started = (self.amax != self.maxima).to(device)
        out.amax = torch.where(started, self.amax.to(device) * more, out.maxima)
        return out

    def __getstate__(self) -> dict[str, Any]:
        """A copy is the state of another layer."""
        return self.__dict__ | {"layer": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, layer=object())

    def to(self, device: torch.device) -> DelayedState:
        """A copy on ``device``; a new state if this one has no values, on the meta device."""
        with torch.inference_mode(False):  # as in __init__
            out = DelayedState(self.linear_recipe, device)
            if not self.history.is_meta or torch.device(device).type == "meta":
                out.load_state_dict(self.state_dict())
        return out
