"""layers_are_called: hooks of layers run in compiled modules and in torch's fused encoder layers."""

import pytest
import torch
from torch import nn

from mxtensor.core.called_layers import layers_are_called


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return torch.relu(self.layer(x))


def test_a_compiled_module_runs_eagerly_inside_and_compiled_after():
    runs = []

    def backend(graph, inputs):
        return lambda *args: runs.append(graph) or graph(*args)

    model, x = Model(), torch.randn(2, 4)
    model.compile(backend=backend)
    model(x)
    with layers_are_called(), model.layer.register_forward_pre_hook(lambda layer, args: runs.append(layer)):
        model(x)
    model(x)
    assert len(runs) == 3 and runs[0] is runs[2] and runs[1] is model.layer


@pytest.mark.parametrize("fused", [True, False])
def test_a_fused_encoder_gets_no_nested_tensor_and_the_setting_comes_back(fused):
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    model, padding = nn.TransformerEncoder(layer, 1).eval(), torch.tensor([[False, False, True], [False, False, False]])
    seen = []
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(fused)
    try:
        with layers_are_called(), torch.no_grad(), pytest.raises(KeyError):
            with model.layers[0].linear1.register_forward_pre_hook(lambda layer, args: seen.append(args[0])):
                model(torch.randn(2, 3, 8), src_key_padding_mask=padding)
            raise KeyError
        assert torch.backends.mha.get_fastpath_enabled() == fused
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
    assert seen[0].shape == (2, 3, 8) and not seen[0].is_nested
