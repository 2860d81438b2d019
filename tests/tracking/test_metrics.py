"""The logged metrics are those of the table of metrics."""

import re
from pathlib import Path

import pytest

from tests.factories import mixed_reward, run
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer
from trl_dataeff.tracking.metrics import METRICS, PREFIX, record


def test_the_table_is_what_is_logged(tmp_path):
    trainer = run(
        DataEfficientGRPOTrainer,
        DataEfficientGRPOConfig,
        tmp_path,
        rewards=mixed_reward,
        dynamic_sampling=True,
        rollout_margin=2.0,
        selection="dots+greso",
        exploration=0.3,
        replay_fraction=0.5,
    )
    logged = {name for log in trainer.state.log_history for name in log if name.startswith(PREFIX)}
    assert logged == {PREFIX + name for name in METRICS}


def test_cumulative_metrics_only_grow_and_times_add_up(tmp_path):
    trainer = run(
        DataEfficientGRPOTrainer, DataEfficientGRPOConfig, tmp_path, rewards=mixed_reward, dynamic_sampling=True,
        logging_steps=2, selection="greso",
    )  # fmt: skip
    logs = [log for log in trainer.state.log_history if "loss" in log]
    for name, metric in METRICS.items():
        if metric.cumulative:
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


def test_the_documentation_lists_the_table():
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    listed = dict(re.findall(r"^\| `dataeff/([^`]+)` \| [^|]* \| (.*?) \|$", text, flags=re.M))
    assert listed == {name: metric.meaning for name, metric in METRICS.items()}
