"""Finding the decoder blocks of a model and the norm after them, whatever its family calls them; imports torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elsi_edge.errors import ModelError

if TYPE_CHECKING:
    import torch

_PROBE_TOKENS = 4
_ATTENTION_KINDS = ("full_attention", "sliding_attention", "chunked_attention", "indexed_attention", "attention")


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The decoder blocks of a model, in the order they are called, and the norm that follows them."""

    blocks: tuple["torch.nn.Module", ...]
    final_norm: "torch.nn.Module"


def refuse_unsupported(config: Any) -> None:
    """Raise ModelError, from a configuration alone, for a model whose residual stream is not all there is.

    Recurrent and hybrid models say so by the kinds of their blocks or by their class; encoder-decoder models by a flag.
    """
    text = config.get_text_config()
    family = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{family} is an encoder-decoder model; only decoder-only language models have taps")
    kinds = {
        str(kind) for kind in (getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ())
    }
    other = sorted(kinds - set(_ATTENTION_KINDS))
    if other or _keeps_a_state(config) or _keeps_a_state(text):
        what = f"has {', '.join(other)} blocks" if other else "keeps a recurrent state"
        raise ModelError(
            f"{family} {what}; recurrent and hybrid models are not supported, use one with attention alone"
        )


def _keeps_a_state(config: Any) -> bool:
    """Whether transformers marks the model class of a configuration as stateful, e.g. RWKV, which lists no blocks."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), ())
    classes = found if isinstance(found, (tuple, list)) else (found,)
    return any(getattr(model, "_is_stateful", False) for model in classes)


def find_stack(model: "torch.nn.Module") -> Stack:
    """Find the decoder blocks: the longest list of modules that a forward pass calls once each, in order.

    The final norm is the first module called after the last block. Raises ModelError naming what was not found.
    """
    import torch

    name = type(model).__name__
    calls = _calls(model)
    order = [id(module) for module in calls]
    lists = [tuple(m) for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m)]
    # Lists within a block, of experts for instance, are not the stack.
    inner = {id(m) for members in lists for member in members for m in member.modules() if m is not member}
    stacks = [s for s in lists if _called_in_order([id(m) for m in s], order) and not any(id(m) in inner for m in s)]
    if not stacks:
        raise ModelError(
            f"{name}: no stack of decoder blocks found that is called once each, in order"
            + (f"; its lists of modules have {', '.join(str(len(s)) for s in lists)} members" if lists else "")
        )
    blocks = max(stacks, key=len)
    within = {id(module) for block in blocks for module in block.modules()}
    head = _output_head(model)
    idle = (torch.nn.Dropout, torch.nn.Identity)
    after = [
        module
        for module in calls[order.index(id(blocks[-1])) :]
        if id(module) not in within and not isinstance(module, idle)
    ]
    missing = f"{name}: no final norm found between the last of its {len(blocks)} blocks and the output head"
    if not after or after[0] is head:
        raise ModelError(missing)
    if any(weight.ndim > 1 for weight in after[0].parameters()):
        raise ModelError(f"{missing}; a {type(after[0]).__name__} with matrices stands there")
    return Stack(blocks=blocks, final_norm=after[0])


def _output_head(model: "torch.nn.Module") -> "torch.nn.Module":
    find = getattr(model, "get_output_embeddings", None)
    head: torch.nn.Module | None = find() if callable(find) else None
    if head is None:
        raise ModelError(f"{type(model).__name__}: no output head found (get_output_embeddings gives none)")
    return head


def _calls(model: "torch.nn.Module") -> list["torch.nn.Module"]:
    """Every module that a forward pass over a few tokens enters, in that order."""
    import torch

    calls: list[torch.nn.Module] = []
    handles = [m.register_forward_pre_hook(lambda module, _: calls.append(module)) for m in model.modules()]
    device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
    try:
        with torch.inference_mode():
            model(input_ids=torch.zeros((1, _PROBE_TOKENS), dtype=torch.long, device=device), use_cache=False)
    except MemoryError:
        raise
    except Exception as error:  # of any kind: the model wants images, or states of an encoder
        text = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"{type(model).__name__}: a forward pass over token ids alone fails: {text}") from error
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _called_in_order(members: list[int], order: list[int]) -> bool:
    if any(order.count(member) != 1 for member in members):
        return False
    places = [order.index(member) for member in members]
    return places == sorted(places)
