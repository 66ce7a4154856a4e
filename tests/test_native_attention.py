"""The native tree attention: against double precision and the stock operator, and bit for bit in any company."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from elsi_edge.runtime import native_ops
from tests import one_attention

REPORT = native_ops.report()
pytestmark = pytest.mark.skipif(not REPORT.available, reason=REPORT.why_not)

Floats = NDArray[np.float32]
POSITIONS = 700


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One attention."""

    heads: int = 6
    kv_heads: int = 2
    width: int = 64
    window: int = -1
    softcap: float = 0.0
    scale: float = 0.0
    half: int = 0  # of the rotary part, 0 for all of the head

    @property
    def angles(self) -> int:
        """Rotary pairs."""
        return self.half or self.width // 2


def opened(shape: Shape, threads: int = 1, **changed: Any) -> ort.InferenceSession:
    """A session over one node; `changed` replaces attributes."""
    numbers: dict[str, Any] = {
        "num_heads": shape.heads,
        "kv_num_heads": shape.kv_heads,
        "window": shape.window,
        "scale": shape.scale,
        "softcap": shape.softcap,
    }
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    options.enable_cpu_mem_arena = False  # so that a sanitizer sees the ends of tensors
    return one_attention.open_native(options, **(numbers | changed))


def angles(shape: Shape) -> tuple[Floats, Floats]:
    """cos and sin [P, angles]."""
    by = np.arange(POSITIONS)[:, None] / 10000.0 ** (np.arange(shape.angles)[None] / shape.angles)
    return np.cos(by).astype(np.float32), np.sin(by).astype(np.float32)


def inputs(shape: Shape, cached: int, parents: list[int], capacity: int, seed: int = 0) -> dict[str, Any]:
    """Random rows and caches. Slots beyond the cache hold NaN: nobody may read them."""
    draw = np.random.default_rng(seed)
    rows = draw.standard_normal((1, len(parents), (shape.heads + 2 * shape.kv_heads) * shape.width)).astype(np.float32)
    caches = [draw.standard_normal((1, shape.kv_heads, capacity, shape.width)).astype(np.float32) for _ in range(2)]
    for cache in caches:
        cache[:, :, cached:] = np.nan
    cos, sin = angles(shape)
    return {
        "qkv": rows,
        "past_key": caches[0],
        "past_value": caches[1],
        "cos": cos,
        "sin": sin,
        "cached": np.array([cached], np.int32),
        "parents": np.array(parents, np.int64),
    }


def path_of(parents: list[int], row: int) -> list[int]:
    """A row's ancestors, then itself."""
    path = [row]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def reference(shape: Shape, feed: dict[str, Any]) -> NDArray[np.float64]:
    """[1, T, Hq * D] in double precision."""
    parents, cached = feed["parents"].tolist(), int(feed["cached"][0])
    heads, kv, width, half = shape.heads, shape.kv_heads, shape.width, shape.angles
    rows = feed["qkv"][0].astype(np.float64).reshape(len(parents), heads + 2 * kv, width)
    depths = [len(path_of(parents, row)) - 1 for row in range(len(parents))]
    for row, depth in enumerate(depths):
        cos, sin = (feed[n][cached + depth].astype(np.float64) for n in ("cos", "sin"))
        for head in range(heads + kv):
            a, b = rows[row, head, :half].copy(), rows[row, head, half : 2 * half].copy()
            rows[row, head, :half], rows[row, head, half : 2 * half] = a * cos - b * sin, b * cos + a * sin
    out = np.zeros((len(parents), heads, width))
    for row in range(len(parents)):
        path = path_of(parents, row)
        for head in range(heads):
            of = head * kv // heads
            keys = np.concatenate([feed["past_key"][0, of, :cached], rows[path, heads + of]])
            values = np.concatenate([feed["past_value"][0, of, :cached], rows[path, heads + kv + of]])
            if shape.window > 0:
                keys, values = keys[-shape.window :], values[-shape.window :]
            scores = keys @ rows[row, head] * (shape.scale or width**-0.5)
            if shape.softcap:
                scores = shape.softcap * np.tanh(scores / shape.softcap)
            weights = np.exp(scores - scores.max())
            out[row, head] = weights @ values / weights.sum()
    return out.reshape(1, len(parents), -1)


def random_parents(rows: int, seed: int) -> list[int]:
    """A tree of `rows` rows below one root; deep rather than bushy."""
    draw = np.random.default_rng(seed)
    return [-1, *(int(max(0, row - draw.geometric(0.5))) for row in range(1, rows))]


