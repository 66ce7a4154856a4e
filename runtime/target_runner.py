"""A plain-only bundle as the `BatchTargetRunner` that distillation and calibration ask for answers and states.

Threads. `answer` and `states` give one call all the threads. `answer_batch` and `record` run on the calling thread
alone, in sessions without a pool, and are called from `workers` threads at once: calls side by side need two thirds of
the processor time of one call on as many threads, and share one set of packed weights.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from elsi_edge.artifacts import (
    FINAL_NORM,
    AnswerRequest,
    BatchTargetRunner,
    ModelShape,
    TargetRecord,
    TargetStates,
)
from elsi_edge.bundle import NATIVE_PRODUCTS, Bundle, GraphRole
from elsi_edge.errors import BundleError
from elsi_edge.machine import cores
from elsi_edge.runtime import native_ops
from elsi_edge.runtime.batch import BatchDecoder, cache_bytes, top_candidates
from elsi_edge.runtime.bound import BoundGraph
from elsi_edge.runtime.kv_cache import KvCache
from elsi_edge.runtime.options import GenerateOptions, SessionSettings
from elsi_edge.runtime.ort import open_session
from elsi_edge.runtime.sampling import choose
from elsi_edge.runtime.target import OrtTarget
from elsi_edge.runtime.tree import Tree, attention_bias, bias_window
from elsi_edge.text import TextCodec

_CHUNK = 8  # rows of logits that are ranked at a time: they stay in the cache of a core


class BundleRunner:
    """Answers from the graph that will be deployed, and the states that the draft will meet there."""

    def __init__(self, bundle: Bundle, settings: SessionSettings) -> None:
        manifest = bundle.manifest
        self.fingerprint: str = manifest.target_fingerprint
        self.shape: ModelShape = manifest.shape
        self.workers = settings.threads or cores().usable
        self.arithmetic = f"onnx-{manifest.precision}"
        self._bundle, self._settings = bundle, settings
        self._context = manifest.context
        self._eos = TextCodec.open(bundle.directory).eos_ids
        self._exact_role: GraphRole = "target-chain" if "target-chain" in manifest.graphs else "target-tree"
        self._sessions: dict[tuple[GraphRole, bool], ort.InferenceSession] = {}
        self._opening = threading.Lock()
        self._target: OrtTarget | None = None
        bundle.graph("target-states")  # raises for a complete bundle, before any work

    def answer(
        self, prompt_ids: Sequence[int], *, max_tokens: int, temperature: float, top_k: int, seed: int
    ) -> list[int]:
        """Plain decoding, one token a step, in the exact mode; the end token is kept when it was reached."""
        if self._target is None:
            self._target = self._exact_target(alone=False)
        request = AnswerRequest(
            key="",
            prompt_ids=tuple(prompt_ids),
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
        )
        return self._answer(self._target, request)

    def answer_batch(
        self, requests: Iterator[AnswerRequest], *, batch: int, stop: Callable[[], bool]
    ) -> Iterator[tuple[AnswerRequest, list[int]]]:
        """Answers as they end, until `stop` says so.

        A batch of 1 decodes in the exact mode; more need the bundle's target-batch graph. Raises BundleError.
        """
        if batch == 1:
            target = self._exact_target(alone=True)
            for request in requests:
                answer = self._answer(target, request, stop)
                if stop():
                    return
                yield request, answer
            return
        decoder = BatchDecoder(
            self._session("target-batch", alone=True), shape=self.shape, eos_ids=self._eos, context=self._context
        )
        yield from decoder.answers(requests, batch=batch, stop=stop)

    def states(self, token_ids: Sequence[int], taps: Sequence[int]) -> TargetStates:
        """States [M, T, E] at `taps` (FINAL_NORM for the state after the final norm) and logits [T, V], one call."""
        return self._teacher_forced(self._session("target-states", alone=False), token_ids, taps, 0)

    def record(
        self, token_ids: Sequence[int], taps: Sequence[int], *, prompt_tokens: int, keep_top: int
    ) -> TargetRecord:
        """States [M, T, E] as `states` has them, and of the answer's logits the `keep_top` largest of each row."""
        result = self._teacher_forced(
            self._session("target-states", alone=True), token_ids, taps, prompt_tokens - 1, len(token_ids) - 1
        )
        ids, top, log_sum_exp = rank_rows(result.logits, keep_top)
        return TargetRecord(states=result.states, top_ids=ids, top_logits=top, log_sum_exp=log_sum_exp)

    def memory_needed(self, *, batch: int, tokens: int) -> int:
        """Bytes of caches and logits beside the weights, from above."""
        rows = batch + self.workers * tokens
        return cache_bytes(self.shape, batch=batch + self.workers, tokens=tokens) + rows * self.shape.vocab_size * 4

    def _exact_target(self, *, alone: bool) -> OrtTarget:
        return OrtTarget(self._session(self._exact_role, alone=alone), shape=self.shape, tap_width=0)

    def _answer(self, target: OrtTarget, request: AnswerRequest, stop: Callable[[], bool] = lambda: False) -> list[int]:
        options = GenerateOptions(temperature=request.temperature, top_k=request.top_k, max_tokens=request.max_tokens)
        target.keep(0)
        step = target.prefill(request.prompt_ids)
        answer = [choose(step.logits[-1], options, seed=request.seed, index=0)]
        limit = min(request.max_tokens, self._context - len(request.prompt_ids))
        while answer[-1] not in self._eos and len(answer) < limit and not stop():
            step = target.verify(answer[-1], Tree.empty())
            target.commit([0])
            answer.append(choose(step.logits[0], options, seed=request.seed, index=len(answer)))
        return answer

    def _session(self, role: GraphRole, *, alone: bool) -> ort.InferenceSession:
        """A graph's session, opened when first asked for; `alone` runs each call on the thread that makes it."""
        with self._opening:
            if (role, alone) not in self._sessions:
                if role not in self._bundle.manifest.graphs:
                    raise BundleError(
                        f"bundle {self._bundle.directory} has no {role} graph: it was made before answers came in "
                        "batches; export it again with --plain-only --force, or give --batch 1"
                    )
                settings = replace(self._settings, threads=1) if alone else self._settings
                self._sessions[role, alone] = self._open(role, settings)
            return self._sessions[role, alone]

    def _open(self, role: GraphRole, settings: SessionSettings) -> ort.InferenceSession:
        """The graph with the native products where they run here, else as it is."""
        native = NATIVE_PRODUCTS.get(role)
        if native is not None and native_ops.path_for(self._bundle.manifest.graphs, settings, role=native):
            return native_ops.open_native(self._bundle.graph(native), settings)
        return open_session(self._bundle.graph(role), settings)

    def _teacher_forced(
        self,
        session: ort.InferenceSession,
        token_ids: Sequence[int],
        taps: Sequence[int],
        start: int,
        stop: int | None = None,
    ) -> TargetStates:
        """One call over a whole sequence; logits of the rows `start:stop` alone."""
        count, shape = len(token_ids), self.shape
        cache = KvCache(blocks=shape.blocks, kv_heads=shape.kv_heads, head_width=shape.head_width)
        cache.reserve(count)
        graph = BoundGraph(session)  # fresh bindings: which taps are fetched changes from call to call
        graph.reserve(cache, count)
        places = np.arange(count, dtype=np.int64)
        rows = places[start:stop].copy()
        inputs: dict[str, NDArray[np.generic]] = {
            "input_ids": np.asarray(token_ids, np.int64)[None],
            "logit_rows": rows,
            "position_ids": places[None],
            "seqlens_k": np.array([count - 1], np.int32),
            "total_sequence_length": np.array(count, np.int32),
        }
        for name in graph.inputs:
            if (window := bias_window(name)) is not None:
                inputs[name] = attention_bias(np.tri(count, dtype=np.bool_), 0, window=window, depths=places)
        for name, value in inputs.items():
            graph.bind_input(name, value)
        logits = np.empty((1, len(rows), shape.vocab_size), np.float32)
        graph.bind_output("logits", logits)
        states = np.empty((len(taps), 1, count, shape.width), np.float32)
        for index, tap in enumerate(taps):
            graph.bind_output("tap.final-norm" if tap == FINAL_NORM else f"tap.{tap}", states[index])
        graph.run()
        return TargetStates(states=states[:, 0], logits=logits[0])


