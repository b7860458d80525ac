"""Permutations of mixtures of experts (MoE): rows of tokens sorted by expert and put back: maps, copies and sums.

Start with ``definition.py`` and ``choose_permutation.py``. ``triton_permute.py`` launches the Triton kernels.
"""
