"""`export` chooses taps and draft, and leaves a whole bundle or nothing."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elsi_edge import fsio, packaged, prompts
from elsi_edge.artifacts import BITS, LayerSelection, PromptRow
from elsi_edge.bundle import Bundle, BundleManifest
from elsi_edge.draft.checkpoint import load_config
from elsi_edge.errors import DraftError
from elsi_edge.export import builder, pipeline
from tests.cli_run import Run, one_line
from tests.conftest import TinyModel


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tiny_bundle: Callable[..., Path]) -> list[dict[str, Any]]:
    """Arguments of exports, which give the tiny bundle's manifest and write nothing."""
    seen: list[dict[str, Any]] = []
    manifest = Bundle.load(tiny_bundle("int4")).manifest

    def export(source: Any, out: Path, settings: Any, *, draft: Any, say: Callable[[str], None]) -> BundleManifest:
        say("building")
        seen.append({"out": out, "settings": settings, "draft": draft})
        if draft is None:
            return replace(manifest, draft=None, selection=None)
        bits = BITS[settings.draft_precision or "int4"]
        return replace(manifest, quantisation={**manifest.quantisation, "draft": {"bits": bits}})

    monkeypatch.setattr(pipeline, "export_bundle", export)
    monkeypatch.setattr(packaged, "packaged_draft", lambda: None)
    return seen


def put_selection(selection: LayerSelection, work: Path) -> None:
    fsio.write_json(work / "tiny-llama" / "selection.json", selection.to_json())


def test_export_end_to_end(run: Run, tiny_model: TinyModel, tmp_path: Path) -> None:
    out = tmp_path / "models" / "b 1"
    done = run("export", tiny_model.model, "--draft", tiny_model.draft, "--m", 1, "--precision", "fp32", "--out", out)
    assert done.code == 0 and "taps: tap 1, from the draft" in done.err and "Next: elsi-edge bench" in done.err
    assert "together" in done.out and "checked against the source model:" in done.out
    bundle = Bundle.load(out)
    assert bundle.manifest.selection is not None and bundle.manifest.selection.taps == (1,)
    assert [path.name for path in out.parent.iterdir()] == ["b 1"]
    one_line(run("export", tiny_model.model, "--draft", tiny_model.draft, "--out", out), 1, "exists already", "--force")


def test_auto_takes_the_selection_then_the_drafts_own(
    run: Run,
    calls: list[dict[str, Any]],
    tiny_model: TinyModel,
    tmp_path: Path,
) -> None:
    work = tmp_path / "w"
    shutil.copytree(tiny_model.draft, work / "tiny-llama" / "draft")
    first = run("export", tiny_model.model, "--work", work, "--json")
    assert (
        first.code == 0 and first.json["taps"] == [1] and first.json["bytes"] == sum(first.json["components"].values())
    )
    assert calls[0]["out"] == work / "tiny-llama" / "bundle-int4" and calls[0]["draft"] is not None
    assert f"from the draft {work / 'tiny-llama' / 'draft'}" in first.err
    put_selection(tiny_model.selection, work)
    assert "from the selection" in run("export", tiny_model.model, "--work", work).err


def test_a_selection_that_differs_from_the_draft_is_explained(
    run: Run,
    calls: list[dict[str, Any]],
    tiny_model: TinyModel,
    tmp_path: Path,
) -> None:
    put_selection(replace(tiny_model.selection, taps=(2,), joint_entropy=2.0), tmp_path)
    done = run("export", tiny_model.model, "--draft", tiny_model.draft, "--work", tmp_path)
    assert done.code == 1 and not calls
    last = done.err.splitlines()[-1]
    for part in ("selection.json chose tap 2", "trained on tap 1", "2.000 against 3.000", "--layers 1"):
        assert part in last
    assert (
        f"train one on tap 2: elsi-edge export {tiny_model.model} --plain-only --work {tmp_path} && elsi-edge distill "
        f"{tiny_model.model} --work {tmp_path} && elsi-edge train {tiny_model.model} --work {tmp_path} && "
        f"elsi-edge export {tiny_model.model} --work {tmp_path}\n"
    ) in done.err
    own = run("export", tiny_model.model, "--draft", tiny_model.draft, "--work", tmp_path, "--layers", "1")
    assert own.code == 0 and "from --layers 1" in own.err


