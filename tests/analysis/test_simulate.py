"""The simulated population and the runs on it, against probabilities worked out apart from them."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from trl_dataeff.analysis.simulate import (
    BASELINE,
    SETTINGS,
    Costs,
    Learning,
    NothingLearned,
    Outcome,
    Prompts,
    SimulatedRun,
    best,
    compare,
    embed,
    make_config,
    success_rate_distribution,
)
from trl_dataeff.collector import GenerationBatch
from trl_dataeff.selection import DotsSelector


pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
MIXED = Prompts(400, easy=0.1, dead=0.6)


def runs_on(prompts: Prompts, learning: Learning | None = None, group_size: int = 8, groups: int = 16):
    def make_run(fields, seed):
        rng = np.random.default_rng(seed)
        log_odds = prompts.log_odds(rng)
        config = make_config(group_size, groups, seed=seed, **fields)
        return SimulatedRun(config, log_odds, lambda: embed(log_odds, prompts.predictability, rng), learning)

    return make_run


def test_prompts_have_the_shares_and_rates_that_were_asked_for():
    log_odds = Prompts(100_000, easy=0.2, dead=0.5, rates=(0.1, 0.4)).log_odds(np.random.default_rng(0))
    p = 1 / (1 + np.exp(-np.clip(log_odds.astype(np.float64), -50, 50)))
    assert np.mean(p > 0.9) == pytest.approx(0.2, abs=0.01)
    assert np.mean(p < 1e-4) == pytest.approx(0.5, abs=0.01)
    between = p[(p >= 1e-4) & (p <= 0.9)]
    assert 0.1 - 1e-6 < between.min() < 0.101
    assert 0.399 < between.max() < 0.4 + 1e-6
    # Evenly in log-odds: as many below the middle as above it
    assert np.mean(between < 1 / (1 + math.sqrt(9 * 1.5))) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("predictability", [0.0, 0.5, 1.0])
def test_embeddings_tell_as_much_as_was_asked_for(predictability):
    rng = np.random.default_rng(1)
    log_odds = Prompts(20_000, easy=0, dead=0).log_odds(rng)
    E = embed(log_odds, predictability, rng).astype(np.float64)
    assert explained(E, log_odds) == pytest.approx(predictability, abs=0.03)


def explained(E: np.ndarray, values: np.ndarray) -> float:
    """Multiple correlation of values with embeddings."""
    centred = values - values.mean()
    fitted = E @ np.linalg.lstsq(E, centred, rcond=None)[0]
    return math.sqrt(max(0.0, 1 - np.var(centred - fitted) / np.var(values)))


def test_how_far_out_of_reach_a_prompt_is_does_not_show():
    rng = np.random.default_rng(1)
    log_odds = Prompts(20_000, easy=0.2, dead=0.5).log_odds(rng)
    E = embed(log_odds, 1.0, rng).astype(np.float64)
    assert np.isfinite(E).all()
    assert explained(E, np.clip(log_odds, -6, 6)) > 0.99
    dead = log_odds < -100
    assert explained(E[dead], log_odds[dead]) < 0.05


@pytest.mark.parametrize(
    "wrong",
    [{"size": 0}, {"easy": 0.7, "dead": 0.4}, {"dead": -0.1}, {"rates": (0.5, 0.1)}, {"rates": (0.0, 0.1)}, {"predictability": 1.5}],
)  # fmt: skip
def test_impossible_prompts_are_refused(wrong):
    with pytest.raises(ValueError, match=r"has to be|have to be|take"):
        Prompts(**{"size": 10, "easy": 0.1, "dead": 0.1} | wrong)


def test_groups_are_effective_as_often_as_their_success_rates_say():
    run = runs_on(Prompts(4_000, easy=0.1, dead=0.5), Learning(speed=0.0))(SETTINGS["uniform"], 0)
    p = run.success()
    expected = np.mean(1 - p**8 - (1 - p) ** 8)
    for _ in run.steps(250):  # a pass over all prompts
        pass
    assert run.now.groups == 4_000
    assert run.now.rollouts == 250 * 16 * 8
    assert run.now.effective / run.now.groups == pytest.approx(expected, abs=3 * math.sqrt(0.25 / 4_000))


def test_skill_grows_by_the_effective_groups_of_a_step(monkeypatch):
    learning = Learning(speed=0.2, alpha=0.5, replay_value=0.25)
    run = runs_on(Prompts(64, easy=0, dead=0, rates=(0.4, 0.6)), learning)({}, 0)
    skills = [0.0]
    for _ in range(6):
        progress, batch = run.step()
        replayed = [group for group in batch.trained if group.step < progress.step - 1]
        fresh = sum(len(set(g.rewards.ravel())) == 2 for g in batch.trained) - len(replayed)
        skills.append(skills[-1] + 0.2 * math.sqrt((fresh + 0.25 * len(replayed)) / 16))
        assert progress.skill == pytest.approx(skills[-1])
    assert len(replayed) == 8
    assert learning.gain(GenerationBatch(), 16) == 0


def test_success_follows_skill():
    run = runs_on(MIXED)({}, 0)
    before = run.success()
    odds = before / (1 - before)
    for _ in run.steps(20):
        pass
    after = run.success() / (1 - run.success())
    assert after == pytest.approx(odds * math.exp(run.now.skill), rel=1e-6)


def test_the_default_is_what_the_trainer_would_select_with():
    run = runs_on(MIXED)({}, 0)
    assert type(run.collector.selector) is DotsSelector
    assert run.collector.replay_groups == 8


def test_where_prompts_are_dead_selection_and_replay_save_and_dynamic_sampling_does_not():
    outcomes = compare(runs_on(MIXED), SETTINGS, steps=60, costs=Costs(2.0, 10.0), seeds=2)
    assert outcomes[BASELINE].rollouts == 60 * 128
    assert outcomes[BASELINE].seconds == pytest.approx(2 * 60 * 128 + 10 * 60)
    assert outcomes["dynamic sampling"].ratio > 1
    assert outcomes["dynamic sampling"].steps < 40
    assert outcomes["default"].ratio < outcomes["dots"].ratio < outcomes["greso"].ratio < 1
    assert outcomes["dots"].effective > 1.3 * outcomes[BASELINE].effective
    assert best(outcomes) != BASELINE


def test_where_prompts_are_dead_sequential_rollouts_stop_groups_and_are_counted_as_generated():
    whole, halves = (
        runs_on(MIXED)({**SETTINGS["uniform"], "sequential_rollouts": on}, seed=0) for on in (False, True)
    )
    for _ in range(20):
        whole.step()
    sizes = [group.size for _ in range(20) for group in halves.step()[1].generated]
    assert set(sizes) == {4, 8}
    assert halves.now.rollouts == sum(sizes) < 0.85 * whole.now.rollouts
    assert halves.now.groups == whole.now.groups == 20 * 16


def test_where_every_group_teaches_there_is_nothing_to_save_by_selection():
    even = Prompts(400, easy=0, dead=0, rates=(0.5, 0.5))
    settings = {name: SETTINGS[name] for name in ("dots", "greso")}
    outcomes = compare(runs_on(even, Learning(speed=0.001)), settings, steps=40, costs=Costs(), seeds=1)
    for name in settings:
        assert outcomes[name].ratio == pytest.approx(1, abs=0.06), name
    assert best({name: outcomes[name] for name in (BASELINE, "greso")}) == BASELINE


def test_a_setting_that_takes_twice_the_time_is_not_waited_for():
    # Many groups for each step, where only the number of steps counts
    learning = Learning(alpha=0.01)
    settings = {"dynamic sampling": SETTINGS["dynamic sampling"]}
    outcomes = compare(runs_on(MIXED, learning), settings, steps=30, costs=Costs(), seeds=1)
    assert outcomes["dynamic sampling"].rollouts == math.inf
    # Where steps are what costs, it is waited for
    dear = compare(runs_on(MIXED, learning), settings, steps=30, costs=Costs(1e-6, 1.0), seeds=1)
    assert 30 <= dear["dynamic sampling"].steps < 60


def test_many_cheap_steps_are_waited_for():
    even = Prompts(400, easy=0, dead=0, rates=(0.5, 0.5))
    settings = {"replay": {"selection": "uniform", "replay_fraction": 0.75}}
    outcomes = compare(runs_on(even, Learning(speed=0.01)), settings, steps=20, costs=Costs(), seeds=1)
    assert outcomes["replay"].steps > 40
    assert outcomes["replay"].ratio < 0.8


@pytest.mark.parametrize("easy", [0.0, 1.0])
def test_where_nothing_is_learned_there_is_nothing_to_compare(easy):
    hopeless = Prompts(200, easy=easy, dead=1 - easy)
    with pytest.raises(NothingLearned, match="None of 200 prompts is learnable"):
        compare(runs_on(hopeless, Learning(speed=1.0)), {"default": {}}, steps=3, costs=Costs(), seeds=1)


def test_where_little_is_learned_there_is_nothing_to_compare():
    few = Prompts(200, easy=0, dead=0.97)
    with pytest.raises(NothingLearned, match="learns next to nothing"):
        compare(runs_on(few, Learning(speed=1.0)), {"default": {}}, steps=1, costs=Costs(), seeds=1)


def test_progress_is_told_before_each_run_and_after_each_step():
    told: list[tuple[str, int, int]] = []
    settings = {"greso": SETTINGS["greso"]}
    outcomes = compare(
        runs_on(MIXED), settings, steps=20, costs=Costs(), seeds=2, progress=lambda *args: told.append(args)
    )
    uniform = [step for name, seed, step in told if (name, seed) == (BASELINE, 0)]
    assert uniform == [*range(21)]
    steps = [max(step for name, seed, step in told if (name, seed) == ("greso", s)) for s in (0, 1)]
    assert np.mean(steps) == outcomes["greso"].steps


def test_the_dead_stay_dead_and_the_learnable_are_learned():
    run = runs_on(Prompts(300, easy=0.1, dead=0.5), Learning(speed=5.0))(SETTINGS["uniform"], 0)
    for _ in run.steps(40):
        pass
    assert run.now.skill > 8
    assert np.sort(run.success())[110] < 1e-9
    assert run.learnable_success() > 0.99


def test_rewards_are_drawn_apart_from_the_prompts():
    """A caller that draws the prompts with the run's seed gets rewards from another stream."""
    run = runs_on(MIXED)({}, 3)
    assert run.rng.random(8).tolist() != np.random.default_rng(3).random(8).tolist()


