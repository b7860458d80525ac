"""Saved and loaded is the same model: layouts and formats, casts of activations, dtypes, ways to save and ways to load.

Codes and block scales are always equal. What else differs (a global scale, decoded values, the outer dtype, the cast of
activations) is named by the report of a conversion, and by what the guide says about the layout.
"""

import json
import warnings

import pytest
import torch
from torch.nn.functional import linear

import mxtensor as mx
from mxtensor.checkpoints import LAYOUTS
from mxtensor.checkpoints.compressed_tensors import SCHEMES
from mxtensor.checkpoints.deepseek import BLOCK
from mxtensor.checkpoints.gguf import WRITTEN
from mxtensor.checkpoints.mlx import MODES
from mxtensor.checkpoints.modelopt import ALGORITHMS
from mxtensor.checkpoints.quark import DTYPES
from mxtensor.checkpoints.torchao import FORMATS_WRITTEN
from mxtensor.convert.configs import recipe_of
from mxtensor.numerics.formats import FORMATS
from mxtensor.tensor.quantize_as import quantize_as
from tests.helpers.cli import run

STORED = {
    "native": FORMATS, "plain": FORMATS, "torchao": FORMATS_WRITTEN, "compressed-tensors": SCHEMES,
    "modelopt": ALGORITHMS, "deepseek": BLOCK, "quark": DTYPES, "mlx": MODES, "gguf": WRITTEN,
}  # fmt: skip
CASES = [(layout, format) for layout, formats in STORED.items() for format in formats]
CASTS = {"weight-only": "-weight-only", "same": "", "float8": "-weight-float8_tensor-activation"}
DTYPES_HERE = [torch.float32, torch.bfloat16, torch.float16]
SAVES = ["save", "convert", "quantize", "command"]
LOADS = ["load", "native", "plain"]
WEIGHTS = {"model.layers.0.mlp.up_proj.weight": (128, 256), "model.layers.0.mlp.down_proj.weight": (256, 128)}
READ_WEIGHT_ONLY = ("modelopt", "deepseek", "quark", "plain", "mlx", "gguf")
"""Layouts whose weights have no cast of activations when this package reads them."""
STEPS = 4
"""float32 steps that a global scale may take: ``checkpoints/global_scale.py``."""


def state_of(dtype):
    """Matrices with values of many sizes, zeros and outliers; a norm, and an embedding, which stay."""
    torch.manual_seed(0)
    state = {name: torch.randn(shape) * torch.exp(torch.randn(shape[0], 1)) for name, shape in WEIGHTS.items()}
    for t in state.values():
        t[3], t[5, :64], t[7, 9] = 0.0, 1e-4, 30.0
    others = {"model.norm.weight": torch.randn(256), "model.embed_tokens.weight": torch.randn(32, 256)}
    return {name: t.to(dtype) for name, t in (state | others).items()}


def written(way, layout, recipe_name, dtype, folder, capsys):
    """Store the model. Returns (path, what was stored, the report of the conversion as a dict, or None)."""
    plain, recipe = state_of(dtype), recipe_of(recipe_name)
    state = plain | {name: quantize_as(plain[name], recipe) for name in WEIGHTS}
    path = folder / ("out.gguf" if layout == "gguf" else "out")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if way == "save":
            mx.checkpoints.save(state, path, layout=layout)
            return path, state, None, " ".join(str(one.message) for one in said)
        mx.checkpoints.save(
            state if way == "convert" else plain, folder / "before", "native" if way == "convert" else "plain"
        )
        if way == "command":
            arguments = ("-o", path, "--layout", layout, "--format", recipe_name, "--json")
            code, out, err = run(capsys, "quantize", folder / "before", *arguments)
            assert code == 0, err
            return path, state, json.loads(out), ""
        format = None if way == "convert" else recipe_name
        return path, state, vars(mx.checkpoints.convert(folder / "before", path, layout=layout, format=format)), ""


def read(way, path, folder):
    """Load the model. Returns (its tensors, the report of the conversion as a dict, or None)."""
    if way == "load":
        return mx.checkpoints.load(path), None
    report = mx.checkpoints.convert(path, folder / f"as-{way}", layout=way)
    return mx.checkpoints.load(folder / f"as-{way}"), vars(report)


def named(reports, field):
    return {name for report in reports if report is not None for name in report[field]}


def bits(t):
    return t.contiguous().view(torch.uint8)


def check_codes(before, after):
    """Codes and block scales are equal, and global scales apart from a few steps. Returns whether all are equal."""
    a, b = before.rowwise, after.rowwise
    assert torch.equal(bits(a.data), bits(b.data)) and before.format.element == after.format.element
    assert torch.equal(a.scale_view.float(), b.scale_view.float())
    if a.global_scale is None:
        return True
    apart = int((a.global_scale.view(torch.int32) - b.global_scale.view(torch.int32)).abs())
    assert apart <= STEPS
    return apart == 0


def activation(t):
    return None if t.recipe.activation is None else t.recipe.activation.format.name


