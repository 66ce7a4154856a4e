"""Other runtimes on the same prompts in the same run, answer by answer: each in a child that waits for requests."""

import contextlib
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Self

import numpy as np

from elsi_edge.errors import MissingExtraError, ProviderError, UsageError
from elsi_edge.runtime.bench.answers import BenchAnswer, decode_seconds, end_to_end_seconds
from elsi_edge.runtime.bench.intervals import interval_of_median
from elsi_edge.runtime.bench.memory import last_line
from elsi_edge.runtime.bench.perplexity import Scores, agreement, joined, perplexity_of

# Names that users give, the module behind each; NAME+spec is a runtime's own speculative mode.
PEERS: Mapping[str, str] = {
    "llama.cpp": "xllamacpp",
    "llama.cpp+spec": "xllamacpp",
    "onnxruntime-genai": "onnxruntime_genai",
    "openvino-genai": "openvino_genai",
    "openvino-genai+spec": "openvino_genai",
}
_WARM_UP_TOKENS, _WARM_UPS = 16, 2


@dataclass(frozen=True, kw_only=True)
class PeerAnswer:
    """What another runtime gave to a prompt."""

    tokens: int
    text: str
    first_ms: float  # to the first token
    decode_s: float  # after it


def require_peers(names: Sequence[str]) -> None:
    """Raise UsageError for a name that is none, MissingExtraError for one that is not installed."""
    for name in names:
        if name not in PEERS:
            raise UsageError(f"--against {name!r} is no runtime known here; there are {', '.join(PEERS)}")
        if importlib.util.find_spec(PEERS[name]) is None:
            raise MissingExtraError(f"a bench against {name}", extra="peers", module=PEERS[name])


class Peer:
    """One runtime, open in a child."""

    def __init__(self, name: str, model: str, *, threads: int, context: int) -> None:
        self.name, self.model = name, model
        command = [sys.executable, "-m", "elsi_edge.runtime.bench.peer_child", name, model, str(threads), str(context)]
        self._said: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True
        )
        ready = self._read()
        self.version, self.flags = str(ready["version"]), str(ready["flags"])
        self.answers: dict[int, PeerAnswer] = {}  # by place in the run
        self.scores: Scores | str | None = None  # or why they could not be had; None where nobody asked

    def answer(self, ids: Sequence[int], max_tokens: int) -> PeerAnswer:
        """Greedy; raises ProviderError with the child's last words when it dies."""
        return PeerAnswer(**self._ask({"ids": list(ids), "max_tokens": max_tokens}))

    def score(self, windows: Sequence[Sequence[int]], *, advance: Callable[[], None] = lambda: None) -> Scores | str:
        """How likely it finds tokens 2..n of each window, of the weights that it answers with; or why that fails."""
        parts = []
        for ids in windows:
            try:
                found = self._ask({"score": list(ids)})
            except ProviderError as error:
                return str(error)
            if "not_measured" in found:
                return str(found["not_measured"])
            losses, likeliest = np.array(found["losses"], np.float64), np.array(found["likeliest"], np.int64)
            if not losses.shape == likeliest.shape == (len(ids) - 1,) or not np.isfinite(losses).all():
                return f"it gave {losses.size} losses for {len(ids) - 1} tokens, or some that are no numbers"
            parts.append(Scores(losses=losses, likeliest=likeliest))
            advance()
        return joined(parts)

    def warm_up(self, ids: Sequence[int]) -> None:
        """As our own arms are: short answers until caches and pools are there."""
        for _ in range(_WARM_UPS):
            self.answer(ids, _WARM_UP_TOKENS)

    def close(self) -> None:
        """End the child."""
        with contextlib.suppress(OSError):
            if self._child.stdin is not None:
                self._child.stdin.close()
        try:
            self._child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        if self._child.stdout is not None:
            self._child.stdout.close()
        self._said.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(json.dumps(request) + "\n")
            self._child.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            self._child.wait()
            self._said.seek(0)
            said = last_line(self._said.read())
            raise ProviderError(f"{self.name} ended with exit code {self._child.returncode}: {said}")
        value: dict[str, Any] = json.loads(line)
        return value


def peer_report(peer: Peer, answers: Sequence[BenchAnswer], own: Scores | None = None) -> dict[str, Any]:
    """How it fared beside our speculative arm, over the answers that both gave. JSON-ready.

    `own` are our scores on the windows of the peer's, where perplexity was asked for.
    """
    both = [(answers[place], other) for place, other in sorted(peer.answers.items()) if place < len(answers)]
    ratios, whole, same = [], [], 0
    for ours, other in both:
        run = ours.speculative
        if other.tokens > 1 and len(run.token_ids) > 1 and other.decode_s > 0.0:
            ratios.append((len(run.token_ids) - 1) / decode_seconds(run) / ((other.tokens - 1) / other.decode_s))
        theirs = other.tokens / (other.first_ms / 1e3 + other.decode_s)
        whole.append(len(run.token_ids) / end_to_end_seconds(run) / theirs)
        same += other.text.strip() == run.text.strip()
    tokens = sum(other.tokens - 1 for _, other in both)
    seconds = sum(other.decode_s for _, other in both)
    return {
        "name": peer.name,
        "version": peer.version,
        "flags": peer.flags,
        "model": peer.model,
        "warm_up": f"{_WARM_UPS} answers of {_WARM_UP_TOKENS} tokens",
        "answers": len(both),
        "tokens": sum(other.tokens for _, other in both),
        "tokens_per_s": tokens / seconds if seconds else None,
        "time_to_first_token_ms": statistics.median(other.first_ms for _, other in both) if both else None,
        "ours_over_it": statistics.median(ratios) if ratios else None,
        "interval": interval_of_median(ratios),
        "end_to_end": statistics.median(whole) if whole else None,
        "same_text": same,
        "perplexity": score_report(peer.scores, own),
    }


def score_report(scores: Scores | str | None, reference: Scores | None) -> dict[str, Any] | None:
    """Perplexity and agreement with the reference's likeliest tokens, or why there is none. JSON-ready."""
    if scores is None:
        return None
    if isinstance(scores, str):
        return {"perplexity": None, "top1_agreement": None, "not_measured": scores}
    share = None if reference is None else agreement(scores, reference)
    return {"perplexity": perplexity_of(scores), "top1_agreement": share, "not_measured": None}
