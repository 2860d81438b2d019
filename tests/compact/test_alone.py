"""The faster update stands alone: with TRL's own configuration, and without the rest of the package."""

import ast
from pathlib import Path

import numpy as np
import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

import trl_dataeff.compact
from tests.factories.comparison import messages
from tests.factories.tiny import logged, run
from tests.factories.training import SHARES_PROMPTS, partly_learnable_reward
from trl_dataeff import DataEfficientGRPOTrainer
from trl_dataeff.compact import CompactGRPOTrainer


ACCUMULATED = {"gradient_accumulation_steps": 2}
CASES = {
    "defaults": {},
    "dapo, accumulated": ACCUMULATED,
    "grpo, two iterations": {"loss_type": "grpo", "num_iterations": 2, **ACCUMULATED},
    "bnpo": {"loss_type": "bnpo", **ACCUMULATED},
    "misaligned": {"steps_per_generation": 4},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "a KL term": {"beta": 0.1},
}


def largest_difference(a: GRPOTrainer, b: GRPOTrainer) -> float:
    pairs = zip(a.model.parameters(), b.model.parameters(), strict=True)
    return max((x - y).abs().max().item() for x, y in pairs)


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_default_of_the_whole_trainer_to_the_bit_and_trl_up_to_rounding(tmp_path, name):
    options = {"rewards": partly_learnable_reward, "max_steps": 6, **CASES[name]}
    alone = run(tmp_path / "alone", CompactGRPOTrainer, **options)
    whole = run(tmp_path / "whole", DataEfficientGRPOTrainer, compact_update=True, **options)
    plain = run(tmp_path / "plain", GRPOTrainer, **options)
    assert type(alone.args) is GRPOConfig
    assert largest_difference(alone, whole) == 0
    names = ("loss", "entropy", "reward", "grad_norm", "dataeff/update/tokens", "dataeff/update/tokens_saved")
    assert logged(alone, *names) == logged(whole, *names)
    assert largest_difference(alone, plain) < 1e-5
    assert any(log.get("grad_norm") for log in plain.state.log_history), "a run without gradients shows nothing"
    saved = [share for (share,) in logged(alone, "dataeff/update/tokens_saved")]
    if SHARES_PROMPTS or "beta" not in CASES[name]:  # with a KL term all rows stay, and here none is shorter
        assert max(saved) > 0


def test_an_evaluation_is_trls(tmp_path):
    """There TRL's loss has no compacted micro-batch."""
    options = {"rewards": partly_learnable_reward, "max_steps": 1, "train": False}
    trainers = [run(tmp_path / each.__name__, each, **options) for each in (CompactGRPOTrainer, GRPOTrainer)]
    losses = []
    for trainer in trainers:
        torch.manual_seed(1)
        losses.append(trainer.evaluate(trainer.train_dataset.select(range(8))))
    names = ("eval_loss", "eval_reward", "eval_entropy", "eval_completions/mean_length")
    assert [losses[0][name] for name in names] == [losses[1][name] for name in names]


def imported_units(path: Path) -> set[str]:
    """The units of this package that a file imports, also within functions and for type checkers."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            if node.module == "trl_dataeff":
                names.update(f"trl_dataeff.{alias.name}" for alias in node.names)
            else:
                names.add(node.module)
    return {".".join(name.split(".")[:2]) for name in names if name.split(".")[0] == "trl_dataeff"}


def test_of_this_package_it_imports_nothing_but_utils():
    files = sorted(Path(trl_dataeff.compact.__file__).parent.rglob("*.py"))
    assert len(files) > 10
    assert set().union(*map(imported_units, files)) == {"trl_dataeff.compact", "trl_dataeff.utils"}
    utils = Path(trl_dataeff.compact.__file__).parent.with_name("utils.py")
    assert imported_units(utils) == set()


@pytest.mark.parametrize(
    ("options", "left_out", "others"),
    [
        ({}, ["rows without a gradient", "repeated prompts"], []),
        ({"gradient_checkpointing": True}, ["rows without a gradient", "repeated prompts"], []),
        ({"beta": 0.1}, ["repeated prompts"], ["rows without a gradient (`beta`)"]),
    ],
    ids=str,
)
def test_a_run_says_what_it_leaves_out_and_what_that_saved(options, left_out, others, tmp_path, caplog_transformers):
    trainer = run(tmp_path, CompactGRPOTrainer, rewards=partly_learnable_reward, max_steps=4, **options)
    (start,) = messages(caplog_transformers, "The update leaves out")
    said, _, not_said = start.partition("; not ")
    if not SHARES_PROMPTS:
        left_out = [words for words in left_out if words != "repeated prompts"]
        others = [*others, "repeated prompts"]
    assert all(words in said for words in left_out)
    assert all(words in not_said for words in others)
    (end,) = messages(caplog_transformers, "of the tokens that TRL's would")
    names = ("dataeff/update/tokens", "dataeff/update/tokens_saved", "dataeff/update/seconds", "step_time")
    tokens, saved, seconds, step_times = map(np.array, zip(*logged(trainer, *names), strict=True))
    computed = tokens.sum() / (tokens / (1 - saved)).sum()
    assert f"computed {computed:.0%} of" in end
    assert (seconds > 0).all()
    assert (seconds < step_times).all(), "generation is no part of the update"


def test_the_line_names_what_the_first_update_has_not(tmp_path, caplog_transformers):
    """Its groups all have a gradient."""
    run(tmp_path, CompactGRPOTrainer, rewards=rewards_by_step("e"), max_steps=1)
    (start,) = messages(caplog_transformers, "The update leaves out")
    assert "rows without a gradient" in start.partition("; not ")[0]


def rewards_by_step(steps: str):
    """Rewards of steps in which all groups are effective (`e`) or hopeless (`h`)."""
    calls = iter(steps)

    def reward(completions, **kwargs):
        if next(calls) == "h":
            return [0.0] * len(completions)
        return [float(i % 2) for i in range(len(completions))]

    return reward


@pytest.mark.parametrize("options", [{}, {"loss_type": "bnpo"}, {"gradient_accumulation_steps": 2}], ids=str)
@pytest.mark.parametrize("steps", ["hheh", "ehhe"])
def test_steps_without_an_effective_group_compute_a_row(steps, options, tmp_path):
    """Whether or not a step before them had one. Weights decay, and the optimizer goes on, as with TRL."""
    trainers = []
    for trainer_class in (CompactGRPOTrainer, GRPOTrainer):
        rewards = rewards_by_step(steps)
        trainers.append(
            run(
                tmp_path,
                trainer_class,
                rewards=rewards,
                max_steps=len(steps),
                learning_rate=1e-3,
                weight_decay=0.1,
                **options,
            )
        )
    assert largest_difference(*trainers) < 1e-5
    saved = np.array(logged(trainers[0], "dataeff/update/tokens_saved")).squeeze(1)
    hopeless = np.array(list(steps)) == "h"
    assert (saved[hopeless] > 0.7).all()
    assert (saved[hopeless].min() > saved[~hopeless]).all()
