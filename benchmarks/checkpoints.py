"""Time and memory of ``mx.checkpoints.convert`` beside a copy of the files by the operating system.

python -m benchmarks.checkpoints --gigabytes 12 --format mxfp4-weight-only

Makes a sharded checkpoint with the shapes of Llama 2 7B in bfloat16 in --folder, which needs room for three times its
size, and removes it afterwards. Each round copies and converts; the best of each is printed. The peak is that of a new
process, Python and torch included (about 0.4 GB).
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import mxtensor as mx

HIDDEN, INTERMEDIATE, VOCABULARY = 4096, 11008, 32000
SHARD = 2_000_000_000
RUN = """
import json, resource, sys, time
from pathlib import Path
import mxtensor as mx
source, destination, layout, format = sys.argv[1:]
start = time.perf_counter()
mx.checkpoints.convert(source, destination, layout=layout, format=format or None)
seconds = time.perf_counter() - start
kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if sys.platform == "linux":  # where that is at least the peak of the process before exec
    status = Path("/proc/self/status").read_text().split()
    kibibytes = int(status[status.index("VmHWM:") + 1])
print(json.dumps([seconds, kibibytes * 1024]))
"""


def shapes(gigabytes: float) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model of at least this size in bfloat16."""
    out: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    layer = 0
    while sum(2 * math.prod(shape) for shape in out.values()) < 1e9 * gigabytes:
        prefix = f"model.layers.{layer}."
        out |= {f"{prefix}self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"}
        out |= {f"{prefix}mlp.{name}_proj.weight": (INTERMEDIATE, HIDDEN) for name in ("gate", "up")}
        out |= {f"{prefix}mlp.down_proj.weight": (HIDDEN, INTERMEDIATE), f"{prefix}input_layernorm.weight": (HIDDEN,)}
        layer += 1
    return out


def make(folder: Path, gigabytes: float) -> int:
    """Write the checkpoint, one tensor in memory at a time. Returns its bytes."""
    from mxtensor.checkpoints.sink import Sink

    values = torch.randn(1 << 20).mul(0.02).bfloat16()
    with Sink(folder, SHARD) as sink:
        for name, shape in shapes(gigabytes).items():
            count = math.prod(shape)
            sink.add({name: values.repeat(-(-count // values.numel()))[:count].view(shape)})
        sink.finish({"config.json": {"model_type": "llama", "dtype": "bfloat16"}})
        return int(sink.total)


def main() -> int:
    """Print a line for the copy and one for the conversion."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checkpoints", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--gigabytes", type=float, default=12.0)
    parser.add_argument("--format", default="mxfp4-weight-only", help="'' only changes the layout")
    parser.add_argument("--layout", default="native")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        size = make(folder / "source", args.gigabytes)
        free = shutil.disk_usage(folder).free
        if free < 1.1 * size:
            parser.error(f"{folder} has {free / 1e9:.1f} GB left, and a copy needs {size / 1e9:.1f}; pass --folder")
        copies, runs = [], []
        for _ in range(args.rounds):
            start = time.perf_counter()
            shutil.copytree(folder / "source", folder / "copy")
            copies.append(time.perf_counter() - start)
            shutil.rmtree(folder / "copy")
            out = folder / ("out.gguf" if args.layout == "gguf" else "out")
            command = [sys.executable, "-c", RUN, str(folder / "source"), str(out), args.layout, args.format]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            runs.append(tuple(json.loads(done.stdout)))
            out.unlink() if out.is_file() else shutil.rmtree(out)
    seconds, peak = min(runs)
    print(
        f"{size / 1e9:.1f} GB, torch {torch.__version__}, {torch.get_num_threads()} threads, mxtensor {mx.__version__}"
    )
    print(f"copy     {min(copies):6.1f} s  {size / min(copies) / 1e9:5.2f} GB/s")
    print(f"convert  {seconds:6.1f} s  {size / seconds / 1e9:5.2f} GB/s  peak {peak / 1e9:.2f} GB  "
          f"{min(copies) / seconds:.2f} of the copy's speed")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
