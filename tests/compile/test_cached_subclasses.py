"""torch's caches of compiled graphs on disk know what is inside of DTensors and of other subclasses.

Each program runs steps over tensors of several kinds with the same sharding, shape and dtype. A graph of one kind would
crash with tensors of another, or write codes as values. A later program finds its graphs again.
"""

import json
import os
import pickle
import subprocess
import sys
from io import BytesIO
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._functorch._aot_autograd import autograd_cache
from torch.distributed.tensor import DTensor, Replicate

import mxtensor as mx
from mxtensor.core import compat_compile, fingerprint
from mxtensor.recipe import MXFP4BlockScaling, MXFP8BlockScaling
from mxtensor.training.training_weight import TrainingWeight

PROGRAM = """
import json, sys
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
import mxtensor as mx
from mxtensor.core import fingerprint
from mxtensor.tensor.mxtensor import MXTensor
from mxtensor.training.training_weight import TrainingWeight, values_of

version, *kinds = sys.argv[1:]
fingerprint.fingerprint = lambda: version
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = dist.init_device_mesh("cpu", (1,))


class Holder(torch.Tensor):
    # A subclass of another library, whose key says nothing of what is inside.
    @staticmethod
    def __new__(cls, inside):
        return torch.Tensor._make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype)

    def __init__(self, inside):
        self.inside = inside

    def __tensor_flatten__(self):
        return ["inside"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Holder(inner["inside"])

    def _stable_hash_for_caching(self):
        return f"Holder {tuple(self.shape)} {self.dtype}"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        out = func(*(a.inside if isinstance(a, Holder) else a for a in args), **(kwargs or {}))
        return args[0] if func is torch.ops.aten.sub_.Tensor else Holder(out)


MAKE = {
    "plain": lambda w: w,
    "mxfp8 recipe": lambda w: TrainingWeight(w, mx.recipe.MXFP8BlockScaling().linear_recipe()),
    "mxfp4 recipe": lambda w: TrainingWeight(w, mx.recipe.MXFP4BlockScaling().linear_recipe()),
    "mxfp8": lambda w: mx.quantize(w, "mxfp8"),
    "mxint8": lambda w: mx.quantize(w, "mxint8"),
    "both": lambda w: mx.quantize(w, "mxfp8", orientation="both"),
}
OUTER = {"DTensor": lambda t: DTensor.from_local(t, mesh, [Replicate()], run_check=False), "Holder": Holder}


def step(w, g):
    w.sub_(g * 0.5)


def scaled(w, g):
    return w * 2


def read(t):
    t = t.to_local() if isinstance(t, DTensor) else getattr(t, "inside", t)
    return t.dequantize() if isinstance(t, MXTensor) else values_of(t).detach().clone()


told = {}
for name in kinds:
    outer, kind = name.split(":")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    values, g = torch.randn(64, 64), OUTER[outer](torch.randn(64, 64))
    function = step if kind == "plain" or "recipe" in kind else scaled
    w, its = (OUTER[outer](MAKE[kind](values.clone())) for _ in range(2))
    with torch.no_grad():
        found = torch.compile(function, fullgraph=True)(w, g)
        expected = function(its, g)
    right = torch.equal(read(w), read(its)) and (found is None or torch.equal(read(found), read(expected)))
    counts = torch._dynamo.utils.counters["aot_autograd"]
    told[name] = right, *(counts.get(f"autograd_cache_{what}", 0) for what in ("hit", "miss"))
print(json.dumps(told))
dist.destroy_process_group()
"""
HIT, MISS = [True, 1, 0], [True, 0, 1]
"""Whether the results are right; hits; misses."""
KINDS = "plain", "mxfp8 recipe", "mxfp4 recipe", "mxfp8", "mxint8", "both"


def told(folder, version, kinds):
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder)}
    command = [sys.executable, "-c", PROGRAM, version, *kinds]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("outer", "backwards"), [("DTensor", False), ("Holder", True)])
def test_no_program_finds_the_graph_of_another_kind_and_each_finds_its_own(outer, backwards, tmp_path):
    kinds = [f"{outer}:{kind}" for kind in KINDS][:: -1 if backwards else 1]
    first = told(tmp_path, "one", kinds)
    assert first == dict.fromkeys(kinds, MISS)
    assert told(tmp_path, "one", kinds[::-1]) == dict.fromkeys(kinds, HIT)
    newer = told(tmp_path, "two", kinds)
    assert newer.pop(f"{outer}:plain") == HIT and set(map(tuple, newer.values())) == {tuple(MISS)}


# ---------------------------------------------------------------------------------------------- keys in one process


