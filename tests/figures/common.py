"""What the scripts that measure the README's figures share; they need the real model, so no test runs them."""

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnxruntime

from elsi_edge._version import __version__
from elsi_edge.artifacts import PromptRow
from elsi_edge.builtin import NAME
from elsi_edge.fsio import write_json
from elsi_edge.machine import cores, cpu_name
from elsi_edge.prompts import read_prompts, spread_over_categories


def arguments(description: str, **numbers: int) -> argparse.Namespace:
    """The options every script has: prompts, an output file, and its own numbers."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("bundles", type=Path, nargs="+", help="bundle directories")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL prompts, e.g. Spec-Bench's")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def prompts(options: argparse.Namespace, count: int) -> list[PromptRow]:
    """The prompts to use: spread over the categories."""
    return spread_over_categories(read_prompts(options.prompts), count)


def save(path: Path, figures: dict[str, Any]) -> None:
    """Write figures with where they were measured."""
    machine = {
        "cpu": cpu_name(),
        "cores": cores().usable,
        "system": platform.platform(),
        "python": platform.python_version(),
        "onnxruntime": onnxruntime.__version__,
        "elsi_edge": __version__,
    }
    write_json(path, {"machine": machine, **figures})
    print(json.dumps(figures)[:2000])  # noqa: T201 - a script's result


_FORMER = ("--lr", "0.001", "--schedule", "cosine", "--unroll-start", "0")


def train_draft(directory: Path, shards: Path, flags: Sequence[str]) -> None:
    """Train the built-in model's draft in a process of its own, on one thread; nothing to do where that is finished.

    Where `flags` say nothing else, with what training did by default when the first figures were made.
    """
    if is_trained(directory):
        return
    directory.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "elsi_edge", "train", NAME, "--shards", str(shards), "--out", str(directory)]
    with (directory / "train.txt").open("a") as log:
        subprocess.run([*command, "--threads", "1", *_FORMER, *flags], check=True, stdout=log, stderr=log)
    (directory / "finished").touch()


def is_trained(directory: Path) -> bool:
    """Whether `train_draft` has ended here."""
    return (directory / "finished").is_file()
