"""The logged metrics are those of the table of metrics."""

import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.factories import LeastSolved, make_group, mixed_reward, run
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer
from trl_dataeff.tracking.metrics import (
    METRICS,
    PREFIX,
    SELECTOR_PREFIX,
    Counters,
    group_metrics,
    record,
    record_selector,
    without_rounds,
)


# Of the built-in selectors
SELECTOR_METRICS = {
    *("prompts_skipped", "p_easy", "p_hard"),
    *(f"predictor/{name}" for name in ("pearson", "pearson_explored", "pearson_selected", "mae", "calibration_error")),
    *("effective_explored", "effective_selected", "exploration"),
}


def test_the_table_is_what_is_logged(tmp_path):
    trainer = run(
        DataEfficientGRPOTrainer,
        DataEfficientGRPOConfig,
        tmp_path,
        rewards=mixed_reward,
        dynamic_sampling=True,
        sequential_rollouts=True,
        rollout_margin=2.0,
        selection="dots+greso",
        exploration=0.3,
        replay_fraction=0.5,
        replay_pause_ess=0.9,
    )
    logged = {name for log in trainer.state.log_history for name in log if name.startswith(PREFIX)}
    # Those of the tracked baseline, which does not go with `dynamic_sampling`, are in tests/test_tracked_baseline.py
    apart = {name for name in METRICS if name.startswith("baseline/")} | {"effective_expected"}
    usual = {PREFIX + name for name, metric in METRICS.items() if not (metric.fault or name in apart)}
    assert logged == usual | {SELECTOR_PREFIX + name for name in SELECTOR_METRICS}


def test_faults_are_logged_from_the_first_one_on():
    counters = Counters()
    faults = {name for name, metric in METRICS.items() if metric.fault}
    assert faults == {"reward_faults", "overlong_prompts", "steps_skipped", "server_returns"}
    assert counters.logged().keys() == counters.values.keys() - faults
    counters.add(steps_skipped=2)
    assert counters.logged().keys() & faults == {"steps_skipped"}
    assert counters.logged()["steps_skipped"] == 2
    resumed = Counters()
    resumed.load(counters.values)
    assert resumed.logged() == counters.logged()


def test_cumulative_metrics_only_grow_and_times_add_up(tmp_path):
    trainer = run(
        DataEfficientGRPOTrainer, DataEfficientGRPOConfig, tmp_path, rewards=mixed_reward, dynamic_sampling=True,
        logging_steps=2, selection="greso",
    )  # fmt: skip
    logs = [log for log in trainer.state.log_history if "loss" in log]
    for name, metric in METRICS.items():
        if metric.cumulative and not metric.fault:
            values = [log[PREFIX + name] for log in logs]
            assert values == sorted(values)
    for log in logs:
        parts = [log[PREFIX + name] for name in METRICS if name.startswith("time/")]
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(log["step_time"], rel=0.5)
        shares = [log[PREFIX + name] for name in ("effective_ratio", "easy_ratio", "hard_ratio")]
        assert sum(shares) == pytest.approx(1)


def test_a_name_outside_the_table_cannot_be_logged():
    with pytest.raises(KeyError):
        record({}, {"no_such_metric": 1.0})


def test_a_selectors_metrics_are_logged_by_any_name_with_the_latest_value(tmp_path):
    """Three generation batches to a log; what is not defined is left out, and a name may be one of the table's."""

    class Named(LeastSolved):
        def metrics(self):
            return super().metrics() | {"rounds": -1, "anything at all": np.float32(self.batches) / 2}

    selector = Named()
    trainer = run(
        DataEfficientGRPOTrainer, DataEfficientGRPOConfig, tmp_path, logging_steps=3, selection="auto",
        trainer={"selector": selector},
    )  # fmt: skip
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [log[SELECTOR_PREFIX + "batches"] for log in logs] == [3, 6, 9, 12]
    assert [log[SELECTOR_PREFIX + "anything at all"] for log in logs] == [1.5, 3, 4.5, 6]
    assert [log[SELECTOR_PREFIX + "rounds"] for log in logs] == [-1] * 4
    assert [log[PREFIX + "rounds"] for log in logs] == [1] * 4
    assert logs[-1][SELECTOR_PREFIX + "solved/sum"] == pytest.approx(selector.solved.sum())
    assert not any("not yet defined" in name for log in logs for name in log)


def test_only_the_latest_defined_value_of_a_selector_is_kept():
    store = defaultdict(list)
    record_selector(store, {"a": 1, "b": float("nan")})
    record_selector(store, {"a": np.float32(2.5), "b": float("nan"), "c": float("inf")})
    assert store == {"dataeff/selector/a": [2.5], "dataeff/selector/c": [float("inf")]}
    assert type(store["dataeff/selector/a"][0]) is float
    record_selector(store, {"a": float("nan")})
    assert store["dataeff/selector/a"] == [2.5]


def test_rounds_leave_no_trace_in_trls_metrics():
    store, state = defaultdict(list), SimpleNamespace(num_input_tokens_seen=7)
    store.update({"completions/mean_length": [3.0], "num_tokens": [7], "reward": [0.5]})
    with without_rounds(store, state):
        store["completions/mean_length"].append(9.0)
        store["completions/max_length"].append(9.0)
        store["num_tokens"] = [20]
        store["reward"].append(0.75)
        state.num_input_tokens_seen = 20
    assert store["completions/mean_length"] == [3.0]
    assert store["completions/max_length"] == store["num_tokens"] == []
    assert store["reward"] == [0.5, 0.75], "what is not about generation stays"
    assert state.num_input_tokens_seen == 7


def test_metrics_of_groups_by_hand():
    groups = [
        make_group(rewards=np.float32([[1, 0], [np.nan, 2]])),  # lengths 1 and 2, the second truncated
        make_group(rewards=np.float32([[0, np.nan], [np.nan, np.nan]])),
    ]
    values = group_metrics(groups, ["first", "second"], np.float32([1, 0.5]))
    assert values == pytest.approx(
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
    over_batch = group_metrics(groups, ["first", "second"], np.float32([1, 0.5]), over_batch=True)
    assert "frac_reward_zero_std" not in over_batch
    nothing = group_metrics([], ["first"], np.ones(1, np.float32))
    assert nothing.keys() == {name for name in values if "second" not in name}
    assert all(np.isnan(value) for name, value in nothing.items() if "terminated" not in name)


def test_the_documentation_lists_the_table():
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    listed = dict(re.findall(r"^\| `dataeff/([^`]+)` \| [^|]* \| (.*?) \|$", text, flags=re.M))
    of_selectors = {name.removeprefix("selector/") for name in listed if name.startswith("selector/")}
    assert of_selectors == SELECTOR_METRICS
    meanings = {name: meaning for name, meaning in listed.items() if not name.startswith("selector/")}
    assert meanings == {name: metric.meaning for name, metric in METRICS.items()}
