"""The methods of ``mx.calibrate``: each makes the operand of one layer's weight from the moments of its inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from ..core.arguments import FLAG, SHARE, check, described
from ..numerics.cast import Cast
from ..numerics.operand import Operand
from .gptq import corrected, gptq, nearest
from .moments import Moments
from .scales import multiples_of


class Method(Protocol):
    """How a weight is rounded."""

    @property
    def correct(self) -> bool:
        """Whether the model before quantization runs as well, for ``Moments.cross``."""

    def operand(self, w: Tensor, cast: Cast, moments: Moments) -> Operand:
        """``w`` (rows, cols; float32) as codes and scales."""


@dataclass(frozen=True)
class BestScales:
    """``"mse"``: values are rounded to nearest, with the scale of each block that has the least squared error.

    ``weighted``: errors are weighted by the mean square of the input of their column.
    """

    weighted: bool = True
    correct = False

    def __post_init__(self) -> None:
        check("BestScales", "weighted", self.weighted, FLAG)

    def operand(self, w: Tensor, cast: Cast, moments: Moments) -> Operand:
        """See :class:`Method`."""
        importance = moments.second.diagonal() if self.weighted else None
        if importance is not None and not importance.any():  # a layer without an input
            importance = None
        return nearest(w, cast, multiples_of(cast.format.scale), importance)


@dataclass(frozen=True)
class GPTQ:
    """``"gptq"``: columns are rounded one by one, and each one's error is made up for by those after it.

    ``damping``: what is added to the diagonal of the second moment of the inputs, as a share of its mean. ``search``:
    the scale of each block has the least squared error; False: it is the one that a cast would choose. ``correct``: the
    weight makes up for the errors of its inputs, too, those of the layers before and of a cast of activations.
    """

    damping: float = 0.01
    search: bool = True
    correct: bool = True

    def __post_init__(self) -> None:
        check("GPTQ", "damping", self.damping, SHARE)
        check("GPTQ", "search", self.search, FLAG)
        check("GPTQ", "correct", self.correct, FLAG)

    def operand(self, w: Tensor, cast: Cast, moments: Moments) -> Operand:
        """See :class:`Method`."""
        multiples = multiples_of(cast.format.scale) if self.search else (1.0,)
        upper = moments.inverse_cholesky(self.damping)
        if moments.cross is not None:
            w = corrected(w, moments.cross, moments.second, upper)
        return gptq(w, upper, cast, multiples)


METHODS: dict[str, Method] = {"mse": BestScales(), "gptq": GPTQ()}


def method_of(method: Any) -> Method:
    """The method with this name, or the object itself. Raises ValueError or TypeError with the choices."""
    if isinstance(method, (BestScales, GPTQ)):
        return method
    names = ", ".join(map(repr, METHODS))
    if not isinstance(method, str):
        raise TypeError(
            f"calibrate: method is {described(method)}; pass {names}, or an mx.GPTQ or mx.BestScales object"
        )
    if method not in METHODS:
        raise ValueError(f"calibrate: there is no method {method!r}; choose one of {names}")
    return METHODS[method]
