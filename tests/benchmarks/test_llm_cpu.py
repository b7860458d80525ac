"""The benchmark of language models on a CPU: its figures and contenders, on a made-up model."""

import json
from importlib.util import find_spec

import pytest
import torch

pytest.importorskip("transformers")

import mxtensor as mx
from benchmarks import llama_cpp, llm_cpu
from benchmarks.llama_cpp import LlamaCpp, write_gguf


@pytest.fixture(autouse=True)
def fresh_dynamo():
    yield
    torch._dynamo.reset()


def row(model="llama-1b", batch=1, **times):
    times = {"bfloat16": 10.0, "float32": 16.0} | times
    read = {"bfloat16": 100_000_000, "mxfp8-weight-only": 50_000_000, "mxfp4-weight-only": 25_000_000}
    made = llm_cpu.LlmRow(f"{model} {batch}", times)
    made.model, made.batch, made.bandwidth, made.read = model, batch, 20.0, read
    return made


FAST = {"mxfp8-weight-only": 4.0, "mxfp4-weight-only": 2.0, "llama.cpp Q8_0": 4.0, "llama.cpp MXFP4": 1.0}


def test_figures_of_a_row():
    found = row(batch=4, **FAST)
    assert found.tokens_a_second("mxfp8-weight-only") == 1000
    assert found.over_plain("mxfp8-weight-only") == 2.5  # bfloat16 is the faster one
    found.times["float32"] = 8.0
    assert found.over_plain("mxfp8-weight-only") == 2.0
    assert found.ratio("mxfp4-weight-only", "llama.cpp MXFP4") == 0.5
    assert found.share("mxfp8-weight-only") == pytest.approx(50e6 / 4e-3 / 20e9)
    assert found.over_plain("nvfp4-weight-only") != found.over_plain("nvfp4-weight-only")  # NaN


def test_lines_begin_with_the_worst_row():
    rows = [row(**FAST), row("smollm2", **FAST | {"mxfp8-weight-only": 8.0})]
    lines = llm_cpu.lines(rows)
    assert [line[0] for line in lines][:1] == ["smollm2 1"] and len(lines) == 12
    assert all(len(line) == len(llm_cpu.HEADER) for line in lines)


def test_the_bytes_of_a_step():
    model = llm_cpu.load("tiny")
    whole = mx.model_size(model).nbytes
    assert llm_cpu.read_bytes(model) == whole
    small = llm_cpu.variant(model, "mxfp4-weight-only", include_head=True)
    assert llm_cpu.read_bytes(small) == mx.model_size(small).nbytes < 0.3 * whole
    assert llm_cpu.read_bytes(llm_cpu.variant(model, "float32", True)) == 2 * whole
    assert llm_cpu.read_bytes(model) == whole  # the model is as it was


def test_steps_repeat_the_same_work():
    model = llm_cpu.load("tiny")
    steps = llm_cpu.Steps(model, batch=2, mode="eager")
    first, second = steps.step(), steps.step()
    assert torch.equal(first, second) and first.shape[:2] == (2, 1)
    ids = torch.cat((steps.prompt, steps.ids), 1)
    with torch.no_grad():
        assert torch.allclose(model(ids).logits[:, -1:].float(), first.float(), atol=0.05)


def test_steps_of_prompts_repeat_the_whole_prompt():
    model = llm_cpu.load("tiny")
    steps = llm_cpu.Steps(model, batch=2, mode=llm_cpu.READING, prompt=24)
    first, second = steps.step(), steps.step()
    assert torch.equal(first, second) and steps.prompt.shape == (2, 24)
    with torch.no_grad():
        assert torch.allclose(model(steps.prompt).logits[:, -1:].float(), first.float(), atol=0.05)
    made = llm_cpu.LlmRow("", {"bfloat16": 12.0}, batch=2, mode=llm_cpu.READING, prompt=24)
    assert made.tokens_a_second("bfloat16") == 2 * 24 * 1e3 / 12


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["attention", "compiled"])
def test_steps_of_other_modes_are_those_of_eager_and_are_taken_back(mode):
    model = llm_cpu.variant(llm_cpu.load("tiny"), "mxfp8-weight-only", include_head=True)
    wanted = llm_cpu.Steps(model, batch=1, mode="eager").step()
    steps = llm_cpu.Steps(model, batch=1, mode=mode)
    assert torch.allclose(steps.step().float(), wanted.float(), atol=0.05)
    assert model.config._attn_implementation == ("mxtensor" if mode == "attention" else "sdpa")
    steps.restore()
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.exhaustive
def test_main_writes_a_record(tmp_path, capsys):
    path = tmp_path / "llm_cpu.json"
    options = ["--models", "tiny", "--threads", "1", "--batches", "2", "--modes", "eager", "--no-peers"]
    options += ["--fastest", "--cpu-time"]
    options += ["--repeats", "2", "--formats", "mxfp8-weight-only", "--json", str(path)]
    llm_cpu.main(options)
    out = capsys.readouterr().out
    assert "tiny, 1 threads, batch 2, eager" in out
    (found,) = json.loads(path.read_text())["decode"]["rows"]
    assert set(found["times"]) == {"bfloat16", "float32", "mxfp8-weight-only"} and not found["failed"]
    assert found["bandwidth"] > 0 and found["load"] >= 0 and found["read"]["float32"] == 2 * found["read"]["bfloat16"]
    for _ in range(2):
        llm_cpu.main([*options, "--modes", "attention", "--add"])
        saved, added = json.loads(path.read_text())["decode"]["rows"]
        assert saved == found and added["mode"] == "attention"
    llm_cpu.main([*options, "--prompt", "300", "--add"])
    *_, longer = json.loads(path.read_text())["decode"]["rows"]
    assert longer["prompt"] == 300 and longer["work"] == "tiny, 1 threads, batch 2, eager, after 300 tokens"
    assert longer["times"].keys() == found["times"].keys() and len(json.loads(path.read_text())["decode"]["rows"]) == 3


