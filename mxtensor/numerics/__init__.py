"""Formats, casts and the definition of both in plain torch, without kernels.

Start with ``formats.py`` (elements, scales and blocks as rows), ``cast.py`` (how one tensor is quantized) and
``reference.py`` (encode and decode). ``operand.py`` is the container of codes and scales that all other rooms use.
"""
