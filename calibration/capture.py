"""Hidden states of a target, one teacher-forced pass over prompts. Of calibration, the entrance to all that is torch.

Tap t is the residual stream entering block t, tap L what leaves the last block before the final norm. Both are read
by forward pre-hooks, on the blocks and on the final norm: Hugging Face's own `hidden_states` ends *after* the norm.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from elsi_edge.calibration import head as heads
from elsi_edge.calibration.stack import Stack, find_stack, refuse_unsupported
from elsi_edge.errors import DataError, MissingExtraError, ModelError
from elsi_edge.torch_model import load_causal_lm, load_config
from elsi_edge.weights import list_tensors

if TYPE_CHECKING:
    import torch

__all__ = [
    "Opened",
    "PromptStates",
    "Stack",
    "capture",
    "find_stack",
    "load_target",
    "open_model",
    "plan_batches",
    "torch_threads",
]

# safetensors' name to torch's. float16 is read as float32: Gemma's states pass 65,504, its largest number.
_READ_AS = {"BF16": "bfloat16", "F32": "float32", "F16": "float32", "F64": "float32"}


@dataclass(frozen=True, kw_only=True)
class PromptStates:
    """Everything read from one prompt."""

    index: int  # of the prompt, in the order given
    states: NDArray[np.float32]  # [taps, T, E], taps 0..L
    final_norm: NDArray[np.float32]  # [T, E], tap L after the final norm
    entropy: NDArray[np.float32]  # [T], nats, of the prediction made at each position
    argmax: NDArray[np.int64]  # [T], the token predicted at each position


def load_target(directory: Path, *, device: str = "cpu") -> "torch.nn.Module":
    """Load a causal language model for reading states, in the precision that most of its weights are stored in.

    bfloat16 and float32 weights are mapped from their files, not copied. float16 becomes float32, at twice the size:
    some models' states pass 65,504. Raises MissingExtraError, ModelError.
    """
    config = load_config(directory, feature="calibrate")
    refuse_unsupported(config)
    model: torch.nn.Module = load_causal_lm(directory, feature="calibrate", dtype=_precision(directory))
    if getattr(model, "_is_stateful", False):
        raise ModelError(f"{config.model_type} keeps a recurrent state; recurrent and hybrid models are not supported")
    return model.to(device)


def _precision(directory: Path) -> "torch.dtype | None":
    """By bytes in the files, since configurations spell it in several ways or not at all; None where it is neither."""
    import torch

    sizes: Counter[str] = Counter()
    for ref in list_tensors(directory).values():
        if ref.dtype in _READ_AS:
            sizes[ref.dtype] += ref.stop - ref.start
    if not sizes:
        return None
    found: torch.dtype = getattr(torch, _READ_AS[sizes.most_common(1)[0][0]])
    return found


@contextlib.contextmanager
def torch_threads(threads: int | None) -> Iterator[None]:
    """Run torch on so many threads, or on its default for None; the former number comes back afterwards."""
    if threads is None:
        yield
        return
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError("calibrate", extra="build", module="torch") from error
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def plan_batches(lengths: Sequence[int], *, tokens: int) -> list[list[int]]:
    """Indices of prompts in batches of similar length whose padded size stays under `tokens` (or holds one prompt)."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * lengths[index] <= tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A model whose blocks and output head were found, which takes several forward passes: once for all passes."""

    model: "torch.nn.Module"
    stack: Stack
    head: heads.Head | None  # None where only whole logits are right


def open_model(model: "torch.nn.Module", prompts: Sequence[Sequence[int]], *, blocks: int | None = None) -> Opened:
    """Find a model's blocks and check its output head on a few tokens of the longest of `prompts`.

    Raises ModelError for a model without a recognisable stack, with another number of blocks than `blocks`, its
    configuration's, or that is not causal.
    """
    stack = find_stack(model)
    if blocks is not None and len(stack.blocks) != blocks:
        raise ModelError(
            f"{type(model).__name__}: {len(stack.blocks)} decoder blocks are called, its configuration says {blocks}"
        )
    return Opened(model=model, stack=stack, head=heads.open_head(model, max(prompts, key=len)))


