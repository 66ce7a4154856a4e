"""Perplexity in a bench: of a toy, of the tiny model, and of other runtimes, which are played by small modules."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from numpy.typing import NDArray

from elsi_edge.cli import bench_show
from elsi_edge.errors import UsageError
from elsi_edge.packaged import builtin_bench_prompts
from elsi_edge.prompts import spread_over_categories
from elsi_edge.runtime.bench import html, peers
from elsi_edge.runtime.bench.peers import Peer, peer_report, score_report
from elsi_edge.runtime.bench.perplexity import Scores, agreement, perplexity_of, scores_of, target_scores, windows_of
from elsi_edge.runtime.options import SessionSettings
from elsi_edge.runtime.session import Session
from elsi_edge.runtime.toy import ToyTarget
from tests.cli_run import Run
from tests.test_bench import alphabet_session, row
from tests.test_bench_figures import full, schema, validate_part

V = 7
# A "model": logits of the next token from the last one. Both fakes below and the tests use it.
_MODEL = f"""
import json, os
V = int(os.environ.get("FAKE_VOCABULARY", {V}))

def logits(last):
    return [float((3 * last + 5 * token) % 11) for token in range(V)]
"""
_GENAI = """
import numpy as np

class Config:
    def __init__(self, path): pass
    def overlay(self, text): pass

Model = Tokenizer = lambda loaded: FakeTokenizer()

class FakeTokenizer:
    def decode(self, ids): return " ".join(map(str, ids))

class GeneratorParams:
    def __init__(self, model): pass
    def set_search_options(self, max_length, do_sample): self.max_length = max_length

class Generator:
    def __init__(self, model, parameters): self.ids, self.limit = [], parameters.max_length
    def append_tokens(self, ids):
        if 6 in ids: os._exit(9)
        self.ids += ids
    def get_output(self, name): return np.array([[logits(token) for token in self.ids]], np.float32)
    def generate_next_token(self): self.ids.append(1)
    def is_done(self): return len(self.ids) >= self.limit
    def get_sequence(self, place): return self.ids
"""
_LLAMA = """
import math
from types import SimpleNamespace

def CommonParams():
    return SimpleNamespace(
        model=SimpleNamespace(), cpuparams=SimpleNamespace(), cpuparams_batch=SimpleNamespace(), speculative=None
    )

class Server:
    def __init__(self, parameters): pass

    def handle_completions(self, request):
        ((forced, _),) = request["logit_bias"]
        row = logits(request["prompt"][-1])
        total = math.log(sum(map(math.exp, row)))
        order = sorted(range(V), key=lambda token: -row[token])[: request["n_probs"]]
        top = [{"id": token, "logprob": row[token] - total} for token in order]
        chosen = 0 if forced == "a" else forced
        # Token 5 is part of a character.
        content = {"content": [{"id": chosen, "logprob": row[chosen] - total, "top_logprobs": top}]}
        return json.dumps({"choices": [{"text": "", "logprobs": None if chosen == 5 else content}]})
