"""The entropy wave as text and as a picture."""

from dataclasses import replace
from pathlib import Path

import pytest

from elsi_edge.artifacts import LayerSelection
from elsi_edge.calibration.chart import save_wave, summary, wave
from elsi_edge.errors import ConfigError
from tests.analysis_fixture import empty_analysis, make_analysis


def selection(blocks: int, taps: tuple[int, ...]) -> LayerSelection:
    entropy = tuple(4.0 + (tap % 7) / 10 + (1.0 if tap in taps else 0.0) for tap in range(blocks + 1))
    return LayerSelection(taps=taps, method="elsi", entropy=entropy, blocks=blocks, width=8, model="a/b")


@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize(("blocks", "tap"), [(2, 1), (30, 27), (36, 3), (60, 41), (126, 100)])
def test_wave_fits_and_marks_the_pick(blocks: int, tap: int, ascii_only: bool) -> None:
    text = wave(selection(blocks, (tap,)), width=80, ascii_only=ascii_only)
    lines = text.splitlines()
    assert len(lines) == 10 and max(map(len, lines)) <= 80
    assert text.isascii() == ascii_only
    assert lines[-2].count("^") == 1
    column = lines[-2].index("^")
    assert lines[0][column] in "█#" and lines[0].count(lines[0][column]) == 1  # the highest bar is the one marked
    if blocks == 30:
        assert "0         5         10" in lines[-1]
        assert lines[-1].index("25") + 2 * (27 - 25) == column


def test_flat_and_unmeasured_curves(tmp_path: Path) -> None:
    flat = LayerSelection(taps=(1,), method="elsi", entropy=(2.0, 2.0, 2.0), blocks=2)
    assert "^" in wave(flat)
    unmeasured = LayerSelection(taps=(1,), method="explicit", blocks=2)
    for draw in (lambda: wave(unmeasured), lambda: save_wave(unmeasured, tmp_path / "a.png")):
        with pytest.raises(ConfigError, match="no measured entropies"):
            draw()


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_picture_is_the_same_each_time(tmp_path: Path, suffix: str) -> None:
    files = [tmp_path / f"{name}{suffix}" for name in "ab"]
    for file in files:
        save_wave(selection(30, (2, 15, 27)), file)
    assert files[0].read_bytes() == files[1].read_bytes()
    with pytest.raises(ConfigError, match=r"\.png or \.svg"):
        save_wave(selection(30, (2,)), tmp_path / "a.gif")
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"a{suffix}", f"b{suffix}"]


def test_picture_with_intervals_differs(tmp_path: Path) -> None:
    full = make_analysis(30).selection
    bare = replace(full, entropy_interval=())
    for name, chosen in (("with", full), ("without", bare)):
        save_wave(chosen, tmp_path / f"{name}.svg")
    texts = [(tmp_path / f"{name}.svg").read_text(encoding="utf-8") for name in ("with", "without")]
    assert ["95 % interval" in text for text in texts] == [True, False]
    assert all("after the final norm" in text and "smollm2-135m-instruct: elsi, tap 27" in text for text in texts)


@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize(("blocks", "width"), [(30, 80), (126, 80), (30, 40), (8, 20)])
def test_summary_fits_and_tells_the_pick(blocks: int, width: int, ascii_only: bool) -> None:
    analysis = make_analysis(blocks)
    text = summary(analysis, width, ascii_only)
    lines = text.splitlines()
    assert len(lines) <= (45 if width == 80 else 70) and max(map(len, lines)) <= width
    assert text.isascii() == ascii_only
    assert wave(analysis.selection, width=width, ascii_only=ascii_only) in text
    words = " ".join(text.split())
    assert f"Pick (elsi, m = 1): tap {analysis.selection.taps[0]}, {analysis.selection.joint_entropy:.3f} nats" in words
    if width == 80:
        assert all(f"- {sentence}" in words for sentence in analysis.verdict)
        assert all(rule.name in words and f"{rule.joint_entropy:.3f}" in words for rule in analysis.rules)
        starred = [line for line in lines if line.startswith("* ")]
        assert len(starred) == 1 and starred[0].split()[1:5] == ["elsi", "m", "=", "1"]


def test_summary_is_cut_to_its_lines() -> None:
    full = make_analysis(30)
    rules = tuple(replace(full.rules[-1], name=f"rule {n}") for n in range(40))
    long = replace(full, verdict=("An ample sentence of the verdict. " * 60,), rules=(*rules, full.rules[0]))
    text = summary(long, 80)
    assert len(text.splitlines()) <= 35 and " ..." in text
    assert "* elsi m = 1" in text  # the chosen rule, last in the list, is not cut off
    bare = summary(empty_analysis(), 80).splitlines()
    assert len(bare) == 13 and bare[-2].startswith("Pick (elsi, m = 1): tap 27")


def test_summary_without_values_and_with_foreign_letters() -> None:
    full = make_analysis(30)
    rule = replace(full.rules[0], name="élan", joint_entropy=float("nan"))
    text = summary(replace(full, rules=(rule,)), 80, True)
    assert text.isascii() and "nan" not in text.split()
    holed = replace(full.selection, entropy=(float("nan"), *full.selection.entropy[1:]))
    assert len(wave(holed).splitlines()) == 10
