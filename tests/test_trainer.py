"""What the trainer does with its arguments, and what it overrides."""

import copy
import inspect
import re
import shutil

import numpy as np
import pytest
import torch
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.factories.comparison import assert_same_end, groups_since
from tests.factories.configurations import DYNAMIC, FILL, make_trainer, train_briefly
from tests.factories.tiny import SMALL, even_length_reward, logged, plain_dataset, run, tiny_model, tiny_tokenizer
from tests.factories.training import partly_learnable_reward
from trl_dataeff import CompactGRPOTrainer, DataEfficientGRPOConfig, DataEfficientGRPOTrainer


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


def test_a_plain_grpo_config_is_the_object_that_the_trainer_has(tmp_path):
    """Whoever changes it later changes what TRL reads. The fields of this package have their defaults."""
    args, tokenizer = WithMethod(str(tmp_path), **SMALL), tiny_tokenizer()
    args.max_steps, args.learning_rate = 2, 0.25
    data = {"train_dataset": plain_dataset(), "processing_class": tokenizer}
    before = set(vars(args))
    trainer = DataEfficientGRPOTrainer(tiny_model(tokenizer), even_length_reward, args, **data)
    assert trainer.args is args
    assert set(vars(args)) == before
    args.max_steps = 3
    trainer.train()
    assert trainer.state.global_step == 3
    assert (trainer.selector, trainer.collector) == (None, None)
    assert any("dataeff/update/tokens_saved" in log for log in trainer.state.log_history)
    trainer.save_model(tmp_path / "model")
    saved = torch.load(tmp_path / "model" / "training_args.bin", weights_only=False)
    assert isinstance(saved, WithMethod)
    assert saved.learning_rate == 0.25


def test_a_seed_that_changes_in_a_plain_grpo_config_has_trls_effect(tmp_path):
    tokens = {}
    for trainer_class in (GRPOTrainer, DataEfficientGRPOTrainer):
        for seed in (42, 7):
            args, tokenizer = GRPOConfig(str(tmp_path), **SMALL, max_steps=4), tiny_tokenizer()
            data = {"train_dataset": plain_dataset(), "processing_class": tokenizer}
            trainer = trainer_class(tiny_model(tokenizer), even_length_reward, args, **data)
            args.seed = seed
            trainer.train()
            tokens[trainer_class, seed] = logged(trainer, "num_tokens", "reward")
    for seed in (42, 7):
        assert tokens[GRPOTrainer, seed] == tokens[DataEfficientGRPOTrainer, seed]
    assert tokens[GRPOTrainer, 42] != tokens[GRPOTrainer, 7]


def test_arguments_are_those_of_grpo_trainer_and_a_selector():
    ours = inspect.signature(DataEfficientGRPOTrainer).parameters
    trls = inspect.signature(GRPOTrainer).parameters
    assert [*trls, "selector"] == list(ours)
    assert all(ours[name] == trls[name] for name in trls)
    assert ours["selector"].kind is inspect.Parameter.KEYWORD_ONLY


def overridden(trainer_class) -> set[str]:
    methods = {name for name, value in vars(trainer_class).items() if inspect.isfunction(value)}
    return {name for name in methods if hasattr(GRPOTrainer, name)} - {"__init__"}


