"""`trl-dataeff report`: runs of ours and of plain TRL, read and shown."""

import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from trl import GRPOTrainer

from tests.factories.tiny import even_length_reward, plain_dataset, run
from trl_dataeff.analysis.figures import panels_of, running_mean, where_rollouts_went
from trl_dataeff.analysis.recorded import facts, read_run, summary
from trl_dataeff.cli.main import main


HELD_OUT = {"a": plain_dataset(4), "b": plain_dataset(8)}
EVALUATES = {"eval_strategy": "steps", "eval_steps": 4, "trainer": {"eval_dataset": HELD_OUT}}
REPLAYS = {"selection": "dots", "replay": "share", "replay_fraction": 0.5, "per_device_train_batch_size": 16}


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ours $b") / "out"
    options = {**REPLAYS, **EVALUATES, "rewards": even_length_reward}
    return folder, run(folder, **options)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain") / "out"
    options = {"save_strategy": "steps", "save_steps": 6, "rewards": even_length_reward}
    return folder, run(folder, GRPOTrainer, **options)


def test_what_is_read_is_what_was_logged(ours, plain):
    folder, trainer = ours
    recorded = read_run(folder)
    for metric in ("reward", "eval_reward", "loss"):
        logged = pd.DataFrame(trainer.state.log_history).groupby("step")[metric].mean().dropna().tolist()
        assert recorded.series(metric)[1].tolist() == logged, "means over the held-out datasets of a step"
    counts = trainer.collector.counters
    assert recorded.last["rollouts"] == counts["rollouts_generated"]
    went = where_rollouts_went(recorded)
    assert went["replayed"] == counts["rollouts_replayed"] > 0
    assert went["trained"] + went["replayed"] == counts["rollouts_trained"] == 12 * 16
    assert went["trained"] + went["kept"] + went["dropped"] == counts["rollouts_generated"]
    folder, trainer = plain
    recorded = read_run(folder, rollouts_per_step=8)
    steps, shares = recorded.effective_share()
    assert steps.tolist() == list(range(1, 13))
    assert shares.tolist() == [1 - log["frac_reward_zero_std"] for log in trainer.state.log_history if "loss" in log]
    assert recorded.series("reward", "rollouts")[0].tolist() == [8 * step for step in range(1, 13)]


def test_facts_are_what_happened(ours, plain):
    runs = [read_run(ours[0]), read_run(plain[0], rollouts_per_step=8)]
    own, other = map(facts, runs)
    counts = ours[1].collector.counters
    assert (own["rollouts generated"], other["rollouts generated"]) == (f"{counts['rollouts_generated']:,}", "96")
    share = counts["rollouts_replayed"] / counts["rollouts_trained"]
    assert own["method"] == f"DOTS selection, {share:.0%} of the trained rollouts replayed"
    assert own["optimizer steps"] == other["optimizer steps"] == "12"
    timed = [replace(run, logs=run.logs.assign(step_time=600.0)) for run in runs]
    assert [facts(run)["hours"] for run in timed] == ["2.00", "2.00"], "of the 12 steps alone"
    assert "method" not in other
    assert runs[0].name != runs[1].name
    assert len(summary(runs).splitlines()) == 1 + len(own | other)


@pytest.mark.parametrize(("name", "begins"), [("new/a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF")])
def test_the_figure_has_a_panel_for_all_that_is_known(ours, plain, tmp_path, name, begins):
    path = tmp_path / name
    assert main(["report", str(ours[0]), str(plain[0]), "--rollouts_per_step", "8", "--figure", str(path)]) == 0
    assert path.read_bytes().startswith(begins)
    # Two of reward, effective groups, where rollouts went, success rates of ours
    assert len(panels_of([read_run(ours[0]), read_run(plain[0])])) == 5
    assert len(panels_of([read_run(plain[0])])) == 2, "plain TRL does not log its rollouts"
    assert main(["report", str(plain[0]), "--figure", f"{path}.nothing"]) == 2


def test_a_running_mean_keeps_the_level_and_the_length():
    assert running_mean(np.array([])).tolist() == []
    assert running_mean(np.full(300, 0.25)) == pytest.approx(np.full(300, 0.25))
    assert running_mean(np.arange(10.0)).tolist() == list(range(10)), "fewer than points of a curve"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("dataeff/metrics.jsonl", "", "has no logs of a run yet"),
        ("dataeff/groups.parquet", "PAR1", "no table of groups"),
        ("trainer_state.json", "{", "trainer_state.json is corrupt"),
        ("other.txt", "", "has no logs of a run"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(ours, tmp_path, capsys, name, text, says):
    folder = tmp_path / "run"
    if name.startswith("dataeff"):
        shutil.copytree(ours[0], folder)
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    assert main(["report", str(folder)]) == 2
    assert says in capsys.readouterr().err
