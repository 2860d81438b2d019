"""What a run of the command prints, and what it leaves to trackers and to `log_history`."""

import logging
import sys
import warnings

import pytest
from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, TrainerState

from trl_dataeff.cli.console import COLUMNS, REPEAT_HEADER, BarCallback, TableCallback, above_the_bar, show_progress
from trl_dataeff.cli.grpo import make_trainer, parse
from trl_dataeff.cli.main import main


def log(**values):
    names = {column.title: name for name, column in COLUMNS.items()}
    return {"loss": 0.0123456, **{names.get(name, name): value for name, value in values.items()}}


def state(step: int, of: int = 300) -> TrainerState:
    return TrainerState(global_step=step, max_steps=of)


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch):
    """The width of the terminal in which tests run does not count."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.__stdout__", None)


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
    assert lines[header + 3].startswith("step 2: train_runtime ")


def kinds_shown(trainer) -> set[type]:
    show_progress(trainer)
    kinds = {type(callback) for callback in trainer.callback_handler.callbacks}
    return {kind for kind in kinds if issubclass(kind, (PrinterCallback, ProgressCallback, TableCallback))}


@pytest.mark.parametrize(
    ("bar", "in_terminal", "expected"),
    [
        ("false", True, {TableCallback, BarCallback}),
        ("false", False, {TableCallback}),
        ("true", True, {TableCallback}),
    ],
)
def test_the_bar_is_shown_in_a_terminal_alone(bar, in_terminal, expected, recipe, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: in_terminal, raising=False)
    trainer = make_trainer(parse(["--config", recipe, f"--disable_tqdm={bar}"]))
    assert kinds_shown(trainer) == expected


def test_the_rows_of_a_terminal_stand_above_the_bar(recipe, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert main(["grpo", "--config", recipe, "--disable_tqdm=false"]) == 0
    captured = capsys.readouterr()
    assert [line.split()[0] for line in captured.out.splitlines() if "/2 " in line] == ["1/2", "2/2"]
    assert "2/2 [" in captured.err
    assert "dataeff/" not in captured.out + captured.err


def test_the_estimate_counts_neither_the_check_nor_the_steps_before_a_resume(monkeypatch):
    """Steps of 10 s, of which the first has 50 s more for the check, from step 6 of 20 on."""
    now = 1000.0
    monkeypatch.setattr("tqdm.std.time", lambda: now)
    check_seconds = 0.0
    bar = BarCallback(lambda: check_seconds)
    bar.on_train_begin(None, state(6, of=20), None)
    for step, seconds in ((7, 60.0), (8, 10.0)):
        now += seconds
        check_seconds = 50.0
        bar.on_step_end(None, state(step, of=20), None)
        shown = bar.training_bar.format_dict
        assert shown["n"] == step
        assert 1 / shown["rate"] == pytest.approx(10)


def test_what_prints_in_another_way_stays(recipe):
    """As in a notebook."""
    own_printer = type("OwnPrinter", (PrinterCallback,), {})
    trainer = make_trainer(parse(["--config", recipe, "--disable_tqdm=true"]))
    trainer.pop_callback(PrinterCallback)
    trainer.add_callback(own_printer)
    assert kinds_shown(trainer) == {own_printer}


def test_numbers_are_aligned_below_their_titles():
    header, row = TableCallback().lines(log(reward=-12.345, success=0.123, rollouts=1234567, lr=1e-6), state(7))
    assert header == "   step      loss  reward success  rollouts       lr"
    assert row == "  7/300    0.0123  -12.35     12% 1,234,567    1e-06"


def test_a_metric_that_comes_later_gets_its_column_then():
    table = TableCallback()
    assert len(table.lines(log(reward=1.0), state(1))) == 2
    header, row = table.lines(log(success=0.5), state(2))
    assert header.split() == ["step", "loss", "reward", "success"]
    assert row.split() == ["2/300", "0.0123", "-", "50%"]
    (row,) = table.lines(log(reward=float("nan")), state(3))
    assert row.split() == ["3/300", "0.0123", "nan", "-"]
    lines = [len(table.lines(log(), state(step))) for step in range(4, REPEAT_HEADER + 3)]
    assert lines == [*[1] * (REPEAT_HEADER - 2), 2], "the header is repeated"


@pytest.mark.parametrize(("width", "steps"), [(40, 99), (80, 300), (80, 9999), (100, 300), (130, 99_999)])
def test_rows_fit_into_the_terminal(monkeypatch, width, steps):
    everything = log(**{column.title: 0.5 for column in COLUMNS.values()})
    table = TableCallback()
    monkeypatch.setenv("COLUMNS", str(width))
    header, row = table.lines(everything, state(steps, of=steps))
    assert len(header) == len(row) <= width
    shown = [column for column in COLUMNS.values() if column.title in header]
    left_out = sorted((column for column in COLUMNS.values() if column not in shown), key=lambda column: column.rank)
    assert {"reward", "effective"} <= {column.title for column in shown}
    if left_out:
        assert max(column.rank for column in shown) < left_out[0].rank
        assert len(header) + 1 + left_out[0].width > width, "there was room"
    monkeypatch.setenv("COLUMNS", "300")
    assert len(table.lines(everything, state(steps, of=steps))) == 1 + bool(left_out), "a header for new columns"


def test_evaluation_and_what_a_callback_logs_have_lines_of_their_own():
    table = TableCallback()
    values = {"eval_loss": 0.5, "eval_rewards/f/mean": 0.25, "eval_runtime": 1.0, "eval_clip_ratio/low_mean": 0.0}
    one = {**values, "eval_reward": 0.125}
    assert table.lines(one, state(4)) == ["step 4: eval_reward 0.125, eval_runtime 1, eval_loss 0.5"]
    two = {**one, "eval_rewards/g/mean": 0.0}
    assert table.lines(two, state(4)) == ["step 4: eval_reward 0.125, f 0.25, g 0, eval_runtime 1, eval_loss 0.5"]
    assert table.lines({"my/metric": 0.123456, "note": "text"}, state(4)) == ["step 4: my/metric 0.1235, note text"]


def test_the_line_of_an_evaluation_fits_into_the_terminal(monkeypatch):
    values = {"eval_loss": 0.5, "eval_reward": 0.125, "eval_runtime": 1.0, "eval_completions/mean_length": 100.0}
    for width, shown in ((90, 4), (89, 3), (60, 2), (30, 1)):
        monkeypatch.setenv("COLUMNS", str(width))
        (line,) = TableCallback().lines(values, state(4))
        assert line.startswith("step 4: eval_reward 0.125")
        assert (len(line) <= width, line.count(",") + 1) == (True, shown)


def test_future_warnings_of_libraries_are_silenced_unless_python_is_told_to_show_them(monkeypatch):
    for options, count in (([], 0), (["default"], 1)):  # of `python -W`
        monkeypatch.setattr(sys, "warnoptions", options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert main(["recipes", "list"]) == 0
            warnings.warn("old", FutureWarning, stacklevel=1)
        assert len(caught) == count


@pytest.mark.parametrize("name", ["trl_dataeff.compact.update", "trl.trainer", "datasets.load"])
def test_messages_of_packages_stand_above_the_bar_once(name, capsys, monkeypatch):
    """Those with a handler of their own, which write to the captured stderr here, and those without."""
    owner = logging.getLogger(name.partition(".")[0])
    if owner.handlers:
        monkeypatch.setattr(owner, "handlers", [logging.StreamHandler(sys.stderr)])
    with above_the_bar(), tqdm(total=2, file=sys.stderr, ascii=True):
        logging.getLogger(name).warning("a message")
    lines = [line.rsplit("\r", maxsplit=1)[-1] for line in capsys.readouterr().err.split("\n")]
    assert [line for line in lines if "a message" in line] == ["a message"]
