"""Calls of mx.KVCache are whole or not at all: one that fails at any line, or is refused, changes nothing."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig

import mxtensor as mx
from mxtensor.integrations import kv_cache
from mxtensor.integrations.kv_cache import CodesLayer, Remembered

FILES = {str(path) for path in Path(kv_cache.__file__).parent.glob("kv_*.py")}
FILES.add(sys.modules["transformers.cache_utils"].__file__)
PUT_BACK = "restore"
LIMIT = 48
CONFIG = Gemma3TextConfig(
    num_hidden_layers=3, sliding_window=24, layer_types=["full_attention", "sliding_attention", "full_attention"],
    num_attention_heads=2, num_key_value_heads=2, head_dim=32, hidden_size=64,
)  # fmt: skip
CACHES = {
    "growing": lambda: mx.KVCache("nvfp4"),
    "limited": lambda: mx.KVCache("mxfp8", max_cache_len=LIMIT),
    "windows": lambda: mx.KVCache("mxfp8", CONFIG),
    "static": lambda: mx.KVCache("nvfp4", LlamaConfig(num_hidden_layers=3), LIMIT, static=True),
    "static windows": lambda: mx.KVCache("mxfp8", CONFIG, LIMIT, static=True),
}


def tokens(count, batch=3):
    return torch.randn(batch, 2, count, 32) + 1


def step(cache, count, batch=3):
    """What a model with three layers does."""
    cache.get_mask_sizes(count, 0)
    return [
        [
            getattr(side, "dequantize", side.clone)()
            for side in cache.update(tokens(count, batch), tokens(count, batch), i)
        ]
        for i in range(3)
    ]


def filled(kind, *counts):
    torch.manual_seed(0)
    cache = CACHES[kind]()
    for count in counts:
        step(cache, count)
    cache.get_mask_sizes(1, 0)
    return cache


def state(cache):
    """Every value that later calls read, with lengths and the order of calls."""
    found = {"order": (cache._last, cache._repeated, set(cache._filled)), "layers": len(cache.layers)}
    for i, layer in enumerate(cache.layers):
        length = int(layer.get_seq_length())
        found[i, "length"] = length
        for name in ("keys", "values"):
            side = getattr(layer, name, None)
            if side is not None and length:
                values = side.dequantize() if isinstance(layer, CodesLayer) else side.clone()
                found[i, name] = values[:, :, :length] if values.shape[2] == LIMIT else values
    return found


def same(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(x, other[key]) if isinstance(x, torch.Tensor) else x == other[key] for key, x in one.items()
    )


class Failing:
    """A context that raises an error at the n-th line of the cache's code, by default that of Ctrl-C."""

    def __init__(self, n, error=KeyboardInterrupt):
        self.left, self.error = n, error

    def trace(self, frame, event, arg):
        if frame.f_code.co_filename not in FILES or frame.f_code.co_name == PUT_BACK:
            return None
        if event == "line" and sys.exc_info()[0] is None:
            self.left -= 1
            if self.left == 0:
                raise self.error
        return self.trace

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)


CALLS = {
    "first": ((), lambda c: c.update(*FIRST, 0)),
    "into codes": ((5,), lambda c: c.update(*FIRST, 0)),
    "next": ((30,), lambda c: c.update(*NEXT, 0)),
    "more room": ((30,), lambda c: c.update(*(t.repeat(1, 1, 2, 1) for t in SOME), 0)),
    "crop": ((5, 18), lambda c: c.crop(-4)),
    "crop all": ((5, 18), lambda c: c.crop(-40)),
    "reorder": ((30, 1), lambda c: c.reorder_cache(torch.tensor([2, 0, 0]))),
    "select": ((30, 1), lambda c: c.batch_select_indices(torch.tensor([True, False, True]))),
    "repeat": ((30, 1), lambda c: c.batch_repeat_interleave(2)),
    "reset": ((30, 1), lambda c: c.reset()),
}
"""name -> (tokens before, the call)."""
LACKS = {"static": {"select", "repeat"}, "static windows": {"select", "repeat", "crop", "crop all"}}
torch.manual_seed(1)
FIRST, NEXT, SOME = ([tokens(count) for _ in range(2)] for count in (20, 1, 8))


