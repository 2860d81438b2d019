"""GRESO's skip rule and its controller, against the formulas."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.factories import generator, visit
from trl_dataeff.rollouts.group import EASY, EFFECTIVE, HARD
from trl_dataeff.selection import GresoSelector
from trl_dataeff.selection.base import SelectorContext
from trl_dataeff.selection.greso import FLOOR, KeepProbability


def greso(size: int, batch: int = 1, **arguments) -> GresoSelector:
    selector = GresoSelector(**arguments)
    selector.bind(SelectorContext(size, batch, group_size=8))
    return selector


@pytest.mark.parametrize(("streak", "kind"), [(1, EASY), (2, HARD), (3, EASY), (12, HARD)])
def test_skip_rate_follows_the_formula(streak, kind):
    """10,000 draws, within three standard errors."""
    p = {EASY: 0.7, HARD: 0.4}
    selector, rng = greso(10_000), generator(1)
    selector.streaks.streak[:], selector.streaks.kind[:] = streak, kind
    selector.easy.value, selector.hard.value = p[EASY], p[HARD]
    admitted = 0
    while selector._passes < 2:  # one whole pass
        selector.propose(1, rng)
        admitted += selector._passes == 1
    expected = max(p[kind] ** streak, 0.01)
    assert abs(admitted / 10_000 - expected) <= 3 * np.sqrt(expected * (1 - expected) / 10_000)
    assert selector.metrics()["prompts_skipped"] >= 10_000 - admitted


def test_unseen_prompts_are_always_admitted_and_each_once_a_pass():
    selector, rng = greso(100), generator()
    seen = np.concatenate([selector.propose(20, rng) for _ in range(5)])
    assert sorted(seen.tolist()) == list(range(100))
    assert selector.metrics()["prompts_skipped"] == 0


def test_a_pass_in_which_all_are_skipped_flows_into_the_next():
    selector = greso(8)
    selector.streaks.streak[:], selector.streaks.kind[:] = 100, HARD
    assert sorted(selector.propose(8, generator()).tolist()) == list(range(8))
    assert selector._passes > 2


def hard_control(initial: float = 0.5) -> KeepProbability:
    return KeepProbability(initial, 0.01, 0.05, 0.95, 1 / 6)


def published(p: float, share: float, target: float = 1 / 6) -> float:
    """The rule of arXiv 2506.02177 with its published constants."""
    return max(p - 0.01, 0.05) if share >= target else min(p + 0.01, 0.95)


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.1, 1 / 6, 0.2, 1.0]), st.integers(1, 30)), max_size=12))
def test_a_keep_probability_follows_the_published_rule_until_its_target_is_unreachable(runs):
    """Unreachable: ten updates in a row find it at the lower bound, with a share at or above the target."""
    control, expected, at_bound = hard_control(0.09), 0.09, 0
    for share in [share for share, length in runs for _ in range(length)]:
        at_bound = at_bound + 1 if expected == 0.05 and share >= 1 / 6 else 0
        expected = published(expected, share)
        control.update(share)
        assert control.held == (at_bound == 10)
        if control.held:
            assert control.value == 0.09
            return
        assert control.value == expected


def test_a_held_keep_probability_is_released_after_ten_updates_below_the_target():
    control = hard_control()
    for _ in range(45 + 10):
        assert not control.held
        control.update(0.3)
    assert (control.held, control.value) == (True, 0.5)
    for share in [0.3, *[0.1] * 9] * 5:
        control.update(share)
        assert (control.held, control.value) == (True, 0.5)
    control.update(0.1)  # the tenth in a row
    assert (control.held, control.value) == (False, 0.5)
    control.update(0.1)
    assert control.value == 0.51


@pytest.mark.parametrize("updates", [50, 54, 60, 70])
def test_the_state_of_a_keep_probability_is_complete(updates):
    control, other = hard_control(), hard_control()
    for _ in range(updates):
        control.update(0.3)
    for _ in range(5 if control.held else 0):
        control.update(0.0)
    other.load_state(np.array(control.state()))
    for share in [*[0.3] * 6, *[0.0] * 12, *[0.3] * 60]:
        control.update(share)
        other.update(share)
        assert (control.held, control.value) == (other.held, other.value)


def train(selector: GresoSelector, success: np.ndarray, batches: int, batch: int, seed: int = 3, group_size: int = 8):
    """A generation batch per item: its groups. Prompts succeed with fixed probabilities."""
    rng, numbers = generator(seed), np.random.default_rng(seed)
    for _ in range(batches):
        ids = selector.propose(batch, rng)
        wins = numbers.binomial(group_size, success[ids])
        kinds = np.where(wins == group_size, EASY, np.where(wins == 0, HARD, EFFECTIVE))
        groups = [visit(int(prompt), int(kind)) for prompt, kind in zip(ids, kinds, strict=True)]
        selector.observe(groups)
        yield groups


def test_with_reachable_targets_the_selector_is_published_greso():
    """Both keep probabilities and every streak against plain Python, over 20 passes' worth of groups."""
    size, batch = 240, 24
    selector = greso(size, batch)
    success = np.where(np.arange(size) < 0.5 * size, 0.0, np.where(np.arange(size) < 0.6 * size, 1.0, 0.5))
    p, streaks, last = {EASY: 0.5, HARD: 0.5}, dict.fromkeys(range(size), 0), dict.fromkeys(range(size), EFFECTIVE)
    lowest = 1.0
    for i, groups in enumerate(train(selector, success, 200, batch)):
        for group in groups:
            same = group.kind == last[group.prompt_id]
            streaks[group.prompt_id] = 0 if group.kind == EFFECTIVE else 1 + same * streaks[group.prompt_id]
            last[group.prompt_id] = group.kind
        if i >= size // batch - 1:  # the first pass is over
            for kind, target in ((EASY, 1 / 12), (HARD, 1 / 6)):
                p[kind] = published(p[kind], sum(g.kind == kind for g in groups) / batch, target)
        assert (selector.easy.value, selector.hard.value) == pytest.approx((p[EASY], p[HARD]), abs=1e-9)
        lowest = min(lowest, p[HARD])
        keep = [max(p[last[j]] ** streaks[j], FLOOR) if streaks[j] else 1.0 for j in range(size)]
        np.testing.assert_allclose(selector.keep(np.arange(size)), keep, rtol=1e-9)
    assert max(streaks.values()) >= 3
    assert lowest < 0.4