SHAPES = (
    Shape(),
    Shape(heads=9, kv_heads=3),
    Shape(heads=4, kv_heads=4, width=16),
    Shape(heads=8, kv_heads=1, width=128),
    Shape(heads=4, kv_heads=2, width=80, half=16),
    Shape(heads=2, kv_heads=1, width=256, softcap=30.0),
    Shape(window=40),
    Shape(window=1, scale=0.3),
    Shape(window=200, softcap=5.0),
)


@pytest.mark.parametrize("path", REPORT.paths)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_double_precision(shape: Shape, path: str) -> None:
    with native_ops.forced_path(path):
        run = opened(shape)
    for cached, rows in ((0, 1), (0, 20), (1, 2), (127, 3), (128, 1), (255, 9), (300, 17), (77, 40)):
        feed = inputs(shape, cached, random_parents(rows, rows), cached + rows + 3, seed=rows)
        got, keys, values = run.run(None, feed)
        assert np.abs(got - reference(shape, feed)).max() < 5e-6
        assert np.array_equal(keys[:, :, :cached], feed["past_key"][:, :, :cached])
        assert np.array_equal(
            values[0, :, cached : cached + rows].transpose(1, 0, 2).reshape(rows, -1),
            feed["qkv"][0, :, -shape.kv_heads * shape.width :],
        )


@pytest.mark.parametrize("path", REPORT.paths)
@pytest.mark.parametrize("shape", (SHAPES[1], SHAPES[6], SHAPES[8]), ids=str)
def test_a_row_has_the_bits_of_decoding_its_path_alone(shape: Shape, path: str) -> None:
    """One token a step along each path, against trees of 2 to 40 rows, on one thread and two."""
    with native_ops.forced_path(path):
        runs = [opened(shape, threads) for threads in (1, 2)]
    for cached, rows in ((0, 5), (120, 16), (126, 8), (250, 31), (10, 40), (383, 2)):
        parents = random_parents(rows, seed=rows)
        feed = inputs(shape, cached, parents, cached + rows, seed=rows)
        trees = [run.run(None, feed)[0] for run in runs]
        assert np.array_equal(trees[0].view(np.uint32), trees[1].view(np.uint32))
        for row in {rows - 1, rows // 2, rows // 3, 1}:
            alone = decode(runs[0], feed, path_of(parents, row), cached)
            assert np.array_equal(alone.view(np.uint32), trees[0][0, row].view(np.uint32)), (cached, rows, row)


def decode(run: ort.InferenceSession, feed: dict[str, Any], path: list[int], cached: int) -> Floats:
    """The last row's output when the rows of a path come one a step."""
    keys, values = feed["past_key"], feed["past_value"]
    out = np.zeros(0, np.float32)
    for step, row in enumerate(path):
        one = feed | {
            "qkv": feed["qkv"][:, row : row + 1],
            "past_key": keys,
            "past_value": values,
            "cached": np.array([cached + step], np.int32),
            "parents": np.array([-1], np.int64),
        }
        out, keys, values = run.run(None, one)
        # what the operator does not own is not copied: give the next step what this one had
        keys[:, :, cached + step + 1 :] = values[:, :, cached + step + 1 :] = np.nan
    return np.asarray(out[0, 0])


@pytest.mark.parametrize("path", REPORT.paths)
def test_a_chain_in_any_cut(path: str) -> None:
    """A prompt of 200 rows at once, in blocks, and one by one."""
    shape = SHAPES[1]
    with native_ops.forced_path(path):
        run = opened(shape, 2)
    feed = inputs(shape, 0, list(range(-1, 199)), 200)
    whole = run.run(None, feed)[0]
    for cut in (1, 7, 16, 17, 128):
        keys, values, parts = feed["past_key"], feed["past_value"], []
        for start in range(0, 200, cut):
            rows = feed["qkv"][:, start : start + cut]
            part = feed | {
                "qkv": rows,
                "past_key": keys,
                "past_value": values,
                "cached": np.array([start], np.int32),
                "parents": np.arange(-1, rows.shape[1] - 1),
            }
            out, keys, values = run.run(None, part)
            parts.append(out)
        assert np.array_equal(np.concatenate(parts, axis=1).view(np.uint32), whole.view(np.uint32)), cut


def test_in_place() -> None:
    """One buffer bound as past and present is written into, and nothing but the new slots."""
    shape = SHAPES[0]
    run = opened(shape)
    feed = inputs(shape, 30, [-1, 0, 0], 40)
    wanted = run.run(None, feed)
    binding = run.io_binding()
    out = np.empty_like(wanted[0])
    kept = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in feed.items()}
    for name, value in kept.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_ortvalue_output("key", kept["past_key"])
    binding.bind_ortvalue_output("value", kept["past_value"])
    held = ort.OrtValue.ortvalue_from_numpy(out)
    binding.bind_ortvalue_output("y", held)
    run.run_with_iobinding(binding)
    assert np.array_equal(out, wanted[0])
    for past, present in (("past_key", wanted[1]), ("past_value", wanted[2])):
        assert np.array_equal(feed[past][:, :, :33], present[:, :, :33])
        assert np.isnan(feed[past][:, :, 33:]).all()


