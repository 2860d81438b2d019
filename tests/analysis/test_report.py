"""`trl-dataeff report`: runs of ours and of plain TRL, read and shown."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from trl import GRPOTrainer

from tests.factories.tiny import even_length_reward, plain_dataset, run
from trl_dataeff.analysis.figures import (
    effective,
    flow,
    panels_of,
    rewards,
    running_mean,
    success_rates,
    where_rollouts_went,
)
from trl_dataeff.analysis.recorded import RecordedRun, facts, read_run, read_runs, shortest_names, summary
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
def saved(tmp_path_factory):
    """Ours, with a checkpoint in the middle."""
    folder = tmp_path_factory.mktemp("saved") / "out"
    return folder, run(folder, rewards=even_length_reward, save_strategy="steps", save_steps=6, **REPLAYS)


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
    counts = trainer._dataeff_observer.counters
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
    counts = ours[1]._dataeff_observer.counters
    assert (own["rollouts generated"], other["rollouts generated"]) == (f"{counts['rollouts_generated']:,}", "96")
    assert own["method"] == "DOTS, replay"
    assert own["rollouts replayed"] == f"{counts['rollouts_replayed']:,}"
    assert own["optimizer steps"] == other["optimizer steps"] == "12"
    timed = [replace(run, logs=run.logs.assign(step_time=600.0)) for run in runs]
    assert [facts(run)["time without evaluation"] for run in timed] == ["2.0 h", "2.0 h"], "of the 12 steps alone"
    assert other["method"] == ""
    known = [name for name in own if own[name] or other[name]]
    lines = summary(runs).splitlines()[1:]
    assert [line.partition("  ")[0] for line in lines] == known


def test_runs_that_do_not_fit_into_a_line_follow_in_further_tables(tmp_path):
    names = ["a", "b" * 30, "c", "d", "e"]
    logs = pd.DataFrame({"step": range(1, 11), "reward": 0.5, "step_time": 1.0})
    runs = [RecordedRun(tmp_path, {}, logs, None, name) for name in names]
    runs[3] = replace(runs[3], logs=logs[["step", "reward"]])  # its column ends with an empty cell
    tables = [table.splitlines() for table in summary(runs, width=80).split("\n\n")]
    assert [table[0].split() for table in tables] == [names[:2], names[2:]]
    of_one_run = [line.split("  ")[0] for line in summary(runs[:1]).splitlines()]
    for lines in tables:
        assert [line.split("  ")[0] for line in lines] == of_one_run
        assert max(map(len, lines)) <= 80
        assert all(line == line.rstrip(" \\") for line in lines)
    in_one = summary(runs)
    assert in_one.splitlines()[0].split() == names, "a file has no width"
    assert all(len(table.split("\n\n")) == 1 for table in [in_one, summary(runs, width=200)])
    assert len(summary(runs, width=10).split("\n\n")) == 5, "a run at least"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.2, "0 s"),
        (17.6, "18 s"),
        (59.4, "59 s"),
        (59.7, "1 min 0 s"),
        (85, "1 min 25 s"),
        (599.4, "9 min 59 s"),
        (599.7, "10 min"),
        (2400, "40 min"),
        (3599, "1.0 h"),
        (11520, "3.2 h"),
    ],
)
def test_the_time_of_a_run_is_in_a_unit_that_fits(tmp_path, seconds, shown):
    logs = pd.DataFrame({"step": range(1, 11), "step_time": seconds / 10})
    assert facts(RecordedRun(tmp_path, {}, logs, None))["time without evaluation"] == shown


def test_the_tokens_of_the_update_are_a_share_of_all_tokens(tmp_path):
    """Of steps with 100, 100 and 1000 tokens in TRL's update, of which 50, 50 and 100 were computed."""
    logs = pd.DataFrame(
        {
            "step": [2, 3, 3],
            "dataeff/update/tokens": [50, 100, np.nan],
            "dataeff/update/tokens_saved": [0.5, 0.9, np.nan],
        }
    )
    assert facts(RecordedRun(tmp_path, {}, logs, None))["tokens of the update"] == "17% of TRL's"


def test_the_reward_in_training_is_shown_where_no_other_is(ours, plain):
    rows = facts(read_run(ours[0]))
    held_out = pd.DataFrame(ours[1].state.log_history).groupby("step")["eval_reward"].mean().dropna()
    assert rows["held-out reward"] == f"{held_out.iloc[0]:.3f} to {held_out.iloc[-1]:.3f}"
    assert rows["reward in training"] == ""


@pytest.mark.parametrize(
    ("num_steps", "logging_steps", "logs_of_an_end"),
    [(12, 1, 5), (10, 1, 5), (9, 1, None), (13, 2, 3), (60, 10, 1), (15, 10, None), (200, 1, 20)],
)
def test_the_reward_in_training_is_a_mean_over_several_steps_at_each_end(
    tmp_path, num_steps, logging_steps, logs_of_an_end
):
    steps = np.arange(logging_steps, num_steps + 1, logging_steps)
    rewards = np.linspace(0, 1, len(steps)) ** 2
    run = RecordedRun(tmp_path, {}, pd.DataFrame({"step": steps, "reward": rewards}), None)
    shown = "fewer than 10 steps" if num_steps < 10 else "too few logs"
    if logs_of_an_end:
        shown = f"{rewards[:logs_of_an_end].mean():.3f} to {rewards[-logs_of_an_end:].mean():.3f}"
    assert facts(run)["reward in training"] == shown


