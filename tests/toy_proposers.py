"""Proposers that know the answer, or pretend to, and a toy world to run them in."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from elsi_edge.artifacts import Precision
from elsi_edge.runtime.options import GenerateOptions
from elsi_edge.runtime.proposal import Bounds, Proposer
from elsi_edge.runtime.session import Codec, Session
from elsi_edge.runtime.toy import ToyCodec, ToyTarget, hashed_logits, toy_session
from elsi_edge.runtime.tree import ROOT, Tree

V = 14
EOS = V - 1
PIECES: list[str | bytes] = ["a", "b", "c", "d", "ab", " ", "é", "x", "y", b"\xf0\x9f", b"\x99\x82", "\n", "zz", ""]
CODEC = ToyCodec(PIECES, eos_ids=[EOS])


class Endless:
    """Another codec without its end tokens."""

    has_template = True
    eos_ids: frozenset[int] = frozenset()

    def __init__(self, codec: Codec) -> None:
        self.encode_chat, self.encode_raw, self.stream = codec.encode_chat, codec.encode_raw, codec.stream


class Scripted:
    """Keeps the place in an answer that is known beforehand, and what was observed; proposes nothing."""

    def __init__(self, answer: Sequence[int] = ()) -> None:
        self.answer = list(answer)
        self.reset()

    def reset(self) -> None:
        self.seen_tokens: list[int] = []  # that followed
        self.seen_rows: list[int] = []  # tokens of the committed rows: the toy's taps
        self.keep(0)

    def keep(self, rows: int) -> None:
        del self.seen_tokens[rows:], self.seen_rows[rows:]
        self.place = 0

    def observe(self, next_tokens: Sequence[int], taps: NDArray[np.float32]) -> None:
        assert len(next_tokens) == len(taps)
        self.place = self.place + len(next_tokens) if self.place else 1
        self.seen_tokens += next_tokens
        self.seen_rows += [int(tap) for tap in taps[:, 0]] if taps.shape[1] == 1 else []

    def propose(self, bounds: Bounds) -> Tree:
        return Tree.empty()

    def coming(self, count: int) -> list[int]:
        return self.answer[self.place : self.place + count]


class OracleProposer(Scripted):
    """Always right. In a tree a wrong sibling comes before each right node: the way leads through second branches."""

    def propose(self, bounds: Bounds) -> Tree:
        if bounds.chain or bounds.budget < 2:
            return Tree.chain(self.coming(min(bounds.budget, bounds.depth)))
        tokens: list[int] = []
        parents: list[int] = []
        parent = ROOT
        for token in self.coming(min(bounds.budget // 2, bounds.depth)):
            tokens += [(token + 1) % V, token]
            parents += [parent, parent]
            parent = len(tokens) - 1
        return Tree(tokens=tuple(tokens), parents=tuple(parents))


class LiarProposer(Scripted):
    """Always wrong at the first level, and right below it, where nobody should look."""

    def propose(self, bounds: Bounds) -> Tree:
        coming = self.coming(bounds.budget if not bounds.chain else min(bounds.budget, bounds.depth))
        if not coming:
            return Tree.empty()
        wrong = [(coming[0] + 1) % V, *coming[1:]]
        parents = (ROOT, *([0] * (len(wrong) - 1)))
        return Tree.chain(wrong) if bounds.chain else Tree(tokens=tuple(wrong), parents=parents)


class NoisyProposer(Scripted):
    """Random trees or chains of random size whose nodes are right about half of the time, twins included."""

    def __init__(self, answer: Sequence[int] = (), seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        super().__init__(answer)

    def propose(self, bounds: Bounds) -> Tree:
        size = int(self.random.integers(bounds.budget + 1))
        parents = [node - 1 if bounds.chain else int(self.random.integers(ROOT, node)) for node in range(size)]
        depths: list[int] = []
        for parent in parents:
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        right = [*self.coming(size), *([0] * size)]
        tokens = [right[d] if self.random.random() < 0.6 else int(self.random.integers(V)) for d in depths]
        return Tree(tokens=tuple(tokens), parents=tuple(parents))


world = lru_cache(hashed_logits)  # shared, because filling the table is what takes the time


def toy_target(seed: int = 0) -> ToyTarget:
    return ToyTarget(world(V, seed=seed), vocab_size=V)


def session_for(
    proposer: Proposer | None, *, seed: int = 0, context: int = 4096, precision: Precision = "fp32"
) -> Session:
    return toy_session(toy_target(seed), proposer, codec=CODEC, context=context, precision=precision)


def plain_tokens(prompt: str, options: GenerateOptions, *, seed: int = 0) -> tuple[int, ...]:
    """What plain decoding answers, beyond any end: the end token and stops are ignored."""
    session = toy_session(toy_target(seed), codec=ToyCodec(PIECES))
    return session.generate(prompt, replace(options, plain=True, draft_nodes=None, stop=())).token_ids
