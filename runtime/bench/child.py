"""What runs in the fresh processes that memory is measured in: `python -m elsi_edge.runtime.bench.child JOB`.

JOB is one JSON object; results go to stdout, a JSON object a line. A process of its own, since memory that was once
taken may stay with a process that gave it back.
"""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from elsi_edge.bundle import Bundle
from elsi_edge.runtime.engines import BundleEngines
from elsi_edge.runtime.memory import footprint, peak_resident_bytes
from elsi_edge.runtime.mixed import MixedProposer
from elsi_edge.runtime.options import GenerateOptions, SessionSettings
from elsi_edge.runtime.proposal import Bounds
from elsi_edge.runtime.session import Session
from elsi_edge.runtime.static_target import StaticTarget
from elsi_edge.runtime.target import PREFILL_ROWS, OrtTarget, Target
from elsi_edge.text import TextCodec

PROMPT = "Explain in detail how a bicycle stays upright while it rolls."
_CACHED_TOKENS = 1024  # by which the caches are grown to measure them
_NODES = 7  # of the round that is run


def main() -> None:
    """Do the job that the arguments name."""
    job = json.loads(sys.argv[1])
    if job.get("data_limit"):
        resource.setrlimit(resource.RLIMIT_DATA, (job["data_limit"], job["data_limit"]))
    settings = SessionSettings(threads=job["threads"], provider=job["provider"])
    if job["do"] == "components":
        _components(Path(job["bundle"]), settings, exact=job["exact"])
    else:
        _answer(Path(job["bundle"]), settings, exact=job["exact"], tokens=job["tokens"])


def _components(bundle: Path, settings: SessionSettings, *, exact: bool) -> None:
    """Open one part after another, saying after each what the process takes."""
    _say("interpreter")
    codec = TextCodec.open(bundle)
    _say("tokenizer")
    loaded = Bundle.load(bundle)
    engines = BundleEngines(loaded, settings)
    target = engines.open_target(exact=exact)
    _say("target")
    proposer = engines.open_proposer()
    _say("draft")
    context = loaded.manifest.context
    text = codec.encode_raw(PROMPT, limit=None)
    ids = (text * (1 + (PREFILL_ROWS + _CACHED_TOKENS) // len(text)))[: min(context - _NODES - 3, 4096)]
    first = min(PREFILL_ROWS, len(ids) // 2)
    _extend(target, proposer, ids[: first + 1])
    nodes = min(_NODES, context - first - 3)
    tree = proposer.propose(Bounds(budget=nodes, depth=nodes, chain=True))
    target.verify(ids[first], tree)
    _say("activations", cache=_in_use(target), first_tokens=first)
    rest = ids[first : first + _CACHED_TOKENS + 1]
    for start in range(0, len(rest) - 1, PREFILL_ROWS):
        _extend(target, proposer, rest[start : start + PREFILL_ROWS + 1])
    _say("cache", tokens=len(rest) - 1)


def _in_use(target: OrtTarget | StaticTarget) -> int:
    """Bytes of the target's cache that were written; pages beyond are promised but not there."""
    cache = target.cache
    return cache.nbytes * cache.length // max(cache.capacity, 1)


def _extend(target: Target, proposer: MixedProposer, ids: list[int]) -> None:
    """Take all tokens but the last, which the draft needs to see beside the states."""
    step = target.prefill(ids[:-1])
    proposer.observe(ids[1:], step.taps)


def _answer(bundle: Path, settings: SessionSettings, *, exact: bool, tokens: int) -> None:
    """Open a session and answer one prompt, as `generate` does."""
    start = time.perf_counter()
    session = Session.open(bundle, settings)
    limit = max(1, min(tokens, session.context // 2))
    result = session.generate(PROMPT, GenerateOptions(max_tokens=limit, exact=exact))
    _say(
        "answer",
        tokens=len(result.token_ids),
        tokens_per_s=result.tokens_per_s,
        seconds=time.perf_counter() - start,
        peak_resident=peak_resident_bytes(),
    )


def _say(part: str, **more: Any) -> None:
    now = footprint()
    print(  # noqa: T201 - the protocol of this program
        json.dumps({"part": part, "pss": now and now.pss, "anonymous": now and now.anonymous, **more}), flush=True
    )


if __name__ == "__main__":
    main()
