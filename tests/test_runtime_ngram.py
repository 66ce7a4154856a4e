"""n-gram matches against a search by hand, and how much memory and time they take."""

import time
import tracemalloc

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from elsi_edge.runtime.ngram import CANDIDATES, FROM, LONGEST, PRIOR, SHORTEST, NgramIndex, NgramRecord, kind


def by_hand(tokens: list[int], width: int) -> list[tuple[int, int]]:
    """Continuations of the longest earlier matches, the latest first among equals, of the latest CANDIDATES places."""
    last = len(tokens) - 1
    places = [p for p in range(last - 1, 0, -1) if tokens[p - 1 : p + 1] == tokens[last - 1 : last + 1]]
    found: dict[int, int] = {}
    for place in places[:CANDIDATES]:
        length = 0
        while length < LONGEST and place - length >= 0 and tokens[place - length] == tokens[last - length]:
            length += 1
        found[tokens[place + 1]] = max(found.get(tokens[place + 1], 0), length)
    return sorted(found.items(), key=lambda item: -item[1])[:width]


texts = st.lists(st.integers(0, 3), max_size=60)


@settings(deadline=None)
@given(texts, st.integers(1, 4))
def test_matches_are_the_longest_and_latest(tokens: list[int], width: int) -> None:
    index = NgramIndex()
    for count, token in enumerate(tokens, start=1):
        index.append(token)
        got = [(match.token, match.length) for match in index.matches(width)]
        assert got == (by_hand(tokens[:count], width) if count > 1 else [])


@settings(deadline=None)
@given(texts, texts, st.integers(0, 60))
def test_what_is_cut_off_leaves_no_trace(tokens: list[int], more: list[int], length: int) -> None:
    index = NgramIndex()
    index.extend(tokens)
    index.truncate(length)
    fresh = NgramIndex()
    fresh.extend(tokens[:length])
    assert vars(index) == vars(fresh)
    index.extend(more)
    fresh.extend(more)
    assert vars(index) == vars(fresh)


def test_a_loop_is_followed_across_the_end() -> None:
    index = NgramIndex()
    index.extend([7, 7, 7])
    for _ in range(5):
        (match,) = index.matches()
        assert match.token == 7
        index.append(match.token)
    index = NgramIndex()
    index.extend([1, 2, 3] * 20)
    (match,) = index.matches()
    assert (match.token, match.length) == (1, LONGEST)


def test_kinds_and_records() -> None:
    assert [kind(length) for length in (SHORTEST, 3, 4, 6, 7, 15, 16, LONGEST)] == [0, 1, 2, 3, 4, 5, 6, 6]
    assert len(PRIOR) == len(FROM)
    assert sorted(PRIOR) == list(PRIOR)
    record = NgramRecord()
    assert record.probability(5) == PRIOR[3]
    for _ in range(100):
        record.note(5, False)
    assert record.probability(6) < 0.2 and record.probability(4) == PRIOR[2]
    for _ in range(100):
        record.note(5, True)
    assert record.probability(5) > 0.85  # what happened lately counts most
    record.reset()
    assert record.probability(5) == PRIOR[3]


def test_an_index_is_small_and_quick() -> None:
    draw = np.random.default_rng(0)
    tokens = draw.zipf(1.3, 20_000).clip(max=49_000).tolist()  # as words are distributed: some pairs are frequent
    tracemalloc.start()
    index = NgramIndex()
    index.extend(tokens)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size / len(tokens) < 300
    best = 1.0
    for _ in range(3):  # whatever else the machine does
        index = NgramIndex()
        start = time.perf_counter()
        for token in tokens:
            index.append(token)
            index.matches()
        best = min(best, (time.perf_counter() - start) / len(tokens))
    assert best < 40e-6  # 3 to 8 microseconds on a quiet machine
