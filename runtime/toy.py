"""A target and a codec in plain numpy, whose answers can be worked out by hand: for testing proposers, and the loop.

    target = ToyTarget(hashed_logits(32, seed=1), vocab_size=32)
    codec = ToyCodec([*string.ascii_lowercase, ".", " ", "!", "?", ",", ""], eos_ids=[31])
    session = toy_session(target, MyProposer(), codec=codec)
    session.generate("hello", GenerateOptions(draft_nodes=4))

Logits that are small integers are exact in float32, so whatever a proposer does, the tokens are those of plain decoding
to the last one.
"""

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from elsi_edge.artifacts import Precision
from elsi_edge.errors import PromptError
from elsi_edge.runtime.engines import Engine
from elsi_edge.runtime.kv_cache import KvCache
from elsi_edge.runtime.options import SessionSettings
from elsi_edge.runtime.proposal import Proposer
from elsi_edge.runtime.session import Session
from elsi_edge.runtime.target import TargetStep
from elsi_edge.runtime.tree import Tree, attention_bias
from elsi_edge.stream import StreamDecoder, decode_all

Logits = Callable[[tuple[int, ...]], NDArray[np.float32]]  # the last tokens, oldest first -> [V]


def hashed_logits(vocab_size: int, *, seed: int = 0, levels: int = 8) -> Logits:
    """Logits [V] that are integers in 0..levels-1, drawn anew for every sequence of last tokens."""
    known: dict[tuple[int, ...], NDArray[np.float32]] = {}

    def logits(last: tuple[int, ...]) -> NDArray[np.float32]:
        if last not in known:
            draw = np.random.default_rng(zlib.crc32(repr((seed, last)).encode()))
            known[last] = draw.integers(levels, size=vocab_size).astype(np.float32)
        return known[last]

    return logits


class ToyTarget:
    """A one-block model: a key is a row's position, a value its token, and logits are a function of the last tokens.

    It runs on the real cache under the real mask, and refuses a row that does not see each position up to its own
    exactly once, so a loop that commits or masks wrongly does not go unnoticed. The tapped state of a row is its token.
    """

    def __init__(self, logits: Logits, *, vocab_size: int, memory: int = 3) -> None:
        self.logits, self.vocab_size, self.memory = logits, vocab_size, memory
        self.cache = KvCache(blocks=1, kv_heads=1, head_width=1)

    @property
    def length(self) -> int:
        """S, tokens in the cache."""
        return self.cache.length

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens in the cache, by slot."""
        if not self.length:
            return ()
        return tuple(int(token) for token in self.cache.buffers[1][0, 0, : self.length, 0])

    def keep(self, rows: int) -> None:
        """Forget everything but the first `rows` tokens of the cache."""
        self.cache.truncate(rows)

    def prefill(self, token_ids: Sequence[int]) -> TargetStep:
        """Append and commit tokens. Returns logits [1, V] of the last one and taps [T, 1] of all."""
        step = self.verify(token_ids[0], Tree.chain(token_ids[1:]))
        self.cache.commit(range(len(token_ids)))
        return TargetStep(logits=step.logits[-1:], taps=step.taps)

    def verify(self, root: int, tree: Tree, *, greedy: bool = False) -> TargetStep:
        """Logits [N + 1, V] and taps [N + 1, 1] of the root and every node; nothing is committed."""
        cached, rows = self.length, tree.size + 1
        self.cache.reserve(cached + rows)
        keys, values = (buffer[0, 0, :, 0] for buffer in self.cache.buffers)
        tokens = np.array([root, *tree.tokens])  # shape: [N + 1]
        keys[cached : cached + rows] = cached + tree.depths()
        values[cached : cached + rows] = tokens
        bias = attention_bias(tree.ancestors(), cached)[0, 0]  # shape: [N + 1, S + N + 1]
        seen = np.tri(rows, cached + rows, cached, dtype=np.bool_) & (bias == 0.0)  # causal too, as the operator is
        logits = [self.logits(last) for last in self._read(seen, keys[: cached + rows], values)]
        return TargetStep(logits=np.stack(logits), taps=tokens[:, None].astype(np.float32))

    def commit(self, rows: Sequence[int]) -> None:
        """Keep these rows of the last verification in the cache."""
        self.cache.commit(rows)

    def _read(
        self, seen: NDArray[np.bool_], keys: NDArray[np.float32], values: NDArray[np.float32]
    ) -> list[tuple[int, ...]]:
        """The last tokens that each row sees, in the order of their positions."""
        counts = seen.sum(axis=1)  # shape: [N + 1]
        positions = np.where(seen, keys, np.inf)
        order = np.argsort(positions, axis=1)
        found = np.take_along_axis(positions, order, axis=1)
        places = np.arange(len(keys))
        if not (found == np.where(places < counts[:, None], places, np.inf)).all():
            raise ValueError("a row does not see each position up to its own exactly once: wrong commit or mask")
        tokens = values[order].astype(int)
        return [
            tuple(row[max(0, n - self.memory) : n].tolist()) for row, n in zip(tokens, counts.tolist(), strict=True)
        ]


class ToyCodec:
    """A vocabulary given piece by piece, the token id being a piece's index; bytes may hold parts of a character."""

    has_template = True

    def __init__(self, pieces: Sequence[str | bytes], *, eos_ids: Collection[int] = ()) -> None:
        self.pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
        self.eos_ids = frozenset(eos_ids)

    def encode_chat(self, messages: Sequence[Mapping[str, str]], *, limit: int | None = None) -> list[int]:
        """The contents of the messages, one after the other. Raises PromptError."""
        return self.encode_raw("".join(message["content"] for message in messages), limit=limit)

    def encode_raw(self, text: str, *, limit: int | None = None) -> list[int]:
        """Longest pieces first. Raises PromptError for text without a piece, or beyond `limit` tokens."""
        left, ids = text.encode(), []
        while left:
            fitting = [
                (len(piece), -token) for token, piece in enumerate(self.pieces) if piece and left.startswith(piece)
            ]
            if not fitting:
                raise PromptError(f"the toy vocabulary has no piece for {left[:8]!r}")
            size, token = max(fitting)
            ids.append(-token)
            left = left[size:]
        if limit is not None and len(ids) > limit:
            raise PromptError(f"the prompt has {len(ids)} tokens, {limit} fit; shorten it")
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; end tokens give none."""
        return decode_all(self._bytes, ids)

    def stream(self) -> StreamDecoder:
        """A decoder for one answer, token by token."""
        return StreamDecoder(self._bytes)

    def _bytes(self, token_id: int, first: bool) -> bytes:
        return b"" if token_id in self.eos_ids else self.pieces[token_id]


def toy_session(
    target: ToyTarget,
    proposer: Proposer | None = None,
    *,
    codec: ToyCodec,
    context: int = 4096,
    precision: Precision = "fp32",
) -> Session:
    """A session over a toy, as if it came from a bundle of this precision and context (tokens)."""
    engine = Engine(target=target, proposer=proposer)
    return Session(
        codec=codec,
        engines={True: engine, False: engine},
        precision=precision,
        context=context,
        settings=SessionSettings(threads=1),
        has_draft=proposer is not None,
    )
