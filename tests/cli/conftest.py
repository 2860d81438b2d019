"""Fixtures of the command's tests."""

import datasets.config
import pytest

from tests.factories.tiny import plain_dataset


RECIPE = """\
# A small run.
model_name_or_path: {model}
dataset_name: train.jsonl
output_dir: out
use_cpu: true
bf16: false
per_device_train_batch_size: 8
num_generations: 4
max_completion_length: 6
max_steps: 2
logging_steps: 1
report_to: none
reward_funcs: [numeric_answer_reward, tests.factories.tiny.letter_share_reward]
reward_weights: [1.0, 0.5]
use_peft: true
lora_target_modules: [q_proj, v_proj]
learning_rate: 1e-2
disable_tqdm: true
selection: dots
replay: fill
max_rollout_rounds: 4
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a file in the current folder, which is an empty one; returns its name."""
    monkeypatch.chdir(tmp_path)

    def _write(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return name

    return _write


@pytest.fixture
def recipe(write, tmp_path, tiny_path) -> str:
    """Name of a recipe in the current folder, whose model and data are there."""
    plain_dataset(16).to_json(tmp_path / "train.jsonl")
    return write("r.yaml", RECIPE.format(model=tiny_path))


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """No test reads what another one has loaded, and none leaves anything in the user's cache."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