@pytest.mark.parametrize(
    ("model", "shown"),
    [("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"), ("gpt2", "gpt2"), ("/data/of/mine/model", "mine/model"), ("", "")],
)
def test_a_model_is_shown_by_its_last_two_names(ours, model, shown):
    assert facts(replace(read_run(ours[0]), about={"model": model}))["model"] == shown


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        (["out"], ["out"]),
        (["runs/a", "runs/b"], ["a", "b"]),
        (["x/out", "y/out", "y/other"], ["x/out", "y/out", "other"]),
        (["out", "old/out"], ["out", "old/out"]),
        (["/x/a/out", "/y/a/out"], ["x/a/out", "y/a/out"]),
        (["out", "out"], ["out", "out"]),
        ([".", "sibling"], ["here", "sibling"]),
        ([".."], ["parent"]),
    ],
)
def test_runs_are_called_as_they_were_typed(tmp_path, monkeypatch, typed, names):
    folder = tmp_path / "parent" / "here"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    assert shortest_names([Path(text) for text in typed]) == names


def test_a_run_whose_rollouts_are_not_known_is_named(ours, plain, tmp_path, capsys):
    command = ["report", str(ours[0]), str(plain[0]), "--figure", str(tmp_path / "a.svg")]
    name = read_runs([ours[0], plain[0]])[1].name
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert f"Rollouts of {name} are not known" in printed
    assert "--rollouts_per_step" in printed
    assert main([*command, "--rollouts_per_step", "8"]) == 0
    assert "not known" not in capsys.readouterr().out
    assert main([*command, "--rollouts_per_step", "0"]) == 2
    assert "`rollouts_per_step` is 0" in capsys.readouterr().err


@pytest.mark.parametrize(("factors", "pictures"), [((8,), 1), ((8, 8), 1), ((8, 16), 2), ((8, None), 2), ((None,), 1)])
def test_two_axes_that_give_one_picture_are_drawn_once(tmp_path, factors, pictures):
    runs = []
    for rollouts_per_step in factors:
        logs = pd.DataFrame({"step": range(1, 101), "reward": 0.5})
        if rollouts_per_step:
            logs["rollouts"] = logs["step"] * rollouts_per_step
        runs.append(RecordedRun(tmp_path, {}, logs, None))
    assert len(panels_of(runs)) == pictures


@pytest.mark.parametrize("size", [2, 4, 5, 16])
def test_every_success_rate_of_a_group_has_a_row_of_its_own(tmp_path, size):
    """And every batch a column, if there are few."""
    figure = pytest.importorskip("matplotlib.figure").Figure()
    groups = pd.DataFrame(
        [
            {"step": step, "success_rate": np.float32(k / size), "completions": size}
            for step in (0, 4, 8)
            for k in range(size + 1)
            if k != step
        ]
    )
    run = RecordedRun(tmp_path, {}, pd.DataFrame({"step": [12]}), groups)
    axes = figure.add_subplot()
    success_rates(run, axes)
    shown = axes.collections[0].get_array()
    counts = groups.groupby(["success_rate", "step"]).size().unstack(fill_value=0)
    np.testing.assert_allclose(shown, counts / counts.sum())
    assert axes.get_xlim() == (0, 12)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_line_at_the_end_of_the_range_is_within_the_frame(tmp_path, share):
    axes = pytest.importorskip("matplotlib.figure").Figure().add_subplot()
    logs = pd.DataFrame({"step": range(1, 11), "frac_reward_zero_std": share})
    effective([RecordedRun(tmp_path, {}, logs, None)], axes)
    low, high = axes.get_ylim()
    assert low < share < high


def run_of_counts(path: Path, **counts: float) -> RecordedRun:
    log = {f"dataeff/rollouts_{name}": count for name, count in counts.items()}
    return RecordedRun(path, {}, pd.DataFrame([{"step": 1, **log}]), None)


def test_a_bar_is_as_long_as_the_rollouts_generated_and_replay_has_its_own(tmp_path):
    axes = pytest.importorskip("matplotlib.figure").Figure().add_subplot()
    replays = run_of_counts(tmp_path, generated=416, trained=416, replayed=192, discarded=192)
    selects = run_of_counts(tmp_path, generated=100, trained=100, replayed=0, discarded=0)
    flow([replays, selects], axes)
    ends = {}
    for bars in axes.containers:
        for bar in bars:
            place = round(bar.get_y() + bar.get_height() / 2, 2)
            ends[place] = max(ends.get(place, 0), bar.get_x() + bar.get_width())
    shown = [text.get_text() for text in axes.get_legend().get_texts()]
    assert ends.pop(0) == 416
    assert ends.pop(1) == 100
    assert sorted(ends.values()) == [0, 192], "trained on again"
    assert len(shown) == 3, "no rollouts were kept"
    assert "kept" not in shown
    colours = {bars[0].get_facecolor() for bars in axes.containers}
    assert len(colours) == 3


