"""What a run of the command prints, and what it leaves to trackers and to `log_history`."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from transformers import PrinterCallback, TrainerState

from tests.factories import plain_dataset
from trl_dataeff.cli.console import COLUMNS, REPEAT_HEADER, LogTable, PanelCallback, TableCallback, progress_shown
from trl_dataeff.cli.grpo import make_trainer, parse
from trl_dataeff.cli.main import main, quiet_libraries


RECIPE = """\
model_name_or_path: {model}
dataset_name: train.jsonl
reward_funcs: [tests.factories.letter_share_reward]
output_dir: out
use_cpu: true
bf16: false
per_device_train_batch_size: 8
num_generations: 4
max_completion_length: 6
max_steps: 2
logging_steps: 1
save_strategy: "no"
report_to: none
"""


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
    trainer = make_trainer(parse(["--config", recipe, "--disable_tqdm=false", "--max_steps=4"]))
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with progress_shown(trainer, plain=False, console=console):
        trainer.train()
    shown = console.file.getvalue()
    counts = trainer.collector.counters.values
    assert "step 4 of 4" in shown
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


def test_faults_stand_at_the_end_of_their_row():
    row = LogTable().lines(log() | {"dataeff/overlong_prompts": 1500.0}, state(7))[-1]
    assert row.endswith("0.0123  overlong prompts 1,500")


def test_evaluation_and_what_a_callback_logs_have_lines_of_their_own():
    table = LogTable()
    values = {"eval_loss": 0.5, "eval_rewards/f/mean": 0.25, "eval_runtime": 1.0, "eval_clip_ratio/low_mean": 0.0}
    assert table.lines(values, state(4)) == ["evaluation at step 4: loss 0.5, rewards/f/mean 0.25, seconds 1"]
    assert table.lines({"my/metric": 0.123456, "note": "text"}, state(4)) == ["my/metric 0.1235, note text"]


CHILD = """
import sys
from pathlib import Path
from types import SimpleNamespace
Path("my_rewards.py").write_text("import warnings\\ndef mine(completions, **kwargs):\\n    warnings.warn('of my own code', FutureWarning)\\n    return [len(c) / 9 for c in completions]\\n")
from trl_dataeff.cli.main import main
raise SystemExit(main(sys.argv[1:]))
"""


def test_future_warnings_of_libraries_are_not_shown_by_the_command(recipe, tmp_path, monkeypatch):
    """In a process of its own: pytest handles warnings itself."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)
    options = ["--config", recipe, "--max_steps", "1", "--reward_funcs", "my_rewards.mine"]
    command = [sys.executable, "-c", CHILD, "grpo", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    shown = [line for line in done.stderr.splitlines() if ": FutureWarning: " in line]
    assert len(shown) == 1
    assert "of my own code" in shown[0]


def test_what_is_silenced_is_heard_again_afterwards(monkeypatch):
    def warn():
        with warnings.catch_warnings(record=True) as caught:
            warnings.warn_explicit("old", FutureWarning, "x.py", 1, module="transformers.training_args", registry={})
        return len(caught)

    monkeypatch.setattr(sys, "warnoptions", [])
    warnings.simplefilter("always")
    with quiet_libraries():
        assert warn() == 0
        assert not logging.getLogger("math_verify.parser").isEnabledFor(logging.WARNING)
    assert warn() == 1
    assert logging.getLogger("math_verify.parser").isEnabledFor(logging.WARNING)
    monkeypatch.setattr(sys, "warnoptions", ["default"])  # of `python -W`
    with quiet_libraries():
        assert warn() == 1


def test_the_panel_takes_brackets_in_a_folders_name_as_they_are():
    screen = Console(file=io.StringIO(), width=80)
    screen.print(PanelCallback(screen).render(SimpleNamespace(output_dir="runs/[/x]"), state(0)))
    assert "runs/[/x]" in screen.file.getvalue()
