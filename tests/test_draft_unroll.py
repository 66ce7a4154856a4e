"""The unrolled training forward against real incremental drafting, and the loss against its definition."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from elsi_edge.artifacts import DraftConfig, LayerSelection
from elsi_edge.draft.loss import batch_loss, fused_soft_cross_entropy, restricted_probs
from elsi_edge.draft.network import DraftCache, DraftNetwork
from elsi_edge.draft.packing import pack, pack_part
from elsi_edge.draft.settings import TrainSettings
from elsi_edge.draft.unroll import PackedBatch, unroll

WIDTH, VOCAB, DRAFT_VOCAB, M, TOP, STEPS = 16, 40, 24, 2, 5, 3


def config() -> DraftConfig:
    selection = LayerSelection(taps=(1, 3), method="explicit", blocks=4, width=WIDTH)
    return DraftConfig(
        selection=selection,
        width=WIDTH,
        heads=4,
        kv_heads=2,
        head_width=6,
        mlp_width=20,
        draft_vocab_size=DRAFT_VOCAB,
        target_vocab_size=VOCAB,
        context=128,
        rope_theta=100.0,
        norm_eps=1e-5,
    )


def network(seed: int = 0) -> DraftNetwork:
    torch.manual_seed(seed)
    net = DraftNetwork(config(), torch.randn(VOCAB, WIDTH))
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    return net


class Conversation:
    """Random tokens, states and target records of one conversation."""

    def __init__(self, seed: int, mask: Sequence[int]) -> None:
        generator = np.random.default_rng(seed)
        length = len(mask)
        self.mask = np.array(mask, dtype=bool)
        self.tokens = generator.integers(0, VOCAB, length)
        self.taps = torch.from_numpy(generator.standard_normal((length, M * WIDTH)).astype(np.float32))
        records = int(self.mask.sum())
        self.ids = torch.from_numpy(np.stack([generator.permutation(VOCAB)[:TOP] for _ in range(records)]))
        logits = torch.from_numpy(generator.standard_normal((records, VOCAB))).float().log_softmax(-1)
        self.log_probs = logits.gather(-1, self.ids)


def pack_all(*conversations: Conversation, steps: int = STEPS) -> PackedBatch:
    return pack(
        [pack_part(c.tokens, c.mask, c.taps, steps) for c in conversations],
        target_ids=[c.ids for c in conversations],
        target_log_probs=[c.log_probs for c in conversations],
        tokens=sum(len(c.tokens) for c in conversations),
        row_ids=("x",) * len(conversations),
        shards=("s",),
    )


PLAIN = [0, 0, 0, 1, 1, 1, 1, 1, 1]
TWO_ANSWERS = [0, 0, 1, 1, 0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("mask", [PLAIN, TWO_ANSWERS, [1] * 6])
def test_unroll_equals_incremental_rollout_with_a_cache(mask: list[int]) -> None:
    net, talk = network(), Conversation(1, mask)
    batch = pack_all(talk)
    states = unroll(net, batch, STEPS)
    tokens = torch.from_numpy(talk.tokens)
    projected = net.project(talk.taps)
    for slot, base in enumerate(batch.bases.tolist()):
        # Entries 0..p of true states, as decoding has them after a verification; then the draft's own output.
        cache = DraftCache()
        logits, state = net.forward_step(
            projected[None, : base + 1], tokens[None, 1 : base + 2], torch.arange(base + 1)[None], cache
        )
        logits, state = logits[:, -1:], state[:, -1:]
        for step in range(STEPS):
            torch.testing.assert_close(net.logits(states[step][slot]), logits[0, 0], rtol=1e-4, atol=1e-4)
            following = base + step + 2
            if following >= len(tokens):
                break
            position = torch.tensor([[base + step + 1]])
            logits, state = net.forward_step(state, tokens[None, following : following + 1], position, cache)


def test_targets_are_indexed_by_base() -> None:
    talk = Conversation(2, TWO_ANSWERS)
    batch = pack_all(talk)
    answers = np.flatnonzero(talk.mask).tolist()
    assert (batch.bases + 2).tolist() == [token for token in answers if token >= 2]
    for step in range(STEPS):
        for slot, base in enumerate(batch.bases.tolist()):
            predicted = base + step + 2
            record = int(batch.step_targets[step][slot])
            assert record == (answers.index(predicted) if predicted in answers else -1)
            if base + step + 1 < len(talk.tokens):
                assert int(batch.step_tokens[step][slot]) == talk.tokens[base + step + 1]


def test_forward_step_with_a_mask_hides_siblings() -> None:
    """Two siblings under one mask give what each gives alone: the shape that drafting a tree uses."""
    net, generator = network(), torch.Generator().manual_seed(0)
    states = torch.randn(1, 4, WIDTH, generator=generator)
    tokens = torch.tensor([[1, 2, 3, 4]])
    cache = DraftCache()
    net.forward_step(states[:, :2], tokens[:, :2], torch.tensor([[0, 1]]), cache)
    alone = []
    for child in (2, 3):
        own = DraftCache(pairs=dict(cache.pairs))
        alone.append(
            net.forward_step(states[:, child : child + 1], tokens[:, child : child + 1], torch.tensor([[2]]), own)
        )
    mask = torch.tensor([[[1, 1, 1, 0], [1, 1, 0, 1]]], dtype=torch.bool)
    logits, _ = net.forward_step(states[:, 2:], tokens[:, 2:], torch.tensor([[2, 2]]), cache, mask)
    torch.testing.assert_close(logits, torch.cat([logit for logit, _ in alone], dim=1))


def loss_of(batch: PackedBatch, net: DraftNetwork, inverse: torch.Tensor) -> float:
    settings = TrainSettings(steps=1, unroll=STEPS, arithmetic="fp32")
    return float(batch_loss(net, batch, inverse, settings, torch.float32).detach())


@pytest.fixture(name="inverse")
def _inverse() -> torch.Tensor:
    inverse = torch.full((VOCAB,), -1)
    inverse[torch.arange(0, 2 * DRAFT_VOCAB, 2)[: VOCAB // 2]] = torch.arange(VOCAB // 2)
    return inverse


def test_loss_by_hand(inverse: torch.Tensor) -> None:
    """One long and one short answer: every answer position weighs the same within its step, nothing else counts."""
    net = network()
    long, short = Conversation(3, [0] * 4 + [1] * 9), Conversation(4, [0] * 10 + [1] * 3)
    batch = pack_all(long, short)
    states = unroll(net, batch, STEPS)
    expected = 0.0
    for step in range(STEPS):
        losses = []
        for slot in range(len(batch.bases)):
            record = int(batch.step_targets[step][slot])
            if record < 0:
                continue
            log_q = net.logits(states[step][slot]).detach().log_softmax(-1)
            losses.append(
                -sum(
                    float(batch.target_log_probs[record, i].exp() * log_q[inverse[token]])
                    for i, token in enumerate(batch.target_ids[record].tolist())
                    if inverse[token] >= 0
                )
            )
        expected += 0.8**step * sum(losses) / len(losses)
    expected /= sum(0.8**step for step in range(STEPS))
    assert loss_of(batch, net, inverse) == pytest.approx(expected, rel=1e-5)


def test_a_conversation_is_independent_of_its_company(inverse: torch.Tensor) -> None:
    """States of B alone, after A, after another A and before one, over all steps; and no target of a neighbour."""
    net = network()
    b = Conversation(5, PLAIN)
    alone = torch.stack(unroll(net, pack_all(b), STEPS))
    count = alone.shape[1]
    for company in (Conversation(6, PLAIN), Conversation(7, [0] * 20 + [1] * 5)):
        batch = pack_all(company, b)
        together = torch.stack(unroll(net, batch, STEPS))
        torch.testing.assert_close(together[:, -count:], alone, rtol=1e-5, atol=1e-5)
        first = len(company.ids)
        targets = batch.step_targets[:, -count:]
        assert bool(((targets < 0) | (targets >= first)).all())
        before = torch.stack(unroll(net, pack_all(b, company), STEPS))
        torch.testing.assert_close(before[:, :count], alone, rtol=1e-5, atol=1e-5)
    # Equal conversations, so the mean over both is the loss of one.
    assert loss_of(pack_all(b, b), net, inverse) == pytest.approx(loss_of(pack_all(b), net, inverse), rel=1e-5)


def test_fused_loss_has_the_gradient_of_its_definition(inverse: torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(700, WIDTH, generator=generator, requires_grad=True)  # more than one chunk
    head = torch.randn(DRAFT_VOCAB, WIDTH, generator=generator, requires_grad=True)
    ids = torch.stack([torch.randperm(VOCAB, generator=generator)[:TOP] for _ in range(700)])
    log_probs = torch.randn(700, TOP, generator=generator).log_softmax(-1)
    weights = torch.rand(700, generator=generator)
    draft_ids, probs = restricted_probs(log_probs, ids, inverse)
    fused = fused_soft_cross_entropy(hidden, head, draft_ids, probs, weights, dtype=torch.float32)
    log_q = (hidden @ head.t()).log_softmax(-1)
    plain = -(weights[:, None] * probs * log_q.gather(-1, draft_ids)).sum()
    torch.testing.assert_close(fused, plain)
    for one, other in zip(
        torch.autograd.grad(fused, (hidden, head)), torch.autograd.grad(plain, (hidden, head)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_positions_that_the_draft_cannot_say_pull_nothing(inverse: torch.Tensor) -> None:
    net, talk = network(), Conversation(8, PLAIN)
    outside = torch.nonzero(inverse < 0)[:TOP, 0]
    batch = pack_all(talk)
    batch = replace(batch, target_ids=outside.expand(len(talk.ids), TOP))
    assert loss_of(batch, net, inverse) == 0.0