def rank_rows(
    logits: NDArray[np.float32], count: int
) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]:
    """Of logits [A, V]: the ids and values [A, k] of the `count` largest, largest first, and the log-sum-exp [A]."""
    rows, width = logits.shape
    count = min(count, width)
    ids = np.empty((rows, count), np.int32)
    top = np.empty((rows, count), np.float32)
    log_sum_exp = np.empty(rows, np.float32)
    scratch = np.empty((min(_CHUNK, rows), width), np.float32)
    for start in range(0, rows, _CHUNK):
        block = logits[start : start + _CHUNK]
        for row, values in enumerate(block, start=start):
            candidates = top_candidates(values, count)
            order = np.argsort(-values[candidates], kind="stable")[:count]
            ids[row] = candidates[order]
            top[row] = values[ids[row]]
        largest = top[start : start + _CHUNK, :1]
        shifted = scratch[: len(block)]
        np.subtract(block, largest, out=shifted)
        np.exp(shifted, out=shifted)
        log_sum_exp[start : start + _CHUNK] = largest[:, 0] + np.log(shifted.sum(axis=1))
    return ids, top, log_sum_exp


def open_target_runner(bundle: Path, threads: int = 0) -> BatchTargetRunner:
    """Open a plain-only bundle for answers and states. Raises BundleError when it has no states graph."""
    return BundleRunner(Bundle.load(bundle), SessionSettings(threads=threads))
