"""GRESO's skip rule and its controller, against the formulas."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.factories import generator, visit
from trl_dataeff.rollouts.group import EASY, EFFECTIVE, HARD
from trl_dataeff.selection import GresoSelector
from trl_dataeff.selection.base import SelectorContext
from trl_dataeff.selection.greso import GresoController, keep_probability


def greso(size: int, batch: int = 1, **arguments) -> GresoSelector:
    selector = GresoSelector(**arguments)
    selector.bind(SelectorContext(size, batch, group_size=8))
    return selector


@given(st.integers(0, 10_000), st.floats(0.05, 0.95), st.floats(0.001, 0.5))
def test_keep_probability_is_bounded_and_falls_with_the_streak(streak, p, floor):
    probability, longer = keep_probability(np.array([streak, streak + 1]), p, floor)
    assert floor <= longer <= probability <= 1
    assert probability == max(p**streak, floor)


def test_keep_probability_by_hand():
    np.testing.assert_allclose(keep_probability(np.array([0, 1, 2, 7]), 0.5), [1, 0.5, 0.25, 0.01])
    np.testing.assert_allclose(keep_probability(np.array([1, 1]), np.array([0.3, 0.9])), [0.3, 0.9])


@pytest.mark.parametrize(("streak", "kind"), [(1, EASY), (2, HARD), (3, EASY), (12, HARD)])
def test_skip_rate_follows_the_formula(streak, kind):
    """10,000 draws, within three standard errors."""
    p = {EASY: 0.7, HARD: 0.4}
    selector, rng = greso(10_000), generator(1)
    gate = selector.gate
    gate.pool.streak[:], gate.pool.streak_kind[:] = streak, kind
    gate.controller.p_easy, gate.controller.p_hard = p[EASY], p[HARD]
    admitted = 0
    while selector._passes < 2:  # one whole pass
        selector.propose(1, rng)
        admitted += selector._passes == 1
    expected = max(p[kind] ** streak, 0.01)
    assert abs(admitted / 10_000 - expected) <= 3 * np.sqrt(expected * (1 - expected) / 10_000)
    assert gate.skipped >= 10_000 - admitted


def test_unseen_prompts_are_always_admitted_and_each_once_a_pass():
    selector, rng = greso(100), generator()
    seen = np.concatenate([selector.propose(20, rng) for _ in range(5)])
    assert sorted(seen.tolist()) == list(range(100))
    assert selector.gate.skipped == 0


def test_a_prompt_that_turns_effective_is_admitted_at_its_next_pass():
    selector, rng = greso(50), generator()
    for _ in range(8):
        selector.observe([visit(i, HARD) for i in range(50)])
    selector.observe([visit(7, EFFECTIVE)])
    seen_in_pass: dict[int, set] = {}
    for _ in range(60):
        ids = selector.propose(1, rng)
        seen_in_pass.setdefault(selector._passes, set()).update(ids.tolist())
    complete = [seen for number, seen in seen_in_pass.items() if 1 <= number < selector._passes]
    assert len(complete) >= 20
    assert all(7 in seen for seen in complete)


def test_a_pass_in_which_all_are_skipped_flows_into_the_next():
    selector = greso(8)
    selector.gate.pool.streak[:], selector.gate.pool.streak_kind[:] = 100, HARD
    assert sorted(selector.propose(8, generator()).tolist()) == list(range(8))
    assert selector._passes > 2


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 200))
def test_controller_keeps_its_bounds_and_moves_against_the_share(easy, hard, updates):
    control = GresoController()
    for _ in range(updates):
        before = control.p_easy, control.p_hard
        control.update(easy, hard)
        assert 0.05 <= control.p_easy <= 0.95
        assert 0.05 <= control.p_hard <= 0.95
        assert (control.p_easy <= before[0]) == (easy >= 0.25 / 3 or before[0] == 0.95)
        assert (control.p_hard <= before[1]) == (hard >= 0.25 * 2 / 3 or before[1] == 0.95)


def published_update(p_hard: float, rewards: np.ndarray) -> float:
    """The published rule for hard prompts: it counts groups whose rewards sum to less than 0, which 0/1 rewards never
    do, so the observed hard share is 0 and the keep probability only rises."""
    hard_ratio = float((rewards.sum(axis=1) < 0).mean())
    return max(p_hard - 0.01, 0.05) if hard_ratio >= 1 / 6 else min(p_hard + 0.01, 0.95)


def test_with_60_percent_hard_for_ever_p_hard_falls_and_the_hard_share_meets_its_target():
    n, batch, g, batches = 1200, 60, 8, 400
    selector, rng, numbers = greso(n, batch), generator(3), np.random.default_rng(0)
    control = selector.gate.controller
    success = np.where(np.arange(n) < 0.6 * n, 0.0, 0.5)
    published, hard_shares = 0.5, []
    for i in range(batches):
        ids = selector.propose(batch, rng)
        rewards = (numbers.random((batch, g)) < success[ids, None]).astype(float)
        kinds = np.where(rewards.min(1) == rewards.max(1), np.where(rewards.max(1) == 1, EASY, HARD), EFFECTIVE)
        selector.observe([visit(int(prompt), int(kind)) for prompt, kind in zip(ids, kinds, strict=True)])
        hard_shares.append((kinds == HARD).mean())
        if i >= n // batch:
            published = published_update(published, rewards)
        if i == n // batch - 1:
            assert control.p_hard in (0.5, 0.49), "no adaptation before every prompt has had its chance"
        if i == n // batch + 20:
            assert control.p_hard < 0.4
    # Later, as streaks grow, p^z needs a larger p for the same share: it is the share that is steered
    assert abs(np.mean(hard_shares[-100:]) - 1 / 6) <= 0.05
    assert published == pytest.approx(0.95)
