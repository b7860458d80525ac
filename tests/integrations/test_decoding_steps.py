"""``mx.compile_decoding``: which calls of a model are compiled steps, and which stay eager; threads share a model."""

import threading
import warnings

import pytest
import torch

import mxtensor as mx
from mxtensor.core import progress
from tests.helpers import tiny_models
from tests.integrations.test_compile_decoding import graphs, llama, prompt, tokens, uncompiled
from tests.integrations.test_decoding_families import STEPS, generated

transformers = pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def replays(model):
    return sum(graph.runs for graph in model.forward.graphs)


@pytest.mark.exhaustive
@pytest.mark.parametrize("batch", [1, 2])
def test_steps_of_a_sliding_window_are_replayed_before_and_after_it_is_full(batch):
    """One graph until the window is full, and one for later steps; the counts that they change stay outside."""
    model, before = mx.quantize_(tiny_models.made("Gemma3Text"), "mxfp8-weight-only"), graphs()
    wanted = [generated(model, batch, length) for length in (7, 20, 3)]
    mx.compile_decoding(model)
    for want, length in zip(wanted, (7, 20, 3), strict=True):
        assert torch.equal(generated(model, batch, length), want)
    assert graphs() == before + 2
    for want, length in zip(wanted, (7, 20, 3), strict=True):
        runs = replays(model)
        assert torch.equal(generated(model, batch, length), want)
        assert replays(model) - runs >= STEPS - 3  # a recording for each graph and cache
    assert graphs() == before + 2


@pytest.mark.exhaustive
def test_steps_without_a_mask_and_positions_compute_these_with_counts():
    """``generate`` passes both; the model computes them of the count of the first layer, which has a window."""
    model = mx.quantize_(tiny_models.made("Gemma3Text"), "mxfp8-weight-only")
    reference = uncompiled(model)
    mx.compile_decoding(model)
    for length in (3, 20):
        found = []
        for one in (reference, model):
            cache = transformers.StaticCache(config=one.config, max_cache_len=64)
            with torch.no_grad():
                logits = [one(input_ids=prompt(1, length), past_key_values=cache).logits[:, -1:]]
                for _ in range(25):
                    ids = logits[-1].argmax(-1)
                    logits.append(one(input_ids=ids, past_key_values=cache).logits)
            assert cache.layers[0].cumulative_length_int == length + 25
            found.append(torch.cat(logits, 1))
        torch.testing.assert_close(*found)
        assert torch.equal(found[0].argmax(-1), found[1].argmax(-1))
    assert len(model.forward.graphs) <= 4 and replays(model) > 30


@pytest.mark.exhaustive
def test_from_the_second_size_of_the_cache_on_there_is_one_graph_for_any():
    """``generate`` gives a call the size of the longest call before it, and writes that to the model."""
    model, before = mx.compile_decoding(llama()), graphs()
    for size in (64, 80, 96, 112, 128):
        assert torch.equal(
            tokens(model, prompt(1, 5), max_cache_len=size), tokens(uncompiled(model), prompt(1, 5), max_cache_len=size)
        )
    assert graphs() == before + 2


def test_a_prompt_of_one_token_is_not_a_step():
    model, before = mx.compile_decoding(llama()), graphs()
    for length in (1, 4, 1):
        assert torch.equal(tokens(model, prompt(1, length)), tokens(uncompiled(model), prompt(1, length)))
    assert graphs() == before + 1 and model.forward.graphs[0].refusal is None


def test_sizes_for_which_torch_makes_no_more_graphs_stay_eager():
    model = mx.compile_decoding(llama())
    want = [tokens(uncompiled(model), prompt(batch, 5)) for batch in (1, 2)]
    with torch._dynamo.config.patch(recompile_limit=1):
        assert torch.equal(tokens(model, prompt(1, 5)), want[0])
        with pytest.warns(UserWarning, match="LlamaForCausalLM has as many graphs as .* one max_cache_len"):
            assert torch.equal(tokens(model, prompt(2, 5)), want[1])
        before = replays(model)
        assert torch.equal(tokens(model, prompt(1, 5)), want[0])
    assert len(model.forward.graphs) == 1 and replays(model) > before


def test_a_model_that_torch_cannot_compile_stays_eager():
    model, called = llama(), []
    model.model.norm.register_forward_pre_hook(lambda module, given: called.append(torch._dynamo.graph_break()))
    want = tokens(model, prompt(1, 5))
    mx.compile_decoding(model)
    with pytest.warns(UserWarning, match="cannot compile a step of LlamaForCausalLM; its steps stay eager"):
        assert torch.equal(tokens(model, prompt(1, 5)), want)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(tokens(model, prompt(1, 5)), want)
    assert not model.forward.graphs


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("shared", [True, False], ids=["one model", "two models"])
def test_threads_have_the_tokens_of_their_own_prompts(shared):
    models = [llama()] * 2 if shared else [llama(), llama(seed=3)]
    prompts = [prompt(1, 5), prompt(1, 9)]
    wanted = [tokens(model, ids) for model, ids in zip(models, prompts, strict=True)]
    for model in set(models):
        mx.compile_decoding(model)
    failed, start = [], threading.Barrier(2)

    def decode(number):
        start.wait()
        for _ in range(6):
            try:
                if not torch.equal(tokens(models[number], prompts[number]), wanted[number]):
                    failed.append(number)
            except Exception as error:
                failed.append(error)

    threads = [threading.Thread(target=decode, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    for model, ids, want in zip(models, prompts, wanted, strict=True):  # while a thread compiles, others stay eager
        assert torch.equal(tokens(model, ids), want)
        assert len(model.forward.graphs) <= 2  # one more where the other thread compiled at that moment


def test_what_torch_compiles_is_said_with_a_clock_and_not_at_later_steps(monkeypatch, capsys):
    model = mx.compile_decoding(llama())
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    tokens(model, prompt(1, 7))
    said = "compile_decoding: torch compiles the steps of LlamaForCausalLM, once for each kind of cache"
    assert said in (shown := capsys.readouterr().err) and "minutes on a busy processor: 00:" in shown
    monkeypatch.undo()
    tokens(model, prompt(1, 3))
    assert "compile_decoding" not in capsys.readouterr().err
