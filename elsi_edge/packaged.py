"""What ships inside the package: a draft for the built-in model, prompts to measure with, the style of reports."""

import importlib.resources
import json
from pathlib import Path

from elsi_edge.artifacts import DraftConfig, LayerSelection, PromptRow
from elsi_edge.errors import DraftError
from elsi_edge.prompts import read_prompts

_DATA = "elsi_edge.data"
_DRAFT = "draft"
_DRAFT_CONFIG = "draft.json"
_BENCH_PROMPTS = "bench_prompts.jsonl"


def packaged_draft() -> Path | None:
    """Directory of the draft that ships for the built-in model; None in an installation without one."""
    place = importlib.resources.files(_DATA).joinpath(_DRAFT)
    # A package is installed as files, never zipped: pip unpacks wheels.
    directory = Path(str(place))
    return directory if (directory / _DRAFT_CONFIG).is_file() else None


def packaged_selection() -> LayerSelection | None:
    """The selection that the packaged draft was trained with. Raises DraftError when its configuration is broken."""
    config = packaged_config()
    return None if config is None else config.selection


def packaged_config() -> DraftConfig | None:
    """Configuration of the packaged draft, its weights not looked at. Raises DraftError."""
    directory = packaged_draft()
    if directory is None:
        return None
    path = directory / _DRAFT_CONFIG
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DraftError(f"the packaged draft {path} cannot be read ({error}); install elsi-edge again") from error
    return DraftConfig.from_json(value, str(path))


def builtin_bench_prompts() -> list[PromptRow]:
    """The 24 prompts, three in each of eight categories, that `bench` and `demo` take when no file is given."""
    with importlib.resources.as_file(importlib.resources.files(_DATA).joinpath(_BENCH_PROMPTS)) as path:
        return read_prompts(path)


def report_css() -> str:
    """Style sheet of the self-contained HTML reports."""
    return importlib.resources.files(_DATA).joinpath("report.css").read_text(encoding="utf-8")
