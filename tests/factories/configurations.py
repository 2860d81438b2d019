"""The configurations whose resumption is tested: a new feature is tested by a line here."""

from datasets import Dataset
from peft import LoraConfig

from tests.factories.tiny import chat_dataset, even_length_reward, letter_share_reward, plain_dataset, run
from tests.factories.training import mixed_reward
from trl_dataeff import DataEfficientGRPOTrainer


STEPS = 12
DYNAMIC = {"max_rollout_rounds": 4}
FILL = {"replay": "fill", "compact_update": True}
SHARE = {"replay": "share", "rewards": even_length_reward}
# 7 prompts, one a step: the second epoch begins at step 7
SHORT_EPOCH = {"trainer": {"train_dataset": plain_dataset(7)}}


def dataset_with_columns() -> Dataset:
    """Prompts with success rates, some of which are missing, and two kinds."""
    dataset = plain_dataset()
    size = range(len(dataset))
    dataset = dataset.add_column("rate", [None if i % 5 == 0 else (i % 4) / 4 for i in size])
    return dataset.add_column("kind", ["odd" if i % 2 else "even" for i in size])


CONFIGURATIONS: dict[str, dict] = {
    "off": {},
    "off, batches of 4 steps": {"steps_per_generation": 4},
    "off, a short epoch": SHORT_EPOCH,
    "dynamic": DYNAMIC,
    "dynamic, leftover groups": {**DYNAMIC, "rollout_margin": 3.0, "steps_per_generation": 2},
    "dynamic, a short epoch": {**DYNAMIC, **SHORT_EPOCH},
    "greso": {"selection": "greso", "steps_per_generation": 2},
    "greso, dynamic": {**DYNAMIC, "selection": "greso"},
    "skip, batches of 4 steps": {"compact_update": True, "steps_per_generation": 4},
    "fill": FILL,
    "fill, batches of 2 steps": {**FILL, "steps_per_generation": 2},
    "fill, accumulation": {
        **FILL,
        **{"steps_per_generation": 4, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    },
    "fill, batches of half a step": {**FILL, "steps_per_generation": 1, "gradient_accumulation_steps": 2},
    "fill, num_iterations": {**FILL, "num_iterations": 2, "steps_per_generation": 2},
    "share": SHARE,
    "share, batches of 2 steps": {**SHARE, "steps_per_generation": 2},
    "dots": {"selection": "dots", "selector_args": {"sharpness": 4.0}},
    "dots, reference rollouts": {
        "selection": "dots_paper",
        "selector_args": {"reference_size": 3, "refresh_batches": 3, "predictor": "logistic"},
        **SHARE,
    },
    "a selector of another package": {
        **{**DYNAMIC, **SHARE, "rollout_margin": 2.0, "steps_per_generation": 2},
        "selection": "tests.factories.selectors.WithReferences",
    },
    "dots, attention": {"selection": "dots", "selector_args": {"predictor": "attention"}},
    "dots, columns": {
        "selection": "dots",
        **{"success_rate_column": "rate", "stratify_by": "kind", "prompt_embedding": None},
        **{"trainer": {"train_dataset": dataset_with_columns()}},
    },
    "all three": {
        **DYNAMIC,
        **FILL,
        **{"selection": "dots", "steps_per_generation": 2, "trainer": {"train_dataset": chat_dataset()}},
    },
    "several steps to a log": {**DYNAMIC, "logging_steps": 5, "steps_per_generation": 2},
    "two rewards": {**DYNAMIC, "rewards": [letter_share_reward, even_length_reward], "reward_weights": [1.0, 0.5]},
    "another loss": {**FILL, "loss_type": "dr_grpo", "scale_rewards": "batch"},
    "lora": {**DYNAMIC, "selection": "dots", "trainer": {"peft_config": LoraConfig(r=4, target_modules=["q_proj"])}},
}


def make_trainer(folder, name: str, **options) -> DataEfficientGRPOTrainer:
    """A trainer that saves after every step unless `options` say otherwise, not yet run."""
    defaults = {"rewards": mixed_reward, "max_steps": STEPS, "save_strategy": "steps", "save_steps": 1, "train": False}
    fields = {**defaults, **CONFIGURATIONS[name], **options}
    return run(folder, **fields)


def train(folder, name: str = "dynamic", **options) -> DataEfficientGRPOTrainer:
    """`make_trainer`, trained to its end; from the checkpoint `resume` if it is given."""
    return make_trainer(folder, name, train=True, **options)


def train_briefly(folder, name: str = "dynamic", **options) -> DataEfficientGRPOTrainer:
    """Three steps without checkpoints."""
    return train(folder, name, **{"max_steps": 3, "save_strategy": "no", **options})
