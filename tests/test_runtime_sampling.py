"""Choosing tokens: filters, seeds, and the target's exact distribution, with and without a tree."""

import math
import warnings
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import chisquare

from elsi_edge.errors import ConfigError
from elsi_edge.runtime.decode import Plan, rounds
from elsi_edge.runtime.options import MAX_SEED, GenerateOptions
from elsi_edge.runtime.proposal import Bounds
from elsi_edge.runtime.sampling import choose, distribution, penalise
from elsi_edge.runtime.toy import ToyTarget, hashed_logits
from elsi_edge.runtime.tree import ROOT, Tree
from tests.toy_proposers import (
    CODEC,
    LiarProposer,
    NoisyProposer,
    OracleProposer,
    Scripted,
    session_for,
    toy_target,
)

LOGITS = np.log(np.array([0.08, 0.5, 0.02, 0.3, 0.1], np.float32))


def kept(**options: float) -> tuple[list[int], list[float]]:
    ids, probabilities = distribution(LOGITS, GenerateOptions(**{"temperature": 1.0, **options}))  # type: ignore[arg-type]
    return ids.tolist(), [round(float(p), 4) for p in probabilities]


# --- filters -------------------------------------------------------------------------------------------------------


def test_without_filters_it_is_the_softmax_most_likely_first() -> None:
    assert kept() == ([1, 3, 4, 0, 2], [0.5, 0.3, 0.1, 0.08, 0.02])
    ids, probabilities = distribution(LOGITS, GenerateOptions(temperature=0.5))
    expected = np.exp(LOGITS.astype(np.float64) / 0.5)
    np.testing.assert_allclose(probabilities, (expected / expected.sum())[ids])


def test_each_filter_renormalises() -> None:
    assert kept(top_k=2) == ([1, 3], [0.625, 0.375])
    assert kept(top_p=0.79) == ([1, 3], [0.625, 0.375])
    assert kept(top_p=0.81) == ([1, 3, 4], [round(p / 0.9, 4) for p in (0.5, 0.3, 0.1)])
    assert kept(min_p=0.55) == ([1, 3], [0.625, 0.375])


def test_the_order_is_top_k_then_top_p_then_min_p() -> None:
    # Of all tokens, 0.5 alone stays under top_p 0.49 ... 0.5; of the first two (0.625, 0.375) 0.6 keeps one.
    assert kept(top_p=0.6) == ([1, 3], [0.625, 0.375])
    assert kept(top_k=2, top_p=0.6) == ([1], [1.0])
    # min_p compares with the top token, which no renormalisation changes.
    assert kept(top_k=3, min_p=0.15) == ([1, 3, 4], [round(p / 0.9, 4) for p in (0.5, 0.3, 0.1)])


def test_the_temperature_comes_before_the_filters() -> None:
    assert kept(top_p=0.6, temperature=0.25) == ([1], [1.0])


