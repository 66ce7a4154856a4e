"""Whether this machine's attention gives a chain's rows bits of their own, and what follows where it does not."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elsi_edge.errors import UsageError
from elsi_edge.runtime import engines, one_node
from elsi_edge.runtime.one_node import exact_attention_rows
from elsi_edge.runtime.options import GenerateOptions, SessionSettings
from elsi_edge.runtime.session import NO_EXACT_CHAIN, Session

ARM_LIKE = 1e-7  # relative difference that was seen there


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    exact_attention_rows.cache_clear()
    yield
    exact_attention_rows.cache_clear()


@pytest.mark.parametrize("shape", [(9, 3, 64), (4, 2, 16), (8, 8, 32)])
@pytest.mark.parametrize("threads", [1, 2])
def test_x86_agrees_in_the_exact_chain_form(shape: tuple[int, int, int], threads: int) -> None:
    assert exact_attention_rows(*shape, most=16, threads=threads) == 16


@pytest.mark.parametrize(("past", "from_rows", "expected"), [(64, 4, 3), (5, 2, 1)])
def test_one_length_at_which_rows_differ_is_enough(
    past: int, from_rows: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Arm: calls of so many rows and more, after one of the lengths that are tried, end in other bits."""
    attend = one_node._attend

    def other(session: Any, qkv: Any, cache: Any) -> Any:
        rows, *grown = attend(session, qkv, cache)
        if cache[0].shape[2] == past and qkv.shape[1] - 1 >= from_rows:
            rows = (rows * np.float32(1 + ARM_LIKE)).astype(np.float32)
        return [rows, *grown]

    monkeypatch.setattr(one_node, "_attend", other)
    assert exact_attention_rows(9, 3, 64, most=16, threads=1) == expected


@pytest.mark.usefixtures("stock_operators")
@pytest.mark.parametrize("precision", ["int4", "int8", "fp32"])
def test_exact_mode_decodes_plainly_where_no_chain_is_exact(
    precision: str, tiny_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "exact_attention_rows", lambda *_, **__: 1)
    session = Session.open(tiny_bundle(precision), SessionSettings(threads=1))
    result = session.generate("Once upon", GenerateOptions(max_tokens=6))
    if precision == "fp32":  # rounding changes no token there
        assert result.mode == "tree" and result.warnings == ()
        return
    assert result.mode == "plain" and result.exact and result.warnings[1:] == (NO_EXACT_CHAIN,)
    with pytest.raises(UsageError, match=r"--draft-nodes is 2, exact mode at int. holds chains of at most 0"):
        session.generate("Once upon", GenerateOptions(max_tokens=6, draft_nodes=2))
    loose = session.generate("Once upon", GenerateOptions(max_tokens=6, draft_nodes=2, exact=False))
    assert loose.mode != "plain" and not loose.exact


@pytest.mark.usefixtures("stock_operators")
def test_chains_are_as_long_as_the_attention_allows(
    tiny_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "exact_attention_rows", lambda *_, **__: 3)
    session = Session.open(tiny_bundle("int4"), SessionSettings(threads=1))
    assert session.generate("Once upon", GenerateOptions(max_tokens=6)).draft_nodes == 2
    assert len(session.warnings) == 1 and session.warnings[0].startswith("native operators: none")
