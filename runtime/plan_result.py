"""What `elsi-edge plan` answers: sizes, memory, speed and the sentences that say what follows. Pure, no I/O."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from elsi_edge.artifacts import DRAFT_PRECISION, ModelShape, Precision, to_plain
from elsi_edge.errors import UsageError
from elsi_edge.runtime.device import Device, Kernels
from elsi_edge.runtime.plan import DRAFTINGS, Call, CostModel, Drafting, Round, Tau
from elsi_edge.runtime.plan_sizes import DraftSizes, Memory, memory_needed, other_bytes, target_bytes

_VERIFY_ROWS = (1, 2, 4, 8, 16, 32, 64)
_FOR_PROGRAM = 0.9  # of a device's memory; the rest is the system's
_LITTLE = 0.02  # of a bundle
_CONTEXT_STEP = 256  # tokens, when looking for a context that fits
_LEAST_CONTEXT = 512


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be planned."""

    shape: ModelShape
    precision: Precision
    context: int  # tokens in the cache
    device: Device
    drafts: Mapping[int, DraftSizes]  # by number of taps m
    m: int  # of the draft that is planned with
    taus: tuple[Tau, ...]
    tokenizer: int | None = None  # bytes of tokenizer.json where it is known


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """The answer."""

    request: Request
    kernels: Kernels
    sizes: Mapping[str, int]  # bytes of the bundle by component, with the draft of m taps
    memory: Memory
    past: int  # tokens in the cache where calls are predicted: half of the context, as it is on average
    calls: tuple[Call, ...]  # by rows
    free_rows: int
    rounds: tuple[Round, ...]

    @property
    def bundle_bytes(self) -> int:
        """Of all components."""
        return sum(self.sizes.values())

    @property
    def fits(self) -> bool:
        """Whether the peak leaves the system a tenth of the memory."""
        return self.memory.peak <= _FOR_PROGRAM * self.request.device.memory_bytes

    @property
    def plain_tokens_per_s(self) -> float:
        """Without a draft."""
        return 1e3 / self.calls[0].ms

    def best(self) -> Round | None:
        """The fastest shape at the first tau; None where no shape can bring it."""
        able = [round_ for round_ in self.rounds if round_.speeds and round_.speeds[0] is not None]
        return max(able, key=lambda round_: round_.speeds[0].tokens_per_s if round_.speeds[0] else 0.0, default=None)

    def to_json(self) -> dict[str, Any]:
        """Plain values; bytes, milliseconds, tokens a second."""
        request, drafts = self.request, self.request.drafts
        return {
            "shape": to_plain(request.shape),
            "precision": request.precision,
            "context": request.context,
            "m": request.m,
            "device": {
                "name": request.device.name,
                "kind": request.device.kind,
                "memory_bytes": request.device.memory_bytes,
                "kernels": self.kernels,
                "sources": to_plain(request.device.sources),
                "notes": list(request.device.notes),
            },
            "bundle_bytes": {**self.sizes, "together": self.bundle_bytes},
            "drafts": {str(m): {**draft.bytes, "together": draft.total} for m, draft in drafts.items()},
            "kv_bytes_per_1000_tokens": 1000 * request.shape.kv_bytes_per_token(),
            "draft_kv_bytes_per_1000_tokens": 1000 * drafts[request.m].kv_bytes_per_token,
            "memory_bytes": {**self.memory.parts, "peak": self.memory.peak},
            "fits": self.fits,
            "past": self.past,
            "calls": [{**to_plain(call), "ms": call.ms} for call in self.calls],
            "free_rows": self.free_rows,
            "plain_tokens_per_s": self.plain_tokens_per_s,
            "tau": [tau.name for tau in request.taus],
            "rounds": [
                {
                    "shape": round_.drafting.name,
                    "rows": round_.drafting.nodes + 1,
                    "verify_ms": round_.verify_ms,
                    "draft_ms": round_.draft_ms,
                    "break_even_tau": round_.break_even_tau,
                    "can_pay": round_.can_pay,
                    "speeds": to_plain(round_.speeds),
                }
                for round_ in self.rounds
            ],
            "advice": advice(self),
        }


def make_plan(request: Request) -> PlanResult:
    """Everything that follows from the request. Raises ConfigError for a precision the device was not measured at."""
    shape, precision, device = request.shape, request.precision, request.device
    kernels = device.best_kernels(precision)
    draft = request.drafts[request.m]
    target = target_bytes(shape, precision, request.context)
    sizes = {**target, **draft.bytes, **other_bytes(shape, precision, request.tokenizer)}
    model = CostModel(shape, device, precision, kernels, draft, DRAFT_PRECISION[precision])
    past = request.context // 2
    return PlanResult(
        request=request,
        kernels=kernels,
        sizes=sizes,
        memory=_memory(request, kernels, request.context),
        past=past,
        calls=tuple(model.call(rows, past) for rows in _VERIFY_ROWS),
        free_rows=model.free_rows(past),
        rounds=tuple(model.round(drafting, past, request.taus) for drafting in DRAFTINGS),
    )


def advice(plan: PlanResult) -> list[str]:
    """What limits the model here and what would change it, a sentence each."""
    return [
        *_room(plan),
        _limit(plan),
        *_drafting(plan),
        _taps(plan),
        *_large_parts(plan),
    ]


