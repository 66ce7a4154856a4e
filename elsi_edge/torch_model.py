"""A checked model directory under torch, for the stages that run the source model itself; imports torch when called."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elsi_edge.errors import MissingExtraError, ModelError


def load_config(directory: Path, *, feature: str) -> Any:
    """transformers' configuration of a model directory. Raises ModelError, MissingExtraError naming `feature`."""
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise MissingExtraError(feature, extra="build", module=error.name or "transformers") from error
    with _one_line_errors(directory), _quiet():
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


def load_causal_lm(directory: Path, *, feature: str, dtype: Any = None) -> Any:
    """The causal language model of a directory, in evaluation mode; `dtype` None keeps the one that is stored.

    Every weight comes from the files: one that is missing, of another shape, or without a place in the model is a
    ModelError, where transformers would draw it at random or pass over it. No pickle is opened and no code of the model
    is run. Raises MissingExtraError naming `feature`.
    """
    try:
        import torch  # noqa: F401 (transformers imports without it)
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise MissingExtraError(feature, extra="build", module=error.name or "torch") from error
    with _one_line_errors(directory), _quiet():
        model, info = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype="auto" if dtype is None else dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are named below
            output_loading_info=True,
        )
    for kind, said in (
        ("missing_keys", "are missing from its files"),
        ("mismatched_keys", "have another shape than its configuration says"),
        ("unexpected_keys", "have no place in the model that its configuration describes"),
    ):
        if names := sorted(str(key[0] if isinstance(key, tuple) else key) for key in info[kind]):
            raise ModelError(
                f"{directory}: {len(names)} weights {said}, the first is {names[0]}; "
                "config.json and the weights belong to different models"
            )
    return model.eval()


def embedding_table(model: Any) -> Any:
    """[V, E] the state at tap 0 of every token id: the embedding table, times its scale in a model that scales it."""
    import torch

    module = model.get_input_embeddings()
    if type(module) is torch.nn.Embedding:
        return module.weight.detach()
    with torch.inference_mode(False), torch.no_grad():
        return module(torch.arange(module.weight.shape[0], device=module.weight.device))


@contextlib.contextmanager
def _one_line_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # of several libraries, depending on what is odd
        text = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, KeyError):
            text = f"its configuration names {text}, which transformers does not know"
        if isinstance(error, RuntimeError) and "allocate" in text:
            raise MemoryError(text) from error
        raise ModelError(f"{directory}: cannot be loaded as a causal language model: {text}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No loading bar and no reports: what matters of them is raised."""
    from transformers.utils import logging

    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
