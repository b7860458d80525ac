"""Checkpoints of other libraries and of this one: load, save and convert, without a detour through high precision.

A layout is one file of this folder: a row with its name, how it is detected, read and written. Start with ``layout.py``
(the fields of such a row) and ``native.py`` (the layout of this package). ``store.py`` lists all layouts, and has
``load`` and ``save``; ``conversion.py`` has ``convert``. Below them are ``reading.py`` (how files are read),
``writing.py`` (how shards are written), ``destination.py`` (where, so that it is whole or absent) and ``names.py``
(what the name of a tensor says).
"""

from .conversion import Conversion, convert
from .store import LAYOUTS, Info, get_layout, info, load, save

__all__ = ["LAYOUTS", "Conversion", "Info", "convert", "get_layout", "info", "load", "save"]
