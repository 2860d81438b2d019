"""
What public subclasses of `GRPOTrainer` override, on ours: with everything off it does what it does in TRL, and with
selection it sees the rows that are trained on, or the run says what it cannot honour.
"""

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from trl import GRPOTrainer

from tests.factories.comparison import OFF, all_finite, assert_close, assert_identical, messages
from tests.factories.configurations import FILL
from tests.factories.tiny import even_length_reward, logged, run
from tests.factories.training import mixed_reward, partly_learnable_reward
from trl_dataeff import DataEfficientGRPOTrainer
from trl_dataeff.utils import UserError


class GoldAnswers:
    """Reads the rows after TRL has scored them, for advantages of its own."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            scale = torch.tensor([1.0 + int(row["answer"]) / 10 for row in inputs])
            output["advantages"] = output["advantages"] * scale
        return output


class ChangedBefore:
    """Changes rows before TRL generates, within the list that it got."""

    def _generate_and_score_completions(self, inputs):
        for row in inputs:
            row["prompt"] = row["prompt"].replace("+", " plus ")
        return super()._generate_and_score_completions(inputs)


class OtherListBefore:
    """Gives TRL another list of rows."""

    def _generate_and_score_completions(self, inputs):
        rows = [{**row, "prompt": "Q" + row["prompt"]} for row in inputs]
        return super()._generate_and_score_completions(rows)


class ChangedInPrepareInputs:
    def _prepare_inputs(self, generation_batch):
        rows = [{**row, "prompt": row["prompt"] + "?"} for row in generation_batch]
        return super()._prepare_inputs(rows)


class ChangedInTrainingStep:
    def training_step(self, model, inputs, num_items_in_batch=None):
        for row in inputs:
            row["prompt"] += "?"
        return super().training_step(model, inputs, num_items_in_batch)


class ChangedInBatchSamples:
    def get_batch_samples(self, *args):
        batches, num_items = super().get_batch_samples(*args)
        for batch in batches:
            batch.sort(key=lambda row: row["prompt"])
        return batches, num_items


class OwnSampler:
    """Takes prompts from the last to the first."""

    def _get_train_sampler(self, dataset=None):
        sampler = super()._get_train_sampler(dataset)
        size = len(self.train_dataset)
        return [size - 1 - index for index in sampler]


class OwnDataloader:
    def get_train_dataloader(self):
        self.train_dataset = self.train_dataset.select(range(len(self.train_dataset) - 1, -1, -1))
        return super().get_train_dataloader()


class ShapedRewards:
    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        bonus = torch.tensor([int(row["answer"]) / 4 for row in inputs])
        return rewards * 2 + bonus[:, None]


class CountedGeneration:
    generated = 0

    def _generate(self, prompts):
        self.generated += len(prompts)
        return super()._generate(prompts)


class ScaledLoss:
    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, inputs) * 0.5


class WatchedLoss:
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self._metrics["train"]["loss_of_ours"].append(loss.item())
        return loss


class OwnLog:
    def log(self, logs, *args, **kwargs):
        logs["squared_step"] = self.state.global_step**2
        super().log(logs, *args, **kwargs)


class OwnScheduler:
    def create_scheduler(self, num_training_steps, optimizer=None):
        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, lambda step: 0.9**step)
        self._created_lr_scheduler = True
        return self.lr_scheduler


PATTERNS = (
    GoldAnswers,
    ChangedBefore,
    OtherListBefore,
    ChangedInPrepareInputs,
    ChangedInTrainingStep,
    ChangedInBatchSamples,
    OwnSampler,
    OwnDataloader,
    ShapedRewards,
    CountedGeneration,
    ScaledLoss,
    WatchedLoss,
    OwnLog,
    OwnScheduler,
)
OPTIONS = {"rewards": partly_learnable_reward, "max_steps": 6, "per_device_train_batch_size": 16}


def named(prefix: str, pattern: type, trainer_class: type) -> type:
    return type(f"{prefix}{pattern.__name__}", (pattern, trainer_class), {})


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_subclass_does_what_it_does_in_trl_with_everything_off(pattern, tmp_path):
    reference = run(tmp_path / "a", named("Trl", pattern, GRPOTrainer), **OPTIONS)
    ours = run(tmp_path / "b", named("Our", pattern, DataEfficientGRPOTrainer), **OPTIONS, **OFF)
    assert_identical(reference, ours, least=80)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_subclass_does_what_it_does_in_trl_with_the_compact_update_alone(pattern, tmp_path):
    options = {**OPTIONS, "optim": "sgd", "learning_rate": 0.1}
    reference = run(tmp_path / "a", named("Trl", pattern, GRPOTrainer), **options)
    ours = run(
        tmp_path / "b", named("Our", pattern, DataEfficientGRPOTrainer), **{**options, **OFF, "compact_update": True}
    )
    assert_close(reference, ours)


def test_rows_of_a_data_collator_that_is_set_afterwards_are_those_of_trl_with_everything_off(tmp_path):
    def collate(rows):
        return [{**row, "prompt": row["prompt"] + "!"} for row in rows]

    trainers = []
    for name, trainer_class, options in (("a", GRPOTrainer, {}), ("b", DataEfficientGRPOTrainer, OFF)):
        trainer = run(tmp_path / name, trainer_class, train=False, **OPTIONS, **options)
        trainer.data_collator = collate
        trainer.train()
        trainers.append(trainer)
    assert_identical(*trainers, least=80)


def prompts_of(batch: dict, tokenizer) -> list[str]:
    """The prompts of a batch's rows as text."""
    prompts = [ids[mask.bool()] for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)]
    return ["".join(tokenizer.batch_decode(ids)) for ids in prompts]


