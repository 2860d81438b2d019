"""What the trainer does with its arguments, and what it overrides."""

import inspect
import re

import pytest
from trl import GRPOTrainer

from tests.factories import (
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


def test_switched_off_nothing_is_installed(tmp_path):
    trainer = train_briefly(tmp_path, "off", rewards=even_length_reward)
    assert trainer.reward_funcs[0] is even_length_reward
    assert trainer._signals is trainer._nonfinite is trainer._reward_guard is None
    assert trainer.collector.buffer is trainer.collector.refill is None
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
    assert trainer.selector.gate.controller.p_easy == 0.4


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


def test_evaluation_touches_neither_selection_nor_counters(tmp_path):
    """TRL's own pass, though rounds are generated in training."""
    datasets = {"train_dataset": plain_dataset(), "eval_dataset": plain_dataset(4)}
    options = {"per_device_eval_batch_size": 4, "replay_fraction": 0.5, "trainer": datasets}
    trainer = make_trainer(tmp_path, "dynamic", max_steps=2, save_strategy="no", **options)
    trainer.train()
    before = dict(trainer.collector.counters.values)
    metrics = trainer.evaluate()
    assert "eval_reward" in metrics
    assert trainer.collector.counters.values == before
    fresh = run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, tmp_path / "b", train=False, **options)
    assert "eval_reward" in fresh.evaluate()
    assert not hasattr(fresh, "collector")
