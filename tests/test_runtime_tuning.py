"""The tuning file: what is read and what is ignored, what it decides, and a whole run of the tuner on a tiny bundle."""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elsi_edge.artifacts import PromptRow
from elsi_edge.bundle import read_manifest
from elsi_edge.errors import BundleError, ConfigError, UsageError
from elsi_edge.machine import Cores, cores
from elsi_edge.packaged import builtin_bench_prompts
from elsi_edge.runtime import native_ops, one_node
from elsi_edge.runtime import tuning as tuning_module
from elsi_edge.runtime.measure import SPARSE_ROWS, exact_rows, exact_tree_rows, middle_mean
from elsi_edge.runtime.ngram import PRIOR
from elsi_edge.runtime.options import GenerateOptions, SessionSettings
from elsi_edge.runtime.pace import Clock, FixedPace, LivePace, Pace
from elsi_edge.runtime.policy import DEFAULT_DRAFT_NODES, DEFAULT_NATIVE_NODES, EXACT_TREE_NODES, decide
from elsi_edge.runtime.recorded import Recorded, RecordedTarget, record
from elsi_edge.runtime.session import Session
from elsi_edge.runtime.solve import Shape, Solver, candidate_shapes, choose_shape
from elsi_edge.runtime.tree import Tree
from elsi_edge.runtime.tuner import Tuned, Tuner, TuneSettings
from elsi_edge.runtime.tuning import Choice, ContextCurve, Machine, Tuning, find_tuning, save_tuning, tuning_path
from tests.cli_run import Run
from tests.test_runtime_mixed import ToyDraft
from tests.toy_proposers import V, toy_target

MakeBundle = Callable[..., Path]
NATIVE = native_ops.report().available
needs_library = pytest.mark.skipif(not NATIVE, reason="the native operators were not built")
UNTUNED_NODES = DEFAULT_NATIVE_NODES if NATIVE else DEFAULT_DRAFT_NODES["int4"]
ONE_THREAD = SessionSettings(threads=1)


def tuning_for(bundle: Path, **changes: Any) -> Tuning:
    from elsi_edge.runtime.tuning import bundle_sha256

    values: dict[str, Any] = {
        "bundle_sha256": bundle_sha256(bundle),
        "model": "tiny",
        "precision": "int4",
        "machine": Machine.here(ONE_THREAD, read_manifest(bundle).graphs),
        "past": 32,
        "verify_ms": {"1": 10.0, "2": 12.0, "3": 14.0, "4": 16.0},
        "interpolated": (3,),
        "contexts": (ContextCurve(past=64, verify_ms={"1": 11.0, "2": 13.0, "3": 15.0, "4": 17.0}),),
        "draft_entry_ms": 1.0,
        "draft_level_ms": 0.5,
        "overhead_ms": 0.2,
        "exact_rows": 16,
        "exact_rows_tested": tuple(range(1, 17)),
        "copy_gb_per_s": 10.0,
        "matrix_gflop_per_s": 100.0,
        "ngram_prior": PRIOR,
        "acceptance": {},
        "shapes": (),
        "choice": Choice(
            mode="chain", draft_nodes=3, proposals=("ngram",), tokens_per_s=120.0, plain_tokens_per_s=100.0, why="so"
        ),
        "seconds": 50.0,
    }
    return Tuning(**{**values, **changes})


@pytest.fixture
def bundle(tiny_bundle: MakeBundle, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle("int4"), tmp_path / "b"))


# --- the file ------------------------------------------------------------------------------------------------------


def test_a_tuning_lies_beside_the_bundle_and_comes_back_whole(bundle: Path) -> None:
    before = {path: path.read_bytes() for path in bundle.rglob("*") if path.is_file()}
    tuning = tuning_for(bundle)
    path = save_tuning(bundle, tuning)
    assert path == tuning_path(bundle, 1) and path.parent == bundle.parent and path.name.startswith("b.tuning.")
    assert {path: path.read_bytes() for path in bundle.rglob("*") if path.is_file()} == before
    assert find_tuning(bundle, ONE_THREAD) == (tuning, "")
    value = json.loads(path.read_text())
    assert value["verify_ms"]["2"] == 12.0 and value["contexts"][0]["past"] == 64
    assert value["contexts"][0]["verify_ms"]["4"] == 17.0
    assert value["draft_level_ms"] == 0.5 and value["exact_rows"] == 16 and value["choice"]["mode"] == "chain"
    costs = tuning.costs()
    assert costs.rows(2, 48) == 12.5 and (costs.entry, costs.level) == (1.0, 0.5)


