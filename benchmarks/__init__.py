"""Benchmarks: ``python -m benchmarks`` lists them, ``python -m benchmarks NAME...`` runs some and writes their records.

A script answers the questions of its sections (``python -m benchmarks.layers --help``). Start with ``harness``: how
contenders take turns, what a record has, the command that all scripts share. ``cuda`` has the clocks of the GPU,
``contenders`` processes that take turns, ``peers`` torchao and gemlite, ``llama_cpp`` llama.cpp, ``corpus`` a text,
``parity_record`` what ``parity`` trains and records, and ``plots`` draws the pictures of the documentation.
"""
