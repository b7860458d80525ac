"""The sanitizers see what they have to see; ``make sanitize`` runs everything under them."""

import subprocess
import sys

import pytest

from mxtensor.kernels.runtime.native_build import compiler
from tests.helpers import sanitize_native


@pytest.mark.exhaustive
@pytest.mark.skipif(
    compiler() is None or sanitize_native.runtime("libasan.so") is None, reason="needs AddressSanitizer"
)
def test_reading_one_value_too_many_is_reported():
    command = [sys.executable, "-m", "tests.helpers.sanitize_native", "--check"]
    done = subprocess.run(command, cwd=sanitize_native.ROOT, capture_output=True, text=True)
    assert done.returncode == sanitize_native.REPORT
    assert "heap-buffer-overflow" in done.stderr and "mx_amax" in done.stderr
