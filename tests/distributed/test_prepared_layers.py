"""Layers that are split before they are quantized for inference, compared with one rank: ``prepared_cases.py``."""

import pytest
import torch

from tests.distributed.test_tensor_parallel import FLIPPED
from tests.helpers.ranks import DEVICE


def test_prepared_layers_train_and_convert_after_any_style_has_split_them(ranks):
    for found in ranks("prepared_layers_of_any_style"):
        assert len(found) == 5
        for losses, alone, (of_gradients, of_result), (kinds, local) in found.values():
            assert losses == pytest.approx(alone, rel=1e-5 if DEVICE == "cpu" else 1e-2) and losses[-1] < losses[0]
            assert of_gradients < max(1e-3, FLIPPED) and of_result < FLIPPED
            assert kinds == {torch.nn.Linear, torch.nn.GELU} and local.__name__ == "MXTensor"


def test_layers_that_are_split_are_quantized_for_inference_and_what_cannot_be_is_refused(ranks):
    for found, (trains, both, gathered, cut, whole) in ranks("layers_quantized_after_they_were_split"):
        assert len(found) == 3
        for of_result, codes_left in found.values():
            assert of_result < FLIPPED and codes_left == ("MXTensor", 1)
        for kind, text in (trains, both, gathered):
            assert kind == "ValueError" and "0.weight is already sharded, (256, 128) as" in text
        assert cut[0] == "NotImplementedError" and "(64, 96)" in cut[1] and "48 is not a multiple of 32" in cut[1]
        assert whole[0] == "NotImplementedError" and "nvfp4 has one scale for the whole tensor" in whole[1]
