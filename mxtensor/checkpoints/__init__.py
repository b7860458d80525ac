"""Checkpoints of other libraries and of this one: load, save and convert, without a detour through high precision.

A layout is one file of this folder: a row with its name, how it is detected, read and written. Start with ``layout.py``
(the fields of such a row), ``native.py`` (the layout of this package), ``store.py`` and ``conversion.py``.
"""

from .conversion import Conversion, convert
from .registry import LAYOUTS, get_layout
from .store import Info, info, load, save

__all__ = ["LAYOUTS", "Conversion", "Info", "convert", "get_layout", "info", "load", "save"]
