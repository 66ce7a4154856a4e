"""A draft's weights by name, and how slim that makes it once exported. No torch."""

import math
from typing import Any

from elsi_edge.artifacts import BYTES_PER_WEIGHT, DraftConfig


def tensor_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight a draft stores, `draft_to_target_ids` aside. Matrices are [out, in]."""
    width, target = config.width, config.embedding_width
    shapes: dict[str, tuple[int, ...]] = {
        "projection.weight": (width, config.m * target),
        "embed_norm.weight": (target,),
        "final_norm.weight": (width,),
        "head.weight": (config.draft_vocab_size, width),
    }
    queries, pairs = config.heads * config.head_width, config.kv_heads * config.head_width
    for prefix, read in zip(block_prefixes(config), (target + width, width), strict=False):
        shapes |= {
            f"{prefix}state_norm.weight": (width,),
            f"{prefix}qkv.weight": (queries + 2 * pairs, read),
            f"{prefix}o.weight": (width, queries),
            f"{prefix}mlp_norm.weight": (width,),
            f"{prefix}gate.weight": (config.mlp_width, width),
            f"{prefix}up.weight": (config.mlp_width, width),
            f"{prefix}down.weight": (width, config.mlp_width),
        }
    return shapes


def block_prefixes(config: DraftConfig) -> tuple[str, ...]:
    """What the names of each block's weights begin with; those of the first with nothing."""
    return ("", *(f"later.{index}." for index in range(config.depth - 1)))


def measure_size(config: DraftConfig) -> dict[str, Any]:
    """Weights in all and by part, and bytes at int4 (blocks of 32 with a scale; norms in float32).

    The projection is the only part that grows with the number of taps. The target's embedding table is not counted: the
    draft reads the target's own.
    """
    counts = {name: math.prod(shape) for name, shape in tensor_shapes(config).items()}
    int4 = BYTES_PER_WEIGHT["int4"]
    matrices = sum(count for name, count in counts.items() if not name.endswith("norm.weight"))
    norms = sum(counts.values()) - matrices
    projection, head = counts["projection.weight"], counts["head.weight"]
    return {
        "parameters": matrices + norms,
        "parameters_trained": matrices + norms - (head if config.head == "tied" else 0),
        "parameters_projection": projection,
        "parameters_head": head,
        "int4_bytes": round(matrices * int4) + 4 * norms,
        "int4_bytes_projection": round(projection * int4),
        "int4_bytes_head": round(head * int4),
    }
