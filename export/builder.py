"""The onnxruntime-genai model builder, called once per export; everything after it is graph surgery.

It is always asked for float32: the matrices are quantised here, so that each may have bits and a rounding of its own.
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from elsi_edge.artifacts import BLOCK, SLACK, ModelShape
from elsi_edge.errors import MissingExtraError, ModelError
from elsi_edge.export import embedding, quantise, surgery, windows
from elsi_edge.export.builder_fixes import corrected
from elsi_edge.export.quantise import Moments
from elsi_edge.export.recipe import LM_HEAD, Recipe
from elsi_edge.model_shape import require_family

WEIGHTS_FILE = "target.weights"
_HEAD_WIDTH = 16  # GroupQueryAttention with rotary embedding refuses anything else
# Rules of scaling that were compared with transformers, and families with a rule of their own.
_ROTARY = ("default", "llama3")
_OWN_ROTARY = {"linear": ("gemma3_text",), "longrope": ("phi3",)}
_PARTIAL = ("phi3",)  # families with heads rotated in part that were compared with transformers
_ROTATED_WIDTH = 16  # GroupQueryAttention takes tables for multiples of it
_LEFT_OUT = {  # of a configuration's fields: what is not exported where they are set
    "attn_logit_softcapping": "capped scores are",
    "final_logit_softcapping": "capped logits are",
    "use_bidirectional_attention": "attention to later tokens is",
}
_ALIGNMENT = 65536  # of large tensors, so that they can be mapped into memory


def require_supported(shape: ModelShape) -> None:
    """Raise ModelError before any long work for a family or a shape that is not exported."""
    require_family(shape.family)
    if shape.head_width % _HEAD_WIDTH:
        raise ModelError(
            f"the model's heads are {shape.head_width} wide; ONNX Runtime's GroupQueryAttention takes multiples of "
            f"{_HEAD_WIDTH}, so it is not exported"
        )


def require_plain_attention(config: Mapping[str, Any], shape: ModelShape, context: int) -> None:
    """Raise ModelError for attention that the graphs would get wrong, from config.json and the context asked for."""
    family = shape.family
    if isinstance(config.get("text_config"), Mapping):
        raise ModelError(
            f"the model takes more than text ({config.get('model_type')}, with a text_config inside); exported are "
            f"text models by themselves: save its language model ({family}) alone"
        )
    for name, what in _LEFT_OUT.items():
        if config.get(name):
            raise ModelError(f"{family}: {name} is {config[name]!r}; {what} not exported")
    for scaling in _rotations(config):
        _require_known_rotation(scaling, config, shape, context)


def _rotations(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rules of rotary embedding, one for each kind of block where they differ."""
    nested: Mapping[str, Any] = config.get("rope_parameters") or {}
    kinds: list[Mapping[str, Any]] = [rule for rule in nested.values() if isinstance(rule, Mapping)]
    return kinds or [{**(config.get("rope_scaling") or {}), **nested}]


def _require_known_rotation(
    scaling: Mapping[str, Any], config: Mapping[str, Any], shape: ModelShape, context: int
) -> None:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in _ROTARY and shape.family not in _OWN_ROTARY.get(kind, ()):
        own = "".join(f", {rule} for {', '.join(families)}" for rule, families in _OWN_ROTARY.items())
        raise ModelError(
            f"the model's rotary embedding is scaled by the rule {kind!r}; exported are {' and '.join(_ROTARY)}{own}"
        )
    trained = scaling.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))
    if kind == "longrope" and isinstance(trained, int) and trained < context:
        raise ModelError(
            f"the model's rotary embedding changes its scale beyond {trained} tokens (longrope), the context would be "
            f"{context}; such a change is not exported: give --context {trained} or less"
        )
    share = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if share in (None, 1, 1.0):
        return
    turned = int(shape.head_width * share)
    if shape.family not in _PARTIAL or turned % _ROTATED_WIDTH:
        raise ModelError(
            f"{shape.family}: only {share:g} of each head is rotated (partial_rotary_factor), {turned} of "
            f"{shape.head_width} coordinates; exported are whole heads, and multiples of {_ROTATED_WIDTH} for "
            f"{', '.join(_PARTIAL)}"
        )


def build_base_graph(
    model_dir: Path,
    shape: ModelShape,
    recipe: Recipe,
    work: Path,
    *,
    context: int,
    moments: Callable[[Path], Moments] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> quantise.Quantised:
    """Build the fused graph base.onnx in `work`, its weights in one file, `WEIGHTS_FILE`, beside it.

    The tables of angles reach to `context` tokens. `work` is a directory of the caller, which holds the float32
    intermediate too, so that no other disk fills; on it `moments` measures what compensated rounding needs. Returns
    what became of the matrices. Raises ModelError when the builder refuses the model, UsageError for a recipe's
    pattern that names no matrix or bits of a table that is not tied, MissingExtraError without the builder.
    """
    table = recipe.table_bits(tied=shape.tied_embeddings)
    built = work / "built"
    _run_builder(model_dir, built)
    graph = surgery.load_graph(built / "model.onnx")
    windows.set_windows(graph, windows.attention_windows(model_dir, shape.blocks), reach=context + SLACK)
    surgery.replace_mask_subgraph(graph)
    surgery.select_logit_rows(graph)
    surgery.static_batch_one(graph)
    surgery.cut_rotary_tables(graph, context + SLACK)
    surgery.save_graph(graph, built / "base.onnx")
    measured = None if moments is None else moments(built / "base.onnx")
    quantised = quantise.quantise_graph(graph, recipe, measured, say)
    changed = False
    if shape.tied_embeddings and table == recipe.bits_of(LM_HEAD) != 32:
        changed = embedding.share_embedding(
            graph, bits=table, block=BLOCK, vocab_size=shape.vocab_size, width=shape.width
        )
    elif table != 32:
        changed = embedding.quantise_embedding(graph, block=BLOCK, width=shape.width)
    surgery.remove_unused(graph)
    ir.save(graph, work / "base.onnx", external_data=WEIGHTS_FILE, alignment=_ALIGNMENT)
    stored = surgery.load_graph(work / "base.onnx")
    embedding.read_in_place(stored)
    surgery.save_graph(stored, work / "base.onnx")
    return replace(quantised, table_bits=table if changed else 32)


def _run_builder(model_dir: Path, out: Path) -> None:
    try:
        from onnxruntime_genai.models import builder
    except ImportError as error:
        raise MissingExtraError("exporting a model", extra="build", module="onnxruntime_genai") from error
    call = ("", str(model_dir), str(out), "fp32", "cpu", str(out / "cache"))
    options = ["windowed_kv_cache=false"]  # caches hold every position: a rejected node may have been in none
    with _quiet() as said, corrected():
        try:
            builder.create_model(*call, **builder.parse_extra_options(*call, options))
        except OSError:
            raise  # disk trouble: the caller knows which directory
        except Exception as error:  # the builder raises bare exceptions of many types
            last = (str(error).strip() or said.getvalue().strip() or type(error).__name__).splitlines()[-1]
            raise ModelError(f"the model builder cannot export {model_dir}: {last}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[io.StringIO]:
    """Keep the builder's talk off our stdout, where results go, and its warnings off stderr."""
    said = io.StringIO()
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield said
    finally:
        logging.disable(level)
