"""The names of ``mx.parallel``: styles for ``parallelize_module``, and the exchange of tokens with experts."""

from .all_to_all import Dispatched, combine_tokens, dispatch_tokens
from .collectives import share_amax
from .expert_parallel import ExpertParallel
from .tensor_parallel import ColwiseParallel, RowwiseParallel

__all__ = [
    "ColwiseParallel",
    "Dispatched",
    "ExpertParallel",
    "RowwiseParallel",
    "combine_tokens",
    "dispatch_tokens",
    "share_amax",
]
