"""Prices and the pace: what candidates cost, and when speculation is switched off and on again."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elsi_edge.artifacts import PRECISIONS
from elsi_edge.runtime.options import MAX_DRAFT_NODES
from elsi_edge.runtime.pace import Clock, FixedPace, LivePace, Pace
from elsi_edge.runtime.price import FREE, Costs, interpolate, typical
from elsi_edge.runtime.proposal import Bounds, Candidates
from elsi_edge.runtime.tree import ROOT

COSTS = Costs(contexts=(100, 300), verify=((10.0, 12.0, 13.0), (14.0, 18.0, 20.0)), entry=2.0, level=1.0)


def test_costs_are_linear_in_the_context_and_prices_relative_to_a_plain_step() -> None:
    assert [COSTS.rows(n, 100) for n in (1, 2, 3, 9)] == [10.0, 12.0, 13.0, 13.0]
    assert COSTS.rows(2, 200) == 15.0 and COSTS.rows(1, 500) == 18.0
    price = COSTS.price(1.5, 100)
    assert price.nodes[:4] == pytest.approx((0.0, 0.3, 0.45, 0.45))
    assert (price.entry, price.level) == pytest.approx((0.3, 0.15))
    assert price.node(2) == pytest.approx(0.15)
    assert len(price.nodes) == len(FREE.nodes) == MAX_DRAFT_NODES + 1


@given(st.dictionaries(st.integers(1, 64), st.floats(0.1, 100.0), min_size=1), st.integers(1, 80))
def test_interpolation_keeps_what_was_measured(measured: dict[int, float], rows: int) -> None:
    values = interpolate(measured, rows)
    assert len(values) == rows
    for row in set(measured) & set(range(1, rows + 1)):
        assert values[row - 1] == pytest.approx(measured[row])


def test_noise_never_makes_more_rows_cheaper() -> None:
    costs = Costs(contexts=(1,), verify=((10.0, 9.0, 8.0, 14.0),), entry=0.0, level=0.0)
    assert costs.price(1.0, 1).nodes[:4] == pytest.approx((0.0, 0.0, 0.0, 0.4))
    for precision in PRECISIONS:
        nodes = np.diff(typical(precision).price(1.0, 500).nodes)
        assert (nodes >= 0).all() and nodes.max() < 0.6


def candidates(*nodes: tuple[int, int, float]) -> Candidates:
    found = Candidates()
    for token, parent, probability in nodes:
        found.add(token, parent, float(np.log(probability)), "draft")
    return found


def test_nodes_are_kept_while_they_are_worth_their_price() -> None:
    found = candidates((1, ROOT, 0.6), (2, 0, 0.5), (3, 1, 0.2), (4, ROOT, 0.1))
    dear = Costs(contexts=(1,), verify=((1.0, 1.3, 1.6, 1.9, 2.2),), entry=0.0, level=0.0).price(1.0, 1)
    bounds = Bounds(budget=4, depth=4, chain=False, price=dear)
    assert found.best(bounds).tokens == (1, 2)
    assert found.best(Bounds(budget=4, depth=4, chain=False)).size == 4  # free
    assert found.best(Bounds(budget=1, depth=4, chain=False)).tokens == (1,)
    # A second row that alone does not pay may do so with a third that costs next to nothing.
    step = Costs(contexts=(1,), verify=((1.0, 1.7, 1.7, 1.7, 2.9),), entry=0.0, level=0.0).price(1.0, 1)
    assert found.best(Bounds(budget=4, depth=4, chain=False, price=step)).size == 3
    dearest = Costs(contexts=(1,), verify=((1.0, 3.0),), entry=0.0, level=0.0).price(1.0, 1)
    assert found.best(Bounds(budget=4, depth=4, chain=False, price=dearest)).size == 0


def test_a_fixed_pace_knows_no_clock() -> None:
    pace = FixedPace(COSTS, 1.2)
    before = pace.price(130)
    for _ in range(500):
        pace.note(tokens=1, nodes=2, milliseconds=1e6)
    assert pace.price(130) == before != pace.price(300)
    assert pace.switched_off == 0 and Pace().price(5) is FREE


def play(pace: LivePace, rounds: int, *, plain: float, ms: float, tokens: int) -> int:
    """Rounds on a machine where a plain round takes `plain` ms, one with candidates `ms`; how many had candidates."""
    drafted = 0
    for _ in range(rounds):
        if pace.price(100) is None:
            pace.note(tokens=1, nodes=0, milliseconds=plain)
        else:
            drafted += 1
            pace.note(tokens=tokens, nodes=2, milliseconds=ms)
    return drafted


def test_the_clock_switches_speculation_off_and_on_again() -> None:
    pace = LivePace(COSTS, 1.2, Clock())
    assert pace.price(100) is None  # a plain round comes first, to know its time
    assert play(pace, 400, plain=10.0, ms=15.0, tokens=2) > 380  # pays
    assert pace.switched_off == 0
    drafted = play(pace, 1000, plain=10.0, ms=15.0, tokens=1)  # loses half
    assert pace.switched_off >= 3 and drafted < 350
    assert play(pace, 1000, plain=10.0, ms=15.0, tokens=3) > 400  # pays again: found out after the last break


def test_a_machine_that_grows_slower_does_not_count_against_speculation() -> None:
    pace, draw = LivePace(COSTS, 1.2, Clock()), np.random.default_rng(0)
    for number in range(3000):
        slow = 1.0 + number / 1000  # up to four times
        noise = float(draw.uniform(0.7, 1.6))
        drafts = pace.price(100) is not None and draw.random() < 0.6
        pace.note(tokens=2 if drafts else 1, nodes=int(drafts), milliseconds=(15.0 if drafts else 10.0) * slow * noise)
    assert pace.switched_off == 0


def test_a_session_remembers_the_time_of_a_plain_step() -> None:
    clock = Clock()
    play(LivePace(COSTS, 1.2, clock), 30, plain=10.0, ms=15.0, tokens=2)
    assert clock.plain_ms == pytest.approx(10.0)
    assert LivePace(COSTS, 1.2, clock).price(100) is not None
