"""The entropy wave as text and as a picture."""

from pathlib import Path

import pytest

from elsi_edge.artifacts import LayerSelection
from elsi_edge.calibration.chart import save_wave, wave
from elsi_edge.errors import ConfigError


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
