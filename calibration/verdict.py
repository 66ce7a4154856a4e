"""What a calibration comes to, in sentences for an engineer who has not read the paper."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elsi_edge.artifacts import LayerSelection
from elsi_edge.calibration.analysis import RuleResult, Search
from elsi_edge.calibration.words import method

_LITTLE = 0.02  # share of joint entropy that a further tap must add to be called more than little


def verdict(
    selection: LayerSelection, rules: Sequence[RuleResult], searches: Sequence[Search], *, rows: int, width: int
) -> tuple[str, ...]:
    """Compartments, what m buys, the probe and stability, a sentence or two each."""
    parts = [
        _regions(selection, few=rows < width),
        _sizes(rules, searches),
        _chosen_set(selection, rules),
        str(selection.stability.get("text", "")),
        _probe(selection.probe, rules),
        _few_rows(rows, width),
    ]
    return tuple(part for part in parts if part)


def _regions(selection: LayerSelection, *, few: bool) -> str:
    regions = selection.compartments
    if not regions:
        return ""
    if few:  # where rows are few every tap is like every other
        return "Too few positions to tell compartments apart."
    if len(regions) == 1:
        return (
            "All taps form one broad region of high CKA: they say much the same, so any spread of layers will do "
            "(the paper's Llama case)."
        )
    names = ", ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in regions)
    widest = max(b - a + 1 for a, b in regions)
    taps = sum(b - a + 1 for a, b in regions)
    if widest > 0.7 * taps:
        return (
            f"{len(regions)} compartments (taps {names}), of which one holds most taps: inside it any layer does about "
            "as well, the others are worth avoiding or adding on purpose."
        )
    return f"{len(regions)} compartments (taps {names}): taps of different ones say different things."


def _sizes(rules: Sequence[RuleResult], searches: Sequence[Search]) -> str:
    single = next((rule.joint_entropy for rule in rules if rule.name == "elsi m = 1"), None)
    if not searches or single is None:
        return ""
    found = []
    before = single  # on the reservoir, as the sets: fewer rows alone make an entropy smaller
    for search in searches:
        gain = search.best_entropy - before
        size = "little" if gain < _LITTLE * before else f"{gain / before:.0%}"
        adds = f"adds {gain:.2f} nats ({size})" if gain > 0.005 else "adds nothing"
        quick = " (quick search)" if search.quick else ""
        found.append(f"elsi m = {search.m} {list(search.best)}{quick} {adds}")
        before = search.best_entropy
    start = f"On {searches[0].rows} positions the best single tap holds {single:.2f} nats; "
    return start + ", then ".join(found) + "."


def _chosen_set(selection: LayerSelection, rules: Sequence[RuleResult]) -> str:
    """What the chosen set of several taps holds, where that is not the set named above."""
    chosen = next((rule for rule in rules if rule.chosen and len(rule.taps) > 1), None)
    single = next((rule for rule in rules if rule.name == "elsi m = 1"), None)
    if chosen is None or single is None:
        return ""
    gain = chosen.joint_entropy - single.joint_entropy
    more = f"{gain:.2f} more than" if gain > 0.005 else f"{-gain:.2f} less than" if gain < -0.005 else "no more than"
    return (
        f"The chosen set {list(chosen.taps)} ({method(selection)}) holds {chosen.joint_entropy:.2f} nats, {more} tap "
        f"{single.taps[0]} alone."
    )


def _probe(probe: Mapping[str, Any], rules: Sequence[RuleResult]) -> str:
    if not probe:
        return ""
    return str(probe.get("text", ""))


def probe_text(
    pick: tuple[int, ...],
    picked: float,
    agreement: Sequence[float],
    others: Mapping[str, float],
    none: float,
    *,
    error: float,
    lead_error: Callable[[int], float],
    name: str | None = None,
) -> tuple[bool, int, str]:
    """Whether the pick is flagged, the best single tap, and what the probe says.

    agreement [L + 1] by tap, others by rule's name, picked the chosen set's, none without any tap: all 0..1.
    error is the standard error of `picked`, lead_error(tap) that of a tap's lead over the pick.
    name says what the pick is, where it is no set of taps.
    """
    best = 1 + max(range(len(agreement) - 1), key=lambda i: (agreement[i + 1], -i))
    if name is None:
        name = f"tap {pick[0]}" if len(pick) == 1 else f"taps {', '.join(map(str, pick))}"
    verb = "foresees" if len(pick) == 1 else "foresee"
    text = (
        f"Probe (one linear map, no training): {name} {verb} the target's next token in {picked:.3f} of held-out "
        f"positions (standard error {error:.3f}), no tap at all in {none:.3f}"
    )
    if "eagle3" in others:
        three = others["eagle3"]
        text += f", EAGLE-3's three in {three:.3f}"
        if len(pick) == 1 and three > 0:
            text += f": one tap gives {picked / three:.0%} of three"
    behind = 1.0 - picked / agreement[best] if agreement[best] > 0 else 0.0
    from elsi_edge.calibration.probe import FLAG

    if behind > FLAG:
        lead, noise = agreement[best] - picked, lead_error(best)
        sure = "" if lead > 2.0 * noise else ", which so few positions do not prove"
        flag = (
            f"{text}. FLAGGED: tap {best} does better by itself ({agreement[best]:.3f}), the pick is {behind:.1%} "
            f"behind (lead {lead:.3f}, standard error {noise:.3f}{sure}); consider --taps {best}."
        )
        return True, best, flag
    near = f"the pick is within {FLAG:.0%} of the best tap ({best})"
    closeness = "which is the best of all taps" if pick == (best,) else near
    return False, best, f"{text}; {closeness}."


def _few_rows(rows: int, width: int) -> str:
    if rows >= width:
        return ""
    few = f"CKA and sets rest on {rows} positions, fewer than the width {width}"
    return f"{few}: take them as a hint, or give more prompts."
