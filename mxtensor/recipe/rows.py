"""An inference recipe as a row of words: what files and pickles of an MXTensor store, since names outlive classes."""

from __future__ import annotations

from ..numerics.cast import Cast
from .linear_recipe import LinearRecipe


def recipe_to_row(recipe: LinearRecipe) -> dict[str, str | None]:
    """The casts and the kernel preference of an inference recipe, as words."""
    row: dict[str, str | None] = {"kernel_preference": recipe.kernel_preference.value}
    for name, cast in (("weight", recipe.stored), ("activation", recipe.activation)):
        row[name] = cast.format.name if cast else None
        row[f"{name}_scaling"] = cast.scaling.value if cast else None
        row[f"{name}_rounding"] = cast.rounding.value if cast else None
        if cast and cast.seed is not None:
            row[f"{name}_seed"] = str(cast.seed)
    return row


def recipe_from_row(row: dict[str, str | None]) -> LinearRecipe:
    """The inverse of ``recipe_to_row``. Raises ValueError for names that this version does not know."""

    def cast(name: str) -> Cast | None:
        format, scaling, rounding = row[name], row[f"{name}_scaling"], row[f"{name}_rounding"]
        if format is None or scaling is None or rounding is None:
            return None
        seed = row.get(f"{name}_seed")
        return Cast.of(format, scaling, rounding, None if seed is None else int(seed))

    weight = cast("weight")
    if weight is None:
        raise ValueError(f"this row names no weight format: {row}")
    return LinearRecipe.inference(weight, cast("activation"), row["kernel_preference"] or "auto")
