"""Extra states that nobody at TransformerEngine wrote: their memory and time are bounded, and they change nothing."""

import collections
import io
import pickle
import random
import struct
import subprocess
import sys
import time

import pytest
import torch

from mxtensor.te.extra_state import Inert, product_states, read_pickle

PROTO = b"\x80\x04"


def of(data):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


STRIDES = (
    pickle.dumps(torch.ones(3)).replace(b"K\x03\x85", b"J\xff\xff\xff\x7f\x85").replace(b"K\x01\x85", b"K\x00\x85")
)
TWICE = b"".join(b"h%ch%c\x86\x94" % (i, i) for i in range(100))
HOSTILE = {
    "bytes of a terabyte": PROTO + b"\x8e" + struct.pack("<Q", 1 << 40) + b".",
    "a frame of a terabyte": PROTO + b"\x95" + struct.pack("<Q", 1 << 40) + b"N",
    "a bytearray": b"\x80\x05\x96" + struct.pack("<Q", 1 << 33) + b".",
    "lists in lists": PROTO + b"]" * 100_000 + b"a" * 99_999 + b".",
    "lists without a list": PROTO + b"a" * 10 + b".",
    "another mark": PROTO + b"t.",
    "defaults of a function": PROTO + b"ctorch._utils\n_rebuild_tensor_v2\nN}\x8c\x0c__defaults__K\x01\x85s\x86b.",
    "attributes of a class": PROTO + b"cx\ny\n}\x8c\x05givenK\x01sb.",
    "an extension": PROTO + b"\x82\x01.",
    "a persistent name": b"Pfoo\n.",
    "a persistent storage": PROTO + b"(\x8c\x07storageNNNNNtQ.",
    "tuples that are twice in a tuple, as a key": PROTO + b")\x94" + TWICE + b"}h\x63Ns.",
    "a tensor that is one value": b"\x80\x04}\x8c\x09scale_fwd" + STRIDES[2:-1] + b"s.",
    "no tensor": PROTO + b"ctorch._utils\n_rebuild_tensor_v2\n(NNNNNNtR.",
    "an end that is missing": PROTO + b"}",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_nobody_wrote_is_a_sentence(name):
    start = time.perf_counter()
    with pytest.raises(ValueError, match=r"layer: the extra state .* is neither of this package .*remove the keys"):
        product_states("layer", of(HOSTILE[name]))
    assert time.perf_counter() - start < 3


def test_five_bytes_reserve_no_memory():
    """The memo of Python's own unpickler is an array: five bytes make it as long as they say."""
    code = (
        "import resource, struct, torch\n"
        "from mxtensor.te.extra_state import product_states\n"
        "def loaded(data): return product_states('x', torch.frombuffer(bytearray(data), dtype=torch.uint8))\n"
        "loaded(b'\\x80\\x04N.')\n"
        "used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert loaded(b'\\x80\\x04Nr' + struct.pack('<I', 0x0fffffff) + b'.') == {}\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used)"
    )
    pytest.importorskip("resource")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 50_000  # kilobytes


def test_bytes_that_are_named_again_and_again_are_read_once():
    storage = io.BytesIO()
    torch.save(torch.ones(1000)._typed_storage(), storage, _use_new_zipfile_serialization=False)
    stored = b"B" + struct.pack("<I", len(storage.getvalue())) + storage.getvalue() + b"\x94"
    load = b"ctorch.storage\n_load_from_bytes\nh\x00\x85R"
    first, *others = read_pickle(PROTO + stored + b"(" + load * 1000 + b"t.")
    assert len(others) == 999 and all(other is first for other in others)


def test_values_are_those_of_pickle():
    shared = torch.randn(3, 4)
    values = {
        "n": [1, -1, 255, 65536, 1 << 40, -(1 << 70), 0.5, True, False, None, "é", b"\x00" * 300],
        "t": (1, (2, 3), (4, 5, 6), (7, 8, 9, 10), ()),
        "o": collections.OrderedDict(),
        "x": [shared, shared[1:], torch.randn(5).bfloat16(), torch.arange(7), torch.empty(0), torch.tensor(2.0)],
    }
    for protocol in (3, 4, 5):
        found = read_pickle(pickle.dumps(values, protocol))
        for key, value in values.items():
            if key != "x":
                assert found[key] == value
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found["x"], values["x"], strict=True))
    assert read_pickle(pickle.dumps(print)) == Inert("builtins.print")
    made = read_pickle(pickle.dumps(ValueError("x")))
    assert isinstance(made, Inert) and made.given == ("x",)


@pytest.mark.parametrize("count", [300, pytest.param(5000, marks=pytest.mark.exhaustive(quick=0))])
def test_every_change_of_a_state_loads_or_raises_a_sentence(count):
    rng = random.Random(count)
    names = {"scale_fwd": (3,), "scale_bwd": (2,), "amax_history_fwd": (4, 3), "amax_history_bwd": (4, 2)}
    raw = pickle.dumps({name: torch.rand(shape) + 0.1 for name, shape in names.items()})
    assert {key.partition(".")[2] for key in product_states("x", of(raw))} == {"history", "record", "amax"}
    for _ in range(count):
        data = bytearray(raw[: rng.choice([len(raw), len(raw), len(raw), rng.randrange(len(raw))])] or b"N")
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(data))
            data[at : at + rng.randint(0, 1)] = rng.choice(
                [b"", bytes([rng.randrange(256)]), b"(", b"R", b"h\x01", b"2"]
            )
        try:
            found = product_states("x", of(data or b"N"))
        except ValueError as error:
            assert "the extra state" in str(error)
        else:
            assert all(isinstance(value, torch.Tensor) for value in found.values())