def test_an_unreachable_target_does_not_leave_a_keep_probability_at_its_lower_bound():
    """Every prompt succeeds with 0.93: more than half of all groups are easy, whichever prompts are drawn."""
    size, batch = 200, 20
    selector, at_bound = greso(size, batch), []
    for _ in train(selector, np.full(size, 0.93), 300, batch):
        at_bound.append(selector.easy.value == 0.05)
    assert sum(at_bound) <= 20
    assert not any(at_bound[-200:])
    assert selector.easy.held
    assert selector.metrics()["p_easy"] == 0.5
    assert not selector.hard.held


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([EASY, HARD, EFFECTIVE])), max_size=9), max_size=5)
)
def test_streaks_against_a_walk_over_the_groups(batches):
    """A prompt may occur more than once in a batch."""
    selector, seen = greso(4), {i: [] for i in range(4)}
    for groups in batches:
        selector.observe([visit(prompt, kind) for prompt, kind in groups])
        for prompt, kind in groups:
            seen[prompt].append(kind)
    for prompt, kinds in seen.items():
        others = [
            i for i, kind in enumerate(kinds, 1) if kind != kinds[-1]
        ]  # the streak is what follows the last of them
        expected = len(kinds) - max(others, default=0) if kinds and kinds[-1] != EFFECTIVE else 0
        assert selector.streaks.streak[prompt] == expected


def test_a_state_of_another_dataset_is_refused():
    with pytest.raises(ValueError, match="Streaks of 4 prompts do not fit 5 prompts"):
        greso(5).load_state_dict(greso(4).state_dict())


@pytest.mark.parametrize("wrong", [{"p_init": 0.0}, {"p_min": 0.6}, {"target_zero_variance": 1.0}, {"easy_share": 2}])
def test_impossible_arguments_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        GresoSelector(**wrong)
