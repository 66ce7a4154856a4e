"""Timings of a device and of a bundle's graphs on it."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
from numpy.typing import NDArray

from elsi_edge.runtime.drafter import Draft
from elsi_edge.runtime.one_node import matrix_session
from elsi_edge.runtime.policy import EXACT_CHAIN_ROWS
from elsi_edge.runtime.target import Target
from elsi_edge.runtime.tree import ROOT, Tree

SPARSE_ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
MOST_ROWS = 64
_SMALL, _SMALL_REPEATS = 4, 3  # rows that are timed more often, since most rounds are of them
_EXACT_TOKENS = 48
_SAME_LOGITS = 1e-3  # at fp32 rounding differs; largest difference that counts as the same
_COPY_BYTES = 128 << 20  # several times a large cache
_MATRIX = 1024  # width of the square matrix for the peak


def sparse_rows(most: int) -> tuple[int, ...]:
    """Rows to time, up to `most`."""
    return tuple(rows for rows in SPARSE_ROWS if rows <= most)


def time_verify(
    target: Target, token_ids: Sequence[int], past: int, rows: Sequence[int], *, until: float
) -> dict[int, float]:
    """Milliseconds of verifying so many rows after `past` tokens, every count in turn until `until`; at least twice.

    The mean over the middle half of the repeats. A call is timed after another of the same rows, as rounds are alike
    one after the other: after a large one a small one finds caches cold. `until` as `time.perf_counter` has it.
    """
    target.keep(0)
    target.prefill(token_ids[:past])
    found: dict[int, list[float]] = {count: [] for count in rows}
    sweeps = 0
    while sweeps < 2 or (time.perf_counter() < until and sweeps < 200):
        for count in rows if sweeps % 2 else reversed(rows):
            tree = Tree.chain(token_ids[past + 1 : past + count])
            target.verify(token_ids[past], tree, greedy=True)
            for _ in range(_SMALL_REPEATS if count <= _SMALL else 1):
                start = time.perf_counter()
                target.verify(token_ids[past], tree, greedy=True)
                found[count].append(1e3 * (time.perf_counter() - start))
        sweeps += 1
    return {count: middle_mean(times) for count, times in found.items()}


def time_draft(
    target: Target, draft: Draft, token_ids: Sequence[int], *, until: float, width: int, levels: int = 3
) -> tuple[float, float]:
    """Milliseconds of the draft's first call in a round, and of a further level of `width` nodes.

    The target runs in between, as it does in rounds: it takes the caches.
    """
    entry, level = [], []
    target.keep(0)
    draft.keep(0)
    past = min(64, len(token_ids) - 1)
    step = target.prefill(token_ids[:past])
    draft.extend(token_ids[1 : past + 1], step.taps)
    repeats = 0
    while repeats < 4 or (time.perf_counter() < until and repeats < 200):
        taps = target.verify(token_ids[past], Tree.empty(), greedy=True).taps[:1].copy()
        start = time.perf_counter()
        found = draft.extend(token_ids[:1], taps)
        entry.append(1e3 * (time.perf_counter() - start))
        for depth in range(1, levels + 1):
            start = time.perf_counter()
            parents = [*[ROOT] * width, *range((depth - 1) * width)]  # so many chains beside each other
            found = draft.expand(token_ids[:width], found.states[[-1] * width], depth, parents)
            level.append(1e3 * (time.perf_counter() - start))
        draft.keep(past)
        repeats += 1
    return middle_mean(entry[1:]), middle_mean(level[1:])


def exact_rows(
    target: Target, token_ids: Sequence[int], past: int, *, bits: bool, until: float, most: int = EXACT_CHAIN_ROWS
) -> tuple[int, tuple[int, ...]]:
    """Rows a step, `most` at most, up to which logits and taps are those of one row a step, and the counts tried.

    With `bits` to the last bit, else up to rounding and with the same likeliest tokens. Counts that there was no time
    for are not claimed.
    """
    tokens = list(token_ids[past : past + _EXACT_TOKENS])
    expected = _in_steps(target, token_ids[:past], tokens, 1)
    tried, good = [1], 1
    for count in range(2, min(most, len(tokens)) + 1):
        if time.perf_counter() > until:
            break
        found = _in_steps(target, token_ids[:past], tokens, count)
        tried.append(count)
        if not all(_same(one, other, bits=bits) for one, other in zip(found, expected, strict=True)):
            break
        good = count
    return good, tuple(tried)


def exact_tree_rows(
    target: Target, token_ids: Sequence[int], past: int, *, most: int, until: float
) -> tuple[int, tuple[int, ...]]:
    """Rows a step up to which every row of a tree has the bits of decoding its path one token a step, and what was
    tried.

    For targets whose rows may be of any tree; sizes that there was no time for are not claimed.
    """
    tried, good = [1], 1
    target.keep(0)
    target.prefill(token_ids[:past])
    for rows in (count for count in sparse_rows(most) if count > 1):
        if time.perf_counter() > until:
            break
        tokens = list(token_ids[past : past + rows])
        tree = Tree(tokens=tuple(tokens[1:]), parents=_bushy(rows - 1))
        step = target.verify(tokens[0], tree)
        found = (step.logits.copy(), step.taps.copy())
        tried.append(rows)
        same = _paths_agree(target, tokens, tree, found, row=0)
        target.keep(past)
        if not same:
            break
        good = rows
    return good, tuple(tried)


def _bushy(nodes: int) -> tuple[int, ...]:
    """Parents of a tree in which half of the nodes continue the one before and the others any: deep and scattered."""
    draw = np.random.default_rng(nodes)
    any_before = [int(draw.integers(ROOT, node)) for node in range(nodes)]
    return tuple(node - 1 if draw.random() < 0.5 else any_before[node] for node in range(nodes))


def _paths_agree(
    target: Target,
    tokens: Sequence[int],
    tree: Tree,
    found: tuple[NDArray[np.float32], NDArray[np.float32]],
    *,
    row: int,
) -> bool:
    """Whether `row` and all below it have the bits of one token a step, with their path's tokens in the cache."""
    step = target.verify(tokens[row], Tree.empty())
    if not (np.array_equal(step.logits[0], found[0][row]) and np.array_equal(step.taps[0], found[1][row])):
        return False
    target.commit([0])
    length = target.length
    for child in tree.children(row).values():
        target.keep(length)
        if not _paths_agree(target, tokens, tree, found, row=child):
            return False
    return True


