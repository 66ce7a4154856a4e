"""What several test files share: a tiny random Llama with a random draft, their bundles, and the command line."""

import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from elsi_edge import cli
from elsi_edge.artifacts import DraftConfig, LayerSelection, Precision
from tests.cli_run import Done, Run
from tests.tiny_text import CONFIG, build_tokenizer, llama_weights, write_file, write_text_files

CONTEXT = 256  # tokens
DRAFT_VOCAB = 128


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """A model directory and a draft directory that fit together."""

    model: Path
    draft: Path
    selection: LayerSelection
    bundles: dict[str, Path] = field(default_factory=dict)  # made so far


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Two blocks, width 64, random weights scaled so that greedy answers vary; a random draft on tap 1."""
    from elsi_edge.models import resolve
    from elsi_edge.text import TextCodec

    place = tmp_path_factory.mktemp("tiny")
    model = place / "tiny-llama"
    write_text_files(
        model,
        build_tokenizer(),
        tokenizer_config={"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"},
        generation_config={"temperature": 0.7, "eos_token_id": [2, 5]},
    )
    (model / "config.json").write_text(json.dumps(CONFIG))
    write_file(model / "model.safetensors", {name: _tame(name, w) for name, w in llama_weights(seed=3).items()})
    source, codec = resolve(str(model)), TextCodec.from_model_dir(model)
    selection = LayerSelection(
        taps=(1,),
        method="elsi",
        entropy=(1.0, 3.0, 2.0),
        joint_entropy=3.0,
        blocks=2,
        width=64,
        target_fingerprint=source.fingerprint,
        model=str(model),
    )
    config = DraftConfig(
        selection=selection,
        width=64,
        heads=4,
        kv_heads=2,
        head_width=16,
        mlp_width=96,
        draft_vocab_size=DRAFT_VOCAB,
        target_vocab_size=source.shape.vocab_size,
        context=CONTEXT,
        rope_theta=source.shape.rope_theta,
        norm_eps=source.shape.norm_eps,
        target_fingerprint=source.fingerprint,
        tokenizer_sha256=codec.tokenizer_sha256,
        template_sha256=codec.template_sha256,
        vocab_coverage=0.5,
    )
    write_random_draft(place / "draft", config)
    return TinyModel(model=model, draft=place / "draft", selection=selection)


def write_random_draft(directory: Path, config: DraftConfig) -> None:
    """A draft that knows nothing, seeded."""
    from elsi_edge.draft.checkpoint import save_draft, tensor_shapes

    draw = np.random.default_rng(11)
    tensors = {
        name: np.ones(shape, np.float32)
        if name.endswith("norm.weight")
        else (draw.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)
        for name, shape in tensor_shapes(config).items()
    }
    ids = np.sort(draw.choice(config.target_vocab_size, config.draft_vocab_size, replace=False)).astype(np.int64)
    save_draft(directory, config, tensors, ids)


@pytest.fixture(scope="session")
def tiny_bundle(tiny_model: TinyModel) -> Callable[..., Path]:
    """`tiny_bundle("fp32")`: a bundle of the tiny model, `plain=True` without the draft; each is exported once."""

    def make(precision: Precision, *, plain: bool = False) -> Path:
        from elsi_edge.draft.checkpoint import load_draft
        from elsi_edge.export.pipeline import ExportSettings, export_bundle
        from elsi_edge.models import resolve

        name = f"{'plain' if plain else 'bundle'}-{precision}"
        if name not in tiny_model.bundles:
            out = tiny_model.model.parent / name
            export_bundle(
                resolve(str(tiny_model.model)),
                out,
                ExportSettings(precision=precision),
                draft=None if plain else load_draft(tiny_model.draft),
            )
            tiny_model.bundles[name] = out
        return tiny_model.bundles[name]

    return make


@pytest.fixture
def stock_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without the native operators."""
    from elsi_edge.runtime import native_ops

    absent = native_ops.NativeReport(available=False, why_not="left out by a test")
    monkeypatch.setattr(native_ops, "report", lambda: absent)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """`run("generate", ...)` in a directory of its own, with `stdin` as bytes."""
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.delenv("ELSI_EDGE_WORK", raising=False)
    monkeypatch.setenv("ELSI_EDGE_HOME", str(tmp_path / "home"))

    def call(*arguments: object, stdin: bytes = b"") -> Done:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as caught:
            cli.main([str(argument) for argument in arguments])
        return Done(int(caught.value.code or 0), *capsys.readouterr())

    return call


def _tame(
    name: str, weight: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]"
) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    """Norms of ones, matrices of unit gain: answers that wander instead of one constant token."""
    if weight.ndim == 1:
        return np.ones_like(weight)
    scale = 1.0 if "embed" in name else 1.5 / np.sqrt(weight.shape[1])
    return (weight * scale).astype(np.float32)