def test_every_number_of_threads_has_a_file_of_its_own(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning_module, "cores", lambda: Cores(affinity=2, quota=None, usable=2))
    machine = Machine.here(ONE_THREAD, read_manifest(bundle).graphs)
    both = tuning_for(bundle, machine=replace(machine, threads=2), seconds=2.0)
    assert save_tuning(bundle, both) == tuning_path(bundle) == tuning_path(bundle, 2) == bundle.parent / "b.tuning.json"
    found, warning = find_tuning(bundle, ONE_THREAD)
    assert found is None and "measured with threads 2, here 1" in warning and warning.endswith("--threads 1")
    one = tuning_for(bundle, machine=machine)
    assert save_tuning(bundle, one) == bundle.parent / "b.tuning.threads-1.json"
    assert find_tuning(bundle, ONE_THREAD) == (one, "")
    assert find_tuning(bundle, SessionSettings(threads=2)) == (both, "")
    assert find_tuning(bundle, SessionSettings()) == (both, "")


def test_no_file_is_no_warning(bundle: Path) -> None:
    assert find_tuning(bundle, ONE_THREAD) == (None, "")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bundle_sha256": "0" * 64}, "another bundle"),
        ({"machine": replace(Machine.here(ONE_THREAD), cpu="Other CPU")}, "measured with cpu Other CPU"),
        ({"machine": replace(Machine.here(ONE_THREAD), features=("avx",))}, "measured with features avx, here"),
        ({"machine": replace(Machine.here(ONE_THREAD), onnxruntime="1.0")}, "measured with onnxruntime 1.0"),
        ({"machine": replace(Machine.here(ONE_THREAD), native="other")}, "measured with native operators other, here "),
    ],
)
def test_a_tuning_of_elsewhere_is_ignored_with_one_warning(
    bundle: Path, run: Run, changes: dict[str, Any], words: str
) -> None:
    save_tuning(bundle, tuning_for(bundle, **changes))
    found, warning = find_tuning(bundle, ONE_THREAD)
    assert found is None and words in warning and warning.endswith(f"elsi-edge tune {bundle} --threads 1")
    session = Session.open(bundle, ONE_THREAD)
    assert session.tuning is None and session.warnings == (warning,)
    result = session.generate("Marn", GenerateOptions(max_tokens=4))
    assert result.warnings == (warning,) and not result.tuned and result.draft_nodes == UNTUNED_NODES
    assert Session.open(bundle, replace(ONE_THREAD, tuning=False)).warnings == ()
    shown = run("generate", bundle, "Marn", "--max-tokens", 4, "--threads", 1)
    assert shown.code == 0 and shown.err.count(f"warning: {warning}") == 1
    shown = run("chat", bundle, "--max-tokens", 4, "--threads", 1, stdin=b"Marn\nMarn\n")
    assert shown.code == 0 and shown.err.count("warning: ignored") == 1


@pytest.mark.parametrize(
    "edit",
    [
        lambda v: v.clear(),
        lambda v: v.update(format="x"),
        lambda v: v.update(format_version=99),
        lambda v: v.pop("choice"),
        lambda v: v["choice"].update(mode="bush"),
        lambda v: v["choice"].update(draft_nodes=-4),
        lambda v: v["choice"].update(tokens_per_s=0.0),
        lambda v: v.update(verify_ms={}),
        lambda v: v.update(verify_ms={"1": -1.0}),
        lambda v: v.update(verify_ms={"1": 1.0, "3": 2.0}),
        lambda v: v.update(contexts=[{"past": 4}]),
        lambda v: v.update(exact_rows="many"),
        lambda v: v.update(ngram_prior=[0.5]),
    ],
)
def test_a_broken_tuning_is_ignored_with_one_warning(bundle: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    path = save_tuning(bundle, tuning_for(bundle))
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))
    found, warning = find_tuning(bundle, ONE_THREAD)
    assert found is None and warning.startswith(f"ignored {path}") and "\n" not in warning
    path.write_text("{")
    assert find_tuning(bundle, ONE_THREAD)[0] is None


