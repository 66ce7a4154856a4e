"""Repetition loops in answers: small models fall into them, and a set full of loops teaches a draft little.

Rule. An answer loops when fewer than half of its 4-grams are distinct. A looping answer is cut where the loop begins:
at the start of the first 32 4-grams in a row of which at least 24 were seen earlier in the answer. When fewer than 16
tokens are left, or no such place exists, the answer is dropped.
"""

from collections.abc import Sequence

_GRAM = 4  # tokens
_WINDOW = 32  # 4-grams
_REPEATED = 24  # of a window
_MIN_KEPT = 16  # tokens


def is_looping(answer_ids: Sequence[int]) -> bool:
    """Whether fewer than half of the answer's 4-grams are distinct."""
    grams = _grams(answer_ids)
    return len(grams) > 0 and len(set(grams)) < len(grams) / 2


def loop_start(answer_ids: Sequence[int]) -> int | None:
    """Token where a looping answer begins to loop; None when it does not loop, 0 when nothing is worth keeping."""
    if not is_looping(answer_ids):
        return None
    seen: set[tuple[int, ...]] = set()
    repeats: list[bool] = []
    for gram in _grams(answer_ids):
        repeats.append(gram in seen)
        seen.add(gram)
        if len(repeats) >= _WINDOW and sum(repeats[-_WINDOW:]) >= _REPEATED:
            start = len(repeats) - _WINDOW
            return start if start >= _MIN_KEPT else 0
    return 0


def _grams(ids: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(ids[start : start + _GRAM]) for start in range(len(ids) - _GRAM + 1)]
