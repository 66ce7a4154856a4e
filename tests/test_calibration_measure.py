"""The pass on a tiny random model: interrupted and resumed, checkpoints of all kinds, stages, memory, verdicts."""

import dataclasses
import errno
import json
import math
import os
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from elsi_edge.artifacts import LayerSelection, ModelShape, PromptRow
from elsi_edge.calibration import (
    CalibrationSettings,
    analyse,
    capture,
    cost,
    measure,
    parallel,
    stability,
    stages,
    verdict,
)
from elsi_edge.calibration.analysis import Analysis, RuleResult, Search, Settling
from elsi_edge.calibration.checkpoint import Checkpoint
from elsi_edge.calibration.cka import linear_cka
from elsi_edge.calibration.rules import known_sets
from elsi_edge.calibration.search import Sets, show_pairs, show_triples, wins
from elsi_edge.calibration.settings import no_progress
from elsi_edge.calibration.statistics import NORMALISATIONS, Normalisation, centre_in_place
from elsi_edge.calibration.sums import Plan, Sums, evaluate
from elsi_edge.errors import SelectionError
from elsi_edge.models import SourceModel, resolve
from elsi_edge.processes import Alone
from tests.tiny_text import CONFIG, PAGE, llama_weights, write_model_dir

torch = pytest.importorskip("torch")

