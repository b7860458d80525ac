"""Memory does not grow with steps and shapes; the full soak is ``python -m tests.helpers.soak``."""

import re
import subprocess
import sys

import pytest

from tests.helpers import soak


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.exhaustive
def test_a_short_soak_is_flat():
    """A process of its own: the memory of this one depends on the tests that it has run."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.helpers.soak", "--steps", "4000", "--shapes", "3000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"(\w+): ([\d,]+) iterations .* growth ([\d.]+)%; explain\(\) counts", done.stdout)
    assert [(name, number) for name, number, _ in found] == [("training", "4,000"), ("shapes", "3,000")]
    assert all(float(growth) <= 1 for *_, growth in found)


def test_growth_is_measured_from_the_first_tenth():
    def growth(*memory):
        return soak.Soak("test", 10, list(memory), 1, 2, 3.0).growth

    assert growth(100, 100, 100) == 0 and growth(100, 103, 100) == 0.03 and growth(100, 99, 98) == 0.02


@pytest.mark.exhaustive
def test_every_iteration_runs_and_shapes_differ():
    assert sum(1 for _ in soak.training(20)) == 20 and sum(1 for _ in soak.shapes(5)) == 5
    done = soak.soak("shapes", soak.shapes, 20)
    assert len(done.memory) == 10 and done.decisions == done.entries > 40 and "growth" in str(done)
