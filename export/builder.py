"""The onnxruntime-genai model builder, called once per export; everything after it is graph surgery."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

from elsi_edge.artifacts import ModelShape, Precision
from elsi_edge.errors import MissingExtraError, ModelError
from elsi_edge.export import embedding, surgery

BLOCK = 32  # weights per quantisation block: 16 and 32 give the same bits for 1 to 16 rows, 128 does not
WEIGHTS_FILE = "target.weights"
_HEAD_WIDTH = 16  # GroupQueryAttention with rotary embedding refuses anything else
_ALIGNMENT = 65536  # of large tensors, so that they can be mapped into memory

# Families whose graphs were compared with transformers, block by block, in tests/test_export_families.py.
SUPPORTED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def quantisation(precision: Precision) -> dict[str, Any]:
    """The recipe that the manifest records."""
    if precision == "fp32":
        return {"operator": "MatMul", "bits": 32}
    bits = 4 if precision == "int4" else 8
    return {"operator": "MatMulNBits", "bits": bits, "block": BLOCK, "symmetric": True, "accuracy_level": 4}


def require_supported(shape: ModelShape) -> None:
    """Raise ModelError before any long work for a family or a shape that is not exported."""
    if shape.family not in SUPPORTED_FAMILIES:
        raise ModelError(
            f"models of type {shape.family!r} are not exported; checked are: {', '.join(SUPPORTED_FAMILIES)}"
        )
    if shape.head_width % _HEAD_WIDTH:
        raise ModelError(
            f"the model's heads are {shape.head_width} wide; ONNX Runtime's GroupQueryAttention takes multiples of "
            f"{_HEAD_WIDTH}, so it is not exported"
        )


def build_base_graph(model_dir: Path, shape: ModelShape, precision: Precision, work: Path) -> ir.Model:
    """Build the fused graph in `work` and return it with its weights in one file, `WEIGHTS_FILE`, beside it.

    `work` is a directory of the caller, which holds the intermediate too, so that no other disk fills. Raises
    ModelError when the builder refuses the model, MissingExtraError without it.
    """
    built = work / "built"
    _run_builder(model_dir, precision, built)
    graph = surgery.load_graph(built / "model.onnx")
    if precision == "int8" and shape.tied_embeddings:
        embedding.share_embedding(graph, bits=8, block=BLOCK, vocab_size=shape.vocab_size, width=shape.width)
    surgery.replace_mask_subgraph(graph)
    surgery.select_logit_rows(graph)
    surgery.static_batch_one(graph)
    base = work / "base.onnx"
    ir.save(graph, base, external_data=WEIGHTS_FILE, alignment=_ALIGNMENT)
    return surgery.load_graph(base)


def _run_builder(model_dir: Path, precision: Precision, out: Path) -> None:
    try:
        from onnxruntime_genai.models import builder
    except ImportError as error:
        raise MissingExtraError("exporting a model", extra="build", module="onnxruntime_genai") from error
    options: Mapping[str, Any] = {"block_size": BLOCK, "accuracy_level": 4, "is_symmetric": "true"}
    pairs = [] if precision == "fp32" else [f"{key}={value}" for key, value in options.items()]
    call = ("", str(model_dir), str(out), precision, "cpu", str(out / "cache"))
    with _quiet() as said:
        try:
            builder.create_model(*call, **builder.parse_extra_options(*call, pairs))
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
