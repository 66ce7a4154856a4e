"""`elsi-edge draft`: a draft from and to the layouts of other tools."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from elsi_edge.cli import options as opt
from elsi_edge.cli.draft_support import flags, quoted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from elsi_edge.draft.layouts import Target
    from elsi_edge.models import SourceModel

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Bring a draft from another tool, or take one there."
)

_Model = Annotated[str, typer.Argument(help="The target: directory, hub id, .gguf file, or smollm2-135m-instruct.")]
_Force = Annotated[bool, typer.Option("--force", help="Replace what is there.")]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*\Z")


@app.command("import")
def import_(
    model: _Model,
    draft: Annotated[
        str, typer.Argument(help="Directory or hub id of an EAGLE-3 draft in the layout of speculators or SpecForge.")
    ],
    taps: Annotated[
        str | None,
        typer.Option(
            help="The states it was trained on, in its own order, like 2,15,27 (default: what its config.json says)."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Draft directory (default: in the work directory).")] = None,
    force: _Force = False,
    work: opt.Work = None,
    json: opt.Json = False,
) -> None:
    """Convert a draft that vLLM's speculators library or SpecForge trained; what cannot be run here is refused."""
    from elsi_edge.cli import common
    from elsi_edge.draft.checkpoint import CONFIG, WEIGHTS, save_draft
    from elsi_edge.draft.layouts import import_draft
    from elsi_edge.errors import StorageError
    from elsi_edge.models import resolve
    from elsi_edge.workdir import WorkDir

    tap_list = None if taps is None else _taps(taps)
    source = resolve(model)
    place = out or WorkDir.for_model(source.slug, work).root / "imported-draft"
    if (place / CONFIG).exists() and not force:
        raise StorageError(f"{place} holds a draft already; choose another --out or replace it with --force")
    found = import_draft(locate_draft(draft), read_target(source), taps=tap_list)
    for line in found.notes:
        common.note(f"note: {line}")
    config = save_draft(place, found.config, found.tensors, found.draft_to_target_ids)
    size = (place / WEIGHTS).stat().st_size
    result = {"path": str(place), "layout": found.layout, "taps": config.selection.taps, "bytes": size}
    if json:
        common.emit_json({**result, "draft_vocab_size": config.draft_vocab_size, "depth": config.depth})
    else:
        common.out.print(
            f"draft of {common.size_text(size)} in {place}, from the layout {found.layout!r}: sees "
            f"{config.selection.describe()}, says {config.draft_vocab_size:,} of {config.target_vocab_size:,} tokens",
            soft_wrap=True,
        )
    wanted = ",".join(map(str, config.selection.taps))
    common.next_command(f"elsi-edge export {quoted(model)} --draft {quoted(place)} --layers {wanted}{flags(work=work)}")


@app.command("export")
def export_(
    model: _Model,
    draft: Annotated[
        str | None, typer.Option(help="Draft directory or hub id (default: the work directory's, else the packaged).")
    ] = None,
    format: Annotated[
        Literal["speculators", "specforge", "openvino"],
        typer.Option(
            help="speculators: for vLLM, any number of taps. specforge (SGLang) and openvino: exactly three taps."
        ),
    ] = "speculators",
    out: Annotated[Path | None, typer.Option(help="Directory to write (default: in the work directory).")] = None,
    force: _Force = False,
    work: opt.Work = None,
    json: opt.Json = False,
) -> None:
    """Write a draft in the layout of another tool: config.json and model.safetensors, float16."""
    from elsi_edge.cli import common
    from elsi_edge.cli.export import load_draft_for
    from elsi_edge.draft.layouts import LAYOUTS, export_draft
    from elsi_edge.errors import DraftError
    from elsi_edge.models import resolve
    from elsi_edge.workdir import WorkDir

    source = resolve(model)
    place = WorkDir.for_model(source.slug, work)
    loaded = load_draft_for(source, draft, place)
    if loaded is None:
        raise DraftError(
            f"there is no draft for {model} yet; give one with --draft, or train one: elsi-edge build {quoted(model)} "
            f"--hours 4{place.flag}"
        )
    path, found = loaded
    if found.config.target_fingerprint != source.fingerprint:
        raise DraftError(
            f"the draft {path} was trained for the target {found.config.target_fingerprint[:12]}, {model} is "
            f"{source.fingerprint[:12]}; give its own target"
        )
    layout, directory = LAYOUTS[format], out or place.root / f"draft-{format}"
    shapes = export_draft(found, directory, layout, read_target(source), replace=force)
    taps = found.config.selection.taps
    ids = [layout.layer_id(tap) for tap in taps]
    size = sum(file.stat().st_size for file in directory.iterdir())
    if json:
        common.emit_json(
            {"path": str(directory), "layout": format, "taps": taps, "layer_ids": ids, "bytes": size, "tensors": shapes}
        )
    else:
        numbers = ", ".join(map(str, ids))
        common.out.print(
            f"{path} in the layout {format!r}: {len(shapes)} tensors, {common.size_text(size)} in {directory}; "
            f"{found.config.selection.describe()}, there called {numbers}",
            soft_wrap=True,
        )
    common.note(_how_to_use(format, directory, ids))


