"""The parity study: the text and its halves, runs that stop and continue, records and what is made of them."""

import json
import math
import re
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import corpus, parity, plots
from benchmarks import parity_record as record
from benchmarks.parity_record import ARMS, BASE
from docs import records
from examples.gpt import GPT, SIZES


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Some hundred files of text, a few of them equal, and a package inside the standard library."""
    root = tmp_path_factory.mktemp("text")
    for i in range(400):
        path = root / f"package{i % 7}" / f"module{i}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"def function{i}(x):\n    return x + {i}\n" * 10)
    (root / "package0" / "copy.py").write_text((root / "package1" / "module1.py").read_text() + "\n\n")
    (root / "package0" / "short.py").write_text("x = 1\n")
    (root / "package0" / "table.txt").write_bytes(b"\0" * 1000)
    (root / "package0" / "image.png").write_bytes(b"x" * 1000)
    (root / "site-packages").mkdir()
    (root / "site-packages" / "other.py").write_text("y = 2\n" * 100)
    return root


@pytest.fixture(scope="module")
def text(folder):
    return corpus.load([folder])


def test_no_file_is_in_both_halves_or_twice_in_one(folder):
    training, held_out = corpus.halves([folder, folder])
    assert held_out and not training.keys() & held_out.keys()
    contents = [b" ".join(content.split()) for half in (training, held_out) for content in half.values()]
    assert len(set(contents)) == len(contents) == 400
    assert all(corpus.is_held_out(name) for name in held_out) and not any(map(corpus.is_held_out, training))


def test_the_text_is_the_same_each_time_and_its_cache_is_of_these_files(folder, text, tmp_path):
    cache = tmp_path / "cache" / "text.pt"
    for _ in range(2):
        same = corpus.load([folder], cache)
        assert same.text.equal(text.text) and same.cut == text.cut and same.files == text.files
    assert len(text.training) + len(text.held_out) == len(text.text)
    assert bytes(text.training.tolist()).count(0) == text.files[0]
    assert bytes(text.held_out.tolist()).count(0) == text.files[1]
    torch.save(torch.load(cache, weights_only=True) | {"key": "of other files", "cut": 1}, cache)
    assert corpus.load([folder], cache).cut == text.cut


def test_a_folder_without_held_out_text_is_refused(tmp_path):
    with pytest.raises(ValueError, match="0 files for training and 0 held out in"):
        corpus.load([tmp_path])


# ---------------------------------------------------------------------------------------------- runs


@pytest.fixture
def command(folder, tmp_path, capsys):
    """The command on the smallest model; its exit status and what it prints."""

    def run(*arguments):
        options = ["--size", "tiny", "--eager", "--tokens", "2560", "--text", folder, "--cache", tmp_path / "text.pt"]
        with pytest.raises(SystemExit) as stop:
            parity.main([*map(str, options), "--results", str(tmp_path / "results"), *map(str, arguments)])
        return stop.value.code, capsys.readouterr().out

    return run


def points(tmp_path, arm, seed=0, folder="results"):
    result = record.read(record.path_of(tmp_path / folder, "tiny", arm, seed))
    return [replace(point, seconds=0.0) for point in result.points]


@pytest.mark.exhaustive
def test_arms_of_a_seed_start_alike_and_write_records(command, tmp_path):
    status, out = command("--arms", "bf16:2,mxfp8,mxfp4-rotation", "--seeds", 1)
    assert status == 0 and "10 steps of 256 tokens" in out
    assert [line.split()[0] for line in out.splitlines()[-3:]] == ["bf16", "mxfp8", "mxfp4-rotation"]
    results = record.read_all(tmp_path / "results", "tiny")
    assert [(r.header.arm, r.header.seed) for r in results] == [
        ("bf16", 0), ("bf16", 1), ("mxfp8", 0), ("mxfp4-rotation", 0)
    ]  # fmt: skip
    base, other, mxfp8, _ = results
    assert base.points[0].held_out != other.points[0].held_out
    assert base.points[0].held_out == pytest.approx(mxfp8.points[0].held_out, rel=1e-3) and base.loss != mxfp8.loss
    assert [point.step for point in base.points] == list(range(11)) and base.points[-1].tokens == 2560
    assert base.points[0].held_out - base.loss > 0.5
    assert base.header.quantized == 0 and not base.header.products and base.points[-1].unquantized is None
    assert all(point.whole is None for run in results for point in run.points[:-1])
    assert base.points[-1].whole_unquantized is None and base.points[-1].whole != base.loss
    whole, same = mxfp8.points[-1].whole, mxfp8.points[-1].whole_unquantized
    assert whole != same == pytest.approx(whole, rel=1e-2) and whole == pytest.approx(base.points[-1].whole, rel=1e-2)
    losses = [(point.held_out, point.unquantized) for point in mxfp8.points]
    assert losses[0][1] == pytest.approx(base.points[0].held_out, rel=1e-5)  # the same weights, here in float32
    assert all(quantized != plain == pytest.approx(quantized, rel=1e-2) for quantized, plain in losses)
    assert mxfp8.header.quantized == 12 * 32 * 32
    assert mxfp8.header.products == {"fprop by emulated": 4, "dgrad by emulated": 4, "wgrad by emulated": 4}


@pytest.mark.exhaustive
@pytest.mark.parametrize("arm", ["nvfp4-last-bf16", "float8-current"])
def test_a_run_that_stops_continues_bit_for_bit(arm, command, tmp_path, monkeypatch):
    assert command("--arms", arm)[0] == 0
    whole = points(tmp_path, arm)
    clock = iter([0.0] * 8 + [1e9] * 100)
    with monkeypatch.context() as patch:
        # its own: bars ask for the time, too
        patch.setattr(parity, "time", SimpleNamespace(**{**vars(time), "monotonic": lambda: next(clock)}))
        stopped = ("--arms", arm, "--folder", tmp_path / "run", "--results", tmp_path / "again", "--minutes", 1)
        status, out = command(*stopped)
    assert status == 1 and "stops at step 6" in out and f"not finished: {arm} seed 0" in out
    file = record.path_of(tmp_path / "again", "tiny", arm, 0)
    with file.open("a") as end:
        end.write('{"step": 7, "tok')  # a process that was ended while it wrote
    torch.manual_seed(7)
    status, out = command(*stopped[:-2])
    assert status == 0 and "continues at step 6" in out
    assert points(tmp_path, arm, folder="again") == whole
    status, out = command(*stopped[:-2])
    assert status == 0 and "has its 10 steps already" in out


@pytest.mark.exhaustive
def test_a_record_of_another_length_is_not_overwritten(command, tmp_path, capsys):
    assert command("--arms", "bf16")[0] == 0
    before = record.path_of(tmp_path / "results", "tiny", "bf16", 0).read_bytes()
    status, out = command("--arms", "bf16", "--tokens", "5120")
    assert status == 1 and "not finished: bf16 seed 0" in out
    assert record.path_of(tmp_path / "results", "tiny", "bf16", 0).read_bytes() == before


@pytest.mark.exhaustive
def test_two_devices_share_the_runs(command, tmp_path):
    assert command("--arms", "bf16:2,mxfp8", "--devices", 2)[0] == 0
    assert len(record.read_all(tmp_path / "results", "tiny")) == 3


@pytest.mark.parametrize(("arms", "message"), [("bf16,mxfp7", "there is no arm 'mxfp7'")])
def test_an_unknown_arm_is_refused(arms, message, capsys):
    with pytest.raises(SystemExit):
        parity.parsed(["--arms", arms])
    assert message in capsys.readouterr().err


def test_numbers_and_tasks():
    assert [parity.number(text) for text in ("300M", "1.5k", "2B", "77")] == [300_000_000, 1500, 2_000_000_000, 77]
    assert [(t.arm, t.seed) for t in parity.tasks_of("bf16:2,nvfp4", 1)] == [("bf16", 0), ("nvfp4", 0), ("bf16", 1)]


def test_the_sizes_have_the_parameters_of_the_study():
    for name, least, most in (("medium", 15e6, 27e6), ("large", 120e6, 130e6)):
        with torch.device("meta"):
            assert least < sum(p.numel() for p in GPT(SIZES[name]).parameters()) < most
    medium = SIZES["medium"]
    assert parity.TOKENS["medium"] == 2000 * medium.batch * medium.context


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_has_a_recipe_of_its_own(name):
    made = [
        (None if arm.recipe is None else str(key_of(arm.recipe())), arm.kernel, arm.last, arm.blocks)
        for arm in ARMS.values()
    ]
    assert len(set(made)) == len(made)
    assert (ARMS[name].recipe is None) == (name == BASE)


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("blocks, quantized", [(0, 4), (2, 2), (9, 1)])
def test_the_last_blocks_of_an_arm_stay_unquantized(blocks, quantized):
    settings = parity.Settings("nvfp4", False, "small", 0, "cpu", "", 1)
    run = parity.ArmRun.with_recipe(settings, ARMS["nvfp4"].recipe(), unquantized_blocks=blocks)
    found = {fqn.split(".")[1] for fqn in parity.quantized_weights(run.model)}
    assert found == {str(i) for i in range(quantized)}


def key_of(recipe):
    return (recipe if hasattr(recipe, "key") else recipe.linear_recipe()).key


# ---------------------------------------------------------------------------------------------- the table


def result(arm, seed, loss, rate=1000.0, repeat=0):
    header = record.Header(arm, seed, "tiny", 1, 0, 3, 100, "text", 1, 1, False, {}, {}, repeat)
    made = [record.Point(i, 100 * i, loss, loss + 3 - i, 5.0 * (i > 0) + 100 * i / rate) for i in range(4)]
    return record.Result(header, made)


def test_lines_compare_with_bfloat16_of_the_same_seed():
    runs = [result(BASE, 0, 2.0), result(BASE, 1, 2.2), result("mxfp8", 0, 2.02, 1500.0), result("nvfp4", 1, 2.22)]
    base, mxfp8, nvfp4 = record.lines(runs)
    assert base[2:] == ["2", "2.1000", "", "0.2000", "1,000", "1.00", "", "", ""]
    assert mxfp8[2:] == ["1", "2.0200", "+1.00%", "", "1,500", "1.50", "", "", ""]
    assert record.table_of(runs) == (record.HEADER[:-3], [line[:-3] for line in (base, mxfp8, nvfp4)])
    measured = {0: {"whole": 2.4}, 2: {"unquantized": 1.99, "whole": 2.412, "whole_unquantized": 2.394}}
    for i, fields in measured.items():
        runs[i] = record.Result(runs[i].header, [replace(point, **fields) for point in runs[i].points])
    header, found = record.table_of(runs)
    assert header == record.HEADER and not any("," in name for name in header)  # they stand in one row of a page
    assert [line[-3:] for line in found] == [["", "", ""], ["-0.50%", "+0.50%", "-0.25%"], ["", "", ""]]
    del runs[0]
    assert record.lines(runs)[1][-2:] == ["", ""]  # the runs of bf16 that are left did not measure it
    assert nvfp4[4] == "+0.91%" and all(len(line) == len(record.HEADER) for line in (base, mxfp8, nvfp4))
    assert math.isnan(record.Result(runs[0].header, runs[0].points[:1]).tokens_per_second)


def test_runs_of_one_seed_count_as_their_mean_and_three_seeds_have_an_error():
    base = [result(BASE, seed, 2.0) for seed in range(4)] + [result(BASE, 0, 2.2, repeat=1)]
    ours = [result("mxfp8", 0, 2.142, repeat=repeat) for repeat in range(3)] + [result("mxfp8", 1, 2.02)]
    assert record.distances(ours, base) == pytest.approx([0.02, 0.01]) and record.standard_error([0.02, 0.01]) is None
    assert record.lines([*base, *ours])[1][2:6] == ["4", "2.0810", "+1.50%", "0.1220"]
    ours += [result("mxfp8", 2, 2.0), result("mxfp8", 3, 1.98)]
    error = (sum((x - 0.5) ** 2 for x in (2, 1, 0, -1)) / 3 / 4) ** 0.5
    assert record.lines([*base, *ours])[1][4] == f"+0.50% ± {error:.2f}%"
    apart = [target.verdict([*base, *ours])[2] for target in record.TARGETS[:3]]
    assert apart == ["0.5", f"{(0.042 + 0.02 - 0.02) / 4 / 0.162:.3g}", ""]


def test_the_distance_on_the_whole_text_is_that_of_the_runs_that_measured_it():
    base, ours = ([result(arm, seed, 2.0) for seed in range(3)] for arm in (BASE, "mxfp8"))
    for run, whole in ((base[0], 4.0), (ours[0], 4.01), (base[1], 5.0), (ours[2], 6.0)):
        run.points[-1] = replace(run.points[-1], whole=whole)
    assert record.TARGETS[2].verdict([*base, *ours])[2] == "0.25"


def test_a_repeated_run_has_a_file_of_its_own(tmp_path):
    for repeat in (1, 0):
        one = result(BASE, 0, 2.0, repeat=repeat)
        record.start(record.path_of(tmp_path, "tiny", BASE, 0, repeat), one.header, one.points)
    assert [run.header.repeat for run in record.read_all(tmp_path, "tiny")] == [0, 1]
    assert record.path_of(tmp_path, "tiny", BASE, 0, 1).name == "bf16-seed0-repeat1.jsonl"


def test_runs_of_two_studies_are_not_compared(tmp_path):
    for one in (result(BASE, 0, 2.0), result("mxfp8", 0, 2.0)):
        header = replace(one.header, text=one.header.arm)
        record.start(record.path_of(tmp_path, "tiny", header.arm, 0), header, one.points)
    with pytest.raises(ValueError, match="mxfp8 has text mxfp8, bf16 bf16; keep the records of one study in a folder"):
        record.read_all(tmp_path, "tiny")


def test_a_record_is_a_line_for_each_point(tmp_path):
    one = result(BASE, 0, 2.0)
    path = record.path_of(tmp_path, "tiny", BASE, 0)
    record.start(path, one.header, one.points[:2])
    record.append(path, one.points[2])
    first, *rest = map(json.loads, path.read_text().splitlines())
    assert first["arm"] == BASE and [point["step"] for point in rest] == [0, 1, 2]
    assert not record.read(path).finished and record.read_all(tmp_path, "tiny") == []


# ---------------------------------------------------------------------------------------------- targets, picture, page


def test_targets_hold_or_do_not():
    runs = [
        result(BASE, 0, 2.0),
        result(BASE, 1, 2.2),
        result("mxfp8", 0, 2.02, 1500.0),
        result("nvfp4-last-bf16", 1, 2.2),
    ]
    said = {target.what: target.verdict(runs)[2:] for target in record.TARGETS}
    assert said["MXFP8, distance from bf16 [%]"] == ["1", "mxfp8", "no"]
    assert said["MXFP8, distance from bf16 [spread of seeds]"] == ["0.1", "mxfp8 and bf16", "yes"]
    assert said["NVFP4 with all ingredients, distance from bf16 [%]"] == ["0", "nvfp4-last-bf16", "yes"]
    assert said["FP8 tensor cores, distance from dequantized values [spread of seeds]"][-1] == "not measured"
    assert said["MXFP8, tokens/s over bf16"] == ["1.5", "mxfp8", "yes"]


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Records of three arms, and a folder of pictures."""
    for one in (
        result(BASE, 0, 2.0),
        result(BASE, 1, 2.2),
        result("mxfp8", 0, 2.02),
        result("nvfp4-last-bf16", 1, 2.22),
    ):
        machine = {
            "gpu": "a GPU",
            "cpu": "a CPU",
            "python": "3.12",
            "versions": {"torch": "2.11"},
            "date": "2026-01-02",
        }
        header = replace(one.header, size="large", machine=machine, products={"fprop by fp8_rows": 4})
        record.start(record.path_of(tmp_path / "parity", "large", header.arm, header.seed), header, one.points)
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    monkeypatch.setattr(records, "ASSETS", tmp_path)
    return tmp_path


