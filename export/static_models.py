"""A target and a draft as graphs of fixed shape, from the source model's own weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from elsi_edge.artifacts import DraftConfig, LayerSelection, ModelShape
from elsi_edge.draft.checkpoint import LoadedDraft
from elsi_edge.draft.shapes import block_prefixes
from elsi_edge.errors import ModelError
from elsi_edge.export.static_graph import (
    Block,
    Floats,
    GraphWriter,
    Matrices,
    Ranges,
    Rows,
    WeightFile,
    attention,
    begin,
    linear,
    mlp,
    rms_norm,
    rotary_table,
    selected_row,
)
from elsi_edge.torch_model import load_causal_lm

# Families whose static graphs were compared with transformers, in tests/test_static_families.py.
STATIC_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
EMBEDDINGS = "model.embed_tokens.weight"
DRAFT = "draft."  # what the names of a draft's values and weights begin with
_MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


def require_static(shape: ModelShape, config: Mapping[str, Any], context: int) -> None:
    """Raise ModelError before any long work for a family or an attention that has no static form.

    `config` is config.json. Its windows and scalings are asked for here as well, since dynamic graphs may learn them.
    """
    if shape.family not in STATIC_FAMILIES:
        raise ModelError(
            f"models of type {shape.family!r} have no static form; checked are: {', '.join(STATIC_FAMILIES)}. "
            "Export it with --for cpu"
        )
    window, used = config.get("sliding_window"), config.get("use_sliding_window", shape.family == "mistral")
    if isinstance(window, int) and used and window < context:
        raise ModelError(
            f"the model's blocks see the last {window} tokens only (sliding_window), the context would be {context}; "
            f"static graphs have no windows: give --context {window} or less, or export it with --for cpu"
        )
    scaling = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind, share = scaling.get("rope_type", scaling.get("type", "default")), config.get("partial_rotary_factor")
    if kind not in ("default", "llama3") or scaling.get("partial_rotary_factor", share) not in (None, 1, 1.0):
        raise ModelError(
            f"the model's rotary embedding (rule {kind!r}, or a part of each head) has no static form; "
            "export it with --for cpu"
        )


class SourceWeights:
    """The source model's tensors in float32, the rotary tables that its own code computes, and its blocks' options."""

    def __init__(self, directory: Path, shape: ModelShape, context: int) -> None:
        import torch

        model: Any = load_causal_lm(directory, feature="exporting a model", dtype=torch.float32)
        self.shape = shape
        self._tensors: dict[str, Any] = model.state_dict()
        self._head = EMBEDDINGS if shape.tied_embeddings else "lm_head.weight"
        rotated = getattr(model.config, "no_rope_layers", None) or [1] * shape.blocks
        names = {name for name in _MATRICES for kind in ("self_attn", "mlp") if self._has(f"{kind}.{name}_proj.bias")}
        self.blocks = [
            Block(
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                head_width=shape.head_width,
                norm_eps=shape.norm_eps,
                rotary=bool(rotated[index]),
                biases=frozenset(names),
                head_norms=self._has("self_attn.q_norm.weight"),
            )
            for index in range(shape.blocks)
        ]
        with torch.inference_mode():
            cos, sin = model.base_model.rotary_emb(torch.zeros(1, 1, shape.width), torch.arange(context)[None])
        half = shape.head_width // 2  # transformers repeats the half
        self._rotary = rotary_table(*(part[0, :, :half].float().numpy() for part in (cos, sin)))

    @property
    def rotary(self) -> Floats:
        """Cosines and signed sines [2, context, D]."""
        return self._rotary

    @property
    def head(self) -> str:
        """Name of the lm_head's matrix."""
        return self._head

    def read(self, name: str) -> Floats:
        """A weight by its name in the model."""
        array: Floats = self._tensors[name].float().numpy()
        return array

    def _has(self, name: str) -> bool:
        return f"model.layers.0.{name}" in self._tensors


@dataclass(frozen=True, kw_only=True)
class Target:
    """What every graph of a target is written from."""

    source: SourceWeights
    weights: WeightFile
    matrices: Matrices
    selection: LayerSelection | None
    ranges: Ranges = field(default_factory=dict)  # of activations; none while they are measured

    def graph(self, name: str, rows: Rows, *, every_row: bool) -> GraphWriter:
        """The target over T rows: logits of every row, or of the selected one alone, and the taps of all."""
        source, shape = self.source, self.source.shape
        graph = GraphWriter(name, self.weights, source.read, self.matrices, self.ranges)
        taps = [begin(graph, rows, width=shape.width, head_width=shape.head_width)]
        for index, block in enumerate(source.blocks):
            taps.append(_target_block(graph, index, taps[-1], block, rows))
        last, count = taps[-1], rows.count
        if not every_row:
            last, count = selected_row(graph, last, rows, "last.row"), 1
        final = rms_norm(graph, last, "model.norm.weight", shape.norm_eps, "final", like=taps[-1])
        self.matrices.product(graph, final, source.head, "logits")
        graph.output("logits", [count, shape.vocab_size])
        if self.selection is not None:
            self._add_taps(graph, taps, rows)
        return graph

    def _add_taps(self, graph: GraphWriter, taps: list[str], rows: Rows) -> None:
        selection, shape = self.selection, self.source.shape
        assert selection is not None
        if selection.state == "final-norm":
            wanted = [rms_norm(graph, taps[-1], "model.norm.weight", shape.norm_eps, "tap.final-norm")]
        else:
            wanted = [taps[tap] for tap in selection.taps]
        graph.node("Concat", wanted, "taps", axis=-1)
        graph.output("taps", [rows.count, selection.m * shape.width])