def check(name, before, after, layout, first, second, said):
    """One weight: what differs is named."""
    reports, errors = (first, second), named((first, second), "errors")
    same_scale = check_codes(before, after)
    if first is not None and not same_scale:
        assert name in named(reports, "stepped") | errors, "a global scale took a step"
    if same_scale and not LAYOUTS[layout].decodes:
        assert name not in named(reports, "stepped")
        assert torch.equal(before.dequantize(torch.float32), after.dequantize(torch.float32))
    if before.dtype is not after.dtype:
        assert layout == "gguf" if first is None else name in named((first,), "retyped")
    else:
        assert name not in named(reports, "retyped")
    if activation(before) != activation(after):
        assert activation(after) is None and (
            layout in READ_WEIGHT_ONLY
            or name in named((first,), "unquantized")
            or f"such as {next(iter(WEIGHTS))}" in said
        )
    if same_scale and before.dtype is after.dtype and activation(before) == activation(after):
        x = torch.randn(5, before.shape[1], dtype=before.dtype)
        assert torch.equal(linear(x, before), linear(x, after))


def check_casts(layout, before, first, said):
    """What readers of the layout cast otherwise is named, and nothing else."""
    own = activation(before)
    theirs = LAYOUTS[layout].activation(before.recipe, [before.recipe])
    text = first is None and f"cast, of {len(WEIGHTS)} weights" in said
    other = first is None and f"cast the activations of {len(WEIGHTS)} weights" in said
    unquantized, cast = (
        (text, other) if first is None else (set(first["unquantized"]) == {*WEIGHTS}, set(first["cast"]) == {*WEIGHTS})
    )
    assert unquantized == (theirs is None and own is not None)
    assert cast == (theirs is not None and theirs != own)


def check_decoded(name, before, after, layout, reports):
    """Values in the place of codes: exact if their dtype holds all of them."""
    exact, stepped = before.dequantize(torch.float32), name in named(reports, "stepped")
    if reports[0] is None and LAYOUTS[layout].decodes:  # saved in the layout plain: values are rounded, and that is all
        assert torch.equal(after, before.dequantize())
        return
    if (reports[0] is None or name in reports[0]["errors"]) and LAYOUTS[layout].combine is not None:
        torch.testing.assert_close(after, before.dequantize(after.dtype))  # a global scale may take steps
        return
    if name not in named(reports, "errors"):
        assert stepped or torch.equal(after.float(), exact)
    elif reports[0] is None:
        assert not torch.equal(after.float(), exact)
    if not stepped:
        assert torch.equal(after, before.dequantize(after.dtype))


@pytest.mark.parametrize(("layout", "format"), CASES, ids=lambda value: value)
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("dtype", DTYPES_HERE, ids=["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.filterwarnings("ignore:convert. [0-9]+ tensors hold NaN or Inf")
@pytest.mark.pairs
def test_saved_and_loaded_is_the_same_model(layout, format, cast, dtype, save, tmp_path, capsys):
    path, before, first, said = written(save, layout, format + CASTS[cast], dtype, tmp_path, capsys)
    if layout != "plain":
        check_casts(layout, before[next(iter(WEIGHTS))], first, said)
    for load in LOADS:
        after, second = read(load, path, tmp_path)
        assert after.keys() == before.keys()
        for name, t in before.items():
            found = after[name]
            if name not in WEIGHTS:
                assert torch.equal(found, t) and found.dtype is t.dtype
            elif isinstance(found, mx.MXTensor):
                check(name, t, found, layout, first, second, said)
            else:
                assert "plain" in (layout, load) or (layout, format) == ("gguf", "mxint8")  # Q8_0
                check_decoded(name, t, found, layout, (first, second))
        if second is not None:
            stored = [*second["exact"], *second["errors"], *second["stepped"]]
            assert sorted(stored) == sorted(before) and second["not_finite"] == []


PAIRS = [
    (before, after, format)
    for before, formats in STORED.items()
    for format in formats
    for after in STORED
    if format in STORED[after]
    and "plain" not in (before, after)
    and ("gguf", "mxint8") not in ((before, format), (after, format))
]
"""(layout, another or the same one, a format that both hold): Q8_0 of GGUF is read as values."""


@pytest.mark.exhaustive(quick=60)
@pytest.mark.parametrize(("before", "after", "format"), PAIRS, ids=lambda value: value)
@pytest.mark.parametrize("cast", ["", "-weight-only"], ids=["cast", "weight-only"])
@pytest.mark.parametrize("dtype", DTYPES_HERE, ids=["float32", "bfloat16", "float16"])
@pytest.mark.pairs
def test_from_layout_to_layout(before, after, format, cast, dtype, tmp_path, capsys):
    source, state, _, _ = written("save", before, format + cast, dtype, tmp_path, capsys)
    out = tmp_path / ("b.gguf" if after == "gguf" else "b")
    report = vars(mx.checkpoints.convert(source, out, layout=after))
    was, now = mx.checkpoints.load(source), mx.checkpoints.load(out)
    for name in WEIGHTS:
        check(name, was[name], now[name], after, report, None, "")
    assert report["errors"] == {} and sorted([*report["exact"], *report["stepped"]]) == sorted(state)
    recipe = state[next(iter(WEIGHTS))].recipe
    loses = before in ("modelopt", "deepseek", "quark") and LAYOUTS[before].activation(recipe, [recipe]) is not None
    assert (report["dropped"] != []) == (loses and before != after)
    if before == after:
        assert report["stepped"] == [] and report["unquantized"] == [] and report["cast"] == {}
