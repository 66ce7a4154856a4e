"""`--for npu`: from a source model, and a draft if there is one, to a bundle of static graphs that was checked."""

import functools
import importlib.resources
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx

from elsi_edge.artifacts import SLACK, Precision
from elsi_edge.bundle import DRAFT_VOCAB_FILE, BundleManifest, BundleWriter, GraphRole, StaticForm, new_bundle
from elsi_edge.draft.checkpoint import LoadedDraft
from elsi_edge.errors import ModelError, UsageError
from elsi_edge.export import moments, static_check
from elsi_edge.export.draft_graph import rotary_tables as draft_rotary_tables
from elsi_edge.export.pipeline import check_request, describe, disk_needed, require_same_target
from elsi_edge.export.static_graph import FloatMatrices, GraphWriter, Matrices, Ranges, Rows, WeightFile, rotary_table
from elsi_edge.export.static_models import EMBEDDINGS, Draft, SourceWeights, Target, draft_tensors, require_static
from elsi_edge.export.static_quantise import ActivationBits, QdqMatrices, range_draft, range_target
from elsi_edge.fsio import require_free
from elsi_edge.models import SourceModel, read_config
from elsi_edge.runtime.options import MAX_DRAFT_NODES
from elsi_edge.runtime.static_cache import EMBEDDING_STEM, rotary_file
from elsi_edge.text import TextCodec
from elsi_edge.weights import count_weights

OPERATORS_FILE = "npu_operators.json"
DEFAULT_CONTEXT = 1024  # slots
_TEXTS = 16  # that calibration runs, as chats where the model has a template
_PRECISIONS = ("fp32", "int8")
_WIDEST_LEVEL = 8  # nodes of one depth that a tree's beam expands at most


@dataclass(frozen=True, kw_only=True)
class StaticSettings:
    """How a static bundle is made."""

    precision: Precision = "int8"  # of the weights: int8 with calibrated activations, or fp32
    activation_bits: ActivationBits = 16  # of int8's activations
    context: int | None = None  # slots of the cache; None = DEFAULT_CONTEXT, or the model's limit where that is less
    prefill_rows: int = 64  # P
    verify_rows: int = 8  # n, the root and n - 1 drafted nodes
    replace: bool = False  # an existing bundle at the same place


def check_static_request(source: SourceModel, settings: StaticSettings, *, with_draft: bool = True) -> int:
    """The width of the cache, slots, of a bundle with a draft or without. To be called before any long work.

    Raises ModelError for a family or an attention that has no static form, UsageError for settings that do not fit.
    """
    asked = settings.context or min(DEFAULT_CONTEXT, source.shape.context)
    require_static(source.shape, read_config(source.directory), asked)
    context = check_request(source, asked)
    if settings.precision not in _PRECISIONS:
        raise UsageError(
            f"--precision is {settings.precision}, --for npu writes {' and '.join(_PRECISIONS)}; choose one of them"
        )
    if settings.activation_bits not in get_args(ActivationBits):
        raise UsageError(f"--activation-bits is {settings.activation_bits}, it must be 8 or 16")
    for name, rows, most in (
        ("--prefill-block", settings.prefill_rows, context),
        ("--verify-rows", settings.verify_rows, min(context, MAX_DRAFT_NODES + 1)),
    ):
        if not 1 <= rows <= most:
            raise UsageError(f"{name} is {rows}, it must be at least 1 and at most {most} with a context of {context}")
    if with_draft and settings.verify_rows < 2:
        raise UsageError(
            f"--verify-rows is {settings.verify_rows}, which leaves a draft no row; give at least 2, or --plain-only"
        )
    return context


