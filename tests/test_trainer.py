"""What the trainer does with its arguments, and what it overrides."""

import inspect
import re

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.factories import (
    DYNAMIC,
    FILL,
    even_length_reward,
    groups_since,
    history,
    make_trainer,
    plain_dataset,
    run,
    tiny_model,
    tiny_tokenizer,
    train_briefly,
)
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer, GresoSelector, UniformSelector
from trl_dataeff.collector.state import state_checksums


def test_args_may_be_left_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # TRL's default, bf16, is refused on a machine without a GPU
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    tokenizer = tiny_tokenizer()
    trainer = DataEfficientGRPOTrainer(
        tiny_model(tokenizer), even_length_reward, train_dataset=plain_dataset(), processing_class=tokenizer
    )
    assert isinstance(trainer.args, DataEfficientGRPOConfig)
    assert trainer.args.output_dir.endswith("-GRPO")


class WithMethod(GRPOConfig):
    def described(self) -> str:
        return f"{self.seed}"


def test_a_grpo_config_that_two_trainers_share(tmp_path):
    """It is not changed, and what is saved has its class."""
    fields = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    fields |= {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8, "logging_steps": 1}
    args = WithMethod(str(tmp_path), **fields)
    args.max_steps, args.learning_rate = 2, 0.25
    before = dict(args.__dict__)
    first, second = make_with(args, DataEfficientGRPOTrainer), make_with(args, GRPOTrainer)
    assert args.__dict__ == before
    assert type(args) is WithMethod
    for trainer in (first, second):
        trainer.train()
        rates = [log["learning_rate"] for log in trainer.state.log_history if "learning_rate" in log]
        assert rates == [0.25, 0.125]
    assert first.args.described() == "42"
    first.save_model(tmp_path / "model")
    saved = torch.load(tmp_path / "model" / "training_args.bin", weights_only=False)
    assert isinstance(saved, WithMethod)
    assert saved.learning_rate == 0.25


def make_with(args, trainer_class):
    tokenizer = tiny_tokenizer()
    return trainer_class(
        tiny_model(tokenizer), even_length_reward, args, train_dataset=plain_dataset(), processing_class=tokenizer
    )


def test_arguments_are_those_of_grpo_trainer_and_a_selector():
    ours = inspect.signature(DataEfficientGRPOTrainer).parameters
    trls = inspect.signature(GRPOTrainer).parameters
    assert [*trls, "selector"] == list(ours)
    assert all(ours[name] == trls[name] for name in trls)
    assert ours["selector"].kind is inspect.Parameter.KEYWORD_ONLY


