"""Which chain or tree, or none, brings the most tokens per second: recorded answers against the cost curve."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from elsi_edge.runtime.decode import Plan
from elsi_edge.runtime.drafter import Draft
from elsi_edge.runtime.mixed import MixedProposer
from elsi_edge.runtime.options import PROPOSALS, Proposal
from elsi_edge.runtime.pace import FixedPace, Pace
from elsi_edge.runtime.price import Costs
from elsi_edge.runtime.recorded import CountingDraft, Played, Recorded, play
from elsi_edge.runtime.tally import Tally
from elsi_edge.runtime.tuning import Choice

_WORTH_IT = 1.02  # predicted speed-up below which nothing is drafted
# Between calls of the target Python finds the caches full of weights: times what playing takes, as measured on rounds.
_COLD = 3.0
# Of what the fastest shape reaches: shapes this fast are as good, since the answers that they are played on copy less
# of their prompts than summaries or extraction do, and times of calls are no surer.
_AS_GOOD = 0.98
_MOST_NODES = 63  # of a tree that is considered


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A way to draft."""

    chain: bool
    nodes: int  # N
    proposals: tuple[Proposal, ...]
    priced: bool  # whether nodes and calls must be worth their price, or all N are always taken

    def words(self) -> str:
        """As tables call it."""
        kind = "chain" if self.chain else "tree"
        return f"{kind} of {'at most ' if self.priced else ''}{self.nodes}, {' and '.join(self.proposals)}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a shape should bring."""

    shape: Shape
    tokens_per_s: float  # predicted, without prefill
    speedup: float  # over plain decoding, predicted the same way
    tau: float
    nodes: float  # per round
    ms_verify: float  # per round
    ms_draft: float
    ms_overhead: float
    tally: Tally

    def to_json(self) -> dict[str, Any]:
        """A line of the tuning file's `shapes`."""
        return {
            "mode": "chain" if self.shape.chain else "tree",
            "draft_nodes": self.shape.nodes,
            "proposals": list(self.shape.proposals),
            "priced": self.shape.priced,
            "tokens_per_s": self.tokens_per_s,
            "speedup": self.speedup,
            "tau": self.tau,
            "nodes_per_round": self.nodes,
            "ms_per_round": {"verify": self.ms_verify, "draft": self.ms_draft, "overhead": self.ms_overhead},
        }


@dataclass(frozen=True, kw_only=True)
class Solver:
    """Predicts shapes on recorded answers."""

    answers: Sequence[Recorded]
    draft: Draft | None
    costs: Costs  # milliseconds; its draft's level is a tree's
    overhead_ms: float  # of a round outside ONNX Runtime and proposing
    ngram_prior: tuple[float, ...]
    context: int
    chain_level_ms: float | None = None  # a chain's level, where it is another

    def costs_of(self, shape: Shape) -> Costs:
        """The costs that hold for a shape."""
        if self.chain_level_ms is None or not shape.chain:
            return self.costs
        return replace(self.costs, level=self.chain_level_ms)

    def plain_ms(self) -> float:
        """Milliseconds per token of plain decoding, on these answers."""
        pasts = [len(a.prompt_ids) + i for a in self.answers for i in range(len(a.token_ids) - 1)]
        return sum(self.costs.rows(1, past) for past in pasts) / len(pasts) + self.overhead_ms

    def outcome(self, shape: Shape, speedup: float) -> Outcome:
        """Play the answers with a shape; prices are those of rounds that bring `speedup` tokens a plain step."""
        counting = None if self.draft is None else CountingDraft(self.draft)
        proposer = MixedProposer(counting, ngram_prior=self.ngram_prior)
        played, pace = Played(), FixedPace(self.costs_of(shape), speedup) if shape.priced else Pace()
        for answer in self.answers:
            plan = Plan(
                budget=shape.nodes,
                chain=shape.chain,
                limit=len(answer.token_ids),
                context=self.context,
                proposals=shape.proposals,
            )
            play(answer, proposer, plan, pace, counting, played)
        return self._priced(shape, played)

    def _priced(self, shape: Shape, played: Played) -> Outcome:
        tally = Tally()
        verify = 0.0
        for one, past, used in zip(played.rounds, played.pasts, played.used, strict=True):
            tally.add(one, used)
            verify += self.costs.rows(one.drafted + 1, past)
        count = max(1, len(played.rounds))
        draft = played.entries * self.costs.entry + played.levels * self.costs_of(shape).level
        overhead = count * self.overhead_ms + _COLD * played.seconds * 1e3
        per_token = (verify + draft + overhead) / max(1, played.tokens)
        return Outcome(
            shape=shape,
            tokens_per_s=1e3 / per_token,
            speedup=self.plain_ms() / per_token,
            tau=played.tokens / count,
            nodes=tally.drafted / count,
            ms_verify=verify / count,
            ms_draft=draft / count,
            ms_overhead=overhead / count,
            tally=tally,
        )


