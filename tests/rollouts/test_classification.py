"""Which groups have zero variance, the success rate of each, and rewards that are most likely a mistake."""

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.factories.comparison import messages
from tests.factories.tiny import even_length_reward, run
from trl_dataeff.rollouts.checks import RewardChecks
from trl_dataeff.rollouts.classification import GroupClassifier
from trl_dataeff.rollouts.group import EASY, EFFECTIVE, HARD
from trl_dataeff.rollouts.scale import RewardScale


NAN = math.nan


def classify(rewards, truncated=None, weights=(1.0,), **options):
    """What a new classifier says of groups, `rewards` being (n, G) or (n, G, F)."""
    rewards = np.array(rewards, dtype=np.float32)
    rewards = rewards.reshape(*rewards.shape[:2], -1)
    truncated = np.zeros(rewards.shape[:2]) if truncated is None else truncated
    return GroupClassifier(np.array(weights), **options).classify(rewards, np.array(truncated, dtype=bool))


@pytest.mark.parametrize(
    ("rewards", "options", "kind"),
    [
        ([1, 1, 1, 1], {}, EASY),
        ([0, 0, 0, 0], {}, HARD),
        ([0, 0, 1, 0], {}, EFFECTIVE),
        ([0.5, 0.5, 0.5], {}, HARD),  # zero variance in the middle counts as hard
        ([1e-9, 2e-9, 1e-9], {}, EFFECTIVE),  # TRL's isclose test calls this zero
        ([0.3, 0.30000003, 0.3], {}, EFFECTIVE),  # in a single function any difference counts
        ([1e6, 1e6 + 1, 1e6], {"reward_range": (0, 2e6)}, EFFECTIVE),
        ([NAN, 1, 1], {}, EASY),  # what is unscorable is left out
        ([NAN, 1, 0], {}, EFFECTIVE),
        ([NAN, NAN, 1], {}, EASY),  # one completion has nothing to differ from
        ([NAN, NAN, NAN], {}, HARD),
        ([[1, NAN], [1, NAN], [1, NAN]], {"weights": (1, 1)}, EASY),
        ([[0.1, 0.2], [0.3, 0.0], [0.3, NAN]], {"weights": (1, 1)}, HARD),  # equal but for rounding
        ([[1, 0], [0, 1]], {"weights": (0.5, 0.5)}, HARD),  # equal totals from different parts
        ([[1, 0], [0, 1]], {"weights": (0.5, 0.6)}, EFFECTIVE),
        ([[1, 0], [0, 1]], {"weights": (0.5, 0.5), "aggregation": "normalize_then_sum"}, EFFECTIVE),
        ([[1, 0], [1, 1]], {"weights": (1, 0)}, EASY),  # a function without weight does not count
        ([[1, 0], [1, 1]], {"weights": (1, 0), "aggregation": "normalize_then_sum"}, EASY),
        ([-2, -2], {"reward_range": (-2, 3)}, HARD),
        ([3, 3], {"reward_range": (-2, 3)}, EASY),
        ([0.9, 0.9], {}, HARD),
        ([0.9, 0.9], {"reward_range": (0, 0.9)}, EASY),  # 0.9 is not the same number in float32
        ([[0.7, 0.2, 0.1], [0.1, 0.7, 0.2]], {"weights": (1, 1, 1)}, EASY),
        ([[0.7, 0.8, 0.1], [0.7, 0.9, 0.0]], {"weights": (1, 1, 1), "reward_range": (0, 2)}, HARD),
        ([[0.7, 0.8, 0.1], [0.7, 0.9, 0.001]], {"weights": (1, 1, 1), "reward_range": (0, 2)}, EFFECTIVE),
        ([math.inf, 0.0], {}, HARD),  # TRL sets the advantages of such a group to 0
        ([[1, math.inf], [0, 0]], {"weights": (1, 0)}, EFFECTIVE),  # 0 x inf is NaN, which TRL leaves out of the sum
        ([[1, -math.inf], [1, 0]], {"weights": (1, 0)}, EASY),
        ([[NAN, math.inf], [NAN, math.inf]], {"weights": (1, 0), "reward_range": (-1, 1)}, HARD),  # each total is 0
        (
            [[1, math.inf], [0, 0]],
            {"weights": (1, 0), "aggregation": "normalize_then_sum"},
            EFFECTIVE,
        ),
    ],
)
def test_kinds(rewards, options, kind):
    assert classify([rewards], **{"reward_range": (0, 1), **options}).kinds.tolist() == [kind]


@given(st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=2, max_size=2))
def test_totals_of_tenths_compare_as_their_exact_sums(rows):
    (kind,) = classify([np.array(rows, dtype=np.float32) / np.float32(10)], weights=np.ones(3)).kinds
    assert (kind == EFFECTIVE) == (sum(rows[0]) != sum(rows[1]))


