"""`elsi-edge cache`: what was fetched, and deleting it."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from elsi_edge.cache import CacheEntry

app = typer.Typer(add_completion=False, no_args_is_help=True, help="List or delete the models that were fetched.")

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


@app.command("list")
def list_entries(json: _Json = False) -> None:
    """List cached models with their sizes."""
    from elsi_edge import cache
    from elsi_edge.cli import common

    found = cache.entries()
    if json:
        common.emit_json(
            {"path": str(cache.models_dir()), "entries": _plain(found), "bytes": sum(e.size for e in found)}
        )
        return
    for entry in found:
        common.out.print(f"{common.size_text(entry.size):>10}  {entry.name}", soft_wrap=True)
    common.note(f"{len(found)} cached models in {cache.models_dir()} ({cache.HOME_VARIABLE} moves it)")


@app.command("prune")
def prune(
    names: Annotated[
        list[str] | None, typer.Argument(help="Models to delete, as `cache list` names them; all without.")
    ] = None,
    json: _Json = False,
) -> None:
    """Delete cached models, and what killed downloads left behind. They are fetched again when needed."""
    from elsi_edge import cache
    from elsi_edge.cli import common

    gone = cache.prune(names)
    if json:
        common.emit_json({"path": str(cache.models_dir()), "deleted": _plain(gone), "bytes": sum(e.size for e in gone)})
        return
    for entry in gone:
        common.out.print(f"{common.size_text(entry.size):>10}  {entry.name}", soft_wrap=True)
    common.note(f"deleted {len(gone)} models, {common.size_text(sum(e.size for e in gone))}")


def _plain(entries: "list[CacheEntry]") -> list[dict[str, object]]:
    return [{"name": entry.name, "path": str(entry.path), "bytes": entry.size} for entry in entries]