def test_equal_seeds_give_equal_outcomes():
    settings = {"default": {}}
    one, two = (compare(runs_on(MIXED), settings, steps=20, costs=Costs(), seeds=1) for _ in range(2))
    assert one == two


def test_the_defaults_are_preferred_among_equals():
    def outcome(seconds):
        return Outcome(1, 1, seconds, 0.5)

    assert best({BASELINE: outcome(100), "dots": outcome(50), "default": outcome(52)}) == "default"
    assert best({BASELINE: outcome(100), "dots": outcome(50), "default": outcome(60)}) == "dots"
    assert best({BASELINE: outcome(51), "dots": outcome(50)}) == BASELINE


def test_the_distribution_of_success_rates_is_found_behind_the_counts():
    rng = np.random.default_rng(0)
    true = rng.choice([0.0, 0.12, 0.6, 1.0], 20_000, p=[0.3, 0.3, 0.25, 0.15])
    successes = rng.binomial(8, true)
    assert np.mean(successes == 0) > 0.4  # counting zeros would say a third too many are dead
    grid, weights = success_rate_distribution(successes, np.full(len(true), 8))
    assert weights.sum() == pytest.approx(1)
    assert weights[grid < 0.02].sum() == pytest.approx(0.3, abs=0.04)
    assert weights[grid > 0.97].sum() == pytest.approx(0.15, abs=0.04)
    assert weights[(grid > 0.05) & (grid < 0.25)].sum() == pytest.approx(0.3, abs=0.05)
    assert weights @ grid == pytest.approx(np.mean(successes) / 8, abs=1e-3)  # a property of every EM fixed point


def test_a_step_on_a_million_prompts_takes_no_loop_over_them():
    run = runs_on(Prompts(1_000_000, easy=0.1, dead=0.5))({}, 0)
    run.step()
    began = time.process_time()
    for _ in run.steps(3):
        pass
    assert time.process_time() - began < 3 * 1.5  # a loop over them would take some seconds a step; this takes 0.2
    assert run.now.effective > 0
