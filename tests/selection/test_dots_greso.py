"""DOTS and GRESO together: the draw against enumeration, what moves the keep probabilities, and the state."""

import itertools

import numpy as np
import pytest
import torch

from tests.factories import generator, visit
from trl_dataeff.rollouts.group import EASY, EFFECTIVE, HARD
from trl_dataeff.selection import DotsGresoSelector, DotsSelector
from trl_dataeff.selection.base import SelectorContext


def bound(cls: type = DotsGresoSelector, size: int = 4, batch: int = 4, **arguments):
    selector = cls(**arguments)
    embeddings = np.random.default_rng(0).normal(size=(size, 6)).astype(np.float16)
    selector.bind(SelectorContext(size, batch, group_size=8, embed=lambda: embeddings))
    return selector


def four_prompts() -> tuple[DotsGresoSelector, np.ndarray, np.ndarray]:
    """A selector with streaks, DOTS's weights, and the keep probabilities by hand."""
    selector = bound(streak_half_life=2.0)
    selector.gate.easy.value, selector.gate.hard.value = 0.7, 0.4
    selector.observe([visit(0, HARD), visit(0, HARD), visit(1, EASY), visit(2, HARD)])
    selector.observe([visit(2, EFFECTIVE)])
    selector.observe([])  # after the half-life: streaks of 2, 1 and 0 groups count half
    selector.gate.easy.value, selector.gate.hard.value = 0.7, 0.4
    return selector, np.array([0.4, 0.35, 0.1, 0.15]), np.array([0.4, 0.7**0.5, 1, 1])


def test_a_draw_has_the_weights_of_dots_times_the_keep_probabilities(monkeypatch):
    """Exact probabilities of every ordered pair, by enumeration: v_i / sum(v) and then v_j / (sum(v) - v_i)."""
    selector, weights, keep = four_prompts()
    v = weights * keep / (weights * keep).sum()
    of_dots, rng, draws = torch.from_numpy(np.log(weights)) - 3, generator(5), 6_000
    monkeypatch.setattr(DotsSelector, "log_weights", lambda self: of_dots)
    counts = dict.fromkeys(itertools.permutations(range(4), 2), 0)
    for _ in range(draws):
        counts[tuple(selector._draw(selector.log_weights(), 2, rng).tolist())] += 1
    for (i, j), count in counts.items():
        expected = v[i] * v[j] / (1 - v[i])
        assert abs(count / draws - expected) < 4.5 * np.sqrt(expected * (1 - expected) / draws)


def test_prompts_skipped_counts_the_draws_that_the_keep_probabilities_change(monkeypatch):
    """
    Of two prompts with the same noise, the draws differ as often as the two Bernoulli probabilities do: a is drawn if a
    logistic variable exceeds the log-odds of b.
    """
    selector, _, keep = four_prompts()
    weights = np.array([0.6, 0.0, 0.4, 0.0])
    with np.errstate(divide="ignore"):
        of_dots = torch.from_numpy(np.log(weights))
    monkeypatch.setattr(DotsSelector, "log_weights", lambda self: of_dots)
    rng, draws = generator(6), 6_000
    drawn = sum(int(selector._draw(selector.log_weights(), 1, rng)[0] == 0) for _ in range(draws))
    plain, kept = 0.6, 0.6 * keep[0] / (0.6 * keep[0] + 0.4)
    assert abs(drawn / draws - kept) < 4.5 * np.sqrt(kept * (1 - kept) / draws)
    skipped = plain - kept
    assert abs(selector.metrics()["prompts_skipped"] / draws - skipped) < 4.5 * np.sqrt(
        skipped * (1 - skipped) / draws
    )


def test_without_streaks_it_is_dots():
    both, alone = bound(size=60, batch=8), bound(DotsSelector, size=60, batch=8)
    rng, same = generator(1), generator(1)
    for i in range(6):
        ids = both.propose(8, rng)
        np.testing.assert_array_equal(ids, alone.propose(8, same))
        for selector in (both, alone):
            selector.observe([visit(int(j), EFFECTIVE, rate=(i + 1) / 8) for j in ids])
    assert both.metrics()["prompts_skipped"] == 0


def test_excluded_prompts_come_last_whatever_the_streaks():
    selector = bound(size=40, batch=4)
    selector.observe([visit(i, HARD) for i in range(20) for _ in range(50)])
    log_weights = torch.full((40,), -torch.inf, dtype=torch.float64)
    log_weights[:20] = 0.0  # those with streaks are all that is left
    for seed in range(50):
        assert selector._draw(log_weights, 25, generator(seed))[:20].max() < 20


