"""Optimizers for quantized weights: any torch optimizer, stepping float32 master weights.

A learning rate's worth of change is mostly smaller than the distance of two codes, so that an optimizer that writes
codes stands still. Here it steps a float32 copy of each MXTensor parameter, from which the codes are made anew.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..tensor.mxtensor import MXTensor
from .training_weight import local_of, sharded_like, values_of

MASTER = "master_weight"
"""The master's name in ``state`` and ``state_dict``, beside the moments of its parameter."""

_HAS_MASTER: dict[str, Callable[[Tensor], bool]] = {
    "quantized": lambda p: isinstance(local_of(p), MXTensor),
    "all": lambda p: isinstance(local_of(p), MXTensor) or (p.is_floating_point() and p.itemsize < 4),
}


class MasterWeights(Optimizer):
    """``MasterWeights(torch.optim.AdamW, params, lr=...)``: the optimizer over master weights of quantized parameters.

    ``params`` and the other arguments are those of the optimizer class; ``master_weights_for="all"`` gives bfloat16 and
    float16 parameters masters too. Other parameters are stepped as they are. A master is float32 (float64 for a float64
    parameter) and starts as ``weight.get_high_precision_init_val()`` where that was preserved, else as the values of
    the parameter. After each step the parameter is quantized in place from it, every copy from the same values.

    To schedulers, ``torch.amp.GradScaler``, clipping, hooks and closures this is the optimizer of the model's own
    parameters: ``param_groups`` holds those, ``state[p]["master_weight"]`` the masters (from the first step on),
    ``optimizer`` the optimizer inside. ``state_dict`` is that of the class with the masters in it.

    Elements of a parameter that somebody else has written since the last step are taken over into the master, the
    others keep theirs: a model's checkpoint may be loaded before or after the optimizer's. (With stochastic rounding of
    the weights that cannot be told: load the model first; and masters start as the values. Writes through ``.data`` are
    hidden by torch from here too: write inside ``torch.no_grad()``.)

    Raises ValueError for a ``master_weights_for`` it does not know and for ``differentiable=True``, and what the class
    raises.
    """

    def __init__(
        self, optimizer_class: type[Optimizer], params: Any, *args: Any,
        master_weights_for: str = "quantized", **kwargs: Any,
    ) -> None:  # fmt: skip
        if master_weights_for not in _HAS_MASTER:
            raise ValueError(f"master_weights_for is {master_weights_for!r}; choose {' or '.join(_HAS_MASTER)}")
        if kwargs.get("differentiable"):
            raise ValueError("differentiable=True: no gradient goes through the rounding of master weights; leave it")
        self._for = master_weights_for
        self._masters: dict[Tensor, Tensor] = {}
        self._written: dict[Tensor, int] = {}  # parameter -> its version when it last was what its master says
        self.optimizer: Optimizer | None = None
        super().__init__(params, {})
        self.optimizer = optimizer_class([self._inside(group) for group in self.param_groups], *args, **kwargs)
        self.defaults = self.optimizer.defaults
        self._show()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self.optimizer is None:  # torch's own __init__ calls this
            return
        try:
            self.optimizer.add_param_group(self._inside(self.param_groups[-1]))
        except Exception:
            for p in self.param_groups.pop()["params"]:
                self._masters.pop(p, None)
            raise
        self._show()

    def _inside(self, group: dict[str, Any]) -> dict[str, Any]:
        """A group as the optimizer inside gets it."""
        params: Iterable[Any] = [self._stepped(p) for p in group["params"]]
        if "param_names" in group:
            params = zip(group["param_names"], params, strict=True)
        return {**group, "params": list(params)}

    def _stepped(self, p: Tensor) -> Tensor:
        """What is stepped for ``p``: its master, or ``p`` itself."""
        if not _HAS_MASTER[self._for](p):
            return p
        if p not in self._masters:
            values = _values(p)
            preserved = getattr(p, "get_high_precision_init_val", lambda: None)()
            if preserved is not None:
                values = _refined(p, values, preserved.to(values.device, values.dtype))
            self._masters[p] = torch.nn.Parameter(values)
            self._written[p] = p._version
        return self._masters[p]

    # ------------------------------------------------------------------------------------------ one step

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the optimizer inside; a closure sees the model with the values that the masters have by then."""
        assert self.optimizer is not None
        self._hide()
        for p, master in self._masters.items():
            if p._version != self._written[p]:
                master.copy_(_refined(p, _values(p), master))
                self._written[p] = p._version
        self._take_gradients()
        loss = self.optimizer.step() if closure is None else self.optimizer.step(self._evaluating(closure))
        self._write()
        for master in self._masters.values():
            master.grad = None
        self._show()
        return loss

    def _evaluating(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        calls = 0

        def evaluate() -> Any:
            nonlocal calls
            if calls:  # the masters have moved since (LBFGS)
                self._write()
            calls += 1
            with torch.enable_grad():
                loss = closure()
            self._take_gradients()
            return loss

        return evaluate

    def _take_gradients(self) -> None:
        for p, master in self._masters.items():
            master.grad = None if p.grad is None else p.grad.to(master.dtype)

    @torch.no_grad()
    def _write(self) -> None:
        """Make parameters of the masters that were stepped."""
        for p, master in self._masters.items():
            if master.grad is not None:
                p.copy_(master)
                self._written[p] = p._version

    # ------------------------------------------------------------------------------------------ two faces

    def _groups(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        assert self.optimizer is not None
        return zip(self.param_groups, self.optimizer.param_groups, strict=True)

    def _hide(self) -> None:
        """Hyperparameters that schedulers or users have changed here go inside."""
        for mine, inside in self._groups():
            inside.update({name: value for name, value in mine.items() if name != "params"})

    def _show(self) -> None:
        """Hyperparameters and states of the optimizer inside are seen here, by the model's parameters."""
        for mine, inside in self._groups():
            mine.update({name: value for name, value in inside.items() if name != "params"})
        self.state = self._states()

    def _states(self) -> defaultdict[Tensor, Any]:
        assert self.optimizer is not None
        owners = {master: p for p, master in self._masters.items()}
        states: defaultdict[Tensor, Any] = defaultdict(dict)
        for stepped, state in self.optimizer.state.items():
            p = owners.get(stepped)
            states[stepped if p is None else p] = state if p is None else {**state, MASTER: stepped.detach()}
        return states

    # ------------------------------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The state dict of the optimizer inside; of every parameter that has a master also ``master_weight``."""
        shown = self.state
        self.state = self._states()
        for p, master in self._masters.items():  # before the first step a master is all there is
            self.state[p].setdefault(MASTER, master.detach())
        try:
            return super().state_dict()
        finally:
            self.state = shown

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` gave: training goes on to the bit as it would have.

        The state dict of a plain torch optimizer loads too; masters then start again from the parameters. Raises
        ValueError where groups, or the shape of a master, do not fit, with nothing changed.
        """
        assert self.optimizer is not None
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        entries = {key: dict(entry) if isinstance(entry, dict) else entry for key, entry in state_dict["state"].items()}
        saved = {
            key: entry.pop(MASTER) for key, entry in entries.items() if isinstance(entry, dict) and MASTER in entry
        }
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for key, p in zip(keys, params, strict=False):  # numbers that differ are the optimizer's to complain of
            if key in saved and saved[key].shape != p.shape:
                raise ValueError(
                    f"the {MASTER} of parameter {key} has shape {tuple(saved[key].shape)}, the parameter "
                    f"{tuple(p.shape)}; load the state of the same model"
                )
        entries = {key: entry for key, entry in entries.items() if entry or key not in saved}
        self.optimizer.load_state_dict({**state_dict, "state": entries})
        for key, p in zip(keys, params, strict=True):
            if p in self._masters:
                self._masters[p].copy_(saved[key] if key in saved else _values(p))
                self._written[p] = p._version
        self._show()
        for done in self._optimizer_load_state_dict_post_hooks.values():
            done(self)

    def __getstate__(self) -> dict[str, Any]:
        mine = {name: self.__dict__[name] for name in ("optimizer", "_for", "_masters")}
        return {**super().__getstate__(), **mine, "_written": dict.fromkeys(self._masters, -1)}


def _values(p: Tensor) -> Tensor:
    """The values that a parameter stands for, in the dtype of a master."""
    dtype = torch.promote_types(p.dtype, torch.float32)
    local = local_of(p.detach())
    values = local.dequantize(dtype) if isinstance(local, MXTensor) else values_of(local).to(dtype)
    return sharded_like(p, values)


def _refined(p: Tensor, values: Tensor, candidate: Tensor) -> Tensor:
    """``candidate`` where it rounds to what ``p`` holds, else ``values``, those of ``p``."""
    rounded = _values(p.detach().clone().copy_(candidate.detach()))
    return torch.where(rounded == values, candidate, values)


def _over_masters(optimizer_class: type[Optimizer]) -> type[MasterWeights]:
    def init(self: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        MasterWeights.__init__(self, optimizer_class, params, *args, **kwargs)

    name = optimizer_class.__name__
    doc = f"``torch.optim.{name}`` over master weights: its arguments, and those of :class:`MasterWeights`."
    return type(name, (MasterWeights,), {"__init__": init, "__doc__": doc, "__module__": __name__})


def _names() -> list[str]:
    """The optimizer classes that this torch has."""
    kinds = {name: kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    return sorted(name for name, kind in kinds.items() if issubclass(kind, Optimizer) and kind is not Optimizer)


def __getattr__(name: str) -> type[MasterWeights]:
    """``mxtensor.optim.AdamW`` and every other class of torch.optim, made when it is first asked for."""
    if name not in _names():
        raise AttributeError(
            f"mxtensor.optim has no {name!r}; it has MasterWeights, which takes any optimizer class, and "
            f"{', '.join(_names())}"
        )
    made = globals()[name] = _over_masters(getattr(torch.optim, name))
    return made


def __dir__() -> list[str]:
    return ["MasterWeights", *_names()]
