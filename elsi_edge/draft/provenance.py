"""What a draft's configuration says about its making: data, settings, results. The card is written from it."""

from typing import Any

from elsi_edge.draft.data import ShardSet
from elsi_edge.draft.settings import TrainSettings
from elsi_edge.draft.shapes import measure_size
from elsi_edge.draft.structure import Structure


def provenance(
    data: ShardSet, train_rows: int, structure: Structure, settings: TrainSettings, **run: Any
) -> dict[str, Any]:
    """The `training` of a DraftConfig; `run` gives minutes, steps, tokens, skipped, processes and evaluation."""
    manifest = data.manifest
    started = {"init": structure.init_sha256} if structure.init_sha256 else {}
    return {
        "data": {
            "model": manifest.model,
            "conversations": train_rows,
            "held_out": len(data.rows) - train_rows,
            "tokens": manifest.tokens,
            "answer_tokens": manifest.answer_tokens,
            "rows_without_answer_tokens": data.dropped,
            "batches_without_answer_tokens": run["skipped"],
            "prompts_sha256": manifest.prompts_sha256,
            **{f"distillation_{key}": value for key, value in manifest.counts.items()},
        },
        "settings": {
            **settings.identity(),
            **started,
            "minutes": round(run["minutes"], 1),
            "steps": run["steps"],
            "processes": run["processes"],
        },
        "size": measure_size(structure.config),
        "evaluation": run["evaluation"],
        "tokens_trained": run["tokens"],
    }
