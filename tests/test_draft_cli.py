"""The verbs `distill` and `train` on the toy target, through the real command line."""

import json
import shutil
from pathlib import Path

import pytest

import elsi_edge.cli
from elsi_edge.errors import BundleError
from elsi_edge.models import SourceModel
from tests import draft_toy as toy


@pytest.fixture(autouse=True)
def _toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = toy.write_model(tmp_path / "model")
    source = SourceModel(reference="toy", directory=directory, slug="toy", shape=toy.SHAPE)
    source.__dict__["fingerprint"] = "toy"  # cached_property
    (tmp_path / "work" / "toy" / "plain-int4").mkdir(parents=True)
    (tmp_path / "work" / "toy" / "plain-int4" / "manifest.json").touch()
    rows = [{"id": row.id, "turns": list(row.turns)} for row in toy.prompts(20)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ELSI_EDGE_WORK", "work")
    monkeypatch.setattr("elsi_edge.models.resolve", lambda _: source)
    monkeypatch.setattr("elsi_edge.runtime.target_runner.open_target_runner", lambda *_: toy.ToyRunner())
    monkeypatch.setattr("elsi_edge.text.TextCodec.open", lambda _: toy.ToyCodec())


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        elsi_edge.cli.main(arguments)
    return int(stop.value.code or 0)


DISTILL = ("distill", "toy", "--prompts", "prompts.jsonl", "--max-tokens", "24")
TRAIN = ("train", "toy", "--steps", "3", "--draft-vocab", "48", "--threads", "1")


def test_distill_then_train(capfd: pytest.CaptureFixture[str]) -> None:
    assert call(*DISTILL, "--taps", "1,3", "--json") == 0
    done = capfd.readouterr()
    result = json.loads(done.out.splitlines()[-1])
    assert (result["rows"], result["taps"]) == (20, [1, 3])
    assert "Next: elsi-edge train toy" in done.err
    assert call(*TRAIN, "--json") == 0
    done = capfd.readouterr()
    result = json.loads(done.out.splitlines()[-1])
    assert result["settings"]["steps"] == 3 and len(result["agreement"]) == 4
    assert set(result["tau"]) == {"chain-2", "chain-4", "tree-30", "tree-60"}
    assert result["size"]["parameters_projection"] == 2 * toy.E * toy.E
    assert "Next: elsi-edge export toy" in done.err
    assert call(*TRAIN) == 0
    out = capfd.readouterr().out
    assert "tokens per verification" in out and "by replay of" in out and "at int4" in out


def test_the_selection_of_the_work_directory(capfd: pytest.CaptureFixture[str]) -> None:
    assert call(*DISTILL) == 1
    assert "elsi-edge calibrate toy" in capfd.readouterr().err
    Path("work/toy/selection.json").write_text(json.dumps(toy.selection(2).to_json()))
    assert call(*DISTILL) == 0
    assert "tap 2" in capfd.readouterr().out


def test_commands_that_come_next_can_be_run_as_printed(capfd: pytest.CaptureFixture[str]) -> None:
    shutil.copytree("work/toy", "w w/toy")
    assert call(*DISTILL, "--work", "w w") == 1
    assert "elsi-edge calibrate toy --work 'w w'\n" in capfd.readouterr().err
    assert call(*TRAIN, "--shards", "s", "--work", "w w") == 1
    assert "elsi-edge distill toy --out s --work 'w w'\n" in capfd.readouterr().err
    assert call(*DISTILL, "--taps", "1", "--work", "w w") == 0
    assert "Next: elsi-edge train toy --work 'w w'\n" in capfd.readouterr().err
    Path("w w/toy/selection.json").write_text(json.dumps(toy.selection(2).to_json()))
    assert call(*TRAIN, "--work", "w w") == 0  # on tap 1, while `export` would take the selection's tap 2
    assert "Next: elsi-edge export toy --layers 1 --work 'w w'\n" in capfd.readouterr().err
    Path("w w/toy/plain-int4").rename("w w/toy/plain-int8")
    assert call(*DISTILL, "--taps", "2", "--work", "w w") == 1
    missing = capfd.readouterr().err
    assert "elsi-edge export toy --plain-only --work 'w w', or give" in missing
    assert "--bundle 'w w/toy/plain-int8'\n" in missing


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((*DISTILL, "--taps", "x"), 2, "neither 'auto' nor a list"),
        ((*DISTILL, "--taps", "9"), 2, "must lie in 0..4"),
        ((*DISTILL, "--taps", "2", "--temperature", "hot"), 2, "not a list of numbers"),
        ((*DISTILL, "--taps", "2", "--bundle", "nowhere"), 1, "elsi-edge export toy --plain-only"),
        (TRAIN, 1, "elsi-edge distill toy\n"),
        ((*TRAIN, "--unroll", "9"), 2, "unroll"),
        ((*TRAIN, "--depth", "3"), 2, "depth"),
        ((*TRAIN, "--optimiser", "sgd"), 2, "optimiser"),
        ((*TRAIN, "--step-weights", "1,x,1"), 2, "--step-weights '1,x,1' is not a list"),
        ((*TRAIN, "--step-weights", "1,1"), 2, "must be 3 numbers"),
        ((*TRAIN, "--taps", "last"), 2, "'final-norm' nor a list"),
    ],
)
def test_bad_usage_is_one_line(
    arguments: tuple[str, ...], code: int, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert call(*arguments) == code
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and message in lines[0] + "\n"


def test_a_bundle_of_another_model_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("elsi_edge.runtime.target_runner.open_target_runner", lambda *_: toy.ToyRunner("else"))
    assert call(*DISTILL, "--taps", "2") == BundleError.exit_code
    assert "exported from the model else" in capfd.readouterr().err
