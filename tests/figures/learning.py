"""What learns fastest for its time: short runs of one draft, each with one setting changed, on the same shards.

    python -m tests.figures.learning WORK --shards DIR [--minutes 6] [--lanes 2] [--only NAME ...] \
        [--out docs/figures/learning.json] [--picture docs/figures/learning.png]

Every run has the same minutes on one thread, so a setting that makes steps dearer gets fewer of them. Scores are those
of training itself: agreement by depth on held-out conversations, tau by replay of their greedy answers. The command
goes on from what WORK holds.
"""

import argparse
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from elsi_edge.draft.curves import read_log
from tests.figures.common import save, train_draft

REFERENCE = "reference"
# Options of `elsi-edge train` beside those of every run; later ones win.
VARIANTS: Mapping[str, str] = {
    REFERENCE: "",
    "reference, seed 1": "--seed 1",
    "start at random": "--no-warm-start",
    "Muon": "--optimiser muon",
    "learning rate x 2": "--lr 0.002",
    "learning rate x 1/2": "--lr 0.0005",
    "WSD": "--schedule wsd",
    "unroll 1": "--unroll 1",
    "unroll 1, then 3": "--unroll-start 1",
    "unroll 5": "--unroll 5",
    "half the batch": "--batch-tokens 1024",
    "target's own head rows": "--head tied",
    "vocabulary 4,096": "--vocab-size 4096",
    "vocabulary 16,384": "--vocab-size 16384",
    "half the MLP": "--mlp-width 768",
    "two blocks": "--depth 2",
    "no average": "--ema 0",
    "rounded to 4 bits": "--qat int4",  # in its scores too
    "rate x 2, WSD, unroll 1, then 3": "--lr 0.002 --schedule wsd --unroll-start 1",
    "rate x 2, WSD, half the batch": "--lr 0.002 --schedule wsd --batch-tokens 1024",
}
EVERY_RUN = "--taps 27 --ema 0.99 --evaluate-every 40"


def main() -> None:
    """Train, gather, draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--shards", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--lanes", type=int, default=2, help="runs side by side, each on one thread")
    parser.add_argument("--only", nargs="*", help="some of the variants")
    parser.add_argument("--out", type=Path, default=Path("docs/figures/learning.json"))
    parser.add_argument("--picture", type=Path, default=Path("docs/figures/learning.png"))
    options = parser.parse_args()
    names = options.only or list(VARIANTS)
    with ThreadPoolExecutor(options.lanes) as lanes:
        for done in [lanes.submit(_train, options, name) for name in names]:
            done.result()
    places = {name: _directory(options.work, name) for name in VARIANTS}
    runs = {name: _scores(place) for name, place in places.items() if place.is_dir()}
    save(options.out, {"minutes": options.minutes, "lanes": options.lanes, "every_run": EVERY_RUN, "runs": runs})
    draw(runs, options.picture)


def _directory(work: Path, name: str) -> Path:
    return work / "".join(letter if letter.isalnum() else "-" for letter in name)


def _train(options: argparse.Namespace, name: str) -> None:
    flags = f"--minutes {options.minutes} {EVERY_RUN} {VARIANTS[name]}"
    train_draft(_directory(options.work, name), options.shards, flags.split())


def _scores(directory: Path) -> dict[str, Any]:
    """Steps and tokens of a run, its last scores, and tau of the chain of 4 over minutes."""
    entries = read_log(directory)
    scored = [entry for entry in entries if "agreement" in entry]
    if not scored:
        return {"steps": 0}
    last = scored[-1]
    return {
        "steps": last["step"],
        "tokens": max((entry["tokens"] for entry in entries if "tokens" in entry), default=0),
        "agreement": last["agreement"],
        "tau": last["tau"],
        "minutes": [entry["minutes"] for entry in scored],
        "tau_chain4": [entry["tau"]["chain-4"] for entry in scored],
    }


def draw(runs: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Tau of a chain of 4 against minutes, a line a run, the reference thick."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 5.5), layout="constrained")
    axes = figure.add_subplot()
    for place, (name, run) in enumerate(runs.items()):
        if run["steps"]:
            style = {"color": "black", "linewidth": 2.5} if name == REFERENCE else {"linewidth": 1.2}
            marker = "os^Dv<>Pp*hX"[place % 12]
            axes.plot(run["minutes"], run["tau_chain4"], label=name, marker=marker, markersize=4, **style)
    axes.set_xlabel("minutes on one thread, scoring left out")
    axes.set_ylabel("tau, chain of 4, held-out answers")
    axes.legend(fontsize="small", ncols=2)
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
