"""The sentences under a plan: what limits the model here, and what would change it. Pure, no I/O."""

from dataclasses import replace

from elsi_edge.artifacts import BITS, Precision
from elsi_edge.runtime.plan import Call, Round, Speed
from elsi_edge.runtime.plan_result import FOR_PROGRAM, PlanResult, Request, make_plan, memory_at
from elsi_edge.runtime.plan_static import STATIC_PRECISIONS, default_form

_LITTLE = 0.02  # of a bundle
_CONTEXT_STEP = 256  # tokens, when looking for a context that fits
_LEAST_CONTEXT = 512
_EVERY = 1e-9  # tokens below the most that a shape can bring, within which every guess is right


def advice(plan: PlanResult) -> list[str]:
    """What limits the model here and what would change it, a sentence each."""
    return [
        *_room(plan),
        _limit(plan),
        *_drafting(plan),
        _taps(plan),
        *_large_parts(plan),
    ]


def _room(plan: PlanResult) -> list[str]:
    request = plan.request
    have, need = request.device.memory_bytes, plan.memory.peak
    if plan.fits:
        return [f"it fits: {_size(need)} at the peak of the device's {_size(have)}"]
    lines = [f"it does not fit: {_size(need)} at the peak, of {_size(have)} a tenth is left to the system"]
    room = FOR_PROGRAM * have
    contexts = range(request.context, _LEAST_CONTEXT - 1, -_CONTEXT_STEP)
    context = next((tokens for tokens in contexts if memory_at(request, tokens).peak <= room), None)
    if context is not None:
        lines.append(f"with --context {context} it would fit")
    fewest: Precision = "int4" if request.static is None else "int8"
    if BITS[request.precision] > BITS[fewest]:
        lines.append(f"with --precision {fewest} its matrices take {'5' if fewest == 'int4' else '8'} bits a weight")
    elif context is None:
        lines.append("no shorter context helps: choose a smaller model")
    return lines


def _limit(plan: PlanResult) -> str:
    """The parts of a plain step in milliseconds, the largest by name, and what would make that one smaller."""
    call, static = plan.calls[0], plan.request.static
    parts = {"products": call.matrices_ms, "attention": call.attention_ms, "operators": call.operators_ms}
    largest = max(parts, key=lambda part: parts[part])
    listed = ", ".join(f"{part} {ms:.1f}" for part, ms in parts.items())
    when = f"after {plan.past:,} cached"
    if static is not None:
        when = f"whatever is cached, since every call attends to all {plan.past:,} slots"
    return (
        f"one token takes {call.ms:.1f} ms {when}: {listed} ms; the largest part ({parts[largest] / call.ms:.0%}) is "
        f"{_remedy(plan, call)}"
    )


def _remedy(plan: PlanResult, call: Call) -> str:
    """The largest part, why it is, and what would make it smaller."""
    device, static = plan.request.device, plan.request.static
    if call.bound == "attention":
        return (
            f"attention over {'all slots of ' if static is not None else ''}the cache: a shorter --context would help"
        )
    if call.bound == "operators":
        small = "the small operators between the products"
        if device.static_only:
            return f"{small}; how many of them the NPU's compiler leaves is assumed"
        threads = "fewer threads or " if device.threads > 1 else ""
        return f"{small}, which a small model is made of: {threads}fused ones would help"
    faster = _fewer_bits(plan)
    bits = "" if faster is None else f"fewer bits a weight ({faster[0]}: {faster[1]:.1f} ms) or "
    if call.bound == "memory":
        weights = _size(_weights(call, plan))
        return f"the products, held up by reading {weights} of weights: {bits}a faster memory would help"
    rows = "" if static is None else f" for the {static.verify_rows} rows that every call has"
    return (
        f"the products, held up by arithmetic{rows}, since reading the weights explains less than three quarters of "
        f"it: {bits}faster kernels would help"
    )


def _weights(call: Call, plan: PlanResult) -> int:
    """Bytes of weights that a call reads."""
    return call.read_bytes - plan.past * plan.request.shape.kv_bytes_per_token()