def candidate_shapes(precision: str, exact: int, *, has_draft: bool, exact_trees: bool = False) -> list[Shape]:
    """Shapes to consider where `exact` rows a step are exact: chains at int4 and int8, trees where those are exact too.

    At fp32 rows differ by rounding alone, so trees of any size are considered.
    """
    both: tuple[Proposal, ...] = PROPOSALS if has_draft else ("ngram",)
    tree = precision == "fp32" or exact_trees
    most = _MOST_NODES if precision == "fp32" else min(_MOST_NODES, exact - 1)
    kinds = [(False, n) for n in ((4, 8, 16, 30) if tree else ())]
    if precision != "fp32":
        kinds += [(True, n) for n in ((4, 15) if tree else (2, 4, 8, 15))]
    shapes = [
        Shape(chain=chain, nodes=nodes, proposals=proposals, priced=True)
        for chain, nodes in kinds
        for proposals in dict.fromkeys((both, ("ngram",)))
    ]
    shapes += [Shape(chain=True, nodes=nodes, proposals=both, priced=False) for nodes in (1, 2, 4)]
    shapes += [Shape(chain=False, nodes=nodes, proposals=both, priced=False) for nodes in (4, 8, 16) if tree]
    return [shape for shape in shapes if shape.nodes <= most]


def choose_shape(outcomes: Sequence[Outcome], plain_ms: float, costs: Costs) -> Choice:
    """The best priced shape, or none where it brings under 2 %, in words."""
    plain = 1e3 / plain_ms
    priced = [outcome for outcome in outcomes if outcome.shape.priced]
    two = costs.rows(2, costs.contexts[0]) / costs.rows(1, costs.contexts[0])
    steep = f"verifying two rows takes {two:.2f} times one"
    if not priced:
        why = "several rows a step are not exact on this device, so nothing is drafted"
        return _plain_choice(plain, why)
    fastest = max(priced, key=lambda outcome: outcome.tokens_per_s)
    # The largest budget and all sources: nodes and calls are taken only where they pay, as on text that repeats the
    # prompt.
    close = [outcome for outcome in priced if outcome.tokens_per_s >= _AS_GOOD * fastest.tokens_per_s]
    best = max(close, key=lambda one: (one.shape.nodes, len(one.shape.proposals), one.tokens_per_s))
    gain = f"{best.tokens_per_s:.1f} tokens/s against {plain:.1f} plain ({best.speedup:.2f} times)"
    if best.speedup < _WORTH_IT:
        return _plain_choice(plain, f"{steep}, and the best shape ({best.shape.words()}) would bring only {gain}")
    used = {name: counts for name, counts in best.tally.by_source().items() if counts.drafted}
    said = ", ".join(
        f"{name} {counts.accepted / counts.drafted:.0%} of {counts.drafted}" for name, counts in used.items()
    )
    pays = f"pays where its token is right more than {two - 1:.0%} of the time" if two > 1 else "costs nothing here"
    why = (
        f"{steep}, so a second row {pays}; "
        f"the {best.shape.words()} takes {best.nodes:.2f} nodes a round (accepted: {said}), tau {best.tau:.2f}: {gain}"
    )
    if best is not fastest:
        why += f"; the {fastest.shape.words()} was within {1 - _AS_GOOD:.0%} of it: of such the roomiest is taken"
    fixed = max(outcomes, key=lambda outcome: outcome.tokens_per_s)
    if _AS_GOOD * fixed.tokens_per_s > fastest.tokens_per_s:
        why += (
            f"; the {fixed.shape.words()} was faster on this sample ({fixed.tokens_per_s:.1f}), but always takes "
            "as many nodes, also on text where they do not pay"
        )
    if "draft" in best.shape.proposals and not {"draft", "both"} & set(used):
        why += "; the draft's calls cost too much here to be made (was the machine busy? then measure again)"
    return Choice(
        mode="chain" if best.shape.chain else "tree",
        draft_nodes=best.shape.nodes,
        proposals=best.shape.proposals,
        tokens_per_s=best.tokens_per_s,
        plain_tokens_per_s=best.tokens_per_s / best.speedup,
        why=why,
    )


def _plain_choice(plain: float, why: str) -> Choice:
    return Choice(mode="plain", draft_nodes=0, proposals=(), tokens_per_s=plain, plain_tokens_per_s=plain, why=why)
