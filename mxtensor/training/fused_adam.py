"""TransformerEngine's ``FusedAdam`` with its dtypes of states, in plain torch, on any device.

Arithmetic is float32, one parameter after the other: memory holds float32 copies of the states of one parameter only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core.arguments import FUNCTION, check, described, instance, optional
from ..core.local import local_of, sharded_like
from ..tensor.mxtensor import MXTensor
from .optimizer_states import decode_state, encode_state, join_master, scale_of, split_master, values_of_parameter
from .training_weight import values_of

STATE = instance(
    dict,
    "a result of state_dict(), with 'state' and 'param_groups'",
    lambda state: {"state", "param_groups"} <= state.keys(),
)
MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master_param"
SCALES = "scales"
DTYPES = {
    "exp_avg_dtype": (torch.float32, torch.float16, torch.bfloat16, torch.uint8),
    "exp_avg_sq_dtype": (torch.float32, torch.float16, torch.bfloat16, torch.uint8),
    "master_weight_dtype": (torch.float32, torch.float16),
}
"""Argument -> the dtypes that TransformerEngine takes for it."""


class FusedAdam(Optimizer):
    """Adam whose moments and master weights may have fewer than 32 bits, with TransformerEngine's arguments and states.

    ``exp_avg_dtype``, ``exp_avg_sq_dtype``: float32, bfloat16, float16, or uint8 for E4M3; float16 and uint8 have one
    float32 scale for each parameter, which is chosen anew in each step. ``master_weights=True``: bfloat16, float16 and
    quantized parameters are rounded from master weights in ``master_weight_dtype``, float32 or float16 with a scale.
    ``store_param_remainders=True``: a bfloat16 parameter is the upper half of its float32 master weight, and the state
    has the lower half only, int16; the parameter is then rounded halves up. ``adam_w_mode=False``: weight decay is
    added to the gradient. ``use_decoupled_grad=True``: gradients are read from ``decoupled_grad`` of the parameters.

    ``state_dict`` has float32 moments and master weights (int16 remainders), as in TransformerEngine, whose own state
    dicts load; it also has ``scales``, with which training continues bitwise identically. Master weights start as the
    values of the parameters in the first step: load a model's checkpoint before. A parameter that another writer
    changes later is overwritten from its master weight.

    Raises ValueError for other dtypes, for quantized parameters without master weights and for states that do not fit,
    NotImplementedError for ``amsgrad`` and ``capturable``.
    """

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, amsgrad: bool = False, *, bias_correction: bool = True, adam_w_mode: bool = True,
        capturable: bool = False, master_weights: bool = False, master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32, exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False, store_param_remainders: bool = False,
    ) -> None:  # fmt: skip
        given = {
            "exp_avg_dtype": exp_avg_dtype, "exp_avg_sq_dtype": exp_avg_sq_dtype,
            "master_weight_dtype": master_weight_dtype,
        }  # fmt: skip
        for name, dtype in given.items():
            if dtype not in DTYPES[name]:
                raise ValueError(f"FusedAdam: {name} is {described(dtype)}; choose {', '.join(map(str, DTYPES[name]))}")
        for name, wanted in (("amsgrad", amsgrad), ("capturable", capturable)):
            if wanted:
                raise NotImplementedError(f"FusedAdam has no {name}; use mx.optim.AdamW(..., {name}=True)")
        self.dtypes = {**dict(zip(MOMENTS, list(given.values()), strict=False)), MASTER: master_weight_dtype}
        self.master_weights, self.adam_w_mode = master_weights, adam_w_mode
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = store_param_remainders and master_weights and master_weight_dtype is torch.float32
        self._scales: dict[Tensor, dict[str, Tensor]] = {}
        defaults = dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if isinstance(local_of(p), MXTensor) and not self.master_weights:
                self.param_groups.pop()
                raise ValueError(
                    f"FusedAdam: a parameter is {described(p)}, and a step is mostly smaller than the distance between "
                    "two codes; pass master_weights=True"
                )

    # ------------------------------------------------------------------------------------------ states

    def _has_remainder(self, p: Tensor) -> bool:
        return self.store_param_remainders and p.dtype is torch.bfloat16 and not isinstance(local_of(p), MXTensor)

    def _has_master(self, p: Tensor) -> bool:
        return self.master_weights and (isinstance(local_of(p), MXTensor) or p.itemsize < 4)

    def _get(self, p: Tensor, name: str) -> Tensor:
        """The local float32 values of a state; int16 remainders as they are."""
        state = local_of(self.state[p][name])
        return state if state.dtype is torch.int16 else decode_state(state, self._scales.get(p, {}).get(name))

    def _set(self, p: Tensor, name: str, values: Tensor, scale: Tensor | None = None) -> None:
        """Store float32 values as a state of its dtype, with a new scale unless one is given."""
        scale = scale_of(values, self.dtypes[name]) if scale is None else scale
        self.state[p][name] = sharded_like(p, encode_state(values, self.dtypes[name], scale))
        if scale is not None:
            self._scales.setdefault(p, {})[name] = scale

    def _init(self, p: Tensor) -> None:
        values = local_of(values_of_parameter(p))
        for name in MOMENTS:
            self._set(p, name, torch.zeros_like(values))
        if self._has_remainder(p):
            self.state[p][MASTER] = sharded_like(p, torch.zeros_like(values, dtype=torch.int16))
        elif self._has_master(p):
            self._set(p, MASTER, values.clone())

    def _master(self, p: Tensor) -> Tensor:
        """The local float32 values that a step changes."""
        if MASTER not in self.state[p]:
            return local_of(values_of_parameter(p))  # type: ignore[no-any-return]
        master = self._get(p, MASTER)
        return master if master.dtype is not torch.int16 else join_master(values_of(local_of(p.detach())), master)

    def _write(self, p: Tensor, values: Tensor) -> None:
        if self._has_remainder(p):
            values, rest = split_master(values)
            self.state[p][MASTER] = sharded_like(p, rest)
        elif MASTER in self.state[p]:
            self._set(p, MASTER, values)
        p.copy_(sharded_like(p, values))

    # ------------------------------------------------------------------------------------------ one step

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None) -> Any:
        """One step. ``grad_scaler`` has no effect: ``torch.amp.GradScaler.step(optimizer)`` unscales the gradients."""
        check("step", "closure", closure, optional(FUNCTION))
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                grad = getattr(p, "decoupled_grad", None) if self.use_decoupled_grad else p.grad
                if grad is not None:
                    self._update(p, local_of(grad).to(torch.float32), group)
        return loss

    def _update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        if not self.state[p]:
            self._init(p)
        values, decay, (beta1, beta2) = self._master(p), group["weight_decay"], group["betas"]
        if decay and not self.adam_w_mode:
            grad = grad + values * decay
        mean = self._get(p, "exp_avg") * beta1 + grad * (1 - beta1)
        square = self._get(p, "exp_avg_sq") * beta2 + grad * grad * (1 - beta2)
        corrected = group["bias_correction"]
        first, second = ((1 - beta ** group["step"]) if corrected else 1.0 for beta in (beta1, beta2))
        update = (mean / first) / ((square / second).sqrt_() + group["eps"])
        if decay and self.adam_w_mode:
            update += values * decay
        self._set(p, "exp_avg", mean)
        self._set(p, "exp_avg_sq", square)
        self._write(p, values - update * group["lr"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the gradients, or set them to zero; those of ``decoupled_grad`` with ``use_decoupled_grad=True``."""
        if not self.use_decoupled_grad:
            super().zero_grad(set_to_none)
            return
        for group in self.param_groups:
            for p in group["params"]:
                if set_to_none:
                    p.decoupled_grad = None
                elif getattr(p, "decoupled_grad", None) is not None:
                    p.decoupled_grad.zero_()

    # ------------------------------------------------------------------------------------------ checkpoints

    def _numbered(self, groups: Any) -> Iterator[tuple[Any, Tensor]]:
        """(number, parameter) of ``param_groups`` of a state dict."""
        keys = [key for group in groups for key in group["params"]]
        return zip(keys, [p for group in self.param_groups for p in group["params"]], strict=True)

    def state_dict(self) -> dict[str, Any]:
        """Float32 states and int16 remainders; ``scales``: number of a parameter -> name of a state -> its scale."""
        out = super().state_dict()
        numbers = list(self._numbered(out["param_groups"]))
        states = {
            key: {n: sharded_like(p, self._get(p, n)) for n in self.state[p]} for key, p in numbers if self.state[p]
        }
        scales = {key: dict(self._scales[p]) for key, p in numbers if p in self._scales}
        return {**out, "state": states, SCALES: scales}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of ``state_dict``, also of TransformerEngine's and of other dtypes of states.

        Master weights that the state dict does not have start as the values of the parameters. Raises ValueError for
        groups and states that do not fit, and for remainders without ``store_param_remainders=True``.
        """
        check("load_state_dict", "state_dict", state_dict, STATE)
        self._check_states(state_dict)
        states, scales = state_dict["state"], state_dict.get(SCALES, {})
        super().load_state_dict({**state_dict, "state": {}})
        self._scales.clear()
        for key, p in self._numbered(state_dict["param_groups"]):
            if key not in states:
                continue
            self._init(p)
            for name, value in states[key].items():
                if name in self.state[p]:  # TransformerEngine has masters of float32 parameters, and does not use them
                    self._load(p, name, local_of(value).to(local_of(p).device), scales.get(key, {}).get(name))

    def _check_states(self, state_dict: dict[str, Any]) -> None:
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for key, p in zip(keys, params, strict=False):  # torch reports other numbers of parameters
            for name, value in state_dict["state"].get(key, {}).items():
                if name not in self.dtypes or getattr(value, "shape", None) != p.shape:
                    raise ValueError(
                        f"load_state_dict: the state {name} of parameter {key}, {described(value)}, does not fit "
                        f"FusedAdam's {', '.join(self.dtypes)} of shape {tuple(p.shape)}; load the state of a "
                        "FusedAdam of the same model"
                    )
                if local_of(value).dtype is torch.int16 and not self._has_remainder(p):
                    raise ValueError(
                        f"load_state_dict: the {name} of parameter {key} is the lower half of a float32 number; create "
                        "the FusedAdam with master_weights=True, store_param_remainders=True for a bfloat16 parameter"
                    )

    def _load(self, p: Tensor, name: str, value: Tensor, scale: Tensor | None) -> None:
        if name == MASTER and self._has_remainder(p):
            rest = value.clone() if value.dtype is torch.int16 else split_master(value.to(torch.float32))[1]
            self.state[p][name] = sharded_like(p, rest)
            return
        value = value.to(torch.float32, copy=True)
        new = scale_of(value, self.dtypes[name])
        if new is not None and scale is not None:
            scale = scale.to(new.device)
            new = torch.where((new / scale - 1).abs() < 1e-3, scale, new)  # that of another dtype does not fit
        self._set(p, name, value, new)

    def __getstate__(self) -> dict[str, Any]:
        names = ("dtypes", "master_weights", "adam_w_mode", "use_decoupled_grad", "store_param_remainders", "_scales")
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in names}}
