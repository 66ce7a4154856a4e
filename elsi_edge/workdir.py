"""Where the stages leave what the next one reads, so that a model's name alone is enough."""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from elsi_edge.artifacts import Precision

VARIABLE = "ELSI_EDGE_WORK"
DEFAULT = "elsi-work"


@dataclass(frozen=True, kw_only=True)
class WorkDir:
    """Paths of one model's artefacts; nothing is made or looked at."""

    root: Path
    given: Path | None = None  # --work, where it was given: commands that come next must name it again

    @classmethod
    def for_model(cls, slug: str, base: Path | None) -> "WorkDir":
        """The directory of the model `slug` under `base`, else $ELSI_EDGE_WORK, else `elsi-work` here."""
        chosen = base if base is not None else Path(os.environ.get(VARIABLE) or DEFAULT)
        return cls(root=chosen.expanduser() / slug, given=base)

    @property
    def flag(self) -> str:
        """ " --work DIR" to add to a command that is to find the same directory, "" where the default is meant."""
        return "" if self.given is None else f" --work {shlex.quote(str(self.given))}"

    def bundle_flag(self, bundle: Path) -> str:
        """ " --bundle DIR" to add to a command that is to use this plain bundle, "" where it takes it by itself."""
        return "" if bundle == self.plain_bundle("int4") else f" --bundle {shlex.quote(str(bundle))}"

    @property
    def selection_path(self) -> Path:
        """What `calibrate` writes."""
        return self.root / "selection.json"

    @property
    def calibration(self) -> Path:
        """Directory of `calibrate`'s report, and of what an interrupted run goes on from."""
        return self.root / "calibration"

    @property
    def shards(self) -> Path:
        """Directory that `distill` writes."""
        return self.root / "shards"

    @property
    def draft(self) -> Path:
        """Directory that `train` writes."""
        return self.root / "draft"

    def bundle(self, precision: Precision) -> Path:
        """Directory of the bundle with a draft."""
        return self.root / f"bundle-{precision}"

    def plain_bundle(self, precision: Precision) -> Path:
        """Directory of the bundle without a draft."""
        return self.root / f"plain-{precision}"