# --- what it decides -----------------------------------------------------------------------------------------------


def test_the_policy(bundle: Path) -> None:
    tuning = tuning_for(bundle)
    sources = ("draft", "ngram")

    def policy(tuned: Tuning | None, precision: str = "int4", **options: Any) -> tuple[Any, ...]:
        found = decide(GenerateOptions(**options), precision=precision, sources=sources, tuning=tuned)  # type: ignore[arg-type]
        return found.mode, found.budget, found.proposals

    both = sources
    assert policy(None) == ("chain", 4, both)
    assert policy(None, "fp32") == ("tree", 8, both)
    assert policy(tuning) == ("chain", 3, ("ngram",))
    assert policy(tuning, proposals=("draft",)) == ("chain", 3, ("draft",))
    assert policy(tuning, draft_nodes=2) == ("chain", 2, both)
    assert policy(tuning, plain=True) == policy(tuning, draft_nodes=0) == ("plain", 0, ())
    assert policy(tuning, exact=False)[0] == "tree"
    # A device whose kernels are exact for three rows alone.
    three = replace(tuning, exact_rows=3)
    assert policy(three) == ("chain", 2, ("ngram",))
    assert policy(three, draft_nodes=2) == ("chain", 2, both)
    with pytest.raises(UsageError, match=r"holds chains of at most 2: .* 1 to 3 rows only, on this device"):
        policy(three, draft_nodes=3)
    assert policy(replace(tuning, exact_rows=1)) == ("plain", 0, ())
    chosen = replace(tuning, choice=replace(tuning.choice, mode="plain", draft_nodes=0, proposals=()))
    assert policy(chosen) == ("plain", 0, ())
    assert policy(chosen, draft_nodes=1) == ("chain", 1, both)
    at_fp32 = replace(tuning, precision="fp32", choice=replace(tuning.choice, mode="tree", draft_nodes=16))
    assert policy(at_fp32, "fp32") == ("tree", 16, ("ngram",))
    assert policy(at_fp32, "fp32", shape="chain") == ("chain", 16, ("ngram",))
    with pytest.raises(BundleError, match="--proposals is draft"):
        decide(GenerateOptions(proposals=("draft",)), precision="int4", sources=("ngram",), tuning=None)
    with pytest.raises(ConfigError, match="--proposals is '', it must name draft or ngram"):
        GenerateOptions(proposals=())


def test_the_policy_where_trees_are_exact(bundle: Path) -> None:
    """The native operators: trees where they are asked for or chosen, up to what the device was tested for."""
    tuning = tuning_for(bundle, exact_rows=32, exact_rows_tested=(1, 2, 32))
    tuning = replace(tuning, choice=replace(tuning.choice, mode="tree", draft_nodes=16, proposals=("draft", "ngram")))

    def policy(tuned: Tuning | None, precision: str = "int4", **options: Any) -> tuple[Any, ...]:
        found = decide(
            GenerateOptions(**options),
            precision=precision,  # type: ignore[arg-type]
            sources=("draft", "ngram"),
            tuning=tuned,
            exact_trees=True,
        )
        return found.mode, found.budget

    assert policy(None) == policy(None, "int8") == ("chain", DEFAULT_NATIVE_NODES)
    assert policy(None, shape="tree") == ("tree", DEFAULT_NATIVE_NODES)
    assert policy(None, draft_nodes=EXACT_TREE_NODES) == ("tree", EXACT_TREE_NODES)
    assert policy(tuning) == ("tree", 16) and policy(tuning, shape="chain") == ("chain", 16)
    assert policy(tuning, draft_nodes=31) == ("tree", 31)
    with pytest.raises(
        UsageError, match=r"holds trees of at most 31: 'elsi-edge tune' tested 1 to 32 rows .* --seconds"
    ):
        policy(tuning, draft_nodes=32)
    failed = replace(tuning, exact_rows_tested=(1, 2, 32, 48))
    with pytest.raises(UsageError, match=r"holds trees of at most 31: .* 1 to 32 rows only, on this device"):
        policy(failed, draft_nodes=32)
    assert policy(tuning, draft_nodes=32, exact=False) == ("tree", 32)
    assert policy(replace(tuning, exact_rows=6)) == ("tree", 5)
    assert policy(replace(tuning, exact_rows=1)) == ("plain", 0)
    chain = replace(tuning, choice=replace(tuning.choice, mode="chain", draft_nodes=4))
    assert policy(chain) == ("chain", 4)
    found = decide(GenerateOptions(seed=1), precision="int4", sources=("ngram",), tuning=None, exact_trees=True)
    stock = replace(found, native=False)
    prices = [one.pace(GenerateOptions(seed=1), "int4", Clock()).price(256) for one in (found, stock)]
    assert prices[0] is not None and prices[1] is not None and prices[0].node(1) < 0.2 * prices[1].node(1)


