"""The table that answers the paper: a draft per rule of layer selection, trained alike, and what is accepted of it.

    python -m tests.figures.table WORK --train-shards DIR --dev-shards DIR --prompts spec_bench_dev.jsonl \
        [--steps 700] [--lanes 2] [--stages train,replay,sample,report] [--out docs/figures/table.json]

Same data, steps and settings for every rule; only the taps, and with them the projection, differ. Every stage goes on
from what WORK holds, so that the command may be cut and given again. The shards must hold every tap named below
(`elsi-edge distill --taps`), the dev shards the target's greedy answers.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elsi_edge.builtin import NAME
from elsi_edge.draft.checkpoint import load_draft
from elsi_edge.fsio import write_json
from elsi_edge.prompts import read_prompts
from tests.figures.common import is_trained, train_draft
from tests.figures.replay import Counts, by_category, differences
from tests.figures.table_report import BASE, write_into


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule of layer selection and what it picked."""

    name: str
    taps: str  # as `elsi-edge train --taps` takes them
    seeds: int = 1

    def runs(self) -> list[tuple[str, int]]:
        """Names of its training runs, with their seeds."""
        plain = self.name.split(",")[0].replace(" ", "-").replace("=", "")
        return [(f"{plain}-s{seed}", seed) for seed in range(self.seeds)]


# Picks of `elsi-edge calibrate`, on the target's answers to the 256 built-in prompts (docs/calibration.md).
RULES = (
    Rule(name="elsi m=1", taps="27", seeds=3),
    Rule(name="eagle3", taps="2,15,27", seeds=3),
    Rule(name="low-entropy m=1", taps="1", seeds=3),
    Rule(name="elsi m=3, elsi-c m=3", taps="5,27,29"),  # both rules take it
    Rule(name="eagle2", taps="final-norm"),
    Rule(name="elsi m=2, elsi-c m=2", taps="7,29"),
    Rule(name="low-entropy m=3", taps="1,2,30"),
    Rule(name="probe m=1", taps="28"),
)


def main() -> None:
    """Run the stages asked for."""
    options = _options()
    stages = options.stages.split(",")
    if "train" in stages:
        _train(options)
    finished = [name for name, _ in _in_order(RULES) if is_trained(options.work / name)]
    if "replay" in stages:
        _replay(options, finished)
    if "sample" in stages:
        _sample(options, [name for name in finished if name.endswith("-s0")])
    if "report" in stages:
        figures = _gather(options, finished)
        write_json(options.out, figures)
        if options.document:
            write_into(options.document, figures)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--train-shards", type=Path, required=True)
    parser.add_argument("--dev-shards", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="Spec-Bench's layout; names the categories")
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--lanes", type=int, default=2, help="runs side by side, each on one thread")
    parser.add_argument("--flags", default="", help="more of `elsi-edge train`, the same for every rule")
    parser.add_argument("--stages", default="train,replay,sample,report")
    parser.add_argument("--out", type=Path, default=Path("docs/figures/table.json"))
    parser.add_argument(
        "--document", type=Path, help="Markdown with markers for the tables, such as docs/experiments.md"
    )
    return parser.parse_args()


def _in_order(rules: Sequence[Rule]) -> list[tuple[str, tuple[Rule, int]]]:
    """Every run: first seeds first, so that a table cut short has every rule."""
    runs = [(name, (rule, seed)) for rule in rules for name, seed in rule.runs()]
    return sorted(runs, key=lambda run: run[1][1])


# --- train -----------------------------------------------------------------------------------------------------------


def _train(options: argparse.Namespace) -> None:
    left = [(name, *run) for name, run in _in_order(RULES) if not is_trained(options.work / name)]
    with ThreadPoolExecutor(options.lanes) as lanes:
        for done in [lanes.submit(_train_one, options, *run) for run in left]:
            done.result()


def _train_one(options: argparse.Namespace, name: str, rule: Rule, seed: int) -> None:
    flags = ["--taps", rule.taps, "--seed", str(seed), "--steps", str(options.steps), *options.flags.split()]
    train_draft(options.work / name, options.train_shards, flags)


# --- replay ----------------------------------------------------------------------------------------------------------


def _replay(options: argparse.Namespace, finished: Sequence[str]) -> None:
    """Exact replay at T = 0, a file per draft."""
    with ThreadPoolExecutor(options.lanes) as lanes:
        for done in [lanes.submit(_replay_one, options, name) for name in finished]:
            done.result()


def _replay_one(options: argparse.Namespace, name: str) -> None:
    directory = options.work / name
    command = [sys.executable, "-m", "tests.figures.replay", str(directory), str(options.dev_shards)]
    command += ["--prompts", str(options.prompts), "--out", str(directory / "replay.json"), "--threads", "1"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


# --- real runs at T = 1 ----------------------------------------------------------------------------------------------


def _sample(options: argparse.Namespace, finished: Sequence[str]) -> None:
    """The first seed of each rule, one after another: a level's milliseconds are measured too."""
    for name in finished:
        out = options.work / name / "sampled.json"
        if not out.is_file():
            command = [sys.executable, "-m", "tests.figures.table_sample", str(options.work / name), "--out", str(out)]
            command += ["--prompts", str(options.prompts)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


# --- report ----------------------------------------------------------------------------------------------------------


def _gather(options: argparse.Namespace, finished: Sequence[str]) -> dict[str, Any]:
    """One object: how the drafts were trained; by rule its taps, size, agreement, tau and difference to EAGLE-3's."""
    categories = {row.id: row.category for row in read_prompts(options.prompts)}
    rules: dict[str, Any] = {}
    pooled: dict[str, dict[str, Counts]] = {}
    for rule in RULES:
        runs = []
        for name, seed in rule.runs():
            replayed = options.work / name / "replay.json"
            if name not in finished or not replayed.is_file():
                continue
            training = load_draft(options.work / name).config.training
            rows = json.loads(replayed.read_text())[str(options.work / name)]["rows"]
            own = {"seed": seed, "agreement": training["evaluation"]["agreement"], "tau": by_category(rows, categories)}
            runs.append(own)
            pooled[rule.name] = _add(pooled.get(rule.name), rows)
            rules.setdefault(rule.name, {"taps": rule.taps, "size": training["size"], "runs": runs})
            sampled = options.work / name / "sampled.json"
            if seed == 0 and sampled.is_file():
                rules[rule.name]["sampled"] = json.loads(sampled.read_text())
    for name, rows in pooled.items():
        if name != BASE and BASE in pooled:
            rules[name]["difference"] = differences(rows, pooled[BASE], categories)
    return {"model": NAME, "steps": options.steps, "flags": options.flags, "rules": rules}


def _add(one: dict[str, Counts] | None, other: dict[str, Counts]) -> dict[str, Counts]:
    """Counts of two seeds, answer by answer."""
    if one is None:
        return other
    return {
        key: {d: [a + b for a, b in zip(counts[d], one[key][d], strict=True)] for d in counts}
        for key, counts in other.items()
    }


if __name__ == "__main__":
    main()
