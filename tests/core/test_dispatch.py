"""The tables of rules refuse a second entry, and the registered rule runs."""

import pytest
import torch

import mxtensor as mx
from mxtensor.core.dispatch import FUNCTION_TABLE, OP_TABLE, implements, implements_function

aten = torch.ops.aten


def test_an_op_has_one_rule():
    before = dict(OP_TABLE)
    with pytest.raises(RuntimeError, match=r"aten\.mm\.default already has the rule mxtensor\.ops\.matmul\.mm"):
        implements(aten.mm.default)(lambda func, args, kwargs: None)
    with pytest.raises(RuntimeError, match=r"already has the rule mxtensor\.ops\.functional\.einsum"):
        implements_function(torch.einsum)(lambda *args: None)
    assert before == OP_TABLE and FUNCTION_TABLE[torch.einsum].__name__ == "einsum"


def test_every_rule_says_what_it_does():
    assert all(rule.__doc__ for rule in (*OP_TABLE.values(), *FUNCTION_TABLE.values()))


def test_a_registered_rule_is_the_one_that_runs():
    w = mx.quantize(torch.randn(8, 64), "mxfp8")
    with mx.strict(), pytest.raises(NotImplementedError, match=r"aten\.neg\.default would dequantize"):
        torch.neg(w)
    implements(aten.neg.default)(lambda func, args, kwargs: func(args[0].dequantize()))
    try:
        with mx.strict():
            assert torch.equal(-w, -w.dequantize())
    finally:
        del OP_TABLE[aten.neg.default]
