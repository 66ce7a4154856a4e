"""The head that finds each row's likeliest column: the product's own bits, and numpy's argmax of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from elsi_edge.bundle import Bundle
from elsi_edge.export import native_graph, surgery
from elsi_edge.runtime import native_ops
from elsi_edge.runtime.options import GenerateOptions
from elsi_edge.runtime.sampling import Chooser
from elsi_edge.runtime.session import Session
from elsi_edge.runtime.tree import Tree
from tests import test_native_matrix as matrix
from tests import test_native_shift as shift
from tests.test_export import MakeBundle
from tests.test_native_fuzz import FUZZ
from tests.test_native_ops import opened

REPORT = native_ops.report()
pytestmark = pytest.mark.skipif(not REPORT.available, reason=REPORT.why_not)

Floats = NDArray[np.float32]
ALL, NONE = np.array([1]), np.array([0])


def model(inputs: int, columns: int, bits: int, tensors: Sequence[Any], /, **changed: Any) -> bytes:
    """A graph of one node; `changed` replaces attributes."""
    attributes = {"K": inputs, "N": columns, "bits": bits, "block_size": 32} | changed
    names = [f"w{i}" for i in range(len(tensors))]
    wires = ["x", "product_wanted", *names]
    node = helper.make_node("LikeliestBlocks", wires, ["y", "column"], domain=native_ops.DOMAIN, **attributes)
    graph = helper.make_graph(
        [node],
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, None),
            helper.make_tensor_value_info("product_wanted", TensorProto.INT64, None),
        ],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, None),
            helper.make_tensor_value_info("column", TensorProto.INT64, None),
        ],
        [numpy_helper.from_array(tensor, name) for tensor, name in zip(tensors, names, strict=True)],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(native_ops.DOMAIN, 1)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())


@pytest.mark.parametrize("path", REPORT.paths)
@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize(("inputs", "columns"), ((32, 1), (33, 17), (64, 255), (96, 256), (320, 5000)))
def test_the_product_and_its_largest_column(inputs: int, columns: int, bits: int, path: str) -> None:
    """One thread and two, one row to several chunks of rows: the product's bits are those of MatMulBlocks."""
    tensors = matrix.weights(columns, inputs, bits)
    rows = matrix.rows_of(29, inputs)
    with native_ops.forced_path(path):
        wanted = matrix.session(matrix.model(inputs, columns, bits, *tensors)).run(None, {"x": rows})[0]
        runs = [matrix.session(model(inputs, columns, bits, tensors), threads) for threads in (1, 2)]
    for run in runs:
        for count in (1, 2, 12, 13, 29):
            y, column = run.run(None, {"x": rows[:count], "product_wanted": ALL})
            assert np.array_equal(y.view(np.uint32), wanted[:count].view(np.uint32))
            assert column.tolist() == wanted[:count].argmax(-1).tolist()
            y, column = run.run(None, {"x": rows[:count], "product_wanted": NONE})
            assert y.shape == (0, columns)
            assert column.tolist() == wanted[:count].argmax(-1).tolist()


@FUZZ
@given(blocks=st.integers(1, 12), columns=st.integers(1, 700), rows=st.integers(1, 30), seed=st.integers(0, 99))
def test_with_shifts(blocks: int, columns: int, rows: int, seed: int) -> None:
    weights = shift.weights(columns, blocks, seed)
    tensors = [weights.packed, weights.scales, weights.shift_values, weights.shift_scales]
    x = matrix.rows_of(rows, 32 * blocks, seed)
    for path in REPORT.paths:
        with native_ops.forced_path(path):
            wanted = matrix.session(shift.model("MatMulBlocks", [weights])).run(None, {"x": x})[0]
            run = matrix.session(model(32 * blocks, columns, 4, tensors), 2)
        for flag in (ALL, NONE):
            y, column = run.run(None, {"x": x, "product_wanted": flag})
            assert np.array_equal(y, wanted[: rows * flag[0]])
            assert np.array_equal(column, wanted.argmax(-1))


@pytest.mark.parametrize("path", REPORT.paths)
def test_of_equal_columns_the_first(path: str) -> None:
    """Within 16 columns, across tiles, across tasks; also where every column is alike, and where all are 0."""
    packed, scales = matrix.weights(5000, 64, 8)
    for first, second in ((3, 4), (3, 300), (700, 4900)):
        values, by = packed.copy(), scales.copy()
        values[[first, second]], by[[first, second]] = 255, 1.0  # far above all others
        with native_ops.forced_path(path):
            run = matrix.session(model(64, 5000, 8, (values, by)), 2)
        assert run.run(None, {"x": np.ones((2, 64), np.float32), "product_wanted": NONE})[1].tolist() == [first, first]
        assert run.run(None, {"x": np.zeros((1, 64), np.float32), "product_wanted": NONE})[1].tolist() == [0]


