"""Memory of packed weights: matrices share large pages, keep what is theirs, and give it all back."""

import numpy as np
import pytest

from elsi_edge.runtime import native_ops
from elsi_edge.runtime.memory import footprint
from tests.test_native_matrix import model, rows_of, session, weights

REPORT = native_ops.report()
pytestmark = pytest.mark.skipif(not REPORT.available, reason=REPORT.why_not)

INPUTS, COLUMNS = 4096, 4096
PACKED = INPUTS * COLUMNS * 5 // 8  # bytes: 4 bits, and a float for 32 of them


def anonymous_bytes() -> int:
    """Of this process."""
    now = footprint()
    assert now is not None
    return now.anonymous


def test_sessions_that_come_and_go_keep_their_own_weights() -> None:
    """One that opens after another has gone does not write over a third that stays."""
    rows = rows_of(2, 256)
    graphs = [model(256, columns, 4, *weights(columns, 256, 4, seed=columns)) for columns in (48, 640, 16)]
    alone = [session(graph).run(None, {"x": rows})[0] for graph in graphs]
    first, second = session(graphs[0]), session(graphs[1])
    del first
    third = session(graphs[2])
    del third
    again = session(graphs[0])
    np.testing.assert_array_equal(second.run(None, {"x": rows})[0], alone[1])
    np.testing.assert_array_equal(again.run(None, {"x": rows})[0], alone[0])


@pytest.mark.skipif(footprint() is None, reason="the kernel does not sum up memory here")
def test_memory_goes_back_with_the_last_matrix() -> None:
    """Opened and closed six times, no more than once is left: what one holds is 10 MiB."""
    graph = model(INPUTS, COLUMNS, 4, *weights(COLUMNS, INPUTS, 4))
    session(graph)  # what ONNX Runtime itself keeps from the first
    before = anonymous_bytes()
    held = session(graph)
    assert anonymous_bytes() - before > PACKED * 0.9
    del held
    for _ in range(6):
        session(graph)
    assert anonymous_bytes() - before < PACKED
