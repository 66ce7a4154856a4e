"""How often guesses were right on recorded answers, by rank and by kind of match."""

import time
from collections.abc import Sequence

import numpy as np

from elsi_edge.runtime.drafter import Draft
from elsi_edge.runtime.ngram import FROM, PRIOR, NgramIndex, kind
from elsi_edge.runtime.recorded import Recorded

_PRIOR_TRIALS = 40.0  # matches that the n-gram prior of other text counts for
_RANKS = 8


def draft_ranks(draft: Draft, answers: Sequence[Recorded], *, until: float) -> list[float]:
    """Share of answer tokens that were the draft's 1st, 2nd, ... guess at the first level, as far as time allows."""
    counts, total = [0] * _RANKS, 0
    for answer in answers:
        tokens = [*answer.prompt_ids, *answer.token_ids]
        start = len(answer.prompt_ids)
        draft.keep(0)
        before = 0
        for place in range(start, len(tokens) - 1):
            step = draft.extend(tokens[before + 1 : place + 1], answer.taps[before:place])
            before = place
            guesses = draft.draft_to_target_ids[step.likeliest(len(step.log_probs) - 1, _RANKS)].tolist()
            if tokens[place + 1] in guesses:
                counts[guesses.index(tokens[place + 1])] += 1
            total += 1
            if time.perf_counter() > until:
                break
        if time.perf_counter() > until:
            break
    return [count / max(1, total) for count in counts]


def ngram_prior(answers: Sequence[Recorded]) -> tuple[float, ...]:
    """How often matches of each kind were right on these answers, over the prior of other text."""
    right, tried = np.zeros(len(FROM)), np.zeros(len(FROM))
    for answer in answers:
        index = NgramIndex()
        index.extend(answer.prompt_ids)
        for token in answer.token_ids:
            for match in index.matches():
                right[kind(match.length)] += match.token == token
                tried[kind(match.length)] += 1
            index.append(token)
    shares = (np.array(PRIOR) * _PRIOR_TRIALS + right) / (_PRIOR_TRIALS + tried)
    return tuple(float(share) for share in np.clip(shares, 0.01, 0.99))