@pytest.mark.parametrize("options", [{"top_p": 0.0}, {"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 1}])
def test_the_narrowest_filters_keep_exactly_the_top_token(options: dict[str, float]) -> None:
    assert kept(**options) == ([1], [1.0])
    tied = np.array([1.0, 4.0, 0.0, 4.0], np.float32)
    ids, _ = distribution(tied, GenerateOptions(temperature=1.0, **options))  # type: ignore[arg-type]
    assert ids.tolist() == [int(np.argmax(tied))]


@pytest.mark.parametrize("top_k", [0, 5, 6, 50, 10**12])
def test_a_top_k_of_the_vocabulary_or_more_keeps_all(top_k: int) -> None:
    assert kept(top_k=top_k) == kept()


def test_ties_at_the_edge_of_top_k_go_to_lower_ids() -> None:
    ids, _ = distribution(np.array([2, 3, 2, 2], np.float32), GenerateOptions(temperature=1.0, top_k=2))
    assert ids.tolist() == [1, 0]


def test_the_defaults_work_on_a_tiny_vocabulary() -> None:
    assert choose(np.zeros(1, np.float32), GenerateOptions(temperature=1.0), seed=0, index=0) == 0
    assert 0 <= choose(np.zeros(21, np.float32), GenerateOptions(temperature=1.0), seed=0, index=0) < 21


@settings(deadline=None)
@given(
    st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=30),
    st.sampled_from([1e-3, 0.3, 1.0, 5.0, 1e6]),
    st.integers(0, 31),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_any_filters_leave_a_distribution_with_the_top_token(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    options = GenerateOptions(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    row = np.array(logits, np.float32)
    with warnings.catch_warnings(), np.errstate(all="raise", under="ignore"):
        ids, probabilities = distribution(row, options)
        token = choose(row, options, seed=3, index=4)
    assert ids[0] == np.argmax(row)
    assert len(set(ids.tolist())) == len(ids) <= (top_k or len(row))
    assert math.isclose(probabilities.sum(), 1.0)
    assert (np.diff(probabilities) <= 1e-12).all()
    assert token in ids


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-40, 5e-324])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
def test_temperatures_next_to_zero_are_greedy(temperature: float, scale: float) -> None:
    options = GenerateOptions(temperature=temperature, top_k=3, top_p=0.9, min_p=0.1)
    row = LOGITS * np.float32(scale)
    with np.errstate(all="raise"):
        assert {choose(row, options, seed=1, index=index) for index in range(20)} == {1}
        assert distribution(row, options)[0].tolist() == [1]


# --- options -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", value) for value in (-1.0, math.nan, math.inf, -1e-9)],
        *[("top_k", -1), ("top_p", 1.01), ("top_p", -0.1), ("top_p", math.nan)],
        *[("min_p", 1.5), ("min_p", -0.1), ("min_p", math.nan)],
        *[("seed", -1), ("seed", 2**63), ("max_tokens", 0), ("max_tokens", -5)],
        *[("draft_nodes", -1), ("draft_nodes", 128), ("stop", ("x", "")), ("stop", "ab")],
    ],
)
def test_options_out_of_range_are_usage_errors_naming_option_and_value(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        GenerateOptions(**{name: value})  # type: ignore[arg-type]
    message = str(caught.value)
    assert name.replace("_", "-") in message
    assert caught.value.exit_code == 2
    assert "\n" not in message
    if isinstance(value, int | float):
        assert str(value) in message
        assert "at least" in message


def test_options_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="--system"):
        GenerateOptions(raw=True, system="Be brief.")
    with pytest.raises(ConfigError, match="--plain"):
        GenerateOptions(plain=True, draft_nodes=3)
    GenerateOptions(plain=True, draft_nodes=0)


# --- seeds ---------------------------------------------------------------------------------------------------------


def test_distinct_seeds_are_distinct_streams() -> None:
    options = GenerateOptions(temperature=1.0)
    flat = np.zeros(50, np.float32)
    seeds = [0, 1, 2**31, 2**32, 2**32 + 1, MAX_SEED]
    streams = {seed: tuple(choose(flat, options, seed=seed, index=i) for i in range(30)) for seed in seeds}
    assert len(set(streams.values())) == len(seeds)
    again = tuple(choose(flat, options, seed=2**32 + 1, index=i) for i in range(30))
    assert again == streams[2**32 + 1]
    for seed in seeds:
        GenerateOptions(seed=seed)


def test_a_seed_is_drawn_when_none_is_given() -> None:
    assert GenerateOptions(seed=0).resolved_seed() == 0
    drawn = {GenerateOptions().resolved_seed() for _ in range(8)}
    assert len(drawn) == 8
    assert all(0 <= seed <= MAX_SEED for seed in drawn)


@pytest.mark.parametrize("seed", [0, 2**40])
def test_draws_of_one_seed_are_independent_from_place_to_place(seed: int) -> None:
    options = GenerateOptions(temperature=1.0)
    drawn = [choose(np.zeros(4, np.float32), options, seed=seed, index=i) for i in range(6000)]
    pairs = np.zeros((4, 4))
    np.add.at(pairs, (drawn[:-1], drawn[1:]), 1)
    assert chisquare(pairs.ravel()).pvalue > 1e-3


# --- the repetition penalty ----------------------------------------------------------------------------------------


def test_a_penalty_lowers_what_was_seen_whatever_its_sign() -> None:
    logits = np.array([2.0, -1.0, 0.0, 3.0], np.float32)
    seen = np.array([True, True, True, False])
    assert penalise(logits, seen, 2.0).tolist() == [1.0, -2.0, 0.0, 3.0]
    assert penalise(logits, seen, 1.0).tolist() == logits.tolist()
    for penalty in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="--repetition-penalty"):
            GenerateOptions(repetition_penalty=penalty)


