"""The case of two ranks for tests/benchmarks/test_fsdp.py: the benchmark of FSDP2 with a tiny model."""

import warnings

from benchmarks import fsdp
from tests.helpers.ranks import DEVICE, long_case


@long_case
def benchmark_of_fsdp(rank, folder):
    """The rows of the benchmark, one for each config."""
    warnings.simplefilter("ignore")  # of transformers
    return [fsdp.measured(config, fsdp.TINY, DEVICE, 1, 32, 1) for config in fsdp.RECIPES]
