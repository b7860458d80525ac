"""The training example learns, stops, continues bit for bit, and reports what ran."""

import re
import shutil
from dataclasses import replace

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")

from examples import train_lm
from examples.curves import smooth
from examples.gpt import GPT, SIZES, load_text, split
from examples.run import Run, Settings, quantized_weights
from examples.train_lm import RECIPES

PAPER = ["qkv", "projection", "up", "down"]


@pytest.fixture(autouse=True)
def generators():
    """``main`` seeds torch's generator."""
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


@pytest.fixture
def main(tmp_path):
    """The example on the smallest model and the CPU, its picture in a folder of the test."""

    def run(*arguments):
        picture = tmp_path / "picture.png"
        train_lm.main(["--size", "tiny", "--device", "cpu", "--plot", str(picture), *map(str, arguments)])
        return picture

    return run


def row(out, recipe):
    """The numbers of a recipe's line of the table, as text."""
    (cells,) = (line.split() for line in out.splitlines() if line.startswith(f"{recipe} "))
    return cells[1:]


def test_it_learns_beside_its_twin_and_shows_it(main, capsys):
    picture = main("--compare")
    out = capsys.readouterr().out
    assert "Python's standard library" in out
    for recipe, layers in (("mxfp8", "4"), ("none", "0")):
        steps, training, held_out, speed, *quantized = row(out, recipe)
        assert steps == "60"
        assert float(training) < 3.3 and float(held_out) < 3.3  # from ln 256 = 5.5
        assert float(speed.replace(",", "")) > 0
        assert quantized == [layers, "of", "5"]
    trained = [float(row(out, recipe)[2]) for recipe in ("mxfp8", "none")]
    assert abs(trained[0] - trained[1]) < 0.05
    assert "4 quantized layers: 4 fprop by emulated, 4 dgrad by emulated, 4 wgrad by emulated" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000


def assert_same(a, b, where="checkpoint"):
    """Equal values, tensors bit for bit, in containers of every kind."""
    # Hyperparameters that are tuples come back from torch's own state dicts as lists.
    assert type(a) is type(b) or {type(a), type(b)} == {tuple, list}, where
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, pair in enumerate(zip(a, b, strict=True)):
            assert_same(*pair, f"{where}[{i}]")
    else:
        assert a == b, where


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4", "nvfp4", "float8-delayed"])
def test_a_run_that_continues_is_bitwise_identical_to_an_uninterrupted_one(recipe, main, tmp_path):
    """Also with stochastic rounding of gradients and with delayed scaling."""
    whole, interrupted = tmp_path / "whole", tmp_path / "interrupted"
    main("--recipe", recipe, "--steps", 24, "--checkpoint", whole)
    main("--recipe", recipe, "--steps", 11, "--checkpoint", interrupted)
    torch.manual_seed(7)  # another process
    main("--recipe", recipe, "--steps", 24, "--checkpoint", interrupted, "--resume")
    assert {p.name for p in interrupted.iterdir()} == {"step-20", "step-24"}  # the last two
    expected, continued = (saved(path / "step-24", tmp_path / "file") for path in (whole, interrupted))
    mine, its = continued["rest"].pop("held_out"), expected["rest"].pop("held_out")
    assert [step for step, _ in mine] == [0, 11, 20, 24]  # one evaluation more
    assert [entry for entry in mine if entry[0] != 11] == its
    assert len(expected["rest"]["losses"]) == 24 and expected.keys() == {"model", "optimizer", "rest"}
    assert bool(expected["rest"].get("delayed")) == (recipe == "float8-delayed")
    assert_same(expected, continued)


def saved(folder, file):
    """The contents of a checkpoint."""
    dcp_to_torch_save(folder, file)
    return torch.load(file, weights_only=False)


def test_a_twin_has_a_checkpoint_of_its_own(main, tmp_path, capsys):
    path = tmp_path / "run"
    main("--steps", 4, "--checkpoint", path, "--compare")
    assert sorted(p.name for p in tmp_path.glob("run*")) == ["run", "run-none"]
    capsys.readouterr()
    main("--steps", 6, "--checkpoint", path, "--compare", "--resume")
    out = capsys.readouterr().out
    assert [row(out, recipe)[0] for recipe in ("mxfp8", "none")] == ["6", "6"]


