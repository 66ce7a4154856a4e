"""Options that several verbs share, with their units; the defaults stand in each verb's signature."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from elsi_edge.runtime.options import Proposal

BundleArgument = Annotated[
    str,
    typer.Argument(
        metavar="BUNDLE", help="A bundle's directory, or a model whose work directory holds one (newest with a draft)."
    ),
]
DraftNodes = Annotated[
    int | None,
    typer.Option(
        "--draft-nodes",
        help="Drafted nodes N of a round, so N + 1 rows to verify; 0 drafts nothing. Default: as many as pay, at most "
        "what `tune` chose for this device, else 8 at fp32, 4 at int8, 4 at int4, 8 with the native operators.",
        show_default=False,
    ),
]
Proposals = Annotated[
    str,
    typer.Option(
        "--proposals",
        help="Where candidates come from: draft, ngram (what followed the same words before), or both with a comma.",
    ),
]
DEFAULT_PROPOSALS = "draft,ngram"
Exact = Annotated[
    bool,
    typer.Option(
        "--exact/--no-exact",
        help="The same tokens as plain decoding: any tree at fp32 and with the native operators, else chains at int4 "
        "and int8. --no-exact allows trees there, equal up to kernel noise.",
    ),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="Tokens of an answer at most, the end token counted.")]
Temperature = Annotated[float, typer.Option("--temperature", help="0 takes the likeliest token; from 0 up.")]
TopK = Annotated[int, typer.Option("--top-k", help="Sample among this many tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option("--top-p", help="Sample within this much probability, 0 to 1; 1 keeps all.")]
MinP = Annotated[
    float, typer.Option("--min-p", help="Sample tokens with at least this share of the top one's probability, 0 to 1.")
]
RepetitionPenalty = Annotated[
    float,
    typer.Option(
        "--repetition-penalty",
        help="Above 1, tokens of prompt and answer so far become less likely; 1 changes nothing.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", help="Seed, 0 to 2^63-1: the same gives the same text. Default: drawn, shown with --json."),
]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", help="Text that ends the answer and is not shown; may be given again.")
]
System = Annotated[str | None, typer.Option("--system", help="System message, first in the chat.")]
Threads = Annotated[int, typer.Option("--threads", help="Threads; 0 takes the cores that may be used.")]
Provider = Annotated[str, typer.Option("--provider", help="ONNX Runtime execution provider, e.g. cpu or cuda.")]
Work = Annotated[Path | None, typer.Option("--work", help="Work directory (default: $ELSI_EDGE_WORK or elsi-work).")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]


def proposals_of(text: str) -> "tuple[Proposal, ...]":
    """The sources that --proposals names; unknown ones are refused by the options they go into."""
    return tuple(part.strip() for part in text.split(","))  # type: ignore[misc]


def size_of(option: str, text: str) -> int:
    """ "500MB" or "2GB" as bytes, decimal units. Raises UsageError naming the option."""
    from elsi_edge.errors import UsageError

    units = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
    lower = text.strip().lower()
    unit = next((unit for unit in units if lower.endswith(unit)), None)
    try:
        size = float(lower.removesuffix(unit or "")) * units.get(unit or "", 1)
        if 1 <= size < 1e18:
            return int(size)
    except ValueError:
        pass
    raise UsageError(f"{option} {text!r} is not a size such as 500MB or 2GB")


def counts_of(option: str, text: str) -> list[int]:
    """ "1,2" as whole numbers from 0 up, without repeats. Raises UsageError naming the option."""
    from elsi_edge.errors import UsageError

    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise UsageError(f"{option} {text!r} must be a whole number from 0 up, or several with commas, as in 1,2")
    return list(dict.fromkeys(map(int, parts)))
