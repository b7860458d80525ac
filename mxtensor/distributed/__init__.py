"""Layers and experts that are split over ranks: codes and scales are sent instead of values.

Start with ``parallel.py``, the names of ``mx.parallel``. What FSDP2 gathers is in ``tensor/fsdp.py`` and
``training/gathered_weight.py``.
"""