def test_a_pool_full_of_streaks_is_drawn_from_by_dotss_weights():
    """The draw does not run out of prompts and fall to those of hardly any weight."""
    selector = bound(size=100, batch=10)
    selector.observe([visit(i, EASY) for i in range(90) for _ in range(30)])
    log_weights = torch.zeros(100, dtype=torch.float64)
    log_weights[90:] = -30.0  # no streak, but no weight either
    for seed in range(50):
        assert selector._draw(log_weights, 10, generator(seed)).max() < 90


def steps(selector: DotsGresoSelector, batches: int, groups) -> None:
    for _ in range(batches):
        selector.observe(groups(selector.propose(8, generator())))


@pytest.mark.parametrize("reference", [False, True])
def test_explored_and_reference_groups_count_in_streaks_alone(reference):
    """Drawn uniformly, so that the keep probabilities cannot change what they are."""
    selector = bound(size=32, batch=8, exploration=0.0 if reference else 0.2)
    steps(selector, 4, lambda ids: [])  # a pass's worth of batches, without groups: nothing moves
    assert selector.metrics()["p_hard"] == 0.5
    ids = selector.propose(8, generator())
    uniform = ids[4:] if reference else selector._explored
    assert 4 <= len(uniform) < 8
    groups = [visit(int(i), HARD if i in uniform else EFFECTIVE) for i in ids]
    for group in groups:
        if reference and group.prompt_id in uniform:
            group.origin = "reference"
    selector.observe(groups)
    assert selector.metrics()["p_hard"] == 0.51, "no hard group among those that it has influence on"
    assert (selector.gate.pool.streak[uniform] == 1).all()
    selector.propose(8, generator())
    selector.observe([visit(int(i), HARD) for i in selector._explored])
    assert selector.metrics()["p_hard"] == 0.51, "there is no group to go by"


def test_keep_probabilities_adapt_after_a_passs_worth_of_batches():
    """33 prompts, 8 a batch: from the fifth batch on. Proposing more than is trained on does not count."""
    selector = bound(size=33, batch=8, exploration=0.0)
    for number in range(1, 8):
        for _ in range(3):
            ids = selector.propose(8, generator())
        selector.observe([visit(int(i), HARD) for i in ids])
        assert selector.metrics()["p_hard"] == pytest.approx(0.5 - 0.01 * max(0, number - 4))


def test_an_unreachable_target_does_not_leave_a_keep_probability_at_its_lower_bound():
    """Of all groups, 4 in 10 are easy, as those of a pool that is learned."""
    selector, rng = bound(size=64, batch=16, exploration=0.0), np.random.default_rng(0)
    at_bound = []
    for _ in range(300):
        ids = selector.propose(16, generator())
        selector.observe([visit(int(i), EASY if rng.random() < 0.4 else EFFECTIVE) for i in ids])
        at_bound.append(selector.metrics()["p_easy"] == 0.05)
    assert sum(at_bound) <= 20
    assert not any(at_bound[-200:])
    assert selector.metrics()["p_easy"] == 0.5


def test_streaks_fade_by_default():
    assert bound().gate.pool.half_life == bound(streak_half_life=None).gate.pool.half_life == 100
    assert bound(streak_half_life=7).gate.pool.half_life == 7
    selector = bound(size=1000, batch=4)
    selector.observe([visit(0, HARD) for _ in range(4)])
    before = selector.gate.keep()[0]
    for _ in range(200):
        selector.observe([])
    assert (before, selector.gate.keep()[0]) == (0.5**4, 0.5)


@pytest.mark.parametrize("batches", [3, 55, 70])
def test_the_state_restores_everything_that_decides(batches):
    """Also in the middle of counting towards an unreachable target, and while it is held."""
    rng, kinds = generator(2), np.random.default_rng(1)

    def step(selectors, generators):
        ids = [s.propose(8, g) for s, g in zip(selectors, generators, strict=True)]
        drawn = kinds.choice([EASY, EFFECTIVE, HARD], size=8, p=[0.7, 0.2, 0.1])
        for selector, chosen in zip(selectors, ids, strict=True):
            np.testing.assert_array_equal(chosen, ids[0])
            selector.observe([visit(int(i), int(k)) for i, k in zip(chosen, drawn, strict=True)])

    first = bound(size=40, batch=8)
    for _ in range(batches):
        step([first], [rng])
    second, rng2 = bound(size=40, batch=8), generator(99)
    second.load_state_dict(first.state_dict())
    rng2.set_state(rng.get_state())
    for _ in range(30):
        step([first, second], [rng, rng2])
        for name, value in first.state_dict().items():
            np.testing.assert_array_equal(value, second.state_dict()[name], strict=True, err_msg=name)
    assert first.metrics() == second.metrics()
