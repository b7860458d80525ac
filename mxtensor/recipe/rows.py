"""An inference recipe as a row of words: what files and pickles of an MXTensor store, since names outlive classes."""

from __future__ import annotations

import re

from ..numerics.cast import Cast
from .linear_recipe import LinearRecipe

_OF_A_CAST = ("", "_scaling", "_rounding")
_WORDS = ("kernel_preference", *(name + part for name in ("weight", "activation") for part in _OF_A_CAST))
_SEED = re.compile(r"-?[0-9]{1,40}")
_EPSILON = re.compile(r"[0-9]{1,40}(\.[0-9]{1,40})?(e[+-]?[0-9]{1,3})?")


def recipe_to_row(recipe: LinearRecipe) -> dict[str, str | None]:
    """The casts and the kernel preference of an inference recipe, as words."""
    row: dict[str, str | None] = {"kernel_preference": recipe.kernel_preference.value}
    for name, cast in (("weight", recipe.stored), ("activation", recipe.activation)):
        row[name] = cast.format.name if cast else None
        row[f"{name}_scaling"] = cast.scaling.value if cast else None
        row[f"{name}_rounding"] = cast.rounding.value if cast else None
        if cast and cast.seed is not None:
            row[f"{name}_seed"] = str(cast.seed)
        if cast and cast.amax_epsilon:
            row[f"{name}_amax_epsilon"] = repr(float(cast.amax_epsilon))
        if cast and cast.four_over_six is not None:
            row[f"{name}_four_over_six"] = cast.four_over_six.value
    return row


def recipe_from_row(row: dict[str, str | None]) -> LinearRecipe:
    """The inverse of ``recipe_to_row``. Raises ValueError for names that this version does not know, TypeError for
    anything but a dict of strings."""
    if not isinstance(row, dict) or any(type(v) is not str and v is not None for v in row.values()):
        raise TypeError(f"a recipe is stored as a dict of strings, not as {row!r:.80}")
    missing = [name for name in _WORDS if name not in row]
    if missing:
        raise ValueError(f"the stored recipe lacks {', '.join(missing)}: {row!r:.80}")

    def cast(name: str) -> Cast | None:
        format, scaling, rounding = row[name], row[f"{name}_scaling"], row[f"{name}_rounding"]
        if format is None or scaling is None or rounding is None:
            return None
        seed = row.get(f"{name}_seed")
        if seed is not None and not _SEED.fullmatch(seed):
            raise ValueError(f"the seed of a stored recipe must be an integer, got {seed!r:.80}")
        epsilon = row.get(f"{name}_amax_epsilon") or "0"
        if not _EPSILON.fullmatch(epsilon):
            raise ValueError(f"the amax_epsilon of a stored recipe must be a number, got {epsilon!r:.80}")
        four = row.get(f"{name}_four_over_six")
        return Cast.of(format, scaling, rounding, None if seed is None else int(seed), float(epsilon), four)

    weight = cast("weight")
    if weight is None:
        raise ValueError(f"this row names no weight format: {row}")
    return LinearRecipe.inference(weight, cast("activation"), row["kernel_preference"] or "auto")
