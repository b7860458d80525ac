"""The command ``mxtensor``: checkpoints without writing Python.

Start with ``main.py`` (one subcommand is one row) and ``arguments.py`` (its options). ``files.py``, ``measure.py``,
``plan.py``, ``tune.py`` and ``doctor.py`` have the subcommands.
"""
