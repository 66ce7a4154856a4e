"""`export --for npu`: its options, held against those that only one of the two kinds of bundle has."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elsi_edge.artifacts import Precision
    from elsi_edge.export.static_export import StaticSettings
    from elsi_edge.workdir import WorkDir


def npu_settings(
    *,
    npu: bool,
    precision: "Precision",
    context: int | None,
    force: bool,
    own: Mapping[str, Any],
    others: Mapping[str, Any],
) -> "StaticSettings | None":
    """The settings of a static bundle, None where `npu` is false.

    `own` are the options that --for npu alone has, `others` those that it has not, by their name; None: not given.
    Raises UsageError for one that was given and has no place.
    """
    from elsi_edge.errors import UsageError

    for name, value in (others if npu else own).items():
        if value is not None:
            kind, way = ("npu", "drop it") if npu else ("cpu", "drop it or add --for npu")
            raise UsageError(f"{name} is {value}, which an export --for {kind} does not have; {way}")
    if not npu:
        return None
    from elsi_edge.export.static_export import StaticSettings

    given = {
        key: own[name]
        for name, key in (
            ("--verify-rows", "verify_rows"),
            ("--prefill-block", "prefill_rows"),
            ("--activation-bits", "activation_bits"),
        )
        if own[name] is not None
    }
    return StaticSettings(precision=precision, context=context, replace=force, **given)


def npu_bundle(place: "WorkDir", precision: "Precision", *, plain: bool) -> Path:
    """Directory of a static bundle in a work directory."""
    return place.root / f"{'npu-plain' if plain else 'npu'}-{precision}"
