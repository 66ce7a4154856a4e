"""Answers and records from several threads at once, handed over in the order of the jobs.

A worker answers its share of the prompts in a batch and records each answer when it ends, so generating and recording
overlap; the cores stay busy because each worker's calls run on its own thread. Whatever order answers end in, outcomes
come in the order of their jobs: shards do not depend on the number of workers, and a resumed run continues where the
interrupted one stood.
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Generic, Protocol, TypeVar, cast

import numpy as np
import torch

from elsi_edge.artifacts import AnswerRequest, BatchTargetRunner, TargetRecord, TargetRunner
from elsi_edge.errors import DataError

T = TypeVar("T")
Outcome = TypeVar("Outcome")
Made = TypeVar("Made", covariant=True)

_HELD = 2  # outcomes kept for each answer in the making until an earlier one is there


class Work(Protocol[Made]):
    """What workers do with one answer; called from several threads."""

    def answered(self, index: int, answer_ids: list[int]) -> Made:
        """Keep the answer to job `index` and make its row."""
        ...

    def known(self, index: int) -> Made:
        """Make the row of job `index`, whose answer is there already."""
        ...


class Shared(Generic[T]):
    """An iterator that several threads draw from."""

    def __init__(self, items: Iterator[T]) -> None:
        self._items, self._lock = items, threading.Lock()

    def __iter__(self) -> "Shared[T]":
        return self

    def __next__(self) -> T:
        with self._lock:
            return next(self._items)


class Sequential:
    """A plain `TargetRunner` as one that answers a batch: one prompt after another, on one thread."""

    workers = 1

    def __init__(self, runner: TargetRunner) -> None:
        self._runner = runner
        self.fingerprint, self.shape = runner.fingerprint, runner.shape
        self.arithmetic = ""
        self.answer, self.states = runner.answer, runner.states

    def answer_batch(
        self, requests: Iterator[AnswerRequest], *, batch: int, stop: Callable[[], bool]
    ) -> Iterator[tuple[AnswerRequest, list[int]]]:
        """Answers in the order of the requests; `stop` is asked between them."""
        for request in requests:
            if stop():
                return
            ids = self._runner.answer(
                request.prompt_ids,
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                top_k=request.top_k,
                seed=request.seed,
            )
            yield request, list(map(int, ids))

    def record(
        self, token_ids: Sequence[int], taps: Sequence[int], *, prompt_tokens: int, keep_top: int
    ) -> TargetRecord:
        """From whole states and logits."""
        result = self._runner.states(token_ids, taps)
        # The row of logits before an answer token is what predicts it. shape: [A, V]
        logits = torch.from_numpy(np.ascontiguousarray(result.logits[prompt_tokens - 1 : -1]))
        top, ids = torch.topk(logits, min(keep_top, logits.shape[1]), dim=-1)
        return TargetRecord(
            states=result.states,
            top_ids=ids.to(torch.int32).numpy(),
            top_logits=top.numpy(),
            log_sum_exp=torch.logsumexp(logits, dim=-1).numpy(),
        )

    def memory_needed(self, *, batch: int, tokens: int) -> int:
        """Not known."""
        return 0


def as_batch_runner(runner: TargetRunner) -> BatchTargetRunner:
    """The runner itself where it answers in batches, else `Sequential` around it."""
    return cast(BatchTargetRunner, runner) if hasattr(runner, "answer_batch") else Sequential(runner)


def outcomes(
    runner: BatchTargetRunner,
    work: Work[Outcome],
    known: Sequence[int],
    requests: Mapping[int, AnswerRequest],
    *,
    batch: int,
) -> Generator[Outcome, None, None]:
    """Outcomes of the jobs `known` and then of `requests` (by index), ascending, each once.

    With one worker all runs on the calling thread. An error of a worker is raised here once the others have stopped.
    Close the iterator to stop the workers. An answer that takes very long is overtaken: at most `_HELD` outcomes for
    each answer in the making wait for it.
    """
    share = -(-min(batch, max(len(requests), 1)) // runner.workers)
    if batch > 1:
        share = max(share, 2)  # a batch of 1 is another way of decoding
    queues = (Shared(iter(sorted(known))), Shared(iter(sorted(requests))))
    stop = threading.Event()

    def make() -> Generator[tuple[int, Outcome], None, None]:
        return _made(runner, work, queues, requests, share, stop)

    arriving = make() if runner.workers == 1 else _Threads(make, runner.workers, stop).items()
    with contextlib.closing(arriving):
        yield from _in_order(arriving, [*sorted(known), *sorted(requests)], _HELD * batch)


def _in_order(arriving: Iterator[tuple[int, Outcome]], order: Sequence[int], most: int) -> Iterator[Outcome]:
    """What arrives, in `order`; the first of more than `most` outcomes that wait for an earlier one goes ahead."""
    rank = {index: place for place, index in enumerate(order)}
    waiting: dict[int, Outcome] = {}  # by rank
    ahead: set[int] = set()
    place = 0
    for index, outcome in arriving:
        waiting[rank[index]] = outcome
        while place in waiting or place in ahead:
            if place in waiting:
                yield waiting.pop(place)
            ahead.discard(place)
            place += 1
        if len(waiting) > most:
            ahead.add(first := min(waiting))
            yield waiting.pop(first)
    if place < len(order):
        missing = len(order) - place - len(ahead) - len(waiting)
        raise DataError(f"the target left {missing} of {len(order)} prompts without an answer; run again to continue")


def _made(
    runner: BatchTargetRunner,
    work: Work[Outcome],
    queues: tuple[Shared[int], Shared[int]],
    requests: Mapping[int, AnswerRequest],
    batch: int,
    stop: threading.Event,
) -> Generator[tuple[int, Outcome], None, None]:
    """One worker: what is answered already first, then what is not, drawn from what all workers share."""
    indices: dict[str, int] = {}

    def drawn() -> Iterator[AnswerRequest]:
        for index in queues[1]:
            if stop.is_set():
                return
            indices[requests[index].key] = index
            yield requests[index]

    for index in queues[0]:
        if stop.is_set():
            return
        yield index, work.known(index)
    for request, ids in runner.answer_batch(drawn(), batch=batch, stop=stop.is_set):
        index = indices.pop(request.key)
        yield index, work.answered(index, ids)


class _Threads(Generic[T]):
    """Items that several threads make, as they come; the first error is raised when all have stopped."""

    def __init__(self, make: Callable[[], Iterator[T]], count: int, stop: threading.Event) -> None:
        self._make, self._stop = make, stop
        self._ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(maxsize=4 * count)
        self._left = threading.Event()  # nobody takes any more
        self._threads = [
            threading.Thread(target=self._run, name=f"distill-{number}", daemon=True) for number in range(count)
        ]

    def items(self) -> Generator[T, None, None]:
        """Start the threads and give what they make; closing it stops them."""
        failure: BaseException | None = None
        running = len(self._threads)
        try:
            for thread in self._threads:
                thread.start()
            while running:
                item, error = self._ready.get()
                if item is None:
                    running -= 1
                    failure = failure or error
                elif failure is None:
                    yield item
        finally:
            self._stop.set()
            self._left.set()
            for thread in self._threads:
                if thread.ident is not None:
                    thread.join()
        if failure is not None:
            raise failure

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            for item in self._make():
                self._put(item, None)
        except BaseException as caught:  # raised in the thread that asked
            self._stop.set()
            error = caught
        self._put(None, error)

    def _put(self, item: T | None, error: BaseException | None) -> None:
        while not self._left.is_set():
            with contextlib.suppress(queue.Full):
                self._ready.put((item, error), timeout=0.1)
                return