@pytest.mark.parametrize("chain", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_penalty_is_lossless(chain: bool, temperature: float) -> None:
    options = GenerateOptions(max_tokens=30, temperature=temperature, seed=7, repetition_penalty=1.6, stop=("zz",))
    changed, best = 0, 0.0
    for world in range(9):
        plain = session_for(None, seed=world).generate("abc", options)
        without = session_for(None, seed=world).generate("abc", replace(options, repetition_penalty=1.0))
        changed += plain.token_ids != without.token_ids
        # By hand: every token is chosen from logits in which the prompt's and the answer's tokens are lowered.
        target, tokens = toy_target(world), CODEC.encode_raw("abc")
        for place, token in enumerate(plain.token_ids):
            seen = np.isin(np.arange(target.vocab_size), tokens)
            row = penalise(target.logits(tuple(tokens[-target.memory :])), seen, 1.6)
            assert token == choose(row, options, seed=7, index=place)
            tokens.append(token)
        for proposer in (
            OracleProposer(plain.token_ids),
            LiarProposer(plain.token_ids),
            NoisyProposer(plain.token_ids),
        ):
            session = session_for(proposer, seed=world, precision="int4" if chain else "fp32")
            fast = session.generate("abc", replace(options, draft_nodes=6))
            assert (fast.token_ids, fast.text) == (plain.token_ids, plain.text)
            best = max(best, fast.tau or 0.0)
    assert changed > 1 and best > 1.5


# --- the target's distribution, through the loop -------------------------------------------------------------------

SMALL = 5  # vocabulary
DRAWS = 2000
PROMPT = [1, 3]


class FixedProposer(Scripted):
    """The same candidates every round, with second branches."""

    def propose(self, bounds: Bounds) -> Tree:
        if bounds.chain:
            return Tree.chain([2, 2, 0][: bounds.budget])
        return Tree(tokens=(2, 4, 1, 3, 2, 0, 2), parents=(ROOT, ROOT, 0, 0, 1, 2, ROOT))


def choose_with(options: GenerateOptions, seed: int, logits: NDArray[np.float32], index: int) -> int:
    return choose(logits, options, seed=seed, index=index)


def exact(target: ToyTarget, options: GenerateOptions, length: int) -> dict[tuple[int, ...], float]:
    """Probability of every answer of `length` tokens."""
    found = {}
    for answer in product(range(SMALL), repeat=length):
        probability = 1.0
        for place, token in enumerate(answer):
            last = tuple([*PROMPT, *answer[:place]][-target.memory :])
            ids, probabilities = distribution(target.logits(last), options)
            probability *= float(probabilities[ids == token].sum())
        found[answer] = probability
    return found


@pytest.mark.parametrize("chain", [True, False])
@pytest.mark.parametrize(
    "options",
    [GenerateOptions(temperature=1.3), GenerateOptions(temperature=0.7, top_k=4, top_p=0.95, min_p=0.02)],
    ids=["warm", "filtered"],
)
def test_speculative_answers_have_the_targets_exact_distribution(chain: bool, options: GenerateOptions) -> None:
    target = ToyTarget(hashed_logits(SMALL, seed=5, levels=3), vocab_size=SMALL, memory=2)
    plan = Plan(budget=7, chain=chain, limit=12, context=64)
    expected = exact(target, options, 3)
    counts = dict.fromkeys(expected, 0)
    accepted: set[tuple[int, ...]] = set()
    for seed in range(DRAWS):
        answer: list[int] = []
        loop = rounds(
            target,
            FixedProposer(),
            PROMPT,
            plan,
            partial(choose_with, options, seed),
        )
        for one in loop:
            answer += one.tokens
            accepted.add(one.tokens[:-1])
            if len(answer) >= 3:
                break
        counts[tuple(answer[:3])] += 1
    likely = [answer for answer, probability in expected.items() if probability * DRAWS >= 5.0]
    observed = [counts[answer] for answer in likely]
    wanted = [expected[answer] * DRAWS for answer in likely]
    rest = 1.0 - sum(expected[answer] for answer in likely)
    observed.append(DRAWS - sum(observed))
    wanted.append(rest * DRAWS)
    if wanted[-1] < 5.0:  # too rare for a cell of its own
        last = (observed.pop(), wanted.pop())
        observed[-1], wanted[-1] = observed[-1] + last[0], wanted[-1] + last[1]
    assert len(likely) > 20
    assert chisquare(observed, wanted).pvalue > 1e-3
    if not chain:
        # Branches other than the first were accepted, at the first level and below.
        assert {(4,), (4, 2), (2, 3), (2, 1)} & accepted >= {(4,), (2, 3)}


def test_a_wrong_distribution_would_be_noticed() -> None:
    """The check above can fail: the same counts against a temperature that is off."""
    target = ToyTarget(hashed_logits(SMALL, seed=5, levels=3), vocab_size=SMALL, memory=2)
    options, other = GenerateOptions(temperature=1.3), GenerateOptions(temperature=1.8)
    last = tuple(PROMPT)
    drawn = [choose(target.logits(last), options, seed=seed, index=0) for seed in range(DRAWS)]
    ids, probabilities = distribution(target.logits(last), other)
    observed = [drawn.count(int(token)) for token in ids]
    assert chisquare(observed, probabilities * DRAWS).pvalue < 1e-3
