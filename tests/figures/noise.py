"""How often does the likeliest token change, teacher-forced, when the same tokens run in other company?

    python -m tests.figures.noise BUNDLE --prompts FILE --out FILE [--tokens 5000]

Three runs of the target over its own greedy answers, on the graph of --no-exact: one row a step; eight rows a step (the
noise floor that plain decoding has against itself); and a tree, where each right node comes after a wrong sibling, so
that a path's keys are not adjacent when it is summed and are moved when it is accepted.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from elsi_edge.bundle import Bundle
from elsi_edge.runtime.options import GenerateOptions, SessionSettings
from elsi_edge.runtime.ort import open_session
from elsi_edge.runtime.session import Session
from elsi_edge.runtime.target import OrtTarget
from elsi_edge.runtime.tree import ROOT, Tree
from tests.figures.common import arguments, prompts, save

_ROWS = 8  # of a chain's step
_DEPTH = 4  # of a tree's right path


def likeliest(target: OrtTarget, prompt: Sequence[int], answer: Sequence[int], form: str) -> NDArray[np.int64]:
    """The target's likeliest token after each token of `answer` but the last, in the given form."""
    target.keep(0)
    target.prefill(prompt)
    found: list[NDArray[np.int64]] = []
    step = {"one": 1, "chain": _ROWS, "tree": _DEPTH + 1}[form]
    for start in range(0, len(answer) - 1, step):
        block = list(answer[start : min(start + step, len(answer) - 1)])
        tree, rows = _spread(block[1:]) if form == "tree" else (Tree.chain(block[1:]), range(len(block)))
        logits = target.verify(block[0], tree).logits
        found.append(logits[list(rows)].argmax(-1))
        target.commit(list(rows))
    return np.concatenate(found)


def _spread(path: Sequence[int]) -> tuple[Tree, list[int]]:
    """A tree whose right nodes each follow a wrong sibling, and the right rows, the root's first."""
    tokens: list[int] = []
    parents: list[int] = []
    rows, parent = [0], ROOT
    for token in path:
        tokens += [token + 1 if token < 1000 else token - 1, token]
        parents += [parent, parent]
        parent = len(tokens) - 1
        rows.append(parent + 1)
    return Tree(tokens=tuple(tokens), parents=tuple(parents)), rows


def main() -> None:
    """Measure every bundle named."""
    options = arguments(__doc__ or "", tokens=5000, limit=120)
    figures = {}
    for path in options.bundles:
        bundle = Bundle.load(path)
        session = Session.open(path)
        target = OrtTarget(
            open_session(bundle.graph("target-tree"), SessionSettings()),
            shape=bundle.manifest.shape,
            tap_width=bundle.manifest.tap_width,
        )
        changed = {"chain": 0, "tree": 0}
        seen = 0
        for row in prompts(options, options.limit):
            ids = session.encode(row.turns[0], GenerateOptions())
            answer = session.generate(row.turns[0], GenerateOptions(plain=True, max_tokens=128)).token_ids
            if len(answer) < 2:
                continue
            one = likeliest(target, ids, answer, "one")
            for form in changed:
                changed[form] += int((likeliest(target, ids, answer, form) != one).sum())
            seen += len(one)
            if seen >= options.tokens:
                break
        rates = {form: count / seen for form, count in changed.items()}
        spread = math.sqrt(sum(rate * (1 - rate) / seen for rate in rates.values()))
        figures[bundle.manifest.precision] = {
            "tokens": seen,
            "one_row_against_eight": rates["chain"],
            "one_row_against_tree": rates["tree"],
            "standard_error_of_difference": spread,
            "within_two_standard_errors": rates["tree"] - rates["chain"] <= 2 * spread,
        }
    save(options.out, {"noise": figures})


if __name__ == "__main__":
    main()
