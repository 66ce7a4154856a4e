"""The card that travels with a draft, written from its configuration alone."""

from collections.abc import Mapping
from typing import Any

from elsi_edge.artifacts import DraftConfig
from elsi_edge.draft.shapes import measure_size


def render_card(config: DraftConfig, weight_bytes: int) -> str:
    """Markdown for a draft's README.md: what it is for, data and licences, settings, acceptance."""
    training = config.training
    sections = [
        f"# Draft for {config.selection.model or 'a target'}\n",
        "An EAGLE-3-style draft (arXiv 2503.01840) for speculative decoding with elsi-edge: "
        f"{'one block' if config.depth == 1 else 'two blocks'}, "
        f"a projection from {config.m} tap{'s' if config.m > 1 else ''}, a vocabulary of {config.draft_vocab_size:,} "
        f"of the target's {config.target_vocab_size:,} tokens. It changes how fast the target answers, never what.\n",
        _table("Structure", _structure(config, weight_bytes)),
        _data_section(training),
        _table("Settings", _mapping(training, "settings")),
        _acceptance_section(training, config.vocab_coverage),
    ]
    return "\n".join(sections)


def _structure(config: DraftConfig, weight_bytes: int) -> dict[str, Any]:
    size = measure_size(config)
    return {
        "sees": config.selection.describe(),
        "chosen by": config.selection.method,
        "blocks": config.depth,
        "width": config.width,
        "heads / kv heads / head width": f"{config.heads} / {config.kv_heads} / {config.head_width}",
        "MLP width": config.mlp_width,
        "head": "its own" if config.head == "own" else "the target's rows",
        "weights": f"{size['parameters']:,}; projection {size['parameters_projection']:,}, "
        f"head {size['parameters_head']:,}",
        "bytes at int4": f"{size['int4_bytes'] / 1e6:.2f} MB; projection {size['int4_bytes_projection'] / 1e6:.2f} MB, "
        f"head {size['int4_bytes_head'] / 1e6:.2f} MB",
        "file, float16": f"{weight_bytes / 1e6:.1f} MB",
        "target fingerprint": f"`{config.target_fingerprint[:16]}`",
        "tokenizer / template": f"`{config.tokenizer_sha256[:16]}` / `{config.template_sha256[:16]}`",
    }


def _data_section(training: Mapping[str, Any]) -> str:
    licence = (
        "Answers were written by the target itself through its chat template; the draft's weights derive from the "
        "target's last block, final norm and head rows, so the target's licence applies. Prompts keep the licences of "
        "their sources and are not part of this directory."
    )
    return _table("Data", _mapping(training, "data")) + f"\n{licence}\n"


def _acceptance_section(training: Mapping[str, Any], coverage: float) -> str:
    evaluation = _mapping(training, "evaluation")
    rows: dict[str, Any] = {"share of answer tokens in the draft vocabulary": f"{coverage:.4f}"}
    for step, value in enumerate(evaluation.get("agreement", ()), start=1):
        rows[f"agreement with the target's argmax, step {step}"] = f"{value:.3f}"
    if "tau_chain4" in evaluation:
        rows["tokens per verification, chain of 4, bonus included"] = f"{evaluation['tau_chain4']:.3f}"
    for name, value in _mapping(evaluation, "tau").items():
        rows[f"tokens per verification by replay, {name.replace('-', ' of ')}"] = f"{value:.3f}"
    note = (
        "\nMeasured on held-out rows at every answer position, teacher-forced; a position whose best token the draft "
        "cannot say counts as a miss. "
        "Replay: what greedy decoding would have accepted on the recorded greedy answers, the bonus token included.\n"
    )
    return _table("Acceptance", rows) + note


def _table(title: str, rows: Mapping[str, Any]) -> str:
    lines = [f"## {title}\n", "| | |", "|---|---|"]
    lines += [f"| {key.replace('_', ' ')} | {value} |" for key, value in rows.items()]
    return "\n".join(lines) + "\n"


def _mapping(training: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = training.get(key, {})
    return value if isinstance(value, Mapping) else {}
