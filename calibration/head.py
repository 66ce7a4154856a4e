"""From the last hidden states to predictions, a bounded number of rows at a time; imports torch.

A model's own logits are [B, T, V]: 1.6 GB for 8,000 tokens of a vocabulary of 49,152. So its body runs alone, and its
forward method, the body replaced by a stand-in that hands over a few rows, makes the logits of those: head, scale,
soft-cap or whatever else it does come from its own code. That this gives the model's own logits is checked on real
tokens before use.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elsi_edge.errors import ModelError

if TYPE_CHECKING:
    import torch

LOGITS_ELEMENTS = 1 << 24  # held at a time: 64 MB in float32
_CACHED_ELEMENTS = 1 << 19  # logits turned into entropies at a time: 2 MB, so that they stay in the cache
_LEAST = -87.0  # log probabilities are cut here: e**-87 is float32's least normal number, and -inf * 0 no number
_CHECKED_TOKENS = 8
_NOT_CAUSAL = 0.02  # relative change of logits by a *later* token; rounding is far below, attention far above


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """What a model predicts at N positions."""

    entropy: "torch.Tensor"  # float32 [N], nats, of softmax(logits)
    argmax: "torch.Tensor"  # int64 [N], the first of equals


class Head:
    """The part of a model that follows its body."""

    def __init__(self, model: Any, body: Any, output: Any, rows: int) -> None:
        self._model, self._output = model, output  # an output of the body, whose states are replaced
        self.body = body
        self.rows = rows  # positions whose logits are made at a time

    def states(self, ids: "torch.Tensor") -> "torch.Tensor":
        """The body's output [B, T, E] for token ids [B, T]."""
        found: torch.Tensor = self.body(input_ids=ids, use_cache=False).last_hidden_state
        return found

    def logits(self, states: "torch.Tensor") -> "torch.Tensor":
        """The model's logits [N, V] for body outputs [N, E]; the caller bounds N."""
        import torch

        output = type(self._output)(**{**self._output, "last_hidden_state": states[None]})
        ids = torch.zeros((1, states.shape[0]), dtype=torch.long, device=states.device)  # not looked at
        with _replaced(self.body, output):
            found: torch.Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        return found

    def predict(self, states: "torch.Tensor") -> Predictions:
        """Predictions for body outputs [N, E], `rows` of them at a time."""
        import torch

        parts = [predictions(self.logits(part)) for part in torch.split(states, self.rows)]
        return _joined(parts)


def predictions(logits: "torch.Tensor") -> Predictions:
    """Entropy and argmax of logits [N, V] of any float type, summed in float32.

    With x = logits - max: H = log Z - sum(e^x x) / Z, Z = sum(e^x).
    """
    import torch

    parts = []
    for rows in torch.split(logits, max(1, _CACHED_ELEMENTS // logits.shape[-1])):
        argmax = rows.argmax(dim=-1, keepdim=True)
        x = (rows.float() - rows.gather(-1, argmax).float()).clamp_(min=_LEAST)  # shape: [n, V]
        e = x.exp()
        total = e.sum(dim=-1)
        entropy = total.log() - torch.linalg.vecdot(e, x) / total
        parts.append(Predictions(entropy=entropy, argmax=argmax[:, 0]))
    return _joined(parts)


def _joined(parts: Sequence[Predictions]) -> Predictions:
    import torch

    return Predictions(
        entropy=torch.cat([part.entropy for part in parts]), argmax=torch.cat([part.argmax for part in parts])
    )


def open_head(model: Any, ids: Sequence[int]) -> Head | None:
    """The head of `model`, checked on the first few of real token ids, or None where only whole logits are right.

    None says that the model's body is not apart, or that its forward method does something with positions that rows
    alone do not show. Raises ModelError for a model in which a token changes what was predicted before it.
    """
    import torch

    device = next(model.parameters()).device
    few = list(ids[:_CHECKED_TOKENS])
    probe, other = (
        torch.tensor([[*few, last]], device=device) for last in (few[0], few[0] + 1 if few[0] == 0 else few[0] - 1)
    )
    with torch.inference_mode():
        whole, body, output = _whole(model, probe)
        changed = model(input_ids=other, use_cache=False).logits[0]
        if _difference(changed[:-1], whole[:-1]) > _NOT_CAUSAL:
            raise ModelError(
                f"{type(model).__name__}: a later token changes earlier predictions; it is not a causal language model"
            )
        states = getattr(output, "last_hidden_state", None)
        if not isinstance(states, torch.Tensor) or states.shape[:2] != probe.shape or states.ndim != 3:
            return None
        head = Head(model, body, output, max(1, LOGITS_ELEMENTS // whole.shape[-1]))
        tolerance = 1e-4 if whole.dtype == torch.float32 and states.dtype == torch.float32 else 2**-6
        try:
            same = _difference(head.states(probe)[0], states[0]) <= tolerance and all(
                _difference(head.logits(states[0, part]), whole[part]) <= tolerance
                for part in (slice(None, 1), slice(1, None))  # apart, as later: rows must not know their places
            )
        except (TypeError, ValueError, AttributeError, IndexError, RuntimeError):  # its forward wants more of its body
            return None
        return head if same else None


def _whole(model: Any, ids: "torch.Tensor") -> tuple["torch.Tensor", Any, Any]:
    """The model's own logits [T, V] of one prompt, its body (None when it is not apart) and what the body gave."""
    get_decoder = getattr(model, "get_decoder", None)
    candidates = (getattr(model, "base_model", None), get_decoder() if callable(get_decoder) else None)
    bodies: list[Any] = [body for body in candidates if body is not None and body is not model]
    outputs: dict[int, Any] = {}
    hooks = [
        body.register_forward_hook(lambda module, args, output: outputs.update({id(module): output})) for body in bodies
    ]
    try:
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    body = next((body for body in bodies if id(body) in outputs), None)
    return logits, body, outputs.get(id(body))


def _difference(found: "torch.Tensor", wanted: "torch.Tensor") -> float:
    """|found - wanted| / |wanted|, Frobenius; infinite where the shapes or what is finite differ."""
    import torch

    finite = wanted.isfinite()  # masked entries of a vocabulary are -inf in both
    if found.shape != wanted.shape or not torch.equal(found.isfinite(), finite):
        return float("inf")
    gap = (found.float() - wanted.float())[finite].norm()
    return float(gap / wanted.float()[finite].norm().clamp_(min=1e-30))


@contextlib.contextmanager
def _replaced(body: Any, output: Any) -> Iterator[None]:
    """Let `body` answer every call with `output`."""
    own = vars(body).get("forward")
    body.forward = lambda *args, **kwargs: output
    try:
        yield
    finally:
        if own is None:
            del body.forward
        else:
            body.forward = own
