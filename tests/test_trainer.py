"""What the trainer does with its arguments, and what it overrides."""

import copy
import inspect
import re

import numpy as np
import pytest
import torch
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.factories.comparison import groups_since
from tests.factories.configurations import DYNAMIC, FILL, make_trainer, train_briefly
from tests.factories.tiny import SMALL, even_length_reward, plain_dataset, tiny_model, tiny_tokenizer
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer


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
    """It is not changed, what is saved has its class, and ours selects prompts and replays groups."""
    args, tokenizer = WithMethod(str(tmp_path), **SMALL), tiny_tokenizer()
    args.max_steps, args.learning_rate = 2, 0.25
    before, data = dict(args.__dict__), {"train_dataset": plain_dataset(), "processing_class": tokenizer}
    first, second = (
        trainer_class(tiny_model(tokenizer), even_length_reward, args, **data)
        for trainer_class in (DataEfficientGRPOTrainer, GRPOTrainer)
    )
    assert args.__dict__ == before
    for trainer in (first, second):
        trainer.train()
        rates = [log["learning_rate"] for log in trainer.state.log_history if "learning_rate" in log]
        assert rates == [0.25, 0.125]
    assert first.args.described() == "42"
    assert first.selector.name == "dots"
    assert any("dataeff/rollouts_replayed" in log for log in first.state.log_history)
    first.save_model(tmp_path / "model")
    saved = torch.load(tmp_path / "model" / "training_args.bin", weights_only=False)
    assert isinstance(saved, WithMethod)
    assert saved.learning_rate == 0.25


def test_arguments_are_those_of_grpo_trainer_and_a_selector():
    ours = inspect.signature(DataEfficientGRPOTrainer).parameters
    trls = inspect.signature(GRPOTrainer).parameters
    assert [*trls, "selector"] == list(ours)
    assert all(ours[name] == trls[name] for name in trls)
    assert ours["selector"].kind is inspect.Parameter.KEYWORD_ONLY


def overridden() -> set[str]:
    methods = {name for name, value in vars(DataEfficientGRPOTrainer).items() if inspect.isfunction(value)}
    return {name for name in methods if hasattr(GRPOTrainer, name)} - {"__init__"}