def _memory(request: Request, kernels: Kernels, context: int) -> Memory:
    weights = sum(target_bytes(request.shape, request.precision, request.context).values())
    draft, native = request.drafts[request.m], kernels == "native"
    return memory_needed(request.shape, request.precision, draft, context=context, native=native, weights=weights)


def _room(plan: PlanResult) -> list[str]:
    request = plan.request
    have, need = request.device.memory_bytes, plan.memory.peak
    if plan.fits:
        return [f"it fits: {_size(need)} at the peak of the device's {_size(have)}"]
    lines = [f"it does not fit: {_size(need)} at the peak, of {_size(have)} a tenth is left to the system"]
    room = _FOR_PROGRAM * have
    contexts = range(request.context, _LEAST_CONTEXT - 1, -_CONTEXT_STEP)
    context = next((tokens for tokens in contexts if _memory(request, plan.kernels, tokens).peak <= room), None)
    if context is not None:
        lines.append(f"with --context {context} it would fit")
    if request.precision != "int4":
        lines.append("with --precision int4 its matrices take 5 bits a weight")
    elif context is None:
        lines.append("no shorter context helps: choose a smaller model")
    return lines


def _limit(plan: PlanResult) -> str:
    call, request = plan.calls[0], plan.request
    rate = call.read_bytes / call.ms * 1e-6
    words = {
        "memory": f"limited by memory: {_size(call.read_bytes)} are read for a token, at {rate:.1f} GB/s; fewer bits a "
        "weight or a faster memory would change it",
        "compute": "limited by arithmetic even for one token: reading the weights explains less than three quarters of "
        "it; faster kernels would change it",
        "attention": "limited by attention over the cache: a shorter context would change it",
        "operators": "limited by the small operators between the products, which a small model is made of; fewer "
        "threads or fused kernels would change it",
    }
    text = f"one token takes {call.ms:.1f} ms after {plan.past} cached, {words[call.bound]}"
    if request.precision != "int4" and call.bound == "memory":
        faster = make_plan(replace(request, precision="int4")) if _knows(request.device, "int4") else None
        text += "" if faster is None else f" (int4: {faster.calls[0].ms:.1f} ms)"
    return text


def _knows(device: Device, precision: Precision) -> bool:
    return device.kind == "projection" or precision in device.curves


def _drafting(plan: PlanResult) -> list[str]:
    rows = "no further row is" if plan.free_rows == 1 else f"{plan.free_rows} rows are"
    lines = [f"{rows} verified at the price of one, give or take a tenth"]
    best = plan.best()
    if best is None or best.speeds[0] is None:
        return lines
    speed = best.speeds[0]
    gain = f"{speed.tokens_per_s:.1f} tokens/s, {speed.speedup:.2f} times plain"
    said = f"{best.drafting.name} at tau {speed.tau:.2f}: {gain}"
    if speed.speedup > 1.0:
        return [*lines, f"the best shape is {said}"]
    cheapest = min(plan.rounds, key=lambda round_: round_.break_even_tau)
    return [
        *lines,
        f"drafting does not pay here: the best, {said}; {cheapest.drafting.name} would need a tau above "
        f"{cheapest.break_even_tau:.2f}",
    ]


def _taps(plan: PlanResult) -> str:
    drafts = plan.request.drafts
    first, last = min(drafts), max(drafts)
    saved = drafts[last].total - drafts[first].total
    share = saved / plan.bundle_bytes
    verdict = f", little: {share:.1%} of the bundle" if share < _LITTLE else f", {share:.0%} of the bundle"
    of_draft = saved / drafts[last].total
    return f"m = {first} saves {_size(saved)} against m = {last}: {of_draft:.0%} of the draft{verdict}"


def _large_parts(plan: PlanResult) -> list[str]:
    lines, sizes, shape = [], plan.sizes, plan.request.shape
    if table := sizes["embedding table"]:
        why = (
            "its rows are no whole blocks, so it stays float32" if shape.tied_embeddings else "it is not the lm_head's"
        )
        lines.append(f"the embedding table is stored by itself, since {why}: {_size(table)}, {_share(table, plan)}")
    rotary = sizes["rotary tables"] + sizes["draft rotary tables"]
    if rotary > _LITTLE * plan.bundle_bytes:
        lines.append(
            f"tables of angles for {plan.request.context:,} positions take {_size(rotary)}, {_share(rotary, plan)}; a "
            "shorter --context saves them"
        )
    return lines


def _share(part: int, plan: PlanResult) -> str:
    return f"{part / plan.bundle_bytes:.0%} of the bundle"


def _size(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e3:.1f} kB"


def parse_taus(text: str) -> tuple[Tau, ...]:
    """--tau: numbers of every shape alike, and SHAPE=NUMBER from which other shapes follow. Raises UsageError."""
    found = []
    for part in text.split(","):
        shape, equals, number = part.strip().rpartition("=")
        try:
            tau = float(number)
        except ValueError as error:
            raise UsageError(
                f"--tau: {part.strip()!r} is neither a number nor SHAPE=NUMBER, such as 2.5 or chain-4=1.8"
            ) from error
        found.append(Tau(tau=tau, drafting=Drafting.parse(shape) if equals else None))
    return tuple(found)
