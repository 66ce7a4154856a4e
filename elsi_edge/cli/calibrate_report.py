"""What `calibrate` says at its end, and how it treats the selection of an earlier run."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elsi_edge.artifacts import LayerSelection
    from elsi_edge.calibration.analysis import Analysis
    from elsi_edge.workdir import WorkDir


def keep_previous(file: Path, selection: "LayerSelection") -> None:
    """Put aside the selection that is about to be replaced, where it is another one, and say so."""
    from elsi_edge import fsio
    from elsi_edge.calibration.words import method
    from elsi_edge.cli import common
    from elsi_edge.cli.inspect import read_selection
    from elsi_edge.errors import SelectionError

    if not file.is_file():
        return
    try:
        old = read_selection(file)
        if old.to_json() == selection.to_json():
            return
        what = f"the selection of {old.describe()} ({method(old)}, m = {old.m}, {old.prompts} prompts) made before"
    except SelectionError:
        what = "a file that is no selection"
    previous = file.with_name(f"{file.stem}.previous.json")
    fsio.write_bytes(previous, file.read_bytes())
    common.note(f"{file} replaces {what}, which is kept as {previous.name}")


def say_next(selection: "LayerSelection", model: str, place: "WorkDir", *, stray: bool) -> None:
    """Export when a packaged draft fits the choice, else the first step to one that is not done yet.

    A `stray` selection lies where no later command looks, so its taps are named.
    """
    from elsi_edge.cli import common
    from elsi_edge.cli.calibration_answers import plain_bundle
    from elsi_edge.packaged import packaged_config

    config, name = packaged_config(), shlex.quote(model)
    names = selection.taps_text
    fits = config is not None and config.target_fingerprint == selection.target_fingerprint
    plain = plain_bundle(place)
    if config is not None and fits and config.selection.same_taps(selection):
        layers = names if stray else "auto"
        common.next_command(f"elsi-edge export {name} --layers {layers} --m {selection.m}{place.flag}")
        return
    if config is not None and fits:
        common.note(
            f"The packaged draft reads {config.selection.describe()}; one for {selection.describe()} has to be trained "
            "(distill, train)."
        )
    if plain is not None:
        taps = f" --taps {names}" if stray else ""
        common.next_command(f"elsi-edge distill {name}{taps}{place.bundle_flag(plain)}{place.flag}")
    else:
        common.note("The draft learns from the target as it will be deployed, so that is exported first.")
        common.next_command(f"elsi-edge export {name} --plain-only{place.flag}")


def show(analysis: "Analysis", file: Path, page: Path, *, json: bool) -> None:
    """The wave, the pick and the verdict on stdout, or all of the selection as JSON."""
    from elsi_edge.calibration.chart import summary
    from elsi_edge.cli import common

    if json:
        common.emit_json({**analysis.selection.to_json(), "file": str(file), "report": str(page)})
        return
    encoding = (sys.stdout.encoding or "ascii").lower().replace("-", "")
    width = min(common.out.width, 100)
    common.out.print(summary(analysis, width=width, ascii_only=not encoding.startswith("utf")), soft_wrap=True)
    common.out.print(f"Selection: {file}", soft_wrap=True)
    common.out.print(f"Report: {page}", soft_wrap=True)
