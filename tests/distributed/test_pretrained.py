"""transformers loads quantized models with tensor parallelism: the results of ``pretrained_cases.py``."""

import pytest
import torch

import mxtensor as mx
from mxtensor.checkpoints import native
from tests.distributed.pretrained_cases import FORMATS, REFUSED
from tests.distributed.test_tensor_parallel import FLIPPED

MODELS = ("LlamaForCausalLM", "Qwen3MoeForCausalLM")


@pytest.mark.parametrize(
    ("format", "orientation", "shards", "reason"),
    [
        ("mxfp8", "rowwise", {0: 2}, None),
        ("mxfp8", "rowwise", {1: 3}, None),
        ("mxfp8", "rowwise", {1: 2}, "blocks of 32 values in this dimension, and 48 is not a multiple of 32"),
        ("mxfp8", "rowwise", {0: 5}, "64 values do not divide into 5 equal parts"),
        ("mxfp8", "both", {0: 2}, "a columnwise copy is stored transposed"),
        ("mxfp8[32x32]", "rowwise", {0: 4}, "blocks of 32 values in this dimension, and 16 is not a multiple of 32"),
        ("float8_row", "rowwise", {0: 2}, None),
        ("float8_row", "rowwise", {1: 2}, "one scale for all values of this dimension"),
        ("nvfp4", "rowwise", {0: 2}, "nvfp4 has one scale for the whole tensor"),
    ],
)  # fmt: skip
def test_parts_that_ranks_can_read_of_a_stored_tensor(format, orientation, shards, reason):
    stored = mx.quantize(torch.randn(64, 96), format, orientation=orientation)
    found = native.why_not_sharded("w", native.header("w", stored)["mxtensor.w"], shards)
    assert found is None if reason is None else reason in found


@pytest.mark.exhaustive
@pytest.mark.parametrize("what", ["values", "codes"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("model", MODELS)
def test_each_rank_has_its_part_in_codes(model, format, what, ranks):
    for told in ranks("loaded_with_tensor_parallelism"):
        kind, difference = told[model, format, what]
        assert kind == "MXTensor" and difference < FLIPPED


@pytest.mark.exhaustive
@pytest.mark.parametrize("format", REFUSED)
@pytest.mark.parametrize("model", MODELS)
def test_codes_whose_scales_span_ranks_are_refused(model, format, ranks):
    for told in ranks("loaded_with_tensor_parallelism"):
        refusal = told[model, format, "codes"]
        assert "is quantized in the checkpoint, and ranks cannot read it in parts" in refusal
        assert "quantization_config=mx.TransformersConfig(format)" in refusal
