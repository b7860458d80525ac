"""``quantize_``: which weights of a model are replaced, and by what.

Start with ``quantize.py``. A call goes from there to ``configs.py``, which finds the weights (``weights.py``)
and the recipe of each, and to ``changes.py``, which checks all of them before it replaces the first one.
``steps.py`` has the conversions of two steps, ``format_plan.py`` the result of ``mx.plan``.
"""
