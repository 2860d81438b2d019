"""The live panel of `trl-dataeff grpo`, and when lines are printed instead."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console
from transformers import PrinterCallback, ProgressCallback

from tests.factories import make_trainer
from trl_dataeff.cli.console import ProgressTableCallback, TableCallback
from trl_dataeff.cli.panel import ASSUMPTION, PanelCallback, progress_shown, sparkline


LOG = {
    "loss": 0.1,
    "reward": 0.5,
    "dataeff/effective_ratio": 0.5,
    "dataeff/easy_ratio": 0.2,
    "dataeff/hard_ratio": 0.3,
    "dataeff/rollouts_generated": 1000,
    "dataeff/rollouts_trained": 1500,
    "dataeff/tokens_generated": 12_800,
}


def console(terminal: bool = True, width: int = 100) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=width)


def state(step: int) -> SimpleNamespace:
    return SimpleNamespace(global_step=step, max_steps=40, is_world_process_zero=True)


def shown(*logs: dict, width: int = 100) -> str:
    target = Console(file=io.StringIO(), width=width)
    panel, args = PanelCallback(console()), SimpleNamespace(output_dir="out")
    panel.on_train_begin(args, state(0), None)
    for i, log in enumerate(logs):
        panel.on_log(args, state(10 * (i + 1)), None, logs=log)
    panel.stop()
    target.print(panel.render(args, state(10 * len(logs))))
    return target.file.getvalue()


def test_what_it_shows():
    text = shown(LOG, {"eval_reward": 0.25}, LOG | {"reward": 0.75})
    for part in (
        "step 30 of 40", "0.750 ▁█", "held out 0.250 at step 20", "50% of the groups (easy 20%, hard 30%)",
        "1,000 generated, 12.8k tokens", "500 saved so far", "left", "out",
    ):  # fmt: skip
        assert part in text
    assert ASSUMPTION in " ".join(text.replace("│", " ").split())


def test_more_rollouts_than_plain_grpo_are_called_that():
    assert "500 more so far" in shown(LOG | {"dataeff/rollouts_trained": 500})


def test_before_the_first_log_and_without_our_metrics():
    assert "step 0 of 40" in shown()
    assert "generated" not in shown({"loss": 0.1, "reward": float("nan")})


def test_faults_are_shown():
    assert "reward faults 3" in shown(LOG | {"dataeff/reward_faults": 3})


@pytest.mark.parametrize("width", [40, 200])
def test_it_fits_the_terminal(width):
    assert max(map(len, shown(LOG, width=width).splitlines())) <= width


def test_sparklines():
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▁▁"


@pytest.mark.parametrize(("plain", "terminal"), [(True, True), (False, False)])
def test_lines_where_they_are_wanted(tmp_path, plain, terminal):
    trainer = make_trainer(tmp_path, "dynamic", max_steps=2, disable_tqdm=False)
    with progress_shown(trainer, plain, console(terminal)):
        kinds = {type(callback) for callback in trainer.callback_handler.callbacks}
    assert ProgressTableCallback in kinds
    assert PanelCallback not in kinds


def test_without_progress_bars_there_is_no_panel(tmp_path):
    trainer = make_trainer(tmp_path, "dynamic", max_steps=2, disable_tqdm=True)
    trainer.add_callback(PrinterCallback)
    with progress_shown(trainer, False, console()):
        kinds = {type(callback) for callback in trainer.callback_handler.callbacks}
    assert TableCallback in kinds
    assert PanelCallback not in kinds


def test_a_run_in_a_terminal(tmp_path):
    trainer, screen = make_trainer(tmp_path, "dynamic", max_steps=3, disable_tqdm=False), console()
    with progress_shown(trainer, False, screen):
        assert not {ProgressCallback, PrinterCallback} & {type(c) for c in trainer.callback_handler.callbacks}
        trainer.train()
    text = screen.file.getvalue()
    assert "step 3 of 3" in text
    assert "generated" in text


def test_an_error_gives_the_terminal_back(tmp_path):
    trainer, screen = make_trainer(tmp_path, "dynamic", max_steps=3, disable_tqdm=False), console()

    def fails(**kwargs):
        raise KeyError("answer")

    trainer.reward_funcs = [fails]
    with pytest.raises(KeyError), progress_shown(trainer, False, screen):
        trainer.train()
    assert screen.file.getvalue().rstrip().endswith("\x1b[?25h"), "the cursor is shown again"
