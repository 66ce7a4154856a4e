"""A plan on a terminal: tables of bytes and milliseconds, then sentences."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elsi_edge.runtime.plan_result import PlanResult, Request


def show(name: str, plan: "PlanResult", tau_note: str) -> None:
    """Print a plan; `tau_note` says where tau comes from."""
    from elsi_edge.cli import common
    from elsi_edge.runtime.plan_advice import advice

    request, device = plan.request, plan.request.device
    kind = "projection from public figures" if device.kind == "projection" else f"measured, {plan.kernels} kernels"
    common.out.print(f"{name} at {request.precision} on {device.name} ({kind})", soft_wrap=True)
    common.out.print(_form(request), soft_wrap=True)
    common.out.print(_sizes(plan))
    common.out.print(_memory(plan))
    common.out.print(_calls(plan))
    static = request.static is not None
    when = "whatever is cached" if static else f"after {plan.past:,} tokens, half of the cache"
    drafted = f"drafting with m = {request.m} and no n-grams:" if plan.rounds else "no row is left to draft for"
    common.out.print(f"plain: {plan.plain_tokens_per_s:.1f} tokens/s {when}; {drafted}")
    if plan.rounds:
        common.out.print(_rounds(plan))
        common.out.print(f"tau: {tau_note}", soft_wrap=True)
    for line in advice(plan):
        common.out.print(f"- {line}", soft_wrap=True)


def _form(request: "Request") -> str:
    """The bundle's form: dynamic graphs for some context, or static ones."""
    form = request.static
    if form is None:
        return f"as an export for {request.exported:,} tokens, with {request.context:,} in the cache"
    return (
        f"static, as export --for npu writes it: a cache of {request.context:,} slots, {form.prefill_rows} rows of a "
        f"prompt a call, {form.verify_rows} rows a verification"
    )


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
    table = _table(f"memory at {request.context} {'tokens' if request.static is None else 'slots'}", "")
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
        rows = str(call.rows) if plan.request.static is None else f"1 to {call.rows}"
        table.add_row(
            *(rows, f"{call.ms:.1f}", f"{call.ms / one:.2f}", *(f"{part:.1f}" for part in parts)),
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
