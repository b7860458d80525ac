"""Extensions of ``torch.compile``: passes over graphs with quantized products, and programmatic dependent launch (PDL).

Start with ``defaults.py``: it has what every graph gets, ``inference_options.py`` what ``mx.inference_options()`` adds.
"""
