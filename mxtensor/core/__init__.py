"""What every room uses; nothing here imports another room.

Start with ``dispatch.py`` (the rule of an op), ``kernel.py`` and ``select.py`` (the kernel of a call), and
``explain.py`` (the log of these decisions). ``compat*.py`` are the only users of private torch. ``repeated.py`` has the
one mechanism by which a second call is quicker: ``recording.py`` and ``program.py`` make one generated function of it.
"""
