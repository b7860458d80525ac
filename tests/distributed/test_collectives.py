"""Collectives of a quantized weight on two ranks: the results of ``collective_cases.py``."""

import torch


def test_collectives_move_codes_and_raise_if_they_would_add_or_mix_them(ranks):
    first, second = ranks("other_collectives")
    assert first == second
    told, broadcasts = first
    for kind, text in told:
        assert kind == "NotImplementedError" and ".components" in text
    assert len(told) == 2 and broadcasts == [[2.0], [1.0]]


def test_a_broadcast_marks_its_write_of_a_weight(ranks):
    """Derived forms, which kernels cache, and views that cut blocks follow what a rank receives."""
    receiver, sender = ranks("broadcast_of_a_weight_in_use")
    for key, (gone, new, changed, views, same, values) in receiver.items():
        assert all(gone) and all(new) and all(views) and not same, key
        assert any(changed), key
        assert sender[key][4] and torch.equal(values, sender[key][5]), key
