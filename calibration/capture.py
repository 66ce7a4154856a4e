"""Hidden states of a target, one teacher-forced pass over prompts. The only module here that imports torch.

Tap t is the residual stream entering block t, tap L what leaves the last block before the final norm. Both are read
by forward pre-hooks, on the blocks and on the final norm: Hugging Face's own `hidden_states` ends *after* the norm.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from elsi_edge.errors import DataError, MissingExtraError, ModelError
from elsi_edge.torch_model import load_causal_lm, load_config

if TYPE_CHECKING:
    import torch

_PROBE_TOKENS = 4
_SOFTMAX_ELEMENTS = 1 << 20  # logits turned into entropies at a time: 4 MB, so that they stay in the cache
_LOGITS_ELEMENTS = 1 << 26  # of one batch: 256 MB in float32
_ATTENTION_KINDS = ("full_attention", "sliding_attention", "chunked_attention", "attention")


@dataclass(frozen=True, kw_only=True)
class PromptStates:
    """Everything read from one prompt."""

    index: int  # of the prompt, in the order given
    states: NDArray[np.float32]  # [taps, T, E], taps 0..L
    final_norm: NDArray[np.float32]  # [T, E], tap L after the final norm
    entropy: NDArray[np.float32]  # [T], nats, of the prediction made at each position


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The decoder blocks of a model, in the order they are called, and the norm that follows them."""

    blocks: tuple["torch.nn.Module", ...]
    final_norm: "torch.nn.Module"


def load_target(directory: Path) -> "torch.nn.Module":
    """Load a causal language model for reading states, in the precision it is stored in.

    float16 becomes float32: some models' states pass 65,504. Raises MissingExtraError, ModelError.
    """
    config = load_config(directory, feature="calibrate")
    _refuse_unsupported(config, None)
    import torch

    stored = getattr(config, "dtype", None)
    dtype = torch.float32 if stored in (None, torch.float16) else stored
    model: torch.nn.Module = load_causal_lm(directory, feature="calibrate", dtype=dtype)
    _refuse_unsupported(config, model)
    return model


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


def _refuse_unsupported(config: Any, model: Any) -> None:
    text = config.get_text_config()
    family = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{family} is an encoder-decoder model; only decoder-only language models have taps")
    kinds = {
        str(kind) for kind in (getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ())
    }
    other = sorted(kinds - set(_ATTENTION_KINDS))
    if other or getattr(model, "_is_stateful", False):
        what = f"has {', '.join(other)} blocks" if other else "keeps a recurrent state"
        raise ModelError(
            f"{family} {what}; recurrent and hybrid models are not supported, use one with attention alone"
        )


def find_stack(model: "torch.nn.Module") -> Stack:
    """Find the decoder blocks: the longest list of modules that a forward pass calls once each, in order.

    The final norm is the first module called after the last block. Raises ModelError naming what was not found.
    """
    import torch

    calls: list[torch.nn.Module] = []  # in the order entered
    handles = [m.register_forward_pre_hook(lambda module, _: calls.append(module)) for m in model.modules()]
    try:
        with torch.inference_mode():
            model(input_ids=torch.zeros((1, _PROBE_TOKENS), dtype=torch.long), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    order = [id(module) for module in calls]
    lists = [tuple(m) for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m)]
    inner = {id(m) for members in lists for member in members for m in member.modules() if m is not member}
    stacks = [s for s in lists if _called_in_order([id(m) for m in s], order) and not any(id(m) in inner for m in s)]
    if not stacks:
        raise ModelError(f"{type(model).__name__}: no stack of decoder blocks found that is called once each, in order")
    blocks = max(stacks, key=len)
    within = {id(module) for block in blocks for module in block.modules()}
    after = [module for module in calls[order.index(id(blocks[-1])) :] if id(module) not in within]
    head = model.get_output_embeddings()  # type: ignore[operator]
    if not after or after[0] is head:
        raise ModelError(f"{type(model).__name__}: no final norm found between the last block and the output head")
    return Stack(blocks=blocks, final_norm=after[0])


def _called_in_order(members: list[int], order: list[int]) -> bool:
    if any(order.count(member) != 1 for member in members):
        return False
    places = [order.index(member) for member in members]
    return places == sorted(places)


@contextlib.contextmanager
def _hooks(stack: Stack, taps: dict[int, "torch.Tensor"], final: list["torch.Tensor"]) -> Iterator[None]:
    """Store each block's input under its number, the final norm's input under L and its output in `final`."""

    def reader(tap: int) -> Callable[..., None]:
        def read(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            taps[tap] = args[0] if args else kwargs["hidden_states"]

        return read

    def read_output(module: Any, args: Any, output: Any) -> None:
        final.append(output)

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


def plan_batches(lengths: Sequence[int], *, tokens: int) -> list[list[int]]:
    """Indices of prompts in batches of similar length whose padded size stays under `tokens` (or holds one prompt)."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * lengths[index] <= tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def capture(
    model: "torch.nn.Module", prompts: Sequence[Sequence[int]], *, blocks: int | None = None, batch_tokens: int = 1024
) -> Iterator[PromptStates]:
    """Yield states and predictive entropies of each prompt, shortest prompts first.

    prompts: token ids of each. Prompts of similar length share a batch of at most `batch_tokens` positions; they are
    padded on the right, where causal attention cannot see it, so batching changes results by rounding alone.
    Raises DataError for a prompt without tokens, ModelError for a model without a recognisable stack, or with another
    number of blocks than `blocks`, its configuration's.
    """
    import torch

    for index, ids in enumerate(prompts):
        if not len(ids):
            raise DataError(f"prompt {index + 1} of {len(prompts)} has no tokens; remove it")
    stack = find_stack(model)
    if blocks is not None and len(stack.blocks) != blocks:
        raise ModelError(
            f"{type(model).__name__}: {len(stack.blocks)} decoder blocks are called, its configuration says {blocks}"
        )
    vocab = int(model.get_output_embeddings().weight.shape[0])  # type: ignore[operator]
    limit = min(batch_tokens, max(1, _LOGITS_ELEMENTS // vocab))
    taps: dict[int, torch.Tensor] = {}
    final: list[torch.Tensor] = []
    with torch.inference_mode(), _hooks(stack, taps, final):
        for batch in plan_batches([len(ids) for ids in prompts], tokens=limit):
            final.clear()
            longest = max(len(prompts[i]) for i in batch)
            padded = torch.tensor([[*prompts[i], *[prompts[i][-1]] * (longest - len(prompts[i]))] for i in batch])
            entropy = _entropy(model(input_ids=padded, use_cache=False).logits)  # shape: [B, T]
            for row, index in enumerate(batch):
                length = len(prompts[index])
                yield PromptStates(
                    index=index,
                    states=torch.stack([taps[t][row, :length] for t in range(len(taps))]).float().numpy(),
                    final_norm=final[0][row, :length].float().numpy(),
                    entropy=entropy[row, :length].numpy(),
                )


def _entropy(logits: "torch.Tensor") -> "torch.Tensor":
    """Shannon entropy in nats of softmax(logits [B, T, V]), as [B, T] float32, a bounded number of rows at a time."""
    import torch

    rows = logits.flatten(0, 1)
    step = max(1, _SOFTMAX_ELEMENTS // rows.shape[1])
    parts = []
    for start in range(0, rows.shape[0], step):
        log_p = torch.log_softmax(rows[start : start + step].float(), dim=-1)
        parts.append(-(log_p.exp() * log_p).sum(dim=-1))
    return torch.cat(parts).reshape(logits.shape[:2])
