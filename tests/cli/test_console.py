"""What a run of the command prints, and what it leaves to trackers and to `log_history`."""

from __future__ import annotations

import io
import logging
import sys
import warnings

import pytest
from rich.console import Console
from transformers import PrinterCallback, TrainerState

from tests.cli.test_command import TINY
from tests.factories import plain_dataset
from trl_dataeff.cli.console import COLUMNS, REPEAT_HEADER, LogTable, PanelCallback, TableCallback, progress_shown
from trl_dataeff.cli.grpo import REWARDS, make_trainer, parse
from trl_dataeff.cli.main import main, quiet_libraries


RECIPE = TINY + 'reward_funcs: [tests.factories.letter_share_reward]\nsave_strategy: "no"\n'


@pytest.fixture
def recipe(write, tmp_path, tiny_path) -> str:
    plain_dataset(16).to_json(tmp_path / "train.jsonl")
    return write("r.yaml", RECIPE.format(model=tiny_path))


def log(**values):
    names = {column.title: column.name for column in COLUMNS}
    return {"loss": 0.0123456, **{names.get(name, name): value for name, value in values.items()}}


def state(step: int, of: int = 300) -> TrainerState:
    return TrainerState(global_step=step, max_steps=of)


@pytest.mark.parametrize("bar", ["--disable_tqdm=true", "--disable_tqdm=false"])
def test_the_console_shows_the_numbers_a_person_reads(recipe, capsys, bar):
    assert main(["grpo", "--config", recipe, bar]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "{" not in "".join(lines)
    header = next(i for i, line in enumerate(lines) if line.lstrip().startswith("step "))
    rows = lines[header : header + 3]
    assert [row.split()[0] for row in rows] == ["step", "1/2", "2/2"]
    titles = "step loss reward success effective rollouts replayed length cut off entropy grad norm lr s/step"
    assert rows[0].split() == titles.split()
    assert len({len(row) for row in rows}) == 1  # aligned
    assert len(rows[0]) <= 120
    assert lines[header + 3].startswith("end at step 2: mean loss ")


@pytest.mark.parametrize("bar", ["--disable_tqdm=true", "--disable_tqdm=false"])
def test_the_library_prints_as_transformers_does(recipe, capsys, bar):
    make_trainer(parse(["--config", recipe, "--max_steps=1", bar])).train()
    assert "'dataeff/rollouts_generated': '8'" in capsys.readouterr().out


def test_what_prints_in_another_way_stays(recipe):
    """As in a notebook."""

    class OwnPrinter(PrinterCallback):
        pass

    trainer = make_trainer(parse(["--config", recipe, "--disable_tqdm=true"]))
    trainer.pop_callback(PrinterCallback)
    trainer.add_callback(OwnPrinter)
    with progress_shown(trainer, plain=False):
        kinds = {type(callback) for callback in trainer.callback_handler.callbacks}
    assert OwnPrinter in kinds
    assert not kinds & {TableCallback, PanelCallback}


def test_a_panel_in_a_terminal_says_what_was_generated_and_what_was_replayed(recipe):
    options = ["--disable_tqdm=false", "--max_steps=4", "--output_dir=[/x]"]
    trainer = make_trainer(parse(["--config", recipe, *options]))
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with progress_shown(trainer, plain=False, console=console):
        trainer.train()
    shown = console.file.getvalue()
    counts = trainer.collector.counters.values
    assert "step 4 of 4" in shown
    assert "[/x]" in shown, "brackets in a folder's name are no markup"
    assert f"{counts['rollouts_generated']} generated, {counts['rollouts_replayed']} replayed" in shown
    assert "saved" not in shown


@pytest.mark.parametrize("options", [{"plain": True}, {"plain": False}], ids=["plain", "not a terminal"])
def test_elsewhere_there_is_no_panel_and_no_bar(recipe, options, capsys):
    trainer = make_trainer(parse(["--config", recipe, "--disable_tqdm=false", "--max_steps=1"]))
    with progress_shown(trainer, console=Console(file=io.StringIO(), force_terminal=options["plain"]), **options):
        trainer.train()
    assert "it/s]" not in capsys.readouterr().err.split("Embedding prompts")[-1].split("prompt/s]")[-1]
    assert not any(isinstance(callback, PanelCallback) for callback in trainer.callback_handler.callbacks)


def test_numbers_are_aligned_below_their_titles():
    header, row = LogTable().lines(log(reward=-12.345, success=0.123, rollouts=1234567, lr=1e-6), state(7))
    assert header == "   step      loss  reward success  rollouts       lr"
    assert row == "  7/300    0.0123  -12.35     12% 1,234,567    1e-06"
    row = LogTable().lines(log() | {"dataeff/overlong_prompts": 1500.0}, state(7))[-1]
    assert row.endswith("0.0123  overlong prompts 1,500"), "faults stand at the end of their row"


def test_a_metric_that_comes_later_gets_its_column_then():
    table = LogTable()
    assert len(table.lines(log(reward=1.0), state(1))) == 2
    header, row = table.lines(log(success=0.5), state(2))
    assert header.split() == ["step", "loss", "reward", "success"]
    assert row.split() == ["2/300", "0.0123", "-", "50%"]
    (row,) = table.lines(log(reward=float("nan")), state(3))
    assert row.split() == ["3/300", "0.0123", "nan", "-"]


def test_the_header_is_repeated():
    table = LogTable()
    lines = [len(table.lines(log(), state(step))) for step in range(2 * REPEAT_HEADER + 1)]
    assert lines == [2, *[1] * (REPEAT_HEADER - 1)] * 2 + [2]


def test_evaluation_and_what_a_callback_logs_have_lines_of_their_own():
    table = LogTable()
    values = {"eval_loss": 0.5, "eval_rewards/f/mean": 0.25, "eval_runtime": 1.0, "eval_clip_ratio/low_mean": 0.0}
    assert table.lines(values, state(4)) == ["evaluation at step 4: loss 0.5, rewards/f/mean 0.25, seconds 1"]
    assert table.lines({"my/metric": 0.123456, "note": "text"}, state(4)) == ["my/metric 0.1235, note text"]


def test_warnings_of_libraries_are_silenced_while_the_command_runs_and_those_of_ones_own_code_are_not(
    recipe, monkeypatch
):
    def warn(module: str) -> int:
        with warnings.catch_warnings(record=True) as caught:
            warnings.warn_explicit("old", FutureWarning, "x.py", 1, module=module, registry={})
        return len(caught)

    def heard() -> tuple:
        parser = logging.getLogger("math_verify.parser")
        return warn("transformers.training_args"), warn("my_rewards"), parser.isEnabledFor(logging.WARNING)

    def reward(completions, **kwargs):
        during.add(heard())
        return [0.0] * len(completions)

    during = set()
    monkeypatch.setitem(REWARDS, "own", reward)
    monkeypatch.setattr(sys, "warnoptions", [])
    warnings.simplefilter("always")
    assert main(["grpo", "--config", recipe, "--max_steps", "1", "--reward_funcs", "own"]) == 0
    assert during == {(0, 1, False)}
    assert heard() == (1, 1, True)
    monkeypatch.setattr(sys, "warnoptions", ["default"])  # of `python -W`
    with quiet_libraries():
        assert warn("transformers.training_args") == 1