@pytest.mark.parametrize("trainer_class", [CompactGRPOTrainer, DataEfficientGRPOTrainer])
def test_overridden_methods_are_listed(trainer_class):
    text = inspect.getdoc(trainer_class).split("verridden methods")[1].split("Args:")[0]
    listed = {name for line in re.findall(r"^- (.*?):", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", line)}
    assert listed == overridden(trainer_class)


def test_overridden_methods_take_what_they_take_in_trl():
    """mypy compares them too, but sees neither renamed parameters nor those of methods that TRL decorates."""
    for name in overridden(CompactGRPOTrainer) | overridden(DataEfficientGRPOTrainer):
        trls = inspect.signature(getattr(GRPOTrainer, name)).parameters.values()
        parameters = inspect.signature(getattr(DataEfficientGRPOTrainer, name)).parameters.values()
        named = [(p.name, p.default) for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        passes_on = len(named) < len(parameters)
        assert named == [(p.name, p.default) for p in trls][: len(named) if passes_on else None], name


@pytest.mark.parametrize(
    "fields", [{"selection": "dots", **FILL}, DYNAMIC], ids=["selection and replay", "dynamic sampling"]
)
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


async def waits_for(value):
    return value


def error_of_reward(folder, reward) -> Exception:
    """The error of a run with this reward function."""
    trainer = make_trainer(folder, "off", rewards=[reward], selection="dots")
    with pytest.raises((TypeError, ValueError, RuntimeError)) as error:
        trainer.train()
    return error.value


def says_what_to_return(error: Exception) -> bool:
    return any("a number or None for each completion" in note for note in error.__notes__)


@pytest.mark.parametrize("returned", [None, 0.5, ["good"] * 8, [{"score": 1.0}] * 8, [[0.5, 0.5]] * 7 + [[]], [0.5]])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_reward_function_that_returns_no_list_of_numbers_is_told_what_to_return(tmp_path, returned, is_async):
    async def slowly(completions, **kwargs):
        return await waits_for(returned)

    def at_once(completions, **kwargs):
        return returned

    assert says_what_to_return(error_of_reward(tmp_path, slowly if is_async else at_once))


@pytest.mark.parametrize("error", [ValueError("math domain error"), TypeError("unhashable type: 'list'")])
@pytest.mark.parametrize("is_async", [False, True])
def test_an_error_within_a_reward_function_is_left_as_it_is(tmp_path, error, is_async):
    async def slowly(completions, **kwargs):
        raise error

    def at_once(completions, **kwargs):
        raise error

    raised = error_of_reward(tmp_path, slowly if is_async else at_once)
    assert raised is error
    assert not says_what_to_return(raised)


def test_a_reward_function_that_cannot_be_called_is_not_told_what_to_return(tmp_path):
    """TRL raises this error, too, and it is about the call."""

    def with_first(index, completions, **kwargs):
        return [0.0] * len(completions)

    # A transform makes columns, so arguments cannot be checked by the first row alone
    rows = plain_dataset().with_transform(lambda batch: {**batch, "index": [0] * len(batch["prompt"])})
    assert rows[0]["index"] == 0
    trainer = make_trainer(tmp_path, "off", rewards=[with_first], selection="dots", trainer={"train_dataset": rows})
    trainer.train_dataset = plain_dataset()
    with pytest.raises(TypeError, match="missing 1 required") as error:
        trainer.train()
    assert not says_what_to_return(error.value)


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
    first, most = dict(trainer._dataeff_observer.counters), 1.0
    trainer.train_dataset = plain_dataset(10)
    trainer.train()
    if trainer.selector is not None:
        assert trainer.selector.context.num_prompts == 10
    second = trainer._dataeff_observer.counters
    assert second["rollouts_trained"] == first["rollouts_trained"]
    assert max(max(log.get("reward", 0.0), log.get("most", 0.0)) for log in trainer.state.log_history) <= 1.0
    groups = groups_since(tmp_path, 0)
    assert len(groups) * 4 == second["rollouts_generated"]
    assert groups["step"].min() == 0
    if trainer.collector is None:  # prompts are known by their content
        assert groups["prompt_id"].nunique() <= 10
    else:
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


class Changes(TrainerCallback):
    """Sets attributes of the trainer after the second step."""

    def __init__(self, **attributes):
        self.attributes = attributes

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            for name, value in self.attributes.items():
                setattr(self.trainer, name, value)


@pytest.mark.parametrize(
    "changed",
    [
        {"loss_type": "dr_grpo"},
        {"loss_type": "dapo"},
        {"scale_rewards": "none"},
        {"scale_rewards": "batch"},
        {"importance_sampling_level": "sequence"},
        {"mask_truncated_completions": True},
        {"epsilon_high": 0.4},
        {"beta": 0.0},
    ],
)
@pytest.mark.parametrize("compact_update", [True, False])
def test_attributes_of_the_loss_that_change_during_a_run_have_trls_effect(tmp_path, changed, compact_update):
    """Plain SGD without clipping, since Adam or a clip would hide a factor on the gradient."""
    options = {"rewards": partly_learnable_reward, "max_steps": 5, "optim": "sgd", "learning_rate": 0.02}
    options |= {"max_grad_norm": 1e9, "loss_type": "grpo", "num_iterations": 2}
    trainers = []
    for name, trainer_class in (("a", GRPOTrainer), ("b", DataEfficientGRPOTrainer)):
        own = {"compact_update": compact_update} if name == "b" else {}
        trainer = run(tmp_path / name, trainer_class, train=False, **options, **own)
        callback = Changes(**changed)
        callback.trainer = trainer
        trainer.add_callback(callback)
        trainer.train()
        trainers.append(trainer)
    plain, ours = trainers
    for (name, a), (_, b) in zip(plain.model.named_parameters(), ours.model.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("settings", [{}, {"selection": "dots", "replay": "fill", "compact_update": True}])
def test_a_callback_switches_the_table_of_completions(tmp_path, settings, monkeypatch):
    trainer = run(tmp_path, train=False, max_steps=4, log_completions=True, **settings)
    callback = Changes(log_completions=False)
    callback.trainer = trainer
    trainer.add_callback(callback)
    trainer.train()
    assert not trainer.log_completions
    tables = [path.name for path in (tmp_path / "completions").iterdir()]
    assert tables == ["completions_00001.parquet"], "the log of the second step comes after the callback"


def test_a_configuration_that_changes_after_the_trainer_was_made_has_trls_effect(tmp_path):
    trainer = run(tmp_path, train=False, selection="dots", replay="fill", max_steps=4)
    trainer.args.max_steps = 2
    trainer.args.log_completions = True  # TRL has read it, and made no folder for the table
    trainer.train()
    assert trainer.state.global_step == 2


class OwnNames(DataEfficientGRPOTrainer):
    """Has attributes whose names a trainer might use for itself."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._run = "of a tracker"
        self._timer = 3.0
        self._rows = []
        self._callback = None
        self._processes = 1
        self._correction = "mine"

    def _log(self, *args):
        raise AssertionError("this is the subclass's own")

    def _logps(self):
        raise AssertionError("this is the subclass's own")

    def _log_batch(self):
        raise AssertionError("this is the subclass's own")


def test_a_subclass_may_use_its_own_private_names(tmp_path):
    options = {"selection": "dots", "replay": "share", "max_steps": 4}
    plain = run(tmp_path / "a", **options)
    own = run(tmp_path / "b", OwnNames, **options)
    assert_same_end(plain, own)


class OwnPublicNames(DataEfficientGRPOTrainer):
    """Uses names for itself that the trainer shows to its callers."""

    selector = "of tokens"

    def collector(self):
        return "a collector of gold answers"

    def stopped_by(self):
        return "an early stop"

    def clear_replay_buffer(self, reason):
        raise AssertionError("this is the subclass's own")


def test_a_subclass_may_use_the_public_names(tmp_path):
    options = {"selection": "dots", "replay": "share", "save_on_signal": True, "max_steps": 4}
    plain = run(tmp_path / "a", **options)
    own = run(tmp_path / "b", OwnPublicNames, **options)
    for a, b in zip(plain.model.parameters(), own.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert own.collector() == "a collector of gold answers"
    assert own.selector == "of tokens"


@pytest.mark.parametrize("name", ["collector", "selector", "stopped_by"])
def test_a_public_name_that_is_assigned_is_an_error_where_it_is_assigned(tmp_path, name):
    trainer = run(tmp_path, train=False)
    with pytest.raises(AttributeError, match=name):
        setattr(trainer, name, "mine")


def test_private_names_of_ours_have_a_prefix():
    """TRL's and the Trainer's own names are overridden; all else of ours is out of a subclass's way."""
    own = [name for name in vars(DataEfficientGRPOTrainer) if not hasattr(GRPOTrainer, name)]
    assert {name for name in own if name.startswith("_")} == {
        name for name in own if name.startswith("_dataeff_") or name.startswith("__")
    }


@pytest.mark.parametrize("resumes", [False, True])
def test_a_run_that_begins_late_does_so_without_the_schedulers_method(tmp_path, resumes):
    class OwnScheduler(DataEfficientGRPOTrainer):
        def create_scheduler(self, num_training_steps, optimizer=None):
            self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer)
            self._created_lr_scheduler = True
            return self.lr_scheduler

    options = {"bf16_full_eval": True, "selection": "dots", "replay": "fill", "save_strategy": "steps"}
    whole = run(tmp_path / "a", OwnScheduler, **options, max_steps=6, save_steps=3)
    assert whole.state.global_step == 6
    if resumes:
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        checkpoint = str(tmp_path / "b" / "checkpoint-3")
        resumed = run(tmp_path / "b", OwnScheduler, **options, max_steps=6, save_steps=3, resume=checkpoint)
        assert_same_end(whole, resumed)


@pytest.mark.parametrize(
    ("name", "value"), [("replay", "off"), ("selection", "uniform"), ("compact_update", False), ("selector_args", {})]
)
def test_a_field_of_ours_that_changes_after_the_trainer_was_made_is_an_error(tmp_path, name, value):
    trainer = run(tmp_path, train=False, selection="dots", replay="fill", compact_update=True, max_steps=2)
    setattr(trainer.args, name, value)
    with pytest.raises(ValueError, match=f"`{name}="):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_field_of_ours_that_a_callback_changes_is_an_error_before_the_next_batch(tmp_path):
    class ChangesField(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                args.replay = "off"

    trainer = run(tmp_path, train=False, selection="dots", replay="fill", max_steps=4)
    trainer.add_callback(ChangesField())
    with pytest.raises(ValueError, match="`replay='off'`"):
        trainer.train()
    assert trainer.state.global_step == 2


def test_a_loss_type_that_changes_within_a_generation_batch_has_trls_effect(tmp_path):
    options = {"rewards": partly_learnable_reward, "steps_per_generation": 4, "max_steps": 6}
    options |= {"optim": "sgd", "learning_rate": 0.02, "max_grad_norm": 1e9}
    trainers = []
    own_fields = {"compact_update": True}
    for name, trainer_class, own in (("a", GRPOTrainer, {}), ("b", DataEfficientGRPOTrainer, own_fields)):
        trainer = run(tmp_path / name, trainer_class, train=False, **options, **own)
        callback = Changes(loss_type="grpo")
        callback.trainer = trainer
        trainer.add_callback(callback)
        trainer.train()
        trainers.append(trainer)
    for a, b in zip(trainers[0].model.parameters(), trainers[1].model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)