@pytest.mark.parametrize("path", REPORT.paths)
def test_not_a_number_is_never_the_largest(path: str) -> None:
    """A row of them has column 0; the rows beside it theirs."""
    tensors = matrix.weights(300, 64, 4)
    rows = matrix.rows_of(3, 64)
    with native_ops.forced_path(path):
        run = matrix.session(model(64, 300, 4, tensors), 2)
    before = run.run(None, {"x": rows, "product_wanted": NONE})[1]
    rows[1, 7] = np.nan
    assert run.run(None, {"x": rows, "product_wanted": NONE})[1].tolist() == [before[0], 0, before[2]]


def test_ranks_and_no_rows() -> None:
    run = matrix.session(model(64, 48, 4, matrix.weights(48, 64, 4)))
    rows = matrix.rows_of(6, 64)
    flat = run.run(None, {"x": rows, "product_wanted": ALL})
    y, column = run.run(None, {"x": rows[None], "product_wanted": ALL})
    assert np.array_equal(y, flat[0][None]) and np.array_equal(column, flat[1][None])
    assert [value.shape for value in run.run(None, {"x": rows[None, :0], "product_wanted": ALL})] == [
        (1, 0, 48),
        (1, 0),
    ]
    assert run.run(None, {"x": rows[None], "product_wanted": NONE})[0].shape == (1, 0, 48)


def test_what_does_not_fit_is_refused() -> None:
    tensors = matrix.weights(48, 64, 4)
    for changed in matrix.HOSTILE:
        with pytest.raises(Exception, match="LikeliestBlocks: "):
            matrix.session(model(64, 48, 4, tensors, **changed))
    run = matrix.session(model(64, 48, 4, tensors))
    rows = matrix.rows_of(2, 64)
    for x, wanted, words in (
        (rows[:, :63], ALL, "with K = 64"),
        (rows[0], ALL, "it must be"),
        (rows, np.array([1, 1]), "product_wanted is"),
    ):
        with pytest.raises(Exception, match=words):
            run.run(None, {"x": x, "product_wanted": wanted})
    with pytest.raises(Exception, match="there are 5 inputs, it must be 4, or 6 with shifts"):
        matrix.session(model(64, 48, 4, [*tensors, tensors[0]]))


# --- in a bundle ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_a_target_yields_the_likeliest_in_place_of_logits(tiny_bundle: MakeBundle, precision: str) -> None:
    bundle = Bundle.load(tiny_bundle(precision))
    target, draw = opened(bundle), np.random.default_rng(0)
    target.prefill(draw.integers(0, 200, 20).tolist())
    for size in (0, 3, 30, 3):
        tree = Tree.chain(draw.integers(0, 200, size).tolist())
        step = target.verify(3, tree)
        logits, taps = step.logits.copy(), step.taps.copy()
        assert step.likeliest is None and logits.shape[0] == size + 1
        found = target.verify(3, tree, greedy=True)
        assert found.likeliest == tuple(logits.argmax(-1).tolist())
        assert found.logits.shape == (0, bundle.manifest.shape.vocab_size)
        assert np.array_equal(found.taps, taps)
        assert np.array_equal(target.verify(3, tree).logits, logits)  # and back


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}, {"temperature": 0.7, "seed": 3}], ids=str)
def test_what_is_chosen_is_what_numpy_would(
    tiny_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """The same tokens where every choice is made from logits, and the short way taken where it may be, only there."""
    session = Session.open(tiny_bundle("int4"))
    generate = GenerateOptions(max_tokens=40, draft_nodes=6, **options)
    target = session.engine(exact=True).target
    asked: list[bool] = []
    verify = target.verify

    def noting(root: int, tree: Tree, *, greedy: bool = False) -> Any:
        asked.append(greedy)
        return verify(root, tree, greedy=greedy)

    monkeypatch.setattr(target, "verify", noting)
    short = session.generate("a tale of two", generate).token_ids
    assert set(asked) == {not options}
    monkeypatch.setattr(Chooser, "greedy", property(lambda self: False))
    asked.clear()
    assert session.generate("a tale of two", generate).token_ids == short
    assert set(asked) == {False}


def test_logits_that_are_no_product_are_left(tiny_bundle: MakeBundle) -> None:
    """As where a family caps them."""
    model = surgery.load_graph(Bundle.load(tiny_bundle("int4")).graph("target-tree"))
    assert not native_graph.use_native_head(model)  # a stock product
    native_graph.use_native_products(model)
    assert native_graph.use_native_head(model)
    assert not native_graph.use_native_head(model)  # once
    names = [value.name for value in (*model.graph.inputs, *model.graph.outputs)]
    assert names.count("logits_wanted") == names.count("likeliest") == names.count("logits") == 1
