"""A device as `plan` sees it: bandwidth, memory, and what a matrix product takes by rows. Files, strictly read.

A *measured* device carries kernel curves from `elsi_edge.runtime.measure_device`. A *projection* carries none: they
follow from public figures as the roofline does, a weight taking the longer of reading its bytes at a share of the
bandwidth and computing with it at a share of the peak, both shares stated in the file with where they come from.
"""

import importlib.resources
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from elsi_edge.artifacts import BYTES_PER_WEIGHT, PRECISIONS, Precision, from_plain, to_plain
from elsi_edge.errors import ConfigError, DataError
from elsi_edge.fsio import read_json_object, write_json

Kernels = Literal["stock", "native"]  # ONNX Runtime's products and attention, or this package's operators
Curve = Mapping[str, float]  # by rows in one call, "1".."64"; what lies between is interpolated

FORMAT = "elsi-edge-device"
FORMAT_VERSION = 1
ROWS = (1, 2, 4, 8, 16, 32, 64)
_KERNELS: tuple[Kernels, ...] = ("stock", "native")
_PS = 1e3  # picoseconds for a byte at one gigabyte per second, and for an operation at one giga-operation


@dataclass(frozen=True, kw_only=True)
class Device:
    """One machine with a number of threads."""

    name: str
    kind: Literal["measured", "projection"]
    threads: int
    provider: str  # ONNX Runtime's execution provider
    memory_bytes: int
    copy_gb_per_s: float  # read and written together
    read_gb_per_s: float  # weights are only read; of a projection the figure on paper
    node_us: Mapping[str, float]  # by kernels: microseconds a small operator of a graph takes beside its arithmetic
    bandwidth_efficiency: float = 1.0  # share of read_gb_per_s that a product of one row reaches, in (0, 1]
    compute_efficiency: float = 1.0  # share of peak_gop_per_s that a product of many rows reaches, in (0, 1]
    peak_gop_per_s: Mapping[str, float] = field(default_factory=dict)  # by precision; 2 per multiply-add
    # By precision and kernels: picoseconds a weight, of matrices larger than the last cache, for all rows together.
    curves: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    # By kernels: picoseconds for all rows together, a byte of the keys and values that a row's query heads read.
    attention: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    sources: tuple[Mapping[str, str], ...] = ()  # what, value, link
    notes: tuple[str, ...] = ()
    created_by: str = ""
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        for name in ("threads", "memory_bytes", "copy_gb_per_s", "read_gb_per_s"):
            _require_above(name, getattr(self, name))
        for name in ("bandwidth_efficiency", "compute_efficiency"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must lie above 0 and at most be 1")
        if not set(self.node_us) & set(_KERNELS):
            raise ConfigError(f"node_us names {_list(self.node_us)}, it must have a figure for stock or native kernels")
        for kernels, value in self.node_us.items():
            _require_key("node_us", kernels, _KERNELS)
            if value < 0.0:
                raise ConfigError(f"node_us.{kernels} is {value}, it cannot be negative")
        for precision, peak in self.peak_gop_per_s.items():
            _require_key("peak_gop_per_s", precision, PRECISIONS)
            _require_above(f"peak_gop_per_s.{precision}", peak)
        for source in self.sources:
            if set(source) != {"what", "value", "link"}:
                raise ConfigError(f"a source has the keys {_list(source)}, it must have what, value and link")
        if self.kind == "measured":
            self._require_measured()
        elif self.curves or self.attention or set(self.peak_gop_per_s) != set(PRECISIONS) or not self.sources:
            raise ConfigError(
                f"a projection needs peak_gop_per_s for {', '.join(PRECISIONS)} and sources, and has no curves or "
                "attention: those are measured"
            )

    def _require_measured(self) -> None:
        if not self.curves:
            raise ConfigError("a measured device needs curves, it has none")
        for precision, by_kernels in self.curves.items():
            _require_key("curves", precision, PRECISIONS)
            for kernels, curve in by_kernels.items():
                _require_key(f"curves.{precision}", kernels, _KERNELS)
                _require_curve(f"curves.{precision}.{kernels}", curve)
                if kernels not in self.node_us or kernels not in self.attention:
                    raise ConfigError(
                        f"curves.{precision} has {kernels} kernels, node_us and attention must have them too"
                    )
        for kernels, curve in self.attention.items():
            _require_key("attention", kernels, _KERNELS)
            _require_curve(f"attention.{kernels}", curve)

    @property
    def static_only(self) -> bool:
        """Whether it runs static graphs alone, as NPUs do: every execution provider but the CPU's."""
        return self.provider != "CPUExecutionProvider"

    def best_kernels(self, precision: Precision) -> Kernels:
        """The kernels that a bundle of `precision` would run on. Raises ConfigError where there is no curve for it."""
        if self.kind == "projection":
            return "stock"
        if precision not in self.curves:
            raise ConfigError(f"the device {self.name!r} was not measured at {precision}, but at {_list(self.curves)}")
        return "native" if "native" in self.curves[precision] else "stock"

    def knows(self, precision: Precision, kernels: Kernels) -> bool:
        """Whether a weight's time in a product is known."""
        return self.kind == "projection" or kernels in self.curves.get(precision, {})

    def weight_ps(
        self, precision: Precision, kernels: Kernels, rows: int, *, bytes_per_weight: float | None = None
    ) -> float:
        """Picoseconds of one weight in a product of `rows` rows; a projection reads `bytes_per_weight`, scales counted.

        None: as weights in blocks take.
        """
        if self.kind == "measured":
            return at(self.curves[precision][kernels], rows)
        each = bytes_per_weight or BYTES_PER_WEIGHT[precision]
        memory = _PS * each / (self.read_gb_per_s * self.bandwidth_efficiency)
        compute = _PS * 2.0 * rows / (self.peak_gop_per_s[precision] * self.compute_efficiency)
        return max(memory, compute)

    def attention_ps(self, kernels: Kernels, rows: int, group: int) -> float:
        """Picoseconds of `rows` rows, a byte of what a row's query heads read: cached keys and values times `group`.

        `group` query heads share a key head, so that the bytes come from memory once for all of them.
        """
        if self.kind == "measured":
            return at(self.attention[kernels], rows)
        memory = _PS / group / (self.read_gb_per_s * self.bandwidth_efficiency)
        compute = _PS * 0.5 * rows / (self.peak_gop_per_s["fp32"] * self.compute_efficiency)  # 2 for each of 4 bytes
        return max(memory, compute)

    def bandwidth(self) -> float:
        """Gigabytes a second that reading weights reaches at best."""
        return self.read_gb_per_s * self.bandwidth_efficiency

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return {"format": FORMAT, **to_plain(self)}

    def save(self, path: Path) -> None:
        """Write the file. Raises StorageError."""
        write_json(path, self.to_json())


def at(curve: Curve, rows: int) -> float:
    """A curve's value: linear between its rows, beyond the last as steep as between its last two."""
    known = sorted(int(row) for row in curve)
    values = [curve[str(row)] for row in known]
    if rows <= known[-1] or len(known) == 1:
        return float(np.interp(rows, known, values))
    slope = max(0.0, (values[-1] - values[-2]) / (known[-1] - known[-2]))
    return values[-1] + slope * (rows - known[-1])


def shipped_devices() -> tuple[str, ...]:
    """Names of the devices that come with the package."""
    return tuple(sorted(path.stem for path in _shipped().glob("*.json")))


def load_device(reference: str) -> Device:
    """A device by its shipped name, or from a file. Raises DataError in one line, StorageError."""
    path = Path(reference).expanduser()
    if reference in shipped_devices():
        path = _shipped() / f"{reference}.json"
    elif not path.is_file():
        raise DataError(
            f"no device {reference!r}: neither a file nor one of {', '.join(shipped_devices())}; measure this machine "
            "with: elsi-edge plan BUNDLE --measure FILE"
        )
    value = read_json_object(path, DataError, remedy="measure the device again")
    if value.get("format") != FORMAT:
        raise DataError(f"{path} has the format {value.get('format')!r}, a device's is {FORMAT!r}")
    if value.get("format_version") != FORMAT_VERSION:
        raise DataError(
            f"{path} has format version {value.get('format_version')!r}, this elsi-edge reads {FORMAT_VERSION}"
        )
    try:
        return from_plain(Device, value, str(path), ignore=("format",))
    except ConfigError as error:
        raise DataError(str(error)) from error


def _shipped() -> Path:
    return Path(str(importlib.resources.files("elsi_edge.data").joinpath("devices")))


def _require_above(name: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{name} is {value}, it must be above 0")


def _require_key(place: str, key: str, known: tuple[str, ...]) -> None:
    if key not in known:
        raise ConfigError(f"{place} names {key!r}, it may name {', '.join(known)}")


def _require_curve(name: str, curve: Curve) -> None:
    if "1" not in curve or not all(row.isascii() and row.isdigit() and int(row) > 0 for row in curve):
        raise ConfigError(f"{name} has the rows {_list(curve)}, they must be whole numbers with 1 among them")
    for row, value in curve.items():
        _require_above(f"{name}.{row}", value)


def _list(names: Mapping[str, Any]) -> str:
    return ", ".join(names) or "nothing"
