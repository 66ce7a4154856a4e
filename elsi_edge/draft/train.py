"""Training a draft: unrolled steps, soft cross-entropy on the draft vocabulary, a moving average, exact resume.

Started by `accelerate launch` on several processes, each computes its share of every batch; gradients are summed, so
the run is that of one process with the same batches but for the order of sums.
"""

from pathlib import Path

import torch

from elsi_edge.artifacts import DraftConfig
from elsi_edge.draft.curves import LOG as LOG
from elsi_edge.draft.data import ShardSet
from elsi_edge.draft.report import Reporter, Silent
from elsi_edge.draft.resume import clear, shards_used
from elsi_edge.draft.settings import TrainSettings
from elsi_edge.draft.source import read_source
from elsi_edge.draft.structure import build, own_device, pick_device
from elsi_edge.draft.trainer import Trainer
from elsi_edge.errors import DataError
from elsi_edge.fsio import require_free, require_writable
from elsi_edge.processes import Processes, processes
from elsi_edge.stopping import stop_requests

_ROOM = 400e6  # bytes: two checkpoints of a small draft while one replaces the other


def train(
    shards: Path,
    model_directory: Path,
    out: Path,
    settings: TrainSettings,
    *,
    reporter: Reporter | None = None,
    target_fingerprint: str = "",
    fresh: bool = False,
    init: Path | None = None,
    group: Processes | None = None,
) -> DraftConfig:
    """Train a draft on a shard directory and write it to `out`; continues the run that `out` holds unless `fresh`.

    `target_fingerprint` is that of the model in `model_directory`, compared with the shards' when given; `init` a draft
    directory to start from; `group` the processes that share the work. After SIGINT or SIGTERM the step is finished,
    everything is saved, and KeyboardInterrupt is raised. Raises DataError (shards that are altered, of another target,
    or without answer tokens), DraftError (a loss that is not finite, a checkpoint of another run), ConfigError (sizes
    that do not fit), ProviderError (a device that is not there), StorageError.
    """
    group = group or processes()
    # A run goes on from the shards that it began with: its vocabulary and its held-out rows were chosen from them.
    base, joined = (None if fresh else shards_used(out)) or (None, None)
    data = ShardSet(shards, taps=settings.taps, max_length=settings.max_length, shards=base)
    made_from = data.manifest.target_fingerprint
    if target_fingerprint and target_fingerprint != made_from:
        raise DataError(
            f"{shards} was made with the target {made_from[:12]}, the model given is {target_fingerprint[:12]}; "
            "give the same model, or distill again"
        )
    if group.rank == 0:
        require_free(out, int(_ROOM), "training")
        require_writable(out / LOG)
        if fresh:
            clear(out)
    group.wait()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = pick_device(settings.device, own_device(group))
    source = read_source(model_directory, data.manifest.shape)
    structure = build(data, source, settings, device, init=init)
    with stop_requests() as stopped:
        return Trainer(data, structure, out, settings, reporter or Silent(), group, joined).run(stopped)
