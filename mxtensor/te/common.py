"""``from mxtensor.te.common import recipe`` and ``from mxtensor.te.common.recipe import Format``, as from
``transformer_engine.common``."""

import sys

from .. import recipe

__all__ = ["recipe"]

sys.modules[f"{__name__}.recipe"] = recipe