@needs_library
def test_a_tuning_without_the_library_is_not_for_a_session_with_it(bundle: Path) -> None:
    without = replace(ONE_THREAD, native=False)
    there, here = (Machine.here(one, read_manifest(bundle).graphs) for one in (without, ONE_THREAD))
    assert not there.is_native and here.is_native
    save_tuning(bundle, tuning_for(bundle, machine=there))
    assert find_tuning(bundle, without)[1] == ""
    found, warning = find_tuning(bundle, ONE_THREAD)
    assert found is None and f"measured with native operators none, here {here.native};" in warning
    save_tuning(bundle, tuning_for(bundle))
    assert find_tuning(bundle, ONE_THREAD)[1] == ""
    assert f"native operators {here.native}, here none" in find_tuning(bundle, without)[1]


def test_a_tuning_from_before_the_native_operators_is_one_without_them(bundle: Path) -> None:
    path = save_tuning(bundle, tuning_for(bundle, machine=Machine.here(ONE_THREAD)))
    value = json.loads(path.read_text())
    del value["machine"]["native"]
    path.write_text(json.dumps(value))
    assert find_tuning(bundle, replace(ONE_THREAD, native=False))[0] is not None


def test_with_a_seed_prices_do_not_follow_the_clock(bundle: Path) -> None:
    tuning = tuning_for(bundle)
    for options, kind in (
        (GenerateOptions(), LivePace),
        (GenerateOptions(seed=3), FixedPace),
        (GenerateOptions(draft_nodes=2), Pace),
        (GenerateOptions(plain=True), Pace),
    ):
        policy = decide(options, precision="int4", sources=("draft", "ngram"), tuning=tuning)
        assert type(policy.pace(options, "int4", Clock())) is kind


def test_a_session_uses_its_tuning(bundle: Path) -> None:
    save_tuning(bundle, tuning_for(bundle))
    session = Session.open(bundle, ONE_THREAD)
    prompt = "Marn keeps a small ferry. " * 4
    result = session.generate(prompt, GenerateOptions(max_tokens=40, seed=1))
    assert result.tuned and result.draft_nodes == 3 and set(result.by_source) <= {"ngram"}
    plain = session.generate(prompt, GenerateOptions(max_tokens=40, plain=True))
    assert result.token_ids == plain.token_ids and not plain.tuned


# --- measuring -----------------------------------------------------------------------------------------------------


def test_middle_mean() -> None:
    assert middle_mean([5.0]) == 5.0
    assert middle_mean([1.0, 2.0, 3.0, 1000.0]) == 2.5


def test_exact_rows_end_where_a_row_differs() -> None:
    class Off(type(toy_target(0))):  # type: ignore[misc]
        """Differs in the last bit when five rows run together."""

        def verify(self, root: int, tree: Tree, *, greedy: bool = False) -> Any:
            step = super().verify(root, tree, greedy=greedy)
            return replace(step, logits=step.logits + np.float32(1e-6)) if tree.size >= 4 else step

    target = Off(lambda last: np.full(V, 1.0 / (1 + sum(last)), np.float32), vocab_size=V)
    tokens = [1, 2, 3, 4, 5, 6] * 20
    far = time.perf_counter() + 60
    assert exact_rows(target, tokens, 8, bits=True, until=far) == (4, (1, 2, 3, 4, 5))
    assert exact_rows(target, tokens, 8, bits=False, until=far)[0] == 16
    assert exact_rows(toy_target(0), tokens, 8, bits=True, until=far)[0] == 16
    assert exact_rows(toy_target(0), tokens, 8, bits=True, until=0.0) == (1, (1,))  # no time: nothing is claimed