@pytest.mark.parametrize("shape", (SHAPES[1], SHAPES[6], Shape(softcap=8.0)), ids=str)
def test_close_to_the_stock_operator(shape: Shape) -> None:
    """GroupQueryAttention on a chain, its sliding window and soft-cap meant alike."""
    stock = one_attention.open_stock(
        ort.SessionOptions(),
        num_heads=shape.heads,
        kv_num_heads=shape.kv_heads,
        local_window_size=shape.window,
        softcap=shape.softcap,
    )
    for cached, rows in ((60, 1), (60, 5)):
        feed = inputs(shape, cached, list(range(-1, rows - 1)), cached + rows)
        got = opened(shape).run(None, feed)
        past = {n: feed[n][:, :, :cached] for n in ("past_key", "past_value")}
        lengths = {"seqlens_k": np.array([cached + rows - 1], np.int32), "total": np.array(cached + rows, np.int32)}
        wanted = stock.run(None, {n: feed[n] for n in ("qkv", "cos", "sin")} | past | lengths)
        for one, other in zip(got, wanted, strict=True):
            assert np.abs(one - other).max() < 1e-5


@pytest.mark.parametrize("first", (1, 4, 11, 25))
@pytest.mark.parametrize("window", (-1, 20))
def test_a_tree_in_two_calls_has_the_bits_of_one(first: int, window: int) -> None:
    """Rows of the first call lie in their slots, uncommitted; the second names their parents before its own."""
    shape, parents, cached = Shape(window=window), random_parents(30, seed=first), 37
    session, feed = opened(shape), inputs(shape, cached, parents, cached + 30)
    whole = session.run(None, feed)
    begin = session.run(None, feed | {"qkv": feed["qkv"][:, :first], "parents": feed["parents"][:first]})
    kept = {"past_key": begin[1], "past_value": begin[2]}
    end = session.run(None, feed | kept | {"qkv": feed["qkv"][:, first:]})
    np.testing.assert_array_equal(np.concatenate([begin[0], end[0]], axis=1), whole[0])
    for one, other in zip(end[1:], whole[1:], strict=True):
        np.testing.assert_array_equal(one[:, :, : cached + 30], other[:, :, : cached + 30])


REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("parent is later", {"parents": np.array([-1, 1, 0])}, "must be an earlier row"),
    ("parent below -1", {"parents": np.array([-2, 0, 0])}, "must be an earlier row"),
    ("too few parents", {"parents": np.array([-1, 0])}, "parents is"),
    ("more nodes than slots", {"parents": np.arange(-1, 10)}, "do not fit the cache"),
    ("negative cache", {"cached": np.array([-1], np.int32)}, "do not fit the cache"),
    ("more cached than there are slots", {"cached": np.array([38], np.int32)}, "do not fit the cache"),
    ("two lengths", {"cached": np.array([1, 1], np.int32)}, "must be one number"),
    ("rows too narrow", {"qkv": np.zeros((1, 3, 600), np.float32)}, "queries, keys and values"),
    ("two sequences", {"qkv": np.zeros((2, 3, 640), np.float32)}, "queries, keys and values"),
    ("caches differ", {"past_value": np.zeros((1, 2, 39, 64), np.float32)}, "the caches are"),
    ("too few angles", {"cos": np.ones((31, 32), np.float32), "sin": np.ones((31, 32), np.float32)}, "is beyond the"),
    ("angles too wide", {"cos": np.ones((99, 33), np.float32), "sin": np.ones((99, 33), np.float32)}, "the angles"),
)


@pytest.mark.parametrize(("name", "changed", "match"), REFUSED, ids=[r[0] for r in REFUSED])
def test_inputs_that_do_not_fit_are_refused(name: str, changed: dict[str, Any], match: str) -> None:
    feed = inputs(Shape(), 30, [-1, 0, 0], 40)
    with pytest.raises(Exception, match=match):
        opened(Shape()).run(None, feed | changed)


@pytest.mark.parametrize(
    "changed",
    (
        {"num_heads": 0},
        {"num_heads": 5},
        {"kv_num_heads": -1},
        {"kv_num_heads": 1 << 40},
        {"window": 0},
        {"window": -2},
        {"scale": float("nan")},
        {"scale": -1.0},
        {"softcap": float("inf")},
    ),
    ids=str,
)
def test_attributes_that_do_not_fit_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(Exception, match="TreeAttention: "):
        opened(Shape(), **changed)