def _how_to_use(name: str, directory: Path, ids: list[int]) -> str:
    if name == "speculators":
        return f"It is served with: vllm serve {quoted(directory)}"
    if name == "specforge":
        return (
            f"SGLang takes it with: --speculative-algorithm EAGLE3 --speculative-draft-model-path {quoted(directory)}"
        )
    return f"OpenVINO GenAI takes it converted, with the draft property hidden_layers_list = {ids}"


def locate_draft(reference: str) -> Path:
    """A draft's directory: one that is here, or a hub repository's. Raises DraftError, ModelError in one line."""
    from elsi_edge import hub
    from elsi_edge.errors import DraftError

    path = Path(reference).expanduser()
    if reference.strip() and path.is_dir():
        return path
    if _HUB_ID.match(reference) and not path.exists():
        return hub.snapshot(reference)
    if path.is_file():
        raise DraftError(f"{reference} is a file; a draft is a directory, name the one that holds its draft.json")
    raise DraftError(f"{reference} holds no draft: there is no such directory, and it is no hub id like 'owner/name'")


def locate_own_draft(reference: str, model: str) -> Path:
    """The same, of a draft in our own layout. Raises DraftError that says how to import another one."""
    from elsi_edge.draft.checkpoint import CONFIG
    from elsi_edge.errors import DraftError

    path = locate_draft(reference)
    if not (path / CONFIG).is_file() and (path / "config.json").is_file():
        raise DraftError(
            f"{reference} is a draft in the layout of another tool; bring it here first: elsi-edge draft import "
            f"{quoted(model)} {quoted(reference)}"
        )
    return path


def read_target(source: "SourceModel") -> "Target":
    """What layouts need of a target. Raises ModelError."""
    from elsi_edge.draft.layouts import Target
    from elsi_edge.models import read_config
    from elsi_edge.text import TextCodec

    codec = TextCodec.from_model_dir(source.directory)
    names = read_config(source.directory).get("architectures") or ()
    return Target(
        model=source.reference,
        shape=source.shape,
        fingerprint=source.fingerprint,
        tokenizer_sha256=codec.tokenizer_sha256,
        template_sha256=codec.template_sha256,
        embeddings=lambda: _embeddings(source.directory),
        architectures=tuple(map(str, names)),
    )


def _embeddings(directory: Path) -> "NDArray[Any] | None":
    from elsi_edge.draft.layouts.tensors import read_floats
    from elsi_edge.weights import list_tensors

    found = [ref for name, ref in list_tensors(directory).items() if name.endswith("embed_tokens.weight")]
    return read_floats(found[0]) if len(found) == 1 else None


def _taps(text: str) -> tuple[int, ...]:
    from elsi_edge.errors import UsageError

    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"--taps {text!r} is no list of numbers; write it like 2,15,27") from error
