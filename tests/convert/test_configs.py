"""quantize_ with a dict of configs: which key a weight takes, and what is said of keys that match nothing."""

import pytest
import torch
from torch import nn

import mxtensor as mx


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.lm_head = nn.Embedding(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)
        self.a, self.b, self.attn = nn.Linear(64, 64), nn.Linear(64, 64), nn.MultiheadAttention(64, 4)

    def forward(self, x):
        return self.lm_head(self.b(self.a(x)))


def formats(model):
    out = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, mx.MXTensor):
            out[name] = parameter.format.name
        elif hasattr(parameter, "linear_recipe"):
            out[name] = parameter.linear_recipe.name
    return out


F4 = "mxfp4_e2m1"
TABLES = [
    ({"a": "mxfp4"}, {"a.weight": F4}),
    ({"a.weight": "mxfp4", "a": "mxfp8"}, {"a.weight": F4}),
    ({"re:a": "mxfp8", "re:a\\.weight": "mxfp4"}, {"a.weight": F4}),
    ({"re:attn.*": None, "re:.*": "mxfp8", "a": "mxfp4", "b": None}, {
        "a.weight": F4, "embed.weight": "mxfp8_e4m3", "lm_head.weight": "mxfp8_e4m3",
    }),
    ({"_default": "mxfp4", "b": None, "re:attn": None}, {"a.weight": F4, "attn.out_proj.weight": F4}),
    ({"attn.in_proj_weight": "mxfp4"}, {"attn.in_proj_weight": F4}),
    ({"embed": "mxfp4", "_default": mx.recipe.MXFP8BlockScaling(), "re:attn.*": None}, {
        "embed.weight": F4, "a.weight": "MXFP8BlockScaling", "b.weight": "MXFP8BlockScaling",
    }),
    ({}, {}),
]  # fmt: skip


@pytest.mark.parametrize("table", TABLES, ids=lambda table: " ".join(table[0]))
def test_a_config_for_each_name(table):
    given, expected = table
    model = Model()
    if given:
        mx.quantize_(model, given)
    else:
        with pytest.warns(UserWarning, match="changed nothing"):
            mx.quantize_(model, given)
    assert formats(model) == expected
    assert torch.isfinite(model(torch.randn(4, 64))).all()


def test_names_that_match_nothing_are_named():
    model = Model()
    with pytest.warns(UserWarning, match="the name 'lm_haed', 'norm', 're:layers.*' of the dict of configs"):
        mx.quantize_(model, {"lm_haed": None, "norm": "mxfp8", "re:layers.*": "mxfp8", "a": "mxfp8"})
    assert formats(model) == {"a.weight": "mxfp8_e4m3"}


def test_the_name_of_what_only_holds_other_modules_matches_nothing():
    """As in torchao: its layers have the default, which is not what such a key looks like."""
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), nn.Linear(64, 64))
    with pytest.warns(UserWarning, match=r"the name '0' of the dict of configs; .* inside 0, pass 're:0\\\.\.\*'"):
        mx.quantize_(model, {"0": None, "0.1": None, "_default": "mxfp8"})
    assert formats(model).keys() == {"0.0.weight", "1.weight"}


@pytest.mark.parametrize(
    ("config", "filter_fn", "error", "message"),
    [
        (lambda: {"a": "mxfp9"}, None, ValueError, "config of 'a': unknown format"),
        (lambda: {"a": 8}, None, TypeError, "config of 'a': cannot quantize with 8"),
        (lambda: {"a": {"b": "mxfp8"}}, None, TypeError, "config of 'a': .* has a config for each name; pass one"),
        (lambda: {"re:(": "mxfp8"}, None, ValueError, "is not a valid regular expression"),
        (lambda: {3: "mxfp8"}, None, TypeError, "names of layers as keys, not 3"),
        (lambda: {"a": "mxfp8"}, lambda m, n: True, ValueError, "leave filter_fn out"),
        (lambda: {"a": "mxfp8", "b": "mxfp4"}, None, ValueError, "a.weight and b.weight are one"),
    ],
)
def test_what_cannot_be_honoured_is_refused(config, filter_fn, error, message):
    model = Model()
    model.b.weight = model.a.weight
    with pytest.raises(error, match=message):
        mx.quantize_(model, config(), filter_fn)
    assert not formats(model)
