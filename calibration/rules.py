"""Every rule on the same measurements: the one that chooses, and those it is compared with."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from elsi_edge.calibration import search, selection
from elsi_edge.calibration.accumulate import Sample
from elsi_edge.calibration.analysis import RuleResult, Search
from elsi_edge.calibration.measure import Measured
from elsi_edge.calibration.settings import CalibrationSettings, Progress
from elsi_edge.calibration.statistics import FloatArray
from elsi_edge.calibration.words import GIVEN

Set = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the rules chose."""

    taps: Set  # of the rule that was asked for
    joint_entropy: float  # nats: on all kept positions for one tap, on the reservoir for a set
    results: tuple[RuleResult, ...]
    searches: tuple[Search, ...]
    set_wins: list[dict[str, Any]]
    gains: FloatArray  # [L + 1, L + 1]
    gain_rows: int
    rows: int
    recorded: dict[str, Any] = field(default_factory=dict)  # for the selection's settings


def known_sets(settings: CalibrationSettings, blocks: int) -> list[tuple[str, Set]]:
    """Sets of several taps that are known before anything is measured, so that the probe fits them in the same pass."""
    found: list[tuple[str, Set]] = []
    if blocks >= selection.EAGLE3_MIN_BLOCKS:
        found.append(("eagle3", selection.eagle3_taps(blocks)))
    if blocks >= 3:
        found.append(("uniform m = 3", selection.uniform(blocks, 3)))
    if len(settings.taps) > 1:
        found.append(("explicit", selection.explicit(settings.taps, blocks)))
    return found


def run(
    measured: Measured, sample: Sample, cka: FloatArray, m: int, settings: CalibrationSettings, progress: Progress
) -> Rules:
    """Run every rule. sample holds rows as joint entropies want them, centred unless raw; cka [L + 1, L + 1] is indexed
    by tap."""
    blocks = len(measured.entropy) - 1
    sets = search.Sets(sample.states, sample.order, blocks)
    prompt = np.array([prompt for prompt, _ in sample.where], np.intp)
    taps, recorded = _asked(measured, sets, cka, m, settings, progress)
    found = _searched(sets, m, taps, settings, progress)
    gains = sets.gains(progress) if blocks > 1 else np.full((blocks + 1, blocks + 1), np.nan)
    close = next((f.close for f in found if f.search.m == m), ())
    weight = settings.cka_weight if settings.method == "elsi-c" else 0.0

    def penalty(members: Set) -> float:
        return weight * selection.mean_pairwise_cka(members, cka)

    if m > 1 and settings.method == "elsi-c":  # the rivals of this rule's set are not those of joint entropy alone
        close = search.rivals(sets, taps, penalty)
    if m > 1:
        recorded["sets_scored"] = sets.full.measured
        if settings.method == "elsi-c":
            recorded["cka_weight_sweep"] = search.sweep(sets, m, cka)
    return Rules(
        taps=taps,
        joint_entropy=float(measured.entropy[taps[0]]) if m == 1 else sets.full(taps),
        results=_compared(measured, sets, cka, taps, found, settings),
        searches=tuple(f.search for f in found),
        set_wins=search.wins(sets, close, prompt, seed=settings.seed, chosen=taps, penalty=penalty) if close else [],
        gains=gains,
        gain_rows=sets.screen_rows,
        rows=sets.rows,
        recorded=recorded,
    )


