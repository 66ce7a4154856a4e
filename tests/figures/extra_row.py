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
from tests.figures.speedup import seconds


def main() -> None:
    """Measure every bundle named."""
    options = arguments(__doc__ or "", limit=13, tokens=96, repeats=3)
    rows = prompts(options, options.limit)
    figures: dict[str, Any] = {}
    for path in options.bundles:
        session = Session.open(path, SessionSettings(native=False, tuning=False))
        arms = {exact: GenerateOptions(plain=True, exact=exact, max_tokens=options.tokens) for exact in (True, False)}
        for arm in arms.values():
            session.generate(rows[0].turns[0], arm)
        ratios, equal = [], 0
        for number in range(options.repeats):
            taken, tokens = dict.fromkeys(arms, 0.0), dict.fromkeys(arms, 0)
            for place, row in enumerate(rows):
                lists = []
                for exact in (True, False) if (place + number) % 2 else (False, True):
                    result = session.generate(row.turns[0], arms[exact])
                    taken[exact] += seconds(result)
                    tokens[exact] += len(result.token_ids) - 1
                    lists.append(result.token_ids)
                equal += lists[0] == lists[1]
            per_token = {exact: taken[exact] / tokens[exact] for exact in arms}
            ratios.append(per_token[True] / per_token[False])
        figures[session.precision] = {
            "with_over_without": median(ratios),
            "ratios": ratios,
            "equal_lists": equal,
            "lists": len(rows) * options.repeats,
        }
        save(options.out, figures)


if __name__ == "__main__":
    main()