@pytest.fixture
def sharded():
    """Makes a DTensor over one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.init_device_mesh("cpu", (1,))
    yield lambda t: DTensor.from_local(t, mesh, [Replicate()], run_check=False)
    dist.destroy_process_group()


def trained(recipe, values):
    return TrainingWeight(values, recipe.linear_recipe())


INSIDE = {
    "plain": lambda w: w,
    "mxfp8 recipe": lambda w: trained(MXFP8BlockScaling(), w),
    "mxfp8 recipe, one copy": lambda w: trained(MXFP8BlockScaling(single_weight_copy=True), w),
    "mxfp4 recipe": lambda w: trained(MXFP4BlockScaling(), w),
    "gathered codes": lambda w: trained(MXFP8BlockScaling(), mx.quantize(w, "mxfp8")),
    "other gathered codes": lambda w: trained(MXFP8BlockScaling(), mx.quantize(w, "mxint8")),
    "mxfp8": lambda w: mx.quantize(w, "mxfp8"),
    "mxint8": lambda w: mx.quantize(w, "mxint8"),
    "both": lambda w: mx.quantize(w, "mxfp8", orientation="both"),
    "mxfp4": lambda w: mx.quantize(w, "mxfp4"),
}


def key(value, pickler=None):
    """torch's key of a graph whose input is ``value``."""
    graph = torch.fx.GraphModule({}, torch.fx.Graph())
    return (pickler or autograd_cache.AOTAutogradCachePickler)(graph).get_hash(value)


@pytest.mark.parametrize("nested", [1, 2])
def test_the_keys_of_all_kinds_inside_of_a_dtensor_differ(nested, sharded):
    def made(kind):
        torch.manual_seed(0)
        t = sharded(INSIDE[kind](torch.randn(64, 64)))
        return t if nested == 1 else trained(MXFP8BlockScaling(), t)

    keys = {kind: key([made(kind)]) for kind in INSIDE}
    assert len(set(keys.values())) == len(INSIDE)
    assert keys == {kind: key([made(kind)]) for kind in INSIDE}


def test_versions_and_settings_are_in_every_key_that_names_the_package(sharded, monkeypatch):
    inside = {kind: sharded(make(torch.randn(64, 64))) for kind, make in INSIDE.items()}
    inside["graph"] = {"code": "y = torch.ops.mxtensor.quantize(x)"}

    def keys():
        return {kind: key([value]) for kind, value in inside.items()}

    before = keys()
    with mx.kernels("emulated"):
        emulated = keys()
    monkeypatch.setitem(fingerprint.COMPILATION, "passes", False)
    without_passes = keys()
    monkeypatch.setattr(fingerprint, "fingerprint", lambda: "another")
    newer = keys()
    for kind in inside:
        assert len({k[kind] for k in (before, emulated, without_passes, newer)}) == (1 if kind == "plain" else 4)


class Pickler211(pickle.Pickler):
    """The pickler of keys in torch 2.11: without an override, it asks no tensor."""

    def __init__(self, graph):
        self.stream = BytesIO()
        super().__init__(self.stream)

    def dumps(self, value):
        self.dump(value)
        return self.stream.getvalue()

    def get_hash(self, value):
        return self.dumps(value)


@pytest.fixture
def other_torch(monkeypatch):
    """Installs the hook in a torch with another pickler, or with none."""

    def install(pickler):
        module = SimpleNamespace() if pickler is None else SimpleNamespace(AOTAutogradCachePickler=pickler)
        monkeypatch.setitem(sys.modules, "torch._functorch._aot_autograd.autograd_cache", module)
        return compat_compile.hook_cache_keys(lambda: "state")

    with torch._functorch.config.patch(enable_autograd_cache=True):
        yield install


def test_a_torch_that_asks_no_tensor_has_keys_of_the_same_kinds(other_torch):
    class Pickler(Pickler211):
        dumps = Pickler211.dumps  # which the hook replaces

    assert other_torch(Pickler) and torch._functorch.config.enable_autograd_cache
    kinds = [kind for kind in INSIDE if kind != "plain"]
    keys = {kind: key([INSIDE[kind](torch.ones(64, 64))], Pickler) for kind in kinds}
    repeated = {kind: key([INSIDE[kind](torch.zeros(64, 64))], Pickler) for kind in kinds}
    assert len(set(keys.values())) == len(kinds) and keys == repeated
    assert b"state" not in key(["x"], Pickler) and b"state" in key(["torch.ops.mxtensor.quantize"], Pickler)


@pytest.mark.parametrize("pickler", [None, int, pickle.Pickler])
def test_a_torch_without_these_places_has_no_cache(pickler, other_torch):
    class Without(pickle.Pickler):
        """One whose bytes nobody can add to."""

    assert not other_torch(Without if pickler is pickle.Pickler else pickler)
    assert not torch._functorch.config.enable_autograd_cache
