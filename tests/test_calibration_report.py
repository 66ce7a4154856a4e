"""The report: the page, its pictures and its numbers."""

import io
import json
import re
import struct
import time
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatch
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elsi_edge.calibration import plots
from elsi_edge.calibration.analysis import Analysis
from elsi_edge.calibration.report import CONTENTS, SOURCES, render, write_report
from tests.analysis_fixture import empty_analysis, make_analysis

VOID = {"meta", "img", "br", "link", "hr", "input"}
FILES = {"report.html", "calibration.json", *(f"{name}.png" for name in plots.FIGURES)}


class Page(HTMLParser):
    """Text, images, links and table cells of a page; raises where tags do not pair."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.tags: set[str] = set()
        self.cells: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.add(tag)
        self.ids += [value for value in [found.get("id")] if value]
        self.links += [value for name, value in attrs if name in ("href", "src", "action", "poster") and value]
        if tag == "img":
            self.images.append(found)
        if tag not in VOID:
            self.open.append(tag)
            self.cells += [""] * (tag in ("td", "th"))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes <{self.open[-1:]}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(make_analysis(30), tmp_path_factory.mktemp("report")).parent


@pytest.fixture(scope="module")
def page(written: Path) -> Page:
    return Page((written / "report.html").read_text(encoding="utf-8"))


def test_files_are_whole_and_the_same_each_time(written: Path, tmp_path: Path) -> None:
    again = tmp_path / "a" / "b"
    assert write_report(make_analysis(30), again) == again / "report.html"
    assert {path.name for path in again.iterdir()} == FILES  # no temporary is left
    for name in FILES:
        assert (written / name).read_bytes() == (again / name).read_bytes(), name
    for name in plots.FIGURES:
        data = (written / f"{name}.png").read_bytes()
        width, height = struct.unpack(">II", data[16:24])
        assert data.startswith(b"\x89PNG\r\n\x1a\n") and data.endswith(b"IEND\xaeB`\x82")
        assert (width, height) == (1050, round(150 * plots.FIGURES[name].height))
        assert _decoded(data).std() > 1.0  # something is drawn


def _decoded(png: bytes) -> Any:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"), np.float64)


def test_json_holds_the_analysis(written: Path) -> None:
    value = json.loads((written / "calibration.json").read_text(encoding="utf-8"))
    assert value == make_analysis(30).to_json()
    again = Analysis.from_json(value, "calibration.json")
    files = {name: (written / f"{name}.png").read_bytes() for name in plots.FIGURES}
    assert render(again, files) == (written / "report.html").read_text(encoding="utf-8")


def test_page_tells_pick_and_verdict_first(page: Page) -> None:
    analysis = make_analysis(30)
    places = [page.text.index("Tap 27, chosen by elsi with m = 1: 5.742 nats")]
    places += [page.text.index(sentence) for sentence in analysis.verdict]
    places += [page.text.index(sentence) for sentence in ("Warnings 18204 kept", "Rules side by side")]
    assert places == sorted(places)
    assert "the prompts and the target's own answers" in page.text and "612 MB" in page.text
    assert "2 min 12 s (forward 61.4 s, statistics 9.8 s, sets 3.1 s, probe 58.2 s)" in page.text
    assert "fall in compartments 1, 2, 3, so none is left out" in page.text
    assert [anchor for anchor, _ in CONTENTS] == [name for name in page.ids if name in dict(CONTENTS)]


def _values(analysis: Analysis) -> Iterator[str]:
    selection = analysis.selection
    yield from (f"{value:.3f}" for value in (*selection.entropy, analysis.final_norm_entropy))
    yield from (f"{end:.3f}" for ends in selection.entropy_interval for end in ends)
    for rule in analysis.rules:
        yield from (rule.name, f"{rule.joint_entropy:.3f}")
        if len(rule.taps) > 1:
            yield from (", ".join(map(str, rule.taps)), f"{rule.mean_cka:.3f}", f"3 x 576 = {3 * 576:,}")
        if rule.probe is not None:
            yield f"{rule.probe:.1%}"
    yield from (f"{share:.1%}" for share in selection.stability["wins"] if share)
    yield from (f"{entry['share']:.1%}" for entry in selection.stability["sets"])
    yield from (f"{share:.1%}" for share in selection.probe["agreement"])
    yield from (f"{rho:+.2f}" for rho in selection.probe["rank_correlation"].values())
    for band in selection.variance["bands"]:
        yield from (f"{band[name]:.4f}" for name in ("unfiltered", "filtered", "random"))
        yield from (f"{-band[name]:+.1%}" for name in ("reduction", "reduction_random", "paper"))
    yield from (f"{value:.4f}" for values in selection.variance["by_tap"].values() for value in values)
    yield from (f"{rho:+.2f}" for rho in selection.variance["order"].values())
    for step in analysis.settling:
        yield from (str(step.prompts), f"{step.tokens:,}", f"{step.entropy[step.tap]:.3f}", f"{step.win_share:.1%}")
    for search in analysis.searches:
        yield from (
            f"{search.best_entropy:.4f}",
            f"{search.half_entropy:.4f}",
            f"{search.compared:,} of {search.total:,}, a quick search",
        )
        yield ", ".join(map(str, search.best))
    yield from (f"{value:.3f}" for values in analysis.normalisations.values() for value in values)
    yield from (f"{value:.2f}" for rows in (analysis.cka, analysis.gains) for row in rows for value in row if value)


def test_page_holds_every_number(page: Page) -> None:
    cells = set(page.cells)
    missing = [value for value in _values(make_analysis(30)) if value not in cells]
    assert not missing
    assert {"0.30", "ab" * 32, "cd" * 32, "unit", "24", "chat"} <= cells


def test_page_needs_nothing_from_outside(page: Page) -> None:
    assert not {"script", "link", "iframe", "object"} & page.tags
    outside = [link for link in page.links if not link.startswith(("#", "data:image/png;base64,"))]
    assert outside == [*(link for _, link in SOURCES if link), "calibration.json"]
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert len(page.images) == len(plots.FIGURES)
    for image in page.images:
        assert len(image["alt"] or "") > 40 and image["width"] and image["height"]


def test_what_users_write_is_escaped() -> None:
    evil = "<script>alert(1)</script>\"'&$x^"
    full = make_analysis(30, model=evil)
    bad = {"text": evil, "name": evil}
    analysis = replace(
        full,
        verdict=(evil,),
        rules=(replace(full.rules[0], name=evil),),
        cost={evil: 1.0},
        selection=replace(
            full.selection,
            settings={**full.selection.settings, "warnings": [evil], evil: evil},
            stability={**full.selection.stability, "text": evil},
            probe={**full.selection.probe, "text": evil, "sets": [{**bad, "taps": [1], "agreement": 0.1}]},
            variance={**full.selection.variance, "text": evil},
        ),
    )
    text = render(analysis, {"entropy-wave": plots.pictures(empty_analysis())["entropy-wave"]})
    found = Page(text)
    assert "script" not in found.tags and "<script" not in text
    assert found.text.count(evil) >= 9


def test_a_run_with_every_option_off(tmp_path: Path) -> None:
    for name in plots.FIGURES:
        (tmp_path / f"{name}.png").write_bytes(b"of an earlier run")
    (tmp_path / "mine.png").touch()
    path = write_report(empty_analysis(), tmp_path)
    found = Page(path.read_text(encoding="utf-8"))
    assert found.text.count("not part of this run") == 7
    assert len(found.images) == 1
    # Pictures of the run before are gone, other files are not.
    assert {p.name for p in tmp_path.iterdir()} == {"report.html", "calibration.json", "entropy-wave.png", "mine.png"}
    assert "None" not in found.text and "nan" not in found.text


def test_values_that_were_not_measured() -> None:
    """A hole in every row: drawn as a gap, written as "-", never as NaN or None."""
    full = make_analysis(8)
    selection = full.selection
    probe, variance = dict(selection.probe), dict(selection.variance)
    probe |= {"agreement": [None, *probe["agreement"][1:]], "none": None, "final_norm": None, "standard_error": None}
    probe |= {
        "best_tap": None,
        "rank_correlation": {"unit": None},
        "sets": [{"name": "a", "taps": [3], "agreement": None}],
    }
    variance["by_tap"] = {name: [None, *row[1:]] for name, row in variance["by_tap"].items()}
    variance["bands"] = [{**band, "filtered": None, "reduction": None} for band in variance["bands"]]
    variance["order"] = {"filtered": None}
    nan = float("nan")
    analysis = replace(
        full,
        selection=replace(
            selection,
            entropy=(nan, nan, *selection.entropy[2:]),
            entropy_interval=((nan, nan), *selection.entropy_interval[1:]),
            joint_entropy=None,
            stability={"wins": [None, *selection.stability["wins"][1:]]},
            probe=probe,
            variance=variance,
        ),
        final_norm_entropy=nan,
        normalisations={"unit": (nan,) * 9, "raw": (nan, *full.normalisations["raw"][1:])},
        settling=(replace(full.settling[0], entropy=(nan,) * 9, win_share=nan), *full.settling[1:]),
        cka=((None,) * 9, *full.cka[1:]),
        gains=((None,) * 9,) * 8 + (full.gains[8],),
        rules=(replace(full.rules[0], joint_entropy=nan),),
    )
    found = Page(render(analysis, plots.pictures(analysis)))
    assert len(found.images) == len(plots.FIGURES)
    assert not re.search(r"\b(nan|None|inf)\b", found.text)
    json.dumps(analysis.to_json(), allow_nan=False)


@pytest.mark.parametrize("blocks", [1, 4, 126])
def test_depths(blocks: int) -> None:
    analysis = make_analysis(blocks) if blocks >= 8 else empty_analysis(blocks)
    start = time.monotonic()
    text = render(analysis, plots.pictures(analysis))
    assert time.monotonic() - start < 20
    assert len(text) < 1_500_000
    found = Page(text)
    assert (len(found.images) == len(plots.FIGURES)) == (blocks >= 8)


def test_final_norm_and_sets_of_taps() -> None:
    full = make_analysis(30, m=3)
    found = Page(render(full, {}))
    assert "Taps 5, 16, 27, chosen by elsi with m = 3: 6.052 nats of joint matrix entropy" in found.text
    assert "directions of 1,728" in found.text
    eagle2 = replace(full.selection, taps=(30,), method="eagle2", state="final-norm")
    analysis = replace(full, selection=eagle2)
    wave = plots.picture(lambda axes: plots.entropy_wave(analysis, axes), height=4.0)
    assert _decoded(wave).std() > 1.0
    assert "The state after the final norm, chosen by eagle2" in Page(render(analysis, {"entropy-wave": wave})).text


def test_a_style_of_the_users_changes_nothing() -> None:
    import matplotlib

    before = plots.pictures(empty_analysis())
    with matplotlib.rc_context({"font.size": 20.0, "axes.facecolor": "black", "savefig.dpi": 30}):
        assert plots.pictures(empty_analysis()) == before
        assert matplotlib.rcParams["font.size"] == 20.0


def test_template_and_style_are_installed() -> None:
    root = Path(__file__).parents[1]
    patterns = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"][
        "package-data"
    ]
    other = [path.name for path in (root / "calibration").iterdir() if path.is_file() and path.suffix != ".py"]
    assert len(other) == 1
    assert all(any(fnmatch(name, p) for p in patterns["elsi_edge.calibration"]) for name in other)
    assert any(fnmatch("report.css", p) for p in patterns["elsi_edge.data"])


def shown(analysis: Analysis) -> Page:
    return Page(render(analysis, plots.pictures(analysis)))


def test_single_taps_are_called_so_beside_a_set() -> None:
    full = make_analysis(30, m=3)
    text = shown(full).text
    assert text.count("Single taps, not what was chosen") == 2 and "single tap resamples won" in text
    assert "Single taps, not what" not in shown(make_analysis(30)).text
    one, set_of_three = plots.pictures(make_analysis(30)), plots.pictures(full)
    assert one["wins"] != set_of_three["wins"] and one["settling"] != set_of_three["settling"]


def test_what_greedy_is_compared_with_depends_on_the_choice() -> None:
    assert "At m = 1 there is nothing to compare" in shown(make_analysis(30)).text
    asked = shown(make_analysis(30, m=3))
    assert "says how much that leaves on the table" in asked.text and "greedy is below by" in asked.cells
    assert "0.0074" in asked.cells and "50 of 4,060" in asked.cells  # the quick search of pairs has no such figure
    assert "greedy is below by" not in shown(make_analysis(30)).cells
    other = make_analysis(30, m=3)
    other = replace(other, selection=replace(other.selection, method="elsi-c"))
    quick = tuple(replace(search, quick=True) for search in other.searches)
    text = shown(replace(other, searches=quick)).text
    assert "A quick search looked at 435 of the 435 sets of 2 and 50 of the 4,060 sets of 3" in text
    assert "Sets by joint entropy alone" in text and "reedy against" not in text and "below by" not in text


def test_what_a_picture_does_not_say_by_itself_stands_beside_it() -> None:
    full = make_analysis(30)
    found = shown(full)
    assert "with the number of positions (18,204 here), so do not compare" in found.text
    assert "tap 30 leaves the last block, enters none and is in no band" in found.text
    alt = next(image["alt"] or "" for image in found.images if "the gain" in (image["alt"] or ""))
    best = full.searches[0]
    assert f"taps {best.best[0]}, {best.best[1]}, {best.best_entropy:.3f} nats" in alt


def test_members_of_a_set_are_not_marked_as_if_they_should_win() -> None:
    from matplotlib.figure import Figure

    colours = []
    for m in (1, 3):
        axes = Figure().subplots()
        plots.wins(make_analysis(30, m=m), axes)
        colours.append({bar.get_facecolor() for bar in axes.patches})
    assert [len(found) for found in colours] == [2, 1]


def test_one_compartment_or_few_positions_are_not_drawn_as_several() -> None:
    full = make_analysis(30)
    one = replace(full, selection=replace(full.selection, compartments=((0, 30),), cka_transitions=()))
    few = replace(full, cka_rows=500)  # fewer than the width
    none = replace(full, selection=replace(full.selection, compartments=(), cka_transitions=()))
    for analysis, words in ((one, "All taps form one compartment"), (few, "too few to tell compartments apart")):
        text = shown(analysis).text
        assert (
            words in text
            and "Shades change" not in text
            and "compartments: none" in render(analysis, plots.pictures(analysis))
        )
    bare = plots.pictures(none)
    for name in ("entropy-wave", "cka"):
        assert plots.pictures(one)[name] == bare[name] != plots.pictures(full)[name]


def test_a_single_look_is_no_curve() -> None:
    full = make_analysis(30)
    found = shown(replace(full, settling=full.settling[-1:]))
    assert "Where it settles" not in found.text and len(found.images) == len(plots.FIGURES) - 1


def test_the_sweep_is_a_table_and_no_json() -> None:
    full = make_analysis(30, m=3)
    sweep = [{"weight": 0.0, "taps": [5, 27]}, {"weight": 0.5, "taps": [5, 29]}]
    settings = {**full.selection.settings, "cka_weight_sweep": sweep}
    analysis = replace(full, selection=replace(full.selection, method="elsi-c", cka_weight=0.5, settings=settings))
    text = render(analysis, {})
    assert "cka weight sweep" not in text and "&#34;weight&#34;" not in text
    assert '<tr class="chosen"><th scope="row">0.50</th><td>5, 29</td></tr>' in text
    assert '<tr><th scope="row">0.00</th><td>5, 27</td></tr>' in text


def test_numbers_beside_points_touch_nothing() -> None:
    """In a cloud of points some numbers are left out, those that matter stand."""
    from matplotlib.figure import Figure

    from elsi_edge.calibration import plots_maps

    draw = np.random.default_rng(0)
    x, y = draw.normal(0.0, 1.0, 60), draw.normal(0.0, 1.0, 60)
    axes = Figure().subplots()
    axes.scatter(x, y)
    plots_maps._label_points(axes, x, y, {7: 16.0}, {7, 59})
    named = {text.get_text(): text for text in axes.texts}
    assert 20 < len(named) <= 60 and {"7", "59"} <= set(named)
    away = float(np.hypot(*named["7"].xyann))  # type: ignore[attr-defined]
    assert away > 8.0  # outside its ring
