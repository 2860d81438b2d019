"""The logged metrics are those of the table of metrics."""

import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.factories.configurations import DYNAMIC, FILL
from tests.factories.groups import make_group
from tests.factories.selectors import LeastSolved
from tests.factories.tiny import even_length_reward, logged, run
from tests.factories.training import mixed_reward
from trl_dataeff import DataEfficientGRPOTrainer
from trl_dataeff.tracking.metrics import METRICS, SELECTOR_PREFIX, group_metrics
from trl_dataeff.tracking.observer import hash_of_prompts
from trl_dataeff.utils import PREFIX


SELECTOR_METRICS = {"prompts_skipped", "p_easy", "p_hard", "predictor/pearson", "uniform_effective_ratio"}
BATCH = {"per_device_train_batch_size": 16, "rewards": even_length_reward}
REPLAY = {name for name in METRICS if name.startswith("replay/")} | {"rollouts_replayed"}
UPDATE = {name for name in METRICS if name.startswith("update/")}
ON_A_GPU = {"update/memory"}
COLLECTED = {"rounds", "time/selection_s"}  # where batches are not TRL's own
#: Settings, and metrics that they do not have
SETTINGS = {
    "everything": ({**BATCH, "replay": "share", **DYNAMIC, "selection": "dots", "compact_update": True}, set()),
    "selection and replay": ({**BATCH, **FILL, "selection": "dots"}, {"rounds"}),
    "defaults": ({**BATCH, "compact_update": True}, {*COLLECTED, *REPLAY}),
    "greso": ({"selection": "greso", **DYNAMIC}, REPLAY | UPDATE),
    "off": ({}, {*COLLECTED, *REPLAY, *UPDATE}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_table_is_what_is_logged_and_a_line_has_at_most_22_of_ours(tmp_path, name):
    """None of replay where nothing can be replayed."""
    options, absent = SETTINGS[name]
    trainer = run(tmp_path, **options)
    lines = [{name for name in log if name.startswith(PREFIX)} for log in trainer.state.log_history]
    names = set().union(*lines)
    of_selector = {name for name in names if name.startswith(SELECTOR_PREFIX)}
    assert names - of_selector == {PREFIX + metric for metric in METRICS.keys() - absent - ON_A_GPU}
    assert {name.removeprefix(SELECTOR_PREFIX) for name in of_selector} <= SELECTOR_METRICS
    assert max(len(line) for line in lines) <= 22


def test_cumulative_metrics_only_grow_and_shares_add_up(tmp_path):
    options = {"rewards": mixed_reward, "max_rollout_rounds": 4, "selection": "greso"}
    trainer = run(tmp_path, **options, logging_steps=2)
    each = run(tmp_path, **options, logging_steps=1)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    for name in ("rollouts_generated", "rollouts_trained", "rollouts_discarded", "tokens_generated"):
        values = [log[PREFIX + name] for log in logs]
        assert values == sorted(values)
    for log in logs:
        parts = [log[PREFIX + name] for name in ("time/selection_s", "time/generation_s")]
        assert min(parts) >= 0
        assert sum(parts) <= log["step_time"] * 1.05
        assert sum(log[PREFIX + name] for name in ("effective_ratio", "easy_ratio", "hard_ratio")) == pytest.approx(1)
    # TRL's, the mean of two generation batches
    names = ("reward", "completions/mean_length", "completions/max_length")
    means = np.array(logged(each, *names)).reshape(-1, 2, len(names)).mean(axis=1)
    np.testing.assert_allclose(logged(trainer, *names), means)


class SlowPasses(DataEfficientGRPOTrainer):
    """TRL's passes for old and reference log-probs take 0.2 s each."""

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        if not torch.is_grad_enabled():
            time.sleep(0.2)
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)


@pytest.mark.parametrize("replay", ["off", "fill"])
def test_passes_for_log_probs_are_no_selection(tmp_path, replay):
    options = {"selection": "greso", "replay": replay, "beta": 0.1, "num_iterations": 2, "max_steps": 4}
    trainer = run(tmp_path, SlowPasses, **options)
    seconds = np.array(logged(trainer, PREFIX + "time/selection_s"))
    assert 0 < seconds.sum() < 0.2


def test_a_selectors_metrics_are_logged_by_any_name_with_the_latest_value(tmp_path):
    """Three generation batches to a log; what is not defined is left out, and a name may be one of the table's."""

    class Named(LeastSolved):
        def metrics(self):
            return super().metrics() | {"rounds": -1, "anything at all": np.float32(self.batches) / 2}

    selector = Named()
    trainer = run(tmp_path, logging_steps=3, trainer={"selector": selector})
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [log[SELECTOR_PREFIX + "batches"] for log in logs] == [3, 6, 9, 12]
    assert [log[SELECTOR_PREFIX + "anything at all"] for log in logs] == [1.5, 3, 4.5, 6]
    assert [log[SELECTOR_PREFIX + "rounds"] for log in logs] == [-1] * 4
    assert logs[-1][SELECTOR_PREFIX + "solved/sum"] == pytest.approx(selector.solved.sum())
    assert not any("not yet defined" in name for log in logs for name in log)


def test_metrics_of_groups_by_hand():
    groups = [
        make_group(rewards=np.float32([[1, 0], [np.nan, 2]])),  # lengths 1 and 2, the second truncated
        make_group(rewards=np.float32([[0, np.nan], [np.nan, np.nan]])),
    ]
    values = group_metrics(groups, ["first", "second"], np.float32([1, 0.5]))
    assert all(len(of_name) == 1 for of_name in values.values())
    assert {name: value for name, (value,) in values.items()} == pytest.approx(
        {
            "reward": 2 / 3,  # of 1, 1 and 0; the last completion has no score
            "reward_std": 3**-0.5,
            "rewards/first/mean": 0.5,
            "rewards/first/std": 0.5**0.5,
            "rewards/second/mean": 1.0,
            "rewards/second/std": 2**0.5,
            "frac_reward_zero_std": 0.5,  # TRL counts a group with a single score as one with a deviation
            "completions/clipped_ratio": 0.5,
            "completions/mean_length": 1.5,
            "completions/min_length": 1,
            "completions/max_length": 2,
            "completions/mean_terminated_length": 1,
            "completions/min_terminated_length": 1,
            "completions/max_terminated_length": 1,
        }
    )


def test_functions_of_one_name_share_a_metric_of_what_is_generated(tmp_path):
    """TRL logs the mean over both functions, and so do we, also where something is replayed."""

    def reward(scale):
        return lambda completion_ids, **kwargs: [scale * (sum(ids) % 2) for ids in completion_ids]

    options = {
        **BATCH,
        "selection": "uniform",
        "replay": "share",
        "max_steps": 6,
        "rewards": [reward(1.0), reward(8.0)],
    }
    trainer = run(tmp_path, **options)
    logs = [log for log in trainer.state.log_history if "reward" in log]
    assert logs[-1]["dataeff/rollouts_replayed"] > 0
    for log in logs:
        assert log["rewards/<lambda>/mean"] == pytest.approx(log["reward"] / 2)


def test_the_documentation_lists_the_metrics_of_the_selectors():
    text = (Path(__file__).parents[2] / "docs" / "reading.md").read_text()
    assert set(re.findall(r"`dataeff/selector/([^`]+)`", text)) >= SELECTOR_METRICS


def test_a_prompt_with_images_has_no_number():
    """The text may be the same for all."""
    text = {"prompt": "What is this?"}
    known, *others = hash_of_prompts([text, {**text, "image": object()}, {**text, "images": []}, {}]).tolist()
    assert known >= 0
    assert others == [-1] * 3
    assert hash_of_prompts([{**text, "image": None}]).tolist() == [known]
