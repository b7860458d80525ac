"""Calibration: weights rounded so that the outputs of layers change least, not each value."""
