"""What the layouts have in common and where they differ.

All of them store the EAGLE-3 network (arXiv 2503.01840): `fc` projects the concatenated states of the target, a first
block reads [input_layernorm(embedding), hidden_norm(state)], `norm` and `lm_head` follow, `d2t` holds for each draft
token the target's id *minus* its own place, `t2d` is true at target ids that the draft can say.

Numbers of the states, against our taps (tap t is the residual stream entering block t):

    speculators, vLLM, EAGLE   id = t        the state entering block id; {2, n/2, n-3} without ids
    SpecForge, SGLang          id = t - 1    the state leaving block id; {1, n/2-1, n-4} written out
    OpenVINO GenAI             id = t - 1    `hidden_layers_list` names the last sum within block id

Read from the sources of vllm-project/speculators (models/eagle3), vllm-project/vllm (llama_eagle3, which runs them),
sgl-project/SpecForge, sgl-project/sglang (`set_eagle3_layers_to_capture`) and openvinotoolkit/openvino.genai
(`transform_hidden_state`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elsi_edge.artifacts import DraftConfig, ModelShape
from elsi_edge.errors import DraftError, SelectionError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
PROVENANCE = "elsi-edge.json"  # our own configuration beside an exported draft: what the layout has no place for
EMBEDDINGS = "embed_tokens.weight"
EAGLE3_LEAST_BLOCKS = 7  # fewer, and {2, n/2, n-3} does not ascend


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One tool's way to write an EAGLE-3 draft."""

    name: str
    first_block: str  # what the names of the first block's weights begin with
    tap_of_zero: int  # the tap that this tool's id 0 names
    taps: int | None  # the number that its loader insists on; None takes any
    depth: int  # most blocks

    def tap(self, layer_id: int) -> int:
        """Our tap of this tool's id."""
        return layer_id + self.tap_of_zero

    def layer_id(self, tap: int) -> int:
        """This tool's id of our tap. Raises SelectionError for a tap that it has no number for."""
        if tap < self.tap_of_zero:
            raise SelectionError(
                f"tap {tap} has no number in the layout {self.name!r}, which counts from tap {self.tap_of_zero}; "
                "choose --format speculators"
            )
        return tap - self.tap_of_zero


LAYOUTS: Mapping[str, Layout] = {
    "speculators": Layout(name="speculators", first_block="layers.0.", tap_of_zero=0, taps=None, depth=2),
    "specforge": Layout(name="specforge", first_block="midlayer.", tap_of_zero=1, taps=3, depth=1),
    "openvino": Layout(name="openvino", first_block="midlayer.", tap_of_zero=1, taps=3, depth=1),
}


@dataclass(frozen=True, kw_only=True)
class Target:
    """The model that a draft is for, as far as layouts need it."""

    model: str  # the reference as the user gave it
    shape: ModelShape
    fingerprint: str
    tokenizer_sha256: str
    template_sha256: str
    embeddings: Callable[[], NDArray[np.float32] | None]  # its table [at least V, E]; None where it is not found
    architectures: tuple[str, ...] = ()  # as its config.json names them


def block_prefix(layout: Layout, block: int) -> str:
    """What the names of a block's weights begin with in a layout."""
    return layout.first_block if block == 0 else f"layers.{block}."


def block_names(layout: Layout, block: int) -> dict[str, str]:
    """Our name of each of a block's weights, q, k and v apart, to the layout's."""
    prefix = block_prefix(layout, block)
    names = {
        "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm", "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
        "state_norm": "hidden_norm" if block == 0 else "input_layernorm",
    }  # fmt: skip
    if block == 0:
        names["embed_norm"] = "input_layernorm"
    return {ours: f"{prefix}{theirs}.weight" for ours, theirs in names.items()}


OUTER_NAMES: Mapping[str, str] = {
    "projection.weight": "fc.weight",
    "final_norm.weight": "norm.weight",
    "head.weight": "lm_head.weight",
}


def expected_shapes(config: DraftConfig, layout: Layout) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight of a draft in a layout; the maps and the embedding table aside."""
    width, read = config.width, (config.embedding_width + config.width, config.width)
    queries, pairs = config.heads * config.head_width, config.kv_heads * config.head_width
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, config.m * config.embedding_width),
        "norm.weight": (width,),
        "lm_head.weight": (config.draft_vocab_size, width),
    }
    for block in range(config.depth):
        sizes: dict[str, tuple[int, ...]] = {
            "q": (queries, read[block]), "k": (pairs, read[block]), "v": (pairs, read[block]), "o": (width, queries),
            "mlp_norm": (width,), "state_norm": (width,), "embed_norm": (width,),
            "gate": (config.mlp_width, width), "up": (config.mlp_width, width), "down": (width, config.mlp_width),
        }  # fmt: skip
        shapes |= {theirs: sizes[ours] for ours, theirs in block_names(layout, block).items()}
    return shapes


def to_offsets(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Absolute target ids, [U], as `d2t`: each minus its place."""
    return ids - np.arange(len(ids), dtype=np.int64)


def from_offsets(offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """`d2t`, [U], as absolute target ids."""
    return offsets + np.arange(len(offsets), dtype=np.int64)


def to_mask(ids: NDArray[np.int64], target_vocab_size: int) -> NDArray[np.bool_]:
    """`t2d`, [V]: true at the ids that the draft can say."""
    mask = np.zeros(target_vocab_size, dtype=np.bool_)
    mask[ids] = True
    return mask


def default_taps(blocks: int) -> tuple[int, int, int]:
    """EAGLE-3's own taps {2, n/2, n-3}. Raises DraftError for a model that is too small for them."""
    if blocks < EAGLE3_LEAST_BLOCKS:
        raise DraftError(
            f"the draft names no states and EAGLE-3's rule needs {EAGLE3_LEAST_BLOCKS} blocks, the target has "
            f"{blocks}; give them with --taps"
        )
    return 2, blocks // 2, blocks - 3


def require_taps(layout: Layout, taps: Sequence[int]) -> None:
    """Raise DraftError unless a layout's loader takes so many taps; both numbers are named."""
    if layout.taps is not None and len(taps) != layout.taps:
        raise DraftError(
            f"the layout {layout.name!r} takes exactly {layout.taps} taps, this draft sees {len(taps)} "
            f"({', '.join(map(str, taps))}); choose --format speculators, or train a draft on {layout.taps} taps"
        )
