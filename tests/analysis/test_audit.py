"""What an audit says of groups whose shares are known, and of runs that are simulated with known success rates."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from trl_dataeff.analysis.audit import Chance, audit
from trl_dataeff.analysis.audit_projection import (
    PROJECTED,
    TooLittle,
    _Scale,
    effective_shares,
    fit,
    predictability_of_texts,
    project,
)
from trl_dataeff.analysis.simulate import Costs, Learning, Prompts, SimulatedRun, compare, embed, make_config
from trl_dataeff.rollouts.group import EASY, EFFECTIVE, HARD
from trl_dataeff.tracking.completions import RecordedGroups


pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def recorded(step, prompt, kind, size=8, **columns) -> RecordedGroups:
    """Groups of half, all or no successes, by their kind."""
    kind = np.array(kind, dtype=np.int8)
    n = len(kind)
    given = {"tokens": np.full(n, 80.0), "seconds": np.full(n, np.nan), "success": np.choose(kind, [0.5, 1.0, 0.0])}
    return RecordedGroups(
        step=np.array(step), prompt=np.array(prompt), kind=kind, group_size=size, **{**given, **columns}
    )


#: Three prompts over four steps: a is hard, then effective; b easy throughout; c is effective, then easy
THREE = recorded(
    step=[1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4],
    prompt=[0, 1, 2] * 4,
    kind=[HARD, EASY, EFFECTIVE, HARD, EASY, EFFECTIVE, EFFECTIVE, EASY, EASY, HARD, EASY, EASY],
)


def test_shares_overall_and_over_time():
    found = audit(THREE)
    overall = found.overall
    assert (overall.effective, overall.easy, overall.hard) == pytest.approx((3 / 12, 6 / 12, 3 / 12))
    assert overall.success == pytest.approx((3 * 0.5 + 6) / 12)
    assert (found.prompts, found.steps, found.every, found.groups_per_step) == (3, 4, 1, 3)
    assert [(p.first, p.last) for p in found.periods] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert [p.effective for p in found.periods] == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    assert [p.hard for p in found.periods] == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3])
    assert sum(p.groups for p in found.periods) == 12


def test_many_steps_are_put_together():
    n = 64
    found = audit(recorded(np.arange(n), np.arange(n), [HARD] * 32 + [EFFECTIVE] * 32))
    assert len(found.periods) == 6
    assert [p.groups for p in found.periods] == [11, 11, 11, 11, 10, 10]
    assert found.periods[0].hard == 1
    assert found.periods[-1].effective == 1


def test_persistence_counts_pairs_of_a_prompt():
    """a: hard hard effective hard; b: easy x 4; c: effective effective easy easy."""
    it = audit(THREE).persistence
    assert it.again == Chance(1 + 3 + 1, 2 + 3 + 1)
    assert it.after_effective == Chance(1 + 1, 1 + 2)
    assert it.before == Chance(5, 1 + 1 + 3 + 2)
    assert it.again.share == pytest.approx(5 / 6)
    assert it.prompts_seen_once == 0


def test_persistence_does_not_depend_on_the_order_of_rows():
    order = np.random.default_rng(0).permutation(len(THREE))
    names = ("step", "prompt", "kind", "success", "tokens", "seconds")
    shuffled = replace(THREE, **{name: getattr(THREE, name)[order] for name in names})
    assert audit(shuffled).persistence == audit(THREE).persistence


def test_prompts_that_occur_once_are_in_no_pair():
    it = audit(recorded([1, 2, 3], [0, 1, 2], [HARD, HARD, EFFECTIVE])).persistence
    assert (it.again.cases, it.after_effective.cases, it.prompts_seen_once) == (0, 0, 3)
    assert math.isnan(it.again.share)


def test_cost():
    cost = audit(THREE).cost
    assert (cost.rollouts, cost.wasted_rollouts) == (96, 72)
    assert (cost.tokens, cost.wasted_tokens) == (960, 720)
    assert math.isnan(cost.hours)
    cost = audit(THREE, step_seconds=1800).cost
    assert (cost.hours, cost.wasted_hours) == pytest.approx((2.0, 1.5))
    seconds = np.array([3600.0] * 3 + [0.0] * 9)
    cost = audit(replace(THREE, seconds=seconds)).cost
    assert (cost.hours, cost.wasted_hours) == pytest.approx((3.0, 2.0))
    assert audit(replace(THREE, seconds=seconds, step_seconds=900.0)).cost.hours == pytest.approx(1.0)


def test_steps_that_are_not_recorded_are_known():
    tenth = replace(THREE, step=THREE.step * 10)
    assert audit(tenth).every == 10
    cost = audit(tenth, step_seconds=1800).cost
    assert (cost.hours, cost.run_hours) == pytest.approx((2.0, 20.0))
    cost = audit(replace(tenth, seconds=np.full(len(tenth), 900.0))).cost  # a generation batch for ten steps
    assert (cost.hours, cost.run_hours) == pytest.approx((3.0, 3.0))


def simulated(
    steps=60, size=256, easy=0.1, dead=0.5, speed=0.1, texts=False, seed=0
) -> tuple[RecordedGroups, SimulatedRun]:
    """The record of a plain run on simulated prompts, 16 groups of 8 a step, and the run."""
    rng = np.random.default_rng(seed)
    log_odds = Prompts(size, easy, dead).log_odds(rng)
    config = make_config(8, 16, selection="uniform", replay_fraction=0.0, seed=seed)
    run = SimulatedRun(config, log_odds, lambda: embed(log_odds, 0.6, rng), Learning(speed=speed))
    groups = [group for _ in range(steps) for group in run.step()[1].generated]
    words = np.where(log_odds < -100, "sum", np.where(log_odds > 2, "spell", "sort"))
    return (
        recorded(
            *([g.step for g in groups], [g.prompt_id for g in groups], [g.kind for g in groups]),
            success=np.array([g.success_rate for g in groups]),
            texts=tuple(f"{word} the digits {i * 7919 % 1000}" for i, word in enumerate(words)) if texts else (),
        ),
        run,
    )


def test_the_fit_finds_the_population_that_was_simulated():
    groups, run = simulated(steps=120)
    fitted = fit(groups)
    assert fitted.weights.sum() == pytest.approx(1)
    rates = 1 / (1 + np.exp(-np.clip(fitted.log_odds, -50, 50)))
    assert fitted.weights[rates < 0.002].sum() == pytest.approx(0.5, abs=0.07)
    assert fitted.weights[rates > 0.95].sum() == pytest.approx(0.1, abs=0.05)
    assert fitted.skill == pytest.approx(run.now.skill, rel=0.3)
    assert fitted.speed == pytest.approx(0.1, rel=0.35)
    assert fitted.learned
    dead = run.log_odds[fitted.prompts] < -100
    never = fitted.posterior[:, rates < 0.002].sum(axis=1)
    assert never[dead].mean() > 0.8
    assert never[~dead].mean() < 0.2


def test_a_run_that_does_not_learn_is_said_to_and_gets_a_usual_speed():
    groups, _ = simulated(speed=0.0)
    fitted = fit(groups)
    assert not fitted.learned
    assert fitted.speed == 0.1


def test_effective_shares_of_steps():
    assert effective_shares(THREE).tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])


def test_texts_that_tell_the_difficulty_are_seen_to():
    groups, _ = simulated(texts=True)
    assert predictability_of_texts(groups.texts, fit(groups)) > 0.8
    shuffled = np.random.default_rng(1).permutation(np.array(groups.texts))
    assert predictability_of_texts(tuple(shuffled), fit(groups)) < 0.4
    assert math.isnan(predictability_of_texts((), fit(groups)))


def test_the_projection_agrees_with_a_simulation_on_the_prompts_themselves():
    settings = {name: PROJECTED[name] for name in ("DOTS", "GRESO", "dynamic sampling")}
    groups, run = simulated(steps=100, size=512)
    found = project(groups, predictability=0.6, seeds=1, settings=settings)
    assert found.simulated == pytest.approx(run.now.effective / run.now.groups, abs=0.05)
    assert (found.prompts, found.scaled) == (512, 1.0)
    assert [s.rollouts for s in found.savings] == sorted(s.rollouts for s in found.savings)

    def make_run(fields, seed):
        config = make_config(8, 16, seed=seed, **fields)
        embeddings = embed(run.log_odds, 0.6, np.random.default_rng(1))
        return SimulatedRun(config, run.log_odds, lambda: embeddings, Learning(speed=0.1))

    truth = compare(make_run, settings, steps=100, costs=Costs())
    for saving in found.savings:
        assert saving.rollouts == pytest.approx(truth[saving.name].ratio, abs=0.15), saving.name


def test_a_pool_that_is_all_learnable_has_little_to_save():
    groups, _ = simulated(easy=0.0, dead=0.0, steps=40)
    found = project(groups, predictability=0.6, seeds=1, settings={"GRESO": PROJECTED["GRESO"]})
    assert found.savings[0].rollouts > 0.9


def test_long_runs_are_made_shorter_with_as_many_visits_of_a_prompt():
    step = np.repeat(np.arange(600), 64)
    groups = recorded(step, np.arange(len(step)) % 9600, np.tile([EFFECTIVE, HARD, HARD, HARD], len(step) // 4))
    scale = _Scale.of(groups, 9600)  # four visits each
    assert scale.steps * scale.batch_groups / scale.prompts == pytest.approx(4, rel=0.01)
    assert scale.steps * scale.factor == 600


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        (THREE, "12 groups are too few"),
        (replace(recorded(range(40), range(40), [HARD] * 40), has_steps=False), "no step"),
        (recorded(np.repeat(range(10), 8), np.arange(80), [HARD] * 80), "none of the groups was effective"),
    ],
)
def test_what_cannot_be_projected_is_said(groups, why):
    with pytest.raises(TooLittle, match=why):
        project(groups, seeds=1)


@pytest.mark.parametrize("batch", [1, 2])
def test_steps_of_a_group_or_two_are_projected(batch):
    rng = np.random.default_rng(0)
    step = np.repeat(np.arange(120), batch)
    prompt = np.arange(len(step)) % 30
    success = np.where(prompt % 3 == 0, rng.binomial(8, 0.3 + 0.003 * step) / 8, 0.0)
    kind = np.where(success == 0, HARD, np.where(success == 1, EASY, EFFECTIVE))
    found = project(recorded(step, prompt, kind, success=success), predictability=0.6, seeds=1)
    assert len(found.savings) == len(PROJECTED)
    assert found.of("DOTS").rollouts < 1.2
