"""torch's cache of compiled graphs on disk: a later process finds a graph only if package, settings and formats are the
same."""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
import torch
import mxtensor as mx
from mxtensor.core import fingerprint

version, config, trains = sys.argv[1:]
fingerprint.fingerprint = lambda: version
layer = torch.nn.Linear(64, 64, bias=False)
mx.quantize_(layer, mx.recipe.MXFP8BlockScaling() if trains == "trains" else config)
compiled, x = torch.compile(layer, fullgraph=True), torch.randn(4, 64)
compiled(x).square().sum().backward() if trains == "trains" else torch.no_grad()(compiled)(x)
print(json.dumps(torch._dynamo.utils.counters["aot_autograd"]))
"""


def found_in_cache(folder, *args):
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder)}
    ran = subprocess.run([sys.executable, "-c", PROGRAM, *args], capture_output=True, text=True, check=True, env=env)
    counts = json.loads(ran.stdout.splitlines()[-1])
    return counts.get("autograd_cache_hit", 0), counts.get("autograd_cache_miss", 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("trains", ["trains", "does not train"])
def test_another_version_or_format_does_not_find_a_graph(trains, tmp_path):
    assert found_in_cache(tmp_path, "one", "mxfp8-weight-only", trains) == (0, 1)
    assert found_in_cache(tmp_path, "one", "mxfp8-weight-only", trains) == (1, 0)
    assert found_in_cache(tmp_path, "two", "mxfp8-weight-only", trains) == (0, 1)
    if trains != "trains":
        assert found_in_cache(tmp_path, "one", "mxfp4-weight-only", trains) == (0, 1)
