"""What a user waits for before the first result: imports that a program does not need are not made."""

import subprocess
import sys

SLOW = "torch._dynamo", "torch._inductor", "triton", "transformers", "matplotlib", "pandas"
"""Modules of which each takes a tenth of a second or more; Dynamo takes as long as the rest of torch."""

PROGRAM = """
import sys, torch
import mxtensor as mx
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32)).bfloat16()
mx.quantize_(model, "{config}")
with torch.no_grad():
    out = model(torch.randn(3, 64, dtype=torch.bfloat16))
assert out.isfinite().all() and type(model[0].weight.data) is mx.MXTensor
print(sorted(name for name in {slow} if name in sys.modules))
"""


def test_a_quantized_model_runs_without_slow_imports():
    for config in ("mxfp8-weight-only", "nvfp4"):
        program = PROGRAM.format(config=config, slow=SLOW)
        assert (
            subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"
        )
