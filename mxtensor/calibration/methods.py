"""The methods of ``mx.calibrate``: how the operand of a layer's weight is made from the moments of its inputs, and
which methods go together. Those that scale channels are in ``smoothing.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from ..core.arguments import FLAG, SHARE, TEXT, check, described
from ..kernels.quantize.choose_cast import quantize_operand
from ..numerics.cast import Cast
from ..numerics.operand import Operand
from .moments import Moments
from .rounding import corrected, gptq, multiples_of, nearest
from .smoothing import AWQ, Scaling, SmoothQuant

CORRECT = ("auto", "model", "cast", "none")
"""Which errors a weight compensates for: all errors of its input ("model"), the cast of its input ("cast"), or none."""


@dataclass(frozen=True)
class Method:
    """How a weight is rounded: to nearest, as ``quantize_`` does, unless a subclass overrides ``operand``."""

    needs_moments: ClassVar[bool] = False
    """Whether ``operand`` reads the moments of inputs."""

    def compensates(self, activation: Cast | None) -> str:
        """The errors that ``moments.cross`` is about, for a layer with this cast of its input: one of CORRECT."""
        return "none"

    def operand(self, w: Tensor, cast: Cast, moments: Moments) -> Operand:
        """``w`` (rows, cols; float32) as codes and scales."""
        return quantize_operand(w, cast)


@dataclass(frozen=True)
class BestScales(Method):
    """``"mse"``: rounds values to nearest, with the scale of each block that gives the smallest squared error.

    ``weighted``: weight the errors of each column by the mean square of its input.
    """

    weighted: bool = True

    def __post_init__(self) -> None:
        check("BestScales", "weighted", self.weighted, FLAG)

    @property
    def needs_moments(self) -> bool:  # type: ignore[override]
        """See :class:`Method`."""
        return self.weighted

    def operand(self, w: Tensor, cast: Cast, moments: Moments) -> Operand:
        """See :class:`Method`."""
        importance = moments.second.diagonal() if self.weighted else None
        if importance is not None and not importance.any():  # a layer without an input
            importance = None
        return nearest(w, cast, multiples_of(cast.format.scale), importance)


@dataclass(frozen=True)
class GPTQ(Method):
    """``"gptq"``: rounds columns one by one; later columns compensate for the errors of earlier ones.

    ``damping``: added to the diagonal of the second moment of the inputs, as a fraction of the mean of that diagonal.
    ``search``: choose the scale of each block by its squared error; False: take the scale of a cast. ``correct``: the
    errors of the input that the weight compensates for too, by least squares before it is rounded: "model", those from
    earlier quantized layers and from the cast of activations; "cast", those from the cast only; "none". "auto" is
    "model" for weight-only formats, and "none" if inputs are cast: large errors of inputs make "model" shrink weights.
    """

    needs_moments: ClassVar[bool] = True
    damping: float = 0.01
    search: bool = True
    correct: str = "auto"

    def __post_init__(self) -> None:
        check("GPTQ", "damping", self.damping, SHARE)
        check("GPTQ", "search", self.search, FLAG)
        check("GPTQ", "correct", self.correct, TEXT)
        if self.correct not in CORRECT:
            raise ValueError(f"GPTQ: correct is {self.correct!r}; choose one of {', '.join(map(repr, CORRECT))}")

    def compensates(self, activation: Cast | None) -> str:
        """See :class:`Method`."""
        if self.correct == "auto":
            return "model" if activation is None else "none"
        return "none" if self.correct == "cast" and activation is None else self.correct

    def operand(self, w: Tensor, cast: Cast, moments: Moments) -> Operand:
        """See :class:`Method`."""
        multiples = multiples_of(cast.format.scale) if self.search else (1.0,)
        upper = moments.inverse_cholesky(self.damping)
        if moments.cross is not None:
            w = corrected(w, moments.cross, moments.second, upper)
        return gptq(w, upper, cast, multiples)


@dataclass(frozen=True)
class BiasCorrection:
    """``"bias"``: after weights are rounded, corrects the bias of each layer by the mean error of its outputs.

    ``make``: layers without a bias get one. A saved model of transformers then loads only into layers with a bias:
    pass False to correct existing biases only.

    Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", 2019.
    """

    make: bool = True

    def __post_init__(self) -> None:
        check("BiasCorrection", "make", self.make, FLAG)


Step = Scaling | Method | BiasCorrection
"""What a method consists of."""
ORDER: tuple[type, ...] = (Scaling, Method, BiasCorrection)
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
        return self.bias is not None or self.rounding.compensates(activation) == "model"


def steps_of(method: Any) -> Steps:
    """The steps with these names, or the objects themselves, one or a list. Raises ValueError or TypeError."""
    names, steps = ", ".join(map(repr, METHODS)), []
    for one in method if isinstance(method, (list, tuple)) else (method,):
        if not isinstance(one, (str, Step)):
            raise TypeError(
                f"calibrate: method is {described(one)}; pass {names}, an object such as mx.GPTQ(), or a list of them"
            )
        if isinstance(one, str) and one not in METHODS:
            raise ValueError(f"calibrate: there is no method {one!r}; choose one of {names}")
        steps.append(METHODS[one] if isinstance(one, str) else one)
    places = [next(place for place, kind in enumerate(ORDER) if isinstance(step, kind)) for step in steps]
    if places != sorted(places) or places.count(1) > 1 or places.count(2) > 1:
        raise ValueError(
            f"calibrate: method is {described(method)}; steps that scale channels come first, then at most one that "
            "rounds (GPTQ, BestScales), then 'bias'"
        )
    rounding: Any = steps[places.index(1)] if 1 in places else Method()
    bias: Any = steps[-1] if 2 in places else None
    return Steps(tuple(step for step in steps if isinstance(step, Scaling)), rounding, bias)
