"""MXTensor: the tensor, how one is made, and how it is stored, sharded and gathered.

Start with ``mxtensor.py`` and ``makers.py``. The rules of its ops are in ``ops/``.
"""