def test_a_finished_run_resumes_to_its_own_table(main, tmp_path, capsys):
    path = tmp_path / "run"
    main("--steps", 4, "--checkpoint", path)
    first = row(capsys.readouterr().out, "mxfp8")
    main("--steps", 4, "--checkpoint", path, "--resume")
    assert row(capsys.readouterr().out, "mxfp8")[:3] == first[:3]


def test_minutes_stop_it_and_the_twin_does_as_many_steps(main, capsys):
    main("--minutes", 0.002, "--compare")
    out = capsys.readouterr().out
    steps = row(out, "mxfp8")[0]
    assert int(steps) >= 1
    assert row(out, "none")[0] == steps


def settings(recipe, quantize_all=False):
    return Settings(recipe, quantize_all, size="tiny", seed=0, device="cpu", text="")


@pytest.fixture(scope="module")
def text():
    return load_text(None)


@pytest.mark.exhaustive(quick=3)
@pytest.mark.parametrize("recipe", [*RECIPES, "mxint8", "float8_e4m3_1x128"])
def test_every_recipe_trains_its_layers_in_three_products(recipe, text):
    run = Run.of(settings(recipe))
    names = [name.split(".")[-2] for name in quantized_weights(run.model)]
    assert names == ([] if recipe in ("none", "bf16") else PAPER)
    said = train_lm.evidence(run, text)
    if names:
        assert [said.count(f"4 {product} by ") for product in ("fprop", "dgrad", "wgrad")] == [1, 1, 1]
    else:
        assert said.endswith("0 quantized layers: no product")
    run.optimizer.zero_grad()
    learned, held_out = split(text)
    run.evaluate(held_out)
    for _ in range(20):
        run.step(learned)
    run.evaluate(held_out)
    (_, before), (_, after) = run.held_out
    assert 5.3 < before < 5.7
    assert after < 4.3


def test_quantize_all_takes_the_head_too(text):
    run = Run.of(settings("mxfp8", quantize_all=True))
    assert [name.split(".")[-2] for name in quantized_weights(run.model)] == [*PAPER, "head"]
    assert "5 fprop by emulated, 5 dgrad by emulated, 5 wgrad by emulated" in train_lm.evidence(run, text)


def test_twins_begin_alike():
    plain, quantized = Run.of(settings("none")), Run.of(settings("mxfp8"))
    assert_same(plain.model.state_dict(), quantized.model.state_dict())
    assert torch.equal(plain.sampler.get_state(), quantized.sampler.get_state())


def test_the_text_of_a_file(main, tmp_path, capsys):
    """One byte repeated is learned at once."""
    book = tmp_path / "book.txt"
    book.write_text("a" * 2000)
    main("--text", book, "--steps", 20)
    out = capsys.readouterr().out
    assert f"{book}, 2,000 bytes" in out
    assert float(row(out, "mxfp8")[2]) < 0.5


def test_held_out_text_is_not_learned_from():
    learned, held_out = split(torch.arange(95, dtype=torch.uint8))
    assert torch.cat([learned, held_out]).tolist() == list(range(95))
    assert len(held_out) == 10


def test_smoothing_by_hand():
    assert smooth([3.0, 3.0, 3.0]) == pytest.approx([3, 3, 3])
    assert smooth([1.0, 4.0], keep=0.5) == pytest.approx([1, (0.5 * 1 + 4) / 1.5])


