"""The share of uniform draws, and what moves it."""

import math

import numpy as np
import pytest

from trl_dataeff.selection.draw import GAIN_HALF_LIFE, MARGIN, PRIOR, ExplorationShare


def after(effective, weights, share=0.5, least: float = 0.05) -> ExplorationShare:
    """One batch, of which so much was drawn uniformly."""
    exploring, weights = ExplorationShare(least), np.array(weights, dtype=float)
    exploring.observe(np.array(effective, dtype=bool), weights, np.broadcast_to(share, weights.shape))
    return exploring


def test_against_a_jackknife():
    """A weighted mean less a multiple of another over the same groups, and its standard error without one group at a time."""
    rng = np.random.default_rng(0)
    n, share = 400, 0.3
    weights = rng.choice([0.2, 1.0, 1.8], n)
    effective = rng.random(n) < 0.2 + 0.25 * weights
    # The groups that are taken as seen before the run
    all_weights = np.concatenate([weights, np.ones(int(2 * PRIOR))])
    e = np.concatenate([effective, np.arange(2 * PRIOR) < PRIOR])
    times = np.concatenate([share + (1 - share) * weights, np.ones(int(2 * PRIOR))])

    def difference(kept):
        u, v = 1 / times[kept], (all_weights / times)[kept]
        gained = (MARGIN - 1) * PRIOR  # by selection, before the run
        return (v @ e[kept] + gained) / v.sum() - MARGIN * (u @ e[kept]) / u.sum()

    every = np.arange(len(e))
    without = np.array([difference(every != i) for i in every])
    error = math.sqrt((len(e) - 1) * without.var())
    assert after(effective, weights, share).gain == pytest.approx(difference(every) / error, rel=0.02)


@pytest.mark.parametrize("share", [0.2, 0.9])
@pytest.mark.parametrize(
    ("low", "high", "least", "most"), [(0.2, 0.6, -3, 3), (0.1, 0.7, 10, 1e3), (0.3, 0.5, -1e3, -10)]
)
def test_it_estimates_what_selection_gains_however_groups_were_drawn(share, low, high, least, most):
    """Two halves of weights 0.5 and 1.5, effective in 0.4 on average: with 0.2 and 0.6 selection gains just a quarter."""
    rng = np.random.default_rng(1)
    drawn = rng.random(60_000) < share * 0.5 + (1 - share) * 0.75  # the better half
    effective = rng.random(60_000) < np.where(drawn, high, low)
    exploring = after(effective, np.where(drawn, 1.5, 0.5), share)
    (total_u, total_v), (effective_u, effective_v) = exploring._sums
    assert effective_u / total_u == pytest.approx(0.4, abs=0.01)
    assert effective_v / total_v == pytest.approx((low + 3 * high) / 4, abs=0.01)
    assert least < exploring.gain < most


def test_selection_that_gains_nothing_gives_way():
    half = [True] * 40 + [False] * 40
    good, bad = [1.8] * 40 + [0.2] * 40, [0.2] * 40 + [1.8] * 40
    assert after(half, good).value < 0.051
    assert after(half, [1.0] * 80).value > 0.99, "drawing as uniform sampling does is no gain"
    assert after(half, bad).value > 0.99


@pytest.mark.parametrize("seed", range(5))
def test_weights_that_know_nothing_leave_it_uniform(seed):
    rng = np.random.default_rng(seed)
    exploring = ExplorationShare(0.05)
    values = []
    for _ in range(60):
        exploring.observe(rng.random(16) < 0.4, rng.choice([0.3, 1.7], 16), np.full(16, 0.5))
        values.append(exploring.value)
    assert np.mean(values) > 0.5


def test_old_groups_fade():
    exploring = after([True] * 40 + [False] * 40, [0.2] * 40 + [1.8] * 40)
    for _ in range(int(4 * GAIN_HALF_LIFE)):
        exploring.observe(np.arange(8) < 4, np.where(np.arange(8) < 4, 1.8, 0.2), np.full(8, 0.5))
    assert exploring.value < 0.06


def test_zero_switches_it_off_and_state_is_restored():
    assert after([True, False], [0.2, 1.8], least=0.0).value == 0.0
    exploring, restored = after([True, False, True], [0.2, 1.8, 1.0]), ExplorationShare(0.05)
    restored.load_state_dict(exploring.state_dict())
    assert restored.value == exploring.value
    restored.observe(np.zeros(0, dtype=bool), np.zeros(0), np.zeros(0))
    assert 0.05 < restored.value < 1
