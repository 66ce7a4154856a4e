"""What this machine takes for the parts of a call: the device file that `plan` predicts other models with.

Products are timed on their own, on random matrices larger than the last cache, by precision, kernels and rows. What a
model adds, the time of its small operators and of attention, comes from one bundle: its calls are timed at two
contexts, the difference is attention, and what the products do not explain of a call of one row is divided by its
operators.

What cannot be true is kept as near as the file allows and named in its notes: more rows that took less, operators that
took less than nothing, and what else ran on the machine meanwhile.
"""

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from elsi_edge._version import __version__
from elsi_edge.artifacts import BITS, BYTES_PER_WEIGHT, PRECISIONS, Precision
from elsi_edge.bundle import Bundle
from elsi_edge.errors import UsageError
from elsi_edge.machine import cores, cpu_name
from elsi_edge.runtime import native_ops
from elsi_edge.runtime.bench.noise import Ticks, falls, load_since, noise_words
from elsi_edge.runtime.device import ROWS, Device, Kernels
from elsi_edge.runtime.engines import BundleEngines
from elsi_edge.runtime.measure import copy_bandwidth, matrix_peak, middle_mean, read_bandwidth, time_verify
from elsi_edge.runtime.one_node import matrix_session
from elsi_edge.runtime.options import SessionSettings
from elsi_edge.runtime.ort import resolve_provider
from elsi_edge.runtime.plan import CostModel

_INPUTS = 2048  # K of the matrix: as wide as models of a billion weights
_CACHE = Path("/sys/devices/system/cpu/cpu0/cache")
_LEAST_BYTES = 48 << 20  # of a matrix
_CACHES = 8  # times the last cache; of three times its size a cache that keeps what it can still holds a part
_PAST = (64, 1024)  # tokens in the cache, few and many
_SHARE = {"bandwidth": 0.1, "products": 0.5, "bundle": 0.4}  # of the seconds
_SMALLEST_PS = 1e-3  # picoseconds, where noise makes a difference negative


class _Schedule:
    """Parts of the measurement one after the other: each ends when the whole ought to be so far, late starts or not."""

    def __init__(self, seconds: float, say: Callable[[str], None], done: Callable[[float], None]) -> None:
        self._start, self._seconds, self._share = time.perf_counter(), seconds, 0.0
        self._say, self._done = say, done

    def part(self, what: str, share: float) -> float:
        """Say what comes, which takes this share of the time; returns when it should end (`time.perf_counter`)."""
        self._say(what)
        self._done(self._share)
        self._share += share
        return self._start + self._share * self._seconds


@dataclass(frozen=True, kw_only=True)
class DeviceSettings:
    """How a device is measured."""

    seconds: float = 60.0  # about, opening graphs counted; three repeats of everything may take longer
    rows: tuple[int, ...] = ROWS  # ascending, from 1
    matrix_bytes: int | None = None  # of each matrix; None = eight times the last cache


def measure_device(
    bundle: Bundle,
    settings: SessionSettings,
    how: DeviceSettings | None = None,
    say: Callable[[str], None] = lambda _: None,
    done: Callable[[float], None] = lambda _: None,
) -> Device:
    """Measure this machine; `bundle` gives the overheads of a whole graph. `done` gets the share that is, from 0 to 1.

    Raises UsageError for a bundle of static graphs or whose context is too short, ProviderError for another provider
    than the CPU's, BundleError.
    """
    how = how or DeviceSettings()
    provider = resolve_provider(settings.provider)
    if provider != "CPUExecutionProvider":
        raise UsageError(f"--measure times the CPU's kernels; the provider is {provider}, leave it out")
    if bundle.manifest.static is not None:
        raise UsageError(
            f"{bundle.directory} holds graphs of fixed size, which cannot be timed by rows; --measure needs a bundle "
            "of export --for cpu"
        )
    before, schedule = Ticks.now(), _Schedule(how.seconds, say, done)
    threads = settings.threads or cores().usable
    schedule.part("measuring copy and read bandwidth", _SHARE["bandwidth"])
    part = _SHARE["bandwidth"] * how.seconds / 3
    copied, read = copy_bandwidth(threads, seconds=part), read_bandwidth(threads, seconds=part)
    peak = matrix_peak(32, threads, seconds=part)
    kinds, notes = _kinds(settings), list[str]()
    curves: dict[str, dict[str, dict[str, float]]] = {}
    for precision, kernels in kinds:
        until = schedule.part(f"measuring {precision} products, {kernels} kernels", _SHARE["products"] / len(kinds))
        found = product_times(precision, kernels, threads, how, until=until)
        notes += _odd(f"{precision} products, {kernels} kernels", found)
        curves.setdefault(precision, {})[kernels] = _rising(found)
    plain = Device(
        name=f"{cpu_name()}, {threads} threads",
        kind="measured",
        threads=threads,
        provider=provider,
        memory_bytes=psutil.virtual_memory().total,
        copy_gb_per_s=copied,
        read_gb_per_s=read,
        node_us=dict.fromkeys(("stock", "native"), 0.0),
        peak_gop_per_s={"fp32": peak},
        curves=curves,
        attention={kernels: dict.fromkeys(map(str, how.rows), _SMALLEST_PS) for kernels in ("stock", "native")},
        created_by=f"elsi-edge {__version__}",
    )
    device = _with_overheads(plain, bundle, settings, how, schedule)
    done(1.0)
    return replace(device, notes=(*noise_words(load_since(before), None, None), *notes, *device.notes))


