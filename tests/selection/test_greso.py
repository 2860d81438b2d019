"""GRESO's skip rule and its controller, against the formulas of arXiv 2506.02177."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.factories.groups import generator, visit
from trl_dataeff.rollouts.group import EASY, EFFECTIVE, HARD
from trl_dataeff.selection import GresoSelector
from trl_dataeff.selection.base import SelectorContext


def greso(size: int, batch: int = 1, **arguments) -> GresoSelector:
    selector = GresoSelector(**arguments)
    selector.bind(SelectorContext(size, batch, group_size=8))
    return selector


def keep(p: float, streak: int) -> float:
    """Equation 3, with the floor of the published code."""
    return max(p**streak, 0.01) if streak else 1.0


def moved(p: float, share: float, target: float) -> float:
    """The published rule of a keep probability, with its constants."""
    if share >= target:
        return max(p - 0.01, 0.05)
    return min(p + 0.01, 0.95)


@pytest.mark.parametrize(("p", "streak", "kind"), [(0.7, 1, EASY), (0.4, 2, HARD), (0.7, 3, EASY), (0.4, 12, HARD)])
def test_skip_rate_follows_the_formula(p, streak, kind):
    """About 10,000 draws, within three standard errors."""
    selector = greso(2000, p_init=p)
    rng = generator(1)
    for _ in range(streak):
        selector.observe([visit(prompt, kind) for prompt in range(2000)])
    expected = keep(p, streak)
    kept = round(10_000 * expected)
    for _ in range(kept):
        selector.propose(1, rng)
    draws = kept + selector.metrics()["prompts_skipped"]
    standard_error = np.sqrt(expected * (1 - expected) / draws)
    assert abs(kept / draws - expected) <= 3 * standard_error


def test_unseen_prompts_are_always_admitted_and_each_once_a_pass():
    selector = greso(100)
    rng = generator()
    seen = np.concatenate([selector.propose(20, rng) for _ in range(5)])
    assert sorted(seen.tolist()) == list(range(100))
    assert selector.metrics()["prompts_skipped"] == 0


def test_a_pass_in_which_all_are_skipped_flows_into_the_next():
    selector = greso(8)
    for _ in range(20):
        selector.observe([visit(prompt, HARD) for prompt in range(8)])
    assert sorted(selector.propose(8, generator()).tolist()) == list(range(8))
    assert selector.metrics()["prompts_skipped"] > 8


def train(selector: GresoSelector, success: np.ndarray, batches: int, batch: int, seed: int = 3, group_size: int = 8):
    """Yields the groups of each generation batch. Prompts succeed with fixed probabilities."""
    rng = generator(seed)
    numbers = np.random.default_rng(seed)
    for _ in range(batches):
        ids = selector.propose(batch, rng)
        wins = numbers.binomial(group_size, success[ids])
        kinds = np.where(wins == group_size, EASY, np.where(wins == 0, HARD, EFFECTIVE))
        groups = [visit(int(prompt), int(kind)) for prompt, kind in zip(ids, kinds, strict=True)]
        selector.observe(groups)
        yield groups


def test_the_selector_is_published_greso():
    """Both keep probabilities against plain Python, over 20 passes' worth of groups."""
    size = 240
    batch = 24
    selector = greso(size, batch)
    success = np.full(size, 0.5)
    success[:120] = 0.0
    success[120:144] = 1.0
    p = {EASY: 0.5, HARD: 0.5}
    lowest = 1.0
    for i, groups in enumerate(train(selector, success, 200, batch)):
        if i >= size // batch - 1:  # the first pass is over
            for kind, target in ((EASY, 1 / 12), (HARD, 1 / 6)):
                share = sum(group.kind == kind for group in groups) / batch
                p[kind] = moved(p[kind], share, target)
        metrics = selector.metrics()
        assert (metrics["p_easy"], metrics["p_hard"]) == pytest.approx((p[EASY], p[HARD]), abs=1e-9)
        lowest = min(lowest, p[HARD])
    assert lowest < 0.4


def test_an_unreachable_target_leaves_a_keep_probability_at_its_lower_bound():
    """Every prompt succeeds with 0.93: more than half of all groups are easy, whichever prompts are drawn."""
    size = 200
    batch = 20
    selector = greso(size, batch)
    p_easy = [selector.metrics()["p_easy"] for _ in train(selector, np.full(size, 0.93), 300, batch)]
    assert set(p_easy[-200:]) == {0.05}
    assert selector.metrics()["p_hard"] == 0.95


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([EASY, HARD, EFFECTIVE])), max_size=9), max_size=5)
)
def test_streaks_against_a_walk_over_the_groups(batches):
    """A prompt may occur more than once in a batch."""
    selector = greso(4, p_init=0.9)
    seen = {i: [] for i in range(4)}
    for groups in batches:
        selector.observe([visit(prompt, kind) for prompt, kind in groups])
        for prompt, kind in groups:
            seen[prompt].append(kind)
    for prompt, kinds in seen.items():
        expected = 0
        if kinds and kinds[-1] != EFFECTIVE:
            # The streak is what follows the last group of another kind
            others = [i for i, kind in enumerate(kinds, 1) if kind != kinds[-1]]
            expected = len(kinds) - max(others, default=0)
        assert selector.keep(np.array([prompt]))[0] == pytest.approx(keep(0.9, expected))


@pytest.mark.parametrize("wrong", [{"p_init": 0.0}, {"p_min": 0.6}, {"target_zero_variance": 1.0}, {"easy_share": 2}])
def test_impossible_arguments_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        GresoSelector(**wrong)
