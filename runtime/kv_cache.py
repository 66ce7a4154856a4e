"""Keys and values in buffers that grow with use, written in place by the attention operator."""

import contextlib
import math
import mmap
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

PAGE = 256  # tokens by which the buffers grow
_MAPPING = 16 << 20  # bytes of buffers that share a mapping, at most
_HUGE = 2 << 20  # bytes of a large page


class KvCache:
    """One key and one value buffer [1, H, C, D] float32 per block, C slots of which the first `length` are in use.

    Keys are stored rotated by position, so a row may be moved to another slot.
    """

    def __init__(self, *, blocks: int, kv_heads: int, head_width: int) -> None:
        self.blocks, self.kv_heads, self.head_width = blocks, kv_heads, head_width
        self.length = 0  # S, slots in use
        self.capacity = 0  # C
        self.buffers: list[NDArray[np.float32]] = []  # key 0, value 0, key 1, value 1, ...

    def reserve(self, slots: int) -> bool:
        """Make room for `slots` slots in all; True when the buffers are new and must be bound again."""
        if slots <= self.capacity:
            return False
        capacity = -(-slots // PAGE) * PAGE
        shape = (1, self.kv_heads, capacity, self.head_width)
        old = self.buffers if self.length else []
        self.buffers, self.capacity = [], 0  # an interrupt below leaves an empty cache, not half of one
        grown = []
        for index, buffer in enumerate(_zeros(shape, 2 * self.blocks)):
            if old:
                buffer[:, :, : self.length] = old[index][:, :, : self.length]
                old[index] = np.zeros(0, np.float32)  # give the old one back before the next is made
            grown.append(buffer)
        self.buffers, self.capacity = grown, capacity
        return True

    def commit(self, rows: Sequence[int]) -> None:
        """Keep these rows of the last step, which wrote its rows from slot `length` on; the rest is forgotten.

        `rows` ascend, so a row that moves never overwrites one that has yet to. Those that follow the ones before them,
        as a chain's all do, stay where they are.
        """
        base, count = self.length, len(rows)
        moved = [(base + place, base + row) for place, row in enumerate(rows) if place != row]
        for buffer in self.buffers if moved else ():
            for to, source in moved:  # plain slices: an index array takes several times as long
                buffer[:, :, to] = buffer[:, :, source]
        self.length = base + count

    def truncate(self, length: int) -> None:
        """Forget everything from slot `length` on."""
        self.length = min(self.length, length)

    @property
    def nbytes(self) -> int:
        """Bytes allocated now."""
        return sum(buffer.nbytes for buffer in self.buffers)


def _zeros(shape: tuple[int, ...], count: int) -> Iterator[NDArray[np.float32]]:
    """Arrays of zeros in memory of their own, which the system gets back when the last array of a mapping goes.

    From the heap, buffers that grow leave holes: 1,000 tokens then took up to twice their bytes. Several share a
    mapping, so that it can have pages of 2 MiB: with those of 4 KiB a step of SmolLM2 took 2 to 6 % longer.
    """
    size = -(-4 * math.prod(shape) // mmap.PAGESIZE) * mmap.PAGESIZE
    together = max(1, min(_MAPPING // max(1, size), count))
    for first in range(0, count, together):
        pages = _mapped(size * min(together, count - first))
        for offset in range(0, len(pages), size):
            yield np.frombuffer(pages, np.float32, math.prod(shape), offset).reshape(shape)


def _mapped(size: int) -> mmap.mmap:
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    try:
        pages = mmap.mmap(-1, size, **private)
    except OSError as error:
        raise MemoryError(f"no {size} bytes for keys and values") from error
    if hasattr(mmap, "MADV_HUGEPAGE") and size >= _HUGE:
        with contextlib.suppress(OSError):  # a system without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
