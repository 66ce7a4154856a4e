"""The tuner's predicted tokens/s against measured ones, on prompts that it did not see.

    python -m tests.figures.predicted BUNDLE... --prompts FILE --out FILE [--limit 26] [--tokens 128] [--shapes 6]

Needs the tuning file beside each bundle. Shapes are taken from it, best and worst included; every prompt is answered by
every shape and plainly, in turn, so that all see the same machine. Priced shapes run with a seed, as predicted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from elsi_edge.errors import DataError
from elsi_edge.runtime.options import GenerateOptions
from elsi_edge.runtime.session import Session
from elsi_edge.runtime.tuning import Choice
from tests.figures.common import arguments, prompts, save
from tests.figures.speedup import seconds


def some(shapes: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """So many of them, evenly from the best to the worst."""
    count = min(count, len(shapes))
    return [shapes[round(i * (len(shapes) - 1) / max(1, count - 1))] for i in range(count)]


def run(session: Session, shape: Mapping[str, Any], prompt: str, tokens: int) -> tuple[int, float]:
    """Tokens after the first and seconds of one answer with a shape."""
    tuning = session.tuning
    assert tuning is not None
    if shape["mode"] == "plain":
        options = GenerateOptions(plain=True, max_tokens=tokens)
    elif shape["priced"]:
        choice = Choice(
            mode=shape["mode"],
            draft_nodes=shape["draft_nodes"],
            proposals=tuple(shape["proposals"]),
            tokens_per_s=tuning.choice.tokens_per_s,
            plain_tokens_per_s=tuning.choice.plain_tokens_per_s,
            why="",
        )
        session.tuning = replace(tuning, choice=choice)
        options = GenerateOptions(max_tokens=tokens, seed=1)
    else:
        options = GenerateOptions(
            max_tokens=tokens,
            shape=shape["mode"],
            draft_nodes=shape["draft_nodes"],
            proposals=tuple(shape["proposals"]),
        )
    result = session.generate(prompt, options)
    session.tuning = tuning
    return len(result.token_ids) - 1, seconds(result)


def main() -> None:
    """Compare on every bundle named."""
    options = arguments(__doc__ or "", limit=26, tokens=128, shapes=6)
    rows = prompts(options, options.limit)
    figures: dict[str, Any] = {"prompts": len(rows), "tokens": options.tokens}
    for path in options.bundles:
        session = Session.open(path)
        if session.tuning is None:
            raise DataError(f"{path} has no tuning file for this machine; make one with: elsi-edge tune {path}")
        shapes = [dict(shape) for shape in some(session.tuning.shapes, options.shapes)]
        plain = {"mode": "plain", "tokens_per_s": session.tuning.choice.plain_tokens_per_s, "speedup": 1.0}
        shapes.append(plain)
        sums = [[0, 0.0] for _ in shapes]
        for place, row in enumerate(rows):
            for index in [(place + i) % len(shapes) for i in range(len(shapes))]:
                tokens, took = run(session, shapes[index], row.turns[0], options.tokens)
                sums[index][0] += tokens
                sums[index][1] += took
        measured = [tokens / took for tokens, took in sums]
        figures[session.precision] = [
            {
                **{key: shape.get(key) for key in ("mode", "draft_nodes", "proposals", "priced")},
                "predicted": shape["tokens_per_s"],
                "measured": speed,
                "off_by": shape["tokens_per_s"] / speed - 1.0,
                "predicted_speedup": shape["speedup"],
                "measured_speedup": speed / measured[-1],
                "speedup_off_by": shape["speedup"] / (speed / measured[-1]) - 1.0,
            }
            for shape, speed in zip(shapes, measured, strict=True)
        ]
    save(options.out, figures)


if __name__ == "__main__":
    main()
