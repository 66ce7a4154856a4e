"""Calls of an ONNX Runtime session whose buffers are bound once."""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from elsi_edge.errors import BundleError
from elsi_edge.runtime.kv_cache import KvCache
from elsi_edge.runtime.ort import is_memory

_MOST_SETS = 32  # sets of bindings that a graph keeps

# ONNX Runtime does not own numpy's memory, so an array stays beside its OrtValue.
_Bound = tuple[NDArray[Any], Any]


@dataclass(kw_only=True)
class _Set:
    """What one IOBinding is bound to."""

    shape: Hashable  # of the calls that it is for
    io: Any
    bound: dict[str, _Bound] = field(default_factory=dict)
    in_place: dict[str, _Bound] = field(default_factory=dict)  # by the input's name
    arrays: Mapping[str, NDArray[Any]] | None = None  # what was bound together last


class BoundGraph:
    """A session with persistent bindings: buffers are bound by name and stay bound until replaced.

    Calls of different shapes can have a set of bindings each (`select`). A loop that goes round a few shapes then binds
    nothing again: after a call that streams all weights through the caches, every binding costs microseconds.
    """

    def __init__(self, session: ort.InferenceSession) -> None:
        self.session = session
        self._always: dict[str, _Bound] = {}  # inputs of every set
        self._sets: dict[Hashable, _Set] = {}
        self._now = self._add(None)
        self.inputs = {value.name: value for value in session.get_inputs()}
        self.outputs = {value.name: value for value in session.get_outputs()}

    def select(self, shape: Hashable) -> None:
        """Turn to the bindings of calls of this shape; what follows binds and runs those."""
        found = self._sets.get(shape)
        self._now = self._add(shape) if found is None else found

    def bind_always(self, name: str, array: NDArray[Any]) -> None:
        """Bind an input in all sets; later changes of its content are seen by the next run."""
        value = ort.OrtValue.ortvalue_from_numpy(array)
        self._always[name] = (array, value)
        for one in self._sets.values():
            one.io.bind_ortvalue_input(name, value)

    def bind_input(self, name: str, array: NDArray[Any]) -> None:
        """Bind a C-contiguous array; later changes of its content are seen by the next run."""
        value = ort.OrtValue.ortvalue_from_numpy(array)
        self._now.bound[name] = (array, value)
        self._now.io.bind_ortvalue_input(name, value)

    def bind_output(self, name: str, array: NDArray[Any]) -> None:
        """Bind a C-contiguous array that the next runs write into."""
        value = ort.OrtValue.ortvalue_from_numpy(array)
        self._now.bound[name] = (array, value)
        self._now.io.bind_ortvalue_output(name, value)

    def use(self, name: str, array: NDArray[Any]) -> None:
        """Bind an array as input or output unless it is bound already."""
        bound = self._now.bound.get(name)
        if bound is not None and bound[0] is array:
            return
        if name in self.inputs:
            self.bind_input(name, array)
        else:
            self.bind_output(name, array)

    def use_all(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """The same for several; the same object is taken to hold the same arrays."""
        if self._now.arrays is not arrays:
            for name, array in arrays.items():
                self.use(name, array)
            self._now.arrays = arrays

    def bind_in_place(self, source: str, result: str, array: NDArray[Any]) -> None:
        """Bind one array as a past input and its present output: the operator then appends in place, without a copy."""
        value = ort.OrtValue.ortvalue_from_numpy(array)
        self._now.io.bind_ortvalue_input(source, value)
        self._now.io.bind_ortvalue_output(result, value)
        self._now.in_place[source] = (array, value)

    def reserve(self, cache: KvCache, slots: int) -> None:
        """Make room for `slots` slots in `cache` and bind its buffers in place; first of all, since growing begins all
        bindings anew.

        Old buffers are let go one by one, so that growing takes one cache and one buffer more, not two caches. An
        interrupt on the way leaves the rest to the next call.
        """
        if slots > cache.capacity:
            self._sets.clear()  # which hold the old buffers
            self._now = self._add(self._now.shape)
            cache.reserve(slots)
        if len(self._now.in_place) < len(cache.buffers):
            for index, buffer in enumerate(cache.buffers):
                name = f"{index // 2}.{'value' if index % 2 else 'key'}"
                self.bind_in_place(f"past_key_values.{name}", f"present.{name}", buffer)

    def run(self) -> None:
        """One call over what is bound. Raises BundleError when the graph refuses it, MemoryError."""
        try:
            self.session.run_with_iobinding(self._now.io)
        except RuntimeError as error:
            said = " ".join(str(error).split())
            if is_memory(said):
                raise MemoryError(said) from error
            raise BundleError(f"a graph of this bundle cannot be run ({said}); export the bundle again") from error

    def _add(self, shape: Hashable) -> _Set:
        if len(self._sets) >= _MOST_SETS:
            del self._sets[next(iter(self._sets))]
        made = self._sets[shape] = _Set(shape=shape, io=self.session.io_binding())
        for name, (_, value) in self._always.items():
            made.io.bind_ortvalue_input(name, value)
        return made


class Scratch:
    """Reusable flat buffers by name, grown by doubling: arrays of changing shape without an allocation per call."""

    def __init__(self) -> None:
        self._flat: dict[str, NDArray[Any]] = {}
        self._views: dict[tuple[str, tuple[int, ...]], NDArray[Any]] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
        """An uninitialised C-contiguous view of `shape`, the same object for the same shape while the buffer lasts.

        Its content is valid until the next call with the same name. For shapes of which there are few.
        """
        view = self._views.get((name, shape))
        if view is None:
            size = math.prod(shape)
            view = self._views[name, shape] = self.flat(name, size, dtype)[:size].reshape(shape)
        return view

    def flat(self, name: str, size: int, dtype: type[np.generic]) -> NDArray[Any]:
        """The whole buffer, of at least `size` items."""
        flat = self._flat.get(name)
        if flat is None or flat.size < size:
            grown = size if flat is None or flat.size * 2 < size else flat.size * 2
            flat = self._flat[name] = np.empty(max(grown, 1), dtype)
            for key in [key for key in self._views if key[0] == name]:
                del self._views[key]  # views of the old buffer
        return flat