def test_it_is_the_only_subclass_and_overrides_at_most_twelve_methods_which_are_listed():
    assert DataEfficientGRPOTrainer.__mro__[:2] == (DataEfficientGRPOTrainer, GRPOTrainer)
    assert len(overridden()) <= 12
    text = inspect.getdoc(DataEfficientGRPOTrainer).split("Overridden methods, and why:")[1].split("Args:")[0]
    listed = {name for line in re.findall(r"^- (.*?):", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", line)}
    assert listed == overridden()


def test_overridden_methods_take_what_they_take_in_trl():
    """mypy compares them too, but sees neither renamed parameters nor those of methods that TRL decorates."""
    for name in overridden():
        trls = inspect.signature(getattr(GRPOTrainer, name)).parameters.values()
        parameters = inspect.signature(getattr(DataEfficientGRPOTrainer, name)).parameters.values()
        named = [(p.name, p.default) for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        passes_on = len(named) < len(parameters)
        assert named == [(p.name, p.default) for p in trls][: len(named) if passes_on else None], name


@pytest.mark.parametrize("fields", [{"selection": "auto", **FILL}, DYNAMIC], ids=["defaults", "dynamic sampling"])
def test_epochs_decide_the_number_of_steps_as_in_trl(tmp_path, fields):
    """24 prompts, two for each step."""
    trainer = train_briefly(tmp_path, "off", max_steps=-1, num_train_epochs=2, **fields)
    assert (trainer.state.global_step, trainer.state.epoch) == (24, 2.0)


def test_evaluation_touches_nothing_of_ours(tmp_path):
    """TRL's own pass, though rounds are generated in training."""
    datasets = {"train_dataset": plain_dataset(), "eval_dataset": plain_dataset(5)}
    options = {"per_device_eval_batch_size": 8, "num_generations_eval": 2, **FILL, "trainer": datasets}
    trainer = make_trainer(tmp_path, "greso, dynamic", max_steps=2, save_strategy="no", **options)
    assert "eval_reward" in trainer.evaluate()
    assert trainer.collector.batches == 0
    trainer.train()
    before = copy.deepcopy(trainer.collector.state_dict())
    assert "eval_reward" in trainer.evaluate()
    np.testing.assert_equal(trainer.collector.state_dict(), before)


@pytest.mark.parametrize("returned", [None, 0.5, ["good", "bad"]])
def test_a_reward_function_that_returns_no_list_of_numbers_is_told_what_to_return(tmp_path, returned):
    trainer = make_trainer(tmp_path, "off", rewards=[lambda completions, **kwargs: returned], selection="dots")
    with pytest.raises((TypeError, ValueError)) as error:
        trainer.train()
    assert any("a number or None for each completion" in note for note in error.value.__notes__)


class Curriculum(TrainerCallback):
    """From step 3 on the second reward counts instead of the first."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 3:
            self.trainer.reward_weights = torch.tensor([0.0, 1.0])


@pytest.mark.parametrize("fields", [{}, DYNAMIC], ids=["a single pass", "rounds"])
def test_reward_weights_that_a_callback_changes_reach_what_is_learned_of_a_group(tmp_path, fields):
    """Kinds, success rates, the table, and what DOTS predicts."""

    def always(completion_ids, **kwargs):
        return [1.0] * len(completion_ids)

    curriculum = Curriculum()
    fields = {"selection": "dots", "reward_weights": [1.0, 0.0], "reward_range": [0.0, 1.0], **fields}
    fields |= {"max_steps": 6, "save_strategy": "no", "trainer": {"callbacks": [curriculum]}}
    trainer = curriculum.trainer = make_trainer(tmp_path, "off", rewards=[even_length_reward, always], **fields)
    trainer.train()
    table = groups_since(tmp_path, 0)
    before, after = table[table["step"] < 3], table[table["step"] >= 3]
    assert before["kind"].eq("effective").any()
    assert before["reward"].lt(1).any()
    assert after["kind"].eq("easy").all()
    assert after["success_rate"].eq(1).all()
    assert after["reward"].eq(1).all()
    only_after = np.setdiff1d(after["prompt_id"], before["prompt_id"])
    assert len(only_after)
    assert (trainer.selector.predict(only_after) > 0.7).all()


@pytest.mark.parametrize("fields", [FILL, DYNAMIC, {}], ids=["fill", "dynamic", "off"])
def test_a_second_train_starts_again_whatever_the_first_left(tmp_path, fields):
    """The first one is interrupted within a generation batch, and within a logging interval."""
    most, record = 9.0, None

    def reward(completion_ids, log_metric, **kwargs):
        nonlocal record
        record = log_metric
        return [most * value for value in even_length_reward(completion_ids)]

    class Interrupting(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if most > 1 and state.global_step == 10:
                record("most", most)
                raise RuntimeError

    fields = {"steps_per_generation": 4, "max_steps": 10, "logging_steps": 4, "rewards": reward, **fields}
    trainer = make_trainer(tmp_path, "off", save_strategy="no", trainer={"callbacks": [Interrupting()]}, **fields)
    with pytest.raises(RuntimeError):
        trainer.train()
    first, most = dict(trainer.collector.counters), 1.0
    trainer.train_dataset = plain_dataset(10)
    trainer.train()
    assert trainer.selector.context.num_prompts == 10
    second = trainer.collector.counters
    assert second["rollouts_trained"] == first["rollouts_trained"]
    assert max(max(log.get("reward", 0.0), log.get("most", 0.0)) for log in trainer.state.log_history) <= 1.0
    groups = groups_since(tmp_path, 0)
    assert len(groups) * 4 == second["rollouts_generated"]
    assert groups["step"].min() == 0
    assert groups["prompt_id"].max() < 10


def test_an_instance_whose_init_did_not_run_generates_and_scores_as_grpo_trainer(monkeypatch):
    """TRL's own tests make such instances, and subclasses may call these methods before `super().__init__()`."""
    passed = {
        "_generate": ("generated", ["a prompt"]),
        "_calculate_rewards": ("scored", [{"prompt": "p"}], ["p"], ["c"], [[1]]),
        "_get_per_token_logps_and_entropies": (("logps", "entropies"), "model", "ids"),
        "_compute_loss": ("loss", "model", {}),
    }
    trainer = DataEfficientGRPOTrainer.__new__(DataEfficientGRPOTrainer)
    for name, (returned, *arguments) in passed.items():
        monkeypatch.setattr(GRPOTrainer, name, lambda self, *args, result=returned, **kwargs: (result, args))
        assert getattr(trainer, name)(*arguments) == (returned, tuple(arguments))
