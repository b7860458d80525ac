"""Optimizers for quantized weights: any torch optimizer over float32 master weights.

One update is mostly smaller than the distance between two codes, so an optimizer that writes codes makes no progress.
Here the optimizer updates a float32 copy of each MXTensor parameter, and the codes are quantized from that copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core.arguments import FUNCTION, NUMBER, Kind, check, described, instance, optional
from ..core.compat import local_of, sharded_like
from ..tensor.mxtensor import MXTensor
from .training_weight import values_of

MASTER = "master_weight"
"""The name of the master weight in ``state`` and ``state_dict``, beside the moments of its parameter."""

_HAS_MASTER: dict[str, Callable[[Tensor], bool]] = {
    "quantized": lambda p: isinstance(local_of(p), MXTensor),
    "all": lambda p: isinstance(local_of(p), MXTensor) or (p.is_floating_point() and p.itemsize < 4),
}


OPTIMIZER = Kind(
    "a class of torch.optim, such as torch.optim.AdamW",
    lambda kind: isinstance(kind, type) and issubclass(kind, Optimizer),
)
RATE = Kind("a number or a tensor with one", lambda lr: isinstance(lr, Tensor) or NUMBER.accepts(lr))
PARAMS = Kind(
    "the parameters of a model, or a list of groups",
    lambda params: isinstance(params, Iterable) and not isinstance(params, (Tensor, str, bytes)),
)
STATE = instance(
    dict,
    "a result of state_dict(), with 'state' and 'param_groups'",
    lambda state: {"state", "param_groups"} <= state.keys(),
)
GROUP = instance(dict, "a dictionary with the key 'params'", lambda group: "params" in group)


class MasterWeights(Optimizer):
    """``MasterWeights(torch.optim.AdamW, params, lr=...)``: the optimizer over master weights of quantized parameters.

    ``params`` and the other arguments are those of the optimizer class. ``master_weights_for="all"`` gives bfloat16 and
    float16 parameters master weights too. All other parameters are updated directly. A master weight is float32
    (float64 for a float64 parameter). It starts as ``weight.get_high_precision_init_val()`` if that was preserved, else
    as the values of the parameter. After each step the parameter is quantized in place from its master weight, every
    copy from the same values.

    Schedulers, ``torch.amp.GradScaler``, clipping, hooks and closures see an optimizer of the model's own parameters:
    ``param_groups`` has these, ``state[p]["master_weight"]`` the master weights (from the first step on), ``optimizer``
    the inner optimizer. ``state_dict`` is that of the class with the master weights added.

    If another writer changes elements of a parameter between steps, the master weight takes the new values of these
    elements and keeps the others, so a model's checkpoint may be loaded before or after the optimizer's. Two limits:
    with stochastic rounding of the weights a change cannot be detected (load the model first; master weights start as
    the values), and torch does not report writes through ``.data`` (write inside ``torch.no_grad()``).

    Raises ValueError for an unknown ``master_weights_for`` and for ``differentiable=True``, and what the class raises.
    """

    def __init__(
        self, optimizer_class: type[Optimizer], params: Any, *args: Any,
        master_weights_for: str = "quantized", **kwargs: Any,
    ) -> None:  # fmt: skip
        check("MasterWeights", "optimizer_class", optimizer_class, OPTIMIZER)
        check(optimizer_class.__name__, "params", params, PARAMS)
        if not isinstance(master_weights_for, str) or master_weights_for not in _HAS_MASTER:
            raise ValueError(
                f"master_weights_for is {described(master_weights_for)}; choose {' or '.join(_HAS_MASTER)}"
            )
        if "lr" in kwargs:
            check(optimizer_class.__name__, "lr", kwargs["lr"], RATE)
        if kwargs.get("differentiable"):
            raise ValueError("differentiable=True: master weights are rounded, which has no gradient; leave it False")
        self._for = master_weights_for
        self._masters: dict[Tensor, Tensor] = {}
        self._written: dict[Tensor, int] = {}  # parameter -> its version after the last write here
        self.optimizer: Optimizer | None = None
        super().__init__(params, {})
        self.optimizer = optimizer_class([self._inside(group) for group in self.param_groups], *args, **kwargs)
        self.defaults = self.optimizer.defaults
        self._copy_out()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        check("add_param_group", "param_group", param_group, GROUP)
        super().add_param_group(param_group)
        if self.optimizer is None:  # torch's own __init__ calls this
            return
        try:
            self.optimizer.add_param_group(self._inside(self.param_groups[-1]))
        except Exception:
            for p in self.param_groups.pop()["params"]:
                self._masters.pop(p, None)
            raise
        self._copy_out()

    def _inside(self, group: dict[str, Any]) -> dict[str, Any]:
        """A parameter group for the inner optimizer."""
        params: Iterable[Any] = [self._inner_parameter(p) for p in group["params"]]
        if "param_names" in group:
            params = zip(group["param_names"], params, strict=True)
        return {**group, "params": list(params)}

    def _inner_parameter(self, p: Tensor) -> Tensor:
        """The tensor that the inner optimizer updates for ``p``: its master weight, or ``p`` itself."""
        if not _HAS_MASTER[self._for](p):
            return p
        if p not in self._masters:
            values = values_of_parameter(p)
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
        """One step of the inner optimizer. A closure sees the model with the current values of the master weights."""
        assert self.optimizer is not None
        check("step", "closure", closure, optional(FUNCTION))
        self._copy_in()
        for p, master in self._masters.items():
            if p._version != self._written[p]:
                master.copy_(_refined(p, values_of_parameter(p), master))
                self._written[p] = p._version
        self._take_gradients()
        loss = self.optimizer.step() if closure is None else self.optimizer.step(self._evaluating(closure))
        self._write()
        for master in self._masters.values():
            master.grad = None
        self._copy_out()
        return loss

    def _evaluating(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        calls = 0

        def evaluate() -> Any:
            nonlocal calls
            if calls:  # the master weights have changed since (LBFGS)
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
        """Quantize the parameters from the master weights that have a gradient."""
        for p, master in self._masters.items():
            if master.grad is not None:
                p.copy_(master)
                self._written[p] = p._version

    # ------------------------------------------------------------------------------------------ outer and inner

    def _groups(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        assert self.optimizer is not None
        return zip(self.param_groups, self.optimizer.param_groups, strict=True)

    def _copy_in(self) -> None:
        """Copy the hyperparameters to the inner optimizer: schedulers change those of the outer param_groups."""
        for mine, inside in self._groups():
            inside.update({name: value for name, value in mine.items() if name != "params"})

    def _copy_out(self) -> None:
        """Copy hyperparameters and states of the inner optimizer out, under the model's parameters."""
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
        """The state dict of the inner optimizer, with ``master_weight`` for every parameter that has one."""
        shown = self.state
        self.state = self._states()
        for p, master in self._masters.items():  # before the first step there is no other state
            self.state[p].setdefault(MASTER, master.detach())
        try:
            return super().state_dict()
        finally:
            self.state = shown

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of ``state_dict``: training continues bitwise identically.

        The state dict of a plain torch optimizer loads too; master weights then start from the parameters. Raises
        ValueError for groups, or the shape of a master weight, that do not fit; nothing has changed then.
        """
        assert self.optimizer is not None
        check("load_state_dict", "state_dict", state_dict, STATE)
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
        for key, p in zip(keys, params, strict=False):  # the inner optimizer reports different numbers of parameters
            if key in saved and saved[key].shape != p.shape:
                raise ValueError(
                    f"the {MASTER} of parameter {key} has shape {tuple(saved[key].shape)}, the parameter "
                    f"{tuple(p.shape)}; load the state of the same model"
                )
        entries = {key: entry for key, entry in entries.items() if entry or key not in saved}
        self.optimizer.load_state_dict({**state_dict, "state": entries})
        for key, p in zip(keys, params, strict=True):
            if p in self._masters:
                self._masters[p].copy_(saved[key] if key in saved else values_of_parameter(p))
                self._written[p] = p._version
        self._copy_out()
        for done in self._optimizer_load_state_dict_post_hooks.values():
            done(self)

    def __getstate__(self) -> dict[str, Any]:
        mine = {name: self.__dict__[name] for name in ("optimizer", "_for", "_masters")}
        return {**super().__getstate__(), **mine, "_written": dict.fromkeys(self._masters, -1)}


def values_of_parameter(p: Tensor) -> Tensor:
    """The dequantized values of a parameter, in the dtype of a master weight."""
    dtype = torch.promote_types(p.dtype, torch.float32)
    local = local_of(p.detach())
    values = local.dequantize(dtype) if isinstance(local, MXTensor) else values_of(local).to(dtype)
    return sharded_like(p, values)


def _refined(p: Tensor, values: Tensor, candidate: Tensor) -> Tensor:
    """``candidate`` for each element that rounds to the present value of ``p``; ``values`` of ``p`` for the others."""
    rounded = values_of_parameter(p.detach().clone().copy_(candidate.detach()))
    return torch.where(rounded == values, candidate, values)


def _over_masters(optimizer_class: type[Optimizer]) -> type[MasterWeights]:
    def init(self: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        MasterWeights.__init__(self, optimizer_class, params, *args, **kwargs)

    name = optimizer_class.__name__
    doc = f"``torch.optim.{name}`` over master weights, with its arguments and those of :class:`MasterWeights`."
    return type(name, (MasterWeights,), {"__init__": init, "__doc__": doc, "__module__": __name__})


def _names() -> list[str]:
    """The names of the optimizer classes of this torch."""
    kinds = {name: kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    return sorted(name for name, kind in kinds.items() if issubclass(kind, Optimizer) and kind is not Optimizer)


def __getattr__(name: str) -> type[MasterWeights]:
    """``mxtensor.optim.AdamW`` and every other class of torch.optim, created on first use."""
    if name not in _names():
        raise AttributeError(
            f"mxtensor.optim has no {name!r}; it has MasterWeights, which takes any optimizer class, "
            f"{', '.join(_names())}; TransformerEngine's FusedAdam is in mxtensor.te"
        )
    made = globals()[name] = _over_masters(getattr(torch.optim, name))
    return made


def __dir__() -> list[str]:
    return ["MasterWeights", *_names()]