def test_parameters_of_a_size():
    with torch.device("meta"):
        model = GPT(SIZES["base"])
    assert 85e6 < sum(p.numel() for p in model.parameters()) < 87e6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "mxfp7"], "nvfp4, float8-current, float8-delayed, float8-block, or any format by name"),
        (["--recipe", "mxfp7"], "unknown format 'mxfp7'"),
        (["--text", "nowhere.txt"], "there is no file nowhere.txt"),
        (["--text", "{short}"], "has 14 bytes; windows of 32 need 330 or more"),
        (["--steps", "0"], "--steps: 0 is not positive"),
        (["--monitor", "0"], "--monitor: it measures one of N steps, 1 or more"),
        (["--monitor", "5", "--compile"], "of layers that are not compiled"),
        (["--recipe", "float8-delayed", "--compile"], "gave float8-delayed run eager; leave out --compile"),
        (["--resume"], "name the folder with --checkpoint"),
        (["--resume", "--checkpoint", "nowhere"], "there is no folder nowhere"),
        (["--checkpoint", "{short}"], "exists already; add --resume, or name another folder"),
    ],
)
def test_mistakes_are_named(arguments, message, main, tmp_path, capsys):
    short = tmp_path / "short.txt"
    short.write_text("print('short')")
    with pytest.raises(SystemExit):
        main(*(argument.format(short=short) for argument in arguments))
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_monitor_draws_what_casts_lose(main, capsys):
    picture = main("--recipe", "nvfp4", "--steps", 5, "--monitor", 2, "--compare")
    out = capsys.readouterr().out
    assert "step 4\n\nlayer       operand  format" in out and "nvfp4[16x16]" in out
    drawn = {p.name for p in picture.parent.glob("*.png")}
    assert drawn == {"picture.png", "picture-casts-nvfp4.png"}  # the twin casts nothing
    assert str(picture.with_name("picture-casts-nvfp4.png")) in out


def test_sharded_blocks_are_not_compiled(main, monkeypatch, capsys):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main("--fsdp", "--compile")
    assert "sharded blocks run eager here; leave out --compile" in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch looks at each block's input
def test_compiled_blocks_train_as_eager_ones(main, capsys):
    found = []
    for options in ((), ("--compile",)):
        main("--steps", 5, *options)
        out = capsys.readouterr().out
        found.append(float(row(out, "mxfp8")[2]))
        assert re.search(r"4 quantized layers: 4 fprop by \w+, 4 dgrad by \w+, 4 wgrad by", out)
    assert found[0] == pytest.approx(found[1], abs=0.01)


@pytest.mark.parametrize(("whole", "last"), [(0, 1e-2 * (10 / 60) ** 0.5), (60, 1e-3)])
def test_the_learning_rate_rises_and_falls(whole, last):
    run = Run.of(replace(settings("none"), steps=whole))
    rates = [run.rate(step) for step in range(1, 61)]
    assert rates[9] == max(rates) == 1e-2 and rates[0] == pytest.approx(1e-3)
    assert rates[9:] == sorted(rates[9:], reverse=True) and rates[-1] == pytest.approx(last)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "mxfp4"], "was trained with recipe mxfp8, not mxfp4"),
        (["--seed", "1"], "was trained with seed 0, not 1"),
        (["--quantize-all"], "was trained with quantize_all False, not True"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(arguments, message, main, tmp_path, capsys):
    path = tmp_path / "run"
    main("--steps", 1, "--checkpoint", path)
    before = contents(path)
    with pytest.raises(SystemExit):
        main("--checkpoint", path, "--resume", *arguments)
    assert message in " ".join(capsys.readouterr().err.split())
    assert contents(path) == before


def contents(folder):
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[: len(data) // 2], "is damaged: the checksum of '"),
        (lambda data: data[:999] + bytes([data[999] ^ 1]) + data[1000:], "is damaged: the checksum of '"),
    ],
    ids=["truncated", "flipped"],
)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_goes_on(damage, message, main, tmp_path, capsys):
    path = tmp_path / "run"
    main("--steps", 3, "--checkpoint", path)
    main("--steps", 5, "--checkpoint", path, "--resume")
    (file,) = (path / "step-5").glob("*.distcp")
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(SystemExit):
        main("--steps", 6, "--checkpoint", path, "--resume")
    assert message in " ".join(capsys.readouterr().err.split())
    shutil.rmtree(path / "step-5")
    main("--steps", 6, "--checkpoint", path, "--resume")
    assert row(capsys.readouterr().out, "mxfp8")[0] == "6"
    shutil.rmtree(path / "step-3")
    shutil.rmtree(path / "step-6")
    with pytest.raises(SystemExit):
        main("--steps", 6, "--checkpoint", path, "--resume")
    assert "has no complete checkpoint" in " ".join(capsys.readouterr().err.split())
