"""
Without selection, replay and several rounds, rows, their order, generation, rewards, resumption and errors are TRL's
own: what decides them in a subclass, on the instance or in the configuration does so as with `GRPOTrainer`.
"""

import shutil

import numpy as np
import pytest
import torch
from datasets import Dataset
from trl import GRPOTrainer

from tests.factories.comparison import assert_close, assert_identical, messages
from tests.factories.tiny import logged, plain_dataset, run
from tests.factories.training import partly_learnable_reward
from trl_dataeff import DataEfficientGRPOTrainer
from trl_dataeff.utils import UserError


#: Plain SGD, as Adam makes much of a rounding
SGD = {"rewards": partly_learnable_reward, "optim": "sgd", "learning_rate": 0.05, "max_steps": 5}
SAVES = {**SGD, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
LOSS_TYPES = ("dapo", "grpo", "bnpo", "dr_grpo", "cispo")


@pytest.fixture(params=[True, False], ids=["compact", "off"])
def compact_update(request):
    return request.param


def as_class(pattern: type | None, base: type) -> type:
    return base if pattern is None else type(f"{pattern.__name__}{base.__name__}", (pattern, base), {})


def run_both(folder, compact_update, pattern=None, train=None, **options):
    """
    The same run with TRL's trainer and with ours.

    Args:
        folder: where both write.
        compact_update: of ours.
        pattern: a subclass's methods.
        train: trains a trainer, in place of `trainer.train()`.
        options: of `run`, and fields of the configuration.
    """
    trainers = []
    for name, base, own in (("trl", GRPOTrainer, {}), ("ours", DataEfficientGRPOTrainer, None)):
        fields = {"compact_update": compact_update} if own is None else own
        trainer_class = as_class(pattern, base)
        trainer = run(folder / name, trainer_class, **{**SGD, **options}, **fields, train=train is None)
        if train is not None:
            train(trainer)
        trainers.append(trainer)
    return trainers


def assert_same(reference, ours, compact_update, least: int = 60):
    """To the bit without the faster update, else up to rounding; the update was the faster one."""
    assert (ours.collector, ours.selector) == (None, None)
    rows = ("reward", "reward_std", "num_tokens", "completions/mean_length")
    np.testing.assert_allclose(logged(ours, *rows), logged(reference, *rows), rtol=1e-6)
    assert any(norm > 0 for (norm,) in logged(reference, "grad_norm")), "a run without gradients shows nothing"
    assert_close(reference, ours)
    if compact_update:
        assert logged(ours, "dataeff/update/tokens_saved")
    else:
        assert_identical(reference, ours, least=least)


# Methods of a subclass


class Appends:
    """A token behind each completion, as a marker of its end."""

    generated = 0

    def _generate(self, prompts):
        output = list(super()._generate(prompts))
        self.generated += 1
        output[1] = [[*ids, 7] for ids in output[1]]
        return tuple(output)

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        last = batch["completion_mask"].sum(1, keepdim=True) - 1
        assert (batch["completion_ids"].gather(1, last) == 7).all()
        return batch


class JudgesAround:
    """Adds the score of a judge, which is asked once a batch."""

    asked = 0

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        self.asked += 1
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        return rewards + torch.tensor([[float(len(set(ids)))] for ids in completion_ids_list])


class JudgesAlone:
    asked = 0

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        self.asked += 1
        return torch.tensor([[float(sum(ids) % 2 == 0)] for ids in completion_ids_list])


@pytest.mark.parametrize(
    ("pattern", "counter"), [(Appends, "generated"), (JudgesAround, "asked"), (JudgesAlone, "asked")]
)
def test_generation_and_rewards_of_a_subclass_are_called_once_a_batch(pattern, counter, compact_update, tmp_path):
    trainers = run_both(tmp_path, compact_update, pattern)
    assert [getattr(trainer, counter) for trainer in trainers] == [5, 5]
    assert_same(*trainers, compact_update)


# The order of rows


def test_a_sampler_that_is_set_on_the_instance_decides_the_order(compact_update, tmp_path):
    def train(trainer):
        trainer._get_train_sampler = lambda dataset=None: [row for row in range(23, -1, -1) for _ in range(4)]
        trainer.seen = []
        (reward,) = trainer.reward_funcs
        trainer.reward_funcs = [
            lambda prompts, **kwargs: trainer.seen.append(prompts[0][:2]) or reward(prompts, **kwargs)
        ]
        trainer.train()

    trainers = run_both(tmp_path, compact_update, train=train)
    assert trainers[0].seen == trainers[1].seen == ["23", "21", "19", "17", "15"]
    assert_same(*trainers, compact_update)


def test_a_seed_that_changes_after_the_trainer_was_made_has_trls_effect(compact_update, tmp_path):
    def train(trainer):
        trainer.args.seed = 7
        trainer.train()

    trainers = run_both(tmp_path / "changed", compact_update, train=train)
    assert_same(*trainers, compact_update)
    unchanged = run(tmp_path / "unchanged", **SGD)
    assert logged(unchanged, "num_tokens") != logged(trainers[1], "num_tokens")


def test_a_transform_that_draws_is_called_as_by_trl(compact_update, tmp_path):
    draws = []

    def transform(rows):
        draws.append(torch.randint(10, (1,)).item())
        return {**rows, "prompt": [f"{prompt}{draws[-1]}" for prompt in rows["prompt"]]}

    trainers, drawn = [], []
    for name, base, own in (
        ("trl", GRPOTrainer, {}),
        ("ours", DataEfficientGRPOTrainer, {"compact_update": compact_update}),
    ):
        dataset = plain_dataset()
        dataset.set_transform(transform)
        draws.clear()
        trainers.append(run(tmp_path / name, base, **SGD, **own, trainer={"train_dataset": dataset}))
        drawn.append([*draws])
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) > 2
    assert_same(*trainers, compact_update)


