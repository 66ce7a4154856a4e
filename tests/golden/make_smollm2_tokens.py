"""Make `smollm2_tokens.json`: token ids that llama.cpp gives for the built-in model's GGUF.

    pip install xllamacpp
    python tests/golden/make_smollm2_tokens.py SmolLM2-135M-Instruct.Q4_1.gguf

The file lies in the model cache, in the directory that `elsi-edge cache list` names. llama.cpp tokenises without adding
a BOS and with special tokens recognised; chats go through its own rendering of the model's template.
"""

import json
import sys
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xllamacpp

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "Hello",
    " leading and trailing spaces  ",
    "tabs\tand\t\ttabs, spaces    and\n\n\nnewlines\n",
    "a\r\nb\r\n\r\nc",
    "naïve café, Ärger, œuvre, Þingvellir",
    "Emoji: 🙂 👩‍👩‍👧‍👦 🇫🇷 ✈️ and 🤷🏽‍♀️!",
    "你好，世界。こんにちは世界 안녕하세요 세계",
    "مرحبا بالعالم שלום עולם สวัสดี नमस्ते",
    "0 7 42 314 2718 1234567890 3.14159 1,000,000 v2.0.1 0x1F ½ ² Ⅷ ٣",
    "12:30 on 2024-02-29 costs $19.99 (50% off)",
    "def f(x: int) -> int:\n    return x ** 2 + 1  # it's fine\n",
    'for (int i = 0; i < n; ++i) { s += "\\t" + a[i]; }',
    "don't we'll they're I'VE it'S",
    "https://example.org/a?b=c&d=%20e#f",
    "ALLCAPS camelCase snake_case kebab-case",
    "a  b\t3141 [[PART]]7<unit> naïve 🙂\r\n",
    "zero width\u200bspace, nbsp\u00a0here, ideographic\u3000space, \u2028line separator",
    "...!!!???---___***",
    "<|im_start|>user\nHi<|im_end|>\n",
]
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Explain in detail how a bicycle works."}],
    [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "Name a river. 🙂"}],
    [
        {"role": "user", "content": "Was ist 12345 + 678?"},
        {"role": "assistant", "content": "13023."},
        {"role": "user", "content": "再说一遍。"},
    ],
]


def main(gguf: Path) -> None:
    """Ask a llama.cpp server on this machine for the ids of every text, and write them beside this file."""
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(gguf)
    parameters.n_ctx = 512
    parameters.cpuparams.n_threads = 1
    parameters.warmup = False
    parameters.port = 0
    server = xllamacpp.Server(parameters)

    def post(path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"{server.listening_address}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def ids(text: str) -> list[int]:
        tokens = post("/tokenize", {"content": text, "add_special": False, "parse_special": True})["tokens"]
        return [int(token) for token in tokens]

    chats = [{"messages": chat, "ids": ids(post("/apply-template", {"messages": chat})["prompt"])} for chat in CHATS]
    golden = {
        "made_with": f"xllamacpp {version('xllamacpp')}, tests/golden/make_smollm2_tokens.py",
        "gguf": gguf.name,
        "texts": [{"text": text, "ids": ids(text)} for text in TEXTS],
        "chats": chats,
    }
    out = Path(__file__).with_name("smollm2_tokens.json")
    out.write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
