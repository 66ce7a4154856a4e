"""Many small eigen-decompositions on several threads, each with a BLAS of one thread.

A BLAS that splits one small decomposition over its own threads gains little, and waits in every step for a thread that
another process has pushed off its core.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import TypeVar

from threadpoolctl import ThreadpoolController

from elsi_edge.machine import cores

T = TypeVar("T")
R = TypeVar("R")

_threads: ContextVar[int | None] = ContextVar("threads", default=None)


@contextlib.contextmanager
def threads(number: int | None) -> Iterator[None]:
    """Use so many threads within; None uses the cores that may be used."""
    token = _threads.set(number)
    try:
        yield
    finally:
        _threads.reset(token)


def count() -> int:
    """Threads that `spread` uses."""
    return _threads.get() or cores().usable


@functools.cache
def _libraries() -> ThreadpoolController:
    """The BLAS that numpy has loaded; looked for once, since that takes milliseconds and `spread` is called often."""
    return ThreadpoolController()


def spread(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """`[work(item) for item in items]`, on several threads; `work` should spend its time in numpy. Results do not
    depend on the number of threads. The first exception is raised."""
    workers = min(count(), len(items))
    with _libraries().limit(limits=1, user_api="blas"):
        if workers < 2:
            return [work(item) for item in items]
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(work, items))
