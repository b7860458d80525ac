"""Fixtures of the casts that these tests share."""

from tests.kernels.quantize.conftest import interpreted, one_rounding  # noqa: F401
