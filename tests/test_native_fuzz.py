"""Random shapes through the native operators: every path against the portable one, and against double precision.

Under the sanitizers: `make sanitize` builds the library with them and runs these files.
"""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elsi_edge.runtime import native_ops
from tests import test_native_attention as attention
from tests import test_native_matrix as matrix
from tests import test_native_shift as shift

REPORT = native_ops.report()
pytestmark = pytest.mark.skipif(not REPORT.available, reason=REPORT.why_not)

FUZZ = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@FUZZ
@given(
    inputs=st.integers(1, 200),
    columns=st.integers(1, 70),
    rows=st.integers(1, 40),
    bits=st.sampled_from((4, 8)),
    exponent=st.integers(-30, 30),
    seed=st.integers(0, 99),
)
def test_products(inputs: int, columns: int, rows: int, bits: int, exponent: int, seed: int) -> None:
    packed, scales = matrix.weights(columns, inputs, bits, seed)
    x = matrix.rows_of(rows, inputs, seed) * np.float32(2.0**exponent)
    results = []
    for path in REPORT.paths:
        with native_ops.forced_path(path):
            results.append(matrix.session(matrix.model(inputs, columns, bits, packed, scales)).run(None, {"x": x})[0])
    for result in results:
        assert np.array_equal(result.view(np.uint32), results[-1].view(np.uint32))
    wanted = matrix.reference(x, packed, scales, bits)
    size = np.abs(x).max() * np.abs(scales).max() * 2 ** (bits - 1) * inputs
    assert np.abs(results[0] - wanted).max() <= 2e-7 * size


@FUZZ
@given(
    blocks=st.integers(1, 40),
    columns=st.integers(1, 50),
    rows=st.integers(1, 40),
    exponent=st.integers(-20, 12),
    seed=st.integers(0, 99),
)
def test_shifted_products(blocks: int, columns: int, rows: int, exponent: int, seed: int) -> None:
    weights = shift.weights(columns, blocks, seed, size=2.0**exponent)
    x = matrix.rows_of(rows, 32 * blocks, seed)
    results = []
    for path in REPORT.paths:
        with native_ops.forced_path(path):
            results.append(matrix.session(shift.model("MatMulBlocks", [weights])).run(None, {"x": x})[0])
    for result in results:
        assert np.array_equal(result.view(np.uint32), results[-1].view(np.uint32))
    assert np.abs(results[0] - shift.reference(x, weights)).max() <= shift.bound(x, weights)


@FUZZ
@given(
    group=st.integers(1, 5),
    kv_heads=st.integers(1, 3),
    width=st.integers(1, 6).map(lambda n: 16 * n),
    cached=st.integers(0, 300),
    rows=st.integers(1, 40),
    window=st.sampled_from((-1, 1, 30, 129)),
    seed=st.integers(0, 99),
)
def test_attention(group: int, kv_heads: int, width: int, cached: int, rows: int, window: int, seed: int) -> None:
    shape = attention.Shape(heads=group * kv_heads, kv_heads=kv_heads, width=width, window=window)
    feed = attention.inputs(shape, cached, attention.random_parents(rows, seed), cached + rows, seed)
    wanted = attention.reference(shape, feed)
    for path in REPORT.paths:
        with native_ops.forced_path(path):
            got = attention.opened(shape).run(None, feed)[0]
        assert np.abs(got - wanted).max() < 1e-5, path
