"""The built-in model and the packaged draft, through the commands that a user types. Minutes; `make slow` runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elsi_edge.packaged import builtin_bench_prompts, packaged_config
from elsi_edge.runtime.options import GenerateOptions
from elsi_edge.runtime.session import Session

pytestmark = [pytest.mark.slow, pytest.mark.model]
MODEL = "smollm2-135m-instruct"


def run(*arguments: str, work: Path) -> dict[str, Any]:
    """One verb in a process of its own; its JSON object."""
    environment = {**os.environ, "ELSI_EDGE_WORK": str(work), "ELSI_EDGE_BUILTIN_SOURCE": "wheel"}
    command = [sys.executable, "-m", "elsi_edge", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def bundle(work: Path) -> Path:
    """What a newcomer does: calibrate, then export with defaults."""
    selection = run("calibrate", MODEL, work=work)
    config = packaged_config()
    assert config is not None
    assert selection["taps"] == list(config.selection.taps), "the packaged draft was trained on another pick"
    run("export", MODEL, "--layers", "auto", "--m", "1", work=work)
    return work / MODEL / "bundle-int4"


def test_int4_chains_are_bit_identical(bundle: Path) -> None:
    session = Session.open(bundle)
    drafted = 0
    for row in builtin_bench_prompts()[:6]:
        plain = session.generate(row.turns[0], GenerateOptions(plain=True, max_tokens=48))
        for nodes in (1, 3, 7):
            fast = session.generate(row.turns[0], GenerateOptions(draft_nodes=nodes, max_tokens=48))
            assert fast.token_ids == plain.token_ids
            assert fast.text == plain.text
            drafted += sum(fast.accepted_by_depth)
    assert drafted > 50  # else equality says nothing


def test_sampled_text_is_the_plain_one(bundle: Path) -> None:
    session = Session.open(bundle)
    for seed in (1, 2):
        options = {"temperature": 0.8, "top_p": 0.95, "seed": seed, "max_tokens": 40}
        plain = session.generate("Tell me a short story.", GenerateOptions(plain=True, **options))  # type: ignore[arg-type]
        fast = session.generate("Tell me a short story.", GenerateOptions(draft_nodes=3, **options))  # type: ignore[arg-type]
        assert fast.token_ids == plain.token_ids


def test_fp32_trees_give_the_same_tokens(bundle: Path, work: Path) -> None:
    run("export", MODEL, "--precision", "fp32", work=work)
    session = Session.open(bundle.with_name("bundle-fp32"))
    deep = 0
    for row in builtin_bench_prompts()[6:9]:
        plain = session.generate(row.turns[0], GenerateOptions(plain=True, max_tokens=48))
        for nodes in (4, 8, 30):
            fast = session.generate(row.turns[0], GenerateOptions(draft_nodes=nodes, max_tokens=48))
            assert fast.mode == "tree"
            assert fast.token_ids == plain.token_ids
            deep += sum(fast.accepted_by_depth[2:])
    assert deep > 0


def test_distill_and_train_make_a_draft_that_export_takes(bundle: Path, work: Path) -> None:
    """The verbs that made the packaged draft, for a few steps."""
    run("export", MODEL, "--plain-only", work=work)
    run("distill", MODEL, "--count", "12", "--max-tokens", "24", work=work)
    run("train", MODEL, "--steps", "3", work=work)
    shown = run("export", MODEL, "--layers", "auto", "--m", "1", "--force", work=work)
    assert shown["taps"] == [27]
