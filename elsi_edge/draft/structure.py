"""What a training run trains: the vocabulary, the configuration and the network that settings and shards ask for."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from elsi_edge.artifacts import DraftConfig
from elsi_edge.draft.checkpoint import load_draft
from elsi_edge.draft.data import ShardSet
from elsi_edge.draft.network import DraftNetwork
from elsi_edge.draft.settings import TrainSettings
from elsi_edge.draft.source import SourceWeights, continue_draft, draft_config, initialise
from elsi_edge.draft.vocab import DraftVocab, choose_vocab, target_to_draft, target_weights
from elsi_edge.errors import ProviderError
from elsi_edge.processes import Processes


@dataclass(frozen=True, kw_only=True)
class Structure:
    """A draft to be trained, on its device."""

    config: DraftConfig
    network: DraftNetwork
    vocab: DraftVocab
    ids: Tensor  # [U] absolute target ids
    inverse: Tensor  # [V] their places in the draft's vocabulary, -1 elsewhere
    init_sha256: str  # of the draft that it started from; "" without one
    notes: tuple[str, ...]  # what could not be taken from target or draft, and why


def build(
    data: ShardSet, source: SourceWeights, settings: TrainSettings, device: torch.device, *, init: Path | None = None
) -> Structure:
    """Raises DataError, ConfigError (sizes that do not fit), DraftError (`init` is damaged or another target's)."""
    manifest = data.manifest
    answers, prompts = data.token_counts()
    weight = None
    if settings.vocab_by != "tokens":
        argmax, mass = target_weights(data.directory, manifest)
        weight = argmax if settings.vocab_by == "argmax" else mass
    vocab = choose_vocab(answers, prompts, manifest.required_ids, settings.draft_vocab, weight=weight)
    config = draft_config(
        manifest.shape,
        settings,
        selection=data.selection,
        draft_vocab_size=vocab.size,
        target_fingerprint=manifest.target_fingerprint,
        tokenizer_sha256=manifest.tokenizer_sha256,
        template_sha256=manifest.template_sha256,
        draft_to_target_sha256=vocab.sha256,
        vocab_coverage=vocab.coverage,
    )
    ids = torch.from_numpy(vocab.draft_to_target_ids)
    network = DraftNetwork(config, source.embeddings)
    warm = settings.warm_start and init is None
    notes = initialise(network, source if warm else None, ids, settings.seed)
    sha256 = ""
    if init is not None:
        draft = load_draft(init)
        notes = continue_draft(network, ids, draft, source)
        sha256 = str(draft.config.training["tensors_sha256"])
    if settings.head == "tied":
        _tie_head(network, ids, source)
    return Structure(
        config=config,
        network=network.to(device),
        vocab=vocab,
        ids=ids.to(device),
        inverse=torch.from_numpy(target_to_draft(vocab.draft_to_target_ids, len(answers))).to(device),
        init_sha256=sha256,
        notes=tuple(notes),
    )


@torch.no_grad()
def _tie_head(network: DraftNetwork, ids: Tensor, source: SourceWeights) -> None:
    """The target's rows, frozen; a narrower draft keeps those that it started from."""
    rows = source.head[ids]
    if rows.shape == network.head.weight.shape:
        network.head.weight.copy_(rows)
    network.head.weight.requires_grad_(False)


def own_device(group: Processes) -> torch.device:
    """The device of this process when none is asked for: the one it was launched on, else a GPU where there is one."""
    if group.count > 1:
        return torch.device(group.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pick_device(asked: str, own: torch.device) -> torch.device:
    """The device to train on; "auto" is this process's own. Raises ProviderError for one that is not there."""
    if asked == "auto":
        return own
    try:
        device = torch.device(asked)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        line = str(error).splitlines()[0]
        raise ProviderError(f"--device {asked}: torch cannot use it here ({line}); give cpu or leave it out") from error
    return own if device.type == own.type and device.index is None else device
