"""What `bench --perplexity` measures: the bundle as it runs and other runtimes, on the prompts' own texts."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elsi_edge.cli.bench_extras import Peers
    from elsi_edge.runtime.bench.perplexity import Scores
    from elsi_edge.runtime.session import Session


def score(
    bundle: Path, session: "Session", windows: Sequence[Sequence[int]], peers: "Peers | None", *, exact: bool
) -> "Scores | None":
    """Our scores of every window, those of the peers go to them; None when Ctrl-C cuts it short."""
    from elsi_edge.bundle import Bundle
    from elsi_edge.cli import common
    from elsi_edge.runtime.bench.perplexity import target_scores
    from elsi_edge.runtime.engines import BundleEngines

    rows = {} if session.verify_rows is None else {"rows": session.verify_rows}
    try:
        # A target of its own: what the session remembers of its last answer stays true.
        target = BundleEngines(Bundle.load(bundle), session.settings).open_target(exact=exact)
        with common.progress("perplexity", len(windows), "windows") as bar:
            own = target_scores(target, windows, advance=lambda: bar.advance(), **rows)
        if peers is not None:
            peers.score(windows)
    except KeyboardInterrupt:
        return None
    return own


def report_json(windows: Sequence[Sequence[int]] | None, own: "Scores | None") -> dict[str, Any] | None:
    """Our part of the report; None where it was not asked for or cut short."""
    from elsi_edge.runtime.bench.perplexity import WINDOW, perplexity_of

    if windows is None or own is None:
        return None
    tokens = len(own.losses)
    return {"perplexity": perplexity_of(own), "windows": len(windows), "tokens": tokens, "window_tokens": WINDOW}
