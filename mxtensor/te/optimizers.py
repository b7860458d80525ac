"""TransformerEngine's ``FusedAdam`` with its dtypes of states, in plain torch, on any device.

Arithmetic is float32, one parameter after the other: memory holds float32 copies of the states of one parameter only.

float16 and uint8 states are codes times one float32 scale, amax / (half the largest float16) and amax / 448; uint8
means the codes of E4M3. bfloat16 states are rounded values. The facts are those of TransformerEngine
(``pytorch/optimizers/fused_adam.py`` and ``common/multi_tensor/adam.cu``), but for second moments of 8 bits, which have
logarithmic codes (at the end of this file): no positive one is rounded to 0, since a step divides by its root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

from ..core.arguments import FUNCTION, check, described, optional
from ..core.compat import local_of, sharded_like
from ..core.peer_names import instead_of
from ..tensor.mxtensor import MXTensor
from ..training.optim import STATE, values_of_parameter
from ..training.training_weight import values_of

MOMENTS = ("exp_avg", "exp_avg_sq")
SQUARES = "exp_avg_sq"
"""The state by whose root a step divides."""
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

    ``exp_avg_dtype``, ``exp_avg_sq_dtype``: float32, bfloat16, float16, or uint8. float16 and uint8 have one float32
    scale for each parameter, chosen anew in each step, and a uint8 ``exp_avg`` is E4M3. A uint8 ``exp_avg_sq`` has
    logarithmic codes with a scale for each 256 values, rounded stochastically, the same way in each run: gradients of
    one parameter may differ by any ratio. ``master_weights=True``: bfloat16, float16 and
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

    def _get(self, p: Tensor, name: str) -> Tensor:
        """The local float32 values of a state; int16 remainders as they are."""
        state: Tensor = local_of(self.state[p][name])
        if state.dtype is torch.int16:
            return state
        return decode_state(state, self._scales.get(p, {}).get(name), name == SQUARES)

    def _set(
        self, p: Tensor, name: str, values: Tensor, scale: Tensor | None = None, noise: Tensor | None = None
    ) -> None:
        """Store float32 values as a state of its dtype, with a new scale unless one is given."""
        dtype, squares = self.dtypes[name], name == SQUARES
        scale = scale_of(values, dtype, squares) if scale is None else scale
        self.state[p][name] = sharded_like(p, encode_state(values, dtype, scale, squares, noise))
        if scale is not None:
            self._scales.setdefault(p, {})[name] = scale

    def _init(self, p: Tensor) -> None:
        values = local_of(values_of_parameter(p))
        for name in MOMENTS:
            self._set(p, name, torch.zeros_like(values))
        if self._has_remainder(p):
            self.state[p][MASTER] = sharded_like(p, torch.zeros_like(values, dtype=torch.int16))
        elif self.master_weights and (isinstance(local_of(p), MXTensor) or p.itemsize < 4):
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
        noise = None
        if self.dtypes[SQUARES] is torch.uint8:  # the same numbers when training continues from a checkpoint
            generator = torch.Generator(square.device).manual_seed(int(group["step"]))
            noise = torch.rand(square.shape, generator=generator, device=square.device)
        self._set(p, SQUARES, square, noise=noise)
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
        """(number, parameter) of ``param_groups`` of a state dict; torch reports other numbers of parameters."""
        keys = [key for group in groups for key in group["params"]]
        return zip(keys, [p for group in self.param_groups for p in group["params"]], strict=False)

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
        for key, p in self._numbered(state_dict["param_groups"]):
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
        new = scale_of(value, self.dtypes[name], name == SQUARES)
        if new is not None and scale is not None and scale.shape == new.shape:
            scale = scale.to(new.device)
            new = torch.where((new / scale - 1).abs() < 1e-3, scale, new)  # that of another dtype does not fit
        self._set(p, name, value, new)

    def __getstate__(self) -> dict[str, Any]:
        names = ("dtypes", "master_weights", "adam_w_mode", "use_decoupled_grad", "store_param_remainders", "_scales")
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in names}}


def __getattr__(name: str) -> object:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{instead_of(name)}")


# ---------------------------------------------------------------------------------------------- scaled states

RANGES = {torch.float16: torch.finfo(torch.float16).max / 2, torch.uint8: 448.0}
"""Dtype of a state -> the magnitude to which its amax is scaled. Other dtypes have no scale."""
SMALLEST = 2.0**-24
"""The smallest positive float16."""


def scale_of(values: Tensor, dtype: torch.dtype, squares: bool = False) -> Tensor | None:
    """The scale of float32 values in this dtype, float32 (1,), or of each block of uint8 ``squares``; None for a dtype
    without one. 1 for zeros."""
    if dtype not in RANGES:
        return None
    if squares and dtype is torch.uint8:
        return block_scales(values)
    amax = values.abs().amax() if values.numel() else values.new_zeros(())
    scale = (amax / RANGES[dtype]).reshape(1)
    return torch.where(scale > 0, scale, 1.0)


def encode_state(
    values: Tensor, dtype: torch.dtype, scale: Tensor | None, squares: bool = False, noise: Tensor | None = None
) -> Tensor:
    """float32 values as a state of this dtype. NaN and infinity stay what they are, as far as the dtype has them.

    ``squares``: the values are second moments. ``noise``: for their stochastic rounding to uint8.
    """
    if scale is None:
        return values.to(dtype)
    if squares and dtype is torch.uint8:
        return encode_squares(values, scale, noise)
    scaled = values * scale.reciprocal()
    if dtype is not torch.uint8:
        codes = scaled.to(dtype)
        return torch.where(values > 0, codes.clamp(min=SMALLEST), codes) if squares else codes
    largest = RANGES[dtype]  # torch before 2.13 does not saturate
    return scaled.clamp(-largest, largest).to(torch.float8_e4m3fn).view(torch.uint8)


def decode_state(state: Tensor, scale: Tensor | None, squares: bool = False) -> Tensor:
    """The float32 values of a state; a float32 state itself."""
    if squares and state.dtype is torch.uint8:
        assert scale is not None
        return decode_squares(state, scale)
    values = (state.view(torch.float8_e4m3fn) if state.dtype is torch.uint8 else state).to(torch.float32)
    return values if scale is None else values * scale


# ---------------------------------------------------------------------------------------------- masters in two halves


def split_master(values: Tensor) -> tuple[Tensor, Tensor]:
    """float32 values as bfloat16 and the int16 that follow: ``join_master`` gives the same bits.

    The first half is rounded to nearest, halves up in magnitude. It is one more than the upper 16 bits if the lower 16
    bits are negative as an int16.
    """
    bits = values.contiguous().view(torch.int32)
    rest = bits.to(torch.int16)
    upper = (bits >> 16) + (rest < 0)
    return upper.to(torch.int16).view(torch.bfloat16), rest


def join_master(rounded: Tensor, rest: Tensor) -> Tensor:
    """The float32 values of the two halves."""
    upper = rounded.contiguous().view(torch.int16).to(torch.int32) - (rest < 0).to(torch.int32)
    return ((upper << 16) | (rest.to(torch.int32) & 0xFFFF)).view(torch.float32)


# ---------------------------------------------------------------------------------------------- logarithmic codes
#
# Second moments in 8 bits, in blocks of 256 values, each block with its own scale. Code 0 is 0, and code c from 1 to
# 255 is scale * 2^((c - 255) / 6): 42 powers of two below the largest value of the block, with neighbours 12 % apart. A
# step divides by the root of a second moment, so three things hold:
#
# - A positive value never becomes 0: what is below the range of its block gets code 1, and its steps are too small, not
#   too large. One scale for a whole tensor, or codes that end in 0, would make them up to 1 / eps times too large.
# - Values are rounded stochastically in training. With beta2 = 0.999 a step changes a moment by 0.1 %, much less than
#   the distance of two codes: rounding to nearest would keep a moment at about 2 % of the value that it should reach.
# - Codes and scales follow from decoded values again, so float32 values in a state dict lose nothing.
#
# Source of block-wise scales: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022.

BLOCK = 256
"""Consecutive values, in row-major order, that share a scale; the last block of a tensor may have fewer."""
OCTAVE = 6
"""Codes for each power of two."""
LEAST_SCALE = 2.0**-83
"""So that code 1 stands for a normal float32."""
TABLE = (0.0, *(2.0 ** ((code - 255) / OCTAVE) for code in range(1, 256)))
"""What each code stands for, under the scale 1."""


def _blocks(values: Tensor) -> Tensor:
    flat = values.reshape(-1)
    return F.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)


def block_scales(values: Tensor) -> Tensor:
    """The float32 scale of each block of float32 values that are not negative: (ceil(values / 256),).

    It is the largest value, 1 for a block of zeros, and NaN or infinite where a value is.
    """
    blocks = _blocks(values)
    if not blocks.numel():
        return values.new_ones(0)
    amax = blocks.amax(1)
    return torch.where(amax == 0, 1.0, amax.clamp(min=LEAST_SCALE))


def encode_squares(values: Tensor, scales: Tensor, noise: Tensor | None = None) -> Tensor:
    """The uint8 codes of float32 values, of their shape.

    ``noise``: uniform in [0, 1), of the shape of the values: one of the two neighbours is taken with the probability
    that makes the mean exact. None: the nearest code; of two equally near ones the upper.
    """
    table = torch.tensor(TABLE, dtype=torch.float32, device=values.device)
    blocks = _blocks(values) / scales.unsqueeze(1)
    # log2 is rounded, so that the guess may be one off beside a value of the table.
    guess = (blocks.log2() * OCTAVE + 255).nan_to_num(0.0, 0.0, 0.0).clamp(0, 254).to(torch.int32)
    lower = guess + (table[guess + 1] <= blocks).to(torch.int32) - (table[guess] > blocks).to(torch.int32)
    lower = lower.clamp(0, 254)
    below, above = table[lower], table[lower + 1]
    up = (blocks - below) / (above - below) > (0.5 if noise is None else _blocks(noise))
    if noise is None:
        up |= blocks - below == above - blocks
    codes = torch.where(up, lower + 1, lower)
    codes = torch.where(blocks > 0, codes.clamp(min=1), codes).to(torch.uint8)
    return codes.view(-1)[: values.numel()].view(values.shape)


def decode_squares(codes: Tensor, scales: Tensor) -> Tensor:
    """The float32 values of codes, of their shape; all NaN in a block whose scale is not finite."""
    table = torch.tensor(TABLE, dtype=torch.float32, device=codes.device)
    values = table[_blocks(codes).to(torch.int32)] * scales.unsqueeze(1)
    values = torch.where(scales.isfinite().unsqueeze(1), values, float("nan"))
    return values.view(-1)[: codes.numel()].view(codes.shape)
