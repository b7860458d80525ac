"""Models that decode: the loop, compiled layers, rows."""

import argparse

import pytest
import torch
import transformers

import mxtensor as mx
from benchmarks import generate
from benchmarks.peers import llama

TINY = argparse.Namespace(tiny=True, device="cpu", formats=None)
SMALL = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=1000,
)  # fmt: skip


def test_a_decoder_gives_the_tokens_of_the_model_without_a_cache():
    torch.manual_seed(0)
    model, prompt = llama(**SMALL).float(), torch.randint(0, 200, (1, 5))
    with torch.no_grad():
        whole = prompt
        for _ in range(6):
            following = model(input_ids=whole, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            whole = torch.cat([whole, following], 1)
        decoder = generate.Decoder(model, 16)
        decoder.prefill(prompt)
        tokens = [decoder.token.item()]
        for _ in range(5):
            decoder.step()
            tokens.append(decoder.token.item())
    assert tokens == whole[0, 5:].tolist() and isinstance(model, transformers.LlamaForCausalLM)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("config", ["bfloat16", "mxfp8-weight-only", "mxfp8", "mxfp4-weight-only"])
def test_compiled_layers_share_one_graph_for_all_layers_and_tokens(config):
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model, prompt = llama(**SMALL), torch.randint(0, 1000, (1, 8))
    if config != "bfloat16":
        mx.quantize_(model, config)
    caches = []
    with torch.no_grad():
        for compiles in (False, True):
            decoder = generate.Decoder(model, 16)
            decoder.prefill(prompt)
            if compiles:
                generate.compile_layers(decoder)
            for token in (5, 400, 31):
                decoder.token.fill_(token)
                decoder.step()
            caches.append(torch.stack([t for c in decoder.cache.layers for t in (c.keys, c.values)]).double())
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for _ in range(2):
            model(input_ids=prompt, use_cache=False, logits_to_keep=1)
    assert (graphs, torch._dynamo.utils.counters["stats"]["unique_graphs"]) == (1, 2)
    assert (caches[0] - caches[1]).norm() / caches[0].norm() < 0.01 and caches[0].norm() > 0


def test_a_model_is_measured_and_its_weight_bytes_are_counted():
    with torch.no_grad():
        rows = [generate.decoded(config, TINY) for config in ("bfloat16", "mxfp8")]
    assert rows[1].weight_bytes / rows[0].weight_bytes == pytest.approx(mx.FORMATS["mxfp8"].bits_per_value / 16)
    assert rows[1].kernels["mxfp8"] and all(r.tokens_a_second > 0 and r.times["prefill"] > 0 for r in rows)


class Timed:
    """What Contenders does, with times of two rounds."""

    def __init__(self):
        self.failed = {"mxfp4": "no"}
        self.rounds = [{"bfloat16": (9.0, 49.0), "mxfp8": (8.0, 28.0)}, {"bfloat16": (9.0, 89.0), "mxfp8": (8.0, 48.0)}]

    def forgive(self):
        pass

    def side_by_side(self, method, *args):
        return {"bfloat16": 1.0, "mxfp8": 2.0}

    def one_by_one(self, method):
        return self.rounds.pop()


def test_tokens_are_compared_with_bfloat16_of_the_same_round():
    args = argparse.Namespace(formats=("bfloat16", "mxfp8", "mxfp4"), repeats=2, tiny=True)
    base, ours, failed = generate.generated(Timed(), "static", 8, args)
    assert (base.times["token"], ours.times["token"]) == (15.0, 7.5) and ours.speedup("token") == 2.0
    assert ours.tokens_a_second == pytest.approx(8e3 / 7.5) and ours.compile_s == 2.0
    assert failed.failed == {"generate": "no"} and not failed.times


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", [generate.EAGER, generate.STATIC])
def test_generate_makes_the_tokens_that_it_is_asked_for(mode):
    model = generate.model_of("mxfp8", TINY)
    assert generate.Generate(model, mode, 2, "cpu").milliseconds(5) > 0
    torch._dynamo.reset()


def test_the_first_token_waits_for_quantize_and_two_passes():
    times = {"quantize": 2000.0, "first": 500.0, "second": 100.0, "steady": 20.0}
    assert generate.FirstRow("", times, config="mxfp8", cache="cold").wait_s == 2.6
    assert generate.first_tokens("mxfp8", TINY).keys() == times.keys()
