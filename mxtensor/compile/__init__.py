"""Extensions of ``torch.compile``: passes over graphs with quantized products, and programmatic dependent launch (PDL).

Start with ``defaults.py``: it has what every graph gets, ``inference_options.py`` what ``mx.inference_options()`` adds.
``cpu_graphs.py`` records the calls of compiled code on a CPU, for ``mx.compile_decoding``.
"""
