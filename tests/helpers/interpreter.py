"""Triton's interpreter without work that it repeats: the tests of kernels spend most of their time in it.

For each call of a function by another, the interpreter looks through all of ``triton.language`` for what it has to
replace, and finds it replaced: by the kernel, or by the first call of this launch. Types are made anew for each value.
"""

import dataclasses
import functools
import inspect
from contextlib import nullcontext


def hurry(check_overflow):
    """Let the interpreter of this process patch ``triton.language`` once a launch for each module that it is seen by,
    and make each type once. ``check_overflow``: compute sums and products of int32 in int64 too, and compare."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched = set()

    @functools.cache
    def languages(fn):
        return frozenset(v.__name__ for v in fn.__globals__.values() if inspect.ismodule(v) and v in (tl, tl.core))

    def patch_once(fn):
        if languages(fn) in patched:
            return nullcontext()
        patched.add(languages(fn))
        return patch(fn)

    def launch_alone(self, *args, **kwargs):
        patched.clear()
        return launch(self, *args, **kwargs)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_alone
    interpreter._get_np_dtype = _of_elements(interpreter._get_np_dtype, tl.block_type, tl.pointer_type)
    interpreter.interpreter_builder.options = dataclasses.replace(
        interpreter.interpreter_builder.options, sanitize_overflow=check_overflow
    )
    _make_types_once(tl.core)


def _of_elements(np_dtype, block_type, pointer_type):
    """``np_dtype`` that looks each type of elements up once."""
    once = functools.cache(np_dtype)

    def of_type(t):
        element = t.element_ty if isinstance(t, block_type) else t
        return np_dtype(element) if isinstance(element, pointer_type) else once(element)

    return of_type


def _make_types_once(core):
    """Types of blocks with the same element and shape share what they are made of, and so do tensors of one type."""
    make_type, make_tensor, known = core.block_type.__init__, core.tensor.__init__, {}

    def init_type(self, element_ty, shape):
        if type(element_ty) is not core.dtype:  # pointers differ in more than their names
            make_type(self, element_ty, shape)
            return
        key = element_ty.name, *(getattr(n, "value", n) for n in shape)
        if key not in known:
            make_type(self, element_ty, shape)
            make_tensor(first := object.__new__(core.tensor), None, self)
            known[key] = vars(self) | {"of_tensors": (first.numel, first.shape)}
        vars(self).update(known[key])

    def init_tensor(self, handle, type):
        facts = vars(type).get("of_tensors")
        if facts is None:
            make_tensor(self, handle, type)
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = facts

    core.block_type.__init__, core.tensor.__init__ = init_type, init_tensor
