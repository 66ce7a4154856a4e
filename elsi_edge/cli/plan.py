"""`elsi-edge plan`: will a model fit a device, how fast, and what limits it; before anything is downloaded."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elsi_edge.artifacts import Precision
from elsi_edge.cli import options as opt

if TYPE_CHECKING:
    from elsi_edge.runtime.device import Device
    from elsi_edge.runtime.plan_result import PlanResult

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
        typer.Option("--precision", help="Of the bundle. Default: the bundle's own, else int4.", show_default=False),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option("--context", help=f"Tokens in the cache. Default: {_CONTEXT} or the model's.", show_default=False),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            "--device",
            help="A device file, or one that ships: raspberry-pi-5, snapdragon-8-elite-cpu, snapdragon-8-elite-npu, "
            "snapdragon-x-elite-npu, lunar-lake-npu (projections from public figures), epyc-zen4-2-threads (measured).",
        ),
    ] = _DEVICE,
    m: Annotated[int, typer.Option("--m", help="Taps that the draft reads.")] = 1,
    tau: Annotated[
        str,
        typer.Option(
            "--tau",
            help="Tokens a round, with commas: a number for every shape alike, or SHAPE=NUMBER (chain-4=1.8, "
            "tree-60=4.29), from which the other shapes' follow. Default: the paper's or the packaged draft's.",
        ),
    ] = "",
    draft_vocab: Annotated[int, typer.Option("--draft-vocab", help="Tokens that the draft can say.")] = 8192,
    measure: Annotated[
        Path | None,
        typer.Option(
            "--measure",
            help="Measure this machine, with MODEL's bundle, write the device file and plan with it.",
            show_default=False,
        ),
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", help="How long to measure, about; 5 to 3600.")] = 60.0,
    threads: opt.Threads = 0,
    work: opt.Work = None,
    json: opt.Json = False,
) -> None:
    """Say whether a model will fit a device, how fast it will be with and without a draft, and what limits it.

    Needs no weights: a config.json is enough. Figures for devices that ship are projections; --measure makes a file for
    this machine.
    """
    from elsi_edge.cli import common
    from elsi_edge.cli.plan_model import draft_of, find_model
    from elsi_edge.draft.shapes import tensor_shapes
    from elsi_edge.runtime.device import load_device
    from elsi_edge.runtime.plan_result import Request, make_plan, parse_taus
    from elsi_edge.runtime.plan_sizes import draft_sizes

    planned = find_model(model, work)
    shape = planned.shape
    chosen: Precision = precision or planned.precision or "int4"
    tokens = _checked(context, m, draft_vocab, seconds, shape.context)
    taus = parse_taus(tau or planned.tau)
    machine = load_device(device) if measure is None else _measure(model, work, measure, seconds, threads)
    counts = sorted({*_COMPARED, m})
    drafts = {}
    for count in counts:
        config = draft_of(shape, count, draft_vocab, planned.draft)
        drafts[count] = draft_sizes(config, tensor_shapes(config), _draft_precision(chosen), tokens)
    result = make_plan(
        Request(
            shape=shape,
            precision=chosen,
            context=tokens,
            device=machine,
            drafts=drafts,
            m=m,
            taus=taus,
            tokenizer=planned.tokenizer,
        )
    )
    tau_note = "given" if tau else planned.tau_note
    if json:
        value = {"model": planned.name, **result.to_json(), "tau_note": tau_note, "notes": list(planned.notes)}
        common.emit_json(value if measure is None else {**value, "device_file": str(measure)})
        return
    for note in planned.notes:
        common.note(f"note: {note}")
    _show(planned.name, result, tau_note)
    if measure is not None:
        common.out.print(f"Device: {measure}", soft_wrap=True)


def _draft_precision(precision: Precision) -> Precision:
    from elsi_edge.artifacts import DRAFT_PRECISION

    return DRAFT_PRECISION[precision]


def _checked(context: int | None, m: int, draft_vocab: int, seconds: float, limit: int) -> int:
    """Tokens of the context. Raises UsageError for what is out of range."""
    from elsi_edge.errors import UsageError

    if context is not None and not 16 <= context <= limit:
        raise UsageError(f"--context is {context}, it must be at least 16 and at most the model's {limit}")
    if not 1 <= m <= _MOST_TAPS:
        raise UsageError(f"--m is {m}, it must be from 1 to {_MOST_TAPS}")
    if draft_vocab < 1:
        raise UsageError(f"--draft-vocab is {draft_vocab}, it must be at least 1")
    if not 5 <= seconds <= 3600:
        raise UsageError(f"--seconds is {seconds:g}, it must be from 5 to 3600")
    return min(_CONTEXT, limit) if context is None else context


def _measure(model: str, work: Path | None, path: Path, seconds: float, threads: int) -> "Device":
    from elsi_edge.bundle import Bundle
    from elsi_edge.bundle_ref import find_bundle
    from elsi_edge.cli import common
    from elsi_edge.fsio import require_writable
    from elsi_edge.runtime.measure_device import DeviceSettings, measure_device
    from elsi_edge.runtime.options import SessionSettings

    require_writable(path)
    bundle: Bundle = Bundle.load(find_bundle(model, work).directory)
    settings = SessionSettings(threads=threads, tuning=False)
    device = measure_device(bundle, settings, DeviceSettings(seconds=seconds), lambda text: common.note(f"{text} ..."))
    device.save(path)
    return device


def _show(name: str, plan: "PlanResult", tau_note: str) -> None:
    from elsi_edge.cli import common
    from elsi_edge.runtime.plan_result import advice

    request, device = plan.request, plan.request.device
    kind = "projection from public figures" if device.kind == "projection" else f"measured, {plan.kernels} kernels"
    common.out.print(f"{name} at {request.precision} on {device.name} ({kind})", soft_wrap=True)
    common.out.print(_sizes(plan))
    common.out.print(_memory(plan))
    common.out.print(_calls(plan))
    common.out.print(
        f"plain: {plan.plain_tokens_per_s:.1f} tokens/s after {plan.past} tokens; drafting with m = {request.m}:"
    )
    common.out.print(_rounds(plan))
    common.out.print(f"tau: {tau_note}", soft_wrap=True)
    for line in advice(plan):
        common.out.print(f"- {line}", soft_wrap=True)
    for note in device.notes:
        common.note(f"note: {note}")


def _table(*columns: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    return table


def _sizes(plan: "PlanResult") -> Any:
    """The bundle by component, with drafts of several numbers of taps side by side."""
    from elsi_edge.cli.common import size_text

    drafts = plan.request.drafts
    table = _table("bundle", *(f"m = {m}" for m in drafts))
    ours = drafts[plan.request.m].bytes
    for part, size in plan.sizes.items():
        if size:
            cells = [draft.bytes[part] if part in ours else size for draft in drafts.values()]
            table.add_row(part, *map(size_text, cells))
    rest = plan.bundle_bytes - drafts[plan.request.m].total
    table.add_section()
    table.add_row("together", *(size_text(rest + draft.total) for draft in drafts.values()))
    return table


def _memory(plan: "PlanResult") -> Any:
    from elsi_edge.cli.common import size_text

    request = plan.request
    table = _table(f"memory at {request.context} tokens", "")
    for part, size in plan.memory.parts.items():
        table.add_row(part, size_text(size))
    table.add_section()
    table.add_row("peak, about", size_text(plan.memory.peak))
    each = size_text(1000 * request.shape.kv_bytes_per_token())
    table.add_row("keys and values of 1,000 tokens", each)
    return table


def _calls(plan: "PlanResult") -> Any:
    from elsi_edge.cli.common import size_text

    table = _table("rows", "ms", "times one", "products", "attention", "operators", "read", "Gop", "limited by")
    one = plan.calls[0].ms
    for call in plan.calls:
        parts = (call.matrices_ms, call.attention_ms, call.operators_ms)
        table.add_row(
            *(str(call.rows), f"{call.ms:.1f}", f"{call.ms / one:.2f}", *(f"{part:.1f}" for part in parts)),
            *(size_text(call.read_bytes), f"{call.operations / 1e9:.1f}", call.bound),
        )
    return table


def _rounds(plan: "PlanResult") -> Any:
    taus = [tau.name for tau in plan.request.taus]
    columns = [text for name in taus for text in (f"tau ({name})", "tokens/s", "times")]
    table = _table("shape", "verify ms", "draft ms", "break-even tau", *columns)
    for round_ in plan.rounds:
        cells = []
        for speed in round_.speeds:
            found = () if speed is None else (speed.tau, speed.tokens_per_s, speed.speedup)
            cells += [f"{value:.2f}" for value in found] or ["-"] * 3
        least = f"{round_.break_even_tau:.2f}" if round_.can_pay else f"{round_.break_even_tau:.2f} (never)"
        table.add_row(round_.drafting.name, f"{round_.verify_ms:.1f}", f"{round_.draft_ms:.1f}", least, *cells)
    return table
