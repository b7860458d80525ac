"""Calibration: weights rounded so that the outputs of layers change least, not each value.

Start with ``calibrate.py`` (one block of the model after another) and ``methods.py`` (how a weight is rounded, by
``rounding.py`` and ``smoothing.py``). ``blocks.py`` runs the blocks, ``moments.py`` measures the inputs of layers.
``planner.py`` measures formats for ``mx.plan``.
"""
