"""The probe's second pass: regressions solved from the first pass's sums, scored on the prompts that were held out."""

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from elsi_edge.calibration import probe
from elsi_edge.calibration.measure import Measured
from elsi_edge.calibration.rendering import Rendered
from elsi_edge.calibration.settings import CalibrationSettings, Progress
from elsi_edge.calibration.sums import Plan
from elsi_edge.calibration.verdict import probe_text

if TYPE_CHECKING:
    from elsi_edge.calibration.capture import Opened

MOST_ROWS = 8192  # held-out positions scored
_LEAST_ROWS = 50  # under which nothing is said


def check(
    target: "Opened",
    rendered: Rendered,
    plan: Plan,
    measured: Measured,
    sets: Mapping[str, tuple[int, ...]],
    settings: CalibrationSettings,
    progress: Progress,
    stop: threading.Event,
) -> dict[str, Any]:
    """Agreement of every tap, the state after the final norm and the named sets; where too little was held out only
    "text", which says so, and the counts.

    Sets that the first pass did not fit are fitted in a further pass over the fitted prompts, the chosen one alone.
    """
    statistics = measured.sums.probe
    used = set(measured.used)
    scored, rows = _scored(rendered, [i for i in measured.used if i in plan.held_out])
    if statistics is None:
        return {}
    if min(rows, statistics.count) < _LEAST_ROWS:
        few = f"{rows} held-out positions" if rows < _LEAST_ROWS else f"{statistics.count} positions to fit on"
        text = f"Probe: not scored: {few}, {_LEAST_ROWS} needed; give more prompts."
        return {"fit_rows": statistics.count, "rows": rows, "text": text}
    taps = plan.blocks + 1
    chosen = sets["chosen"]
    solved: list[probe.Members] = [(), *((t,) for t in range(taps + 1))]
    solved += [s for s in {*sets.values()} if len(s) > 1 and statistics.covers(s)]
    weights = {members: statistics.solve(members) for members in solved}
    if chosen not in weights:
        fitted = [i for i in measured.used if i in used - plan.held_out]
        weights[chosen] = _fit(target, rendered, plan, fitted, chosen, settings, progress, stop)
    ids = probe.vocabulary(measured.sums.preferred)
    score = probe.ProbeScore(weights, _head(target, ids), ids)
    with progress("probe", float(sum(len(rendered.ids[i]) for i in scored)), "tokens") as bar:
        for pairs in _pairs(target, rendered, plan, scored, settings, bar, stop):
            score.add(pairs)
    return _report(score, statistics.count, len(ids), taps, sets)


def _scored(rendered: Rendered, held_out: Sequence[int]) -> tuple[list[int], int]:
    """Held-out prompts until they have MOST_ROWS positions, and how many those are.

    Taken in the order given, which is random: batches run by length, so that stopping within them would leave the
    short prompts alone.
    """
    found: list[int] = []
    rows = 0
    for index in held_out:
        pairs = len(rendered.ids[index]) - 1 - rendered.first[index]
        if pairs > 0 and rows < MOST_ROWS:
            found.append(index)
            rows += pairs
    return found, rows


def _fit(
    target: "Opened",
    rendered: Rendered,
    plan: Plan,
    fitted: Sequence[int],
    chosen: tuple[int, ...],
    settings: CalibrationSettings,
    progress: Progress,
    stop: threading.Event,
) -> Any:
    members = tuple(range(len(chosen)))
    statistics = probe.ProbeStatistics(len(chosen), plan.width, [members])
    with progress("fit the set", float(sum(len(rendered.ids[i]) for i in fitted)), "tokens") as bar:
        for pairs in _pairs(target, rendered, plan, fitted, settings, bar, stop):
            statistics.add(dataclasses.replace(pairs, states=pairs.states[list(chosen)], final_norm=None))
    return statistics.solve(members)


def _pairs(
    target: "Opened",
    rendered: Rendered,
    plan: Plan,
    prompts: Sequence[int],
    settings: CalibrationSettings,
    bar: Any,
    stop: threading.Event,
) -> Any:
    from elsi_edge.calibration.capture import capture, plan_batches

    lengths = [len(rendered.ids[i]) for i in prompts]
    batches = [[prompts[k] for k in batch] for batch in plan_batches(lengths, tokens=settings.batch_tokens)]
    for prompt in capture(target, rendered.ids, blocks=plan.blocks, batches=batches):
        first = rendered.first[prompt.index]
        if len(prompt.entropy) - 1 > first:
            yield probe.Pairs.of([prompt], rendered.first)
        bar.advance(float(len(prompt.entropy)))
        if stop.is_set():
            raise KeyboardInterrupt


def _head(target: "Opened", ids: Any) -> Any:
    import torch

    weight = target.model.get_output_embeddings().weight  # type: ignore[operator]
    return weight[torch.from_numpy(ids).to(weight.device)].detach().float().cpu().numpy()


def _report(
    score: probe.ProbeScore,
    fitted: int,
    vocabulary: int,
    taps: int,
    sets: Mapping[str, tuple[int, ...]],
) -> dict[str, Any]:
    found = {members: round(value, 4) for members, value in score.agreement().items()}
    agreement = [found[(tap,)] for tap in range(taps)]
    several = {name: taps for name, taps in sets.items() if len(taps) > 1 and taps in found}
    chosen = sets["chosen"]
    flagged, best, text = probe_text(
        chosen,
        found[chosen],
        agreement,
        {name: found[taps] for name, taps in several.items()},
        found[()],
        error=score.error(chosen),
        lead_error=lambda tap: score.error((tap,), chosen),
        name="the state after the final norm" if chosen == (taps,) else None,
    )
    return {
        "fit_rows": fitted,
        "rows": score.rows,
        "vocabulary": vocabulary,
        "coverage": round(score.sayable / max(1, score.rows), 4),
        "none": found[()],
        "agreement": agreement,
        "final_norm": found[(taps,)],
        "standard_error": round(score.error(chosen), 4),
        "lead_error": round(score.error((best,), chosen), 4),
        "sets": [{"name": name, "taps": list(taps), "agreement": found[taps]} for name, taps in several.items()],
        "best_tap": best,
        "flagged": flagged,
        "text": text,
    }