def test_exact_tree_rows_end_where_a_rows_company_shows() -> None:
    class Off(type(toy_target(0))):  # type: ignore[misc]
        """The last of more than eight rows differs in the last bit."""

        def verify(self, root: int, tree: Tree, *, greedy: bool = False) -> Any:
            step = super().verify(root, tree, greedy=greedy)
            if tree.size > 8:
                step.logits[-1] += np.float32(1e-6)
            return step

    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11] * 20
    far = time.perf_counter() + 60
    off = Off(lambda last: np.full(V, 1.0 / (1 + sum(last)), np.float32), vocab_size=V)
    assert exact_tree_rows(off, tokens, 8, most=64, until=far) == (8, (1, 2, 3, 4, 5, 6, 8, 12))
    sound = toy_target(0)
    assert exact_tree_rows(sound, tokens, 8, most=32, until=far) == (32, (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32))
    assert sound.length == 8
    assert exact_tree_rows(sound, tokens, 8, most=32, until=0.0) == (1, (1,))


def recorded(prompt: list[int], limit: int = 30) -> Recorded:
    return record(toy_target(0), prompt, limit=limit, context=200, eos_ids=frozenset())


def test_a_recorded_answer_plays_as_the_target_would() -> None:
    one = recorded([1, 2, 3])
    assert len(one.token_ids) == 30 and one.seconds >= one.target_seconds > 0.0
    rows = [*one.prompt_ids, *one.token_ids[:-1]]
    assert one.taps[:, 0].astype(int).tolist() == rows  # the toy's tap is its token
    target = RecordedTarget(one)
    assert target.prefill(one.prompt_ids).taps[:, 0].tolist() == rows[:3]
    step = target.verify(rows[3], Tree.chain(rows[4:7]))
    assert step.taps[:, 0].tolist() == rows[3:7]
    target.commit([0, 1])
    assert target.length == 5
    target.keep(0)
    assert target.length == 0


def solver(**changes: Any) -> Solver:
    from elsi_edge.runtime.price import typical

    values: dict[str, Any] = {
        "answers": [recorded([1, 2, 3]), recorded([5, 6])],
        "draft": ToyDraft(skill=0.9),
        "costs": typical("fp32"),
        "overhead_ms": 0.0,
        "ngram_prior": PRIOR,
        "context": 200,
    }
    return Solver(**{**values, **changes})


def test_a_prediction_is_the_loops_own_count_times_the_curve() -> None:
    from elsi_edge.runtime.decode import Plan, rounds
    from elsi_edge.runtime.mixed import MixedProposer

    one = solver(answers=[recorded([1, 2, 3])])
    outcome = one.outcome(Shape(chain=True, nodes=2, proposals=("draft", "ngram"), priced=False), 1.0)
    plan = Plan(budget=2, chain=True, limit=30, context=200)
    loop = list(
        rounds(
            toy_target(0), MixedProposer(ToyDraft(skill=0.9)), [1, 2, 3], plan, lambda row, index: int(np.argmax(row))
        )
    )[1:]
    assert outcome.tau == pytest.approx(29 / len(loop))
    verify = sum(one.costs.rows(r.drafted + 1, 100) for r in loop) / len(loop)
    assert outcome.ms_verify == pytest.approx(verify)
    assert one.plain_ms() == pytest.approx(1.0)
    per_round = outcome.ms_verify + outcome.ms_draft + outcome.ms_overhead
    assert outcome.tokens_per_s == pytest.approx(1e3 * outcome.tau / per_round)
    assert outcome.speedup == pytest.approx(outcome.tau / per_round)


def test_of_shapes_that_are_as_good_the_largest_budget_is_chosen() -> None:
    one = solver()
    shapes = [Shape(chain=True, nodes=nodes, proposals=("ngram",), priced=True) for nodes in (4, 15)]
    small, large = (replace(one.outcome(shape, 1.2), speedup=1.4) for shape in shapes)
    for speed, nodes in ((99.0, 15), (97.0, 4), (101.0, 15)):
        outcomes = [replace(small, tokens_per_s=100.0), replace(large, tokens_per_s=speed)]
        assert choose_shape(outcomes, one.plain_ms(), one.costs).draft_nodes == nodes


