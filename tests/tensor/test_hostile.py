"""Whatever made the arguments, an MXTensor has tensors that fit each other, or there is a sentence and no MXTensor."""

import io
import json
import pickle
import pickletools
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import mxtensor as mx
from mxtensor.kernels.quantize.choose_cast import dequantize_operand
from mxtensor.tensor.pickles import rebuild
from mxtensor.training.training_weight import TrainingWeight, _rebuild
from tests.helpers.compare import same_bytes
from tests.helpers.fuzz_files import PREFIX, Call, saved

ROOT = Path(__file__).resolve().parents[2]


def arguments(format="mxfp8", shape=(64, 128), orientation="rowwise"):
    """The arguments of ``rebuild`` for a fresh tensor, which may be changed."""
    w = mx.quantize(torch.randn(shape, dtype=torch.bfloat16), format, orientation=orientation)
    _, (components, row, outer, is_parameter) = w.__reduce_ex__(2)
    return [{side: list(tensors) for side, tensors in components.items()}, dict(row), list(outer), is_parameter]


def with_tensor(place, change, **made):
    """The arguments with one tensor of the rowwise operand changed."""
    out = arguments(**made)
    out[0]["_rowwise"][place] = change(out[0]["_rowwise"][place])
    return out


def with_outer(place, value):
    out = arguments()
    out[2][place] = value
    return out


def with_row(**words):
    out = arguments()
    out[1] |= words
    return out


def without(place, **made):
    out = arguments(**made)
    del out[0]["_rowwise"][place]
    return out


def mixed():
    """The columnwise operand of another tensor."""
    out = arguments(orientation="both")
    out[0]["_columnwise"] = arguments(shape=(64, 256), orientation="columnwise")[0]["_columnwise"]
    return out


def cut(t):
    return t[:-1]


