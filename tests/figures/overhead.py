"""Where a round's time goes outside the ONNX Runtime calls, by part, at a fixed number of rows.

    python -m tests.figures.overhead BUNDLE... --prompts FILE --out FILE [--limit 8] [--tokens 96] [--rows 4]
        [--native 1]

Every part is timed exclusive of the parts inside it, over greedy answers with the draft and n-grams at a budget of
rows - 1 nodes; with --native 0 on ONNX Runtime's own kernels. Rounds that verified another number of rows do not count.
Means over the middle 80 % of rounds, ms.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

from elsi_edge.runtime import decode, sampling, target
from elsi_edge.runtime import draft as draft_module
from elsi_edge.runtime.bound import BoundGraph
from elsi_edge.runtime.mixed import MixedProposer
from elsi_edge.runtime.options import GenerateOptions, SessionSettings
from elsi_edge.runtime.session import Session, _Run
from elsi_edge.runtime.target import OrtTarget
from tests.figures.common import arguments, prompts, save


class Parts:
    """Exclusive time by part: a part's clock stands while another inside it runs."""

    def __init__(self) -> None:
        self.now: dict[str, float] = defaultdict(float)  # of this round, seconds
        self.rounds: list[dict[str, float]] = []
        self._stack: list[str] = []
        self._since = time.perf_counter()

    def _charge(self) -> None:
        now = time.perf_counter()
        self.now[self._stack[-1] if self._stack else "loop and text"] += now - self._since
        self._since = now

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Time a function or method wherever it is called from."""
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*given: Any, **named: Any) -> Any:
            self._charge()
            self._stack.append(part)
            try:
                return inner(*given, **named)
            finally:
                self._charge()
                self._stack.pop()

        setattr(owner, name, timed)

    def round_done(self, *, counts: bool) -> None:
        """Keep this round, or leave it out."""
        self._charge()
        if counts:
            self.rounds.append(dict(self.now))
        self.now.clear()

    def table(self) -> dict[str, float]:
        """Mean of each part over the middle of the rounds, ms, and what is outside ONNX Runtime as a share."""
        names = {name for one in self.rounds for name in one}
        middle = sorted(self.rounds, key=lambda one: sum(one.values()))
        middle = middle[len(middle) // 10 : len(middle) - len(middle) // 10 or None]
        means = {name: 1e3 * sum(one.get(name, 0.0) for one in middle) / len(middle) for name in sorted(names)}
        outside = [sum(v for k, v in one.items() if not k.startswith("ort")) / sum(one.values()) for one in middle]
        return {**means, "share_outside_ort": median(outside), "rounds": len(self.rounds)}


def instrument(parts: Parts) -> None:
    """Put clocks around the parts of a round."""
    parts.wrap(MixedProposer, "propose", "proposal")
    parts.wrap(MixedProposer, "observe", "commit")
    parts.wrap(OrtTarget, "commit", "commit")
    parts.wrap(OrtTarget, "run", "binding")
    parts.wrap(draft_module.OrtDraft, "_run", "draft binding")
    parts.wrap(draft_module.OrtDraft, "_project", "draft binding")
    parts.wrap(target, "attention_bias", "mask")
    parts.wrap(draft_module, "attention_bias", "mask")
    parts.wrap(draft_module, "log_softmax", "draft softmax")
    parts.wrap(sampling.Chooser, "__call__", "sampling")
    parts.wrap(decode, "walk", "walk")
    parts.wrap(BoundGraph, "run", "ort")


def main() -> None:
    """Measure every bundle named."""
    options = arguments(__doc__ or "", limit=8, tokens=96, rows=4, native=1)
    figures: dict[str, Any] = {"rows": options.rows, "native": options.native}
    parts = Parts()
    instrument(parts)
    take = _Run.take

    def counted(run: _Run, one: decode.Round) -> tuple[str, int]:
        result = take(run, one)
        parts.round_done(counts=one.drafted == options.rows - 1)
        return result

    _Run.take = counted  # type: ignore[method-assign,assignment]
    for path in options.bundles:
        opened = Session.open(path, SessionSettings(native=options.native != 0))
        generate = GenerateOptions(draft_nodes=options.rows - 1, max_tokens=options.tokens)
        rows = prompts(options, options.limit)
        opened.generate(rows[0].turns[0], replace(generate, max_tokens=16))
        parts.rounds.clear()
        for row in rows:
            opened.generate(row.turns[0], generate)
        figures[opened.precision] = parts.table()
    save(options.out, figures)


if __name__ == "__main__":
    main()