def test_who_named_the_taps_is_said_and_a_bundle_that_is_there_comes_second(
    run: Run, calls: list[dict[str, Any]], tiny_model: TinyModel, tmp_path: Path
) -> None:
    place = tmp_path / "w w" / "tiny-llama"
    (place / "bundle-int4").mkdir(parents=True)
    shutil.copytree(tiny_model.draft, place / "draft")
    done = run("export", tiny_model.model, "--work", place.parent, "--layers", 2)
    one_line(done, 1, "--layers 2 names tap 2, the draft", "--layers 1, or", "distill", "--taps 2 --work '")
    assert f"train {tiny_model.model} --out '{place}/draft-2' --work '{place.parent}'" in done.err
    assert f"--draft '{place}/draft-2' --layers 2 --work '{place.parent}'\n" in done.err
    agreeing = run("export", tiny_model.model, "--work", place.parent)
    one_line(agreeing, 1, "bundle-int4 exists already")
    two = run("export", tiny_model.model, "--work", place.parent, "--m", 2)
    one_line(two, 1, "has m = 1", f"elsi-edge calibrate {tiny_model.model} --m 2 --work '{place.parent}'")
    assert not calls


def test_checks_come_with_a_verdict(
    run: Run, calls: list[dict[str, Any]], tiny_model: TinyModel, tmp_path: Path
) -> None:
    from elsi_edge.export import parity

    done = run("export", tiny_model.model, "--draft", tiny_model.draft, "--work", tmp_path)
    found = done.out[done.out.index("checked against") :].splitlines()[1:]
    limits = parity.limits("int4", "int4")
    assert limits["divergence_nats"] == parity.MAX_DIVERGENCE["int4"]
    line = next(line for line in found if "next-token distributions" in line)
    assert line.endswith(f"pass: up to {limits['divergence_nats']:g} is normal for int4")
    assert all("pass: " in line or "no limit" in line for line in found) and len(found) == 8
    assert "weights: target" not in done.out
    asked = ("--work", tmp_path / "x", "--draft-precision", "int8")
    other = run("export", tiny_model.model, "--draft", tiny_model.draft, *asked)
    assert "weights: target int4, draft int8" in other.out


def test_without_a_draft_the_bundle_is_plain_only(
    run: Run,
    calls: list[dict[str, Any]],
    tiny_model: TinyModel,
    tmp_path: Path,
) -> None:
    put_selection(tiny_model.selection, tmp_path)
    done = run("export", tiny_model.model, "--work", tmp_path)
    assert done.code == 0 and calls[0]["draft"] is None and calls[0]["out"] == tmp_path / "tiny-llama" / "plain-int4"
    assert "there is no draft yet" in done.err and "It runs with: elsi-edge generate" in done.err
    follows = done.err.splitlines()[-1]
    assert follows.startswith("Next: elsi-edge distill") and "calibrate" not in follows and "elsi-edge train" in follows
    bare = run(
        "export", tiny_model.model, "--plain-only", "--precision", "fp32", "--out", "o", "--work", tmp_path / "n"
    )
    assert bare.code == 0 and str(calls[1]["out"]) == "o" and calls[1]["settings"].precision == "fp32"
    assert "Next: elsi-edge calibrate" in bare.err and "--bundle o" in bare.err
    for name in ("bundle-int4", "bundle-int4-2"):  # bundles that are there stay
        (tmp_path / "tiny-llama" / name).mkdir()
    follows = run("export", tiny_model.model, "--work", tmp_path).err.splitlines()[-1]
    assert f"--out {tmp_path / 'tiny-llama' / 'bundle-int4-3'}" in follows and "--force" not in follows