def test_the_legend_of_the_bars_is_beside_them(ours):
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(5, 3), layout="constrained")
    axes = figure.add_subplot()
    flow([read_run(ours[0])], axes)
    figure.draw_without_rendering()
    legend = axes.get_legend().get_window_extent()
    assert not legend.overlaps(axes.get_window_extent())
    assert not legend.overlaps(axes.xaxis.label.get_window_extent())
    assert legend.y0 >= 0, "within the figure"


def test_groups_without_a_success_rate_have_no_heat_map(tmp_path):
    logs = pd.DataFrame({"step": [1], "reward": [0.5]})
    groups = pd.DataFrame({"step": [0], "success_rate": [np.nan], "completions": [4]})
    assert len(panels_of([RecordedRun(tmp_path, {}, logs, groups)])) == 1


@pytest.mark.parametrize(("name", "begins"), [("new/a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF")])
def test_the_figure_has_a_panel_for_all_that_is_known(ours, plain, tmp_path, name, begins):
    path = tmp_path / name
    assert main(["report", str(ours[0]), str(plain[0]), "--rollouts_per_step", "8", "--figure", str(path)]) == 0
    assert path.read_bytes().startswith(begins)
    titles = titles_of([read_run(ours[0]), read_run(plain[0])])
    assert titles.pop().startswith("Success rates of")
    by = [f"Reward by {x}" for x in ("optimizer steps", "rollouts generated", "time of training")]
    assert titles == [*by, "Effective groups", "Time of a step", "Where rollouts went"]
    assert "Reward by rollouts generated" not in titles_of([read_run(plain[0])]), "plain TRL does not log them"


@pytest.mark.parametrize("name", ["a.txt", "a", "a.", ".png"])
def test_the_ending_of_a_figure_is_checked_before_runs_are_read(tmp_path, capsys, name):
    pytest.importorskip("matplotlib")
    assert main(["report", str(tmp_path / "no run"), "--figure", str(tmp_path / name)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert repr(str(tmp_path / name)) in printed.err
    assert ".svg" in printed.err


def titles_of(runs) -> list[str]:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    titles = []
    for draw in panels_of(runs):
        axes = figure.add_subplot()
        draw(axes)
        titles.append(axes.get_title())
    return titles


def test_a_default_run_has_panels_of_its_update_and_no_solid_bar(tmp_path):
    log = {"dataeff/rollouts_generated": 8, "dataeff/rollouts_trained": 8, "dataeff/rollouts_discarded": 0}
    log |= {"dataeff/update/tokens_saved": 0.25, "dataeff/update/seconds": 3.0, "dataeff/time/generation_s": 2.0}
    logs = pd.DataFrame([{"step": 1, **log}])
    default = RecordedRun(tmp_path, {"selector": None}, logs, None)
    assert titles_of([default]) == ["Tokens of the update", "Time of a step"]
    assert facts(default)["method"] == "plain GRPO, faster update"
    drops = replace(default, logs=logs.assign(**{"dataeff/rollouts_generated": 12, "dataeff/rollouts_discarded": 4}))
    assert titles_of([default, drops])[-1] == "Where rollouts went"


@pytest.mark.parametrize("read_from", ["checkpoint-6", "checkpoint-6/trainer_state.json"])
def test_a_checkpoint_of_ours_is_read(saved, read_from):
    folder, trainer = saved
    recorded = read_run(folder / read_from)
    of_six_steps = [log for log in trainer.state.log_history if log["step"] <= 6]
    assert recorded.logs["step"].max() == 6
    assert recorded.last["rollouts"] == of_six_steps[-1]["dataeff/rollouts_generated"] > 0
    assert facts(recorded)["method"] == facts(read_run(folder))["method"] == "DOTS, replay"
    assert facts(recorded)["prompts"] == "24"


def test_time_is_the_sum_of_all_steps(tmp_path):
    """Logs of every third step, with an evaluation between."""
    state = {"log_history": [{"step": 3, "loss": 0.0, "step_time": 2.0}, {"step": 3, "eval_reward": 0.5}]}
    state["log_history"] += [{"step": 6, "loss": 0.0, "step_time": 40.0}, {"step": 6, "train_runtime": 500.0}]
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    recorded = read_run(tmp_path)
    assert recorded.logs["time"].tolist() == [6, 6, 126, 126]
    axes = pytest.importorskip("matplotlib.figure").Figure().add_subplot()
    rewards([recorded], "time", axes)
    assert axes.get_xlabel() == "time of training (min)"
    (line,) = [line for line in axes.get_lines() if len(line.get_xdata())]
    assert line.get_xdata().tolist() == [0.1]


def test_an_evaluation_before_the_first_step_alone(tmp_path):
    state = {"log_history": [{"step": 0, "eval_reward": 0.5}]}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    assert "0.500" in summary([read_run(tmp_path)], 80)


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


def test_a_run_that_is_not_there_is_said_to_be(tmp_path, capsys):
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert "There is no file or folder" in capsys.readouterr().err
