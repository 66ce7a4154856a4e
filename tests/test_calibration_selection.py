"""The rules: planted sets where ranking single taps goes wrong, duplicates, fixed rules and their limits."""

import numpy as np
import pytest
from numpy.typing import NDArray

from elsi_edge.calibration import selection
from elsi_edge.calibration.statistics import SetEntropy, linear_cka
from elsi_edge.errors import ConfigError, SelectionError

BLOCKS = 4
ROWS, WIDTH = 300, 12


def directions(count: int, seed: int) -> NDArray[np.float64]:
    """Independent standard normal columns [ROWS, count]."""
    return np.random.default_rng(seed).normal(size=(ROWS, count))


def padded(columns: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """Columns turned into states [ROWS, WIDTH]."""
    basis = np.linalg.qr(np.random.default_rng(seed).normal(size=(WIDTH, WIDTH)))[0]
    states: NDArray[np.float64] = columns @ basis[: columns.shape[1]]
    return states


def planted() -> NDArray[np.float64]:
    """Taps 0..4: 1 and 2 are rich and alike up to rotation, 3 is poorer but about other things, 4 repeats half of 1."""
    shared, other = directions(8, 1), directions(6, 2)
    states = [padded(columns, seed) for seed, columns in enumerate((other, shared, shared, other, shared[:, :4]))]
    return np.stack(states)


def test_joint_selection_beats_ranking_single_taps() -> None:
    joint = SetEntropy(planted(), "centered")
    ranked = sorted(range(1, 5), key=lambda tap: -joint((tap,)))[:2]
    assert sorted(ranked) == [1, 2]  # ranking takes the duplicate
    choice = selection.elsi(BLOCKS, 2, joint)
    assert choice.taps in ((1, 3), (2, 3))  # one of the two equals, not both
    assert choice.score == pytest.approx(joint((1, 3)))
    assert joint((1, 3)) > joint((1, 2)) + 0.3


def test_one_tap_is_the_highest_entropy_but_never_tap_0() -> None:
    values = (9.0, 1.0, 3.0, 2.0, 2.5)
    choice = selection.elsi(BLOCKS, 1, lambda taps: values[taps[0]])
    assert (choice.taps, choice.score, choice.evaluated) == ((2,), 3.0, 4)
    assert selection.low_entropy(values, 1) == (1,)
    assert selection.low_entropy(values, 3) == (1, 3, 4)


def test_ties_go_to_the_lower_taps() -> None:
    assert selection.greedy(range(1, 6), 3, lambda taps: 1.0).taps == (1, 2, 3)


def test_every_seed_is_tried() -> None:
    # greedy from the best single tap (1) ends at 5.0; only the seed 3 leads to the pair worth 9
    worth = {(1,): 4.0, (2,): 1.0, (3,): 1.0, (1, 2): 5.0, (1, 3): 4.5, (2, 3): 9.0}
    assert selection.greedy([1, 2, 3], 2, worth.__getitem__).taps == (2, 3)


def test_cka_penalty_spreads_the_members() -> None:
    entropy = {(1,): 1.0, (2,): 1.0, (3,): 1.0, (1, 2): 2.0, (1, 3): 1.9, (2, 3): 1.8}
    cka = np.eye(4)
    cka[1, 2] = cka[2, 1] = 0.9
    cka[1, 3] = cka[3, 1] = 0.1
    cka[2, 3] = cka[3, 2] = 0.1
    assert selection.elsi(3, 2, entropy.__getitem__).taps == (1, 2)
    assert selection.elsi_c(3, 2, entropy.__getitem__, cka, weight=0.0).taps == (1, 2)
    choice = selection.elsi_c(3, 2, entropy.__getitem__, cka, weight=0.5)
    assert choice.taps == (1, 3) and choice.score == pytest.approx(1.9 - 0.05)
    assert selection.mean_pairwise_cka((1, 2, 3), cka) == pytest.approx((0.9 + 0.1 + 0.1) / 3)
    assert selection.mean_pairwise_cka((2,), cka) == 0.0
    with pytest.raises(ConfigError, match="CKA weight is -1"):
        selection.elsi_c(3, 2, entropy.__getitem__, cka, weight=-1.0)


def test_elsi_c_leaves_a_compartment_on_planted_states() -> None:
    states = planted()
    choice = selection.elsi_c(BLOCKS, 2, SetEntropy(states, "centered"), linear_cka(states, "centered"))
    assert choice.taps in ((1, 3), (2, 3))


@pytest.mark.parametrize("m", [0, -1, 5])
def test_m_out_of_range(m: int) -> None:
    with pytest.raises(ConfigError, match=rf"m is {m}, it must lie in 1\.\.4"):
        selection.greedy(range(1, 5), m, lambda taps: 0.0)
    with pytest.raises(ConfigError, match=rf"m is {m}, it must lie in 1\.\.4"):
        selection.low_entropy(np.ones(5), m)


def test_eagle3_in_our_numbering() -> None:
    assert selection.eagle3_taps(30) == (2, 15, 27)
    assert selection.eagle3_taps(36) == (2, 18, 33)
    assert selection.eagle3_taps(7) == (2, 3, 4)
    with pytest.raises(SelectionError, match="at least 7 blocks, the model has 6"):
        selection.eagle3_taps(6)


@pytest.mark.parametrize(
    ("taps", "message"), [((), "no taps"), ((2, 2), "repeat"), ((1, 5), r"0\.\.4"), ((-1,), r"0\.\.4")]
)
def test_explicit_taps_are_checked(taps: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        selection.explicit(taps, BLOCKS)


def test_explicit_taps_are_put_in_order() -> None:
    assert selection.explicit((4, 0, 2), BLOCKS) == (0, 2, 4)
