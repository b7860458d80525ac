"""Arguments of TransformerEngine for what is not here: those that ask for nothing are accepted, others are errors."""

import pytest
import torch
import torch.nn.functional as F

import mxtensor.te as te

X = torch.randn(8, 2, 32)
USERBUFFERS = dict.fromkeys(("ub_overlap_ag", "ub_overlap_rs", "ub_bulk_dgrad", "ub_bulk_wgrad"), False)


@pytest.mark.parametrize(
    ("kind", "sizes", "options", "given"),
    [
        (te.Linear, (32, 32), {**USERBUFFERS, "ub_name": "proj", "symmetric_ar_type": None}, {"fp8_output": False}),
        (te.LayerNormLinear, (32, 32), {**USERBUFFERS, "ub_name": "qkv"}, {"fp8_grad": False}),
        (te.LayerNormMLP, (32, 64), USERBUFFERS, {}),
        (te.GroupedLinear, (2, 32, 32), {"ub_name": None, "single_grouped_weight": False}, {"out": None}),
        (te.MultiheadAttention, (32, 4), {"softmax_type": "vanilla", "seq_length": 8}, {"inference_params": None}),
        (
            te.TransformerLayer, (32, 64, 4),
            {"ub_tp_comm_overlap": False, "ub_overlap_ag": True, "ub_bulk_wgrad": True, "bottom_right_diagonal": None},
            {"core_attention_bias_type": "no_bias", "fast_zero_fill": True, "cu_seqlens_q": None},
        ),
    ],
)  # fmt: skip
def test_values_that_ask_for_nothing_change_nothing(kind, sizes, options, given):
    torch.manual_seed(0)
    plain = kind(*sizes).eval()
    torch.manual_seed(0)
    layer = kind(*sizes, **options).eval()
    x, rest = (X.view(16, 32), ([4, 12],)) if kind is te.GroupedLinear else (X, ())
    assert torch.equal(layer(x, *rest, **given), plain(x, *rest))


def test_attention_of_one_rank():
    q = torch.randn(8, 2, 4, 8)
    core = te.DotProductAttention(4, 8, cp_group=None, cp_comm_type="p2p", cp_stream=object(), name="core")
    y = core(q, q, q, core_attention_bias=None, alibi_slopes=None, max_seqlen_q=None, num_splits=1)
    q = q.permute(1, 2, 0, 3)
    expected = F.scaled_dot_product_attention(q, q, q, is_causal=True).permute(2, 0, 1, 3).flatten(2)
    assert torch.equal(y, expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: te.Linear(32, 32, ub_overlap_ag=True), "Linear: ub_overlap_ag=True is not available: collectives"),
        (lambda: te.LayerNormMLP(32, 64, symmetric_ar_type="two_shot"), "symmetric_ar_type='two_shot' is not"),
        (lambda: te.TransformerLayer(32, 64, 4, ub_tp_comm_overlap=True), "TransformerLayer: ub_tp_comm_overlap"),
        (lambda: te.Linear(32, 32, name="up")(X, fp8_output=True), "up: fp8_output=True is not available: results"),
        (lambda: te.MultiheadAttention(32, 4, softmax_type="learnable"), "softmax_type='learnable' is not"),
        (lambda: te.MultiheadAttention(32, 4, cp_group=[0, 1]), "call set_context_parallel_group"),
        (lambda: te.TransformerLayer(32, 64, 4)(X, core_attention_bias_type="alibi"), "attention adds no bias"),
        (lambda: te.TransformerLayer(32, 64, 4)(X, cu_seqlens_q=X), "sequences are not packed"),
        (lambda: te.GroupedLinear(2, 32, 32, single_grouped_weight=True), "parameters of its own"),
    ],
)
def test_others_name_the_way_out(call, message):
    with pytest.raises(NotImplementedError, match=message):
        call()


def test_an_unknown_argument_is_a_type_error():
    with pytest.raises(TypeError, match="Linear got an unexpected keyword argument 'ub_overlap'"):
        te.Linear(32, 32, ub_overlap=False)
    with pytest.raises(TypeError, match="TransformerLayer got an unexpected keyword argument 'mask'"):
        te.TransformerLayer(32, 64, 4)(X, mask=None)


def test_a_module_says_whether_its_weight_gradients_wait():
    assert not te.Linear(32, 32).need_backward_dw()
    assert te.Linear(32, 32, delay_wgrad_compute=True).need_backward_dw()
