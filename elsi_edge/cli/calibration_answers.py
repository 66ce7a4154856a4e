"""The target's own answers to calibration prompts, from the exported graph; kept, so that they are made once."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from elsi_edge.artifacts import PRECISIONS, Precision
from elsi_edge.bundle import MANIFEST

if TYPE_CHECKING:
    from elsi_edge.models import SourceModel
    from elsi_edge.workdir import WorkDir

DEFAULT_TOKENS = 128
TEMPERATURES = (0.0, 0.8)  # by turns over the prompts, as distillation has them
TOP_K = 50
_ORDER: tuple[Precision, ...] = ("int4", *(p for p in PRECISIONS if p != "int4"))


def plain_bundle(place: "WorkDir") -> Path | None:
    """The work directory's plain bundle, int4 first, as distillation takes it; None where there is none."""
    return next((path for path in map(place.plain_bundle, _ORDER) if (path / MANIFEST).is_file()), None)


def answers_of(
    source: "SourceModel",
    prompt_ids: Sequence[Sequence[int]],
    *,
    bundle: Path,
    tokens: int,
    place: "WorkDir",
    threads: int,
) -> list[list[int]]:
    """At most `tokens` token ids to each prompt; repetition loops are cut where they begin.

    Answers are appended to a file in the work directory as they come, and read from it the next time. Raises
    BundleError for a bundle of another model, StorageError.
    """
    from elsi_edge.cli import common
    from elsi_edge.cli.distill import open_bundle
    from elsi_edge.draft.answers import Answer, AnswerLog, row_key
    from elsi_edge.fsio import storage_errors
    from elsi_edge.loops import loop_start

    runner, codec = open_bundle(bundle, place, threads, source.fingerprint, source.reference)
    directory = place.calibration
    with storage_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
    log = AnswerLog(directory / f"answers-{_bundle_id(bundle)}-{tokens}.jsonl")
    found = []
    with common.progress("answer", float(len(prompt_ids)), "prompts") as bar:
        for number, ids in enumerate(prompt_ids):
            temperature = TEMPERATURES[number % len(TEMPERATURES)]
            name = hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()[:16]
            answer = log.known.get(row_key(name, temperature))
            if answer is None:
                made = runner.answer(ids, max_tokens=tokens, temperature=temperature, top_k=TOP_K, seed=number)
                finish = "stop" if made and made[-1] in codec.eos_ids else "length"
                answer = Answer(id=name, temperature=temperature, finish=finish, answer_ids=tuple(made))
                log.add(answer, seed=number)
            start = loop_start(answer.answer_ids)
            found.append(list(answer.answer_ids[:start]))
            bar.advance(1)
    return found


def _bundle_id(bundle: Path) -> str:
    """Tells bundles apart by what they run: a hash of the manifest."""
    return hashlib.sha256((bundle / MANIFEST).read_bytes()).hexdigest()[:12]
