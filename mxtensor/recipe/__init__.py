"""Which tensor is cast to what: TransformerEngine's recipe classes, and the one LinearRecipe that they make."""

from .training_recipes import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

__all__ = [
    "CustomRecipe", "DelayedScaling", "Float8BlockScaling", "Float8CurrentScaling", "Format", "MXFP4BlockScaling",
    "MXFP6BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling", "Recipe",
]  # fmt: skip
