"""What the machine allows, and how near the bundle comes (Williams, Waterman and Patterson, 2009).

A call reads every weight of the target once, whatever its rows, and the keys and values of the cache; it multiplies and
adds every weight once a row. The limit is the longer of the two times. What is not counted (norms, the draft, the loop)
only makes the limit lower than it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elsi_edge.artifacts import BITS, ModelShape, Precision
from elsi_edge.runtime import native_ops
from elsi_edge.runtime.measure import copy_bandwidth, matrix_peak, read_bandwidth
from elsi_edge.runtime.plan_sizes import block_matrices, head_matrix
from elsi_edge.runtime.tuning import Tuning

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_SECONDS = 0.7  # of each measurement
_FREE = 1.1  # times one row: a call that takes no more is called free


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Of this machine with so many threads."""

    copy_gb_per_s: float  # read and written
    read_gb_per_s: float  # read alone, as weights are
    gop_per_s: Mapping[str, float]  # of large matrix products by precision, 2 per multiply-add; best kernel of each

    @property
    def memory_gb_per_s(self) -> float:
        """The most that was seen: what a call that only reads could reach."""
        return max(self.copy_gb_per_s, self.read_gb_per_s)

    def compute(self, precision: Precision) -> float:
        """What products of this precision could reach: 4-bit ones compute in 8 bits, so the better kernel of both."""
        alike = [peak for name, peak in self.gop_per_s.items() if (name == "fp32") == (precision == "fp32")]
        return max(alike)


@dataclass(frozen=True, kw_only=True)
class Point:
    """Verifying so many rows."""

    rows: int
    bytes: int  # read: weights, keys and values
    operations: int  # 2 per multiply-add
    memory_ms: float  # to read that
    compute_ms: float  # to compute that
    measured_ms: float | None

    @property
    def limit_ms(self) -> float:
        """The longer of both."""
        return max(self.memory_ms, self.compute_ms)


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """The machine, the calls, and what one reads off them."""

    ceilings: Ceilings
    past: int  # tokens in the cache
    verify: tuple[Point, ...]
    step_ms: float  # of plain decoding, measured in this run
    fixed_rows: int | None  # that every call computes, of a static bundle, whose `verify` has that point alone
    free_rows_on_paper: int  # the most rows that reading the weights hides
    free_rows_measured: int | None  # the most rows that take at most 1.1 times one, by the tuning; None without one

    @property
    def reached(self) -> float:
        """Limit over measured of a plain step: 1 is the limit."""
        return self.verify[0].limit_ms / self.step_ms

    @property
    def words(self) -> tuple[str, ...]:
        """What it means, a sentence each."""
        one = self.verify[0]
        step = "a plain step" if self.fixed_rows is None else f"a plain step, all {self.fixed_rows} rows of its graph,"
        bound = "reading memory" if one.memory_ms >= one.compute_ms else "computing"
        said = [
            f"{step} reads {one.bytes / 1e6:.0f} MB and computes {one.operations / 1e9:.2f} GOP; on paper it is "
            f"bound by {bound} and takes {one.limit_ms:.2f} ms, measured {self.step_ms:.2f} ms: {self.reached:.0%} of "
            "the limit",
        ]
        if self.fixed_rows is not None:
            said.append(f"the graphs are of fixed size: {self.fixed_rows - 1} candidates cost nothing more to verify")
            return tuple(said)
        said.append(
            "on paper a second row is not free: computing takes longer than reading the weights"
            if self.free_rows_on_paper == 1
            else f"on paper {self.free_rows_on_paper} rows cost what one does: reading the weights hides their work"
        )
        two = self.verify[1]
        if self.free_rows_measured is not None and self.free_rows_measured > 1:
            said.append(f"measured, {self.free_rows_measured} rows cost at most {_FREE:g} times one")
        elif two.measured_ms is not None and one.measured_ms is not None:
            said.append(
                f"measured, no second row is free: two rows cost {two.measured_ms / one.measured_ms:.2f} times one"
            )
        else:
            said.append("what more rows really cost here is measured by: elsi-edge tune BUNDLE")
        return tuple(said)


def measure_ceilings(precision: Precision, threads: int) -> Ceilings:
    """Bandwidth and matrix peaks, some seconds."""
    names: Sequence[Precision] = tuple(dict.fromkeys((precision, "int8", "fp32")))
    return Ceilings(
        copy_gb_per_s=copy_bandwidth(threads, seconds=_SECONDS),
        read_gb_per_s=read_bandwidth(threads, seconds=_SECONDS),
        gop_per_s={name: _peak(name, threads) for name in names},
    )


def _peak(precision: Precision, threads: int) -> float:
    """Of ONNX Runtime's kernel, and of this package's where it can run."""
    found = [matrix_peak(BITS[precision], threads, seconds=_SECONDS)]
    if precision != "fp32" and native_ops.report().available:
        found.append(matrix_peak(BITS[precision], threads, seconds=_SECONDS, native=True))
    return max(found)


def roofline(
    shape: ModelShape,
    precision: Precision,
    *,
    past: int,
    step_ms: float,
    ceilings: Ceilings,
    tuning: Tuning | None,
    fixed_rows: int | None = None,
) -> Roofline:
    """Of calls after `past` cached tokens; `step_ms` is a plain step as measured, `fixed_rows` what every call of a
    static bundle computes. Pure."""
    measured = None if tuning is None else min(tuning.curves, key=lambda curve: abs(curve.past - past)).verify_ms
    counts_of_rows = ROWS if fixed_rows is None else (fixed_rows,)
    points = tuple(_point(shape, precision, rows, past, ceilings, measured) for rows in counts_of_rows)
    hidden = [point.rows for point in points if point.compute_ms <= point.memory_ms]
    free = None
    if measured is not None:
        counts = sorted(map(int, measured))
        free = next((n - 1 for n in counts if measured[str(n)] > _FREE * measured["1"]), counts[-1])
    return Roofline(
        ceilings=ceilings,
        past=past,
        verify=points,
        step_ms=step_ms,
        fixed_rows=fixed_rows,
        free_rows_on_paper=fixed_rows or max(hidden, default=1),
        free_rows_measured=free,
    )


def _point(
    shape: ModelShape,
    precision: Precision,
    rows: int,
    past: int,
    ceilings: Ceilings,
    measured: Mapping[str, float] | None,
) -> Point:
    matrices = (*block_matrices(shape), head_matrix(shape))
    read = sum(matrix.bytes(precision) for matrix in matrices) + past * shape.kv_bytes_per_token()
    attention = 2 * 2 * rows * past * shape.heads * shape.head_width * shape.blocks
    operations = 2 * rows * sum(matrix.padded(precision) for matrix in matrices) + attention
    return Point(
        rows=rows,
        bytes=read,
        operations=operations,
        memory_ms=read / ceilings.memory_gb_per_s / 1e6,
        compute_ms=operations / ceilings.compute(precision) / 1e6,
        measured_ms=None if measured is None else measured.get(str(rows)),
    )
