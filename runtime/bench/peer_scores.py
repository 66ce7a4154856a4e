"""How likely other runtimes find given tokens: {"losses": nats of tokens 2..n, "likeliest": the token each would take}.

Each asks the very weights that the runtime generates with. Imported by `peer_child` alone, in its own process.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsi_edge.runtime.bench.perplexity import scores_of

Score = Callable[[list[int]], dict[str, Any]]
_FORCE = 1000.0  # beyond any difference of logits
_EVERY_TOKEN = 1 << 20


def llama_cpp(server: Any) -> Score:
    """Token by token: the next one is forced by a bias, which the log-probabilities that it reports do not contain."""

    def ask(prompt: list[int], forced: int | str, count: int) -> Any:
        request = {"prompt": prompt, "n_predict": 1, "temperature": 0, "cache_prompt": True, "n_probs": count}
        said: Any = server.handle_completions({**request, "logit_bias": [[forced, _FORCE]]})
        said = json.loads(said) if isinstance(said, str) else said
        if "choices" not in said:
            raise RuntimeError(f"llama.cpp: {said}")
        found = said["choices"][0]["logprobs"]
        return None if found is None else found["content"][0]

    def score(ids: list[int]) -> dict[str, Any]:
        losses, likeliest = [], []
        for place in range(1, len(ids)):
            found = ask(ids[:place], ids[place], 1)
            if found is None:
                # Part of a character: it is held back with its figures. Force a letter, and look the token up.
                found = ask(ids[:place], "a", _EVERY_TOKEN)
                chosen = next(one for one in found["top_logprobs"] if one["id"] == ids[place])
            else:
                chosen = found
            if chosen["id"] != ids[place]:
                raise RuntimeError(f"llama.cpp took token {chosen['id']} where {ids[place]} was forced")
            losses.append(-chosen["logprob"])
            likeliest.append(found["top_logprobs"][0]["id"])
        return {"losses": losses, "likeliest": likeliest}

    return score


def genai(og: Any, loaded: Any) -> Score:
    """The logits of the whole window, as its generator has them after the prompt."""

    def score(ids: list[int]) -> dict[str, Any]:
        parameters = og.GeneratorParams(loaded)
        parameters.set_search_options(max_length=len(ids) + 1, do_sample=False)
        generator = og.Generator(loaded, parameters)
        generator.append_tokens(ids)
        logits = np.asarray(generator.get_output("logits"))  # shape: [1, T, V]
        if logits.shape[1] != len(ids):
            raise RuntimeError(f"its model gives logits of {logits.shape[1]} of {len(ids)} tokens")
        return _plain(logits[0], ids)

    return score


def openvino(model: str, threads: int) -> Score:
    """What GenAI reads from the GGUF, saved as OpenVINO's own files and run by OpenVINO with the same settings."""
    opened: list[Any] = []  # built when first asked, after the speeds

    def score(ids: list[int]) -> dict[str, Any]:
        if not opened:
            opened.append(_compiled(Path(model), threads).create_infer_request())
        request, count = opened[0], len(ids)
        every = {
            "input_ids": np.array([ids], np.int64),
            "attention_mask": np.ones((1, count), np.int64),
            "position_ids": np.arange(count, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        wanted = {one.get_any_name() for one in request.model_inputs}
        request.reset_state()
        found = request.infer({name: value for name, value in every.items() if name in wanted})
        return _plain(np.asarray(found[0])[0], ids)

    return score


def _compiled(model: Path, threads: int) -> Any:
    import openvino as ov
    import openvino_genai

    options = {"INFERENCE_NUM_THREADS": threads}
    if model.is_dir():
        return ov.Core().compile_model(str(model / "openvino_model.xml"), "CPU", options)
    with tempfile.TemporaryDirectory() as directory:
        # It saves beside the file that it reads, which may be somebody's model: a link of our own has its own place.
        link = Path(directory) / "model.gguf"
        link.symlink_to(model.resolve())
        openvino_genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True, **options)
        return ov.Core().compile_model(str(link.with_name("openvino_model.xml")), "CPU", options)


def _plain(logits: NDArray[np.float32], ids: list[int]) -> dict[str, Any]:
    found = scores_of(logits[:-1], ids[1:])
    return {"losses": found.losses.tolist(), "likeliest": found.likeliest.tolist()}
