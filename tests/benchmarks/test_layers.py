"""The benchmark of layers: shapes, figures, experts."""

import pytest
import torch

from benchmarks import layers, training


def row(m, shape, **relative):
    times = {name: 0.02 * value for name, value in {"bfloat16": 1.0, **relative}.items()}
    n, k = shape
    return layers.LayerRow(f"{m}x{n}x{k}", times, n * k, relative={"bfloat16": 1.0, **relative}, m=m, n=n, k=k)


ROWS = [
    row(1, (64, 32), mxfp8=0.5, mxfp4=0.25),
    row(64, (64, 32), mxfp8=0.8, mxfp4=2.0),
    row(65, (64, 32), mxfp8=1.25),
]


def test_the_shapes_are_those_of_the_models():
    shapes = layers.model_shapes()
    assert shapes[4096, 4096] == "Llama 3 8B q, o; Qwen 3 8B q, o"
    assert shapes[1024, 4096] == "Llama 3 8B kv; Qwen 3 8B kv"
    expected = {
        "Llama 3 70B": {(8192, 8192), (1024, 8192), (28672, 8192), (8192, 28672)},
        "Qwen 3 30B-A3B": {(4096, 2048), (512, 2048), (2048, 4096), (1536, 2048), (2048, 768)},
        "gpt-oss-20b": {(4096, 2880), (512, 2880), (2880, 4096), (5760, 2880), (2880, 2880)},
        "Mistral Small 24B": {(4096, 5120), (1024, 5120), (5120, 4096), (32768, 5120), (5120, 32768)},
        "Gemma 3 12B": {(4096, 3840), (2048, 3840), (3840, 4096), (15360, 3840), (3840, 15360)},
        "Phi 4": {(7680, 5120), (5120, 5120), (35840, 5120), (5120, 17920)},
    }
    for name, found in expected.items():
        assert {shape for shape, names in shapes.items() if name in names} == found
    assert all(n % 32 == 0 and k % 32 == 0 for n, k in shapes)


def test_drawn_shapes_are_new_and_the_same_for_a_seed():
    drawn = layers.random_shapes(1)
    assert drawn == layers.random_shapes(1) != layers.random_shapes(2)
    assert len(drawn) == layers.DRAWN and not drawn.keys() & layers.model_shapes().keys()
    assert all(n % 32 == k % 32 == 0 and min(n, k) >= 512 and max(n, k) <= 18432 for n, k in drawn)


def test_the_worst_figure_is_first_and_means_are_geometric():
    found = layers.figures(ROWS)
    assert [(f.speed, f.config, f.row.m) for f in found][:2] == [(0.5, "mxfp4", 64), (0.8, "mxfp8", 65)]
    lines = layers.summary(found, lambda m: "few" if m <= 64 else "many")
    assert sorted(lines) == [
        ["few", "mxfp4", "1.41", "0.50", "64x64x32", "1 of 2"],
        ["few", "mxfp8", "1.58", "1.25", "64x64x32", "0 of 2"],
        ["many", "mxfp8", "0.80", "0.80", "65x64x32", "1 of 1"],
    ]
    assert [line[0] for line in layers.summary(found, str) if line[1] == "mxfp8"] == ["1", "64", "65"]
    assert all(len(line) == len(layers.SUMMARY_HEADER) for line in lines)
    (worst,) = layers.worst_lines(found, {(64, 32): "toy"}, top=1)
    assert worst == ["64x64x32", "mxfp4", "0.50", "40.0", "20.0", "", "toy"]


@pytest.mark.parametrize("picked", [False, True])
def test_experts_multiply_the_rows_of_their_tokens(picked):
    stack = layers.Stack(4, 2, 16, 32)
    weight, x = torch.randn(4, 16, 32), torch.randn(2 * 3, 32)
    choice = layers.choices_of(stack, 3, "cpu", picked)[0]
    rows = choice if picked else torch.repeat_interleave(torch.arange(4), choice.diff(prepend=choice.new_zeros(1)))
    expected = torch.einsum("mk,mnk->mn", x, weight[rows])
    torch.testing.assert_close(layers.product(x, weight, choice, picked), expected)


def test_groups_of_experts_that_train_are_ragged_and_two_are_empty():
    sizes = training.ends_of(96, 4, "cpu").diff(prepend=torch.zeros(1, dtype=torch.int32)).tolist()
    assert sizes[1:3] == [0, 0] and sum(sizes) == 96
