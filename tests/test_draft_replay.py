"""Replay against the runtime's own proposer, place by place, on a random draft with one block and with two."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from elsi_edge.draft.data import Row
from elsi_edge.draft.network import DraftCache, DraftNetwork
from elsi_edge.draft.packing import pack, pack_part
from elsi_edge.draft.replay import Drafting, Replayed, greedy, replay, tau, walk
from elsi_edge.draft.unroll import PackedBatch
from elsi_edge.runtime.draft import DraftStep
from elsi_edge.runtime.mixed import MixedProposer
from elsi_edge.runtime.proposal import Bounds
from elsi_edge.runtime.tree import ROOT, Tree, path_mask
from tests.test_draft_unroll import DRAFT_VOCAB, VOCAB, WIDTH, M, config

IDS = np.sort(np.random.default_rng(0).permutation(VOCAB)[:DRAFT_VOCAB]).astype(np.int64)
DRAFTINGS = [Drafting(nodes=n, chain=True) for n in (2, 4)] + [Drafting(nodes=n, chain=False) for n in (3, 7, 30, 60)]


def network(depth: int) -> DraftNetwork:
    torch.manual_seed(3)
    net = DraftNetwork(replace(config(), depth=depth), torch.randn(VOCAB, WIDTH))
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
        net.head.weight.mul_(2.0)  # some confidence: deep paths, and budgets that cut
    return net


class TorchDraft:
    """What the proposer asks of the draft, by `forward_step`."""

    def __init__(self, net: DraftNetwork) -> None:
        self.net, self.draft_to_target_ids = net, IDS
        self.reset()

    def reset(self) -> None:
        self.cache, self.nodes = DraftCache(), DraftCache()

    @property
    def length(self) -> int:
        return self.cache.length

    def keep(self, entries: int) -> None:
        assert entries == 0
        self.reset()

    def room(self) -> int:
        return 1000

    def extend(self, tokens: Sequence[int], taps: NDArray[np.float32]) -> DraftStep:
        states = self.net.project(torch.from_numpy(taps))[None]
        positions = torch.arange(len(tokens))[None]
        logits, own = self.net.forward_step(states, torch.tensor([list(tokens)]), positions, self.cache)
        self.nodes = DraftCache(pairs=dict(self.cache.pairs))
        return self._step(logits[:, -1:], own[:, -1:])

    def expand(
        self, tokens: Sequence[int], states: NDArray[np.float32], depth: int, parents: Sequence[int]
    ) -> DraftStep:
        past = torch.ones(len(tokens), self.cache.length, dtype=torch.bool)
        mask = torch.cat([past, torch.from_numpy(path_mask(parents)[-len(tokens) :])], dim=1)[None]
        positions = torch.full((1, len(tokens)), self.cache.length + depth - 1)
        found = self.net.forward_step(
            torch.from_numpy(states)[None], torch.tensor([list(tokens)]), positions, self.nodes, mask
        )
        return self._step(*found)

    def _step(self, logits: torch.Tensor, own: torch.Tensor) -> DraftStep:
        return DraftStep(log_probs=logits[0].log_softmax(-1).numpy(), states=own[0].numpy())


class Answers:
    """Conversations that follow the draft's first guesses now and then; stands for a ShardSet."""

    def __init__(self, net: DraftNetwork, prompts: tuple[int, ...], answer: int) -> None:
        self.talks: dict[str, tuple[list[int], NDArray[np.float32], int]] = {}
        draw = np.random.default_rng(5)
        for index, prompt in enumerate(prompts):
            taps = draw.standard_normal((prompt + answer, M * WIDTH)).astype(np.float32)
            tokens = draw.integers(0, VOCAB, prompt).tolist()
            draft = TorchDraft(net)
            while len(tokens) < prompt + answer:
                draft.reset()
                tree = MixedProposer(draft)
                if len(tokens) > prompt:
                    tree.observe(tokens[1:], taps[: len(tokens) - 1])
                    path = follow(tree.propose(bounds_of(12, 12)), draw)
                    tokens += path[: prompt + answer - len(tokens)]
                tokens.append(int(draw.integers(0, VOCAB)))
            self.talks[f"r{index}@0"] = (tokens[: prompt + answer], taps, prompt)
        self.rows = [
            Row(
                key=key, shard=0, start=0, length=len(t), record=0, records=answer, bases=sum(map(bool, mask(t, p)[2:]))
            )
            for key, (t, _, p) in self.talks.items()
        ]

    def batch(self, rows: list[Row], steps: int) -> PackedBatch:
        talks = [self.talks[row.key] for row in rows]
        parts = [pack_part(np.array(t), mask(t, p), torch.from_numpy(taps), steps) for t, taps, p in talks]
        ids = [torch.zeros(row.records, 1, dtype=torch.long) for row in rows]
        return pack(parts, target_ids=ids, target_log_probs=[i.float() for i in ids], tokens=0, row_ids=(), shards=())


