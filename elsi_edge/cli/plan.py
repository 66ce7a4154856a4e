"""`elsi-edge plan`: will a model fit a device, how fast, and what limits it; before anything is downloaded."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elsi_edge.artifacts import Precision
from elsi_edge.cli import options as opt

if TYPE_CHECKING:
    from elsi_edge.artifacts import ModelShape
    from elsi_edge.cli.plan_model import Planned
    from elsi_edge.runtime.device import Device
    from elsi_edge.runtime.plan_result import Request
    from elsi_edge.runtime.plan_tau import Tau

_DEVICE = "raspberry-pi-5"
_CONTEXT = 4096
_MOST_TAPS = 8
_COMPARED = (1, 2, 3)  # numbers of taps whose drafts are sized side by side


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A config.json or its directory, a bundle, or a name that ships: qwen3-4b-instruct-2507, "
            "llama-3.1-8b-instruct, smollm2-135m-instruct.",
        ),
    ],
    precision: Annotated[
        Precision | None,
        typer.Option(
            "--precision",
            help="Of the bundle; for an NPU int8 or fp32. Default: the bundle's own, else int4, for an NPU int8.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            help=f"Tokens in the cache; of a model also what it is exported for. Default: {_CONTEXT} in the cache of "
            "an export for the model's own limit; for an NPU, whose cache is of fixed width, 1024 or the bundle's.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            help="A device file, or one that ships: raspberry-pi-5, snapdragon-8-elite-cpu, snapdragon-8-elite-npu, "
            "snapdragon-x-elite-npu, lunar-lake-npu (projections from public figures), epyc-zen4-2-threads (measured). "
            f"Default: {_DEVICE}.",
            show_default=False,
        ),
    ] = None,
    m: Annotated[
        int | None,
        typer.Option(
            "--m", help="Taps that the draft reads. Default: the bundle's draft's, else 1.", show_default=False
        ),
    ] = None,
    tau: Annotated[
        str,
        typer.Option(
            "--tau",
            help="Tokens a round, with commas: a number for every shape alike, or SHAPE=NUMBER (chain-4=1.8, "
            "tree-60=4.29), from which the other shapes' follow. Default: the bundle's or the packaged draft's, or the "
            "paper's.",
        ),
    ] = "",
    draft_vocab: Annotated[
        int | None,
        typer.Option(
            "--draft-vocab",
            help="Tokens that the draft can say. Default: the bundle's or the packaged draft's own, else 8192.",
            show_default=False,
        ),
    ] = None,
    measure: Annotated[
        Path | None,
        typer.Option(
            "--measure",
            help="Measure this machine, with MODEL's bundle, write the device file and plan with it.",
            show_default=False,
        ),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds",
            help="How long --measure takes, about, opening graphs counted; 5 to 3600. The least that it does, "
            "everything three times, takes half a minute to a minute on two cores.",
        ),
    ] = 60.0,
    threads: opt.Threads = 0,
    work: opt.Work = None,
    json: opt.Json = False,
) -> None:
    """Say whether a model will fit a device, how fast it will be with and without a draft, and what limits it.

    Needs no weights: a config.json is enough. Figures for devices that ship are projections; --measure makes a file for
    this machine.
    """
    from elsi_edge.cli import common
    from elsi_edge.cli.plan_model import find_model
    from elsi_edge.cli.plan_show import show
    from elsi_edge.errors import UsageError
    from elsi_edge.runtime.device import load_device
    from elsi_edge.runtime.plan_advice import advice
    from elsi_edge.runtime.plan_result import make_plan
    from elsi_edge.runtime.plan_tau import parse_taus

    planned = find_model(model, work)
    _check(planned.shape, context=context, m=m, draft_vocab=draft_vocab, seconds=seconds)
    if measure is not None and device is not None:
        raise UsageError(f"--measure plans with this machine, but --device is {device}; drop one of them")
    taus = parse_taus(tau or planned.tau)  # before anything is measured
    machine = load_device(device or _DEVICE) if measure is None else _measure(model, work, measure, seconds, threads)
    request, notes = _request(
        planned, machine, precision=precision, context=context, m=m, taus=taus, draft_vocab=draft_vocab
    )
    result = make_plan(request)
    tau_note = "given" if tau else planned.tau_note
    for note in (*planned.notes, *notes, *(machine.notes if measure is None else ())):
        common.note(f"note: {note}")
    if json:
        value = {"model": planned.name, **result.to_json(), "advice": advice(result), "tau_note": tau_note}
        value["notes"] = [*planned.notes, *notes]
        common.emit_json(value if measure is None else {**value, "device_file": str(measure)})
        return
    show(planned.name, result, tau_note)
    if measure is not None:
        common.out.print(f"Device: {measure}", soft_wrap=True)


def _request(
    planned: "Planned",
    device: "Device",
    *,
    precision: Precision | None,
    context: int | None,
    m: int | None,
    taus: "tuple[Tau, ...]",
    draft_vocab: int | None,
) -> "tuple[Request, list[str]]":
    """What is to be planned, by the options and by the bundle's own values; and what is to be said of it.

    Raises UsageError for a static bundle that cannot be.
    """
    from elsi_edge.artifacts import usual_draft_precision
    from elsi_edge.cli.plan_model import draft_of, planned_form, static_notes
    from elsi_edge.draft.shapes import tensor_shapes
    from elsi_edge.runtime.plan_result import Request
    from elsi_edge.runtime.plan_sizes import draft_sizes
    from elsi_edge.runtime.plan_static import DEFAULT_SLOTS

    shape = planned.shape
    chosen, form = planned_form(planned, device, precision)
    notes = [] if form is None else static_notes(planned, device, form, context)
    if form is None:
        # A bundle's tables are as it was exported; of a model they are as an export with this --context, or none.
        exported = planned.context or context or shape.context
        tokens = min(_CONTEXT, exported) if context is None else context
        if planned.context is not None and tokens > exported:
            notes.append(f"the bundle was exported for {exported:,} tokens; --context {tokens} takes another export")
            exported = tokens
    else:
        own = planned.context if planned.static is not None else context
        exported = tokens = own or min(DEFAULT_SLOTS, shape.context)
    taps = m or (1 if planned.draft is None else planned.draft.m)
    of_draft = usual_draft_precision(chosen, planned.draft) if form is None else chosen
    drafts = {}
    for count in sorted({*_COMPARED, taps}):
        config = draft_of(shape, count, draft_vocab, planned.draft)
        drafts[count] = draft_sizes(config, tensor_shapes(config), of_draft, exported, static=form is not None)
    request = Request(
        shape=shape,
        precision=chosen,
        context=tokens,
        device=device,
        drafts=drafts,
        m=taps,
        taus=taus,
        tokenizer=planned.tokenizer,
        positions=exported,
        static=form,
        draft_precision=of_draft,
    )
    return request, notes


def _check(shape: "ModelShape", *, context: int | None, m: int | None, draft_vocab: int | None, seconds: float) -> None:
    """Raise UsageError for a number out of range."""
    from elsi_edge.errors import UsageError

    if context is not None and not 16 <= context <= shape.context:
        raise UsageError(f"--context is {context}, it must be at least 16 and at most the model's {shape.context}")
    if m is not None and not 1 <= m <= _MOST_TAPS:
        raise UsageError(f"--m is {m}, it must be from 1 to {_MOST_TAPS}")
    if draft_vocab is not None and not 1 <= draft_vocab <= shape.vocab_size:
        raise UsageError(
            f"--draft-vocab is {draft_vocab}, it must be at least 1 and at most the model's {shape.vocab_size} tokens"
        )
    if not 5 <= seconds <= 3600:
        raise UsageError(f"--seconds is {seconds:g}, it must be from 5 to 3600")


def _measure(model: str, work: Path | None, path: Path, seconds: float, threads: int) -> "Device":
    from elsi_edge.builtin import NAME
    from elsi_edge.bundle import Bundle
    from elsi_edge.bundle_ref import find_bundle
    from elsi_edge.cli import common
    from elsi_edge.cli.progress import reaching
    from elsi_edge.errors import BundleError
    from elsi_edge.fsio import require_writable
    from elsi_edge.runtime.measure_device import DeviceSettings, measure_device
    from elsi_edge.runtime.options import SessionSettings

    require_writable(path)
    try:
        found = find_bundle(model, work)
    except BundleError as error:
        raise BundleError(
            f"--measure runs a bundle, and there is none of {model!r} here; give a bundle's directory, of any model: "
            f"its device file plans every other one. From scratch: elsi-edge export {NAME}"
        ) from error
    bundle: Bundle = Bundle.load(found.directory)
    settings = SessionSettings(threads=threads, tuning=False)
    with common.progress("measuring this machine", 1.0, "") as bar:
        how, done = DeviceSettings(seconds=seconds), reaching(bar)
        device = measure_device(bundle, settings, how, lambda text: common.note(f"{text} ..."), done)
    device.save(path)
    for note in device.notes:
        common.note(f"warning: {note}")
    return device