def test_the_choice_follows_the_curve() -> None:
    unit = solver().costs  # relative to one row; here it takes 50 ms, beside which Python is nothing
    slow = replace(
        unit, verify=(tuple(50 * ms for ms in unit.verify[0]),), entry=50 * unit.entry, level=50 * unit.level
    )
    flat = solver(costs=slow)
    shapes = candidate_shapes("fp32", 16, has_draft=True)
    outcomes = [flat.outcome(shape, 1.2) for shape in shapes if shape.priced]
    choice = choose_shape(outcomes, flat.plain_ms(), flat.costs)
    assert choice.mode == "tree" and choice.speedup > 1.1 and "1.12 times one" in choice.why
    steep = solver(costs=replace(flat.costs, verify=(tuple(float(n) for n in range(1, 40)),), entry=2.0, level=2.0))
    outcomes = [steep.outcome(shape, 1.0) for shape in candidate_shapes("int4", 16, has_draft=True) if shape.priced]
    choice = choose_shape(outcomes, steep.plain_ms(), steep.costs)
    assert choice.mode == "plain" and choice.draft_nodes == 0 and "would bring only" in choice.why
    assert choose_shape([], 10.0, flat.costs).mode == "plain"
    assert all(shape.nodes <= 2 for shape in candidate_shapes("int4", 3, has_draft=False))
    assert candidate_shapes("int8", 1, has_draft=True) == []
    native = candidate_shapes("int8", 9, has_draft=True, exact_trees=True)
    assert {shape.chain for shape in native} == {True, False} and max(shape.nodes for shape in native) == 8
    assert all(shape.chain for shape in candidate_shapes("int8", 9, has_draft=True))


def test_the_choice_says_what_may_surprise() -> None:
    unit = solver().costs
    one = solver(costs=replace(unit, verify=(tuple(50 * ms for ms in unit.verify[0]),), entry=1e3, level=1e3))
    priced = one.outcome(Shape(chain=True, nodes=4, proposals=("draft", "ngram"), priced=True), 1.2)
    assert not {"draft", "both"} & {name for name, counts in priced.tally.by_source().items() if counts.drafted}
    fixed = replace(priced, shape=replace(priced.shape, nodes=2, priced=False), tokens_per_s=2 * priced.tokens_per_s)
    best = replace(priced, speedup=1.5)
    why = choose_shape([fixed, best], one.plain_ms(), one.costs).why
    assert "chain of 2, draft and ngram was faster on this sample" in why and "always takes as many nodes" in why
    assert "the draft's calls cost too much here" in why and "more than 12% of the time" in why
    noisy = replace(one.costs, verify=((10.0, 9.0, *one.costs.verify[0][2:]),))
    why = choose_shape([best], one.plain_ms(), noisy).why
    assert "0.90 times one, so a second row costs nothing here" in why and "faster on this sample" not in why


def test_a_chains_level_has_a_cost_of_its_own() -> None:
    one = solver(answers=[recorded([1, 2, 3])], chain_level_ms=0.0)
    chain, tree = (Shape(chain=chain, nodes=4, proposals=("draft",), priced=False) for chain in (True, False))
    assert one.costs_of(chain).level == 0.0 and one.costs_of(tree) is one.costs
    dear = replace(one, chain_level_ms=5.0)
    assert dear.outcome(chain, 1.0).ms_draft > one.outcome(chain, 1.0).ms_draft
    assert dear.outcome(tree, 1.0).ms_draft == one.outcome(tree, 1.0).ms_draft


# --- kernels -------------------------------------------------------------------------------------------------------