def mask(tokens: list[int], prompt: int) -> NDArray[np.bool_]:
    return np.arange(len(tokens)) >= prompt


def bounds_of(budget: int, depth: int, *, chain: bool = False) -> Bounds:
    return Bounds(budget=budget, depth=depth, chain=chain, proposals=("draft",))


def follow(tree: Tree, draw: np.random.Generator) -> list[int]:
    """A random path from the root, at times short."""
    tokens, node = [], ROOT
    while draw.random() < 0.8:
        children = [child for child, parent in enumerate(tree.parents) if parent == node]
        if not children:
            break
        node = int(draw.choice(children))
        tokens.append(tree.tokens[node])
    return tokens


def decode(
    net: DraftNetwork, tokens: list[int], taps: NDArray[np.float32], prompt: int, how: Drafting, limit: int | None
) -> Replayed:
    """The runtime's loop with a target that says the recorded answer."""
    total = len(tokens) - prompt
    emitted, verifications = 1, 0
    while emitted < total:
        known = prompt + emitted
        depth = how.nodes if limit is None else limit - emitted - 1
        budget = min(how.nodes, depth) if how.chain else how.nodes
        draft = TorchDraft(net)
        proposer = MixedProposer(draft)
        proposer.observe(tokens[1:known], taps[: known - 1])
        tree = proposer.propose(bounds_of(budget, depth, chain=how.chain)) if depth > 0 else Tree.empty()
        row, accepted = 0, 0
        while known + accepted < len(tokens):
            child = tree.children(row).get(tokens[known + accepted])
            if child is None:
                break
            row, accepted = child, accepted + 1
        emitted += min(accepted + 1, total - emitted)
        verifications += 1
    return Replayed(tokens=total - 1, verifications=verifications)


@pytest.mark.parametrize(("depth", "limit"), [(1, None), (1, 16), (2, None)])
def test_replay_accepts_what_the_runtime_would(depth: int, limit: int | None) -> None:
    net = network(depth)
    with torch.no_grad():
        data = Answers(net, (2, 7, 1, 4), 16)
        ids = torch.from_numpy(IDS)
        results = replay(net, data, data.rows, ids, DRAFTINGS, limit=limit)  # type: ignore[arg-type]
        found = {row.key: result for row, result in results}
        for key, (tokens, taps, prompt) in data.talks.items():
            for how in DRAFTINGS:
                assert found[key][how.name] == decode(net, tokens, taps, prompt, how, limit), (key, how.name)
    taus = tau(list(found.values()))
    assert 1.1 < taus["chain-2"] < taus["tree-7"] < taus["tree-60"]


def test_walk() -> None:
    assert walk(np.array([9, 0, 2, 0, 0, 5]), 6) == Replayed(tokens=5, verifications=3)  # 1, then 3, then the last
    assert walk(np.array([0, 2, 0, 0, 5]), 6).verifications == 3  # the first place has no entry
    assert walk(np.array([], dtype=np.int64), 1).verifications == 0


def test_greedy_rows() -> None:
    rows = [SimpleNamespace(key=key) for key in ("a@0", "b@0.8", "c@10")]
    assert [row.key for row in greedy(rows)] == ["a@0"]  # type: ignore[arg-type]
