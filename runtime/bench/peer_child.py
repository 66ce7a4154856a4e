"""Another runtime in a process of its own: `python -m elsi_edge.runtime.bench.peer_child NAME MODEL THREADS CONTEXT`.

Reads requests {"ids": [...], "max_tokens": n} as lines of JSON, answers each with {"tokens": n, "text": ...,
"first_ms": ..., "decode_s": ...}, greedy; the first line it writes says that it is ready: version and flags.
Tokens of the prompt are given as they are, so that every runtime continues the same. A request {"score": [...]} of two
tokens or more is answered with {"losses": [...], "likeliest": [...]} (see `peer_scores`) or {"not_measured": why}.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any, TextIO

from elsi_edge.runtime.bench import peer_scores

Answer = Callable[[list[int], int], dict[str, Any]]
_Opened = tuple[str, str, Answer, peer_scores.Score]


def main() -> None:
    """Serve until stdin ends."""
    name, model, threads, context = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    with _own_stdout() as out:
        opened, said, answer, score = _OPEN[name.partition("+")[0]](model, threads, context, "+" in name)
        _write(out, {"version": opened, "flags": said})
        for line in sys.stdin:
            request = json.loads(line)
            if "score" in request:
                _write(out, _scored(score, request["score"]))
            else:
                _write(out, answer(request["ids"], request["max_tokens"]))


def _scored(score: peer_scores.Score, ids: list[int]) -> dict[str, Any]:
    """Perplexity is beside the point of the run: what fails there leaves the runtime's speeds as they are."""
    try:
        return score(ids)
    except Exception as error:  # whatever a foreign library raises
        return {"not_measured": " ".join(str(error).split()) or type(error).__name__}


def _llama_cpp(model: str, threads: int, context: int, speculative: bool) -> _Opened:
    import xllamacpp

    parameters: Any = xllamacpp.CommonParams()
    parameters.model.path = model
    parameters.n_ctx = context
    parameters.n_parallel = 1
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
    parameters.verbosity = 0
    flags = f"n_ctx {context}, n_threads {threads}, one slot, cache_prompt off"
    if speculative:
        kind: Any = xllamacpp.common_speculative_type
        parameters.speculative.types = [kind.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        flags += ", speculation: ngram-simple"
    server = xllamacpp.Server(parameters)

    def answer(ids: list[int], limit: int) -> dict[str, Any]:
        request = {"prompt": ids, "n_predict": limit, "temperature": 0, "cache_prompt": False}
        said: Any = server.handle_completions(request)
        said = json.loads(said) if isinstance(said, str) else said
        if "choices" not in said:
            raise RuntimeError(f"llama.cpp: {said}")
        # Its clock of generated tokens starts when the first one is there.
        timings = said["timings"]
        return {
            "tokens": timings["predicted_n"],
            "text": said["choices"][0]["text"],
            "first_ms": timings["prompt_ms"],
            "decode_s": timings["predicted_ms"] / 1e3,
        }

    return f"xllamacpp {version('xllamacpp')}", flags, answer, peer_scores.llama_cpp(server)


def _genai(model: str, threads: int, context: int, speculative: bool) -> _Opened:
    import onnxruntime_genai as og

    if speculative:
        raise ValueError("onnxruntime-genai has no speculative mode for this model")
    config: Any = og.Config(model)
    overlay = {"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}
    config.overlay(json.dumps(overlay))
    loaded = og.Model(config)
    tokenizer = og.Tokenizer(loaded)

    def answer(ids: list[int], limit: int) -> dict[str, Any]:
        parameters = og.GeneratorParams(loaded)
        parameters.set_search_options(max_length=min(context, len(ids) + limit), do_sample=False)
        generator = og.Generator(loaded, parameters)
        start = time.perf_counter()
        generator.append_tokens(ids)
        generator.generate_next_token()
        first = time.perf_counter()
        while not generator.is_done():
            generator.generate_next_token()
        end = time.perf_counter()
        made = [int(token) for token in generator.get_sequence(0)][len(ids) :]
        text = tokenizer.decode(made)
        return {"tokens": len(made), "text": text, "first_ms": 1e3 * (first - start), "decode_s": end - first}

    flags = f"int4 of its own builder, {threads} threads"
    return f"onnxruntime-genai {version('onnxruntime-genai')}", flags, answer, peer_scores.genai(og, loaded)


def _openvino(model: str, threads: int, context: int, speculative: bool) -> _Opened:
    import numpy as np
    import openvino
    import openvino_genai

    options: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
    if speculative:
        options["prompt_lookup"] = True
    pipeline: Any = openvino_genai.LLMPipeline(model, "CPU", **options)
    flags = f"CPU, INFERENCE_NUM_THREADS {threads}" + (", prompt_lookup, 4 tokens" if speculative else "")

    def answer(ids: list[int], limit: int) -> dict[str, Any]:
        settings: Any = openvino_genai.GenerationConfig()
        settings.max_new_tokens = limit
        settings.do_sample = False
        settings.apply_chat_template = False
        if speculative:
            settings.num_assistant_tokens, settings.max_ngram_size = 4, 3
        said: Any = pipeline.generate(openvino.Tensor(np.array([ids], np.int64)), settings)
        made, metrics = list(said.tokens[0]), said.perf_metrics
        first = metrics.get_ttft().mean
        text = pipeline.get_tokenizer().decode(made)
        decode = (metrics.get_generate_duration().mean - first) / 1e3
        return {"tokens": len(made), "text": text, "first_ms": first, "decode_s": decode}

    return f"openvino-genai {version('openvino-genai')}", flags, answer, peer_scores.openvino(model, threads)


_OPEN: dict[str, Callable[[str, int, int, bool], _Opened]] = {
    "llama.cpp": _llama_cpp,
    "onnxruntime-genai": _genai,
    "openvino-genai": _openvino,
}


@contextlib.contextmanager
def _own_stdout() -> Iterator[TextIO]:
    """Stdout for the protocol alone: what libraries print goes to stderr."""
    kept = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(kept, "w", encoding="utf-8") as out:
        yield out


def _write(out: TextIO, value: dict[str, Any]) -> None:
    out.write(json.dumps(value) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
