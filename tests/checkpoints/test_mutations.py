"""Files with a changed header, configuration or pickle: each loads, or raises a sentence; none crashes or hangs.

`make test-all` reads 20,000 of them in a minute.
"""

import json
import random
import struct
import time
import zipfile

import pytest
import torch

import mxtensor as mx
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
WORDS = (
    None, -1, 0, 1, 2, 3, 17, 1 << 31, 1 << 62, 1 << 70, 0.5, "", "U8", "F8_E4M3", "F4", "BF16", "I64", "nvfp4", "../x",
    [], [1 << 40, 1 << 40], [0, 0], [64, 32], {}, {"a": []}, True,
)  # fmt: skip
BYTES = b'0129{}[]",:aU8F\xff\x00'


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


def flipped(raw, rng, end):
    """``raw`` with up to three bytes of the first ``end`` changed, and sometimes cut."""
    out = bytearray(raw[: rng.choice([len(raw), len(raw), len(raw), end, rng.randrange(len(raw))])])
    for _ in range(rng.randint(0, 3)):
        if out:
            out[rng.randrange(min(end, len(out)))] = rng.choice(BYTES)
    return bytes(out)


def places(tree, path=()):
    """The path of every value in nested dicts and lists."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def replanted(tree, rng):
    """A copy of a JSON tree in which up to two values are others, have another key, or are gone."""
    tree = json.loads(json.dumps(tree))
    for _ in range(rng.randint(1, 2)):
        found = list(places(tree))
        if not found:
            break
        *path, key = rng.choice(found)
        parent = tree
        for step in path:
            parent = parent[step]
        what = rng.random()
        if what < 0.6:
            parent[key] = json.loads(json.dumps(rng.choice(WORDS)))
        elif what < 0.8 and isinstance(parent, dict):
            parent[rng.choice([f"{key}_scale", "m.weight", "", "x" * 300])] = parent.pop(key)
        else:
            del parent[key]
    return tree


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


def of_zip(path, raw, rng):
    """A file of ``torch.save`` with another pickle, or with other bytes anywhere."""
    if rng.random() < 0.3:
        return flipped(raw, rng, len(raw))
    out = path.with_suffix(".zip")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w", rng.choice([zipfile.ZIP_STORED] * 9 + [8])) as new:
        for entry in old.infolist():
            data = old.read(entry)
            if entry.filename.endswith("data.pkl"):
                data = bytearray(data)
                for _ in range(rng.randint(1, 3)):
                    at = rng.randrange(len(data))
                    data[at : at + rng.randint(0, 1)] = rng.choice(
                        [b"", bytes([rng.randrange(256)]), b"K\x05", b"(", b"R"]
                    )
            new.writestr(entry.filename, bytes(data))
    return out.read_bytes()


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
