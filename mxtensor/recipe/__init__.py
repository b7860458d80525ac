"""Which tensor is cast to what: recipe classes by TransformerEngine's names, and the LinearRecipe that they make.

Start with ``linear_recipe.py``: it is what all other rooms use.

To add a recipe, write its class into ``block_scaling.py``, ``float8.py`` or ``custom.py`` and its name into that
file's ``__all__``. ``mx.recipe``, RECIPES, the table of recipes in the documentation and the tests follow.
"""

from . import block_scaling, custom, float8
from .base import BackwardOptions, Format, Recipe
from .block_scaling import *  # noqa: F403
from .custom import *  # noqa: F403
from .custom import QuantizerRole
from .float8 import *  # noqa: F403
from .float8 import QParams

_FILES = (block_scaling, float8, custom)
RECIPES: tuple[type[BackwardOptions], ...] = tuple(getattr(file, name) for file in _FILES for name in file.__all__)
"""Every recipe class."""

__all__ = ["RECIPES", "Format", "QParams", "QuantizerRole", "Recipe"]
__all__ += [kind.__name__ for kind in RECIPES]
