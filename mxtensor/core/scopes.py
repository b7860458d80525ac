"""Scopes: the value of the innermost open block of a context manager, whatever the order in which blocks are left.

    STRICT = Scopes[bool]("strict", False)
    scope = STRICT.enter(True)
    ...
    STRICT.leave(scope)

A generator that is suspended inside a block leaves it when it is closed: before blocks that were entered later, in
another thread or in another asyncio task. The tokens of a ContextVar cannot serve such a block: resetting one restores
the value of a block that is over, or raises "was created in a different Context". Here a block that is left is marked
as closed, and readers skip it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Scope(Generic[Value]):
    """One block: its value, the thread that entered it, and the block around it."""

    __slots__ = ("before", "open", "thread", "value")

    def __init__(self, value: Value, before: Scope[Value] | None, thread: int) -> None:
        self.value, self.before, self.thread = value, before, thread
        self.open = True


def _first_open(scope: Scope[Value] | None) -> Scope[Value] | None:
    while scope is not None and not scope.open:
        scope = scope.before
    return scope


class Scopes(Generic[Value]):
    """The blocks of one kind of context manager; each thread and each asyncio task has its own.

    ``default``: the value outside of all blocks. ``name``: a part of the name of the ContextVar.
    """

    def __init__(self, name: str, default: Value) -> None:
        self.default = default
        self._innermost: ContextVar[Scope[Value] | None] = ContextVar(f"mxtensor_{name}", default=None)
        self.latest = self._innermost.get
        """The scope that was entered last, which may be closed; None if none is open. For callers that are in a hurry:
        one call of C."""

    def innermost(self) -> Scope[Value] | None:
        """The innermost open scope; None outside."""
        scope = self._innermost.get()
        if scope is None or scope.open:
            return scope
        scope = _first_open(scope)
        self._innermost.set(scope)  # it was left in another context: no closed scope is referenced for long
        return scope

    def get(self) -> Value:
        """The value of the innermost open scope; ``default`` outside."""
        scope = self._innermost.get()
        if scope is None:
            return self.default
        if not scope.open:
            scope = self.innermost()
        return self.default if scope is None else scope.value

    def values(self) -> Iterator[Value]:
        """The values of the open scopes, from the innermost."""
        scope = self.innermost()
        while scope is not None:
            yield scope.value
            scope = _first_open(scope.before)

    def enter(self, value: Value) -> Scope[Value]:
        """Open a scope."""
        scope = Scope(value, self.innermost(), threading.get_ident())
        self._innermost.set(scope)
        return scope

    def leave(self, scope: Scope[Value]) -> None:
        """Close ``scope``, in any order, from any thread and task."""
        scope.open = False
        outer = self.innermost()
        while outer is not None:  # closed scopes between open ones go too: two generators may alternate forever
            outer.before = _first_open(outer.before)
            outer = outer.before

    def leave_one_of(self, entered: list[Scope[Value]]) -> Scope[Value]:
        """Close the scope that the object is leaving which has ``entered`` these, and drop it from the list.

        One object may be entered by several threads, tasks and generators: it is the innermost scope here if that is
        one of them, else one that this thread entered, else the latest.
        """
        scope = self.innermost()
        if scope is None or scope not in entered:
            mine = [other for other in entered if other.thread == threading.get_ident()]
            scope = (mine or entered)[-1]
        entered.remove(scope)
        self.leave(scope)
        return scope

    @contextmanager
    def block(self, value: Value) -> Iterator[Value]:
        """A scope around a ``with`` block."""
        scope = self.enter(value)
        try:
            yield value
        finally:
            self.leave(scope)
