"""A bundle's graphs as engines of the loop, loaded when first used."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from elsi_edge.artifacts import BITS, DraftConfig
from elsi_edge.bundle import DRAFT_VOCAB_FILE, Bundle
from elsi_edge.errors import BundleError
from elsi_edge.machine import cores
from elsi_edge.runtime import native_ops
from elsi_edge.runtime.draft import OrtDraft
from elsi_edge.runtime.mixed import MixedProposer
from elsi_edge.runtime.ngram import PRIOR
from elsi_edge.runtime.one_node import exact_attention_rows, require_sound_kernel
from elsi_edge.runtime.options import SessionSettings
from elsi_edge.runtime.ort import open_session, resolve_provider
from elsi_edge.runtime.packed import open_packed
from elsi_edge.runtime.policy import EXACT_CHAIN_ROWS
from elsi_edge.runtime.proposal import Proposer
from elsi_edge.runtime.static_draft import StaticDraft, open_static_draft
from elsi_edge.runtime.static_target import StaticTarget, open_static_target
from elsi_edge.runtime.target import OrtTarget, Target
from elsi_edge.runtime.tuning import Tuning

_TargetRole = Literal["target-native", "target-chain", "target-tree", "static-verify"]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A target with what proposes for it, ready to run."""

    target: Target
    proposer: Proposer | None


class BundleEngines:
    """Opens the engine of a mode when it is first asked for; one at a time stays loaded."""

    def __init__(self, bundle: Bundle, settings: SessionSettings, tuning: Tuning | None = None) -> None:
        self._bundle, self._settings, self._tuning = bundle, settings, tuning
        # Whether the native operators run this bundle: every row has bits of its own, in trees too.
        self.native = bool(native_ops.path_for(bundle.manifest.graphs, settings))
        self.native_note = native_ops.note_for(bundle.manifest.graphs, settings)
        self._proposer: MixedProposer | None = None
        self._loaded: tuple[_TargetRole, Engine] | None = None

    def __getitem__(self, exact: bool) -> Engine:
        role = self._role(exact)
        if self._loaded is None or self._loaded[0] != role:
            self._loaded = None  # its memory is given back before the other graph is loaded
            target = self._target(role)
            self._loaded = (role, Engine(target=target, proposer=self.open_proposer()))
        return self._loaded[1]

    def release(self) -> None:
        """Forget what is loaded."""
        self._loaded = self._proposer = None

    def chain_rows(self) -> int:
        """Rows a step that give a chain the bits of one row a step, as far as this machine's attention was tried."""
        manifest = self._bundle.manifest
        on_cpu = resolve_provider(self._settings.provider) == "CPUExecutionProvider"
        if self.native or manifest.precision == "fp32" or "target-chain" not in manifest.graphs or not on_cpu:
            return EXACT_CHAIN_ROWS
        shape, threads = manifest.shape, self._settings.threads or cores().usable
        return exact_attention_rows(
            shape.heads, shape.kv_heads, shape.head_width, most=EXACT_CHAIN_ROWS, threads=threads
        )

    def open_target(self, *, exact: bool) -> OrtTarget | StaticTarget:
        """A target of its own, without what proposes for it."""
        return self._target(self._role(exact))

    def _role(self, exact: bool) -> _TargetRole:
        if self._bundle.manifest.static is not None:
            return "static-verify"
        if self.native:
            return "target-native"
        return "target-chain" if exact and "target-chain" in self._bundle.manifest.graphs else "target-tree"

    def _target(self, role: _TargetRole) -> OrtTarget | StaticTarget:
        manifest = self._bundle.manifest
        if role == "static-verify":
            return open_static_target(self._bundle, self._settings)
        return OrtTarget(self._open_target(role), shape=manifest.shape, tap_width=manifest.tap_width)

    def _open_target(self, role: _TargetRole) -> ort.InferenceSession:
        if role == "target-native":
            return native_ops.open_native(self._bundle.graph(role), self._settings)
        if resolve_provider(self._settings.provider) == "CPUExecutionProvider":
            for bits in sorted(self._quantised_bits()):
                require_sound_kernel(bits)
        return open_packed(self._bundle, role, self._settings)

    def _quantised_bits(self) -> set[int]:
        """Bits of the target's quantised matrices: of several widths by a recipe, else the precision's."""
        manifest = self._bundle.manifest
        if manifest.precision == "fp32":
            return set()
        mixed = manifest.quantisation.get("target", {}).get("matrices_by_bits", {})
        return {int(bits) for bits in mixed} - {32} or {BITS[manifest.precision]}

    def open_proposer(self) -> MixedProposer:
        """What proposes for the target, whichever form of it runs; opened once."""
        if self._proposer is None:
            config = self._bundle.manifest.draft
            draft = None
            if config is not None:
                draft = open_draft(self._bundle, config, self._settings)
            prior = PRIOR if self._tuning is None else self._tuning.ngram_prior
            self._proposer = MixedProposer(draft, ngram_prior=prior)
        return self._proposer


def open_draft(bundle: Bundle, config: DraftConfig, settings: SessionSettings) -> OrtDraft | StaticDraft:
    """A bundle's draft, on its native graph where that runs here. Raises BundleError, ProviderError."""
    if bundle.manifest.static is not None:
        return open_static_draft(bundle, config, _draft_vocabulary(bundle), settings)
    projection = None
    if native_ops.path_for(bundle.manifest.graphs, settings, role="draft-native"):
        blocks = native_ops.open_native(bundle.graph("draft-native"), settings)
    else:
        blocks = open_session(bundle.graph("draft"), settings)
        # One small product: waking a second thread for it takes longer than all of it.
        projection = open_session(bundle.graph("projection"), replace(settings, threads=1))
    return OrtDraft(blocks, projection, config=config, draft_to_target_ids=_draft_vocabulary(bundle))


def _draft_vocabulary(bundle: Bundle) -> NDArray[np.int64]:
    config = bundle.manifest.draft
    assert config is not None
    path = bundle.directory / DRAFT_VOCAB_FILE
    if not path.is_file():
        raise BundleError(f"bundle {bundle.directory}: {DRAFT_VOCAB_FILE} is missing; export it again")
    ids = np.load(path, allow_pickle=False)
    if ids.dtype != np.int64 or ids.shape != (config.draft_vocab_size,):
        raise BundleError(
            f"{path} is {ids.dtype} {list(ids.shape)}, the manifest says int64 [{config.draft_vocab_size}]; "
            "export again"
        )
    if ids.min() < 0 or ids.max() >= config.target_vocab_size:
        raise BundleError(
            f"{path} names ids beyond the target's vocabulary of {config.target_vocab_size}; export again"
        )
    return np.asarray(ids, np.int64)