def _fewer_bits(plan: PlanResult) -> tuple[Precision, float] | None:
    """The precision of fewer bits at which a plain step is fastest, and its milliseconds; None where none is faster."""
    found: dict[Precision, float] = {}
    for precision in _narrower(plan.request):
        static = plan.request.static
        if static is not None:
            static = replace(static, activation_bits=default_form(precision).activation_bits)
        found[precision] = make_plan(replace(plan.request, precision=precision, static=static)).calls[0].ms
    best = min(found, key=lambda precision: found[precision], default=None)
    return None if best is None or found[best] >= plan.calls[0].ms else (best, found[best])


def _narrower(request: Request) -> list[Precision]:
    """Precisions of fewer bits that there are for such a bundle and that the device knows."""
    all_: tuple[Precision, ...] = ("int8", "int4") if request.static is None else STATIC_PRECISIONS
    device = request.device
    known = [name for name in all_ if device.kind == "projection" or name in device.curves]
    return [name for name in known if BITS[name] < BITS[request.precision]]


def _drafting(plan: PlanResult) -> list[str]:
    static = plan.request.static
    if static is not None:
        lines = [
            f"a call costs the same for 1 to {static.verify_rows} rows, which its graph has, and a plain step takes it "
            "too: verifying is free, drafting is not"
        ]
    else:
        rows = "no further row is" if plan.free_rows == 1 else f"{plan.free_rows} rows are"
        lines = [f"{rows} verified at the price of one, give or take a tenth"]
    best = plan.best()
    if best is None or best.speeds[0] is None:
        return lines
    speed = best.speeds[0]
    gain = f"{speed.tokens_per_s:.1f} tokens/s, {speed.speedup:.2f} times plain{_every_guess(best, speed)}"
    where = "without n-grams" if static is not None else f"with {plan.past:,} tokens cached and no n-grams"
    said = f"{best.drafting.name} at tau {speed.tau:.2f}: {gain}"
    if speed.speedup > 1.0:
        return [*lines, f"the best shape {where} is {said}"]
    cheapest = min(plan.rounds, key=lambda round_: round_.break_even_tau)
    return [
        *lines,
        f"drafting does not pay here {where}: the best is {said}; {cheapest.drafting.name} would need a tau above "
        f"{cheapest.break_even_tau:.2f}{_tuning(plan)}",
    ]


def _tuning(plan: PlanResult) -> str:
    """Why `tune` may say otherwise; a static bundle has nothing to tune."""
    if plan.request.static is not None:
        return ""
    return ". `tune` counts n-grams too, and measures shorter texts, where it may pay"


def _every_guess(best: Round, speed: Speed) -> str:
    if speed.tau < best.drafting.most - _EVERY:
        return ""
    return (
        f"; that takes every guess for right, since {best.drafting.words} gives at most {best.drafting.most} tokens a "
        "verification"
    )


def _taps(plan: PlanResult) -> str:
    drafts = plan.request.drafts
    first, last = min(drafts), max(drafts)
    saved = drafts[last].total - drafts[first].total
    share = saved / plan.bundle_bytes
    verdict = f", little: {share:.1%} of the bundle" if share < _LITTLE else f", {share:.0%} of the bundle"
    of_draft = saved / drafts[last].total
    return f"m = {first} saves {_size(saved)} against m = {last}: {of_draft:.0%} of the draft{verdict}"


def _large_parts(plan: PlanResult) -> list[str]:
    lines, sizes, request = [], plan.sizes, plan.request
    if table := sizes["embedding table"]:
        tied = request.shape.tied_embeddings
        why = "its rows are no whole blocks, so it stays float32" if tied else "it is not the lm_head's"
        lines.append(f"the embedding table is stored by itself, since {why}: {_size(table)}, {_share(table, plan)}")
    own, draft = sizes["rotary tables"], sizes["draft rotary tables"]
    if own + draft <= _LITTLE * plan.bundle_bytes:
        return lines
    lines.append(
        f"tables of angles for {request.exported:,} positions take {_size(own + draft)}, {_share(own + draft, plan)}; "
        "a shorter --context saves them"
    )
    return lines


def _share(part: int, plan: PlanResult) -> str:
    return f"{part / plan.bundle_bytes:.0%} of the bundle"


def _size(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e3:.1f} kB"
