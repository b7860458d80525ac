"""The methods of ``mx.calibrate``: each makes the operand of one layer's weight from the moments of its inputs."""

from __future__ import annotations

from dataclasses import dataclass
from types import UnionType
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ..core.arguments import FLAG, SHARE, TEXT, check, described
from ..kernels.quantize.select import quantize_operand
from ..numerics.cast import Cast
from ..numerics.operand import Operand
from .bias import BiasCorrection
from .gptq import corrected, gptq, nearest
from .moments import Moments
from .scales import multiples_of
from .smoothing import AWQ, Scaling, SmoothQuant

CORRECT = ("auto", "model", "cast", "none")
"""Which errors a weight compensates for: all errors of its input ("model"), the cast of its input ("cast"), or none."""


def correction(correct: str, activation: Cast | None) -> str:
    """``correct`` for a layer that casts its input by ``activation``: "auto" is "model", or "none" with a cast."""
    if correct == "auto":
        return "model" if activation is None else "none"
    return "none" if correct == "cast" and activation is None else correct


class Method(Protocol):
    """How a weight is rounded."""

    @property
    def correct(self) -> str:
        """One of CORRECT, which says what ``Moments.cross`` is about."""

    @property
    def needs_moments(self) -> bool:
        """Whether it reads the moments of inputs."""

    def operand(self, w: Tensor, cast: Cast, moments: Moments) -> Operand:
        """``w`` (rows, cols; float32) as codes and scales."""


@dataclass(frozen=True)
class BestScales:
    """``"mse"``: rounds values to nearest, with the scale of each block that gives the smallest squared error.

    ``weighted``: weight the errors of each column by the mean square of its input.
    """

    weighted: bool = True
    correct = "none"

    @property
    def needs_moments(self) -> bool:
        """See :class:`Method`."""
        return self.weighted

    def __post_init__(self) -> None:
        check("BestScales", "weighted", self.weighted, FLAG)

    def operand(self, w: Tensor, cast: Cast, moments: Moments) -> Operand:
        """See :class:`Method`."""
        importance = moments.second.diagonal() if self.weighted else None
        if importance is not None and not importance.any():  # a layer without an input
            importance = None
        return nearest(w, cast, multiples_of(cast.format.scale), importance)


@dataclass(frozen=True)
class Nearest:
    """As ``quantize_`` rounds."""

    correct = "none"
    needs_moments = False

    def operand(self, w: Tensor, cast: Cast, moments: Moments) -> Operand:
        """See :class:`Method`."""
        return quantize_operand(w, cast)


@dataclass(frozen=True)
class GPTQ:
    """``"gptq"``: rounds columns one by one; later columns compensate for the errors of earlier ones.

    ``damping``: added to the diagonal of the second moment of the inputs, as a fraction of the mean of that diagonal.
    ``search``: choose the scale of each block by its squared error; False: take the scale of a cast. ``correct``: the
    errors of the input that the weight compensates for too, by least squares before it is rounded: "model", those from
    earlier quantized layers and from the cast of activations; "cast", those from the cast only; "none". "auto" is
    "model" for weight-only formats, and "none" if inputs are cast: large errors of inputs make "model" shrink weights.
    """

    damping: float = 0.01
    search: bool = True
    correct: str = "auto"
    needs_moments = True

    def __post_init__(self) -> None:
        check("GPTQ", "damping", self.damping, SHARE)
        check("GPTQ", "search", self.search, FLAG)
        check("GPTQ", "correct", self.correct, TEXT)
        if self.correct not in CORRECT:
            raise ValueError(f"GPTQ: correct is {self.correct!r}; choose one of {', '.join(map(repr, CORRECT))}")

    def operand(self, w: Tensor, cast: Cast, moments: Moments) -> Operand:
        """See :class:`Method`."""
        multiples = multiples_of(cast.format.scale) if self.search else (1.0,)
        upper = moments.inverse_cholesky(self.damping)
        if moments.cross is not None:
            w = corrected(w, moments.cross, moments.second, upper)
        return gptq(w, upper, cast, multiples)


Rounds = BestScales | GPTQ
"""What rounds a weight; ``Nearest`` does if a method has none of them."""
Step = Scaling | Rounds | BiasCorrection
"""What a method consists of."""
ORDER: tuple[type | UnionType, ...] = (Scaling, Rounds, BiasCorrection)
"""The order of its steps: several of the first, at most one of the others."""
METHODS: dict[str, Step] = {
    "mse": BestScales(), "gptq": GPTQ(), "smooth": SmoothQuant(), "awq": AWQ(), "bias": BiasCorrection(),
}  # fmt: skip


class Steps(NamedTuple):
    """What happens to each block."""

    transforms: tuple[Scaling, ...]
    rounding: Method
    bias: BiasCorrection | None

    def before(self, activation: Cast | None) -> bool:
        """Whether a layer that casts its input so is compared with the model before."""
        return self.bias is not None or correction(self.rounding.correct, activation) == "model"


def steps_of(method: Any) -> Steps:
    """The steps with these names, or the objects themselves, one or a list. Raises ValueError or TypeError."""
    steps = [_step(one) for one in (method if isinstance(method, (list, tuple)) else (method,))]
    places = [next(place for place, kind in enumerate(ORDER) if isinstance(step, kind)) for step in steps]
    if places != sorted(places) or places.count(1) > 1 or places.count(2) > 1:
        raise ValueError(
            f"calibrate: method is {described(method)}; steps that scale channels come first, then at most one that "
            "rounds (GPTQ, BestScales), then 'bias'"
        )
    rounding: Any = steps[places.index(1)] if 1 in places else Nearest()
    bias: Any = steps[-1] if 2 in places else None
    return Steps(tuple(step for step in steps if isinstance(step, Scaling)), rounding, bias)


def _step(method: Any) -> Step:
    if isinstance(method, Step):
        return method
    names = ", ".join(map(repr, METHODS))
    if not isinstance(method, str):
        raise TypeError(
            f"calibrate: method is {described(method)}; pass {names}, an object such as mx.GPTQ(), or a list of them"
        )
    if method not in METHODS:
        raise ValueError(f"calibrate: there is no method {method!r}; choose one of {names}")
    return METHODS[method]