"""


def logits(last: int) -> list[float]:
    return [float((3 * last + 5 * token) % 11) for token in range(V)]


def expected(ids: Sequence[int]) -> tuple[list[float], list[int]]:
    rows = [logits(last) for last in ids[:-1]]
    losses = [math.log(sum(map(math.exp, row))) - row[token] for row, token in zip(rows, ids[1:], strict=True)]
    return losses, [row.index(max(row)) for row in rows]


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runtimes as children find them; this process keeps what it has."""
    for module, distribution, text in (
        ("onnxruntime_genai", "onnxruntime_genai", _GENAI),
        ("xllamacpp", "xllamacpp", _LLAMA),
    ):
        (tmp_path / f"{module}.py").write_text(_MODEL + text)
        data = tmp_path / f"{distribution}-9.9.dist-info"
        data.mkdir()
        (data / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 9.9\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_scores_are_of_the_next_token_and_stay_finite() -> None:
    rows = np.array([[1.0, 3.0, 2.0], [1e4, 0.0, -1e4]], np.float32)
    found = scores_of(rows, [2, 2])
    assert found.losses[0] == pytest.approx(math.log(math.e + math.e**3 + math.e**2) - 2.0)
    assert found.losses[1] == pytest.approx(2e4) and found.likeliest.tolist() == [1, 0]
    assert perplexity_of(Scores(losses=np.array([1.0, 3.0]), likeliest=np.zeros(2, np.int64))) == pytest.approx(
        math.e**2
    )
    other = Scores(losses=found.losses, likeliest=np.array([1, 2]))
    assert agreement(found, other) == 0.5
    with pytest.raises(ValueError, match="token 3 is beyond its vocabulary of 3"):
        scores_of(rows, [0, 3])


def test_a_target_is_scored_alike_in_blocks_of_any_size() -> None:
    def of(last: tuple[int, ...]) -> NDArray[np.float32]:
        return np.array(logits(sum(last) % V), np.float32)

    target, windows = ToyTarget(of, vocab_size=V), [[1, 5, 2, 0, 3], [4, 4]]
    whole = target_scores(target, windows)
    assert len(whole.losses) == 5 and target.length == 0
    for rows in (1, 2, 4):
        part = target_scores(target, windows, rows=rows)
        assert np.array_equal(part.losses, whole.losses) and np.array_equal(part.likeliest, whole.likeliest)
    # The third token follows 1 and 5: their sum is 6.
    assert whole.losses[1] == pytest.approx(expected([6, 2])[0][0])


def test_windows_are_the_turns_cut_and_one_token_is_none() -> None:
    session = alphabet_session(None, context=64)
    assert windows_of([row("1", "abc", "z"), row("2", "bcdef")], session, window=4) == [[0, 1, 2], [1, 2, 3, 4]]
    with pytest.raises(UsageError, match="2 tokens or more, the 1 given have fewer"):
        windows_of([row("1", "a")], session)


@pytest.mark.parametrize("name", ["onnxruntime-genai", "llama.cpp"])
def test_a_peer_scores_the_windows_it_is_given(fakes: Path, name: str) -> None:
    windows = [[0, 3, 5, 2], [4, 1]]  # 5 is a part of a character to the one, which holds it back
    with Peer(name, "m", threads=1, context=64) as peer:
        found = peer.score(windows)
    assert isinstance(found, Scores), found
    wanted = [expected(ids) for ids in windows]
    assert found.losses == pytest.approx([loss for losses, _ in wanted for loss in losses], abs=1e-5)
    assert found.likeliest.tolist() == [token for _, tokens in wanted for token in tokens]


def test_a_peer_that_cannot_says_why_and_goes_on(fakes: Path) -> None:
    with Peer("onnxruntime-genai", "m", threads=1, context=64) as peer:
        found = peer.score([[0, 1], [1, 99]])
        assert found == "token 99 is beyond its vocabulary of 7: another tokenizer?"
        assert peer.answer([1, 2], 3).tokens == 3
        # Token 6 ends its process.
        found = peer.score([[6, 1]])
        assert isinstance(found, str) and found.startswith("onnxruntime-genai ended with exit code 9")
    report = score_report(found, None)
    validate_part(report, "#/$defs/peer/properties/perplexity")
    assert report is not None and report["perplexity"] is None and report["not_measured"] == found
    with pytest.raises(jsonschema.ValidationError):
        validate_part({"perplexity": 3.0}, "#/$defs/peer/properties/perplexity")


def test_a_bench_has_it_for_the_bundle_and_every_runtime(
    run: Run, tiny_bundle: Callable[..., Path], fakes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tiny_bundle("int8")
    monkeypatch.setenv("FAKE_VOCABULARY", "10000")
    monkeypatch.setattr(peers, "require_peers", lambda names: None)
    done = run(
        "bench", bundle, "--limit", 1, "--max-tokens", 3, "--perplexity", "--out", fakes / "a.json",
        *("--against", "onnxruntime-genai", "--peer-model", f"onnxruntime-genai={fakes}"),
    )  # fmt: skip
    assert done.code == 0, done.err
    report = json.loads((fakes / "a.json").read_text())
    jsonschema.validate(report, schema())
    session = Session.open(bundle, SessionSettings())
    windows = windows_of(spread_over_categories(builtin_bench_prompts(), 1), session)
    direct = target_scores(session.engine(exact=True).target, windows)
    own, (peer,) = report["perplexity"], report["against"]
    assert own["perplexity"] == pytest.approx(perplexity_of(direct))
    assert (own["windows"], own["tokens"]) == (len(windows), len(direct.losses))
    assert peer["answers"] == 1 and peer["perplexity"]["not_measured"] is None
    assert f"perplexity: {own['perplexity']:.2f} on {len(windows)} texts, {own['tokens']} tokens predicted" in done.out
    assert f"perplexity of onnxruntime-genai: {peer['perplexity']['perplexity']:.2f}, its likeliest" in done.out


def test_page_and_words_of_runtimes_with_and_without_it() -> None:
    own = {"perplexity": 21.5, "windows": 2, "tokens": 9, "window_tokens": 256}
    peer = object.__new__(Peer)
    peer.name, peer.version, peer.flags, peer.model, peer.answers, peer.scores = "n", "v", "f", "m", {}, "no <logits>"
    one = peer_report(peer, [])
    peer.scores = Scores(losses=np.ones(2), likeliest=np.array([1, 2]))
    two = peer_report(peer, [], Scores(losses=np.ones(2), likeliest=np.array([1, 3])))
    report = {**full(), "perplexity": own, "against": [one, two]}
    jsonschema.validate(report, schema())
    page = html.render(report)
    assert "not measured: no &lt;logits&gt;" in page and "<td>2.72</td><td>0.500</td>" in page
    assert "Perplexity of this bundle: 21.50, on 2 texts" in page
    assert "not measured" not in html.render({**report, "perplexity": None})
    assert bench_show.perplexity_words(one["perplexity"]) == "not measured (no <logits>)"
    assert bench_show.perplexity_words(two["perplexity"]).startswith("2.72, its likeliest token ours in 50.0 %")


def test_a_bench_needs_texts_to_predict(run: Run, tiny_bundle: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a\n")
    done = run("bench", tiny_bundle("int8"), "--prompts", tmp_path / "p.txt", "--perplexity")
    assert done.code == 2 and "--perplexity needs a prompt of 2 tokens or more" in done.err
    assert done.err.count("\n") == 1
