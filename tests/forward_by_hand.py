"""Forward passes of decoder families in numpy, float64, one prompt at a time, written from the models' descriptions.

Parts first, then each family as a short function from token ids, its configuration's numbers and its weights by
Hugging Face name to a `Pass`. Shapes: x [T, E], heads [T, H, D].
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Weights = Mapping[str, Floats]
Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Pass:
    """What a forward pass gives, and what follows from its logits."""

    taps: Floats  # [L + 1, T, E], inputs of the blocks, and what leaves the last
    final_norm: Floats  # [T, E]
    logits: Floats  # [T, V]

    @property
    def entropy(self) -> Floats:
        """[T], nats."""
        log_p = self.logits - self.logits.max(axis=-1, keepdims=True)
        log_p = log_p - np.log(np.exp(log_p).sum(axis=-1, keepdims=True))
        found: Floats = -(np.exp(log_p) * log_p).sum(axis=-1)
        return found

    @property
    def argmax(self) -> NDArray[np.int64]:
        """[T]."""
        found: NDArray[np.int64] = self.logits.argmax(axis=-1)
        return found


def rms(x: Floats, gain: Floats, eps: float) -> Floats:
    """Root-mean-square norm over the last axis."""
    scaled: Floats = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * gain
    return scaled


def layer_norm(x: Floats, w: Weights, at: str, eps: float) -> Floats:
    """Layer norm with gain and bias."""
    centred = x - x.mean(axis=-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)
    found: Floats = scaled * w[f"{at}.weight"] + w[f"{at}.bias"]
    return found


def linear(x: Floats, w: Weights, at: str) -> Floats:
    """x W^T + b, where there is a b."""
    return x @ w[f"{at}.weight"].T + w.get(f"{at}.bias", np.zeros(1))


def conv1d(x: Floats, w: Weights, at: str) -> Floats:
    """GPT-2's x W + b."""
    return x @ w[f"{at}.weight"] + w[f"{at}.bias"]


