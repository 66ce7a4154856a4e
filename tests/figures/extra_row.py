"""What the exact mode's extra attention row costs plain decoding on ONNX Runtime's own kernels.

    python -m tests.figures.extra_row BUNDLE... --prompts FILE --out FILE [--limit 13] [--tokens 96] [--repeats 3]

Plain decoding with the row (the chain form) and without it (the tree form), the same prompts back to back, taking turns
at going first; seconds after the first token, all answers together, ratio by repeat.
"""

from statistics import median
from typing import Any

from elsi_edge.runtime.options import GenerateOptions, SessionSettings
from elsi_edge.runtime.session import Session
from tests.figures.common import arguments, prompts, save
from tests.figures.speedup import repeat


def main() -> None:
    """Measure every bundle named."""
    options = arguments(__doc__ or "", limit=13, tokens=96, repeats=3)
    rows = prompts(options, options.limit)
    figures: dict[str, Any] = {}
    for path in options.bundles:
        session = Session.open(path, SessionSettings(native=False, tuning=False))
        arms = {
            arm: GenerateOptions(plain=True, exact=arm == "with", max_tokens=options.tokens)
            for arm in ("without", "with")
        }
        for arm in arms.values():
            session.generate(rows[0].turns[0], arm)
        found = [repeat(session, rows, number, arms) for number in range(options.repeats)]
        per_token = [{arm: one["seconds"] / one["tokens"] for arm, one in sums["all"].items()} for sums, _ in found]
        ratios = [one["with"] / one["without"] for one in per_token]
        lists = len(rows) * options.repeats
        figures[session.precision] = {
            "with_over_without": median(ratios),
            "ratios": ratios,
            "equal_lists": lists - sum(different for _, different in found),
            "lists": lists,
        }
        save(options.out, figures)


if __name__ == "__main__":
    main()