# Datasets


def test_fewer_prompts_than_a_generation_batch_takes_train_as_in_trl(compact_update, tmp_path):
    """TRL's sampler leaves out an incomplete batch, so that nothing is trained on."""
    options = {"trainer": {"train_dataset": plain_dataset(3)}, "per_device_train_batch_size": 16, "max_steps": 2}
    outcomes = []
    for name, base, own in (
        ("trl", GRPOTrainer, {}),
        ("ours", DataEfficientGRPOTrainer, {"compact_update": compact_update}),
    ):
        trainer = run(tmp_path / name, base, **{**SGD, **options}, **own)
        outcomes.append((trainer.state.global_step, len(trainer.state.log_history)))
    assert outcomes[0] == outcomes[1] == (0, 1)


def test_prompts_that_occur_twice_in_a_generation_batch_train_as_in_trl(compact_update, tmp_path):
    """Fewer different prompts than a batch has groups."""
    prompts = Dataset.from_dict({"prompt": ["01:1+2=", "02:2+2="] * 8})
    options = {"trainer": {"train_dataset": prompts}, "per_device_train_batch_size": 16}
    assert_same(*run_both(tmp_path, compact_update, **options), compact_update)


def test_empty_prompts_train_as_in_trl(compact_update, tmp_path):
    """Three, so that no batch of four prompts has nothing else."""
    prompts = Dataset.from_dict({"prompt": ["", "", "", *plain_dataset(13)["prompt"]]})
    options = {"trainer": {"train_dataset": prompts}, "per_device_train_batch_size": 16, "rewards": odd_length_reward}
    assert_same(*run_both(tmp_path, compact_update, **options), compact_update)


def test_prompts_that_trl_cannot_train_on_end_in_trls_error(compact_update, tmp_path):
    options = {**SGD, "rewards": odd_length_reward}
    errors = []
    for name, base, own in (
        ("trl", GRPOTrainer, {}),
        ("ours", DataEfficientGRPOTrainer, {"compact_update": compact_update}),
    ):
        prompts = Dataset.from_dict({"prompt": [""] * 8})
        with pytest.raises((IndexError, RuntimeError)) as error:
            run(tmp_path / name, base, **options, **own, trainer={"train_dataset": prompts})
        errors.append((error.type, str(error.value)))
    assert errors[0] == errors[1]


def odd_length_reward(completion_ids, **kwargs):
    return [float(sum(ids) % 2) for ids in completion_ids]


# Before training


def test_a_batch_may_be_made_before_training(compact_update, tmp_path):
    def look_and_train(trainer):
        trainer.model.train()
        rows = next(iter(trainer.get_train_dataloader()))
        batch = trainer._prepare_inputs(rows)
        assert batch["advantages"].shape == (8,)
        trainer._metrics["train"].clear()
        trainer.train()

    assert_same(*run_both(tmp_path, compact_update, train=look_and_train), compact_update)


