"""What `elsi-edge plan` answers: sizes, memory and speed; `plan_advice` says what follows. Pure, no I/O."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elsi_edge.artifacts import DRAFT_PRECISION, ModelShape, Precision, to_plain
from elsi_edge.bundle import StaticForm
from elsi_edge.runtime.device import Device, Kernels
from elsi_edge.runtime.plan import Call, CostModel, Round
from elsi_edge.runtime.plan_sizes import DraftSizes, Memory, memory_needed, other_bytes, target_bytes
from elsi_edge.runtime.plan_static import (
    StaticCostModel,
    computed_precision,
    static_draftings,
    static_graph_bytes,
    static_memory,
    static_target_bytes,
)
from elsi_edge.runtime.plan_tau import DRAFTINGS, Drafting, Tau

_VERIFY_ROWS = (1, 2, 4, 8, 16, 32, 64)
FOR_PROGRAM = 0.9  # of a device's memory; the rest is the system's


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be planned."""

    shape: ModelShape
    precision: Precision
    context: int  # tokens in the cache; of a static bundle the slots that it has
    device: Device
    drafts: Mapping[int, DraftSizes]  # by number of taps m
    m: int  # of the draft that is planned with
    taus: tuple[Tau, ...]
    tokenizer: int | None = None  # bytes of tokenizer.json where it is known
    positions: int | None = None  # tokens that the bundle is exported for, and its tables of angles; None = context
    static: StaticForm | None = None  # of graphs of fixed size, for NPUs
    draft_precision: Precision | None = None  # that `drafts` have; None = DRAFT_PRECISION of `precision`

    @property
    def exported(self) -> int:
        """Tokens that the bundle is exported for."""
        return self.context if self.positions is None else self.positions


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """The answer."""

    request: Request
    kernels: Kernels
    sizes: Mapping[str, int]  # bytes of the bundle by component, with the draft of m taps
    memory: Memory
    past: int  # tokens that calls attend to: half of the context, as it is on average, or a static cache's slots
    calls: tuple[Call, ...]  # by rows; of static graphs the one that there is
    free_rows: int
    rounds: tuple[Round, ...]

    @property
    def bundle_bytes(self) -> int:
        """Of all components."""
        return sum(self.sizes.values())

    @property
    def fits(self) -> bool:
        """Whether the peak leaves the system a tenth of the memory."""
        return self.memory.peak <= FOR_PROGRAM * self.request.device.memory_bytes

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
            "exported_for": request.exported,
            "static": to_plain(request.static),
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
        }


def make_plan(request: Request) -> PlanResult:
    """Everything that follows from the request. Raises ConfigError for a precision the device was not measured at."""
    shape, precision = request.shape, request.precision
    graphs = other_bytes(shape, precision, request.tokenizer)
    if request.static is not None:
        graphs["graphs"] = static_graph_bytes(shape, precision)
    model, past = _cost_model(request), request.context if request.static is not None else request.context // 2
    return PlanResult(
        request=request,
        kernels=model.kernels,
        sizes={**_target(request), **request.drafts[request.m].bytes, **graphs},
        memory=memory_at(request, request.context),
        past=past,
        calls=tuple(model.call(rows, past) for rows in _rows(request)),
        free_rows=model.free_rows(past),
        rounds=tuple(model.round(drafting, past, request.taus) for drafting in _draftings(request)),
    )


def memory_at(request: Request, context: int) -> Memory:
    """Bytes at the peak with so many tokens, or slots, in the cache."""
    weights, draft = sum(_target(request).values()), request.drafts[request.m]
    if request.static is not None:
        on_cpu = not request.device.static_only
        return static_memory(request.shape, draft, request.static, slots=context, weights=weights, on_cpu=on_cpu)
    native = request.device.best_kernels(request.precision) == "native"
    return memory_needed(request.shape, request.precision, draft, context=context, native=native, weights=weights)


def _cost_model(request: Request) -> CostModel:
    shape, device, precision = request.shape, request.device, request.precision
    draft = request.drafts[request.m]
    if request.static is None:
        of_draft = request.draft_precision or DRAFT_PRECISION[precision]
        return CostModel(shape, device, precision, device.best_kernels(precision), draft, of_draft)
    computed = computed_precision(device, precision, request.static)
    return StaticCostModel(shape, device, computed, request.static, request.context, draft)


def _target(request: Request) -> dict[str, int]:
    if request.static is not None:
        return static_target_bytes(request.shape, request.precision, request.context)
    return target_bytes(request.shape, request.precision, request.exported)


def _rows(request: Request) -> tuple[int, ...]:
    return _VERIFY_ROWS if request.static is None else (request.static.verify_rows,)


def _draftings(request: Request) -> tuple[Drafting, ...]:
    return DRAFTINGS if request.static is None else static_draftings(request.static, request.precision)