#: What was cut off is not trained on. Of a single function, the third completion is at the mean; of two functions with
#: weights 0.5 and 1, all totals are 0
ONE = {"rewards": [[1, 0, 0.5]] * 4, "truncated": [[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]]}
TWO = {"rewards": [[[2, -1], [0, 0], [0, 0]]] * 2, "truncated": [[0, 1, 1], [1, 1, 1]], "weights": (0.5, 1)}


@pytest.mark.parametrize(
    ("groups", "options", "kinds"),
    [
        (ONE, {"masks_truncated": True}, [HARD, EFFECTIVE, HARD, EFFECTIVE]),
        (ONE, {"masks_truncated": False}, [EFFECTIVE] * 4),
        (TWO, {"masks_truncated": True}, [HARD, HARD]),
        (TWO, {"masks_truncated": True, "aggregation": "normalize_then_sum"}, [EFFECTIVE, HARD]),
        (TWO, {"masks_truncated": False, "aggregation": "normalize_then_sum"}, [EFFECTIVE, EFFECTIVE]),
    ],
)
def test_a_group_whose_differing_completions_were_all_cut_off_has_no_gradient(groups, options, kinds):
    assert classify(**groups, **options).kinds.tolist() == kinds


def test_rewards_outside_of_a_given_range_are_warned_of_once(caplog):
    # A range of its own: a process warns once of each
    classifier = GroupClassifier(np.ones(1), reward_range=(0, 1.25))
    for rewards in ([[0.0, 1.0]], [[0.5, 5.0]], [[-1.0, 5.0]]):
        classifier.classify(np.array(rewards, dtype=np.float32)[..., None], np.zeros((1, 2), dtype=bool))
    assert caplog.text.count("`reward_range` (0 to 1.25)") == 1


def test_a_classifier_widens_its_scale_round_by_round():
    """A round is classified by a scale that has seen it; a given range stays as it is."""
    classifier, given_range = GroupClassifier(np.ones(1)), GroupClassifier(np.ones(1), reward_range=(0, 4))
    for rewards, rates, kinds, in_range in (
        ([[1, 1]], [1], [EASY], [0.25]),  # one value alone: positive is success
        ([[1, 3], [3, 3]], [0.5, 1], [EFFECTIVE, EASY], [0.5, 0.75]),
        ([[1, 1]], [0], [HARD], [0.25]),
        ([[NAN, NAN], [NAN, 2]], [NAN, 0.5], [HARD, HARD], [NAN, 0.5]),
    ):
        groups = np.array(rewards, dtype=np.float32)[..., None]
        whole = np.zeros(groups.shape[:2], dtype=bool)
        totals, success_rates, codes = classifier.classify(groups, whole)
        np.testing.assert_array_equal(totals, np.float32(rewards))
        np.testing.assert_allclose(success_rates, rates)
        assert codes.tolist() == kinds
        assert codes.dtype == np.int8
        np.testing.assert_allclose(given_range.classify(groups, whole).success_rates, in_range)
    assert (classifier.scale.low, classifier.scale.high) == (1, 3)
    assert (given_range.scale.low, given_range.scale.high) == (0, 4)


@given(st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=8), st.floats(-5, 5), st.floats(0.5, 5))
def test_success_rate_is_the_mean_place_in_the_range(rewards, low, width):
    scale = RewardScale.of((low, low + width))
    expected = sum(min(max((r - low) / width, 0), 1) for r in rewards) / len(rewards)
    assert scale.success_rate(np.array([rewards]))[0] == pytest.approx(expected, abs=1e-6)


@given(st.lists(st.floats(-5, 5, width=16), min_size=1, max_size=6), st.lists(st.floats(-9, 9, width=16), min_size=1))
def test_rates_of_a_narrower_range_are_mapped_to_those_of_the_wider_one(first, later):
    scale, totals = RewardScale(), np.array([first], dtype=np.float32)
    scale.observe(totals)
    earlier, before = RewardScale(scale.low, scale.high), scale.success_rate(totals)
    scale.observe(np.array(later))
    mapping = scale.mapping_from(earlier)
    if mapping is None:
        assert (scale.low, scale.high) == (earlier.low, earlier.high)
    else:
        np.testing.assert_allclose(mapping[0] * before + mapping[1], scale.success_rate(totals), atol=1e-5)
    assert RewardScale(0, 1).mapping_from(RewardScale()) is None


def silent_reward(completions, **kwargs):
    return [None] * len(completions)


def test_rewards_that_score_nothing(tmp_path, caplog_transformers):
    fields = {"rewards": silent_reward, "per_device_train_batch_size": 64, "max_steps": 20}
    run(tmp_path, **fields)  # TRL's matter when everything is off
    assert len(messages(caplog_transformers, "`silent_reward`")) == 1
    assert len(messages(caplog_transformers, "gradient")) == 1
    with pytest.raises(ValueError, match=r"\b(5|6)\d\d completions: `silent_reward`"):
        run(tmp_path, **fields, selection="greso")