def test_an_own_loop_does_what_it_does_with_trl(compact_update, tmp_path):
    def loop(trainer):
        trainer.model.train()
        trainer.create_optimizer()
        trainer.current_gradient_accumulation_steps = 2
        for step, rows in zip(range(1, 5), trainer.get_train_dataloader()):
            trainer.compute_loss(trainer.model, trainer._prepare_inputs(rows)).backward()
            trainer._step += 1
            if step % 2 == 0:
                trainer.optimizer.step()
                trainer.optimizer.zero_grad()

    options = {"gradient_accumulation_steps": 2, "learning_rate": 0.05}
    reference, ours = run_both(tmp_path, compact_update, train=loop, **options)
    fresh = run(tmp_path / "fresh", train=False)
    assert any((a != b).any() for a, b in zip(fresh.model.parameters(), reference.model.parameters()))
    assert_close(reference, ours)


# Checkpoints


def write_run(folder, of_ours, compact_update, **options):
    """The checkpoints of a run of our trainer, or of TRL's."""
    if of_ours:
        run(folder, **SAVES, **options, compact_update=compact_update)
    else:
        run(folder, GRPOTrainer, **SAVES, **options)


def both_resume(folder, compact_update, write, at: str = "checkpoint-2", **options):
    """TRL and ours resume from copies of the folder that `write` fills with checkpoints."""
    write(folder / "trl")
    shutil.copytree(folder / "trl", folder / "ours")
    trainers = []
    for name, base, own in (
        ("trl", GRPOTrainer, {}),
        ("ours", DataEfficientGRPOTrainer, {"compact_update": compact_update}),
    ):
        resume = at if at is True else str(folder / name / at)
        fields = {**SAVES, "max_steps": 5, **options}
        trainers.append(run(folder / name, base, **fields, **own, resume=resume))
    return trainers


def assert_both_resumed(trainers, compact_update):
    for trainer in trainers:
        assert [log["step"] for log in trainer.state.log_history if "loss" in log] == [1, 2, 3, 4, 5]
    assert_same(*trainers, compact_update)


@pytest.mark.parametrize("at", [True, "checkpoint-2"], ids=["latest", "path"])
def test_a_checkpoint_of_trl_is_resumed_as_by_trl(at, compact_update, tmp_path):
    def write(folder):
        write_run(folder, False, compact_update)

    assert_both_resumed(both_resume(tmp_path, compact_update, write, at), compact_update)


@pytest.mark.parametrize("of_ours", [True, False], ids=["ours", "trl"])
def test_a_checkpoint_that_was_renamed_is_resumed_as_by_trl(of_ours, compact_update, tmp_path):
    def write(folder):
        write_run(folder, of_ours, compact_update)
        (folder / "checkpoint-2").rename(folder / "best")

    assert_both_resumed(both_resume(tmp_path, compact_update, write, "best"), compact_update)


@pytest.mark.parametrize("of_ours", [True, False], ids=["ours", "trl"])
def test_a_checkpoint_of_weights_alone_is_resumed_as_by_trl(of_ours, compact_update, tmp_path):
    def write(folder):
        write_run(folder, of_ours, compact_update, save_only_model=True)

    trainers = both_resume(tmp_path, compact_update, write, save_only_model=True)
    assert_both_resumed(trainers, compact_update)


def test_trl_resumes_a_checkpoint_of_ours(compact_update, tmp_path):
    def write(folder):
        write_run(folder, True, compact_update)

    assert_both_resumed(both_resume(tmp_path, compact_update, write), compact_update)


# The loss


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("accumulated", [1, 2])
def test_each_loss_is_that_of_trl(loss_type, accumulated, compact_update, tmp_path, caplog_transformers):
    options = {"loss_type": loss_type, "gradient_accumulation_steps": accumulated, "num_iterations": 2}
    assert_same(*run_both(tmp_path, compact_update, **options), compact_update)
    assert not messages(caplog_transformers, "compact_update")


def test_with_selection_a_batch_before_training_is_an_error_that_says_the_way_out(tmp_path):
    trainer = run(tmp_path, selection="dots", train=False)
    rows = next(iter(trainer.get_train_dataloader()))
    trainer.model.train()
    with pytest.raises(UserError, match=r"begin with `train\(\)`.*selection='uniform'"):
        trainer._prepare_inputs(rows)
