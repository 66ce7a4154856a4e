"""A bundle's files by component, for people and for JSON."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elsi_edge.bundle import BundleManifest

_DRAFT = ("draft.", "projection.", "draft_to_target_ids.")
_TEXT = ("tokenizer.json", "text.json")


def components(manifest: "BundleManifest") -> dict[str, int]:
    """Bytes of a bundle's files by component, the manifest left out; components without files are not named."""
    sizes: dict[str, int] = {}
    for name, entry in manifest.files.items():
        if name.startswith(_DRAFT):
            part = "draft"
        elif name in _TEXT:
            part = "tokenizer"
        elif name.startswith("target"):
            part = "target graphs" if name.endswith(".onnx") else "target weights"
        else:
            part = "other"
        sizes[part] = sizes.get(part, 0) + entry.bytes
    order = ("target weights", "target graphs", "draft", "tokenizer", "other")
    return {part: sizes[part] for part in order if part in sizes}


def size_lines(manifest: "BundleManifest") -> list[str]:
    """The components with their sizes and the sum, a line each."""
    from elsi_edge.cli import common

    sizes = components(manifest)
    rows = [*sizes.items(), ("together", sum(sizes.values()))]
    return [f"  {name:<15}{common.size_text(size):>10}" for name, size in rows]
