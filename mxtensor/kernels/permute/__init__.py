"""Permutations of mixtures of experts (MoE): rows of tokens sorted by expert and put back: maps, copies and sums.

Start with ``reference.py`` (the definition) and ``select.py``. ``triton_rows.py`` launches the Triton kernels.
"""
