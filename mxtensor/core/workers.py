"""Many tensors, each by one thread: faster than each by all threads, which wait for each other at every operation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(
    work: Callable[[Item], Result], items: Sequence[Item], workers: int | None = None
) -> Generator[tuple[Item, Result], None, None]:
    """(item, work(item)) in the order of ``items``.

    ``workers``: threads; None: torch's number of threads. Each computes with one thread, and at most one more item
    than threads is in work or waits to be fetched. Raises what ``work`` raises; nothing is in work afterwards.
    """
    threads = torch.get_num_threads()
    count = workers or threads
    if count == 1:
        yield from ((item, work(item)) for item in items)
        return
    running: deque[tuple[Item, Future[Result]]] = deque()
    pool = ThreadPoolExecutor(count, "mxtensor-worker", initializer=torch.set_num_threads, initargs=(1,))
    try:
        for item in items:
            running.append((item, pool.submit(copy_context().run, work, item)))
            if len(running) > count:
                done, future = running.popleft()
                yield done, future.result()
                del future
        while running:
            done, future = running.popleft()
            yield done, future.result()
            del future
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(threads)  # a worker's number is that of threads that start later, too