@pytest.mark.exhaustive(quick=12)
@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in CACHES for name in CALLS if name not in LACKS.get(kind, ())],
)  # fmt: skip
def test_an_interrupt_at_any_line_changes_nothing(kind, name):
    counts, call = CALLS[name]
    if kind == "windows" and name.startswith("crop"):
        counts = counts[:1]  # transformers crops a window until it is full
    cache = filled(kind, *counts)
    before, wanted = state(cache), copy.deepcopy(cache)
    expected = call(wanted)
    expected = [side.dequantize() for side in expected or ()]
    n = 0
    while True:
        n += 1
        try:
            with Failing(n):
                found = call(cache)
            break
        except KeyboardInterrupt:
            after = state(cache)
            if name == "reset" and not same(
                after, before
            ):  # all tokens were forgotten: the memory is overwritten later
                assert same(after, state(wanted))
                cache = filled(kind, *counts)
            else:
                assert same(after, before), n
    assert n > 20 and same(state(cache), state(wanted))
    assert all(torch.equal(side.dequantize(), x) for side, x in zip(found or (), expected, strict=True))
    batch, more = {"select": 2, "repeat": 6}.get(name, 3), []
    for each in (cache, wanted):  # and the next call of the model is right
        torch.manual_seed(2)
        more.append([side for sides in step(each, 1, batch) for side in sides])
    assert all(torch.equal(x, y) for x, y in zip(*more, strict=True))


def refused(call, error, match, kinds=tuple(CACHES)):
    return [pytest.param(kind, call, error, match, id=f"{kind}-{match}") for kind in kinds]


GROWING, STATIC = ("growing", "limited", "windows"), ("static", "static windows")
LIMITED = ("limited", *STATIC)
ROW = torch.zeros(3, dtype=torch.int64)
K = NEXT[0]


@pytest.mark.parametrize(
    ("kind", "call", "error", "match"),
    [
        *refused(lambda c: c.update(K, K.long(), 0), TypeError, "dtype int64"),
        *refused(lambda c: c.update(K.long(), K, 0), TypeError, "dtype int64"),
        *refused(lambda c: c.update(K, None, 0), TypeError, "value_states is None"),
        *refused(lambda c: c.update(K, K, -1), ValueError, "layer_idx is -1"),
        *refused(lambda c: c.update(K, K[..., :24], 0), ValueError, r"\(3, 2, 24\), those before them \(3, 2, 32\)"),
        *refused(lambda c: c.update(*(t.repeat(1, 1, 40, 1) for t in NEXT), 0), ValueError, "do not fit", LIMITED),
        *refused(lambda c: c.crop(-1.5), TypeError, "tokens_to_remove is -1.5", (*GROWING, "static")),
        *refused(lambda c: c.crop(4), ValueError, "positive value", ("windows",)),
        *refused(lambda c: c.reorder_cache(ROW[None]), ValueError, r"beam_idx has shape \(1, 3\)"),
        *refused(lambda c: c.reorder_cache(ROW + 3), ValueError, "names sequence 3 of 3"),
        *refused(lambda c: c.reorder_cache(ROW - 1), ValueError, "names sequence -1 of 3"),
        *refused(lambda c: c.reorder_cache(ROW == 0), TypeError, "pass a tensor of int64"),
        *refused(lambda c: c.reorder_cache(ROW[:2]), ValueError, "a static cache keeps 3", STATIC),
        *refused(lambda c: c.batch_select_indices(ROW[None]), ValueError, r"indices has shape \(1, 3\)", GROWING),
        *refused(lambda c: c.batch_select_indices(torch.tensor(1)), ValueError, r"indices has shape \(\)", GROWING),
        *refused(lambda c: c.batch_select_indices(ROW - 4), ValueError, "names sequence -4 of 3", GROWING),
        *refused(lambda c: c.batch_select_indices(ROW[:2] == 0), ValueError, "2 bools, and the cache 3", GROWING),
        *refused(lambda c: c.batch_select_indices(0), TypeError, "indices is 0", GROWING),
        *refused(lambda c: c.batch_repeat_interleave(0), ValueError, "repeats is 0", GROWING),
        *refused(lambda c: c.batch_repeat_interleave(1.0), TypeError, "repeats is 1.0", GROWING),
    ],
)  # fmt: skip
def test_a_refused_call_changes_nothing(kind, call, error, match):
    cache = filled(kind, 20)
    before, twin = state(cache), copy.deepcopy(cache)
    with pytest.raises(error, match=match):
        call(cache)
    assert same(state(cache), before)
    pairs = zip(cache.update(*NEXT, 0), twin.update(*NEXT, 0), strict=True)
    assert all(torch.equal(one.dequantize(), other.dequantize()) for one, other in pairs)


