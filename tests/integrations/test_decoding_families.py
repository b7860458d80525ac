"""Models of many families decode with ``mx.compile_decoding`` as they do without it, in a bounded number of graphs."""

import copy

import pytest
import torch

import mxtensor as mx
from tests.helpers import tiny_models

STEPS = 25
FORMATS = "mxfp8-weight-only", "mxfp4-weight-only"
"""Not those that cast activations to 4 bits: attention to equal tokens gives values that are halfway between two codes
except for the last bit, in which compiled and eager sums may differ."""
CASES = {  # batch, tokens of the prompt, options
    "greedy": (1, 7, {}),
    "a prompt that is longer than a window": (2, 20, {}),
    "a prompt of one token": (1, 1, {}),
    "beams": (1, 5, {"num_beams": 3}),
    "samples": (1, 5, {"do_sample": True, "num_return_sequences": 2}),
    "beams without a static cache": (2, 5, {"num_beams": 2, "cache_implementation": None, "max_cache_len": None}),
}


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def generated(model, batch, length, family="Llama", **options):
    torch.manual_seed(0)
    usual = {"cache_implementation": "static", "max_cache_len": 64, "do_sample": False}
    given = tiny_models.inputs(family, batch, length)
    return model.generate(**given, max_new_tokens=STEPS + 1, min_new_tokens=STEPS + 1, **(usual | options))


def runs(model):
    return sum(graph.runs for graph in model.forward.graphs)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler, on itself
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_a_family_decodes_as_without_compiled_steps(family):
    model = tiny_models.made(family)
    mx.quantize_(model, FORMATS[tiny_models.FAMILIES.index(family) % 2])
    reference = copy.deepcopy(model)
    mx.compile_decoding(model)
    for batch, length, options in CASES.values():
        want = generated(reference, batch, length, family, **options)
        for call in ("first", "second"):
            assert torch.equal(generated(model, batch, length, family, **options), want), call
    found = len(model.forward.graphs)
    batches = 2  # one sequence, and any number of them
    windows = 1 + (family in tiny_models.WITH_WINDOWS)  # before and after it is full
    encoded = family in tiny_models.ENCODERS_AND_DECODERS  # inputs of the encoder of more than one length
    assert 0 < found <= batches * windows + encoded
    assert all(graph.refusal is None for graph in model.forward.graphs)
    before = runs(model)
    generated(model, 1, 7, family)
    assert runs(model) - before >= STEPS - windows  # a recording for each graph and cache
    assert len(model.forward.graphs) == found


def of_a_target_and_an_assistant(**options):
    model, assistant = mx.quantize_(tiny_models.made("Llama"), "mxfp8-weight-only"), tiny_models.made("Llama", seed=3)
    want = generated(model, 1, 7, assistant_model=assistant, **options)
    mx.compile_decoding(model), mx.compile_decoding(assistant)
    return model, assistant, want


@pytest.mark.exhaustive
def test_assisted_decoding_has_the_same_tokens():
    options = {"cache_implementation": None, "max_cache_len": None}
    model, assistant, want = of_a_target_and_an_assistant(**options)
    for _ in range(2):
        assert torch.equal(generated(model, 1, 7, assistant_model=assistant, **options), want)
    assert not model.forward.graphs and not assistant.forward.graphs
