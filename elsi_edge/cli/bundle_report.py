"""A bundle's files by component, for people and for JSON."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elsi_edge.bundle import BundleManifest


def components(manifest: "BundleManifest") -> dict[str, int]:
    """Bytes of a bundle's files by component, the manifest left out."""
    from elsi_edge import bundle

    return bundle.components(manifest.files)


def size_lines(manifest: "BundleManifest") -> list[str]:
    """The components with their sizes and the sum, a line each."""
    from elsi_edge.cli import common

    sizes = components(manifest)
    rows = [*sizes.items(), ("together", sum(sizes.values()))]
    return [f"  {name:<15}{common.size_text(size):>10}" for name, size in rows]