class ReadsRows:
    """Notes the rows that it finds after TRL's method, and the prompts that are trained on."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.rows = []
        self.prompts = []

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            self.rows.append([row["prompt"] for row in inputs])
            self.prompts.append(prompts_of(output, self.processing_class))
        return output


SETTINGS = {
    "selection and fill": {"selection": "dots", "replay": "fill"},
    "share": {"selection": "dots", "replay": "share"},
    "several rounds": {"selection": "greso", "max_rollout_rounds": 3, "rollout_margin": 2.0},
    "selection alone": {"selection": "dots", "compact_update": False},
    "compact update": {"compact_update": True},
    "off": {},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_rows_after_super_are_those_that_are_trained_on(name, tmp_path):
    options = {**OPTIONS, "rewards": even_length_reward, **OFF, **SETTINGS[name]}
    trainer = run(tmp_path, named("Our", ReadsRows, DataEfficientGRPOTrainer), **options)
    assert len(trainer.rows) == 6
    assert trainer.rows == trainer.prompts


class ReadsRowsOfMicroBatches:
    """Notes the prompts of the rows that came in, and those of the micro-batch, after TRL has prepared it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.in_rows = []
        self.trained = []

    def _prepare_inputs(self, generation_batch):
        inputs = super()._prepare_inputs(generation_batch)
        if self.model.training:
            self.in_rows.append({row["prompt"] for row in generation_batch})
            self.trained.append(set(prompts_of(inputs, self.processing_class)))
            generation_batch.clear()  # is delivered again for the next micro-batch
        return inputs


@pytest.mark.parametrize("name", SETTINGS)
def test_rows_of_every_micro_batch_are_those_that_are_trained_on(name, tmp_path):
    options = {**OPTIONS, "rewards": even_length_reward, **OFF, **SETTINGS[name], "steps_per_generation": 3}
    trainer = run(tmp_path, named("Our", ReadsRowsOfMicroBatches, DataEfficientGRPOTrainer), **options)
    assert len(trainer.trained) == 6
    assert all(trained <= rows for trained, rows in zip(trainer.trained, trainer.in_rows))
    assert trainer.in_rows[0] == trainer.in_rows[1] == trainer.in_rows[2]