def product_times(
    precision: Precision, kernels: Kernels, threads: int, how: DeviceSettings, *, until: float
) -> dict[int, float]:
    """Picoseconds a weight by rows: every count in turn, each after an untimed call of its own; three at least."""
    size = how.matrix_bytes or max(_LEAST_BYTES, _CACHES * _last_cache())
    outputs = max(64, int(size / BYTES_PER_WEIGHT[precision]) // _INPUTS // 64 * 64)
    session, _ = matrix_session(_INPUTS, outputs, bits=BITS[precision], threads=threads, native=kernels == "native")
    draw = np.random.default_rng(0)
    feeds = {rows: {"x": draw.standard_normal((rows, _INPUTS), np.float32)} for rows in how.rows}  # shape: [T, K]
    times: dict[int, list[float]] = {rows: [] for rows in how.rows}
    while len(times[how.rows[0]]) < 3 or time.perf_counter() < until:
        for rows in how.rows:
            times[rows] += _timed(session, feeds[rows])
    return {rows: 1e12 * middle_mean(took) / (_INPUTS * outputs) for rows, took in times.items()}


def _rising(values: Mapping[int, float]) -> dict[str, float]:
    """A curve by rows: fewer rows never cost more, since noise only adds."""
    rows = sorted(values, reverse=True)
    least = itertools.accumulate((values[count] for count in rows), min)
    return dict(reversed([(str(count), float(value)) for count, value in zip(rows, least, strict=True)]))


def _odd(what: str, times: Mapping[int, float]) -> list[str]:
    said = falls(times)
    return [f"{what}: {said}; measure again"] if said else []


def _timed(session: Any, feed: Mapping[str, NDArray[np.float32]]) -> list[float]:
    session.run(None, feed)  # a round's calls follow calls of their own kind
    start = time.perf_counter()
    session.run(None, feed)
    return [time.perf_counter() - start]


def _kinds(settings: SessionSettings) -> list[tuple[Precision, Kernels]]:
    native = settings.native and native_ops.report().available
    found: list[tuple[Precision, Kernels]] = []
    for precision in PRECISIONS:
        found.append((precision, "stock"))
        if native and precision != "fp32":
            found.append((precision, "native"))
    return found


def _with_overheads(
    device: Device, bundle: Bundle, settings: SessionSettings, how: DeviceSettings, schedule: _Schedule
) -> Device:
    """The device with what operators and attention of the bundle's graphs take; kernels it cannot run are dropped."""
    manifest = bundle.manifest
    rows = how.rows
    pasts = (_PAST[0], min(_PAST[1], manifest.context - rows[-1] - 1))
    if pasts[1] < 2 * pasts[0]:
        raise UsageError(
            f"the bundle's context is {manifest.context} tokens, measuring needs {2 * pasts[0] + rows[-1] + 1}; "
            "export it with a longer --context"
        )
    tokens = np.random.default_rng(0).integers(0, manifest.shape.vocab_size, pasts[1] + rows[-1]).tolist()
    kinds: list[Kernels] = ["stock"]
    if settings.native and native_ops.path_for(manifest.graphs, settings):
        kinds.append("native")
    node_us: dict[str, float] = {}
    attention: dict[str, dict[str, float]] = {}
    notes: list[str] = []
    for kernels in kinds:
        until = schedule.part(
            f"measuring the graph of {manifest.slug}, {kernels} kernels", _SHARE["bundle"] / len(kinds)
        )
        target = BundleEngines(bundle, replace(settings, native=kernels == "native"))[True].target
        halves = ((time.perf_counter() + until) / 2, until)
        few, many = (
            time_verify(target, tokens, past, rows, until=end) for past, end in zip(pasts, halves, strict=True)
        )  # in order
        for past, took in zip(pasts, (few, many), strict=True):
            notes += _odd(f"{manifest.slug} after {past} tokens, {kernels} kernels", took)
        model = CostModel(manifest.shape, device, manifest.precision, kernels)
        attended = model.attended_bytes(pasts[1] - pasts[0])
        slopes = {count: max(1e9 * (many[count] - few[count]) / attended, _SMALLEST_PS) for count in rows}
        if slopes[rows[0]] <= _SMALLEST_PS:
            notes.append(
                f"{kernels}: one row took no longer after {pasts[1]} tokens than after {pasts[0]}; measure again"
            )
        attention[kernels] = _rising(slopes)
        explained = model.call(1, 0).matrices_ms + model.attended_bytes(pasts[0]) * slopes[rows[0]] * 1e-9
        left = few[rows[0]] - explained
        if left < 0:
            notes.append(
                f"{kernels}: products and attention, each by itself, explain {explained:.2f} ms of a call that took "
                f"{few[rows[0]]:.2f}; operators are taken to cost nothing, measure again"
            )
        node_us[kernels] = max(0.0, 1e3 * left / model.nodes)
    if "native" not in kinds and any("native" in by_kernels for by_kernels in device.curves.values()):
        notes.append(f"{manifest.slug} has no native graph that runs here: native kernels are left out")
    curves = {
        precision: {str(name): curve for name, curve in by_kernels.items() if name in kinds}
        for precision, by_kernels in device.curves.items()
    }
    return replace(device, curves=curves, node_us=node_us, attention=attention, notes=tuple(notes))


def _last_cache() -> int:
    """Bytes of this CPU's largest cache, 32 MB where it does not say."""
    sizes = []
    for file in _CACHE.glob("index*/size"):
        try:
            text = file.read_text().strip()
            sizes.append(int(text[:-1]) << {"K": 10, "M": 20, "G": 30}[text[-1]])
        except (OSError, ValueError, KeyError, IndexError):
            continue
    return max(sizes, default=32 << 20)