def test_auto_calibrates_when_nothing_was_chosen(
    run: Run,
    calls: list[dict[str, Any]],
    tiny_model: TinyModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [PromptRow(id=f"p{n}", turns=(f"Say {n} words about the sea and the wind.",)) for n in range(9)]
    monkeypatch.setattr(prompts, "builtin_calibration_prompts", lambda: rows)
    done = run("export", tiny_model.model, "--work", tmp_path)
    assert done.code == 0 and "calibrating" in done.err and "warning: " in done.err and "few for states" in done.err
    found = json.loads((tmp_path / "tiny-llama" / "selection.json").read_text())
    assert found["m"] == 1 and found["prompts"] == 9 and found["target_fingerprint"]
    assert (tmp_path / "tiny-llama" / "calibration" / "report.html").is_file()


def test_the_packaged_draft_is_taken_when_it_fits(
    run: Run,
    calls: list[dict[str, Any]],
    tiny_model: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    config = load_config(tiny_model.draft)
    monkeypatch.setattr(packaged, "packaged_draft", lambda: tiny_model.draft)
    monkeypatch.setattr(packaged, "packaged_config", lambda: config)
    done = run("export", tiny_model.model, "--work", tmp_path / "a")
    assert done.code == 0 and f"draft: {tiny_model.draft}\n" in done.err and calls[0]["draft"] is not None
    monkeypatch.setattr(packaged, "packaged_config", lambda: replace(config, target_fingerprint="other"))
    assert run("export", tiny_model.model, "--work", tmp_path / "b", "--layers", "1").code == 0
    assert calls[1]["draft"] is None


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        (("--m", "0"), 2, ("--m is 0",)),
        (("--m", "3"), 2, ("--m is 3", "2 blocks")),
        (("--m", "2"), 1, ("--m is 2", "has m = 1", "tap 1")),
        (("--m", "2", "--layers", "1"), 2, ("--m is 2", "--layers 1 has m = 1")),
        (("--layers", "last"), 2, ("'last'", "auto, eagle3")),
        (("--layers", "1,7"), 2, ("taps [1, 7] must lie in 0..2, the model has 2 blocks",)),
        (("--layers", "eagle3"), 2, ("needs at least", "has 2")),
        (("--precision", "fp16"), 2, ("fp16",)),
        (("--draft", "nowhere"), 1, ("nowhere holds no draft",)),
        (("--draft", __file__), 1, ("is a file; a draft is a directory",)),
    ],
)
def test_bad_options(
    run: Run, calls: list[dict[str, Any]], tiny_model: TinyModel, arguments: tuple[str, ...], code: int,
    parts: tuple[str, ...], tmp_path: Path,
) -> None:  # fmt: skip
    draft = () if "--draft" in arguments else ("--draft", tiny_model.draft)
    done = run("export", tiny_model.model, *draft, "--work", tmp_path / "w", *arguments)
    assert (done.code, done.out) == (code, "") and not calls and not (tmp_path / "w").exists()
    last = done.err.splitlines()[-1]
    assert last.startswith("error: ") and all(part in last for part in parts), last


def test_a_context_beyond_the_model_leaves_nothing(run: Run, tiny_model: TinyModel, tmp_path: Path) -> None:
    work = tmp_path / "w"
    one_line(run("export", tiny_model.model, "--plain-only", "--context", 512, "--work", work), 2, "is 512", "256")
    one_line(run("export", "no model", "--work", work), 1, "unknown model")
    assert not work.exists()


def test_only_bundles_are_replaced(
    run: Run,
    calls: list[dict[str, Any]],
    tiny_model: TinyModel,
    tiny_bundle: Callable[..., Path],
    tmp_path: Path,
) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("x")
    arguments = ("export", tiny_model.model, "--plain-only", "--work", tmp_path / "w", "--out", precious)
    one_line(run(*arguments), 1, "exists already")
    one_line(run(*arguments, "--force"), 1, "is no bundle", "--force replaces bundles alone")
    assert (precious / "thesis.tex").is_file() and not calls
    shutil.rmtree(precious)
    shutil.copytree(tiny_bundle("int4"), precious)
    assert run(*arguments, "--force").code == 0 and calls[0]["settings"].replace is True


def test_an_interrupt_leaves_nothing(
    run: Run,
    tiny_model: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def stop(*arguments: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(builder, "build_base_graph", stop)
    out = tmp_path / "o" / "b"
    done = run("export", tiny_model.model, "--plain-only", "--out", out, "--work", tmp_path / "w")
    assert (done.code, done.out) == (130, "") and done.err.endswith("interrupted\n")
    assert list(out.parent.iterdir()) == []


def test_a_draft_of_another_target_is_refused_with_what_to_run(
    run: Run, calls: list[dict[str, Any]], tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, train: str) -> None:
        raise DraftError(f"train one for it: {train}")

    monkeypatch.setattr(pipeline, "require_same_target", refuse)
    done = run("export", tiny_model.model, "--draft", tiny_model.draft, "--work", tmp_path)
    name = f"{tiny_model.model} --work {tmp_path}"
    one_line(done, 1, f"elsi-edge distill {name} && elsi-edge train {name}")
    assert not calls


def test_a_selection_of_another_model_is_refused(
    run: Run,
    calls: list[dict[str, Any]],
    tiny_model: TinyModel,
    tmp_path: Path,
) -> None:
    put_selection(replace(tiny_model.selection, target_fingerprint="0123456789abcdef"), tmp_path)
    one_line(run("export", tiny_model.model, "--work", tmp_path), 1, "0123456789ab", "calibrate again")


def test_without_the_build_extra(run: Run, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx_ir", None)
    one_line(run("export", tiny_model.model), 1, "needs the package 'onnx_ir'", "pip install 'elsi-edge[build]'")