def _in_steps(
    target: Target, before: Sequence[int], tokens: Sequence[int], count: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    target.keep(0)
    target.prefill(before)
    logits, taps = [], []
    for start in range(0, len(tokens), count):
        step = target.verify(tokens[start], Tree.chain(tokens[start + 1 : start + count]))
        logits.append(step.logits.copy())
        taps.append(step.taps.copy())
        target.commit(range(len(step.logits)))
    return np.concatenate(logits), np.concatenate(taps)


def _same(one: NDArray[np.float32], other: NDArray[np.float32], *, bits: bool) -> bool:
    if bits or not one.size:
        return bool(np.array_equal(one, other))
    scale = max(1.0, float(np.abs(other).max()) / 30.0)
    return bool(np.abs(one - other).max() <= _SAME_LOGITS * scale)


def copy_bandwidth(threads: int, *, seconds: float) -> float:
    """Gigabytes read and written per second by a large copy on so many threads."""
    size = int(max(1 << 22, min(_COPY_BYTES, psutil.virtual_memory().available // 8)))
    source, result = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    bounds = [size * i // threads for i in range(threads + 1)]
    slices = [slice(a, b) for a, b in itertools.pairwise(bounds)]
    with ThreadPoolExecutor(threads) as pool:

        def copy() -> None:
            list(pool.map(lambda part: np.copyto(result[part], source[part]), slices))

        return 2.0 * size / min(_repeat(copy, seconds)) / 1e9


def read_bandwidth(threads: int, *, seconds: float) -> float:
    """Gigabytes read per second by looking through a large array on so many threads, as weights are read."""
    size = int(max(1 << 22, min(_COPY_BYTES, psutil.virtual_memory().available // 8))) // 4
    source = np.ones(size, np.int32)  # integers: comparing them takes fewer instructions than the memory has time for
    bounds = [size * i // threads for i in range(threads + 1)]
    slices = [slice(a, b) for a, b in itertools.pairwise(bounds)]
    with ThreadPoolExecutor(threads) as pool:

        def look() -> None:
            list(pool.map(lambda part: source[part].max(), slices))

        return source.nbytes / min(_repeat(look, seconds)) / 1e9


def matrix_peak(bits: int, threads: int, *, seconds: float, native: bool = False) -> float:
    """GFLOP/s (2 per multiply-add) of a large product with weights of so many bits, in ONNX Runtime on the CPU.

    With `native` by this package's operator. Raises ProviderError where that cannot run.
    """
    session, _ = matrix_session(_MATRIX, _MATRIX, bits=bits, threads=threads, native=native)
    rows = np.random.default_rng(0).standard_normal((_MATRIX // 2, _MATRIX)).astype(np.float32)
    work = 2.0 * len(rows) * _MATRIX * _MATRIX
    return work / min(_repeat(lambda: session.run(None, {"x": rows}), seconds)) / 1e9


def middle_mean(times: Sequence[float]) -> float:
    """Mean of the middle half, of all when they are few."""
    ordered = sorted(times)
    cut = len(ordered) // 4
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def _repeat(work: Callable[[], object], seconds: float) -> Iterator[float]:
    """Seconds that each run took, for about `seconds` and at least three."""
    end = time.perf_counter() + seconds
    runs = 0
    while runs < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        yield time.perf_counter() - start
        runs += 1