def test_the_kernels_here_are_sound_and_a_broken_one_is_named(monkeypatch: pytest.MonkeyPatch, bundle: Path) -> None:
    one_node.require_sound_kernel(4)
    one_node.require_sound_kernel(8)
    session, size = one_node.matrix_session(64, 32, bits=32, threads=1)
    assert size == 64 * 32 * 4
    assert session.run(None, {"x": np.ones((3, 64), np.float32)})[0].shape == (3, 32)

    class Broken:
        def run(self, names: None, given: dict[str, np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
            rows = len(given["x"])
            return [np.full((rows, 4), 1.0 if rows > 1 else 1.02)]

    monkeypatch.setattr(one_node, "matrix_session", lambda *given, **named: (Broken(), 0))
    with pytest.raises(BundleError, match=r"int4 kernel \(MatMulNBits\) .* one row and four rows differ by 2.0%"):
        Session.open(bundle, replace(ONE_THREAD, native=False)).generate("Marn", GenerateOptions(max_tokens=2))


# --- the tuner -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tuned(tiny_bundle: MakeBundle) -> Tuned:
    session = Session.open(tiny_bundle("int4"), replace(ONE_THREAD, tuning=False))
    rows = [PromptRow(id="a", turns=("Marn keeps a small ferry on the river.",)), *builtin_bench_prompts()]
    parts: list[tuple[str, float]] = []
    done = Tuner(session, tiny_bundle("int4"), rows, TuneSettings(seconds=5), lambda *p: parts.append(p)).run()
    assert [part for part, _ in parts] == ["device", "answers", "curve", "draft", "exact", "shapes", "done"]
    assert [share for _, share in parts] == sorted(share for _, share in parts)
    return done


def test_a_run_of_the_tuner(tuned: Tuned) -> None:
    tuning = tuned.tuning
    assert list(tuning.verify_ms) == [str(row) for row in range(1, 65)]
    assert 5 not in tuning.interpolated and 7 in tuning.interpolated
    assert len(tuning.contexts) == 1 and tuning.contexts[0].past > tuning.past
    if NATIVE:
        assert tuning.exact_rows == 64 and tuning.exact_rows_tested == (1, *(row for row in SPARSE_ROWS if row > 1))
    else:
        assert tuning.exact_rows == 16 and tuning.exact_rows_tested == tuple(range(1, 17))
    assert tuning.machine.is_native == NATIVE
    assert tuning.draft_level_ms and tuning.draft_entry_ms
    assert tuning.copy_gb_per_s > 0.1 and tuning.matrix_gflop_per_s > 0.1
    assert len(tuning.acceptance["draft_by_rank"]) == 8
    assert {shape["mode"] for shape in tuning.shapes} >= ({"tree"} if NATIVE else {"chain"})
    assert tuning.choice.why and tuning.machine.threads == 1
    speeds = [outcome.tokens_per_s for outcome in tuned.outcomes]
    assert speeds == sorted(speeds, reverse=True)


def test_tune_writes_beside_the_bundle_and_generate_uses_it(run: Run, bundle: Path) -> None:
    done = run("tune", bundle, "--seconds", 5, "--threads", 1)
    assert done.code == 0 and "Choice: " in done.out and "Why: " in done.out and "verifying n rows" in done.out
    assert f"Tuning: {tuning_path(bundle, 1)}" in done.out and "Next: elsi-edge bench" in done.err
    assert tuning_path(bundle, 1).with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    made = run("generate", bundle, "Marn", "--max-tokens", 6, "--threads", 1, "--json")
    assert made.code == 0 and made.json["tuned"] and made.json["warnings"] == []
    other = run("generate", bundle, "Marn", "--max-tokens", 6, "--threads", 2, "--json")
    assert other.code == 0 and not other.json["tuned"]
    again = run("tune", bundle, "--seconds", 5, "--threads", 1, "--json")
    assert again.code == 0 and again.json["choice"]["mode"] in ("plain", "chain", "tree")
    assert again.json["tuning"] == str(tuning_path(bundle, 1))


def test_tune_without_matplotlib_draws_no_picture(run: Run, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else find(name, *a))
    assert run("tune", bundle, "--seconds", 5, "--threads", 1, "--json").json["picture"] is None
    assert not tuning_path(bundle, 1).with_suffix(".png").exists()


def test_an_interrupted_tune_leaves_the_file_as_it_was(run: Run, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_tuning(bundle, tuning_for(bundle))
    before = path.read_bytes()

    def interrupted(*given: Any, **named: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("elsi_edge.runtime.tuner.time_verify", interrupted)
    assert run("tune", bundle, "--seconds", 5, "--threads", 1).code == 130
    assert path.read_bytes() == before and [p.name for p in bundle.parent.glob(".elsi*")] == []


def test_tune_refuses_what_cannot_work(run: Run, bundle: Path) -> None:
    for seconds in ("0", "nan", "1e9"):
        done = run("tune", bundle, "--seconds", seconds)
        assert done.code == 2 and "--seconds is" in done.err
    done = run("tune", bundle, "--provider", "cuda")
    assert done.code == 1 and "CPUExecutionProvider" in done.err
    assert cores().usable >= 1