def test_it_is_the_only_subclass_and_every_overridden_method_is_listed():
    assert DataEfficientGRPOTrainer.__bases__ == (GRPOTrainer,)
    methods = {name for name, value in vars(DataEfficientGRPOTrainer).items() if inspect.isfunction(value)}
    overridden = {name for name in methods if hasattr(GRPOTrainer, name)} - {"__init__"}
    text = inspect.getdoc(DataEfficientGRPOTrainer).split("Overridden methods, and why:")[1].split("Args:")[0]
    listed = {name for line in re.findall(r"^- (.*?):", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", line)}
    assert listed == overridden


def test_overridden_methods_take_what_they_take_in_trl():
    """mypy compares them too, but sees neither renamed parameters nor those of methods that TRL decorates."""
    for name, ours in vars(DataEfficientGRPOTrainer).items():
        if inspect.isfunction(ours) and hasattr(GRPOTrainer, name) and name != "__init__":
            trls = inspect.signature(getattr(GRPOTrainer, name)).parameters.values()
            parameters = inspect.signature(ours).parameters.values()
            named = [(p.name, p.default) for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
            passes_on = len(named) < len(parameters)
            assert named == [(p.name, p.default) for p in trls][: len(named) if passes_on else None], name


def test_switched_off_nothing_is_installed(tmp_path):
    trainer = train_briefly(tmp_path, "off", rewards=even_length_reward)
    assert trainer.reward_funcs[0] is even_length_reward
    assert trainer._signals is None
    assert trainer.collector.buffer is None
    assert type(trainer.selector) is UniformSelector


@pytest.mark.parametrize("name", ["by name", "instance"])
def test_a_selector_is_bound_when_training_starts(tmp_path, name):
    given = {"selection": "greso", "selector_args": {"p_init": 0.4}}
    if name == "instance":
        given = {"selection": "auto", "trainer": {"selector": GresoSelector(p_init=0.4)}}
    trainer = make_trainer(tmp_path, "off", max_steps=2, save_strategy="no", **given)
    assert type(trainer.selector) is GresoSelector
    assert not hasattr(trainer.selector, "context")
    assert not hasattr(trainer, "collector")
    trainer.train()
    context = trainer.selector.context
    assert (context.num_prompts, context.batch_groups, context.group_size) == (24, 2, 4)
    assert trainer.collector.selector is trainer.selector
    assert trainer.selector.metrics()["p_easy"] == 0.4


def test_a_name_and_an_instance_select_the_same(tmp_path):
    by_name = train_briefly(tmp_path / "a", "off", selection="greso")
    instance = train_briefly(tmp_path / "b", "off", selection="auto", trainer={"selector": GresoSelector()})
    assert history(by_name.state.log_history) == history(instance.state.log_history)


def test_a_second_call_of_train_starts_again(tmp_path):
    trainer = make_trainer(tmp_path, "dynamic", max_steps=3, save_strategy="no", selection="greso")
    trainer.train()
    first, context = trainer.collector, trainer.selector.context
    trainer.train_dataset = plain_dataset(10)
    trainer.train()
    assert trainer.collector is not first
    assert trainer.selector.context is not context
    assert trainer.selector.context.num_prompts == 10
    counters = trainer.collector.counters.values
    assert counters["rollouts_trained"] == 3 * 8
    table = groups_since(tmp_path, 0)
    assert len(table) * 4 == counters["rollouts_generated"]
    assert table["prompt_id"].max() < 10


def test_evaluation_touches_nothing_of_ours(tmp_path):
    """TRL's own pass, though rounds are generated in training."""
    datasets = {"train_dataset": plain_dataset(), "eval_dataset": plain_dataset(5)}
    options = {"per_device_eval_batch_size": 8, "num_generations_eval": 2, **FILL, "trainer": datasets}
    trainer = make_trainer(tmp_path, "greso, dynamic", max_steps=2, save_strategy="no", **options)
    trainer.train()
    before = state_checksums(trainer.collector)
    assert "eval_reward" in trainer.evaluate()
    assert state_checksums(trainer.collector) == before
    fresh = run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, tmp_path / "b", train=False, **options)
    assert "eval_reward" in fresh.evaluate()
    assert not hasattr(fresh, "collector")


class Curriculum(TrainerCallback):
    """From step 3 on the second reward counts instead of the first."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 3:
            self.trainer.reward_weights = torch.tensor([0.0, 1.0])


@pytest.mark.parametrize("fields", [{}, DYNAMIC], ids=["a single pass", "rounds"])
def test_reward_weights_that_a_callback_changes_reach_what_is_learned_of_a_group(tmp_path, fields):
    """Kinds, success rates, the table, the evidence that DOTS predicts with, and the history of each prompt."""

    def always(completion_ids, **kwargs):
        return [1.0] * len(completion_ids)

    curriculum = Curriculum()
    fields = {"selection": "dots", "reward_weights": [1.0, 0.0], "reward_range": [0.0, 1.0], **fields}
    trainer = make_trainer(
        tmp_path,
        "off",
        rewards=[even_length_reward, always],
        save_strategy="no",
        max_steps=6,
        **fields,
        trainer={"callbacks": [curriculum]},
    )
    curriculum.trainer = trainer
    trainer.train()
    table = groups_since(tmp_path, 0)
    before, after = table[table["step"] < 3], table[table["step"] >= 3]
    assert before["kind"].eq("effective").any()
    assert before["reward"].lt(1).any()
    assert after["kind"].eq("easy").all()
    assert after["success_rate"].eq(1).all()
    assert after["reward"].eq(1).all()
    difficulty = trainer.selector.success.difficulty
    late = difficulty.batches > 3  # counted from 1
    assert late.any()
    assert (difficulty.rates[late] == 1).all()
    seen_late_only = sorted(set(after["prompt_id"]) - set(before["prompt_id"]))
    assert seen_late_only
    history = trainer.selector.success.history
    predicted = np.full((len(history.half_lives), len(seen_late_only)), 0.5)
    assert (history.estimate(predicted, trainer.selector.batch, seen_late_only)[-1] > 0.6).all()


def test_an_instance_whose_init_did_not_run_generates_and_scores_as_grpo_trainer(monkeypatch):
    """TRL's own tests make such instances, and subclasses may call these methods before `super().__init__()`."""
    passed = {
        "_generate": ("generated", ["a prompt"]),
        "_calculate_rewards": ("scored", [{"prompt": "p"}], ["p"], ["c"], [[1]]),
        "_get_per_token_logps_and_entropies": (("logps", "entropies"), "model", "ids"),
        "_compute_loss": ("loss", "model", {}),
        "_get_grad_norm": ("norm", "model"),
    }
    trainer = DataEfficientGRPOTrainer.__new__(DataEfficientGRPOTrainer)
    trainer.reward_func_names = ["reward"]
    for name, (returned, *arguments) in passed.items():
        monkeypatch.setattr(GRPOTrainer, name, lambda self, *args, result=returned, **kwargs: (result, args))
        assert getattr(trainer, name)(*arguments) == (returned, tuple(arguments))


@pytest.mark.parametrize("fields", [FILL, DYNAMIC, {}], ids=["fill", "dynamic", "off"])
def test_a_second_train_starts_again_whatever_the_first_left(tmp_path, fields):
    """A run that ends within a generation batch, or in an exception between two micro-batches, leaves nothing behind."""
    fields = {"steps_per_generation": 4, "max_steps": 10, "rewards": even_length_reward, **fields}
    trainer = run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, tmp_path / "one", **fields)
    assert trainer._step % 4, "the run has to end within a generation batch"
    first = dict(trainer.collector.counters.values)
    trainer._metrics["train"]["reward"].append(1e9)  # what a logging interval that was interrupted leaves
    trainer.train()
    assert trainer._step == 10
    second = trainer.collector.counters.values
    assert second["rollouts_trained"] == first["rollouts_trained"]
    assert max(log.get("reward", 0.0) for log in trainer.state.log_history) <= 1.0
    groups = pd.read_parquet(tmp_path / "one" / "dataeff" / "groups.parquet")
    assert len(groups) * 4 == second["rollouts_generated"]
    assert groups["step"].min() == 0
