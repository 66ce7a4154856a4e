"""Perplexity of llama.cpp on a GGUF, over token windows that perplexity.py wrote.

pip install cyllama numpy     # in an environment of its own
python tests/figures/perplexity_llama_cpp.py MODEL.gguf FIGURES.ids.json
"""

import json
import math
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Print one JSON object: perplexity and tokens."""
    import numpy as np
    from cyllama.llama import llama_cpp as llama  # type: ignore[import-not-found,unused-ignore]

    windows: list[list[int]] = json.loads(Path(sys.argv[2]).read_text())
    model: Any = llama.LlamaModel(sys.argv[1], llama.LlamaModelParams())
    losses: list[float] = []
    for ids in windows:
        params: Any = llama.LlamaContextParams()
        params.n_ctx = params.n_batch = params.n_ubatch = 1024
        context: Any = llama.LlamaContext(model, params)
        batch: Any = llama.LlamaBatch(n_tokens=len(ids), embd=0, n_seq_max=1)
        for place, token in enumerate(ids):
            batch.add(token, place, [0], True)
        context.decode(batch)
        for place, token in enumerate(ids[1:]):
            logits = np.array(context.get_logits_ith(place), np.float64)
            shifted = logits - logits.max()
            losses.append(float(np.log(np.exp(shifted).sum()) - shifted[token]))
        context.close()
    print(json.dumps({"perplexity": math.exp(sum(losses) / len(losses)), "tokens": len(losses)}))  # noqa: T201


if __name__ == "__main__":
    main()
