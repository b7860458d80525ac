"""Measurements of a model: what quantization changes, and how fast its products are.

``model_report.py`` (weights and outputs of layers) and ``quality.py`` (predictions) have the errors of a model, which
``page.py`` shows; ``monitor.py`` has those of casts in training; ``tune.py`` and ``costs.py`` time small-M products on
a GPU.
"""