def _asked(
    measured: Measured, sets: search.Sets, cka: FloatArray, m: int, settings: CalibrationSettings, progress: Progress
) -> tuple[Set, dict[str, Any]]:
    """The taps of the rule that was asked for, and what to record beside them."""
    blocks, method = sets.blocks, settings.method
    entropy = np.round(measured.entropy, 6)
    if method == "eagle3":
        return selection.eagle3_taps(blocks), {}
    if method == "eagle2":
        return (blocks,), {}
    if method == "low-entropy":
        return selection.low_entropy(entropy, m), {}
    if method == "uniform":
        return selection.uniform(blocks, m), {}
    if method == "explicit":
        return selection.explicit(settings.taps, blocks), {}
    if m == 1:  # one tap has no partner to be unlike
        return selection.elsi(blocks, 1, lambda taps: float(entropy[taps[0]])).taps, {}
    with progress("score sets of taps", None, "sets") as bar:

        def prepare(pool: Sequence[Set]) -> None:
            search.measure(sets.full, pool, bar)

        if method == "elsi":
            return selection.elsi(blocks, m, sets.full, prepare).taps, {}
        taps = selection.elsi_c(blocks, m, sets.full, cka, weight=settings.cka_weight, prepare=prepare).taps
        return taps, {"mean_cka": round(selection.mean_pairwise_cka(taps, cka), 6)}


def _searched(
    sets: search.Sets, m: int, taps: Set, settings: CalibrationSettings, progress: Progress
) -> list[search.Found]:
    found = []
    if settings.method == "elsi" and m > 1:
        if m > 2:
            found.append(search.show_pairs(sets))
        found.append(search.best_sets(sets, m, taps, progress))
        return found
    if sets.blocks >= 2:
        found.append(search.show_pairs(sets))
    if sets.blocks >= 3:
        found.append(search.show_triples(sets, found[0].search.best))
    return found


def _compared(
    measured: Measured,
    sets: search.Sets,
    cka: FloatArray,
    chosen: Set,
    found: list[search.Found],
    settings: CalibrationSettings,
) -> tuple[RuleResult, ...]:
    """The table of rules, all on the reservoir's rows."""
    blocks, entropy = sets.blocks, np.round(measured.entropy, 6)
    best = selection.elsi(blocks, 1, lambda taps: float(entropy[taps[0]])).taps
    named: list[tuple[str, Set]] = [("elsi m = 1", best)]
    asked = settings.method == "elsi" and len(chosen) > 1  # then the greedy set is the rule's own
    named += [
        (f"elsi m = {f.search.m}", f.search.greedy if asked and f.search.m == len(chosen) else f.search.best)
        for f in found
    ]
    if blocks >= 2 and (settings.method, len(chosen)) != ("elsi-c", 2):
        named.append(("elsi-c m = 2", selection.elsi_c(blocks, 2, sets.screen, cka, weight=settings.cka_weight).taps))
    named += [(name, taps) for name, taps in known_sets(settings, blocks) if name != "explicit"]
    named.append(("uniform m = 1", selection.uniform(blocks, 1)))
    named.append(("low-entropy m = 1", selection.low_entropy(entropy, 1)))
    if blocks >= 3:
        named.append(("low-entropy m = 3", selection.low_entropy(entropy, 3)))
    residual = settings.method != "eagle2"
    label = GIVEN if settings.method == "explicit" else f"{settings.method} m = {len(chosen)}"
    if residual and label not in dict(named) and settings.method != "eagle3":
        named.append((label, chosen))
    sets.full.prepare([taps for _, taps in named])
    results = [
        RuleResult(
            name=name,
            taps=taps,
            joint_entropy=round(sets.full(taps), 4),
            mean_cka=round(selection.mean_pairwise_cka(taps, cka), 4),
            chosen=residual and taps == chosen,
        )
        for name, taps in named
    ]
    last = RuleResult(
        name="eagle2", taps=(blocks,), state="final-norm", joint_entropy=round(measured.final_norm_entropy, 4),
        mean_cka=0.0, chosen=not residual,
    )  # fmt: skip
    return (*results, last)


def with_probe(result: RuleResult, probe: Mapping[str, Any]) -> RuleResult:
    """The same with its probe's agreement, where that set was fitted."""
    if not probe.get("agreement"):
        return result
    if result.state == "final-norm":
        return dataclasses.replace(result, probe=probe["final_norm"])
    if len(result.taps) == 1:
        return dataclasses.replace(result, probe=probe["agreement"][result.taps[0]])
    found = {tuple(item["taps"]): item["agreement"] for item in probe["sets"]}
    return dataclasses.replace(result, probe=found.get(result.taps))
