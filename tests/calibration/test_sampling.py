"""mx.sampled_data: token ids that the model draws itself."""

import pytest
import torch
from torch import nn

import mxtensor as mx

transformers = pytest.importorskip("transformers")


def llama(**settings):
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=20, bos_token_id=3, **settings,
    )  # fmt: skip
    torch.manual_seed(0)
    m = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    m.lm_head.weight.mul_(30)  # some tokens are likely, others not
    return m


def test_batches_have_the_shape_that_was_asked_for_and_a_seed_repeats_them():
    m = llama()
    data = mx.sampled_data(m, 37, 12, batch=16)
    assert [tuple(ids.shape) for ids in data] == [(16, 12), (16, 12), (5, 12)]
    ids = torch.cat(data)
    assert (ids[:, 0] == 3).all() and ids.min() >= 0 and ids.max() < 20 and len(ids.unique()) > 10
    assert torch.equal(ids, torch.cat(mx.sampled_data(m, 37, 12)))
    assert not torch.equal(ids, torch.cat(mx.sampled_data(m, 37, 12, seed=1)))
    assert (mx.sampled_data(m, 2, 3, start=7)[0][:, 0] == 7).all()
    starts = torch.arange(10) + 2
    data = mx.sampled_data(m, 10, 3, start=starts, at_once=4)
    assert torch.cat(data)[:, 0].equal(starts) and data[0].shape == (8, 3)


def test_tokens_are_drawn_in_evaluation_mode():
    m, other = llama(), llama(attention_dropout=0.9).train()
    assert torch.equal(torch.cat(mx.sampled_data(m, 20, 8)), torch.cat(mx.sampled_data(other, 20, 8)))
    assert all(module.training for module in other.modules())


def test_tokens_are_drawn_by_the_probabilities_of_the_model():
    m = llama()
    ids = torch.cat(mx.sampled_data(m, 2000, 4))
    expected = m(ids[:1, :1]).logits[0, -1].softmax(-1)
    found = torch.bincount(ids[:, 1], minlength=20) / len(ids)
    assert (found - expected).abs().max() < 0.04 and expected.max() > 0.1
    likely = ids[:, 1].mode().values
    after = ids[(ids[:, 1] == likely)]  # the cache remembers the token before
    expected = m(torch.tensor([[3, likely]])).logits[0, -1].softmax(-1)
    found = torch.bincount(after[:, 2], minlength=20) / len(after)
    assert (found - expected).abs().max() < 4 * (0.25 / len(after)) ** 0.5


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: mx.sampled_data(nn.Linear(2, 2)), ValueError, "Linear has no bos_token_id; pass start"),
        (lambda: mx.sampled_data(3), TypeError, "sampled_data: model is 3"),
        (lambda: mx.sampled_data(llama(), 0), ValueError, "sampled_data: sequences is 0"),
        (lambda: mx.sampled_data(llama(), 1, 2, start="a"), TypeError, "start"),
        (lambda: mx.sampled_data(llama(), 2, 2, start=torch.ones(3)), ValueError, r"has the shape \(3,\); pass one"),
    ],
)
def test_wrong_calls(call, error, message):
    with pytest.raises(error, match=message):
        call()
