"""Contenders in processes of their own, which prepare side by side and take turns when they are timed.

Compiling a model takes a minute and one core, and a machine that others use changes its speed from minute to minute:
contenders that are measured one after the other are not measured under the same conditions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

STARTED = "started"
ENDED = "its process has ended"


def _work(pipe: Any, make: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Answer calls of methods of ``make(*args)`` until the pipe closes."""
    made: Any = None
    while True:
        try:
            method, given = pipe.recv()
        except EOFError:
            return
        try:
            if method == STARTED:
                made, answer = make(*args), None
            else:
                answer = getattr(made, method)(*given)
            pipe.send((answer, None))
        except Exception as error:  # the other contenders go on
            pipe.send((None, f"{type(error).__name__}: {error}".splitlines()[0][:200]))


class Contenders:
    """``make(name, *args)`` in one process for each name; ``failed[name]`` is the last error of a contender, which gets
    no calls until ``forgive``.

    ``make`` and ``args`` go to other processes, so ``make`` is a class or a function of a module. Contenders are made
    one after the other: a model that is quantized needs memory for both.
    """

    def __init__(self, names: Iterable[str], make: Callable[..., Any], *args: Any) -> None:
        from torch.multiprocessing import get_context

        context: Any = get_context("spawn")
        self.failed: dict[str, str] = {}
        self._pipes: dict[str, Any] = {}
        self._processes = []
        for name in names:
            self._pipes[name], other = context.Pipe()
            process = context.Process(target=_work, args=(other, make, (name, *args)), daemon=True)
            process.start()
            other.close()
            self._processes.append(process)
        self.one_by_one(STARTED)
        self._unmade = set(self.failed)

    def _ask(self, names: Iterable[str], method: str, args: tuple[Any, ...]) -> list[str]:
        """Call the method of some contenders; the names of those whose process lives."""
        asked = []
        for name in names:
            try:
                self._pipes[name].send((method, args))
                asked.append(name)
            except OSError:
                self.failed[name] = ENDED
        return asked

    def _answers(self, names: Iterable[str]) -> dict[str, Any]:
        found = {}
        for name in names:
            try:
                answer, error = self._pipes[name].recv()
            except (EOFError, OSError):
                answer, error = None, ENDED
            if error is None:
                found[name] = answer
            else:
                self.failed[name] = error
        return found

    def forgive(self) -> None:
        """Go on with all contenders that were made and whose process lives."""
        alive = {name for name, process in zip(self._pipes, self._processes, strict=True) if process.is_alive()}
        self.failed = {name: error for name, error in self.failed.items() if name in self._unmade or name not in alive}

    @property
    def running(self) -> list[str]:
        """The contenders that have not failed."""
        return [name for name in self._pipes if name not in self.failed]

    def side_by_side(self, method: str, *args: Any) -> dict[str, Any]:
        """Call the method of all contenders at once; name -> what it returned, of those that did not fail."""
        return self._answers(self._ask(self.running, method, args))

    def one(self, name: str, method: str, *args: Any) -> Any:
        """Call the method of one contender that has not failed. None if it fails now."""
        return self._answers(self._ask([name], method, args)).get(name)

    def one_by_one(self, method: str, *args: Any) -> dict[str, Any]:
        """Call the method of one contender after the other; name -> what it returned, of those that did not fail."""
        found = {name: self.one(name, method, *args) for name in self.running}
        return {name: answer for name, answer in found.items() if name not in self.failed}

    def __enter__(self) -> Contenders:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for pipe in self._pipes.values():
            pipe.close()
        for process in self._processes:
            process.join(10)
            process.kill()
