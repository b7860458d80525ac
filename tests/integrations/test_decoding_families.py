"""Models of many families decode with ``mx.compile_decoding`` as they do without it, in a bounded number of graphs."""
import pytest
import torch

import mxtensor as mx
from tests.helpers import tiny_models

STEPS = 25


def generated(model, batch, length, family="Llama", **options):
    torch.manual_seed(0)
    usual = {"cache_implementation": "static", "max_cache_len": 64, "do_sample": False}
    given = tiny_models.inputs(family, batch, length)
    return model.generate(**given, max_new_tokens=STEPS + 1, min_new_tokens=STEPS + 1, **(usual | options))
