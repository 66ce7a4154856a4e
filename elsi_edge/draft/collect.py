"""Rows gathered into shards, listed in the manifest, and held to a disk budget."""

from dataclasses import replace
from pathlib import Path

from elsi_edge.draft.settings import DistillSettings
from elsi_edge.draft.shards import ANSWERS, DistilledRow, ShardManifest, row_bytes, write_shard

_OVERHEAD = 16_384  # bytes for the manifest and each shard's header


class Collector:
    """Takes rows in their order and closes a shard when it is full."""

    def __init__(self, out: Path, manifest: ShardManifest, settings: DistillSettings) -> None:
        self.out, self.manifest, self.settings = out, manifest, settings
        self.stopped = ""  # why nothing more is taken
        self._rows: list[DistilledRow] = []
        self._dropped: dict[str, str] = {}
        self._counts = dict(manifest.counts)
        self._pending = 0  # bytes of the rows that wait for their shard

    def take(self, key: str, row: DistilledRow | None, dropped: str, cut: int | None) -> bool:
        """Take what became of a job: a row, or why it was left out. False when it would pass the disk budget."""
        if row is not None and not self._fits(row):
            return False
        if cut is not None and row is not None:
            self._count("rows cut where a loop starts", 1)
            self._count("tokens cut", cut)
        if row is None:
            self._dropped[key] = dropped
            self._count(f"rows left out: {dropped}", 1)
            return True
        self._rows.append(row)
        if sum(len(row.token_ids) for row in self._rows) >= self.settings.shard_tokens:
            self.close()
        return True

    def close(self) -> None:
        """Write what was collected as a shard and list it, with the rows left out so far."""
        if not (self._rows or self._dropped or any(self.out.iterdir())):
            self.out.rmdir()  # nothing came of it: a first row that failed leaves no trace
            return
        entries = list(self.manifest.shards)
        if self._rows:
            file = f"shard-{len(entries):05d}.safetensors"
            entries.append(write_shard(self.out, file, self._rows, self.manifest.state_names))
        dropped = {**self.manifest.dropped, **self._dropped}
        self.manifest = replace(self.manifest, shards=tuple(entries), dropped=dropped, counts=dict(self._counts))
        self.manifest.save(self.out)
        self._rows, self._dropped, self._pending = [], {}, 0

    def _fits(self, row: DistilledRow) -> bool:
        limit, size = self.settings.max_bytes, row_bytes(row)
        if limit is not None:
            log = self.out / ANSWERS
            written = sum(shard.bytes for shard in self.manifest.shards) + (log.stat().st_size if log.exists() else 0)
            overhead = _OVERHEAD + 200 * (self.manifest.rows + len(self.manifest.dropped) + len(self._rows))
            if written + overhead + self._pending + size > limit:
                self.stopped = (
                    f"stopped before the disk budget of {limit / 1e6:.1f} MB: {self.out} holds "
                    f"{(written + self._pending) / 1e6:.1f} MB; raise --max-disk to go on"
                )
                return False
        self._pending += size
        return True

    def _count(self, name: str, amount: int) -> None:
        self._counts[name] = self._counts.get(name, 0) + amount
