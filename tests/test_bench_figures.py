"""What surrounds a bench's speeds: intervals, percentiles, noise, energy, comparison, page and schema."""

import importlib.resources
import json
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elsi_edge.errors import DataError
from elsi_edge.runtime.bench import html
from elsi_edge.runtime.bench.compare import read_report
from elsi_edge.runtime.bench.energy import EnergyMeter
from elsi_edge.runtime.bench.intervals import interval_of_median, interval_of_ratio, percentiles
from elsi_edge.runtime.bench.json_form import report_json, windows
from elsi_edge.runtime.bench.noise import Load, Ticks, load_between, noise_words, spread_of_repeats
from elsi_edge.runtime.bench.peers import Peer, PeerAnswer, peer_report
from elsi_edge.runtime.bench.report import summarise
from tests.test_bench import alphabet_session, made, row, run


def schema() -> dict[str, Any]:
    text = importlib.resources.files("elsi_edge.runtime.bench").joinpath("bench.schema.json").read_text()
    value: dict[str, Any] = json.loads(text)
    return value


def validate_part(value: Any, place: str) -> None:
    """Hold a part of a report against its place in the schema."""
    jsonschema.validate(json.loads(json.dumps(value)), {"$defs": schema()["$defs"], **schema_at(place)})


def schema_at(place: str) -> dict[str, Any]:
    """What stands at "#/a/b"."""
    found = schema()
    for key in place.removeprefix("#/").split("/"):
        found = found[key]
    return found


# --- intervals and percentiles ---------------------------------------------------------------------------------------


def test_an_interval_of_the_median_covers_the_truth_about_as_often_as_it_says() -> None:
    draw = np.random.default_rng(1)
    inside = 0
    for _ in range(200):
        bounds = interval_of_median(draw.normal(3.0, 1.0, 41).tolist())
        assert bounds is not None
        inside += bounds[0] <= 3.0 <= bounds[1]
    assert 0.90 <= inside / 200 <= 0.99


def test_intervals_need_two_answers_and_are_the_same_again() -> None:
    assert interval_of_median([1.0]) is None and interval_of_ratio([1.0], [2.0]) is None
    assert interval_of_ratio([1.0, 2.0], [0.0, 0.0]) is None
    assert interval_of_median([1.0, 2.0, 5.0]) == interval_of_median([1.0, 2.0, 5.0])
    low, high = interval_of_ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]) or (0.0, 0.0)
    assert low == pytest.approx(2.0) == high


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 4)), min_size=1, max_size=30))
def test_weighted_percentiles_are_those_of_the_values_written_out(pairs: list[tuple[int, int]]) -> None:
    written = sorted(value for value, weight in pairs for _ in range(weight))
    found = percentiles([v for v, _ in pairs], [w for _, w in pairs], (0.5, 0.9, 0.99))
    for share, value in zip((0.5, 0.9, 0.99), found, strict=True):
        place = int(np.ceil(share * len(written) - 1e-9)) - 1
        assert value == written[place]


def test_percentiles_of_nothing() -> None:
    assert percentiles([], [], (0.5,)) == [None]


def test_a_round_of_two_tokens_counts_as_two_tokens_of_half_its_time() -> None:
    report = summarise([made(plain_s=1.0, fast_s=0.5)])
    # Ten tokens after the first: one a round in 100 ms, or two a round in 100 ms.
    assert report.plain.ms_per_token.p50 == pytest.approx(100.0) == report.plain.ms_per_round.p99
    assert report.speculative.ms_per_token.p90 == pytest.approx(50.0)
    assert report.speculative.ms_per_round.p50 == pytest.approx(100.0)


def test_rounds_of_a_real_run_add_up() -> None:
    (answer,) = run(alphabet_session(None), [row("1", "a")], max_tokens=20)
    result = answer.plain
    assert sum(result.round_tokens) == len(result.token_ids) - 1 == 19
    assert sum(result.round_ms) == pytest.approx(
        1e3 * (result.timings.propose + result.timings.verify + result.timings.other), rel=0.2
    )