def test_compiled_models_can_have_other_batches(tmp_path, monkeypatch):
    measured = []

    class Bench:
        def __init__(self, name, *_):
            self.name = name

        def row(self, threads, batch, mode, *_):
            measured.append((self.name, threads, batch, mode))
            found = row(self.name, batch)
            found.threads, found.mode = threads, mode
            return found

    monkeypatch.setattr(llm_cpu, "Bench", Bench)
    options = ["--models", "smollm2", "llama-1b", "--threads", "16", "1", "--batches", "4", "1"]
    options += ["--modes", "eager", "compiled", "--compiled-batches", "1", "--json", str(tmp_path / "llm_cpu.json")]
    llm_cpu.main(options)
    assert measured == [
        (model, threads, batch, mode)
        for model in ("smollm2", "llama-1b")
        for mode, batches in (("eager", (4, 1)), ("compiled", (1,)))
        for threads in (16, 1)
        for batch in batches
    ]
    llm_cpu.main([*options, "--models", "smollm2", "--modes", "compiled", "--add"])
    rows = json.loads((tmp_path / "llm_cpu.json").read_text())["decode"]["rows"]
    assert len(measured) == 14 and len(rows) == 12  # two were measured again


@pytest.mark.skipif(find_spec("gguf") is None, reason="gguf is not installed")
@pytest.mark.parametrize("kind", ["Q8_0", "MXFP4"])
def test_matrices_are_quantized_in_threads_as_in_one(kind, threads):
    import gguf

    array, type_ = torch.randn(37, 64).numpy(), gguf.GGMLQuantizationType[kind]
    threads(5)
    assert (llama_cpp._quantized(array, type_) == gguf.quants.quantize(array, type_)).all()


def test_cpu_time_is_for_one_thread(capsys):
    with pytest.raises(SystemExit):
        llm_cpu.main(["--cpu-time", "--threads", "1", "2"])
    assert "--cpu-time needs --threads 1" in capsys.readouterr().err


def test_peers_that_are_not_installed_are_named_as_failed(tmp_path, monkeypatch):
    def missing(*_):
        raise ImportError("No module named 'gguf'")

    monkeypatch.setattr(llm_cpu, "write_gguf", missing)
    bench = llm_cpu.Bench("tiny", (), True, True, tmp_path)
    assert bench.failed["llama.cpp Q8_0"] == "ImportError: No module named 'gguf'"


@pytest.mark.skipif(find_spec("llama_cpp") is None or find_spec("gguf") is None, reason="llama.cpp is not installed")
@pytest.mark.parametrize("kind", ["F32", "Q8_0", "MXFP4"])
def test_llama_cpp_computes_the_same_model(tmp_path, kind):
    import gguf

    model = llm_cpu.load("tiny").float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() == 2 else 1)
    peer = LlamaCpp(write_gguf(model, tmp_path / "a.gguf", kind), 2, 8, threads=1, context=32)
    peer.step()
    first = peer.logits()
    peer.step()
    assert torch.equal(first, peer.logits())
    tokens = torch.tensor([[*(7 + i % 89 for i in range(8)), 7]])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:  # what the file has of it
                type_ = gguf.GGMLQuantizationType[kind]
                stored = gguf.quants.quantize(parameter.numpy(), type_)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(stored, type_)))
        wanted = model(tokens).logits[0, -1]
    error = ((first - wanted).norm() / wanted.norm()).item()
    assert error < (1e-3 if kind == "F32" else 0.05)  # llama.cpp rounds activations to int8
    peer.close()
