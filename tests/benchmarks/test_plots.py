"""The pictures of the documentation: what they show, and whether they are current."""

import pytest

from benchmarks import cast, generate, layers, llm_cpu, plots, training
from docs import records, records_benchmarks
from docs.markdown import table

MACHINE = {"gpu": "NVIDIA H9", "cpu": "a CPU", "versions": {"torch": "2.11.0"}, "date": "2026-01-02"}


@pytest.mark.parametrize("name", list(plots.DRAWN))
def test_the_pictures_of_the_documentation_are_current(name):
    picture = records.ASSETS / f"{name}.png"
    assert plots.checksum(plots.records_of(name)).encode() in picture.read_bytes(), "draw: python -m benchmarks.plots"
    assert f"](../assets/{name}.png)" in records.picture(name)


def test_layers_have_a_line_for_each_gpu_and_dots_for_many_rows():
    pytest.importorskip("matplotlib")

    def row(m, speed):
        return layers.LayerRow("", {}, relative={"bfloat16": 1.0, "mxfp8": 1 / speed}, m=m)

    few, large = [row(1, 2.0), row(1, 0.5), row(8, 3.0)], [row(4096, 1.5)]
    panels = plots.draw_layers((MACHINE, few), (MACHINE, few[:1]), (MACHINE, large)).axes
    found = [[*map(float, line.get_ydata())] for line in panels[1].lines]
    assert found[:3] == [pytest.approx([1.0, 3.0]), pytest.approx([2.0]), pytest.approx([1.5])]


def test_models_that_decode_have_a_bar_for_each_format():
    pytest.importorskip("matplotlib")
    names = (generate.BASE, "mxfp8-weight-only", "mxfp4-weight-only")
    graphs = [
        generate.ModelRow(name, {}, tokens_a_second=speed) for name, speed in zip(names, (10, 15, 20), strict=True)
    ]
    calls = [
        generate.GenerateRow("", {}, relative={"token": over}, config=name, batch=8)
        for name, over in zip(names, (1.0, 0.5, 0.25), strict=True)
    ]
    (axes,) = plots.draw_generate((MACHINE, graphs), (MACHINE, calls)).axes
    assert sorted(patch.get_height() for patch in axes.patches) == [1.5, 2.0, 2.0, 4.0]


def test_language_models_have_a_dot_for_each_format_beside_llama_cpp():
    pytest.importorskip("matplotlib")
    times = {"mxfp8-weight-only": 2.0, "llama.cpp Q8_0": 1.0, "mxfp4-weight-only": 3.0}
    rows = [llm_cpu.LlmRow("", times, model="smollm2"), llm_cpu.LlmRow("", {"bfloat16": 1.0}, model="llama-1b")]
    (axes,) = plots.draw_llm_cpu((MACHINE, rows)).axes
    assert [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "o"] == [0.5]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["smollm2, eager"]


def test_training_has_a_marker_for_each_recipe_and_shape():
    pytest.importorskip("matplotlib")
    rows = [
        training.TrainRow("", {}, relative={training.EAGER: over}, contender=name, shape=shape)
        for name, shape, over in (("mxfp8", "1x2x3", 0.7), ("mxfp8", "4 rows, 1x2x3", 1.3), ("torchao x", "1x2x3", 9.0))
    ]
    (axes,) = plots.draw_training((MACHINE, rows[:1]), (MACHINE, rows[1:])).axes
    assert [line.get_xdata()[0] for line in axes.lines if line.get_marker() in "osD^v"] == [0.7, 1.3]


def test_casts_have_a_panel_for_each_work_and_a_dot_for_each_figure():
    pytest.importorskip("matplotlib")
    rows = [
        cast.CastRow("", {}, 100, relative={"copy": 1.0, cast.OURS: 0.5}, format="nvfp4", kind=kind, size="8x8",
                     twice_nbytes=150, copy_nbytes=250)
        for kind in cast.WORKS
    ]  # fmt: skip
    panels = plots.draw_cast((MACHINE, rows)).axes
    assert [axes.get_title() for axes in panels] == list(cast.WORKS)
    assert [line.get_xdata()[0] for line in panels[0].lines if line.get_marker() == "o"] == [0.8]


def test_the_command_writes_the_pictures_that_it_names(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    plots.main(["generate", "--pictures", str(tmp_path / "new")])
    content = (tmp_path / "new" / "generate.png").read_bytes()
    assert content.startswith(b"\x89PNG") and plots.checksum(plots.records_of("generate")).encode() in content


@pytest.mark.parametrize("make", records_benchmarks.TABLES, ids=lambda make: make.__name__)
def test_a_table_of_the_page_is_short_and_has_its_machine(make):
    blocks = make().split("\n\n")
    tables = [block.splitlines() for block in blocks if block.startswith("|")]
    assert tables and all(3 <= len(lines) <= 14 for lines in tables)
    assert all(len({line.count(" | ") for line in lines}) == 1 for lines in tables)
    assert any("torch 2." in block and "; 2026-" in block for block in blocks)


def test_the_worst_line_comes_first():
    assert records_benchmarks.worst_first([(2.0, ["b"]), (1.0, ["a"])], "x") == table("x", [["a"], ["b"]])


def test_a_row_of_the_record_is_a_row_of_the_page():
    """One figure of each kind, by hand."""
    assert "| 65 to 512 | mxfp8 | 1.00 | 0.56 (256x2880x2880) | 73 of 136 |" in records_benchmarks.layers_few()
    assert "| mxfp8 | 1.61 | 1.41 | 4096x4096x4096 | 1.78 | `fp8_rows` |" in records_benchmarks.layers_large()
    assert "| smollm2, eager | 0.24 |" in records_benchmarks.llm_cpu_2_cores()
    assert "| mxfp8 | 1.30 | 32768 rows; 64x1536x4096 |" in records_benchmarks.train_experts()
