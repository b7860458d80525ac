"""Measurements of a model: what quantization changes, and how fast its products are.

``model_report.py``, ``output_errors.py`` and ``quality.py`` have the errors of weights, outputs and predictions;
``monitor.py`` has those of casts in training; ``tune*.py`` and ``costs.py`` time small-M products on a GPU.
"""
