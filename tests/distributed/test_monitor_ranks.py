"""The monitor of training on two ranks: the results of ``monitor_cases.py``."""

LAYER = [
    "self_attention.layernorm_qkv.query_weight+key_weight+value_weight", "self_attention.proj.weight",
    "layernorm_mlp.fc1_weight", "layernorm_mlp.fc2_weight",
]  # fmt: skip


def test_layers_that_are_split_or_sharded_are_seen(ranks):
    for found in ranks("monitored_layers"):
        for (kind, _), names in found.items():
            assert names == (LAYER if kind in ("layer", "sharded") else ["0.weight", "2.weight"]), kind
        assert len(found) == 7
