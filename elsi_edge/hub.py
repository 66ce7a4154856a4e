"""The Hugging Face hub: asked with a short patience, and not at all for what is cached or when offline."""

import os
import threading
from pathlib import Path
from typing import Any

from elsi_edge import weights
from elsi_edge.errors import MissingExtraError, ModelError

PATIENCE_S = 5.0  # seconds the hub has to answer before it counts as out of reach
_DRAFT = "draft.safetensors"  # what a repository of a draft of ours holds in place of a model
_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja"]


def snapshot(repo: str) -> Path:
    """A hub model's directory in huggingface_hub's own cache, downloaded when it is not there.

    Raises ModelError: unknown, gated, out of reach, offline and not cached, no safetensors.
    """
    if (cached := _cached(repo)) is not None:
        return cached
    if offline():
        raise ModelError(f"{repo} is neither a directory here nor in the hub's cache, and HF_HUB_OFFLINE is set")
    if (trouble := ask(repo)) is not None:
        raise ModelError(f"{repo} is no directory here, and as a hub id: {trouble}")
    return download(repo, None)


def offline() -> bool:
    """Whether the user has forbidden the hub (HF_HUB_OFFLINE, TRANSFORMERS_OFFLINE)."""
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in _OFFLINE)


_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def ask(repo: str) -> str | None:
    """None when the hub answers for `repo` within PATIENCE_S, else why not."""
    hf = _hf()
    answer: list[str | None] = []

    def call() -> None:
        try:
            hf.HfApi().model_info(repo, timeout=PATIENCE_S)
            answer.append(None)
        except Exception as error:  # of many libraries: whatever it is, the hub cannot be used
            answer.append(explain(repo, error))

    # A thread, because name resolution has no time limit of its own.
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return answer[0] if answer else f"the hub did not answer within {PATIENCE_S:g} s; check the network"


def download(repo: str, into: Path | None) -> Path:
    """Fetch a model's configuration, tokenizer and safetensors, into the hub's cache or `into`. Raises ModelError."""
    hf = _hf()
    try:
        found = Path(hf.snapshot_download(repo, allow_patterns=_FILES, local_dir=into, etag_timeout=PATIENCE_S))
    except OSError as error:
        raise ModelError(f"{repo}: {explain(repo, error)}") from error
    except Exception as error:
        raise ModelError(f"{repo}: the download failed: {explain(repo, error)}") from error
    return found


def explain(repo: str, error: Exception) -> str:
    """A hub error in one line."""
    kind = type(error).__name__
    if kind == "GatedRepoError":
        return "it is gated; accept its terms on the hub and log in with 'hf auth login'"
    if kind in ("RepositoryNotFoundError", "HFValidationError"):
        return f"the hub has no model {repo!r} (or it is private)"
    text = " ".join(str(error).split())
    return f"the hub cannot be reached ({kind}: {text[:160]}); check the network"


def _cached(repo: str) -> Path | None:
    hf = _hf()
    try:
        found = Path(hf.snapshot_download(repo, allow_patterns=_FILES, local_files_only=True))
        if not (found / _DRAFT).is_file():
            weights.list_tensors(found)  # another tool may have cached the configuration alone
    except ModelError:
        return None
    except Exception:  # not cached: its kind differs between huggingface_hub's versions
        return None
    return found


def _hf() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise MissingExtraError("a model of the hub", extra="build", module="huggingface_hub") from error
    return huggingface_hub
