"""The command ``mxtensor``: checkpoints without writing Python."""