def test_the_picture_shows_each_seed_and_the_distance(recorded):
    pytest.importorskip("matplotlib")
    left, right = plots.draw_parity(record.read_all(recorded / "parity", "large")).axes
    assert len(left.lines) == 4 and len(right.lines) == 4
    assert [tuple(line.get_ydata()) for line in right.lines[:2]] == [(0.0,) * 3] * 2
    assert right.lines[2].get_ydata()[-1] == pytest.approx(1.0)
    source = plots.parity_checksum(recorded / "parity", "large")
    path = plots.save(
        plots.draw_parity(record.read_all(recorded / "parity", "large")), recorded / "new" / "a.png", source
    )
    assert source.encode() in path.read_bytes()


def test_many_arms_are_dots_where_they_end(recorded, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(plots, "MANY", 1)
    _, right = plots.draw_parity(record.read_all(recorded / "parity", "large")).axes
    *dots, zero = right.lines
    dots, means = dots[::2], dots[1::2]
    assert [line.get_marker() for line in means] == ["|", "|"]
    assert [list(line.get_xdata()) for line in dots] == [pytest.approx([1.0]), pytest.approx([100 * 0.02 / 2.2])]
    assert [label.get_text() for label in right.get_yticklabels()] == ["mxfp8", "nvfp4-last-bf16"]
    assert list(zero.get_xdata()) == [0, 0]


def test_the_page_has_the_tables(recorded):
    text = records.parity_large()
    assert (
        "a GPU, Python 3.12, torch 2.11; 2026-01-02." in text
        and text.count("| nvfp4-last-bf16 | fprop by fp8_rows |") == 1
    )
    assert (
        "| mxfp8 | fprop by fp8_rows |" in text
        and "| NVFP4 with all ingredients, distance from bf16 [%] | <= 1.00 |" in text
    )
    assert "](../assets/parity_large.png)" in text


def test_the_commands_of_the_page_are_commands():
    page = (records.ROOT / "docs" / "reference" / "parity.md").read_text()
    commands = re.findall(r"^python -m benchmarks.parity (.*?)(?: +#.*)?$", page, re.MULTILINE)
    assert len(commands) >= 2 and all(
        parity.parsed(command.replace("--devices 2", "").split()).tasks for command in commands
    )


@pytest.mark.parametrize("size", plots.PARITY_SIZES)
def test_the_picture_of_the_documentation_is_current(size):
    picture = records.ASSETS / f"parity_{size}.png"
    found = record.read_all(record.RESULTS, size)
    assert bool(found) == picture.exists(), "draw the records: python -m benchmarks.plots"
    if found:
        assert plots.parity_checksum(record.RESULTS, size).encode() in picture.read_bytes()
