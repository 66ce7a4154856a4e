"""A made-up `Analysis` with plausible numbers, for any number of blocks, and one where every optional part is off."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsi_edge.artifacts import LayerSelection
from elsi_edge.calibration.analysis import Analysis, Row, RuleResult, Search, Settling

PAPER = (0.484, 0.458, 0.356)


def make_analysis(blocks: int = 30, *, m: int = 1, model: str = "smollm2-135m-instruct") -> Analysis:
    """Everything measured; the pick is at nine tenths of the depth, compartments end at a fifth and at four fifths."""
    noise = np.random.default_rng(7)
    depth = np.arange(blocks + 1) / blocks
    pick = round(0.9 * blocks)
    entropy = 4.4 + 1.9 * depth * (1.2 - depth) + 0.8 * np.exp(-(((depth - 0.9) / 0.12) ** 2)) - 1.2 * (depth > 0.98)
    entropy = entropy + noise.normal(0.0, 0.02, blocks + 1)
    entropy[pick] = entropy.max() + 0.04
    edges = (0, round(0.2 * blocks), round(0.8 * blocks), blocks + 1)
    compartments = tuple((first, last - 1) for first, last in itertools.pairwise(edges))
    cka = _cka(blocks, edges)
    gains = _gains(blocks, entropy, cka)
    early = round(0.18 * blocks)
    taps = (pick,) if m == 1 else tuple(sorted({*np.linspace(early, pick, m).round().astype(int).tolist()}))
    selection = LayerSelection(
        taps=taps,
        method="elsi",
        entropy=tuple(entropy.round(6).tolist()),
        joint_entropy=round(float(entropy[pick]) + (0.31 if m > 1 else 0.0), 6),
        prompts=256,
        tokens=18_204,
        prompts_sha256="ab" * 32,
        blocks=blocks,
        width=576,
        target_fingerprint="cd" * 32,
        model=model,
        settings={
            "normalisation": "unit",
            "skip": 4,
            "template_prefix": 24,
            "rendering": "chat",
            "text": "answers",
            "final_norm_entropy": 4.083127,
            "warnings": ["18204 kept positions were measured, 2048 of them for sets"],
            "reservoir": 2048,
            "seed": 0,
        },
        entropy_interval=tuple(
            (round(v - 0.06 - 0.02 * d, 6), round(v + 0.05 + 0.02 * d, 6)) for v, d in _pairs(entropy, depth)
        ),
        stability=_stability(entropy, early, pick),
        probe=_probe(blocks, depth, pick, noise),
        compartments=compartments,
        cka_transitions=edges[1:-1],
        variance=_variance(blocks, depth, noise),
    )
    joint = float(entropy[pick])
    return Analysis(
        selection=selection,
        final_norm_entropy=4.083127,
        normalisations={
            "unit": tuple(entropy.tolist()),
            "centered": tuple((2.1 + 0.6 * np.sin(5 * depth) + noise.normal(0, 0.03, blocks + 1)).tolist()),
            "raw": tuple(np.where(depth < 0.38, 2.9 - depth, 0.08 + 0.01 * depth).tolist()),
        },
        rules=(
            RuleResult(name="elsi m = 1", taps=(pick,), joint_entropy=joint, mean_cka=0.0, probe=0.3291, chosen=m == 1),
            RuleResult(
                name="elsi m = 2", taps=(early, pick), joint_entropy=joint + 0.211, mean_cka=0.4132, probe=0.3377
            ),
            RuleResult(
                name="elsi-c m = 2", taps=(early, pick + 2), joint_entropy=joint + 0.174, mean_cka=0.3151, probe=0.3366
            ),
            RuleResult(
                name="eagle3",
                taps=(2, blocks // 2, blocks - 3),
                joint_entropy=joint + 0.302,
                mean_cka=0.5417,
                probe=0.3411,
            ),
            RuleResult(
                name="eagle2", taps=(blocks,), state="final-norm", joint_entropy=4.083127, mean_cka=0.0, probe=0.3172
            ),
            RuleResult(name="low-entropy m = 1", taps=(1,), joint_entropy=4.4821, mean_cka=0.0, probe=None),
            RuleResult(name="uniform m = 1", taps=(blocks // 2,), joint_entropy=5.0711, mean_cka=0.0, probe=0.3083),
        ),
        settling=_settling(blocks, entropy, pick),
        searches=(
            Search(
                m=2,
                greedy=(early, pick),
                greedy_entropy=joint + 0.211,
                best=(early, pick),
                best_entropy=joint + 0.211,
                compared=math.comb(blocks, 2),
                total=math.comb(blocks, 2),
                rows=2048,
                half_entropy=joint + 0.187,
                quick=m != 2,
            ),
            Search(
                m=3,
                greedy=(early, early + 4, pick),
                greedy_entropy=joint + 0.2983,
                best=(early, pick - 5, pick + 1),
                best_entropy=joint + 0.3057,
                compared=50,
                total=math.comb(blocks, 3),
                rows=2048,
                half_entropy=joint + 0.2741,
                quick=m != 3,
            ),
        ),
        cka=_rows(cka),
        cka_estimator="debiased",
        cka_rows=2048,
        cka_change=0.0213,
        gains=gains,
        gain_rows=1024,
        verdict=(
            f"Tap {pick} is a clear and stable pick: it wins 81 % of the resamples.",
            "The target has three regions of like layers, so taps for m = 2 and more should come from different ones.",
            "A second tap adds 0.21 nats; the probe says that it is worth 0.9 points of agreement.",
        ),
        cost={"forward": 61.4, "statistics": 9.8, "sets": 3.1, "probe": 58.2, "memory_bytes": 612_345_678.0},
    )


def empty_analysis(blocks: int = 30) -> Analysis:
    """The least a calibration gives: entropies and a pick, every other part switched off."""
    full = make_analysis(blocks)
    bare: dict[str, Any] = {"entropy_interval": (), "stability": {}, "probe": {}, "compartments": (), "variance": {}}
    return replace(
        full,
        selection=replace(full.selection, cka_transitions=(), settings={}, **bare),
        normalisations={},
        rules=(),
        settling=(),
        searches=(),
        cka=(),
        gains=(),
        verdict=(),
        cost={},
    )


def _pairs(*rows: NDArray[np.float64]) -> list[tuple[float, ...]]:
    return [tuple(values) for values in zip(*(row.tolist() for row in rows), strict=True)]


def _rows(matrix: NDArray[np.float64]) -> tuple[Row, ...]:
    return tuple(tuple(None if math.isnan(v) else round(v, 6) for v in row) for row in matrix.tolist())


def _cka(blocks: int, edges: tuple[int, ...]) -> NDArray[np.float64]:
    taps = np.arange(blocks + 1)
    region = np.searchsorted(edges[1:-1], taps, side="right")
    gap = np.abs(np.subtract.outer(taps, taps)) / blocks
    apart = np.abs(np.subtract.outer(region, region))
    cka: NDArray[np.float64] = np.exp(-0.5 * gap) * 0.72**apart
    return cka


def _gains(blocks: int, entropy: NDArray[np.float64], cka: NDArray[np.float64]) -> tuple[Row, ...]:
    gains = 0.05 + 0.35 * (1.0 - cka) + 0.25 * (entropy - entropy.mean())[None, :]
    np.fill_diagonal(gains, np.nan)
    gains[0], gains[:, 0] = np.nan, np.nan
    return _rows(gains)


def _stability(entropy: NDArray[np.float64], early: int, pick: int) -> dict[str, Any]:
    weight = np.exp((entropy - entropy.max()) / 0.08)
    weight[0] = 0.0
    wins = (weight / weight.sum()).round(3)
    return {
        "resamples": 1000,
        "wins": wins.tolist(),
        "stable": True,
        "text": f"Stable: tap {pick} wins {wins[pick]:.0%} of 1,000 resamples of the prompts.",
        "sets": [
            {"taps": [early, pick], "share": 0.61},
            {"taps": [early, pick - 1], "share": 0.22},
            {"taps": [early - 1, pick], "share": 0.09},
        ],
    }


def _probe(blocks: int, depth: NDArray[np.float64], pick: int, noise: np.random.Generator) -> dict[str, Any]:
    agreement = 0.267 + 0.064 * (1.0 - (1.0 - depth) ** 1.7) - 0.012 * depth**8
    agreement = (agreement + noise.normal(0.0, 0.0022, blocks + 1)).round(4)
    best = int(agreement.argmax())
    return {
        "fit_rows": 14_120,
        "rows": 3_610,
        "vocabulary": 49_152,
        "none": 0.2281,
        "agreement": agreement.tolist(),
        "final_norm": 0.3172,
        "standard_error": 0.0078,
        "sets": [
            {"name": "elsi m = 2", "taps": [round(0.18 * blocks), pick], "agreement": 0.3377},
            {"name": "eagle3", "taps": [2, blocks // 2, blocks - 3], "agreement": 0.3411},
        ],
        "rank_correlation": {"unit": 0.714, "centered": 0.182, "raw": -0.633},
        "best_tap": best,
        "flagged": False,
        "text": f"The probe's best tap is {best}; tap {pick} is within its standard error.",
    }


def _variance(blocks: int, depth: NDArray[np.float64], noise: np.random.Generator) -> dict[str, Any]:
    unfiltered = 0.31 + 0.22 * (1.0 - depth) + noise.normal(0.0, 0.008, blocks + 1)
    filtered, chance = unfiltered * (0.52 + 0.13 * depth), unfiltered * (1.09 - 0.05 * depth)
    edges = (0, round(7 / 36 * blocks), round(29 / 36 * blocks), blocks)
    bands = []
    for name, first, last, paper in zip(("early", "middle", "late"), edges, edges[1:], PAPER, strict=False):
        part = slice(first, max(last, first + 1))
        before, after, control = (float(values[part].mean()) for values in (unfiltered, filtered, chance))
        bands.append(
            {
                "name": name,
                "taps": [first, max(first, last - 1)],
                "unfiltered": before,
                "filtered": after,
                "random": control,
                "reduction": 1.0 - after / before,
                "reduction_random": 1.0 - control / before,
                "paper": paper,
            }
        )
    by_tap = {"unfiltered": unfiltered, "filtered": filtered, "random": chance}
    return {
        "bands": bands,
        "by_tap": {name: values.round(6).tolist() for name, values in by_tap.items()},
        "order": {"unfiltered": 0.552, "filtered": 0.703, "random": 0.541},
        "prompts": 248,
        "text": "The filter lowers the variance in every band, and taps rank more alike from prompt to prompt.",
    }


def _settling(blocks: int, entropy: NDArray[np.float64], pick: int) -> tuple[Settling, ...]:
    found = []
    early = round(0.2 * blocks)
    for step, prompts in enumerate((8, 16, 32, 64, 128, 192, 256)):
        tokens = prompts * 71 + 28
        values = entropy - 1.9 / math.sqrt(prompts)
        values[early] = values[pick] + 0.12 - 0.05 * step
        tap = 1 + int(values[1:].argmax())
        found.append(
            Settling(
                prompts=prompts,
                tokens=tokens,
                tap=tap,
                entropy=tuple(values.tolist()),
                win_share=min(0.81, 0.34 + 0.08 * step),
            )
        )
    assert found[-1].tap == pick
    return tuple(found)