def export_static(
    source: SourceModel,
    out: Path,
    settings: StaticSettings,
    *,
    draft: LoadedDraft | None,
    say: Callable[[str], None] = lambda _: None,
) -> BundleManifest:
    """Write a static bundle at `out`, checked against the source model before it appears.

    Raises what `check_static_request` does, DraftError for a draft of another target, ParityError when a graph does not
    compute what the source computes, StorageError; in each case nothing is left at `out`.
    """
    context = check_static_request(source, settings, with_draft=draft is not None)
    codec = TextCodec.from_model_dir(source.directory)
    if draft is not None:
        require_same_target(draft, source, codec)
    needed = disk_needed(count_weights(source.directory), settings.precision)
    require_free(out.absolute().parent, needed, "export")
    with new_bundle(out, replace=settings.replace) as writer:
        say(f"reading the weights of {source.slug}")
        making = _Making(source=source, settings=settings, context=context, codec=codec, draft=draft, say=say)
        manifest = making.write(writer)
        say("checking the graphs against the source model")
        measured = static_check.check(writer.directory, manifest, source, draft)
        return writer.finish(replace(manifest, parity=measured))


@dataclass(kw_only=True)
class _Making:
    """One export under way."""

    source: SourceModel
    settings: StaticSettings
    context: int
    codec: TextCodec
    draft: LoadedDraft | None
    say: Callable[[str], None]

    def write(self, writer: BundleWriter) -> BundleManifest:
        """Graphs, weights and text files into the writer's directory; the manifest without what a check measures."""
        settings, source, draft, out = self.settings, self.source, self.draft, writer.directory
        weights = SourceWeights(source.directory, source.shape, self.context)
        target_ranges, draft_ranges = self._calibrate(weights, out / "work")
        self.say(f"writing the static {settings.precision} graphs")
        target = self._target(weights, out, self._matrices(target_ranges), target_ranges)
        graphs: dict[GraphRole, GraphWriter] = {
            "static-prefill": target.graph("target-prefill", self._rows(settings.prefill_rows), every_row=False),
            "static-verify": target.graph("target-verify", self._rows(settings.verify_rows), every_row=True),
        }
        if draft is not None:
            graphs |= self._draft_graphs(draft, out, draft_ranges)
            np.save(out / DRAFT_VOCAB_FILE, draft.draft_to_target_ids, allow_pickle=False)
        for graph in graphs.values():
            save_checked(graph.model(), out / f"{graph.name}.onnx")
        self.codec.save(out)
        return self._manifest({role: f"{graph.name}.onnx" for role, graph in graphs.items()})

    def _rows(self, count: int, *, draft: bool = False) -> Rows:
        limit = self.draft.config.context if draft and self.draft is not None else self.context
        return Rows(count=count, slots=min(self.context, limit))

    def _matrices(self, ranges: Ranges) -> Matrices:
        if self.settings.precision == "fp32":
            return FloatMatrices()
        return QdqMatrices(ranges=ranges, activation_bits=self.settings.activation_bits)

    def _target(self, weights: SourceWeights, place: Path, matrices: Matrices, ranges: Ranges) -> Target:
        selection = None if self.draft is None else self.draft.config.selection
        file = WeightFile(place / "target.weights")
        matrices.write_table(weights.read(EMBEDDINGS), EMBEDDINGS, place / EMBEDDING_STEM, file)
        np.save(place / rotary_file("target"), weights.rotary, allow_pickle=False)
        return Target(source=weights, weights=file, matrices=matrices, selection=selection, ranges=ranges)

    def _level_rows(self) -> int:
        return max(1, min(_WIDEST_LEVEL, self.settings.verify_rows // 2))

    def _draft_graphs(self, draft: LoadedDraft, place: Path, ranges: Ranges) -> dict[GraphRole, GraphWriter]:
        written = self._draft(draft, place, self._matrices(ranges), ranges)
        entry, level = self._rows(self.settings.verify_rows, draft=True), self._rows(self._level_rows(), draft=True)
        return {
            "static-entry": written.graph("draft.entry", entry, entry=True, every_row=False),
            "static-level": written.graph("draft.level", level, entry=False, every_row=True),
        }

    def _draft(self, draft: LoadedDraft, place: Path, matrices: Matrices, ranges: Ranges) -> Draft:
        tables = draft_rotary_tables(draft.config, self.context + SLACK)
        np.save(place / rotary_file("draft"), rotary_table(*tables), allow_pickle=False)
        file = WeightFile(place / "draft.weights")
        return Draft(config=draft.config, tensors=draft_tensors(draft), weights=file, matrices=matrices, ranges=ranges)

    def _calibrate(self, weights: SourceWeights, work: Path) -> tuple[Ranges, Ranges]:
        """Ranges of the target's and the draft's activations, from float graphs in `work`, which is deleted."""
        work.mkdir()
        texts = [ids[: self.context] for ids in calibration_texts(self.codec)]
        self.say(f"calibrating on {sum(map(len, texts))} tokens")
        target = self._target(weights, work, FloatMatrices(), {})
        rows = self._rows(self.settings.prefill_rows)
        ranges, taps = range_target(target.graph("target", rows, every_row=True), work, texts)
        drafted: Ranges = {}
        if self.draft is not None:
            rows = self._rows(self.settings.prefill_rows, draft=True)
            written = self._draft(self.draft, work, FloatMatrices(), {})
            entry = written.graph("draft.entry", rows, entry=True, every_row=True)
            level = written.graph("draft.level", rows, entry=False, every_row=True)
            drafted = range_draft(entry, level, work, [ids[: rows.slots // 2] for ids in texts], taps)
        shutil.rmtree(work)
        return ranges, drafted

    def _manifest(self, graphs: Mapping[GraphRole, str]) -> BundleManifest:
        settings, source, draft, codec = self.settings, self.source, self.draft, self.codec
        recipe: dict[str, Any] = {"operator": "Gemm", "bits": 32}
        if settings.precision == "int8":
            recipe = {"operator": "QDQ Gemm", "bits": 8, "activation_bits": settings.activation_bits, "texts": _TEXTS}
        return describe(
            source,
            codec,
            draft,
            precision=settings.precision,
            context=self.context,
            graphs=graphs,
            quantisation={"target": recipe, "draft": None if draft is None else recipe},
            static=StaticForm(
                prefill_rows=settings.prefill_rows,
                verify_rows=settings.verify_rows,
                level_rows=0 if draft is None else self._level_rows(),
                activation_bits=32 if settings.precision == "fp32" else settings.activation_bits,
            ),
        )


def calibration_texts(codec: TextCodec) -> list[list[int]]:
    """Token ids of built-in prompts: as the chat template puts them, where there is one, and every other one raw."""
    raw = moments.texts(codec)[:_TEXTS]
    if not codec.has_template:
        return raw
    from elsi_edge.prompts import builtin_calibration_prompts

    chats = [
        codec.encode_chat([{"role": "user", "content": row.turns[0]}])[: moments.LONGEST]
        for row in builtin_calibration_prompts()[:_TEXTS]
    ]
    return [ids for pair in zip(chats[::2], raw[1::2], strict=False) for ids in pair]


# --- operators ---------------------------------------------------------------------------------------------------


@functools.cache
def operator_tables() -> Mapping[str, frozenset[str]]:
    """Execution provider to the standard operators that its documentation lists."""
    text = (importlib.resources.files("elsi_edge.export") / OPERATORS_FILE).read_text("utf-8")
    return {provider: frozenset(table["operators"].split()) for provider, table in json.loads(text).items()}


def save_checked(model: onnx.ModelProto, path: Path) -> None:
    """Write a graph and hold it to what an NPU asks. Raises ModelError naming what it cannot have."""
    for node in model.graph.node:
        for provider, operators in operator_tables().items():
            if node.domain or node.op_type not in operators:
                name = f"{node.domain}:{node.op_type}" if node.domain else node.op_type
                raise ModelError(f"{path.name} holds the operator {name}, which the table of {provider} does not list")
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    for value in (*inferred.graph.input, *inferred.graph.output, *inferred.graph.value_info):
        sizes = value.type.tensor_type.shape.dim
        if not value.type.tensor_type.HasField("shape") or any(not size.HasField("dim_value") for size in sizes):
            raise ModelError(f"{path.name}: the value {value.name} has no fixed shape")
    path.write_bytes(model.SerializeToString())
    onnx.checker.check_model(str(path), full_check=False)
