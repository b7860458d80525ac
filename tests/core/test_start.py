"""What a user waits for before the first result: imports that a program does not need are not made."""

import subprocess
import sys

SLOW = "torch._dynamo", "torch._inductor", "triton", "transformers", "matplotlib", "pandas"
"""Modules of which each takes a tenth of a second or more; Dynamo takes as long as the rest of torch."""

PROGRAM = f"""
import sys, torch
import mxtensor as mx
for config in ("mxfp8-weight-only", "nvfp4"):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32)).bfloat16()
    mx.quantize_(model, config)
    with torch.no_grad():
        out = model(torch.randn(3, 64, dtype=torch.bfloat16))
    assert out.isfinite().all() and type(model[0].weight.data) is mx.MXTensor
print(sorted(name for name in {SLOW} if name in sys.modules))
"""


def test_a_quantized_model_runs_without_slow_imports():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
