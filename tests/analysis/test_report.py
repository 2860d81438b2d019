"""`trl-dataeff report`: runs of ours and of plain TRL, read and shown."""

import json
import re
import shutil
from html.parser import HTMLParser

import numpy as np
import pytest
from trl import GRPOConfig, GRPOTrainer

from tests.factories import even_length_reward, plain_dataset, run
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer
from trl_dataeff.analysis.figures import running_mean, where_rollouts_went
from trl_dataeff.analysis.recorded import read_run
from trl_dataeff.analysis.report import facts
from trl_dataeff.cli.main import main


EVALUATES = {"eval_strategy": "steps", "eval_steps": 4, "trainer": {"eval_dataset": plain_dataset(4)}}
REPLAYS = {"selection": "dots", "replay": "share", "replay_fraction": 0.5, "per_device_train_batch_size": 16}


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ours <b>")
    options = {**REPLAYS, **EVALUATES, "rewards": even_length_reward}
    return folder, run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, folder, **options)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    options = {"save_strategy": "steps", "save_steps": 6, "rewards": even_length_reward}
    return folder, run(GRPOTrainer, GRPOConfig, folder, **options)


def test_what_is_read_is_what_was_logged(ours, plain):
    folder, trainer = ours
    recorded = read_run(folder)
    for metric in ("reward", "eval_reward", "loss"):
        logged = [log[metric] for log in trainer.state.log_history if metric in log]
        assert recorded.series(metric)[1].tolist() == logged
    counts = trainer.collector.counters.values
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
    table = facts([read_run(ours[0]), read_run(plain[0], rollouts_per_step=8)])
    counts = ours[1].collector.counters.values
    assert table["rollouts generated"] == [f"{counts['rollouts_generated']:,}", "96"]
    share = counts["rollouts_replayed"] / counts["rollouts_trained"]
    assert table["method"] == [f"DOTS selection, {share:.0%} of the trained rollouts replayed", ""]
    assert table["optimizer steps"] == ["12", "12"]
    assert all(table["effective groups"])
    assert all(float(hours) >= 0 for hours in table["hours"])


class Tags(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.tags, self.links = [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href", "xlink:href")]


def test_the_page_shows_both_runs_and_loads_nothing(ours, plain, tmp_path, capsys):
    output = tmp_path / "pages" / "report.html"
    assert main(["report", str(ours[0]), str(plain[0]), "--rollouts_per_step", "8", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert f"Report: {output}" in printed
    page = output.read_text(encoding="utf-8")
    tags = Tags(page)
    # Two of reward, effective groups, where rollouts went, success rates of ours
    assert tags.tags.count("figure") == 5
    assert all(link.startswith(("#", "data:")) for link in tags.links)
    assert "b" not in tags.tags, "names of runs are escaped"
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_a_running_mean_keeps_the_level_and_the_length():
    assert running_mean(np.array([])).tolist() == []
    assert running_mean(np.full(300, 0.25)) == pytest.approx(np.full(300, 0.25))
    short = np.arange(10.0)
    assert running_mean(short).tolist() == short.tolist()


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("dataeff/metrics.jsonl", "", "holds no logs yet"),
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


def test_a_run_that_was_killed_while_it_wrote_a_line_is_shown_in_its_folder(ours, tmp_path):
    shutil.copytree(ours[0], tmp_path / "run")
    path = tmp_path / "run" / "dataeff" / "metrics.jsonl"
    whole = path.read_text()
    path.write_text(whole + json.dumps({"step": 13})[:6])
    assert len(read_run(tmp_path / "run").logs) == len(whole.splitlines())
    assert main(["report", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "dataeff" / "report.html").is_file()
    assert main(["report", str(tmp_path / "run"), "--rollouts_per_step", "0"]) == 2
