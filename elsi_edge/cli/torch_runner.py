"""The source model under torch as the `BatchTargetRunner` of distillation, for a GPU: it fills that seam, so it may see
both the calibration's way into a model and the runtime's way of choosing a token."""

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from elsi_edge.artifacts import FINAL_NORM, AnswerRequest, BatchTargetRunner, TargetRecord, TargetStates
from elsi_edge.errors import UsageError
from elsi_edge.runtime.options import GenerateOptions
from elsi_edge.runtime.sampling import choose, is_greedy

if TYPE_CHECKING:
    import torch

    from elsi_edge.models import SourceModel


class TorchRunner:
    """Answers in batches with left padding, states by the hooks' places of calibration; one worker, on one device."""

    workers = 1

    def __init__(self, model: Any, source: "SourceModel", eos_ids: frozenset[int]) -> None:
        from elsi_edge.calibration.stack import find_stack

        self.fingerprint, self.shape = source.fingerprint, source.shape
        self._model, self._eos = model, eos_ids
        self._stack = find_stack(model)
        # Newer releases of transformers call it `cache` and warn about the other name.
        self._cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        weight = next(model.parameters())
        self._device, self._itemsize = weight.device, int(weight.element_size())
        self.arithmetic = f"torch-{str(weight.dtype).removeprefix('torch.')}"

    def answer(
        self, prompt_ids: Sequence[int], *, max_tokens: int, temperature: float, top_k: int, seed: int
    ) -> list[int]:
        """One answer, in a batch of its own."""
        request = AnswerRequest(
            key="", prompt_ids=tuple(prompt_ids), max_tokens=max_tokens, temperature=temperature, top_k=top_k, seed=seed
        )
        return next(self.answer_batch(iter([request]), batch=1, stop=lambda: False))[1]

    def answer_batch(
        self, requests: Iterator[AnswerRequest], *, batch: int, stop: Callable[[], bool]
    ) -> Iterator[tuple[AnswerRequest, list[int]]]:
        """Answers of `batch` prompts at a time; what has ended leaves once it is half of the batch."""
        while not stop():
            group = list(itertools.islice(requests, batch))
            if not group:
                return
            yield from self._group(group, stop)

    def states(self, token_ids: Sequence[int], taps: Sequence[int]) -> TargetStates:
        """States [M, T, E] at `taps` and logits [T, V]."""
        states, logits = self._teacher_forced(token_ids, taps, len(token_ids))
        return TargetStates(states=states, logits=logits.cpu().numpy())

    def record(
        self, token_ids: Sequence[int], taps: Sequence[int], *, prompt_tokens: int, keep_top: int
    ) -> TargetRecord:
        """States, and the largest logits of the rows that predict the answer; the others stay on the device."""
        import torch

        states, logits = self._teacher_forced(token_ids, taps, len(token_ids) - prompt_tokens + 1)
        top, ids = torch.topk(logits[:-1], min(keep_top, logits.shape[1]), dim=-1)
        return TargetRecord(
            states=states,
            top_ids=ids.to(torch.int32).cpu().numpy(),
            top_logits=top.cpu().numpy(),
            log_sum_exp=torch.logsumexp(logits[:-1], dim=-1).cpu().numpy(),
        )

    def memory_needed(self, *, batch: int, tokens: int) -> int:
        """Bytes of caches and logits in this machine's memory: none when they lie on another device."""
        if self._device.type != "cpu":
            return 0
        cache = batch * tokens * self.shape.kv_bytes_per_token() * self._itemsize // 4
        return cache + (batch + tokens) * self.shape.vocab_size * 4

    def _group(
        self, group: Sequence[AnswerRequest], stop: Callable[[], bool]
    ) -> Iterator[tuple[AnswerRequest, list[int]]]:
        import torch

        longest = max(len(request.prompt_ids) for request in group)
        padded = [
            [request.prompt_ids[0]] * (longest - len(request.prompt_ids)) + list(request.prompt_ids)
            for request in group
        ]
        mask = torch.tensor([[int(k >= longest - len(r.prompt_ids)) for k in range(longest)] for r in group])
        inputs, mask = torch.tensor(padded, device=self._device), mask.to(self._device)
        live = list(range(len(group)))  # of the group, by row of the batch
        answers: list[list[int]] = [[] for _ in group]
        ended: set[int] = set()
        cache = self._new_cache()
        while not stop():
            logits = self._forward(inputs, mask, cache)
            tokens = self._choose(logits, [group[k] for k in live], [len(answers[k]) for k in live])
            for k, token in zip(live, tokens, strict=True):
                if k not in ended:
                    answers[k].append(token)
                    if token in self._eos or len(answers[k]) >= self._limit(group[k]):
                        ended.add(k)
                        yield group[k], answers[k]
            if len(ended) == len(group):
                return
            rows = [row for row, k in enumerate(live) if k not in ended]
            if 2 * len(rows) <= len(live):
                index = torch.tensor(rows, device=self._device)
                cache.batch_select_indices(index)
                mask, live, tokens = mask[index], [live[row] for row in rows], [tokens[row] for row in rows]
            inputs = torch.tensor(tokens, device=self._device)[:, None]
            mask = torch.cat([mask, mask.new_ones(len(live), 1)], dim=1)

    def _limit(self, request: AnswerRequest) -> int:
        return min(request.max_tokens, self.shape.context - len(request.prompt_ids))

    def _new_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self._model.config)

    def _forward(self, inputs: "torch.Tensor", mask: "torch.Tensor", cache: Any) -> "torch.Tensor":
        """Logits [B, V] float32 of the last position; the tokens go into the cache."""
        import torch

        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -inputs.shape[1] :]  # padding does not count
        with torch.inference_mode():
            result = self._model(
                input_ids=inputs,
                attention_mask=mask,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=1,
                **{self._cache_name: cache},
            )
        logits: torch.Tensor = result.logits[:, -1].float()
        return logits

    def _choose(self, logits: "torch.Tensor", requests: Sequence[AnswerRequest], places: Sequence[int]) -> list[int]:
        """The next token of each row; of sampled ones only what can be drawn leaves the device."""
        import torch

        best = logits.argmax(dim=-1).tolist()
        kept = max((request.top_k or logits.shape[1] for request in requests if request.temperature > 0), default=0)
        if not kept:
            return [int(token) for token in best]
        top = torch.topk(logits, min(kept, logits.shape[1]), dim=-1)
        values, ids = top.values.cpu().numpy(), top.indices.cpu().numpy()
        chosen = []
        for row, (request, place) in enumerate(zip(requests, places, strict=True)):
            options = GenerateOptions(
                temperature=request.temperature, top_k=request.top_k, max_tokens=request.max_tokens
            )
            if is_greedy(options):
                chosen.append(int(best[row]))
                continue
            order = np.argsort(ids[row])  # `choose` breaks ties by place
            drawn = choose(values[row][order], options, seed=request.seed, index=place)
            chosen.append(int(ids[row][order][drawn]))
        return chosen

    def _teacher_forced(
        self, token_ids: Sequence[int], taps: Sequence[int], keep: int
    ) -> "tuple[NDArray[np.float32], torch.Tensor]":
        """States [M, T, E] and, on the device, the last `keep` rows of logits, float32."""
        import torch

        found: dict[int, NDArray[np.float32]] = {}
        with torch.inference_mode(), self._hooks(found, set(taps)):
            ids = torch.tensor([list(token_ids)], device=self._device)
            logits = self._model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits[0].float()
        return np.stack([found[tap] for tap in taps]), logits

    @contextlib.contextmanager
    def _hooks(self, found: dict[int, NDArray[np.float32]], taps: set[int]) -> Iterator[None]:
        """What enters each block under its number, what enters the final norm under L, its output under FINAL_NORM."""

        def keep(tap: int, hidden: Any) -> None:
            found[tap] = hidden[0].float().cpu().numpy().copy()  # a block may go on in place

        def before(tap: int) -> Callable[..., None]:
            return lambda module, args, kwargs: keep(tap, args[0] if args else kwargs["hidden_states"])

        places = (*self._stack.blocks, self._stack.final_norm)
        handles = [
            module.register_forward_pre_hook(before(tap), with_kwargs=True)
            for tap, module in enumerate(places)
            if tap in taps
        ]
        if FINAL_NORM in taps:
            handles.append(
                self._stack.final_norm.register_forward_hook(lambda module, args, out: keep(FINAL_NORM, out))
            )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def open_torch_runner(
    source: "SourceModel", eos_ids: frozenset[int], *, device: str, threads: int
) -> BatchTargetRunner:
    """Load a model on a device, in the precision that its files have. Raises ModelError, UsageError."""
    import torch

    from elsi_edge.calibration.capture import load_target

    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"--device {device!r} is not a device such as cpu, cuda or cuda:1") from error
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"--device {device}: this torch sees {torch.cuda.device_count()} CUDA devices; use cpu")
    if place.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {device}: cpu and cuda are supported")
    if threads:
        torch.set_num_threads(threads)
    return TorchRunner(load_target(source.directory, device=device), source, eos_ids)