def rotate(x: Floats, theta: float, width: int | None = None) -> Floats:
    """Rotary embedding of the first `width` values of each head, halves paired; the rest passes."""
    width = x.shape[-1] if width is None else width
    angles = np.arange(len(x))[:, None] / theta ** (np.arange(0, width, 2) / width)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    left, right = x[..., : width // 2], x[..., width // 2 : width]
    return np.concatenate([left * cos - right * sin, right * cos + left * sin, x[..., width:]], axis=-1)


def attend(q: Floats, k: Floats, v: Floats, *, window: int | None = None, scale: float | None = None) -> Floats:
    """Causal attention, [T, heads * D]; with a window a position sees itself and the `window` - 1 before it."""
    k, v = (np.repeat(part, q.shape[1] // part.shape[1], axis=1) for part in (k, v))
    back = np.arange(len(q))[:, None] - np.arange(len(q))
    seen = (back >= 0) & (back < (len(q) if window is None else window))
    scores = np.einsum("thd,shd->hts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = np.where(seen, scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed: Floats = np.einsum("hts,shd->thd", p / p.sum(axis=-1, keepdims=True), v).reshape(len(q), -1)
    return mixed


def silu(x: Floats) -> Floats:
    """x sigmoid(x)."""
    return x / (1.0 + np.exp(-x))


def gelu(x: Floats) -> Floats:
    """By the error function."""
    found: Floats = 0.5 * x * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0)))
    return found


def gelu_tanh(x: Floats) -> Floats:
    """GELU's approximation by tanh."""
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def gated(x: Floats, w: Weights, at: str, act: Callable[[Floats], Floats] = silu) -> Floats:
    """down(act(gate(x)) * up(x))."""
    return linear(act(linear(x, w, f"{at}.gate_proj")) * linear(x, w, f"{at}.up_proj"), w, f"{at}.down_proj")


def heads_of(x: Floats, w: Weights, at: str, head: int) -> tuple[Floats, Floats, Floats]:
    """Queries, keys and values [T, H, D] of separate projections."""
    q, k, v = (linear(x, w, f"{at}.{n}_proj").reshape(len(x), -1, head) for n in "qkv")
    return q, k, v


def _run(x: Floats, blocks: int, block: Callable[[Floats, int], Floats]) -> Floats:
    """Taps 0..L."""
    taps = [x]
    for index in range(blocks):
        taps.append(block(taps[-1], index))
    return np.stack(taps)


def _pre_norm(ids: list[int], c: Config, w: Weights, attention: Callable[[Floats, str, int], Floats]) -> Pass:
    """Llama's frame: RMS norms before attention and gated MLP; `attention` gets the place of its weights."""

    def block(x: Floats, index: int) -> Floats:
        at = f"model.layers.{index}"
        h = rms(x, w[f"{at}.input_layernorm.weight"], c["rms_norm_eps"])
        x = x + linear(attention(h, f"{at}.self_attn", index), w, f"{at}.self_attn.o_proj")
        return x + gated(rms(x, w[f"{at}.post_attention_layernorm.weight"], c["rms_norm_eps"]), w, f"{at}.mlp")

    return _finish(_run(w["model.embed_tokens.weight"][ids], c["num_hidden_layers"], block), c, w)


def _finish(taps: Floats, c: Config, w: Weights) -> Pass:
    final = rms(taps[-1], w["model.norm.weight"], c["rms_norm_eps"])
    return Pass(taps=taps, final_norm=final, logits=final @ w["lm_head.weight"].T)


def llama(ids: list[int], c: Config, w: Weights) -> Pass:
    """Rotary on queries and keys, grouped keys. Qwen 2 is the same with biases on q, k and v."""

    def attention(h: Floats, at: str, index: int) -> Floats:
        q, k, v = heads_of(h, w, at, c["head_dim"])
        return attend(rotate(q, c["rope_theta"]), rotate(k, c["rope_theta"]), v)

    return _pre_norm(ids, c, w, attention)


def mistral(ids: list[int], c: Config, w: Weights) -> Pass:
    """Llama with a sliding window in every block."""

    def attention(h: Floats, at: str, index: int) -> Floats:
        q, k, v = heads_of(h, w, at, c["head_dim"])
        return attend(rotate(q, c["rope_theta"]), rotate(k, c["rope_theta"]), v, window=c["sliding_window"])

    return _pre_norm(ids, c, w, attention)


def qwen3(ids: list[int], c: Config, w: Weights) -> Pass:
    """Llama with RMS norms over each head's query and key, before the rotation."""

    def attention(h: Floats, at: str, index: int) -> Floats:
        q, k, v = heads_of(h, w, at, c["head_dim"])
        q, k = (rms(x, w[f"{at}.{n}_norm.weight"], c["rms_norm_eps"]) for x, n in ((q, "q"), (k, "k")))
        return attend(rotate(q, c["rope_theta"]), rotate(k, c["rope_theta"]), v)

    return _pre_norm(ids, c, w, attention)


def smollm3(ids: list[int], c: Config, w: Weights) -> Pass:
    """Llama whose blocks with a 0 in `no_rope_layers` leave queries and keys unrotated."""

    def attention(h: Floats, at: str, index: int) -> Floats:
        q, k, v = heads_of(h, w, at, c["hidden_size"] // c["num_attention_heads"])
        if c["no_rope_layers"][index]:
            q, k = rotate(q, c["rope_theta"]), rotate(k, c["rope_theta"])
        return attend(q, k, v)

    return _pre_norm(ids, c, w, attention)


def phi3(ids: list[int], c: Config, w: Weights) -> Pass:
    """One matrix for q, k and v, one for gate and up; part of each head is rotated."""
    head = c["hidden_size"] // c["num_attention_heads"]
    queries, keys = c["num_attention_heads"], c["num_key_value_heads"]
    turned = int(head * c["partial_rotary_factor"])

    def block(x: Floats, index: int) -> Floats:
        at = f"model.layers.{index}"
        h = rms(x, w[f"{at}.input_layernorm.weight"], c["rms_norm_eps"])
        qkv = linear(h, w, f"{at}.self_attn.qkv_proj").reshape(len(x), -1, head)
        q, k, v = qkv[:, :queries], qkv[:, queries : queries + keys], qkv[:, queries + keys :]
        q, k = rotate(q, c["rope_theta"], turned), rotate(k, c["rope_theta"], turned)
        x = x + linear(attend(q, k, v), w, f"{at}.self_attn.o_proj")
        h = rms(x, w[f"{at}.post_attention_layernorm.weight"], c["rms_norm_eps"])
        gate, up = np.split(linear(h, w, f"{at}.mlp.gate_up_proj"), 2, axis=-1)
        return x + linear(silu(gate) * up, w, f"{at}.mlp.down_proj")

    return _finish(_run(w["model.embed_tokens.weight"][ids], c["num_hidden_layers"], block), c, w)


def gemma3(ids: list[int], c: Config, w: Weights) -> Pass:
    """Scaled embeddings, gains of 1 + w, norms before and after each half, window and rotary base by kind of block."""
    eps = c["rms_norm_eps"]

    def norm(x: Floats, at: str) -> Floats:
        return rms(x, 1.0 + w[f"{at}.weight"], eps)

    def block(x: Floats, index: int) -> Floats:
        at, kind = f"model.layers.{index}", c["layer_types"][index]
        theta = c["rope_parameters"][kind]["rope_theta"]
        q, k, v = heads_of(norm(x, f"{at}.input_layernorm"), w, f"{at}.self_attn", c["head_dim"])
        q, k = norm(q, f"{at}.self_attn.q_norm"), norm(k, f"{at}.self_attn.k_norm")
        window = c["sliding_window"] if kind == "sliding_attention" else None
        scale = c["query_pre_attn_scalar"] ** -0.5
        mixed = attend(rotate(q, theta), rotate(k, theta), v, window=window, scale=scale)
        x = x + norm(linear(mixed, w, f"{at}.self_attn.o_proj"), f"{at}.post_attention_layernorm")
        h = gated(norm(x, f"{at}.pre_feedforward_layernorm"), w, f"{at}.mlp", gelu_tanh)
        return x + norm(h, f"{at}.post_feedforward_layernorm")

    embedded = w["model.embed_tokens.weight"][ids] * math.sqrt(c["hidden_size"])
    taps = _run(embedded, c["num_hidden_layers"], block)
    final = norm(taps[-1], "model.norm")
    logits, cap = final @ w["lm_head.weight"].T, c["final_logit_softcapping"]
    return Pass(taps=taps, final_norm=final, logits=cap * np.tanh(logits / cap))


def gpt_neox(ids: list[int], c: Config, w: Weights) -> Pass:
    """Attention and MLP both read the block's input; q, k, v interleaved by head; part of each head is rotated."""
    head = c["hidden_size"] // c["num_attention_heads"]
    rope = c["rope_parameters"]
    turned = int(head * rope["partial_rotary_factor"])

    def block(x: Floats, index: int) -> Floats:
        at = f"gpt_neox.layers.{index}"
        h = layer_norm(x, w, f"{at}.input_layernorm", c["layer_norm_eps"])
        qkv = linear(h, w, f"{at}.attention.query_key_value").reshape(len(x), -1, 3 * head)
        q, k, v = np.split(qkv, 3, axis=-1)
        q, k = rotate(q, rope["rope_theta"], turned), rotate(k, rope["rope_theta"], turned)
        attended = linear(attend(q, k, v), w, f"{at}.attention.dense")
        h = layer_norm(x, w, f"{at}.post_attention_layernorm", c["layer_norm_eps"])
        h = linear(gelu(linear(h, w, f"{at}.mlp.dense_h_to_4h")), w, f"{at}.mlp.dense_4h_to_h")
        return x + attended + h

    taps = _run(w["gpt_neox.embed_in.weight"][ids], c["num_hidden_layers"], block)
    final = layer_norm(taps[-1], w, "gpt_neox.final_layer_norm", c["layer_norm_eps"])
    head_name = "embed_out" if "embed_out.weight" in w else "lm_head"
    return Pass(taps=taps, final_norm=final, logits=linear(final, w, head_name))


def gpt2(ids: list[int], c: Config, w: Weights) -> Pass:
    """Learned positions, layer norms, transposed matrices, tanh GELU."""

    def block(x: Floats, index: int) -> Floats:
        at = f"transformer.h.{index}"
        h = layer_norm(x, w, f"{at}.ln_1", c["layer_norm_epsilon"])
        q, k, v = (
            part.reshape(len(x), c["n_head"], -1) for part in np.split(conv1d(h, w, f"{at}.attn.c_attn"), 3, axis=-1)
        )
        x = x + conv1d(attend(q, k, v), w, f"{at}.attn.c_proj")
        h = layer_norm(x, w, f"{at}.ln_2", c["layer_norm_epsilon"])
        return x + conv1d(gelu_tanh(conv1d(h, w, f"{at}.mlp.c_fc")), w, f"{at}.mlp.c_proj")

    embedded = w["transformer.wte.weight"][ids] + w["transformer.wpe.weight"][: len(ids)]
    taps = _run(embedded, c["n_layer"], block)
    final = layer_norm(taps[-1], w, "transformer.ln_f", c["layer_norm_epsilon"])
    return Pass(taps=taps, final_norm=final, logits=final @ w["lm_head.weight"].T)
