"""Each mistake ends in one message that says what was given and what would do, before a model is loaded if possible."""

import subprocess
import sys
import warnings

import pytest
from datasets import Dataset, IterableDataset

import trl_dataeff
from tests.tiny import chat_dataset, even_length_reward, plain_dataset, run, tiny_model, tiny_tokenizer
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer


def config(tmp_path, **fields):
    return DataEfficientGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", **fields)


def build(tmp_path, dataset, **fields):
    """A model that does not exist: whatever is found out before it is loaded is found out here."""
    return DataEfficientGRPOTrainer(
        model="no/such-model", reward_funcs=even_length_reward, args=config(tmp_path, **fields), train_dataset=dataset
    )


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Dataset.from_dict({"prompt": []}), "has 0 prompts, and each batch takes 1"),
        (plain_dataset(3).rename_column("prompt", "question"), r"no column `prompt`; its columns are \['question'"),
        (None, "`train_dataset` is required"),
    ],
)
def test_datasets_that_cannot_be_used(tmp_path, dataset, message):
    with pytest.raises(ValueError, match=message):
        build(tmp_path, dataset)


def test_fewer_prompts_than_a_window_needs(tmp_path):
    with pytest.raises(ValueError, match="has 3 prompts, and each batch takes 4") as error:
        build(tmp_path, plain_dataset(3), per_device_train_batch_size=16, num_generations=4)
    assert "`generation_batch_size` 16 / `num_generations` 4" in str(error.value)


def test_streaming_with_dynamic_sampling(tmp_path):
    stream = IterableDataset.from_generator(lambda: iter(plain_dataset()))
    with pytest.raises(ValueError, match=r"`dynamic_sampling=True` needs a dataset whose rows"):
        build(tmp_path, stream, dynamic_sampling=True, max_steps=2)


@pytest.mark.parametrize("fields", [{"dynamic_sampling": True}, {"selection": "greso"}])
def test_prompts_of_an_environment_cannot_be_chosen(tmp_path, fields):
    with pytest.raises(ValueError, match="prompts that an environment makes up cannot give"):
        DataEfficientGRPOTrainer(
            "no/such-model", args=config(tmp_path, **fields), environment_factory=object, reward_funcs=None
        )


def test_args_of_another_type(tmp_path):
    with pytest.raises(TypeError, match="must be a DataEfficientGRPOConfig or a GRPOConfig, got dict"):
        DataEfficientGRPOTrainer("no/such-model", even_length_reward, {"output_dir": "x"}, plain_dataset())


def test_reward_of_the_wrong_length(tmp_path):
    with pytest.raises(ValueError, match="returned 1 rewards, but 8 were expected"):
        run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, tmp_path, rewards=lambda **kwargs: [1.0])


@pytest.mark.parametrize("dynamic_sampling", [False, True])
@pytest.mark.parametrize("value", [None, float("nan")])
def test_rewards_that_score_nothing(tmp_path, value, dynamic_sampling):
    def silent_reward(completions, **kwargs):
        return [value] * len(completions)

    with pytest.raises(
        ValueError, match="No reward function gave a score for any of the first 8 completions"
    ) as error:
        run(
            DataEfficientGRPOTrainer,
            DataEfficientGRPOConfig,
            tmp_path,
            rewards=silent_reward,
            dynamic_sampling=dynamic_sampling,
        )
    assert "`silent_reward`" in str(error.value)


def test_one_silent_reward_of_two_is_a_warning(tmp_path, caplog_transformers):
    def silent_reward(completions, **kwargs):
        return [None] * len(completions)

    run(
        DataEfficientGRPOTrainer,
        DataEfficientGRPOConfig,
        tmp_path,
        rewards=[even_length_reward, silent_reward],
        max_steps=3,
    )
    messages = [r.message for r in caplog_transformers.records if "returned only None or NaN" in r.message]
    assert len(messages) == 1
    assert messages[0].startswith("`silent_reward`")


def test_scores_that_fall_silent_later_do_not_end_the_run(tmp_path):
    calls = []

    def failing_judge(completion_ids, **kwargs):
        calls.append(1)
        return even_length_reward(completion_ids) if len(calls) < 3 else [None] * len(completion_ids)

    trainer = run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, tmp_path, rewards=failing_judge, max_steps=5)
    assert trainer.state.global_step == 5
    assert trainer.state.log_history[4]["dataeff/unscorable_ratio"] == 1.0


def test_a_wrong_dataset_type_is_refused_as_by_trl(tmp_path):
    with pytest.raises(TypeError, match="must be a `Dataset` or `IterableDataset`"):
        run(
            DataEfficientGRPOTrainer,
            DataEfficientGRPOConfig,
            tmp_path,
            trainer={"train_dataset": chat_dataset().to_list()},
        )


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


@pytest.mark.parametrize(
    ("version", "warns"), [("1.99.0", True), ("1.15.2", True), ("1.16.3", False), ("1.16.0", False)]
)
def test_an_untested_trl_is_a_warning_not_an_error(version, warns):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trl_dataeff._warn_of_an_untested_trl(version)
    assert [f"has not been tested with the installed trl {version}" in str(w.message) for w in seen] == [True] * warns


def test_importing_the_package_loads_no_torch():
    code = "import sys, trl_dataeff; trl_dataeff.__version__; dir(trl_dataeff); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_public_names():
    assert set(trl_dataeff.__all__) >= {
        "DataEfficientGRPOConfig",
        "DataEfficientGRPOTrainer",
        "PromptPool",
        "RolloutGroup",
        "Selector",
        "UniformSelector",
    }
    for name in trl_dataeff.__all__:
        assert getattr(trl_dataeff, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        trl_dataeff.nothing  # noqa: B018
