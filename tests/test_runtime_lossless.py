"""Speculative answers equal plain ones, whatever proposes: whole token lists, text, and why they ended."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elsi_edge.runtime.decode import Plan, rounds
from elsi_edge.runtime.options import GenerateOptions
from elsi_edge.runtime.pace import Pace
from elsi_edge.runtime.proposal import Bounds
from elsi_edge.runtime.result import GenerationResult
from elsi_edge.runtime.sampling import choose
from elsi_edge.runtime.tree import Tree
from tests.toy_proposers import (
    EOS,
    LiarProposer,
    NoisyProposer,
    OracleProposer,
    Scripted,
    plain_tokens,
    session_for,
    toy_target,
)

SEED = 4  # a toy world in which the answer to "abc" does not end soon
BUDGETS = (0, 1, 2, 3, 4, 7, 8, 30)
# Toy worlds and prompts in which answers end in both ways at every temperature below.
PROMPTS = ((0, "abc é"), (2, "a"), (9, "d" * 40), (3, "a"))
KINDS = (OracleProposer, LiarProposer, NoisyProposer)
GREEDY = GenerateOptions(max_tokens=20)
SAMPLED = [
    GenerateOptions(max_tokens=20, temperature=0.7, top_k=6, seed=1),
    GenerateOptions(max_tokens=20, temperature=1.3, top_p=0.9, min_p=0.05, seed=2**32 + 1),
]


def same(one: GenerationResult, other: GenerationResult) -> bool:
    return (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)


def consistent(result: GenerationResult) -> None:
    """The figures of a result agree with each other."""
    assert result.prompt_tokens >= 1
    after_first = len(result.token_ids) - 1
    if result.verifications == 0:
        assert after_first == 0
        assert result.tau is None is result.accepted_per_verification
        return
    assert result.tau is not None
    assert result.accepted_per_verification is not None
    assert result.tau * result.verifications == pytest.approx(after_first)
    accepted = sum(result.accepted_by_depth)
    assert result.accepted_per_verification * result.verifications == pytest.approx(accepted)
    assert accepted <= result.drafted <= result.draft_nodes * result.verifications
    counts = result.by_source.values()
    assert (sum(c.drafted for c in counts), sum(c.accepted for c in counts)) == (result.drafted, accepted)
    assert all((sum(c.drafted_by_depth), sum(c.accepted_by_depth)) == (c.drafted, c.accepted) for c in counts)
    assert result.empty_rounds <= result.verifications
    # Each verification brings its accepted drafts and a bonus token, unless the answer ends in a draft.
    assert after_first - accepted in (result.verifications, result.verifications - 1)
    assert list(result.accepted_by_depth) == sorted(result.accepted_by_depth, reverse=True)


@pytest.mark.parametrize("options", [GREEDY, *SAMPLED], ids=["greedy", "0.7", "1.3"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chain", [False, True], ids=["tree", "chain"])
def test_lossless(kind: type[Scripted], options: GenerateOptions, chain: bool) -> None:
    reasons = set()
    for number, prompt in PROMPTS:
        plain = session_for(None, seed=number).generate(prompt, options)
        answer = plain_tokens(prompt, options, seed=number)
        assert plain.token_ids == answer[: len(plain.token_ids)]
        reasons.add(plain.finish_reason)
        for budget in BUDGETS:
            session = session_for(kind(answer), seed=number, precision="int4" if chain else "fp32")
            result = session.generate(prompt, replace(options, draft_nodes=min(budget, 15) if chain else budget))
            assert same(result, plain)
            consistent(result)
            assert result.mode == ("plain" if budget == 0 else "chain" if chain else "tree")
            if kind is LiarProposer and budget and result.tau is not None:
                assert result.tau == 1.0
    assert reasons == {"stop", "length"}  # else the answers would not have tried both ends


@settings(max_examples=40, deadline=None)
@given(
    prompt=st.text("abcdxy é", min_size=1, max_size=8).filter(lambda text: text.strip() != ""),
    budget=st.sampled_from(BUDGETS),
    world=st.integers(0, 5),
    noise=st.integers(0, 99),
    temperature=st.sampled_from([0.0, 0.7, 1.3]),
    max_tokens=st.integers(1, 30),
    stop=st.lists(st.text("abcd é", min_size=1, max_size=3), max_size=2),
    context=st.integers(12, 60),
)
def test_lossless_for_anything(
    prompt: str,
    budget: int,
    world: int,
    noise: int,
    temperature: float,
    max_tokens: int,
    stop: list[str],
    context: int,
) -> None:
    options = GenerateOptions(
        max_tokens=max_tokens, temperature=temperature, top_k=9, seed=noise, stop=tuple(stop), draft_nodes=budget
    )
    plain = session_for(None, seed=world, context=context).generate(prompt, replace(options, draft_nodes=None))
    answer = plain_tokens(prompt, options, seed=world)
    for proposer in (NoisyProposer(answer, seed=noise), OracleProposer(answer)):
        session = session_for(proposer, seed=world, context=context)
        result = session.generate(prompt, options)
        assert same(result, plain)
        assert len(result.token_ids) <= max_tokens
        assert result.prompt_tokens + len(result.token_ids) <= context
        consistent(result)
        pieces = [event.text for event in session.stream(prompt, options)]
        assert "".join(pieces) == plain.text


@pytest.mark.parametrize("nodes", [1, 3, 7])
def test_the_oracle_as_a_chain_gets_everything_accepted(nodes: int) -> None:
    rounds_wanted = 4
    options = GenerateOptions(max_tokens=1 + rounds_wanted * (nodes + 1), draft_nodes=nodes)
    answer = plain_tokens("abc", options, seed=SEED)
    assert EOS not in answer
    result = session_for(OracleProposer(answer), seed=SEED, precision="int4").generate("abc", options)
    assert result.token_ids == answer
    assert result.tau == nodes + 1
    assert result.accepted_by_depth == (rounds_wanted,) * nodes
    assert result.verifications == rounds_wanted


def run_rounds(proposer: Scripted, *, seed: int, chain: bool) -> list[int]:
    target = toy_target(seed)
    plan = Plan(budget=7, chain=chain, limit=40, context=4096)
    answer: list[int] = []
    for one in rounds(target, proposer, [0, 3, 5], plan, lambda row, index: choose(row, GREEDY, seed=0, index=index)):
        answer += one.tokens
        # Everything but the last token is in the cache, slot by slot: what a fresh prefill would have put there.
        assert target.tokens == (0, 3, 5, *answer[:-1])
        fresh = toy_target(seed)
        fresh.prefill([0, 3, 5, *answer[:-1]])
        for mine, theirs in zip(target.cache.buffers, fresh.cache.buffers, strict=True):
            assert np.array_equal(mine[:, :, : target.length], theirs[:, :, : fresh.length])
    return answer


@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_cache_after_a_commit_is_what_a_prefill_makes(kind: type[Scripted], chain: bool) -> None:
    answer = run_rounds(Scripted(), seed=1, chain=chain)
    proposer = kind(answer)
    again = run_rounds(proposer, seed=1, chain=chain)
    assert again == answer
    # The proposer saw every committed row once, in order, with the token that followed it.
    committed = [0, 3, 5, *again]
    assert proposer.seen_tokens == committed[1:]
    assert proposer.seen_rows == committed[:-1]


def test_the_first_round_is_the_prefill_and_the_budget_shrinks_with_what_is_left() -> None:
    asked: list[tuple[int, int]] = []

    class Noting(OracleProposer):
        def propose(self, bounds: Bounds) -> Tree:
            asked.append((bounds.budget, bounds.depth))
            return super().propose(bounds)

    target = toy_target(2)
    plan = Plan(budget=4, chain=True, limit=8, context=4096)
    answer = plain_tokens("ab", GREEDY, seed=2)
    found = list(rounds(target, Noting(answer), [4], plan, lambda row, index: int(np.argmax(row))))
    assert found[0].drafted == 0
    assert [len(one.tokens) for one in found] == [1, 5, 2]
    assert asked == [(4, 6), (1, 1)]  # a chain's budget is its depth
    assert sum(len(one.tokens) for one in found) == 8
    assert [token for one in found for token in one.tokens] == list(answer[:8])


def test_the_end_of_an_answer_caps_a_trees_depth_and_not_its_nodes() -> None:
    plan = Plan(budget=30, chain=False, limit=20, context=4096)
    bounds = [plan.bounds(emitted, 50, Pace()) for emitted in (1, 14, 18)]
    assert [(b.budget, b.depth) for b in bounds if b is not None] == [(30, 18), (30, 5), (30, 1)]
    assert plan.bounds(19, 50, Pace()) is None  # the last token comes with the verification itself
    tight = replace(plan, context=60).bounds(1, 50, Pace())
    assert tight is not None and tight.budget == 8  # slots of the cache
    assert replace(plan, context=60).bounds(1, 58, Pace()) is None


def test_the_context_bounds_every_verification() -> None:
    for context in range(5, 30, 3):
        target = toy_target(3)
        widest = 0
        plan = Plan(budget=9, chain=False, limit=context - 4, context=context)
        proposer = NoisyProposer(plain_tokens("abcd", GREEDY, seed=3))
        emitted = 0
        for one in rounds(target, proposer, [0, 1, 2, 3], plan, lambda row, index: int(np.argmax(row))):
            emitted += len(one.tokens)
            widest = max(widest, target.length)
        assert emitted == context - 4
        assert widest <= context - 1


def test_the_toy_notices_a_wrong_commit() -> None:
    target = toy_target(0)
    target.prefill([1, 2])
    tree = Tree(tokens=(1, 2, 3), parents=(-1, -1, 0))
    target.verify(3, tree)
    target.commit([0, 2])
    target.commit([0])  # a row that no verification wrote at its place
    with pytest.raises(ValueError, match="wrong commit or mask"):
        target.verify(3, tree)
