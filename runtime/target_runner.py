"""A plain-only bundle as the `TargetRunner` that distillation and calibration ask for answers and states."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from elsi_edge.artifacts import ModelShape, TargetRunner, TargetStates
from elsi_edge.bundle import Bundle, GraphRole
from elsi_edge.runtime.kv_cache import KvCache
from elsi_edge.runtime.options import GenerateOptions, SessionSettings
from elsi_edge.runtime.ort import BoundGraph, open_session
from elsi_edge.runtime.sampling import choose
from elsi_edge.runtime.target import OrtTarget
from elsi_edge.runtime.tree import Tree, attention_bias
from elsi_edge.text import TextCodec

FINAL_NORM = -1  # asks `states` for the state after the final norm (EAGLE-2's) in place of a tap


class BundleRunner:
    """Answers from the graph that will be deployed, and the states that the draft will meet there."""

    def __init__(self, bundle: Bundle, settings: SessionSettings) -> None:
        manifest = bundle.manifest
        self.fingerprint: str = manifest.target_fingerprint
        self.shape: ModelShape = manifest.shape
        self._context = manifest.context
        self._eos = TextCodec.open(bundle.directory).eos_ids
        role: GraphRole = "target-chain" if "target-chain" in manifest.graphs else "target-tree"
        self._target = OrtTarget(open_session(bundle.graph(role), settings), shape=self.shape, tap_width=0)
        self._states = open_session(bundle.graph("target-states"), settings)

    def answer(
        self, prompt_ids: Sequence[int], *, max_tokens: int, temperature: float, top_k: int, seed: int
    ) -> list[int]:
        """Plain decoding, one token a step; the end token is kept when it was reached."""
        options = GenerateOptions(temperature=temperature, top_k=top_k, max_tokens=max_tokens)
        self._target.reset()
        step = self._target.prefill(prompt_ids)
        answer = [choose(step.logits[-1], options, seed=seed, index=0)]
        limit = min(max_tokens, self._context - len(prompt_ids))
        while answer[-1] not in self._eos and len(answer) < limit:
            step = self._target.verify(answer[-1], Tree.empty())
            self._target.commit([0])
            answer.append(choose(step.logits[0], options, seed=seed, index=len(answer)))
        return answer

    def states(self, token_ids: Sequence[int], taps: Sequence[int]) -> TargetStates:
        """States [M, T, E] at `taps` (FINAL_NORM for the state after the final norm) and logits [T, V], one call."""
        count, shape = len(token_ids), self.shape
        cache = KvCache(blocks=shape.blocks, kv_heads=shape.kv_heads, head_width=shape.head_width)
        cache.reserve(count)
        graph = BoundGraph(self._states)  # fresh bindings: which taps are fetched changes from call to call
        for block in range(shape.blocks):
            for kind, buffer in zip(("key", "value"), cache.buffers[2 * block : 2 * block + 2], strict=True):
                graph.bind_in_place(f"past_key_values.{block}.{kind}", f"present.{block}.{kind}", buffer)
        rows = np.arange(count, dtype=np.int64)
        inputs: dict[str, NDArray[np.generic]] = {
            "input_ids": np.asarray(token_ids, np.int64)[None],
            "logit_rows": rows,
            "position_ids": rows[None],
            "attention_bias": attention_bias(np.tri(count, dtype=np.bool_), 0),
            "seqlens_k": np.array([count - 1], np.int32),
            "total_sequence_length": np.array(count, np.int32),
        }
        for name, value in inputs.items():
            graph.bind_input(name, value)
        logits = np.empty((1, count, shape.vocab_size), np.float32)
        graph.bind_output("logits", logits)
        states = np.empty((len(taps), 1, count, shape.width), np.float32)
        for index, tap in enumerate(taps):
            graph.bind_output("tap.final-norm" if tap == FINAL_NORM else f"tap.{tap}", states[index])
        graph.run()
        return TargetStates(states=states[:, 0], logits=logits[0])


def open_target_runner(bundle: Path, threads: int = 0) -> TargetRunner:
    """Open a plain-only bundle for answers and states. Raises BundleError when it has no states graph."""
    return BundleRunner(Bundle.load(bundle), SessionSettings(threads=threads))
