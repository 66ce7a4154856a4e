"""Many answers at once: one token a step for each of B sequences, whose keys and values lie in one cache, in place.

Decoding one sequence waits for the weights; B sequences share them. A prompt is prefilled by itself into its slot of
the cache (batch 1: the matrices are no faster for several prompts together). A finished sequence gives its slot to the
last one, and the next waiting prompt is appended, so that one long answer does not idle the rest.

The attention sees one query row here, without the exact mode's extra row: at int4 and int8 tokens may part from those
of a session, as two runs of it on other kernels would.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from elsi_edge.artifacts import AnswerRequest, ModelShape
from elsi_edge.runtime.bound import BoundGraph, Scratch
from elsi_edge.runtime.kv_cache import PAGE
from elsi_edge.runtime.options import GenerateOptions
from elsi_edge.runtime.sampling import choose, is_greedy
from elsi_edge.runtime.target import PREFILL_ROWS

_STRIPES = 64  # parts of a row of logits whose maxima tell where its largest entries can be


@dataclass(kw_only=True)
class _Sequence:
    """One answer in the making."""

    request: AnswerRequest
    options: GenerateOptions
    limit: int  # tokens of the answer, the context kept
    length: int  # S, its tokens in the cache
    ids: list[int] = field(default_factory=list)  # of the answer; the last one is not in the cache yet


class BatchDecoder:
    """Answers requests with a graph of the batch form (see `elsi_edge.export.surgery`); one thread uses it."""

    def __init__(
        self, session: ort.InferenceSession, *, shape: ModelShape, eos_ids: frozenset[int], context: int
    ) -> None:
        self._shape, self._eos, self._context = shape, eos_ids, context
        # Two sets of bindings: the whole batch, and one slot of it.
        self._decode, self._prefill, self._scratch = BoundGraph(session), BoundGraph(session), Scratch()
        self._cache: list[NDArray[np.float32]] = []  # key 0, value 0, key 1, ...: [B, H, C, D]
        self._bound = 0  # sequences that the decode bindings span

    def answers(
        self, requests: Iterator[AnswerRequest], *, batch: int, stop: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[AnswerRequest, list[int]]]:
        """Yield each answer when it ends; at most `batch` are in the making. The end token is kept.

        `stop` is asked every token and before every prompt; once it is True nothing more comes.
        """
        live: list[_Sequence] = []
        more = True
        while not stop():
            while more and len(live) < batch and not stop():
                request = next(requests, None)
                more = request is not None
                if request is not None:
                    live.append(self._admit(request, len(live), live, batch))
                    if self._is_done(live[-1]):
                        done = live.pop()
                        yield done.request, done.ids
            if not live:
                return
            self._step(live, batch)
            for done in self._leave(live):
                yield done.request, done.ids

    def _admit(self, request: AnswerRequest, slot: int, live: Sequence[_Sequence], batch: int) -> _Sequence:
        """Prefill a prompt into a slot and choose its answer's first token."""
        count = len(request.prompt_ids)
        options = GenerateOptions(temperature=request.temperature, top_k=request.top_k, max_tokens=request.max_tokens)
        limit = min(request.max_tokens, self._context - count)
        self._reserve(count + 1, live, batch)
        for index, buffer in enumerate(self._cache):
            self._prefill.bind_in_place(*_names(index), buffer[slot : slot + 1])
        for start in range(0, count, PREFILL_ROWS):
            stop = min(start + PREFILL_ROWS, count)
            ids = np.array([request.prompt_ids[start:stop]], np.int64)
            rows = [stop - start - 1] if stop == count else []
            logits = self._run(self._prefill, ids, np.array([stop], np.int32), rows)
        sequence = _Sequence(request=request, options=options, limit=limit, length=count)
        sequence.ids.append(_choose(logits[0, 0], sequence))
        return sequence

    def _step(self, live: Sequence[_Sequence], batch: int) -> None:
        """One more token for every live sequence."""
        lengths = np.array([sequence.length + 1 for sequence in live], np.int32)
        self._reserve(int(lengths.max()), live, batch)
        if self._bound != len(live):
            for index, buffer in enumerate(self._cache):
                self._decode.bind_in_place(*_names(index), buffer[: len(live)])
            self._bound = len(live)
        ids = np.array([[sequence.ids[-1]] for sequence in live], np.int64)
        logits = self._run(self._decode, ids, lengths, [0])
        for sequence, row in zip(live, logits[:, 0], strict=True):
            sequence.length += 1
            sequence.ids.append(_choose(row, sequence))

    def _run(
        self, graph: BoundGraph, ids: NDArray[np.int64], totals: NDArray[np.int32], rows: list[int]
    ) -> NDArray[np.float32]:
        """One call over `ids` [B, T]; `totals` [B] are the lengths with them. Returns logits [B, R, V]."""
        logits: NDArray[np.float32] = self._scratch.array(
            "logits", (len(ids), len(rows), self._shape.vocab_size), np.float32
        )
        graph.bind_input("input_ids", ids)
        graph.bind_input("seqlens_k", totals - 1)
        graph.bind_input("total_sequence_length", np.array(totals.max(), np.int32))
        graph.bind_input("logit_rows", np.array(rows, np.int64))
        graph.bind_output("logits", logits)
        graph.run()
        return logits

    def _is_done(self, sequence: _Sequence) -> bool:
        return sequence.ids[-1] in self._eos or len(sequence.ids) >= sequence.limit

    def _leave(self, live: list[_Sequence]) -> list[_Sequence]:
        """Take out what has ended; the last sequence moves into the hole, so that live ones stay side by side."""
        done = []
        for slot in reversed(range(len(live))):
            if self._is_done(live[slot]):
                done.append(live[slot])
                last = live.pop()
                if slot < len(live):
                    live[slot] = last
                    for buffer in self._cache:
                        buffer[slot, :, : last.length] = buffer[len(live), :, : last.length]
        return done[::-1]

    def _reserve(self, tokens: int, live: Sequence[_Sequence], batch: int) -> None:
        """Room for `tokens` tokens in each of `batch` slots; what live sequences have in theirs is kept."""
        capacity = self._cache[0].shape[2] if self._cache else 0
        if tokens <= capacity and len(self._cache[0]) == batch:
            return
        shape, used = self._shape, max((sequence.length for sequence in live), default=0)
        size = (batch, shape.kv_heads, max(capacity, -(-tokens // PAGE) * PAGE), shape.head_width)
        old, self._cache, self._bound = self._cache, [], 0
        for index in range(2 * shape.blocks):
            buffer = np.zeros(size, np.float32)
            if used:
                buffer[: len(live), :, :used] = old[index][: len(live), :, :used]
            self._cache.append(buffer)


def cache_bytes(shape: ModelShape, *, batch: int, tokens: int) -> int:
    """Bytes of a cache for `batch` sequences of `tokens` tokens; growing it takes as much again for a moment."""
    return batch * -(-tokens // PAGE) * PAGE * shape.kv_bytes_per_token()


def top_candidates(logits: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Ids, ascending, that hold the `count` largest of `logits` [V] and all that tie with the last of them.

    The largest entries lie in the stripes with the largest maxima, and a maximum over stripes costs a tenth of a
    partition of the whole.
    """
    width = len(logits) // _STRIPES
    if not 0 < count < width:
        return np.arange(len(logits))
    stripes = logits[: width * _STRIPES].reshape(_STRIPES, width)  # column w: entries w, w + width, ...
    maxima = stripes.max(axis=0)
    least = np.partition(maxima, width - count)[width - count]  # at least `count` entries are as large
    columns = np.flatnonzero(maxima >= least)
    row, column = np.nonzero(stripes[:, columns] >= least)
    ids = row * width + columns[column]
    tail = np.flatnonzero(logits[width * _STRIPES :] >= least) + width * _STRIPES
    return np.sort(np.concatenate([ids, tail]))


def _choose(logits: NDArray[np.float32], sequence: _Sequence) -> int:
    """The next token, the same that `choose` takes from the whole row."""
    options = sequence.options
    if is_greedy(options):
        return int(np.argmax(logits))
    ids = top_candidates(logits, options.top_k)
    return int(ids[choose(logits[ids], options, seed=sequence.request.seed, index=len(sequence.ids))])


def _names(index: int) -> tuple[str, str]:
    name = f"{index // 2}.{'value' if index % 2 else 'key'}"
    return f"past_key_values.{name}", f"present.{name}"
