"""The command that fits the cost model: a file that is not one of its times is one line, without a traceback."""

import pytest

from mxtensor.report.costs import main


@pytest.mark.parametrize("content", [None, "text", "[]", '{"rows": [1]}'])
def test_a_file_without_times_is_refused(content, tmp_path, capsys):
    path = tmp_path / "times.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit) as end:
        main(["--read", str(path), "--json", str(tmp_path / "out.json")])
    assert end.value.code == 2 and not (tmp_path / "out.json").exists()
    assert f"error: {path} is not a file of --times: " in capsys.readouterr().err.splitlines()[-1]
