"""Where a bundle is asked for: its directory, or the name of a model whose work directory holds one. No torch."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from elsi_edge.bundle import MANIFEST, BundleManifest, read_manifest
from elsi_edge.errors import BundleError, ElsiError
from elsi_edge.workdir import WorkDir


@dataclass(frozen=True, kw_only=True)
class BundleRef:
    """A bundle's directory, and how it was found."""

    directory: Path
    note: str = ""  # for people; empty when the directory itself was given


def find_bundle(reference: str, work: Path | None = None) -> BundleRef:
    """The bundle that a user means.

    A directory with a manifest is taken as it is. Any other reference (a model's name, directory, file or hub id) is
    looked up in the work directory `work` ($ELSI_EDGE_WORK, else elsi-work): the newest bundle with a draft, else the
    newest plain-only one. Raises BundleError when there is none. Its files are not checked here.
    """
    given = Path(reference).expanduser()
    if reference and (given / MANIFEST).is_file():
        return BundleRef(directory=given)
    place = WorkDir.for_model("model", work)
    base = place.root.parent
    found = [(path, manifest) for path, manifest in _bundles(base) if _names(manifest, reference)]
    if not found:
        here = (
            f"{given} is no bundle ({MANIFEST} is missing)"
            if reference and given.is_dir()
            else f"no bundle at {reference!r}"
        )
        raise BundleError(
            f"{here}, and {base} holds none for a model of that name; "
            f"make one with: elsi-edge export {shlex.quote(reference) if reference else 'MODEL'}{place.flag}"
        )
    complete = [entry for entry in found if not entry[1].plain_only]
    # Graphs of fixed size are for NPUs: where both are there, a name means the other one.
    path, manifest = max(
        complete or found, key=lambda entry: (entry[1].static is None, (entry[0] / MANIFEST).stat().st_mtime_ns)
    )
    kind = f"with a draft on {manifest.selection.describe()}" if manifest.selection else "plain-only, without a draft"
    return BundleRef(directory=path, note=f"using {path} ({manifest.precision}, {kind})")


def _bundles(base: Path) -> Iterator[tuple[Path, BundleManifest]]:
    """Bundles of all models under a work directory; what cannot be read is passed over, a named one is not."""
    for file in sorted(base.glob(f"*/*/{MANIFEST}")):
        try:
            yield file.parent, read_manifest(file.parent)
        except ElsiError:
            continue


def _names(manifest: BundleManifest, reference: str) -> bool:
    """Whether a reference means the model that a bundle was made from."""
    if reference in (manifest.model, manifest.slug):
        return True
    given = Path(reference).expanduser()
    made_from = Path(manifest.model).expanduser()
    return bool(reference) and given.exists() and made_from.exists() and given.resolve() == made_from.resolve()