def test_a_run_without_any_score_is_to_start_again_and_not_to_resume(tmp_path):
    """Its checkpoints have learned nothing."""
    options = {"selection": "greso", "max_unscored_completions": 32, "save_strategy": "steps", "save_steps": 1}
    with pytest.raises(ValueError, match="start the run again") as error:
        run(tmp_path, rewards=silent_reward, **options)
    assert (tmp_path / "checkpoint-1").exists()
    assert not any("resume" in note for note in error.value.__notes__)


@pytest.mark.parametrize("limit", [None, 48])
def test_a_warm_up_without_scores_may_be_as_long_as_the_limit(tmp_path, limit):
    """Five batches of 8 completions without a score, and then seven with."""

    def warmed_up(completion_ids, trainer_state, **kwargs):
        is_warm = trainer_state.global_step >= 5
        return even_length_reward(completion_ids) if is_warm else [None] * len(completion_ids)

    trainer = run(tmp_path, rewards=warmed_up, selection="greso", max_unscored_completions=limit)
    assert trainer.state.global_step == 12
    with pytest.raises(ValueError, match="`max_unscored_completions=None`"):
        run(tmp_path, rewards=warmed_up, selection="greso", max_unscored_completions=40)


def reward_array(*scored: bool) -> np.ndarray:
    """Rewards of 2 groups of 3 completions, `(2, 3, F)`: of each function all or none."""
    return np.stack([np.full((2, 3), 0.5 if given else np.nan) for given in scored], axis=-1)


@pytest.mark.parametrize("is_main_process", [True, False])
def test_completions_without_any_score_end_the_run_in_all_processes(caplog_transformers, is_main_process):
    checks = RewardChecks(["a", "b"], max_unscored=18, is_main_process=is_main_process)
    checks.check(reward_array(False, False), np.ones(2))
    checks.check(reward_array(False, False), np.ones(2))
    with pytest.raises(ValueError, match=r"\b18\b.*`a`, `b`"):
        checks.check(reward_array(False, False), np.ones(2))
    assert len(messages(caplog_transformers)) == is_main_process


def test_one_score_is_enough(caplog_transformers):
    checks = RewardChecks(["a", "b"], max_unscored=12)
    checks.check(reward_array(True, False), np.ones(2))
    for _ in range(10):
        checks.check(reward_array(False, False), np.ones(2))
    checks.check(reward_array(False, True), np.ones(2))
    (message,) = messages(caplog_transformers)
    assert re.match(r"`b`.*\b6\b", message)


def test_infinite_rewards_are_warned_of_once(caplog_transformers):
    checks = RewardChecks(["a", "b"])
    for _ in range(2):
        checks.check(np.array([[[1, 0], [np.inf, 0]]]), np.ones(2))
    assert [message[:3] for message in messages(caplog_transformers)] == ["`a`"]


def test_a_resumed_run_knows_that_there_were_scores(tmp_path):
    steps = []

    def failing_judge(completion_ids, trainer_state, **kwargs):
        steps.append(trainer_state.global_step)
        return even_length_reward(completion_ids) if trainer_state.global_step < 2 else [None] * len(completion_ids)

    options = {"rewards": failing_judge, "selection": "greso", "save_strategy": "steps", "save_steps": 2}
    options |= {"max_unscored_completions": 32}
    run(tmp_path, **options, max_steps=2)
    run(tmp_path, **options, max_steps=10, resume=True)
    assert steps == list(range(10))


def test_with_other_functions_than_before_their_completions_count_anew():
    before = RewardChecks(["a"], max_unscored=12)
    for _ in range(3):
        before.check(reward_array(True), np.ones(1))
    after = RewardChecks(["a", "b"], max_unscored=12)
    after.load_state_dict(before.state_dict())
    after.check(reward_array(False, False), np.ones(2))
    with pytest.raises(ValueError, match=r"\b12\b"):
        after.check(reward_array(False, False), np.ones(2))


def test_the_warning_counts_from_the_start_of_the_run(caplog_transformers):
    before, after = RewardChecks(["a"]), RewardChecks(["a"])
    for batch in range(19):
        before.check_gradient(effective=False, progress=0.5)
    after.load_state_dict(before.state_dict())
    after.check_gradient(effective=False, progress=0.5)
    assert len(messages(caplog_transformers, "gradient")) == 1


def test_a_function_that_is_only_logged_may_be_infinite(tmp_path, caplog_transformers):
    """With weight 0 it changes neither which groups are effective nor how many rollouts are generated."""

    def surprise_reward(completions, **kwargs):
        return [math.inf if i % 2 else 0.0 for i in range(len(completions))]

    options = {"selection": "dots", "max_rollout_rounds": 3, "max_steps": 4}
    weighted = {"rewards": [even_length_reward, surprise_reward], "reward_weights": [1.0, 0.0]}
    alone = run(tmp_path / "a", **options)
    both = run(tmp_path / "b", **options, **weighted)
    assert both._dataeff_observer.counters == alone._dataeff_observer.counters
    assert [log["grad_norm"] for log in both.state.log_history[:4]] == [
        log["grad_norm"] for log in alone.state.log_history[:4]
    ]
    assert not messages(caplog_transformers, "infinite")
    assert not messages(caplog_transformers, "has carried a gradient")
