"""What a call's options come to on a bundle and a device: mode, budget, sources, and prices. Pure, no I/O."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from elsi_edge.artifacts import Precision
from elsi_edge.errors import BundleError, UsageError
from elsi_edge.runtime.native_ops import EXACT_ROWS
from elsi_edge.runtime.options import PROPOSALS, GenerateOptions, Proposal
from elsi_edge.runtime.pace import Clock, FixedPace, LivePace, Pace
from elsi_edge.runtime.price import fixed, typical
from elsi_edge.runtime.tuning import Tuning

Mode = Literal["plain", "chain", "tree"]

# Until the device is measured: nodes a round at most. How many it takes depends on typical prices.
DEFAULT_DRAFT_NODES: Mapping[Precision, int] = {"fp32": 8, "int8": 4, "int4": 4}
DEFAULT_NATIVE_NODES = 8  # the same where the native operators run
DEFAULT_SPEEDUP = 1.1  # over plain decoding, until it is known
EXACT_TREE_NODES = EXACT_ROWS - 1  # of the native operators
EXACT_CHAIN_ROWS = 16  # a step: int4 and int8 kernels of ONNX Runtime give the same bits for 1 to so many


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How a generation drafts."""

    mode: Mode
    budget: int  # N at most; 0 when plain
    proposals: tuple[Proposal, ...]  # sources; empty when plain
    tuning: Tuning | None  # that chose; None when the user or a default did
    native: bool = False  # whether the native operators run the target, for typical costs
    fixed: bool = False  # whether the target's graphs are of fixed size, so that all rows are paid for anyway

    def pace(self, options: GenerateOptions, precision: Precision, clock: Clock) -> Pace:
        """Prices of the rounds: none for a budget that the user named, by the clock only where no seed is given."""
        if options.draft_nodes is not None or self.mode == "plain":
            return Pace()
        unmeasured = fixed(precision) if self.fixed else typical(precision, native=self.native)
        costs = unmeasured if self.tuning is None else self.tuning.costs()
        speedup = DEFAULT_SPEEDUP if self.tuning is None else self.tuning.choice.speedup
        return FixedPace(costs, speedup) if options.seed is not None else LivePace(costs, speedup, clock)


def decide(
    options: GenerateOptions,
    *,
    precision: Precision,
    sources: tuple[Proposal, ...],
    tuning: Tuning | None,
    exact_trees: bool = False,
    chain_rows: int = EXACT_CHAIN_ROWS,
) -> Policy:
    """The policy for one call on a bundle with these sources of candidates.

    With `exact_trees` (the native operators) a row's bits are its own in trees too: of up to EXACT_TREE_NODES nodes,
    or of as many as the tuner tested on this device. Without, chains of `chain_rows` rows are, the root counted.

    Raises BundleError for a source that is not there, UsageError for what exact mode cannot hold.
    """
    plain = Policy(mode="plain", budget=0, proposals=(), tuning=tuning, native=exact_trees)
    if options.plain or options.draft_nodes == 0:
        return replace(plain, tuning=None)
    proposals = _proposals(options, sources, tuning)
    if not proposals:
        return plain
    exact = options.exact and precision != "fp32"
    choice = tuning.choice if tuning is not None and (options.exact or precision == "fp32") else None
    if choice is not None and choice.mode == "plain" and options.draft_nodes is None:
        return plain
    most = EXACT_TREE_NODES if exact_trees else chain_rows - 1
    if tuning is not None:
        most = min(most, tuning.exact_rows - 1)
    if options.draft_nodes is not None:
        budget = options.draft_nodes
    elif choice is not None:
        budget = choice.draft_nodes
    else:
        budget = DEFAULT_NATIVE_NODES if exact_trees else DEFAULT_DRAFT_NODES[precision]
    if exact and options.draft_nodes is None:
        budget = min(budget, most)
    if budget == 0:
        return plain
    if exact:
        _require_exact(options, precision, budget, most, tuning, trees=exact_trees)
    shape = options.shape
    if shape == "auto":
        # Native rows are cheap for a chain already; wider trees pay with a good draft, which the tuner sees.
        unmeasured: Mode = "chain" if exact_trees and options.draft_nodes is None else "tree"
        likely = unmeasured if choice is None or choice.mode == "plain" else choice.mode
        shape = "chain" if likely == "chain" else "tree"
    mode: Mode = "chain" if (exact and not exact_trees) or shape == "chain" else "tree"
    chose = tuning if options.draft_nodes is None else None
    return replace(plain, mode=mode, budget=budget, proposals=proposals, tuning=chose)


def require_fits(options: GenerateOptions, rows: int) -> None:
    """Raise UsageError for more candidates than a target whose graph verifies `rows` rows has room for."""
    nodes = options.draft_nodes or 0
    if nodes > rows - 1:
        raise UsageError(
            f"--draft-nodes is {nodes}, this bundle's graph verifies {rows} rows, the root and {rows - 1} nodes; use "
            f"fewer, or export with --verify-rows {nodes + 1}"
        )


def within_rows(policy: Policy, options: GenerateOptions, rows: int) -> Policy:
    """The policy on a target whose graph verifies `rows` rows: as many candidates as fit, or as the user named."""
    if options.draft_nodes is None:
        most = min(rows, EXACT_CHAIN_ROWS) - 1 if options.exact else rows - 1
        budget = most if policy.mode != "plain" else 0
        return replace(policy, budget=budget, mode=policy.mode if budget else "plain", fixed=True)
    return replace(policy, fixed=True)


def _proposals(options: GenerateOptions, sources: tuple[Proposal, ...], tuning: Tuning | None) -> tuple[Proposal, ...]:
    if not sources:
        if options.draft_nodes:
            raise BundleError(
                f"--draft-nodes is {options.draft_nodes}, but this bundle has no draft; use --plain or export with one"
            )
        return ()
    found = tuple(name for name in options.proposals if name in sources)
    if not found:
        raise BundleError(
            f"--proposals is {','.join(options.proposals)}, but this bundle has no draft; use --proposals ngram, or "
            "export with a draft"
        )
    if tuning is not None and options.proposals == PROPOSALS and options.draft_nodes is None:
        chosen = tuple(name for name in found if name in tuning.choice.proposals)
        return chosen or found
    return found


def _why_no_more(tuning: Tuning | None, most: int) -> str:
    same = f"its kernels give the same bits for 1 to {most + 1} rows only"
    if tuning is None:
        return f"{same}, as far as it is known"
    if tuning.exact_rows >= max(tuning.exact_rows_tested, default=0):
        return f"'elsi-edge tune' tested 1 to {most + 1} rows on this device, with more --seconds it tests more"
    return f"{same}, on this device"


def _require_exact(
    options: GenerateOptions, precision: Precision, budget: int, most: int, tuning: Tuning | None, *, trees: bool
) -> None:
    if options.shape == "tree" and not trees:
        raise UsageError(
            f"--shape tree at {precision} is not exact: its attention sums a path's keys in another order "
            "when they are not adjacent, and rounding then changes tokens; add --no-exact, or use a chain or fp32"
        )
    if budget > most:
        raise UsageError(
            f"--draft-nodes is {budget}, exact mode at {precision} holds {'trees' if trees else 'chains'} of at most "
            f"{most}: {_why_no_more(tuning, most)}; use fewer, or --no-exact"
        )