BLOCKS, WIDTH = 7, 16
SMALL: dict[str, Any] = {
    **CONFIG,
    "num_hidden_layers": BLOCKS,
    "hidden_size": WIDTH,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 24,
}
ROWS = [PromptRow(id=f"p{i}", turns=(PAGE[13 * i : 13 * i + 60 + 11 * (i % 9)],)) for i in range(18)]
QUICK = CalibrationSettings(batch_tokens=256, reservoir=64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SourceModel:
    tame = {
        name: (np.ones_like(w) if w.ndim == 1 else w / np.sqrt(w.shape[1])).astype(np.float32)
        for name, w in llama_weights(SMALL, seed=4).items()
    }
    found = resolve(str(write_model_dir(tmp_path_factory.mktemp("measure") / "tiny", config=SMALL, weights=tame)))
    assert found.fingerprint  # read once
    return found


@pytest.fixture(autouse=True)
def loaded_once(model: SourceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    if not _LOADED:
        _LOADED.append(capture.load_target(model.directory))
    monkeypatch.setattr(capture, "load_target", lambda *args, **kwargs: _LOADED[0])


_LOADED: list[Any] = []


def results(analysis: Analysis) -> str:
    """All but the seconds, as it is written; a NaN would raise."""
    return json.dumps({**analysis.to_json(), "cost": None}, allow_nan=False)


def run(model: SourceModel, settings: CalibrationSettings = QUICK, **given: Any) -> Analysis:
    return analyse(model, given.pop("rows", ROWS), settings, threads=given.pop("threads", 1), **given)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> "Batches":
    return Batches(monkeypatch)


class Batches:
    """Counts batches as they are summed up, and sets `stop` in the one that is asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen = 0
        self.last: int | None = None
        self.stop = threading.Event()
        add = Sums.add

        def counted(sums: Sums, *arguments: Any) -> None:
            add(sums, *arguments)
            self.seen += 1
            if self.seen == self.last:
                self.stop.set()

        monkeypatch.setattr(Sums, "add", counted)

    def interrupt(self, after: int) -> threading.Event:
        """An event that is set in the batch of this number from now on."""
        self.seen, self.last, self.stop = 0, after, threading.Event()
        return self.stop


# --- interrupted and resumed


@pytest.mark.parametrize("settings", [QUICK, dataclasses.replace(QUICK, normalisation="raw", m=2, until_stable=True)])
def test_interrupted_after_any_batch_and_resumed_is_uninterrupted(
    model: SourceModel, batches: Batches, tmp_path: Path, settings: CalibrationSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "STABLE_STEP", 8)
    straight = results(run(model, settings))
    total = batches.seen
    assert total >= 5
    file = tmp_path / "checkpoint"
    for after in range(1, total + 1):
        with pytest.raises(KeyboardInterrupt):
            run(model, settings, checkpoint=file, stop=batches.interrupt(after))
        assert batches.seen == after and file.is_file()
        batches.interrupt(-1)
        assert results(run(model, settings, checkpoint=file)) == straight
        assert batches.seen == total - after  # nothing is measured twice
        assert not list(tmp_path.iterdir())


def test_stopped_before_the_first_batch_runs_none(model: SourceModel, batches: Batches, tmp_path: Path) -> None:
    file, notes = tmp_path / "checkpoint", list[str]()
    stop = threading.Event()
    stop.set()
    with pytest.raises(KeyboardInterrupt):
        run(model, checkpoint=file, stop=stop, note=notes.append)
    assert (batches.seen, notes, file.exists()) == (0, ["nothing to save yet"], False)
    interrupted(model, batches, file)
    whole, notes = file.read_bytes(), []
    batches.seen = 0
    with pytest.raises(KeyboardInterrupt):
        run(model, checkpoint=file, stop=stop, note=notes.append)
    assert batches.seen == 0 and file.read_bytes() == whole and notes[0].startswith("saved up to ")


def test_an_interrupt_at_once_names_what_the_last_save_holds(
    model: SourceModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, seen, notes = Sums.add, list[int](), list[str]()

    def broken_off(sums: Sums, batch: Any, first: Any) -> None:
        if len(seen) == 3:
            raise KeyboardInterrupt
        add(sums, batch, first)
        seen.append(sum(len(prompt.entropy) for prompt in batch))

    monkeypatch.setattr(Sums, "add", broken_off)
    monkeypatch.setattr(Checkpoint, "due", property(lambda self: len(seen) == 2))
    with pytest.raises(KeyboardInterrupt):
        run(model, checkpoint=tmp_path / "checkpoint", note=notes.append)
    assert len(notes) == 1 and notes[0].startswith(f"saved up to {sum(seen[:2]):,} of ")


def test_interrupted_after_every_batch_is_uninterrupted(model: SourceModel, batches: Batches, tmp_path: Path) -> None:
    straight = results(run(model))
    total, file, interruptions = batches.seen, tmp_path / "checkpoint", 0
    while True:
        try:
            found = run(model, checkpoint=file, stop=batches.interrupt(1))
            break
        except KeyboardInterrupt:
            interruptions += 1
    assert interruptions == total and results(found) == straight


def interrupted(model: SourceModel, batches: Batches, file: Path, settings: CalibrationSettings = QUICK) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(model, settings, checkpoint=file, stop=batches.interrupt(2))
    batches.interrupt(-1)


@pytest.mark.parametrize("other", ["settings", "prompts"])
def test_checkpoint_of_other_inputs_is_ignored_with_a_note(
    model: SourceModel, batches: Batches, tmp_path: Path, other: str
) -> None:
    file, notes = tmp_path / "checkpoint", list[str]()
    settings = dataclasses.replace(QUICK, keep=0.5) if other == "settings" else QUICK
    rows = ROWS[1:] if other == "prompts" else ROWS
    interrupted(model, batches, file)
    found = run(model, settings, rows=rows, checkpoint=file, note=notes.append)
    assert len(notes) == 1 and str(file) in notes[0] and "other inputs; starting over" in notes[0]
    assert results(found) == results(run(model, settings, rows=rows))


@pytest.mark.parametrize("damage", ["cut", "empty", "not one", "header"])
def test_damaged_checkpoint_is_ignored_with_a_note(
    model: SourceModel, batches: Batches, tmp_path: Path, damage: str
) -> None:
    file, notes = tmp_path / "checkpoint", list[str]()
    interrupted(model, batches, file)
    whole = file.read_bytes()
    broken = {"cut": whole[:-500], "empty": b"", "not one": b"# notes\n" * 40, "header": whole[:8] + b"]" + whole[9:]}
    file.write_bytes(broken[damage])
    found = run(model, checkpoint=file, note=notes.append)
    assert len(notes) == 1 and str(file) in notes[0] and notes[0].endswith("starting over")
    assert results(found) == results(run(model)) and not file.exists()


def test_full_disk_while_saving_only_warns(
    model: SourceModel, batches: Batches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Checkpoint, "due", property(lambda self: True))
    monkeypatch.setattr(os, "fsync", full)
    file, notes = tmp_path / "checkpoint", list[str]()
    found = run(model, checkpoint=file, note=notes.append)
    assert notes and all(n.startswith("warning: progress is not saved: no space left while writing") for n in notes)
    assert results(found) == results(run(model))
    assert not list(tmp_path.iterdir())  # nor is anything half-written left


def test_a_folder_that_cannot_be_made_only_warns(model: SourceModel, batches: Batches, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    notes: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        place = tmp_path / "file" / "checkpoint"
        run(model, checkpoint=place, note=notes.append, stop=batches.interrupt(1))
    assert len(notes) == 1 and "progress is not saved" in notes[0]


def test_saves_are_spaced_by_what_they_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(os, "fsync", lambda descriptor: now.__setitem__(0, now[0] + 10.0))  # a slow disk
    store = Checkpoint(tmp_path / "checkpoint", {}, lambda text: None)
    assert not store.due
    now[0] = 60.0
    assert store.due and store.save({"x": np.ones(3)}, {"stage": 1})
    now[0] = 70.0 + 199.0
    assert not store.due
    now[0] = 70.0 + 200.0
    assert store.due
    assert Checkpoint(None, {}, lambda text: None).due is False


def test_checkpoint_gives_back_what_it_was_given(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    arrays: dict[str, NDArray[Any]] = {
        "double": draw.random((3, 2, 2)), "single": draw.random((5,)).astype(np.float32)[::2], "none": np.zeros((0, 2)),
        "whole": np.arange(7),
    }  # fmt: skip
    store = Checkpoint(tmp_path / "a" / "checkpoint", {"model": "x"}, lambda text: None)
    assert store.load() is None and store.save(arrays, {"stage": 2, "text": "é"})
    loaded = store.load()
    assert loaded is not None
    found, meta = loaded
    assert meta == {"stage": 2, "text": "é"} and set(found) == set(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
        found[name] += 1  # they are gone on with
    store.clear()
    assert store.load() is None
    store.clear()


# --- the same again


def test_same_inputs_same_selection_on_one_and_two_threads(model: SourceModel) -> None:
    settings = dataclasses.replace(QUICK, method="elsi-c", m=2, batch_tokens=2048, probe=False)
    one, again, two = (run(model, settings, rows=ROWS[:8], threads=n) for n in (1, 1, 2))
    assert results(one) == results(again)
    assert one.selection.taps == two.selection.taps
    np.testing.assert_allclose(two.selection.entropy, one.selection.entropy, atol=1e-5)


class Half:
    """One of two processes that run one after the other: what they exchange is kept in a list."""

    count = 2

    def __init__(self, rank: int, box: dict[str, list[Any]]) -> None:
        self.rank, self._box = rank, box

    def sums(self, arrays: Any) -> dict[str, Any]:
        mine = {name: np.array(array) for name, array in arrays.items()}
        self._box.setdefault(f"sums {self.rank}", []).append(mine)
        if self.rank:
            return mine
        other = self._box["sums 1"][len(self._box["sums 0"]) - 1]
        return {name: array + other[name] for name, array in mine.items()}

    def gathered(self, value: Any) -> list[Any]:
        mine = {name: np.array(array) for name, array in value.items()}
        self._box.setdefault(f"gathered {self.rank}", []).append(mine)
        return [mine] if self.rank else [mine, self._box["gathered 1"][len(self._box["gathered 0"]) - 1]]

    def from_first(self, value: Any) -> Any:
        return value


@pytest.mark.parametrize("given", [{}, {"method": "elsi-c", "m": 2, "normalisation": "centered"}])
def test_two_processes_are_one(model: SourceModel, given: dict[str, Any]) -> None:
    settings = dataclasses.replace(QUICK, **given)
    box: dict[str, list[Any]] = {}
    with pytest.raises(SystemExit):
        run(model, settings, group=Half(1, box))
    two, one = run(model, settings, group=Half(0, box)), run(model, settings)
    assert two.selection.taps == one.selection.taps and two.selection.tokens == one.selection.tokens
    np.testing.assert_allclose(two.selection.entropy, one.selection.entropy, atol=1e-6)
    np.testing.assert_allclose(two.selection.entropy_interval, one.selection.entropy_interval, atol=2e-4)
    assert two.cka == one.cka and two.selection.variance == one.selection.variance
    assert [s.tap for s in two.settling] == [s.tap for s in one.settling]
    np.testing.assert_allclose(two.selection.probe["agreement"], one.selection.probe["agreement"], atol=0.01)


def test_a_process_of_several_saves_nothing(model: SourceModel, batches: Batches, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(model, checkpoint=tmp_path / "checkpoint", group=Half(1, {}), stop=batches.interrupt(1))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("how", NORMALISATIONS)
def test_a_reservoir_that_holds_all_says_what_the_stream_says(model: SourceModel, how: Normalisation) -> None:
    found = run(model, dataclasses.replace(QUICK, normalisation=how, reservoir=4096, probe=False))
    assert found.cka_rows == found.selection.tokens and found.selection.settings["reservoir"] == found.cka_rows
    np.testing.assert_allclose(found.normalisations[how], found.selection.entropy, atol=2e-6)
    for rule in found.rules:
        if len(rule.taps) == 1 and rule.state == "residual":
            assert rule.joint_entropy == pytest.approx(found.selection.entropy[rule.taps[0]], abs=2e-4), rule.name


# --- stages


def test_stages_are_nested_parts_of_one_order() -> None:
    order = list(np.random.default_rng(0).permutation(256))
    for stable, sizes in ((False, [64, 64, 128]), (True, [32] * 8)):
        parts = stages.stages_of(order, CalibrationSettings(until_stable=stable))
        assert [len(stage) for stage in parts] == sizes
        assert [i for stage in parts for i in stage] == order
    for count in (1, 2, 7, 8, 15, 16, 17, 33):
        for stable in (False, True):
            parts = stages.stages_of(list(range(count)), CalibrationSettings(until_stable=stable))
            assert [i for stage in parts for i in stage] == list(range(count)) and all(parts)


def look(tap: int, share: float, prompts: int = 32) -> Settling:
    entropy = tuple(float(t == tap) for t in range(5))
    return Settling(prompts=prompts, tokens=100, tap=tap, entropy=entropy, win_share=share)


@pytest.mark.parametrize(
    ("looks", "prompts", "stable"),
    [
        ([look(3, 1.0)], 32, False),
        ([look(3, 0.1), look(3, 0.8)], 64, True),
        ([look(3, 1.0), look(3, 0.79)], 64, False),
        ([look(2, 1.0), look(3, 1.0)], 64, False),
        ([look(2, 1.0), look(3, 1.0), look(3, 0.9)], 96, True),
        ([look(3, 1.0), look(3, 1.0)], 7, False),
    ],
)
def test_stable_is_half_the_same_pick_and_most_resamples(looks: list[Settling], prompts: int, stable: bool) -> None:
    doubled = [dataclasses.replace(each, tokens=100 * 2**number) for number, each in enumerate(looks)]
    assert measure._stable(doubled, prompts) is stable


def planted_states(monkeypatch: pytest.MonkeyPatch, rich: int | None) -> None:
    """Replace the model's states by noise: all taps alike, or one much richer than the others."""

    def captured(
        target: Any, prompts: Sequence[Sequence[int]], *, blocks: int, batches: Sequence[Sequence[int]]
    ) -> Iterator[capture.PromptStates]:
        for index in (i for batch in batches for i in batch):
            draw = np.random.default_rng(index)
            length = len(prompts[index])
            states = draw.normal(size=(blocks + 1, length, WIDTH)).astype(np.float32)
            if rich is not None:
                states[np.arange(blocks + 1) != rich, :, WIDTH // 4 :] *= 0.1
            yield capture.PromptStates(
                index=index,
                states=states,
                final_norm=states[-1],
                entropy=draw.random(length).astype(np.float32),
                argmax=draw.integers(0, 300, size=length),
            )

    monkeypatch.setattr(capture, "capture", captured)


def test_until_stable_stops_early_on_an_easy_case(model: SourceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "STABLE_STEP", 8)
    planted_states(monkeypatch, rich=5)
    rows = [dataclasses.replace(ROWS[i % len(ROWS)], id=f"q{i}") for i in range(60)]
    found = run(model, dataclasses.replace(QUICK, until_stable=True), rows=rows)
    assert found.selection.taps == (5,) and found.selection.prompts == 16
    assert [s.prompts for s in found.settling] == [8, 16] and found.selection.stability["stable"]
    assert "is stable" in found.selection.stability["text"]
    assert found.selection.stability["wins"][5] == 1.0
    whole = run(model, QUICK, rows=rows)
    assert whole.selection.prompts == 60 and whole.selection.taps == (5,)


def test_until_stable_uses_all_prompts_when_it_never_is(model: SourceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "STABLE_STEP", 8)
    planted_states(monkeypatch, rich=None)
    monkeypatch.setattr(stability, "STABLE_SHARE", 0.97)
    found = run(model, dataclasses.replace(QUICK, until_stable=True))
    assert found.selection.prompts == 18 and [s.prompts for s in found.settling] == [8, 16, 18]
    assert not found.selection.stability["stable"]


def test_probe_foresees_nothing_in_noise(model: SourceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    planted_states(monkeypatch, rich=None)
    probe = run(model).selection.probe
    assert max(probe["agreement"]) < 0.1 and len(probe["agreement"]) == BLOCKS + 1


# --- what cannot be measured, and little to measure


def spoiled(monkeypatch: pytest.MonkeyPatch, change: Callable[[NDArray[np.float32], int], None]) -> None:
    """States of planted noise after `change(states, prompt)`."""
    planted_states(monkeypatch, rich=None)
    plain = capture.capture

    def changed(*args: Any, **kwargs: Any) -> Iterator[capture.PromptStates]:
        for prompt in plain(*args, **kwargs):
            change(prompt.states, prompt.index)
            yield prompt

    monkeypatch.setattr(capture, "capture", changed)


@pytest.mark.parametrize(("value", "message"), [(np.nan, "tap 3 has NaN"), (np.inf, "tap 3 has NaN or infinite")])
def test_not_finite_states_name_the_tap(
    model: SourceModel, monkeypatch: pytest.MonkeyPatch, value: float, message: str
) -> None:
    def change(states: NDArray[np.float32], prompt: int) -> None:
        if prompt == 11:
            states[3, 8:, 2] = value

    spoiled(monkeypatch, change)
    with pytest.raises(SelectionError, match=message):
        run(model)


def test_not_finite_states_that_the_filter_would_pass_over_name_the_tap(
    model: SourceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted_states(monkeypatch, rich=None)
    plain, only_predictions = capture.capture, False

    def changed(*args: Any, **kwargs: Any) -> Iterator[capture.PromptStates]:
        for prompt in plain(*args, **kwargs):
            if prompt.index == 11:
                prompt.entropy[-2:] = np.nan
                if not only_predictions:
                    prompt.states[6:, -2:] = np.nan
            yield prompt

    monkeypatch.setattr(capture, "capture", changed)
    with pytest.raises(SelectionError, match=r"^tap 6 has NaN or infinite states"):
        run(model)
    only_predictions = True
    with pytest.raises(SelectionError, match=r"^the model's predictions are NaN"):
        run(model)


@pytest.mark.parametrize("constant", [0.0, 7.0])
def test_constant_tap_is_named(model: SourceModel, monkeypatch: pytest.MonkeyPatch, constant: float) -> None:
    spoiled(monkeypatch, lambda states, prompt: states[4].fill(constant))
    with pytest.raises(SelectionError, match=r"^tap 4 is constant over the"):
        run(model)


def test_massive_activation_does_not_change_the_default_pick_and_wrecks_raw(
    model: SourceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(states: NDArray[np.float32], prompt: int) -> None:
        states[np.arange(BLOCKS + 1) != 5, :, WIDTH // 2 :] *= 0.1  # tap 5 is the richest
        states[4:, :, WIDTH // 2 :] *= 0.9
        if massive and prompt == 3:
            states[4:, 1, 6] = 25_000.0

    spoiled(monkeypatch, change)
    picks = {}
    for massive in (False, True):
        for how in ("unit", "centered", "raw"):
            settings = dataclasses.replace(QUICK, normalisation=how, skip=0, keep=1.0, probe=False)
            monkeypatch.setattr("elsi_edge.calibration.rendering._common_head", lambda codec, context: 0)
            found = run(model, settings).selection
            picks[how, massive] = found.taps
            if massive and how != "unit":
                assert max(found.entropy[4:]) < 0.1 < 1.0 < found.entropy[1]  # one coordinate is all there is
    assert picks["unit", True] == picks["unit", False] == picks["raw", False] == picks["centered", False] == (5,)
    assert picks["raw", True] != (5,) and picks["centered", True] != (5,)


def test_first_prompts_without_positions_do_not_end_the_run(model: SourceModel) -> None:
    order = np.random.default_rng([0, 0]).permutation(16)
    rows = [dataclasses.replace(row, id=f"r{i}") for i, row in enumerate(ROWS[:16])]
    for place in order[:8]:  # those of the first stage are over before anything counts
        rows[place] = PromptRow(id=f"r{place}", turns=("a",))
    found = run(model, dataclasses.replace(QUICK, skip=24), rows=rows)
    assert [s.prompts for s in found.settling] == [16] and found.selection.prompts == 16
    assert found.selection.tokens > 0


def test_three_short_prompts(model: SourceModel) -> None:
    rows = [PromptRow(id=str(k), turns=(text,)) for k, text in enumerate(("The mill.", "Blue ice, in March", "A rope"))]
    for debiased in (False, True):
        found = run(model, CalibrationSettings(debiased_cka=debiased, keep=1.0), rows=rows)
        assert results(found)  # no NaN
        assert found.selection.prompts == 3 and not found.selection.stability["stable"]
        assert "3 prompts are too few" in found.selection.stability["text"]
        assert any("few for states of width" in warning for warning in found.selection.settings["warnings"])
        assert found.cka_rows == found.selection.tokens
        values = np.array(found.cka, np.float64)
        assert np.isfinite(values).all() and values.min() >= 0.0 and values.max() <= 1.0
        for low, high in found.selection.entropy_interval:
            assert low < high


@pytest.mark.parametrize(("settings", "tokens"), [({}, 2), ({"keep": 1.0}, 4)])
def test_one_prompt(model: SourceModel, settings: dict[str, Any], tokens: int) -> None:
    found = run(model, CalibrationSettings(**settings), rows=ROWS[:1])
    assert results(found) and found.selection.tokens >= tokens
    assert found.selection.variance == {} and "agreement" not in found.selection.probe  # nothing held out
    assert found.selection.probe["text"] == "Probe: not scored: 0 held-out positions, 50 needed; give more prompts."
    assert "1 prompts are too few" in found.selection.stability["text"]


def test_shorter_prompts_than_the_skip_are_passed_over(model: SourceModel) -> None:
    rows = [*ROWS, PromptRow(id="short", turns=("a",))]
    settings = dataclasses.replace(QUICK, skip=20)
    with_short, without = run(model, settings, rows=rows), run(model, settings)
    assert with_short.selection.tokens == without.selection.tokens
    assert with_short.selection.prompts == len(rows)
    np.testing.assert_allclose(with_short.selection.entropy, without.selection.entropy, atol=1e-6)


def test_eagle2_is_probed_on_the_state_after_the_final_norm(model: SourceModel) -> None:
    found = run(model, dataclasses.replace(QUICK, method="eagle2"))
    chosen = [rule for rule in found.rules if rule.chosen]
    assert [rule.state for rule in chosen] == ["final-norm"]
    assert chosen[0].probe == found.selection.probe["final_norm"]
    text = found.selection.probe["text"]
    assert f"the state after the final norm foresees the target's next token in {chosen[0].probe:.3f}" in text


@pytest.mark.parametrize(
    "settings",
    [{}, {"m": 2}, {"m": 3}, {"method": "elsi-c", "m": 2}, {"method": "elsi-c", "m": 3}, {"method": "uniform", "m": 2},
     {"method": "low-entropy", "m": 1}, {"method": "eagle3"}, {"method": "explicit", "taps": (1, 6)}],
)  # fmt: skip
def test_the_chosen_set_stands_in_the_table_of_rules(model: SourceModel, settings: dict[str, Any]) -> None:
    found = run(model, dataclasses.replace(QUICK, probe=False, **settings))
    chosen = [rule for rule in found.rules if rule.chosen]
    assert chosen and all(rule.taps == found.selection.taps for rule in chosen)
    assert len({rule.name for rule in found.rules}) == len(found.rules)


def test_random_control_has_the_filters_count(model: SourceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, NDArray[np.intp]]] = []
    positions = Sums._positions

    def kept(sums: Sums, *arguments: Any) -> Any:
        seen.append(positions(sums, *arguments))
        return seen[-1]

    monkeypatch.setattr(Sums, "_positions", kept)
    run(model, dataclasses.replace(QUICK, probe=False))
    assert len(seen) == len(ROWS)
    for chosen in seen:
        assert len(chosen["random"]) == len(chosen["filtered"]) < len(chosen["unfiltered"])
        for name, rows in chosen.items():
            assert len(set(rows.tolist())) == len(rows) and rows.tolist() == sorted(rows.tolist()), name
            assert set(rows.tolist()) <= set(chosen["unfiltered"].tolist()), name
        count = 16 if len(chosen["unfiltered"]) >= 32 else 0
        assert len(chosen["equal_filtered"]) == len(chosen["equal_random"]) == count
    assert any(len(chosen["equal_random"]) for chosen in seen)
    assert any(chosen["random"].tolist() != chosen["filtered"].tolist() for chosen in seen)


# --- memory


@pytest.mark.parametrize(("blocks", "width", "reservoir"), [(9, 96, 512), (12, 160, 256)])
def test_memory_is_what_the_formula_says(blocks: int, width: int, reservoir: int) -> None:
    shape = ModelShape(
        family="llama", blocks=blocks, width=width, heads=4, kv_heads=2, head_width=8, mlp_width=64, vocab_size=500,
        context=512, tied_embeddings=True, rope_theta=1e4, norm_eps=1e-5,
    )  # fmt: skip
    settings = CalibrationSettings(reservoir=reservoir)
    sets = tuple(taps for _, taps in known_sets(settings, blocks))
    plan = Plan(blocks=blocks, width=width, vocab_size=500, sets=sets, held_out=frozenset())
    length, prompts = 200, 12
    first = [4] * prompts

    def batch(index: int) -> capture.PromptStates:
        draw = np.random.default_rng(index)
        states = draw.standard_normal((blocks + 1, length, width), np.float32)
        return capture.PromptStates(
            index=index, states=states, final_norm=states[-1], entropy=draw.random(length, np.float32),
            argmax=draw.integers(0, 500, size=length),
        )  # fmt: skip

    with parallel.threads(1):
        tracemalloc.start()
        try:
            sums = Sums(plan, settings, prompts)
            for index in range(prompts):
                sums.add([batch(index)], first)
            streaming = tracemalloc.get_traced_memory()[1]
            tracemalloc.reset_peak()
            evaluate(sums)
            sample = sums.reservoir.sample()
            centre_in_place(sample.states, "unit")
            linear_cka(sample.states)
            linear_cka(sample.states[:, np.sort(sample.order[: reservoir // 2])])
            found = Sets(sample.states, sample.order, blocks)
            found.gains()
            close = show_triples(found, show_pairs(found).search.best).close
            wins(found, close, np.array([prompt for prompt, _ in sample.where]), seed=0)
            choosing = tracemalloc.get_traced_memory()[1]
            del found, sample
            tracemalloc.reset_peak()
            if sums.probe is not None:
                solved = [(), *((t,) for t in range(blocks + 2)), *plan.sets]
                weights = [sums.probe.solve(members) for members in solved]
                assert len(weights) == len(solved)
            probing = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    stated = cost.statistics_bytes(shape, settings, threads=1)
    peak = max(choosing, probing)
    assert max(streaming - cost.batch_bytes(shape, length), peak) < 1.15 * stated, (streaming, peak, stated)
    assert peak > 0.75 * stated  # and it is no tale of caution either


# --- verdicts


def selection_with(regions: tuple[tuple[int, int], ...], **given: Any) -> LayerSelection:
    return LayerSelection(taps=(5,), method="elsi", blocks=30, width=576, compartments=regions, **given)


def said(selection: LayerSelection, searches: Sequence[Search] = (), *, rows: int = 2048) -> str:
    rules = [RuleResult(name="elsi m = 1", taps=(5,), joint_entropy=5.0, mean_cka=0.0)]
    return "\n".join(verdict.verdict(selection, rules, searches, rows=rows, width=576))


def searched(m: int, best: float) -> Search:
    return Search(
        m=m, greedy=tuple(range(1, m + 1)), greedy_entropy=best, best=tuple(range(1, m + 1)), best_entropy=best,
        compared=9, total=9, rows=2048, half_entropy=best,
    )  # fmt: skip


def test_one_region_is_the_papers_llama_case() -> None:
    text = said(selection_with(((0, 30),)))
    assert "one broad region of high CKA" in text and "any spread of layers will do" in text


def test_many_compartments_are_named() -> None:
    text = said(selection_with(((0, 4), (5, 5), (6, 17), (18, 30))))
    assert "4 compartments" in text and "0-4, 5, 6-17, 18-30" in text and "broad region" not in text


def test_one_wide_compartment_among_several_is_said() -> None:
    text = said(selection_with(((0, 1), (2, 29), (30, 30))))
    assert "3 compartments" in text and "holds most taps" in text


def test_what_m_buys_is_measured_on_the_same_rows() -> None:
    # single taps hold 5.4 nats on all positions, but 5.0 on those that sets were measured on
    selection = selection_with(((0, 30),), entropy=(1.0, *[5.4] * 30))
    quick = dataclasses.replace(searched(2, 5.5), quick=True)
    assert "elsi m = 2 [1, 2] (quick search) adds 0.50 nats" in said(selection, [quick])
    text = said(selection, [searched(2, 5.5), searched(3, 5.55)])
    assert "5.00" in text and "m = 2 [1, 2] adds 0.50 nats (10%)" in text
    assert "m = 3 [1, 2, 3] adds 0.05 nats (little)" in text
    assert "m = 2 [1, 2] adds nothing" in said(selection, [searched(2, 4.99)])


def test_flag_and_few_rows_are_part_of_the_verdict() -> None:
    flagged = selection_with(((0, 30),), probe={"text": "FLAGGED: tap 9", "flagged": True})
    assert "FLAGGED: tap 9" in said(flagged)
    few = said(flagged, rows=575)
    assert "fewer than the width 576" in few and "Too few positions" in few and "any spread of layers" not in few
    assert "fewer than the width" not in said(flagged, rows=576)
    other = dataclasses.replace(flagged, method="elsi-c", taps=(5, 9))
    rules = [RuleResult(name="elsi m = 1", taps=(5,), joint_entropy=5.0, mean_cka=0.0),
             RuleResult(name="elsi-c m = 2", taps=(5, 9), joint_entropy=5.3, mean_cka=0.4, chosen=True)]  # fmt: skip
    lines = verdict.verdict(other, rules, [], rows=2048, width=576)
    assert any("The chosen set [5, 9] (elsi-c) holds 5.30 nats" in line for line in lines)
    stable = selection_with(((0, 30),), stability={"text": "The pick is stable.", "stable": True})
    assert "The pick is stable." in said(stable)
    assert said(selection_with(())) == ""


def test_alone_gives_back_what_it_is_given() -> None:
    group = Alone()
    assert (group.rank, group.count) == (0, 1)
    assert group.gathered(3) == [3] and group.from_first(4) == 4
    with no_progress("x", None, "y") as bar:
        bar.advance(math.inf)
