"""Files with a changed header, configuration or pickle: each loads, or raises a sentence; none crashes or hangs.

`make test-all` reads 20,000 of them in a minute.
"""

import json
import random
import struct
import time

import pytest
import torch

import mxtensor as mx
from tests.helpers.mutations import flipped, of_zip, replanted
from tests.helpers.peers import FIXTURES

try:
    import resource
except ImportError:  # Windows
    resource = None

COUNTS = {"pickle": 500, "pickle of torchao": 500}
OTHERS = 1900
"""How many files of a kind."""
SLOWEST, MOST_KILOBYTES = 5.0, 600_000
WEIGHT = torch.randn(64, 64).bfloat16()
LAYOUTS = {
    "native": "nvfp4", "compressed-tensors": "nvfp4", "modelopt": "mxfp8", "deepseek": "float8_128x128",
    "quark": "mxfp6_e3m2", "mlx": "mxfp4", "torchao": "nvfp4", "plain": None, "gguf": "mxfp4", "gpt-oss": "mxfp4",
}  # fmt: skip


def made(kind, folder):
    """A checkpoint of this kind: a folder or a file."""
    if kind in ("pickle", "pickle of torchao"):
        state = {"m.weight": mx.quantize(WEIGHT, "nvfp4"), "m.bias": torch.ones(5)}
        if kind == "pickle":
            torch.save(state, folder / "x.pt")
        else:
            (folder / "x.pt").write_bytes((FIXTURES / "torchao_files" / "state.pt").read_bytes())
        return folder / "x.pt"
    layout, format = kind, LAYOUTS[kind]
    path = folder / ("x.gguf" if kind == "gguf" else "x")
    if kind == "gpt-oss":
        experts = mx.quantize(torch.randn(2, 64, 32).bfloat16(), format, orientation="columnwise")
        mx.checkpoints.save({"experts.up_proj": experts}, path, layout=layout)
        return path
    weight = WEIGHT if format is None else mx.quantize(WEIGHT, format)
    mx.checkpoints.save({"m.weight": weight, "m.bias": torch.ones(5)}, path, layout=layout)
    return path


# ---------------------------------------------------------------------------------------------- changes


def of_safetensors(raw, rng):
    size = int.from_bytes(raw[:8], "little")
    if rng.random() < 0.4:
        return flipped(raw, rng, 8 + size)
    tree = json.loads(raw[8 : 8 + size])
    inner = tree.get("__metadata__", {})
    for key in list(inner) if rng.random() < 0.5 else ():  # what the metadata has as JSON
        if inner[key].startswith("{"):
            inner[key] = json.dumps(replanted(json.loads(inner[key]), rng))
            return _joined(tree, raw[8 + size :])
    return _joined(replanted(tree, rng), raw[8 + size :])


def _joined(tree, values):
    text = json.dumps(tree).encode()
    return len(text).to_bytes(8, "little") + text + values


def of_gguf(raw, rng):
    out = bytearray(flipped(raw, rng, 400))
    if len(out) > 400 and rng.random() < 0.5:
        struct.pack_into("<Q", out, rng.randrange(8, 392), rng.choice([0, 1, 3, 255, 1 << 20, 1 << 40, (1 << 64) - 1]))
    return bytes(out)


@pytest.mark.exhaustive(quick=0)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [*LAYOUTS, "pickle", "pickle of torchao"])
def test_every_change_of_a_file_loads_or_raises_a_sentence(kind, tmp_path):
    many_changes(kind, tmp_path, COUNTS.get(kind, OTHERS))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [*LAYOUTS, "pickle", "pickle of torchao"])
def test_some_changes_of_a_file(kind, tmp_path):
    many_changes(kind, tmp_path, 12)


def many_changes(kind, folder, count):
    rng, path = random.Random(kind), made(kind, folder)
    file = path / "model.safetensors" if path.is_dir() else path
    raw = file.read_bytes()
    config = path / "config.json"
    tree = json.loads(config.read_text()) if config.is_file() else None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if resource else 0
    outcomes = {"loaded": 0, "refused": 0}
    for _ in range(count):
        original = path.with_suffix(".original")
        if tree is not None and rng.random() < 0.3:
            file.write_bytes(raw)
            config.write_text(json.dumps(replanted(tree, rng)))
        else:
            if tree is not None:
                config.write_text(json.dumps(tree))
            if file.suffix == ".pt":
                original.write_bytes(raw)
            file.write_bytes(
                of_zip(original, raw, rng) if file.suffix == ".pt"
                else of_gguf(raw, rng) if file.suffix == ".gguf" else of_safetensors(raw, rng)
            )  # fmt: skip
        start = time.perf_counter()
        try:
            loaded = mx.checkpoints.load(path)
        except (ValueError, NotImplementedError) as error:
            assert path.name in str(error), error
            outcomes["refused"] += 1
        else:
            assert all(isinstance(t, torch.Tensor) for t in loaded.values())
            outcomes["loaded"] += 1
        assert time.perf_counter() - start < SLOWEST
    assert outcomes["refused"] > count // 10
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if resource else 0
    assert after - before < MOST_KILOBYTES