def test_rows_of_a_half_used_batch_are_those_that_are_trained_on_after_a_resume(tmp_path):
    options = {**OPTIONS, "selection": "dots", "replay": "fill", "steps_per_generation": 3, "save_steps": 4}
    trainer_class = named("Our", ReadsRowsOfMicroBatches, DataEfficientGRPOTrainer)
    whole = run(tmp_path, trainer_class, **options, save_strategy="steps")
    resumed = run(tmp_path, trainer_class, **options, resume=str(tmp_path / "checkpoint-4"))
    assert resumed.in_rows == whole.in_rows[4:]
    assert resumed.trained == whole.trained[4:]
    assert all(trained <= rows for trained, rows in zip(resumed.trained, resumed.in_rows))


def test_a_subclass_that_does_not_read_the_state_of_a_run_is_told_before_it_trains(tmp_path):
    class OwnOptimizerState(DataEfficientGRPOTrainer):
        def _load_optimizer_and_scheduler(self, checkpoint):
            pass

    options = {**OPTIONS, "save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    options |= {"selection": "dots"}
    run(tmp_path, OwnOptimizerState, **options)
    calls = []

    def reward(completion_ids, **kwargs):
        calls.append(len(completion_ids))
        return even_length_reward(completion_ids)

    reward.__name__ = partly_learnable_reward.__name__
    with pytest.raises(ValueError, match="_load_optimizer_and_scheduler"):
        run(tmp_path, OwnOptimizerState, **{**options, "max_steps": 4, "rewards": reward}, resume=True)
    assert not calls


def test_a_subclass_that_does_not_read_the_state_of_a_run_resumes_as_with_trl_with_everything_off(tmp_path):
    class OwnOptimizerState:
        def _load_optimizer_and_scheduler(self, checkpoint):
            pass

    trainers = []
    for name, base in (("a", GRPOTrainer), ("b", DataEfficientGRPOTrainer)):
        trainer_class = named(name, OwnOptimizerState, base)
        options = {**OPTIONS, "save_strategy": "steps", "save_steps": 2}
        run(tmp_path / name, trainer_class, **{**options, "max_steps": 2})
        trainers.append(run(tmp_path / name, trainer_class, **{**options, "max_steps": 5}, resume=True))
    assert_identical(*trainers, least=60)


@pytest.mark.parametrize("pattern", [ChangedInBatchSamples, OwnSampler, OwnDataloader])
def test_an_order_that_selection_does_not_use_is_named_once(pattern, tmp_path, caplog_transformers):
    options = {**OPTIONS, "selection": "dots", "replay": "fill", "max_steps": 3}
    trainer = run(tmp_path, named("Our", pattern, DataEfficientGRPOTrainer), **options)
    (found,) = messages(caplog_transformers, "does not decide which prompts are trained on")
    (method,) = [name for name in vars(pattern) if "get_" in name]
    assert f"`{method}`" in found
    assert all_finite(trainer)


@pytest.mark.parametrize(
    ("pattern", "fields"),
    [
        (GoldAnswers, {"selection": "dots", "replay": "fill"}),
        (OwnSampler, {}),
    ],
)
def test_a_subclass_is_not_warned_of_an_order_that_nothing_replaces(pattern, fields, tmp_path, caplog_transformers):
    run(tmp_path, named("Our", pattern, DataEfficientGRPOTrainer), **{**OPTIONS, **fields, "max_steps": 2})
    assert not messages(caplog_transformers, "does not decide which prompts are trained on")


@pytest.mark.parametrize("settings", [{"selection": "dots", "replay": "fill"}, {"compact_update": True}, {}])
@pytest.mark.parametrize("asks", ["the reward function", "the rollout_func"])
def test_a_policy_that_is_left_in_evaluation_mode_is_trained_as_in_trl(settings, asks, tmp_path):
    """Advantages are those of groups of four, though groups of evaluation have two."""
    trainers = []

    def reward(completion_ids, **kwargs):
        if asks == "the reward function":
            trainers[-1].model.eval()
        return even_length_reward(completion_ids)

    class Noted(DataEfficientGRPOTrainer):
        def _generate_single_turn(self, *args, **kwargs):
            generated = super()._generate_single_turn(*args, **kwargs)
            if asks == "the rollout_func":
                self.model.eval()
            return generated

        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            self.advantages.append(output["advantages"].clone())
            return output

    trainer = run(
        tmp_path,
        Noted,
        **{
            **OPTIONS,
            "rewards": reward,
            "num_generations_eval": 2,
            "per_device_eval_batch_size": 4,
            **OFF,
            **settings,
        },
        train=False,
    )
    trainer.advantages = []
    trainers.append(trainer)
    trainer.train()
    sums = torch.stack(trainer.advantages).view(-1, 4).sum(dim=1)
    pairs = torch.stack(trainer.advantages).view(-1, 2).sum(dim=1)
    torch.testing.assert_close(sums, torch.zeros_like(sums), rtol=0, atol=1e-4)
    assert pairs.abs().max() > 0.1
    assert all(log["reward"] > 0 for log in trainer.state.log_history if "reward" in log)


class ReplacesGeneration:
    """A copy of TRL's method, which does not call ours."""

    def _generate_and_score_completions(self, inputs):
        return vars(GRPOTrainer)["_generate_and_" + "score_completions"](self, inputs)


@pytest.mark.parametrize("fields", [{"selection": "dots"}, {"replay": "fill"}, {"max_rollout_rounds": 3}])
def test_a_copy_of_trls_method_with_selection_or_replay_is_an_error_before_the_first_update(fields, tmp_path):
    trainer_class = named("Our", ReplacesGeneration, DataEfficientGRPOTrainer)
    trainer = run(tmp_path, trainer_class, train=False, rewards=partly_learnable_reward, max_steps=4, **fields)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    with pytest.raises(UserError, match="OurReplacesGeneration selects no prompts"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


@pytest.mark.parametrize("compact_update", [True, False])
def test_a_copy_of_trls_method_trains_as_in_trl_with_everything_off(compact_update, tmp_path, caplog_transformers):
    options = {"rewards": partly_learnable_reward, "max_steps": 4, "optim": "sgd", "learning_rate": 0.1}
    reference = run(tmp_path / "a", GRPOTrainer, **options)
    trainer_class = named("Our", ReplacesGeneration, DataEfficientGRPOTrainer)
    ours = run(tmp_path / "b", trainer_class, **options, compact_update=compact_update)
    assert_close(reference, ours)
    if not compact_update:
        assert_identical(reference, ours, least=50)
    assert not messages(caplog_transformers, "compact_update")
    assert bool(logged(ours, "dataeff/update/tokens_saved")) == compact_update


def test_rows_hold_what_a_rollout_func_returned_for_their_completions(tmp_path):
    class ComparesFields(DataEfficientGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            if self.model.training:
                sums = (batch["completion_ids"] * batch["completion_mask"]).sum(1)
                assert [row["total"] for row in inputs] == sums.tolist()
            return batch

    def rollout_func(prompts, trainer):
        completions = torch.randint(6, 60, (len(prompts), 5)).tolist()
        prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        totals = [sum(completion) for completion in completions]
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None, "total": totals}

    options = {
        "selection": "dots",
        "rewards": mixed_reward,
        **FILL,
        "trainer": {"rollout_func": rollout_func},
        "max_steps": 8,
    }
    trainer = run(tmp_path, ComparesFields, **options)
    assert trainer._dataeff_observer.counters["rollouts_replayed"]


@pytest.mark.parametrize("settings", [{"selection": "dots"}, {"replay": "fill"}, {"max_rollout_rounds": 2}])
def test_an_order_that_is_set_on_the_instance_is_named_where_it_has_no_effect(settings, tmp_path, caplog_transformers):
    trainer = run(tmp_path, train=False, **{**OPTIONS, **settings, "max_steps": 1})
    trainer._get_train_sampler = lambda dataset=None: [0] * 96
    trainer.train()
    (found,) = messages(caplog_transformers, "does not decide which prompts are trained on")
    assert "`_get_train_sampler`" in found