def test_other_ways_to_say_the_same():
    cache = filled("growing", 20)
    keys = cache.layers[0].keys.dequantize()
    cache.batch_select_indices([2, 0])
    cache.reorder_cache(torch.tensor([1, 0], dtype=torch.int32))
    cache.crop(torch.tensor(-1))
    assert torch.equal(cache.layers[0].keys.dequantize(), keys[[0, 2], :, :-1])


def lines_of(call):
    """How many lines of the cache's code a call runs."""
    with Failing(10**9) as counting:
        call()
    return 10**9 - counting.left


def test_a_failure_in_the_last_layer_puts_all_layers_back():
    """Without memory for the last layer, say."""
    for kind, name, argument in (("growing", "batch_repeat_interleave", 2), ("static", "reorder_cache", ROW)):
        last = lines_of(lambda: getattr(filled(kind, 20), name)(argument)) - lines_of(lambda: filled(kind, 20))  # noqa: B023
        cache = filled(kind, 20)
        before = state(cache)
        with pytest.raises(MemoryError), Failing(last - 2, MemoryError):
            getattr(cache, name)(argument)
        assert same(state(cache), before)


def test_nan_of_a_prompt_is_gone_after_a_reset_whose_end_failed():
    late, fresh = 0, filled("static")
    wanted = [side.dequantize() for side in fresh.update(*NEXT, 0)]

    def with_nan():
        cache = filled("static")
        cache.update(*(torch.full_like(t, torch.nan) for t in FIRST), 0)
        return cache

    for n in range(1, lines_of(with_nan().reset)):
        cache = with_nan()
        with Failing(n), pytest.raises(KeyboardInterrupt):
            cache.reset()
        if not int(cache.get_seq_length()):  # the tokens were forgotten: the memory is overwritten by the next call
            late += 1
            for one, other in zip(cache.update(*NEXT, 0), wanted, strict=True):
                assert torch.equal(one.dequantize(), other)
    assert late > 2


def test_a_layer_alone_is_whole_too():
    layer = filled("static", 20).layers[0]
    before = layer.keys.dequantize()
    with Failing(20), pytest.raises(KeyboardInterrupt):
        layer.reorder_cache(ROW)
    assert torch.equal(layer.keys.dequantize(), before)
    assert not Remembered([filled("growing", 20).layers[0]]).tensors  # references only


def test_after_a_model_failed_between_two_layers_crop_puts_the_cache_back():
    cache, twin = filled("growing", 20), filled("growing", 20)
    cache.update(*NEXT, 0)
    cache.crop(20)
    assert same(state(cache) | {"order": ()}, state(twin) | {"order": ()})
    cache.get_mask_sizes(1, 0)
    pairs = ((cache.update(*NEXT, i), twin.update(*NEXT, i)) for i in range(3))
    assert all(
        torch.equal(a.dequantize(), b.dequantize()) for one, other in pairs for a, b in zip(one, other, strict=True)
    )