HOSTILE = {
    "shape larger than the data": (lambda: with_outer(1, (6400, 128)), "data must have shape"),
    "strides of a larger shape": (lambda: with_outer(2, (1280, 1)), "reach beyond the values"),
    "strides that overlap": (lambda: with_outer(2, (1, 1)), "share memory"),
    "negative strides": (lambda: with_outer(2, (-128, 1)), "strides must be from 0"),
    "too few strides": (lambda: with_outer(2, (1,)), "has 2 strides"),
    "a negative size": (lambda: with_outer(1, (-64, 128)), "size must be from 0"),
    "a huge size": (lambda: with_outer(1, (2**63, 128)), "size must be from 0"),
    "too many values": (lambda: with_outer(1, (2**61, 128)), "too many values"),
    "a size of floats": (lambda: with_outer(1, (64.0, 128.0)), "must be a tuple of integers"),
    "a size of bools": (lambda: with_outer(1, (True, 128)), "must be a tuple of integers"),
    "no dimensions": (lambda: with_outer(1, ()), "at least one dimension"),
    "data cut short": (lambda: with_tensor(0, cut), "data must have shape"),
    "scale cut short": (lambda: with_tensor(1, cut), "scale must have shape"),
    "scale of one dimension": (lambda: with_tensor(1, torch.flatten), "scale must have shape"),
    "scale on meta": (lambda: with_tensor(1, lambda t: t.to("meta")), "data is on cpu, scale on meta"),
    "data on meta": (lambda: with_tensor(0, lambda t: t.to("meta")), "data is on meta, scale on cpu"),
    "float32 scales": (lambda: with_tensor(1, torch.Tensor.float), "scale must be uint8"),
    "byte scales": (lambda: with_tensor(1, torch.Tensor.byte, format="float8_tensor"), "scale must be float32"),
    "float32 data": (lambda: with_tensor(0, torch.Tensor.float), "data must be"),
    "complex data": (lambda: with_tensor(0, lambda t: t.to(torch.complex64)), "data must be"),
    "sparse data": (lambda: with_tensor(0, torch.Tensor.to_sparse), "must be a dense tensor"),
    "sparse scales": (lambda: with_tensor(1, torch.Tensor.to_sparse), "must be a dense tensor"),
    "expanded data": (lambda: with_tensor(0, lambda t: t[:1].expand(64, 128)), "share memory"),
    "overlapping data": (lambda: with_tensor(0, lambda t: t.as_strided((64, 128), (1, 1))), "share memory"),
    "negated scales": (
        lambda: with_tensor(1, lambda t: torch._neg_view(t), format="float8_tensor"), "got a negated view",
    ),
    "scales that are not a tensor": (lambda: with_tensor(1, torch.Tensor.tolist), "codes and scales of rowwise"),
    "no scales": (lambda: without(1), "an operand has 2 tensors, got 1"),
    "nvfp4 without its global scale": (lambda: without(2, format="nvfp4"), "an operand has 3 tensors, got 2"),
    "a global scale of shape (0,)": (lambda: with_tensor(2, lambda t: t.new_ones(0), format="nvfp4"), "one float32"),
    "a global scale of two": (lambda: with_tensor(2, lambda t: t.new_ones(2), format="nvfp4"), "one float32"),
    "a global scale in int8": (lambda: with_tensor(2, torch.Tensor.char, format="nvfp4"), "one float32"),
    "another format": (lambda: with_row(weight="mxfp4_e2m1"), "data must have shape"),
    "an unknown format": (lambda: with_row(weight="mxfp8[7x7]"), "block (7, 7) is not available"),
    "a format that is not a string": (lambda: with_row(weight=5), "a dict of strings"),
    "no format": (lambda: with_row(weight=None), "names no weight format"),
    "a seed that is not a number": (lambda: with_row(weight_seed="1e9"), "seed of a stored recipe"),
    "no row": (lambda: [*arguments()[:1], [], *arguments()[2:]], "a dict of strings"),
    "half a row": (lambda: [arguments()[0], {"weight": "mxfp8"}, *arguments()[2:]], "lacks kernel_preference"),
    "another dtype": (lambda: with_outer(0, "int8"), "the dtype, one of"),
    "an attribute of torch": (lambda: with_outer(0, "load"), "the dtype, one of"),
    "a dtype that is not a string": (lambda: with_outer(0, 16), "the dtype, one of"),
    "requires_grad that is not a bool": (lambda: with_outer(3, 1), "requires_grad"),
    "a parameter that is not a bool": (lambda: [*arguments()[:3], "yes"], "requires_grad"),
    "no operand": (lambda: [{}, *arguments()[1:]], "got neither"),
    "an unknown operand": (lambda: [{"rowwise": arguments()[0]["_rowwise"]}, *arguments()[1:]], "operands by name"),
    "operands in a list": (lambda: [[arguments()[0]], *arguments()[1:]], "operands by name"),
    "a columnwise operand as rowwise": (
        lambda: [{"_rowwise": arguments(orientation="columnwise")[0]["_columnwise"]}, *arguments()[1:]],
        "data must have shape",
    ),
    "operands of two tensors": (mixed, "data must have shape"),
    "too few outer fields": (lambda: [*arguments()[:2], ["bfloat16"], False], "(dtype, size, strides"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_made_up_pickle_is_refused_with_a_sentence(name):
    make, sentence = HOSTILE[name]
    components, row, outer, is_parameter = make()
    made = components, row, tuple(outer), is_parameter
    with pytest.raises(ValueError, match=PREFIX) as error:
        rebuild(*made)
    assert sentence in str(error.value)
    if name in ("sparse data", "sparse scales", "negated scales"):
        return  # torch.save keeps no negated view, and torch.load warns of sparse tensors
    buffer = io.BytesIO()
    torch.save(Call(made), buffer)
    with pytest.raises(ValueError, match=PREFIX):
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(0, 20_000, 400))
def test_no_made_up_file_crashes_or_loads_inconsistently(first):
    command = [sys.executable, "-m", "tests.helpers.fuzz_files", str(first), str(first + 400)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    counts = json.loads(done.stdout)
    assert sum(counts.values()) == 400 and counts["arguments: refused by us"] > 100
    assert all(counts[f"{way}: consistent"] for way in ("arguments", "pickle", "file"))


def test_a_pickle_cannot_change_a_tensor_after_it_was_checked():
    w = mx.quantize(torch.randn(64, 128), "mxfp4")
    content, out = saved(w), io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith("data.pkl"):
                ops = list(pickletools.genops(data))
                made = [
                    i for i, (op, *_) in enumerate(ops[:-1]) if op.name == "REDUCE" and ops[i + 1][0].name == "BINPUT"
                ]
                first, last = (bytes([ops[i + 1][1]]) for i in (made[3], made[-1]))  # hooks, codes, hooks, scales
                data = data[:-1] + b"h" + first + b")bh" + last + b"."  # BUILD the scales with (), return the MXTensor
            new.writestr(name, data)
    loaded = torch.load(io.BytesIO(out.getvalue()), weights_only=True)  # BUILD calls data.set_()
    assert loaded.rowwise.data.shape == (64, 64) and same_bytes(loaded, w)


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4", "float8_row"])
def test_views_with_strides_of_their_own_are_saved_and_loaded(format):
    w = mx.quantize(torch.randn(6, 64, 128), format)
    for view in (w[1:3], w.mT, w[:, :32], w[::2], w[1].expand(4, 64, 128), w[2:2]):
        for copied in (view, view.detach().clone()):
            for got in (torch.load(io.BytesIO(saved(copied))), pickle.loads(pickle.dumps(copied))):
                assert torch.equal(got.dequantize(), view.dequantize()) and got.recipe == view.recipe
    sliced = w[:, :32]
    assert torch.load(io.BytesIO(saved(sliced))).stride() == sliced.stride()


# ---------------------------------------------------------------------------------------------- in a process


def operand(**changes):
    o = mx.quantize(torch.randn(64, 128), changes.pop("format_", "mxfp8")).rowwise
    fields = {name: getattr(o, name) for name in ("data", "scale", "global_scale", "format", "shape")}
    return mx.Operand(**(fields | {name: change(fields[name]) for name, change in changes.items()}))


RECIPE = mx.LinearRecipe.inference("mxfp8")
BAD_OPERANDS = {
    "shape": lambda: operand(shape=lambda s: (6400, 128)),
    "data": lambda: operand(data=cut),
    "scale": lambda: operand(scale=cut),
    "no scale": lambda: operand(scale=lambda t: None),
    "dtype": lambda: operand(scale=torch.Tensor.float),
    "device": lambda: operand(scale=lambda t: t.to("meta")),
    "format": lambda: operand(format=lambda f: mx.FORMATS["mxfp4_e2m1"]),
    "a name": lambda: operand(format=lambda f: "mxfp8"),
    "global scale": lambda: operand(format_="nvfp4", global_scale=lambda t: None),
    "no shape": lambda: operand(shape=lambda s: None),
    "a tuple": lambda: (torch.zeros(64, 128),),
}


@pytest.mark.parametrize("name", BAD_OPERANDS)
def test_an_operand_that_somebody_made_is_checked(name):
    bad, good = BAD_OPERANDS[name](), operand()
    for rowwise, columnwise in ((bad, None), (good, bad), (None, bad)):
        with pytest.raises((TypeError, ValueError)):
            mx.MXTensor(rowwise, columnwise, RECIPE, torch.bfloat16)


def test_the_arguments_of_mxtensor_are_checked():
    good = operand()
    assert torch.equal(
        mx.MXTensor(good, None, RECIPE, torch.float32).dequantize(), dequantize_operand(good, torch.float32)
    )
    for arguments, kind, sentence in (
        ((good, None, None, torch.float32), TypeError, "needs a LinearRecipe"),
        ((good, None, "mxfp8", torch.float32), TypeError, "needs a LinearRecipe"),
        ((good, None, RECIPE, None), TypeError, "stands for values"),
        ((good, None, RECIPE, torch.int8), TypeError, "stands for values"),
        ((good, None, RECIPE, "float32"), TypeError, "stands for values"),
        ((None, None, RECIPE, torch.float32), ValueError, "got neither"),
        ((good, None, mx.LinearRecipe.inference("mxfp4"), torch.float32), ValueError, "the recipe stores"),
        ((good, None, RECIPE, torch.float32, (32, 256)), ValueError, "the rowwise operand of a tensor of shape"),
        ((good, good, RECIPE, torch.float32), ValueError, "the columnwise operand of a tensor of shape"),
        ((good, None, RECIPE, torch.float32, (64, 128), (2**40, 1)), ValueError, "reach beyond"),
        ((good, None, RECIPE, torch.float32, (64, 128), (128, 1), False, -5), ValueError, "storage offset"),
    ):
        with pytest.raises(kind, match=sentence):
            mx.MXTensor(*arguments)


def test_from_components_refuses_freed_memory_and_other_types():
    good = operand()
    freed = good.data.clone()
    freed.untyped_storage().resize_(0)
    for arguments, kind, sentence in (
        ((freed, good.scale), ValueError, "was freed or is too short"),
        ((good.data.tolist(), good.scale), TypeError, "must be a tensor of"),
        ((good.data, None), TypeError, "must be a tensor of"),
    ):
        with pytest.raises(kind, match=sentence):
            mx.MXTensor.from_components(*arguments, "mxfp8")
    with pytest.raises(TypeError, match="stands for values"):
        mx.MXTensor.from_components(good.data, good.scale, "mxfp8", dtype=torch.int32)


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4", "mxfp6", "float8_tensor"])
def test_unflattening_is_checked(format):
    w = mx.quantize(torch.randn(64, 128), format, orientation="both")
    names, context = w.__tensor_flatten__()
    inner = {name: getattr(w, name) for name in names}
    made = mx.MXTensor.__tensor_unflatten__(inner, context, w.shape, w.stride())
    assert same_bytes(made, w)
    for name in names:
        for change in (lambda t: t.reshape(-1)[:0], lambda t: t.to("meta"), lambda t: t.to(torch.int64)):
            with pytest.raises((TypeError, ValueError)):
                mx.MXTensor.__tensor_unflatten__(inner | {name: change(inner[name])}, context, w.shape, w.stride())
    for size in ((640, 128), (64, 256), (64,), (-64, 128)):
        with pytest.raises((TypeError, ValueError)):
            mx.MXTensor.__tensor_unflatten__(inner, context, size, (1,) * len(size))
    with pytest.raises(ValueError, match="got neither"):
        mx.MXTensor.__tensor_unflatten__({}, context, w.shape, w.stride())


@pytest.mark.parametrize("name", ["shape", "data", "scale", "dtype", "device", "format"])
def test_native_casts_never_get_sizes_that_do_not_fit(name):
    with pytest.raises((TypeError, ValueError, RuntimeError, NotImplementedError)):
        dequantize_operand(BAD_OPERANDS[name](), torch.float32)


def test_memory_that_was_freed_is_not_read():
    w = mx.quantize(torch.randn(64, 128), "mxfp8")
    w.rowwise.data.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="was freed or is too short"):
        w.dequantize()
    x = torch.randn(64, 128)
    x.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="was freed"):
        mx.quantize(x, "mxfp8")


def test_a_training_weight_is_made_of_a_tensor_and_a_recipe():
    values, recipe = torch.randn(4, 64), mx.recipe.MXFP8BlockScaling().linear_recipe()
    for arguments, sentence in (
        (([1.0], recipe, False, False), "takes a tensor and a LinearRecipe"),
        ((values, "mxfp8", False, False), "takes a tensor and a LinearRecipe"),
        ((values, recipe, 1, False), "must be bool"),
        ((values, recipe, False, None), "must be bool"),
        ((values, recipe, False, False, {"history": values}), "must be a DelayedState"),
    ):
        with pytest.raises(TypeError, match=sentence):
            _rebuild(*arguments)
    with pytest.raises(TypeError, match="takes a tensor and a LinearRecipe"):
        TrainingWeight.__tensor_unflatten__({"high_precision": None}, (recipe, None), (4, 64), (64, 1))
    assert torch.equal(pickle.loads(pickle.dumps(TrainingWeight(values, recipe))).high_precision, values)
