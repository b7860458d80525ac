"""Writing and converting: the destination is whole or absent, the source untouched, and memory bounded."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import mxtensor as mx
from mxtensor.checkpoints import conversion, destination, writing
from mxtensor.core.workers import in_order
from tests.checkpoints.test_files import METHOD, NVFP4
from tests.helpers.checkpoint_files import checkpoint

try:
    import resource
except ImportError:  # Windows
    resource = None


FULL = OSError(28, "No space left on device")
PLACES = {
    "the first bytes": (writing.ShardFile, "_write_all", 1), "the third shard": (writing.ShardFile, "close", 3),
    "a tensor of a later shard": (writing.ShardFile, "add", 3), "other files": (writing.shutil, "copyfile", 1),
    "the configuration": (Path, "write_text", 1), "the index": (Path, "write_text", 2),
    "the last step": (destination.Destination, "move", 1), "making a tensor": (conversion, "quantize_as", 2),
}  # fmt: skip
"""Where -> (object, name of the function that fails, at which call)."""


@pytest.fixture
def failing(monkeypatch):
    """A function that lets the call that PLACES names raise an error."""

    def fail(where, error):
        owner, name, number = PLACES[where]
        original, calls = getattr(owner, name), []

        def call(*args, **kwargs):
            calls.append(name)
            if len(calls) == number:
                raise error
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)
        return calls

    return fail


@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt()], ids=["full disk", "interrupt"])
@pytest.mark.parametrize("where", PLACES)
def test_a_failure_leaves_nothing(where, error, tmp_path, failing):
    path = checkpoint(tmp_path / "a", {f"m{i}.weight": torch.randn(32, 32) for i in range(4)})
    before = {p.name: p.read_bytes() for p in path.iterdir()}
    calls = failing(where, error)
    with pytest.raises(type(error)):
        mx.checkpoints.convert(path, tmp_path / "out", format="mxfp8", max_shard_bytes=1000)
    assert calls
    assert [p.name for p in tmp_path.iterdir()] == ["a"] and before == {p.name: p.read_bytes() for p in path.iterdir()}
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("mxtensor-worker")]


@pytest.mark.parametrize("where", PLACES)
def test_a_failure_leaves_the_destination_that_was_there(where, tmp_path, failing):
    path = checkpoint(tmp_path / "a", {f"m{i}.weight": torch.randn(32, 32) for i in range(4)})
    mx.checkpoints.convert(path, tmp_path / "out")
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    failing(where, FULL)
    message = "No space left" if where == "making a tensor" else "out cannot be written: No space left"
    with pytest.raises(OSError, match=message):
        mx.checkpoints.convert(path, tmp_path / "out", format="mxfp8", max_shard_bytes=1000, overwrite=True)
    assert before == {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "out"]


def test_a_full_disk_names_the_destination(tmp_path, failing):
    failing("the first bytes", FULL)
    with pytest.raises(OSError, match=r"out cannot be written: No space left"):
        mx.checkpoints.save({"a": torch.ones(2)}, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.exhaustive
@pytest.mark.skipif(resource is None, reason="needs limits of the operating system")
@pytest.mark.parametrize(("layout", "name"), [("plain", "out"), ("plain", "out.safetensors"), ("gguf", "out.gguf")])
def test_a_disk_that_is_full_while_a_large_file_is_written(layout, name, tmp_path):
    """The operating system refuses to write beyond 3 MB."""
    checkpoint(tmp_path / "a", {f"m{i}.weight": torch.randn(256, 1024) for i in range(4)})
    code = (
        "import resource, sys, mxtensor.checkpoints.writing as s; s.SMALL = 1 << 20; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, 3_000_000)); "
        "from mxtensor.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "convert", tmp_path / "a", "-o", tmp_path / name, "--layout", layout],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and f"{name} cannot be written: File too large" in done.stderr
    assert done.stderr.count("\n") == 1 and [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_destination_is_not_overwritten_unasked(tmp_path):
    path = checkpoint(tmp_path / "a", {"m.weight": torch.randn(32, 32)})
    mx.checkpoints.convert(path, tmp_path / "out")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        mx.checkpoints.convert(path, tmp_path / "out", format="mxfp8")
    mx.checkpoints.convert(path, tmp_path / "out", format="mxfp8", overwrite=True)
    assert isinstance(mx.checkpoints.load(tmp_path / "out")["m.weight"], mx.MXTensor)
    with pytest.raises(ValueError, match="is the source"):
        mx.checkpoints.convert(path, path, overwrite=True)


# ---------------------------------------------------------------------------------------------- converting


@pytest.mark.parametrize(("layout", "quantized"), [("torchao", False), ("compressed-tensors", True)])
def test_experts_stored_one_by_one_are_quantized_where_readers_take_them(layout, quantized, tmp_path):
    """transformers stacks them, and looks for no codes of torchao meanwhile."""
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    path = checkpoint(tmp_path / "a", {name: torch.randn(64, 64), "model.layers.0.q_proj.weight": torch.randn(64, 64)})
    report = mx.checkpoints.convert(path, tmp_path / "out", layout=layout, format="float8_row", progress=False)
    after = mx.checkpoints.load(tmp_path / "out")
    assert isinstance(after[name], mx.MXTensor) == quantized == (name in report.errors)
    assert report.stacks == ([] if quantized else [name])
    assert isinstance(after["model.layers.0.q_proj.weight"], mx.MXTensor)
    assert quantized or "1 tensors of experts stay as they were" in str(report)


LAYERS = {f"layers.{i}.{name}.weight": (64, columns) for i in range(4) for name, columns in (("up", 64), ("down", 72))}


@pytest.mark.parametrize(
    ("layout", "format", "block"),
    [
        ("quark", "mxfp4", "32"), ("mlx", "mxfp8", "32"), ("gguf", "mxfp4", "32"), ("modelopt", "nvfp4", "16"),
        ("compressed-tensors", "mxfp8", "32"), ("torchao", "mxfp8", "32"), ("torchao", "float8_128x128", "128x128"),
    ],
)  # fmt: skip
def test_all_layers_that_do_not_fit_are_named_before_one_is_read(layout, format, block, tmp_path):
    path = checkpoint(tmp_path / "a", {name: torch.randn(shape) for name, shape in LAYERS.items()})
    out = tmp_path / ("b.gguf" if layout == "gguf" else "b")
    with pytest.raises(NotImplementedError) as error:
        mx.checkpoints.convert(path, out, layout=layout, format=f"{format}-weight-only")
    message = str(error.value)
    assert f"the layout {layout} holds whole blocks of {block} values, unlike " in message
    if block == "128x128":
        assert "layers.0.down.weight (64, 72), " in message and " and 3 more; name their modules in skip= (" in message
    else:
        named = [f"layers.{i}.down.weight (64, 72)" for i in range(4)]
        assert all(name in message for name in named) and "up" not in message
        assert message.endswith("; name their modules in skip= (down), or use the layout native")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    if block != "128x128":
        report = mx.checkpoints.convert(path, out, layout=layout, format=f"{format}-weight-only", skip=["down"])
        assert len(report.errors) == 4
    with pytest.raises(NotImplementedError, match=r"save: .* unlike .*layers\.0\.down\.weight \(64, 72\), "):
        state = {name: mx.quantize(torch.randn(shape), format) for name, shape in LAYERS.items()}
        mx.checkpoints.save(state, tmp_path / ("c.gguf" if layout == "gguf" else "c"), layout=layout)


def test_names_to_skip_are_a_list_or_a_generator(tmp_path):
    """Of a text, each letter was a name that matches nothing."""
    path = checkpoint(tmp_path / "a", {"mlp.up.weight": torch.randn(64, 64), "q.weight": torch.randn(64, 64)})
    for wrong in ("mlp", [3]):
        with pytest.raises(TypeError, match="convert: skip must be names of modules, got"):
            mx.checkpoints.convert(path, tmp_path / "b", format="mxfp8", skip=wrong)
    report = mx.checkpoints.convert(path, tmp_path / "b", format="mxfp8", skip=(name for name in ["mlp"]))
    assert list(report.errors) == ["q.weight"]


def test_one_file_of_several_is_noticed(tmp_path):
    """Its conversion has a part of the model, and looks whole."""
    mx.checkpoints.save({f"{i}.weight": torch.randn(64, 64) for i in range(2)}, tmp_path / "a", "plain", 20000)
    file = tmp_path / "a" / "model-00001-of-00002.safetensors"
    with pytest.warns(
        UserWarning, match=r"00001-of-00002.safetensors is one of 2 files of a checkpoint, and the other"
    ):
        mx.checkpoints.convert(file, tmp_path / "b", format="mxfp8")
    file.rename(single := tmp_path / "model-00001-of-00001.safetensors")
    mx.checkpoints.convert(single, tmp_path / "c", format="mxfp8")


def test_codes_without_scales_are_refused_by_name(tmp_path):
    state = {"a.weight": torch.randn(64, 64).to(torch.float8_e4m3fn), "b.weight": torch.randn(64, 64)}
    path = checkpoint(tmp_path / "a", state)
    with pytest.raises(TypeError, match=r"a\.weight is stored as float8_e4m3fn without scales that this layout knows"):
        mx.checkpoints.convert(path, tmp_path / "b", format="mxfp4")
    assert list(mx.checkpoints.convert(path, tmp_path / "b", format="mxfp4", skip=["a"]).errors) == ["b.weight"]


def test_a_conversion_quantizes_matrices_and_copies_other_files(tmp_path):
    state = {
        "model.embed_tokens.weight": torch.randn(64, 64), "model.layers.0.q_proj.weight": torch.randn(64, 64),
        "model.layers.0.mlp.gate.weight": torch.randn(8, 64), "model.norm.weight": torch.randn(64),
        "lm_head.weight": torch.randn(64, 64), "model.layers.1.up_proj.weight": torch.randn(64, 64),
        "model.layers.0.moe.router.layer.weight": torch.randn(8, 64),
    }  # fmt: skip
    path = checkpoint(tmp_path / "a", state, architectures=["Some"])
    (path / "tokenizer.json").write_text("{}")
    report = mx.checkpoints.convert(
        path, tmp_path / "out", layout="compressed-tensors", format="mxfp8-wo", skip=["up_proj"], max_shard_bytes=9000
    )
    assert list(report.errors) == ["model.layers.0.q_proj.weight"] and 0.02 < next(iter(report.errors.values())) < 0.03
    assert "1 rounded" in str(report) and len(report.exact) == 6
    after = mx.checkpoints.load(tmp_path / "out")
    direct = mx.quantize(state["model.layers.0.q_proj.weight"], "mxfp8")
    assert torch.equal(after["model.layers.0.q_proj.weight"].dequantize(torch.float32), direct.dequantize())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Some"] and "lm_head" in config["quantization_config"]["ignore"]
    assert (tmp_path / "out" / "tokenizer.json").exists()
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 3


def test_codes_move_between_layouts_without_rounding(tmp_path):
    path = checkpoint(tmp_path / "a", NVFP4 | {"m.input_global_scale": torch.ones(1)}, METHOD)
    report = mx.checkpoints.convert(path, tmp_path / "b", layout="modelopt")
    assert report.errors == {} and report.dropped == ["m.input_global_scale"]
    stored, there = load_file(tmp_path / "b" / "model.safetensors"), mx.checkpoints.load(tmp_path / "b")
    assert torch.equal(stored["m.weight"], NVFP4["m.weight_packed"])
    assert torch.equal(stored["m.weight_scale"].view(torch.uint8), NVFP4["m.weight_scale"].view(torch.uint8))
    assert torch.equal(there["m.weight"].dequantize(), mx.checkpoints.load(path)["m.weight"].dequantize())
    assert json.loads((tmp_path / "b" / "hf_quant_config.json").read_text())["quantization"]["group_size"] == 16
    mx.checkpoints.convert(tmp_path / "b", tmp_path / "c", layout="plain")
    assert not (tmp_path / "c" / "hf_quant_config.json").exists()
    plain = mx.checkpoints.load(tmp_path / "c")["m.weight"]
    assert plain.dtype == torch.bfloat16 and torch.equal(plain, there["m.weight"].dequantize())


def test_a_shard_has_at_most_the_bytes_that_were_asked_for(tmp_path):
    path = checkpoint(tmp_path / "a", {f"m{i}.weight": torch.randn(64, 64) for i in range(12)})
    mx.checkpoints.convert(path, tmp_path / "b", format="mxfp8", max_shard_bytes=10_000)
    shards = [load_file(file) for file in (tmp_path / "b").glob("*.safetensors")]
    sizes = [sum(t.nbytes for t in shard.values()) for shard in shards]
    assert max(sizes) <= 10_000 and len(sizes) == 6 and sum(map(len, shards)) == 24


# ---------------------------------------------------------------------------------------------- one file


ODD = {
    "codes": torch.randint(0, 256, (33, 17), dtype=torch.uint8), "a": torch.randn(64, 64), "flag": torch.tensor(True),
    "half": torch.randn(3).bfloat16(), "b": torch.randn(100, 100, dtype=torch.float64), "none": torch.ones(0, 5),
    "f": torch.randn(5), "e8m0": torch.ones(7).to(torch.float8_e8m0fnu), "c": torch.randn(64, 32).t(),
    "complex": torch.randn(3, dtype=torch.complex64), "one": torch.tensor(3.0),
}  # fmt: skip


@pytest.mark.parametrize(("small", "room"), [(1 << 26, 1 << 18), (3000, 1 << 12), (0, 4096), (0, 64), (20_000, 64)])
def test_a_file_grows_while_tensors_are_made(small, room, tmp_path, monkeypatch):
    """In memory, with room for the header, and with too little room."""
    monkeypatch.setattr(writing, "SMALL", small)
    monkeypatch.setattr(writing, "ROOM", room)
    mx.checkpoints.save(ODD, tmp_path / "x.safetensors", layout="plain")
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == ODD.keys()
    for name, t in ODD.items():
        same = loaded[name].reshape(-1).view(torch.uint8), t.reshape(-1).view(torch.uint8)
        assert loaded[name].dtype == t.dtype and loaded[name].shape == t.shape and torch.equal(*same), name
    mine = mx.checkpoints.load(tmp_path / "x.safetensors")
    assert all(torch.equal(mine[name].reshape(-1).view(torch.uint8), t.reshape(-1).view(torch.uint8))
               for name, t in loaded.items())  # fmt: skip
    raw = (tmp_path / "x.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    for fields in [v for k, v in json.loads(raw[8 : 8 + size]).items() if k != "__metadata__"]:
        itemsize = {"F64": 8, "F32": 4, "BF16": 2, "C64": 4}.get(fields["dtype"], 1)
        assert (8 + size + fields["data_offsets"][0]) % itemsize == 0


def test_values_that_safetensors_cannot_store_are_named(tmp_path):
    with pytest.raises(NotImplementedError, match=r"weight is a tensor .* which safetensors cannot store"):
        mx.checkpoints.save({"weight": torch.ones(2, dtype=torch.complex128)}, tmp_path / "x.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_workers_keep_the_order_and_leave_no_thread(workers):
    threads = torch.get_num_threads()
    found = list(in_order(lambda n: (n * n, torch.get_num_threads()), range(20), workers))
    assert [item for item, _ in found] == list(range(20)) and [n for _, (n, _) in found] == [n * n for n in range(20)]
    assert workers == 1 or {count for _, (_, count) in found} == {1}

    def failing_at(n):
        if n == 3:
            raise ZeroDivisionError("three")
        return n

    with pytest.raises(ZeroDivisionError, match="three"):
        list(in_order(failing_at, range(20), workers))
    assert torch.get_num_threads() == threads
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("mxtensor-worker")]


def test_a_conversion_by_threads_is_the_conversion_by_one(tmp_path):
    state = {f"m{i}.weight": torch.randn(300, 1024).bfloat16() for i in range(12)}
    path = checkpoint(tmp_path / "a", state)
    for name, threads in (("four", 4), ("one", 1)):
        torch.set_num_threads(threads)
        mx.checkpoints.convert(path, tmp_path / name, format="mxfp8", max_shard_bytes=700_000)
        assert torch.get_num_threads() == threads
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "four" / file.name).read_bytes()


@pytest.mark.exhaustive
@pytest.mark.skipif(resource is None, reason="needs the peak of a process")
@pytest.mark.parametrize("format", ["", "mxfp4-weight-only"])
def test_memory_does_not_depend_on_the_size_of_files(format, tmp_path):
    """1 GB in one file, to one file: the peak beyond that of a tiny conversion is a third of it."""
    values = torch.randn(1 << 20).bfloat16()
    big = {f"m{i}.weight": values.repeat(16).view(4096, 4096) for i in range(4)}
    with writing.Sink(tmp_path / "big.safetensors", 1 << 62) as out:
        for copy in range(8):
            out.add({f"l{copy}.{name}": t for name, t in big.items()})
        out.finish({})
    mx.checkpoints.save({"m.weight": values[: 1 << 10].view(32, 32)}, tmp_path / "small.safetensors", layout="plain")
    code = (
        "import resource, sys, mxtensor as mx; "
        "mx.checkpoints.convert(sys.argv[1], sys.argv[2], format=sys.argv[3] or None, progress=False); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peaks = [
        int(subprocess.check_output([sys.executable, "-c", code, tmp_path / f"{name}.safetensors",
                                     tmp_path / f"{name}-out.safetensors", format], text=True))
        for name in ("small", "big")
    ]  # fmt: skip
    assert (tmp_path / "big.safetensors").stat().st_size > 1_000_000_000
    assert peaks[1] - peaks[0] < 500_000  # kilobytes: 256 MiB that wait, 64 MiB of a small file, three tensors
