"""What the model builder gets wrong in families that are exported here, put right while it runs."""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def corrected() -> Iterator[None]:
    """The builder's classes put right. To be entered after the builder was imported."""
    with contextlib.ExitStack() as stack:
        for module, family, methods in (
            ("builders.smollm", "SmolLM3Model", _smollm3),
            ("builders.gemma", "Gemma3Model", _gemma3),
            ("builders.phi", "Phi3MiniLongRoPEModel", _phi3_long),
        ):
            found: Any = getattr(sys.modules.get(module), family, None)
            if found is not None:  # in another version of the builder its own answer stands
                stack.enter_context(_replaced(found, methods(found)))
        yield


@contextlib.contextmanager
def _replaced(family: Any, methods: dict[str, Callable[..., Any]]) -> Iterator[None]:
    stock = {name: family.__dict__.get(name) for name in methods}
    for name, method in methods.items():
        setattr(family, name, method)
    try:
        yield
    finally:
        for name, method in stock.items():
            if method is None:
                delattr(family, name)
            else:
                setattr(family, name, method)


def _smollm3(family: Any) -> dict[str, Callable[..., Any]]:
    """Blocks without rotary embedding.

    The builder marks such a block as one whose rotation is not fused, and then asks for position_ids that the graph
    does not have; here it is marked as one without any.
    """

    def make_attention(self: Any, layer_id: int, attention: Any, root_input: Any, **kwargs: Any) -> Any:
        settings, window = self.attention_attrs, self.window_size
        rotary, fused = settings["rope"], settings["use_rope_in_attn"]
        settings["rope"] = bool(
            rotary and self.no_rope_layers[layer_id]
        )  # 1 where there is a rotation, despite the name
        settings["use_rope_in_attn"] = fused and settings["rope"]
        if self.layer_types[layer_id] == "full_attention":
            self.window_size = -1
        try:
            return super(family, self).make_attention(layer_id, attention, root_input, **kwargs)
        finally:
            settings["rope"], settings["use_rope_in_attn"], self.window_size = rotary, fused, window

    return {"make_attention": make_attention}


def _gemma3(family: Any) -> dict[str, Callable[..., Any]]:
    """Angles by kind of block, as transformers 5 spells them, and the embeddings' whole scale.

    The builder reads one base of the rotary embedding from fields that are no more, and falls back on 10,000; it rounds
    the square root of the width to two decimals.
    """

    def make_rope_init(self: Any, config: Any) -> None:
        everywhere, nearby = (config.rope_parameters[kind] for kind in ("full_attention", "sliding_attention"))
        self.rope_attrs["theta"] = everywhere["rope_theta"]
        self.rope_attrs["rescale_factors"] = everywhere.get("factor", 1)  # of the rule "linear"
        config.rope_local_base_freq = nearby["rope_theta"]
        self.rescale_nearby = nearby.get("factor", 1)

    def make_rotary_embedding_multi_cache(self: Any) -> None:
        """The last step of the class's making, after which its scale is set too."""
        make = super(family, self).make_rotary_embedding_caches
        for kind, theta in (("global", None), ("local", self.rope_local_theta)):
            if theta is not None:
                self.rope_attrs |= {"create_caches": True, "theta": theta, "rescale_factors": self.rescale_nearby}
            names = {f"{part}_cache_name": f"{part}_cache_{kind}" for part in ("cos", "sin")}
            for key, name in names.items():
                setattr(self, key.replace("_name", f"_{kind}_name"), name)
            make(**names)
        self.embed_attrs["scale"] = math.sqrt(self.hidden_size)

    return {
        "make_rope_init": make_rope_init,
        "make_rotary_embedding_multi_cache": make_rotary_embedding_multi_cache,
    }


def _phi3_long(family: Any) -> dict[str, Callable[..., Any]]:
    """The angles of contexts up to the one that the model was first trained for: no choice between two tables.

    A longer context is refused (`builder.require_plain_attention`).
    """
    stock = family.make_rope_init

    def make_rope_init(self: Any, config: Any) -> Any:
        rule = config.rope_parameters
        rule.setdefault("type", rule["rope_type"])  # the builder reads the older name alone
        return stock(self, config)

    def make_rotary_embedding_multi_cache(self: Any) -> None:
        short = self.rope_attrs["multi_cache"]
        self.rope_attrs |= {"rescale_factors": short["short_factor"], "mscale": short["short_mscale"]}
        self.make_rotary_embedding_caches()

    return {
        "make_rope_init": make_rope_init,
        "make_rotary_embedding_multi_cache": make_rotary_embedding_multi_cache,
    }