def capture(
    target: "torch.nn.Module | Opened",
    prompts: Sequence[Sequence[int]],
    *,
    blocks: int | None = None,
    batch_tokens: int = 1024,
    batches: Sequence[Sequence[int]] | None = None,
) -> Iterator[PromptStates]:
    """Yield states and predictions of each prompt, shortest prompts first, or as `batches` of indices say.

    prompts: token ids of each. Prompts of similar length share a batch of at most `batch_tokens` positions; they are
    padded on the right, where causal attention cannot see it, so batching changes results by rounding alone. Beside
    the model's own forward pass, memory goes to the states of one batch, float32 [taps, positions, E], and to the
    logits of a few hundred positions.
    Raises DataError for a prompt without tokens, ModelError as `open_model` does.
    """
    import torch

    for index, ids in enumerate(prompts):
        if not len(ids):
            raise DataError(f"prompt {index + 1} of {len(prompts)} has no tokens; remove it")
    if not prompts:
        return
    opened = target if isinstance(target, Opened) else open_model(target, prompts, blocks=blocks)
    model, stack, head = opened.model, opened.stack, opened.head
    limit = batch_tokens
    if head is None:  # whole logits are made, so that fewer positions go at a time
        vocab = int(model.get_output_embeddings().weight.shape[0])  # type: ignore[operator]
        limit = min(limit, max(1, heads.LOGITS_ELEMENTS // vocab))
    device = next(model.parameters()).device
    planned = batches if batches is not None else [range(len(prompts))]
    for indices in _fitting(planned, prompts, limit if batches is None or head is None else None):
        batch = _Batch([prompts[i] for i in indices], taps=len(stack.blocks) + 1)
        # Left before anything is yielded: what the caller does between prompts is neither hooked nor in this mode.
        with torch.inference_mode(), _hooks(stack, batch):
            found = _predict(model, head, torch.from_numpy(batch.ids).to(device), batch.lengths)
        for index, each in zip(indices, found, strict=True):
            yield PromptStates(  # handed over, not kept: it is gone with the caller's last use of it
                index=index,
                states=batch.states.pop(0),
                final_norm=batch.final_norm.pop(0),
                entropy=each.entropy.cpu().numpy(),
                argmax=each.argmax.cpu().numpy(),
            )


def _fitting(
    batches: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]], limit: int | None
) -> Iterator[list[int]]:
    """The batches, cut up where they pass `limit` padded positions."""
    for batch in batches:
        if limit is None:
            yield list(batch)
        else:
            for part in plan_batches([len(prompts[i]) for i in batch], tokens=limit):
                yield [batch[k] for k in part]


def _predict(
    model: Any, head: heads.Head | None, padded: "torch.Tensor", lengths: Sequence[int]
) -> list[heads.Predictions]:
    """Run a batch [B, T], so that the hooks see it; predictions of each prompt, padding left out."""
    import torch

    if head is None:
        logits = model(input_ids=padded, use_cache=False).logits
        return [heads.predictions(logits[row, :length]) for row, length in enumerate(lengths)]
    states = head.states(padded)
    together = head.predict(torch.cat([states[row, :length] for row, length in enumerate(lengths)]))
    parts = zip(*(torch.split(each, list(lengths)) for each in (together.entropy, together.argmax)), strict=True)
    return [heads.Predictions(entropy=entropy, argmax=argmax) for entropy, argmax in parts]


class _Batch:
    """Prompts that run together, and where the hooks put their states: float32, each prompt by itself, no padding.

    Copied as they come, since a block may go on in place, and so that the model's own tensors can be let go.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], *, taps: int) -> None:
        self.taps = taps
        self.lengths = [len(ids) for ids in prompts]
        self.longest = max(self.lengths)
        # [B, T], padded on the right with each prompt's last
        self.ids = np.array([[*ids, *[ids[-1]] * (self.longest - len(ids))] for ids in prompts], dtype=np.int64)
        self.states: list[NDArray[np.float32]] = []  # [taps, T, E] of each
        self.final_norm: list[NDArray[np.float32]] = []  # [T, E] of each

    def put(self, tap: int | None, hidden: Any, where: str) -> None:
        """Take [B, T, E] as tap `tap`, or, for None, as the state after the final norm."""
        import torch

        shape = tuple(getattr(hidden, "shape", ()))
        if len(shape) != 3 or shape[:2] != self.ids.shape:
            raise ModelError(
                f"{where}: no residual stream [{len(self.lengths)}, {self.longest}, width] found, "
                f"but {list(shape) if shape else type(hidden).__name__}; models with several streams are not supported"
            )
        if tap == 0:
            self.states = [np.empty((self.taps, length, shape[2]), np.float32) for length in self.lengths]
        if tap is None:
            self.final_norm = [np.empty((length, shape[2]), np.float32) for length in self.lengths]
        for row, length in enumerate(self.lengths):
            place = self.final_norm[row] if tap is None else self.states[row][tap]
            torch.from_numpy(place).copy_(hidden[row, :length])


@contextlib.contextmanager
def _hooks(stack: Stack, batch: _Batch) -> Iterator[None]:
    """Hand over each block's input under its number, the final norm's input under L, and its output."""

    def reader(tap: int) -> Callable[..., None]:
        def read(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            batch.put(tap, args[0] if args else kwargs.get("hidden_states"), f"{type(module).__name__}, tap {tap}")

        return read

    def read_output(module: Any, args: Any, output: Any) -> None:
        batch.put(None, output[0] if isinstance(output, tuple) else output, f"the output of {type(module).__name__}")

    handles = [
        module.register_forward_pre_hook(reader(tap), with_kwargs=True)
        for tap, module in enumerate((*stack.blocks, stack.final_norm))
    ]
    handles.append(stack.final_norm.register_forward_hook(read_output))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
