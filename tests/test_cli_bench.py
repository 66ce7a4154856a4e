"""`elsi-edge bench`: an interrupt at any stage keeps what was measured; what it says beside the figures."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elsi_edge.cli import bench_extras
from elsi_edge.machine import cores
from elsi_edge.runtime.bench import roofline
from elsi_edge.runtime.options import GenerateOptions, SessionSettings
from elsi_edge.runtime.session import Session
from tests.cli_run import Run, one_line


def interrupt(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def test_an_interrupt_after_the_answers_keeps_them(
    run: Run, tiny_bundle: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_extras, "_limit", interrupt)
    out = tmp_path / "out.json"
    arguments = ("bench", tiny_bundle("fp32"), "--limit", 2, "--max-tokens", 4, "--roofline", "--memory-limit", "300MB")
    done = run(*arguments, "--out", out)
    assert done.code == 130 and "speed-up" in done.out and "interrupted: 2 answers" in done.err
    report = json.loads(out.read_text())
    assert report["partial"] and report["answers"] == 2 and report["roofline"] and report["memory_limit"] is None


def test_an_interrupt_in_a_later_number_of_threads_keeps_the_first(
    run: Run, tiny_bundle: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, open_session = [], Session.open.__func__  # type: ignore[attr-defined]

    def second_fails(cls: type[Session], *arguments: Any) -> Session:
        opened.append(1)
        return interrupt() if len(opened) == 2 else open_session(cls, *arguments)  # type: ignore[no-any-return]

    monkeypatch.setattr(Session, "open", classmethod(second_fails))
    out = tmp_path / "out.json"
    done = run("bench", tiny_bundle("fp32"), "--limit", 1, "--max-tokens", 4, "--threads", "1,2", "--out", out)
    assert done.code == 130 and json.loads(out.read_text())["partial"] is True


def test_a_limit_out_of_range_is_refused_before_anything_is_measured(
    run: Run, tiny_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "generate", interrupt)
    one_line(run("bench", tiny_bundle("fp32"), "--memory-limit", "300"), 2, "--memory-limit", "300")


def test_several_numbers_of_threads_end_in_one_table(run: Run, tiny_bundle: Callable[..., Path]) -> None:
    done = run("bench", tiny_bundle("fp32"), "--limit", 1, "--max-tokens", 4, "--threads", "1,2")
    assert done.code == 0 and done.err.count("Next:") == 1
    table = done.out[done.out.rindex("threads   tokens/s") :].splitlines()
    assert [line.split()[0] for line in table if line.split() and line.split()[0].isdigit()] == ["1", "2"]


def test_an_untuned_bundle_says_so(run: Run, tiny_bundle: Callable[..., Path]) -> None:
    done = run("bench", tiny_bundle("fp32"), "--limit", 1, "--max-tokens", 4)
    assert "not tuned for this machine" in done.out and "Next: elsi-edge tune" in done.err


def test_a_released_session_answers_as_before(tiny_bundle: Callable[..., Path]) -> None:
    session, options = Session.open(tiny_bundle("fp32")), GenerateOptions(max_tokens=8)
    before = session.generate("Once upon", options).token_ids
    engine = session.engine(exact=True)
    session.release()
    assert session.engine(exact=True) is not engine
    assert session.generate("Once upon", options).token_ids == before


def test_a_static_bundles_step_computes_all_its_rows() -> None:
    from elsi_edge.artifacts import ModelShape

    shape = ModelShape(
        family="llama", blocks=2, width=64, heads=4, kv_heads=2, head_width=16, mlp_width=96, vocab_size=256,
        context=256, tied_embeddings=True, rope_theta=1e4, norm_eps=1e-5,
    )  # fmt: skip
    ceilings = roofline.Ceilings(copy_gb_per_s=20.0, read_gb_per_s=20.0, gop_per_s={"int8": 100.0})
    one, fixed = (
        roofline.roofline(
            shape, "int8", past=100, step_ms=1.0, ceilings=ceilings, tuning=None, fixed_rows=rows
        )
        for rows in (None, 8)
    )  # fmt: skip
    assert [point.rows for point in fixed.verify] == [8]
    assert fixed.verify[0].operations == 8 * one.verify[0].operations
    assert "all 8 rows" in fixed.words[0] and "7 candidates" in fixed.words[1] and len(fixed.words) == 2


def test_figures_of_one_token_are_refused(run: Run, tiny_bundle: Callable[..., Path]) -> None:
    one_line(run("bench", tiny_bundle("fp32"), "--max-tokens", "1"), 2, "--max-tokens is 1", "at least 2")


def test_more_threads_than_cores_are_warned_of(tiny_bundle: Callable[..., Path]) -> None:
    usable = cores().usable
    many = Session.open(tiny_bundle("fp32"), SessionSettings(threads=usable + 1))
    assert any(f"{usable + 1} threads share {usable} usable core" in line for line in many.warnings)
    assert Session.open(tiny_bundle("fp32"), SessionSettings(threads=usable)).warnings == ()
