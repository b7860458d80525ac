"""The command ``mxtensor``: checkpoints without writing Python.

Start with ``main.py`` (one subcommand is one row) and ``arguments.py`` (its options). ``files.py`` has the subcommands
that read and write checkpoints, ``measure.py`` those that run a model (``models.py`` loads it), ``machine.py`` those
about this machine. ``output.py`` prints; ``startup.py`` runs before torch is imported.
"""
