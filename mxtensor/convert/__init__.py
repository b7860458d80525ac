"""``quantize_``: which weights of a model are replaced, and by what.

Start with ``quantize.py``. A call goes from there to ``choose.py``, which finds the weights (``weights.py``) and the
recipe of each (``configs.py``, ``fqn_config.py``), and to ``changes.py``, which checks all of them before the first one
changes. Then ``convert`` of ``quantize.py`` replaces them one by one. ``qat.py`` and ``static_inputs.py`` have the
configs with two steps, ``format_plan.py`` and ``budget.py`` the result of ``mx.plan``.
"""
