"""The share of uniform draws, and what moves it."""

import math

import numpy as np
import pytest

from trl_dataeff.selection.exploration import HALF_LIFE, ExplorationShare


def after(selected: tuple[int, int], explored: tuple[int, int], least: float = 0.05) -> ExplorationShare:
    """One batch of so many effective groups out of so many, selected and explored."""
    share = ExplorationShare(least)
    effective = [i < e for e, n in (selected, explored) for i in range(n)]
    share.observe(np.array(effective, dtype=bool), np.repeat([False, True], [selected[1], explored[1]]))
    return share


def test_nothing_known_is_a_sixth_of_the_rest():
    assert ExplorationShare(0.05).value == pytest.approx(0.05 + 0.95 * 0.158655, abs=1e-5)


def test_against_the_formula_by_hand():
    rates, totals = (8 / 12, 3 / 8), (12, 8)  # 7 of 10 selected, 2 of 6 explored, and one success and failure more
    z = (rates[0] - rates[1]) / math.sqrt(sum(r * (1 - r) / n for r, n in zip(rates, totals)))
    phi = 0.5 * (1 + math.erf((-1 - z) / math.sqrt(2)))
    assert after((7, 10), (2, 6)).value == pytest.approx(0.05 + 0.95 * phi)


def test_selection_that_gains_nothing_gives_way():
    assert after((30, 40), (5, 40)).value < 0.051
    assert after((20, 40), (20, 40)).value == pytest.approx(0.05 + 0.95 * 0.158655, abs=1e-5)
    assert after((5, 40), (30, 40)).value > 0.99


def test_old_groups_fade():
    share = after((5, 40), (30, 40))
    for _ in range(int(4 * HALF_LIFE)):
        share.observe(np.array([True] * 4 + [False] * 4), np.array([False] * 4 + [True] * 4))
    assert share.value < 0.06


def test_zero_switches_it_off_and_state_is_restored():
    assert after((5, 40), (30, 40), least=0.0).value == 0.0
    share, restored = after((7, 10), (2, 6)), ExplorationShare(0.05)
    restored.load_state_dict(share.state_dict())
    assert restored.value == share.value