def _target_block(graph: GraphWriter, index: int, state: str, block: Block, rows: Rows) -> str:
    """One block; yields the residual stream entering the next, which is the next tap."""
    prefix = f"model.layers.{index}."
    normed = rms_norm(graph, state, f"{prefix}input_layernorm.weight", block.norm_eps, f"{prefix}normed")
    parts = [linear(graph, normed, f"{prefix}self_attn.{n}_proj", block, f"{prefix}{n}") for n in "qkv"]
    attended = attention(graph, index, prefix, parts, block, rows)
    mixed = linear(graph, attended, f"{prefix}self_attn.o_proj", block, f"{prefix}o")
    graph.node("Add", [state, mixed], f"{prefix}residual")
    weight = f"{prefix}post_attention_layernorm.weight"
    normed = rms_norm(graph, f"{prefix}residual", weight, block.norm_eps, f"{prefix}mlp.normed")
    lowered = mlp(graph, normed, prefix, block)
    return graph.node("Add", [f"{prefix}residual", lowered], f"tap.{index + 1}")


@dataclass(frozen=True, kw_only=True)
class Draft:
    """What both graphs of a draft are written from."""

    config: DraftConfig
    tensors: Mapping[str, Floats]  # by the names of the target's matrices, see `draft_tensors`
    weights: WeightFile
    matrices: Matrices
    ranges: Ranges = field(default_factory=dict)

    def graph(self, name: str, rows: Rows, *, entry: bool, every_row: bool) -> GraphWriter:
        """Entries read `taps` [R, M*E], nodes `state` [w, E]; predictions after every row, or the selected."""
        config = self.config
        graph = GraphWriter(name, self.weights, lambda weight: self.tensors[weight], self.matrices, self.ranges)
        embedded = begin(graph, rows, width=config.embedding_width, head_width=config.head_width)
        if entry:
            graph.input("taps", [rows.count, config.m * config.embedding_width])
            state = self.matrices.product(graph, "taps", f"{DRAFT}projection.weight", "projected")
        else:
            state = graph.input("state", [rows.count, config.width])
        normed = rms_norm(graph, embedded, f"{DRAFT}embed_norm.weight", config.norm_eps, f"{DRAFT}embed_normed")
        for index in range(config.depth):
            state = self._block(graph, index, normed if index == 0 else None, state, rows)
        graph.output(state, [rows.count, config.width])
        last, count = state, rows.count
        if not every_row:
            last, count = selected_row(graph, state, rows, f"{DRAFT}last.row"), 1
        final = rms_norm(graph, last, f"{DRAFT}final_norm.weight", config.norm_eps, f"{DRAFT}final", like="next_state")
        self.matrices.product(graph, final, f"{DRAFT}head.weight", "logits")
        graph.output("logits", [count, config.draft_vocab_size])
        return graph

    def _block(self, graph: GraphWriter, index: int, embedded: str | None, state: str, rows: Rows) -> str:
        """One block; the first reads the normed embedding beside the normed state."""
        config, prefix = self.config, f"{DRAFT}{index}."
        block = Block(
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_width=config.head_width,
            norm_eps=config.norm_eps,
        )
        normed = rms_norm(graph, state, f"{prefix}state_norm.weight", config.norm_eps, f"{prefix}normed")
        if embedded is not None:
            normed = graph.node("Concat", [embedded, normed], f"{prefix}both", axis=-1)
        parts = [linear(graph, normed, f"{prefix}self_attn.{n}_proj", block, f"{prefix}{n}") for n in "qkv"]
        attended = attention(graph, index, prefix, parts, block, rows)
        mixed = linear(graph, attended, f"{prefix}self_attn.o_proj", block, f"{prefix}o")
        graph.node("Add", [state, mixed], f"{prefix}residual")
        weight = f"{prefix}mlp_norm.weight"
        lowered = mlp(
            graph,
            rms_norm(graph, f"{prefix}residual", weight, config.norm_eps, f"{prefix}mlp.normed"),
            prefix,
            block,
        )
        result = "next_state" if index + 1 == config.depth else f"{prefix}finished"
        return graph.node("Add", [f"{prefix}residual", lowered], result)


def draft_tensors(draft: LoadedDraft) -> dict[str, Floats]:
    """A draft's weights under the names that a target's have: the fused qkv as three matrices, blocks by number."""
    config, tensors = draft.config, draft.tensors
    found = {
        f"{DRAFT}{name}.weight": tensors[f"{name}.weight"].astype(np.float32)
        for name in ("projection", "embed_norm", "final_norm", "head")
    }
    queries, pairs = config.heads * config.head_width, config.kv_heads * config.head_width
    for index, own in enumerate(block_prefixes(config)):
        prefix = f"{DRAFT}{index}."
        parts = np.split(tensors[f"{own}qkv.weight"], [queries, queries + pairs])
        found |= {f"{prefix}self_attn.{n}_proj.weight": part for n, part in zip("qkv", parts, strict=True)}
        found[f"{prefix}self_attn.o_proj.weight"] = tensors[f"{own}o.weight"]
        found |= {f"{prefix}mlp.{n}_proj.weight": tensors[f"{own}{n}.weight"] for n in ("gate", "up", "down")}
        found |= {f"{prefix}{n}.weight": tensors[f"{own}{n}.weight"] for n in ("state_norm", "mlp_norm")}
    return found