def test_shares_of_time_add_up_to_all_of_it() -> None:
    shares = summarise(run(alphabet_session(None), [row("1", "a")], max_tokens=9)).plain.shares
    assert shares is not None and shares.propose + shares.verify + shares.other == pytest.approx(1.0)


def test_end_to_end_counts_the_prompt() -> None:
    # 11 tokens: 5 ms to the first, then 1 s against 0.5 s.
    report = summarise([made(plain_s=1.0, fast_s=0.5)])
    assert report.end_to_end == pytest.approx(1.005 / 0.505) and report.speedup == pytest.approx(2.0)
    assert report.plain.end_to_end_tokens_per_s == pytest.approx(11 / 1.005)


# --- noise and energy ------------------------------------------------------------------------------------------------


def test_the_load_of_others_is_what_is_busy_beside_us(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu 100 0 50 1000 10 0 0 5 0 0\ncpu0 1 1 1 1\n")
    start = replace(Ticks.now(stat), own=1.0, at=0.0)
    assert start.busy is not None and start.steal is not None
    end = replace(start, busy=start.busy + 3.0, steal=start.steal + 0.5, own=2.0, at=10.0)
    load = load_between(start, end, cores=2)
    assert (load.own, load.others, load.steal) == pytest.approx((0.05, 0.10, 0.025))
    words = noise_words(load, 0.2, 0.8)
    assert [word.split()[0] for word in words] == ["other", "repeats", "the"]
    assert "10% of the cores" in words[0] and "0.80 times" in words[2]
    assert noise_words(Load(own=0.9, others=0.01, steal=0.0), 0.05, 1.01) == [] == noise_words(None, None, None)


def test_without_counters_nothing_is_said(tmp_path: Path) -> None:
    none = Ticks.now(tmp_path / "absent")
    assert load_between(none, replace(none, at=none.at + 1), cores=2) == Load(own=None, others=None, steal=None)


def test_the_spread_is_of_repeats_alone() -> None:
    assert spread_of_repeats([[1.0], [2.0]]) is None
    assert spread_of_repeats([[1.0, 1.2], [10.0, 10.0], [2.0, 4.0]]) == pytest.approx(0.2 / 1.1)


def counter(root: Path, name: str, microjoules: int, top: int = 10_000_000) -> Path:
    directory = root / name
    directory.mkdir()
    (directory / "max_energy_range_uj").write_text(f"{top}\n")
    (directory / "energy_uj").write_text(f"{microjoules}\n")
    return directory / "energy_uj"


def test_energy_is_of_packages_and_survives_a_counter_that_wraps(tmp_path: Path) -> None:
    one, part = counter(tmp_path, "intel-rapl:0", 9_000_000), counter(tmp_path, "intel-rapl:0:1", 0)
    meter = EnergyMeter(tmp_path)
    assert meter.readable and meter.joules() == 0.0
    one.write_text("1000000\n")
    part.write_text("5000000\n")  # of the same package, so not added
    assert meter.joules() == pytest.approx(2.000001)
    assert not EnergyMeter(tmp_path / "absent").readable and EnergyMeter(tmp_path / "absent").joules() == 0.0


# --- the report as JSON, compared, as a page -------------------------------------------------------------------------


def full(report: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A whole report, of synthetic answers where none is given."""
    answers = [made(plain_s=1 + i / 10, fast_s=0.6, name=f"p{i}", category="ab"[i % 2], at_s=i + 1.0) for i in range(6)]
    foot = {"pss": 5, "anonymous": 3}
    point = {"rows": 1, "bytes": 9, "operations": 9, "memory_ms": 1.0, "compute_ms": 0.5, "measured_ms": 2.0}
    return {
        **(report or report_json(summarise(answers))),
        "partial": False,
        "bundle": "b",
        "model": "<m>",
        "target_fingerprint": "f",
        "taps": [27],
        "max_tokens": 11,
        "repeats": 1,
        "warm_up_runs": 2,
        "prompts_given": 6,
        "prompts_sha256": "x",
        "cpu": "c",
        "energy": "none",
        "versions": {"numpy": "2"},
        "noise": {"load": None, "words": ["a & b"]},
        "sustained": windows(answers, 3),
        "memory": {
            "components": {"target": foot},
            **dict.fromkeys(("cache_per_1000_tokens", "steady", "peak"), foot),
            "steady_tokens": 1280,
            "processes": 3,
            "one_tap": None,
        },
        "memory_limit": None,
        "roofline": {
            "ceilings": {"copy_gb_per_s": 30.0, "read_gb_per_s": 25.0, "gop_per_s": {"int8": 200.0}},
            "past": 128,
            "step_ms": 2.0,
            "fixed_rows": None,
            "free_rows_on_paper": 2,
            "free_rows_measured": None,
            "reached": 0.5,
            "words": ["half of the limit"],
            "verify": [{**point, "limit_ms": 1.0}, {**point, "rows": 2, "limit_ms": 1.1}],
        },
        "perplexity": None,
        "against": None,
    }


def test_a_report_is_as_the_schema_says() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    jsonschema.validate(json.loads(json.dumps(full())), schema())
    with pytest.raises(jsonschema.ValidationError, match="tau"):
        jsonschema.validate({key: value for key, value in full().items() if key != "tau"}, schema())


def test_windows_cut_a_long_run_into_stretches() -> None:
    answers = [made(plain_s=1, fast_s=1, at_s=at) for at in (1.0, 2.0, 9.0, 10.0)]
    assert [(w["until_s"], w["answers"]) for w in windows(answers, 5)] == [(2.0, 1), (4.0, 1), (10.0, 2)]
    assert windows([]) == [] and windows([made(plain_s=1, fast_s=1)]) == []


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "line", "polyline", "circle"):
            self.open.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href") and value]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_whole_escaped_and_needs_nothing_beside_it() -> None:
    page = _Page()
    text = html.render(full())
    page.feed(text)
    assert page.open == [] and page.links == [] and "http" not in text.replace("http://www.w3.org", "")
    assert "<m>, int4: 2.08 times plain decoding" in page.text and "<m>" not in text
    assert "a & b" in page.text and "Sustained" in page.text and "Roofline" in page.text and "Memory" in page.text
    assert text.count("<polyline") == 2 + 2 + 2


def test_a_page_of_the_least_report() -> None:
    bare = {**full(), "memory": None, "roofline": None, "sustained": None, "noise": {"load": None, "words": []}}
    page = _Page()
    page.feed(html.render(bare))
    assert "steady and alone" in page.text and "Memory" not in page.text and "Roofline" not in page.text


def test_reports_are_read_whole_or_from_the_last_line(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(full(), indent=1))
    assert read_report(path)["model"] == "<m>"
    path.write_text("a table\n" + json.dumps(full()) + "\n")
    assert read_report(path)["model"] == "<m>"
    for text, said in (
        ("", "holds no bench report"),
        ('{"format": "other"}', "holds no bench report"),
        (json.dumps({**full(), "format_version": 9}), "format version 9, this reads 1"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=said):
            read_report(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_report(tmp_path / "absent.json")


# --- other runtimes --------------------------------------------------------------------------------------------------


def test_a_peer_is_compared_answer_by_answer() -> None:
    answers = [made(plain_s=1.0, fast_s=0.5, name="a"), made(plain_s=1.0, fast_s=0.5, name="b")]
    peer = object.__new__(Peer)
    peer.name, peer.version, peer.flags, peer.model, peer.scores = "n", "v", "f", "m", None
    # 21 tokens in one second after the first 5 ms, against ours of 11 in half a second: alike. Then half as fast.
    peer.answers = {
        0: PeerAnswer(tokens=21, text="", first_ms=5.0, decode_s=1.0),
        1: PeerAnswer(tokens=11, text="x", first_ms=5.0, decode_s=1.0),
    }
    found = peer_report(peer, answers)
    assert found["ours_over_it"] == pytest.approx(1.5) and found["tokens_per_s"] == pytest.approx(15.0)
    assert (found["answers"], found["tokens"], found["same_text"]) == (2, 32, 1)
    validate_part(found, "#/$defs/peer")
