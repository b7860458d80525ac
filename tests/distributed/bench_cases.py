"""What two ranks do in test_benchmarks_fsdp.py: the benchmark of FSDP2 on a tiny model."""

import warnings

from benchmarks import fsdp
from tests.helpers.ranks import DEVICE, case


@case
def benchmark_of_fsdp(rank, folder):
    """A row for each config."""
    warnings.simplefilter("ignore")  # of transformers
    return [fsdp.measured(config, fsdp.TINY, DEVICE, 1, 32, 1) for config in fsdp.RECIPES]
