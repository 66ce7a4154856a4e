"""The growing cache: content survives growth, scattered rows become adjacent."""

import mmap
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elsi_edge.runtime import kv_cache
from elsi_edge.runtime.kv_cache import PAGE, KvCache
from elsi_edge.runtime.memory import footprint


def fill(cache: KvCache, slots: int, value: float) -> None:
    """Write rows after the used part, each marked with its slot."""
    for index, buffer in enumerate(cache.buffers):
        buffer[:, :, cache.length : cache.length + slots] = value + index * 1000.0
        buffer[:, :, cache.length : cache.length + slots] += np.arange(slots, dtype=np.float32)[None, None, :, None]


def test_nothing_is_allocated_before_it_is_needed() -> None:
    cache = KvCache(blocks=3, kv_heads=2, head_width=4)
    assert (cache.nbytes, cache.capacity, cache.length) == (0, 0, 0)
    assert cache.reserve(1)
    assert cache.capacity == PAGE
    assert cache.nbytes == 3 * 2 * 2 * PAGE * 4 * 4
    assert not cache.reserve(PAGE)
    assert cache.reserve(PAGE + 1)
    assert cache.capacity == 2 * PAGE


def test_growth_keeps_the_content() -> None:
    cache = KvCache(blocks=2, kv_heads=2, head_width=3)
    cache.reserve(PAGE)
    fill(cache, PAGE, 7.0)
    cache.commit(range(PAGE))
    before = [buffer.copy() for buffer in cache.buffers]
    assert cache.reserve(3 * PAGE)
    for old, new in zip(before, cache.buffers, strict=True):
        assert np.array_equal(new[:, :, :PAGE], old)
        assert (new[:, :, PAGE:] == 0.0).all()
        assert new.flags.c_contiguous


@pytest.mark.parametrize("used", [0, PAGE])
def test_growth_takes_one_cache_and_one_mapping_not_two_caches(used: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "_MAPPING", 9 << 18)  # two buffers
    alive: list[tuple[int, weakref.ref[mmap.mmap]]] = []
    most, mapped = 0, kv_cache._mapped

    def counting(size: int) -> mmap.mmap:
        nonlocal most
        made = mapped(size)
        alive.append((size, weakref.ref(made)))
        most = max(most, sum(size for size, ref in alive if ref() is not None))
        return made

    monkeypatch.setattr(kv_cache, "_mapped", counting)
    cache = KvCache(blocks=8, kv_heads=4, head_width=16)
    cache.reserve(16 * PAGE)
    assert [size for size, _ in alive] == [cache.nbytes // 8] * 8
    cache.length, most = used, 0
    cache.reserve(17 * PAGE)
    assert cache.nbytes <= most < 1.3 * cache.nbytes
    cache.buffers.clear()
    assert all(ref() is None for _, ref in alive)


def test_a_cache_that_grew_takes_its_bytes_and_no_more() -> None:
    before = footprint()
    assert before is not None
    cache = KvCache(blocks=8, kv_heads=4, head_width=32)
    for pages in range(1, 9):
        cache.reserve(pages * PAGE)
        for buffer in cache.buffers:
            buffer[:, :, cache.length : pages * PAGE] = 1.0
        cache.length = pages * PAGE
    after = footprint()
    assert after is not None
    assert 0.9 * cache.nbytes < after.anonymous - before.anonymous < 1.1 * cache.nbytes


def test_an_interrupted_growth_leaves_a_cache_that_can_be_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KvCache(blocks=2, kv_heads=1, head_width=2)
    cache.reserve(PAGE)
    cache.length = 5
    made = []

    def interrupting(size: int) -> mmap.mmap:
        made.append(size)
        if len(made) == 2:
            raise KeyboardInterrupt
        return mmap.mmap(-1, size)

    monkeypatch.setattr(kv_cache, "_MAPPING", 1)
    with monkeypatch.context() as patch:
        patch.setattr(kv_cache, "_mapped", interrupting)
        with pytest.raises(KeyboardInterrupt):
            cache.reserve(2 * PAGE)
    cache.length = 0
    assert cache.reserve(3)  # not taken for big enough
    assert [buffer.shape for buffer in cache.buffers] == [(1, 1, PAGE, 2)] * 4


@settings(deadline=None)
@given(st.integers(0, 6), st.lists(st.integers(0, 9), unique=True, max_size=10).map(sorted))
def test_commit_makes_scattered_rows_adjacent(base: int, rows: list[int]) -> None:
    cache = KvCache(blocks=1, kv_heads=2, head_width=2)
    cache.reserve(20)
    fill(cache, base, 500.0)
    cache.commit(range(base))
    fill(cache, 10, 0.0)
    cache.commit(rows)
    assert cache.length == base + len(rows)
    key = cache.buffers[0][0, 1, :, 0]
    assert key[: cache.length].tolist() == [500.0 + slot for slot in range(base)] + [float(row) for row in rows]
    assert (cache.buffers[1][0, 0, base : cache.length, 1] == 1000.0 + np.array(rows)).all()


def test_truncate_only_shortens() -> None:
    cache = KvCache(blocks=1, kv_heads=1, head_width=1)
    cache.reserve(10)
    cache.commit(range(6))
    cache.truncate(9)
    assert cache.length == 6
    cache.truncate(2)
    assert cache.length == 2
