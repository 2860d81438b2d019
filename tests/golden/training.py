"""The cases of the golden runs, and the training of one: `python tests/golden/training.py NAME FOLDER`.

This file imports the package that stands first on the import path, and nothing of the tests: it runs with earlier
commits too.
"""

import hashlib
import json
import string
import sys
from pathlib import Path
from typing import Any


STEPS = 14
COMPARED_METRICS = ("loss", "grad_norm", "entropy", "learning_rate")

OFF = {
    "selection": "uniform",
    "replay": "off",
    "compact_update": False,
}
PUBLISHED_DOTS = {
    "selection": "dots_paper",
    "selector_args": {"reference_size": 8},
    "replay": "share",
    "replay_order": "random",
    "replay_max_age": None,
    "replay_ratio_cap": None,
    "compact_update": False,
}
DYNAMIC_SAMPLING = {
    "selection": "greso",
    "max_rollout_rounds": 4,
    "replay": "off",
    "compact_update": False,
}
SELECTION_AND_REPLAY = {
    "selection": "dots",
    "replay": "fill",
}
ACCUMULATION = {
    **SELECTION_AND_REPLAY,
    "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": 8,
    "steps_per_generation": 4,
}

#: Fields of the configuration by case. What is selected and replayed is always said, because defaults change. Two more
#: keys say how it runs: `graded` (rewards between 0 and 1), and `resume` (the step whose checkpoint the recorded
#: training starts from).
CASES: dict[str, dict[str, Any]] = {
    "off": OFF,
    "selection and replay": SELECTION_AND_REPLAY,
    "accumulation": ACCUMULATION,
    "graded rewards": {**SELECTION_AND_REPLAY, "graded": True, "reward_range": [0.0, 1.0]},
    "one group a batch": {**SELECTION_AND_REPLAY, "per_device_train_batch_size": 4},
    "selection and replay with TRL's update": {**SELECTION_AND_REPLAY, "compact_update": False},
    "accumulation with TRL's update": {**ACCUMULATION, "compact_update": False},
    "selection alone": {"selection": "dots", "replay": "off", "compact_update": False},
    "selection and skipped rows": {"selection": "dots", "replay": "off"},
    "skipped rows alone": {"selection": "uniform", "replay": "off"},
    "replay alone": {"selection": "uniform", "replay": "fill", "scale_rewards": "batch"},
    "proximal clip": {**SELECTION_AND_REPLAY, "replay_clip": "proximal"},
    "greso": {"selection": "greso", "replay": "off", "compact_update": False},
    "dynamic sampling": {**DYNAMIC_SAMPLING, "rollout_margin": 1.25},
    "dynamic sampling and replay": {**SELECTION_AND_REPLAY, "max_rollout_rounds": 4},
    "published DOTS": PUBLISHED_DOTS,
    "resume of selection and replay": {**SELECTION_AND_REPLAY, "resume": 5, "steps_per_generation": 2},
    "resume of accumulation": {"resume": 5, **ACCUMULATION},
    "resume of dynamic sampling": {**DYNAMIC_SAMPLING, "resume": 7, "steps_per_generation": 2},
    "resume of published DOTS": {**PUBLISHED_DOTS, "resume": 5, "steps_per_generation": 2},
}


def train_case(name: str, output: Path) -> dict[str, list]:
    """Train a case.

    Args:
        name (`str`): A case of `CASES`.
        output (`Path`): The folder of the checkpoints.

    Returns:
        The prompts of each call of the reward function (`prompts`), the metrics of each step as hexadecimal floats
        (`COMPARED_METRICS`), and a hash of the final weights (`weights`).
    """
    fields = dict(CASES[name])
    resume = fields.pop("resume", None)
    graded = fields.pop("graded", False)

    checkpoint = None
    if resume is not None:
        first_run = build_trainer(output, graded, seen=[], save_strategy="steps", save_steps=1, **fields)
        first_run.train()
        checkpoint = str(output / f"checkpoint-{resume}")

    seen: list[list[str]] = []
    trainer = build_trainer(output, graded, seen, save_strategy="no", **fields)
    trainer.train(resume_from_checkpoint=checkpoint)

    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == STEPS
    metrics = {}
    for key in COMPARED_METRICS:
        metrics[key] = [float(log[key]).hex() for log in logs if key in log]
    return {"prompts": seen, **metrics, "weights": [hash_of_weights(trainer.model)]}


def hash_of_weights(model: Any) -> str:
    digest = hashlib.sha256()
    for _, tensor in sorted(model.state_dict().items()):
        digest.update(tensor.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def build_trainer(output: Path, graded: bool, seen: list[list[str]], **fields: Any) -> Any:
    """A trainer of a very small model on 36 prompts.

    Args:
        output (`Path`): The folder of the checkpoints.
        graded (`bool`): Whether rewards have values between 0 and 1.
        seen (`list[list[str]]`): The reward function appends the prompts of each of its calls.
        fields: Further fields of `DataEfficientGRPOConfig`.
    """
    from datasets import Dataset

    from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer

    def reward(prompts: list[str], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        seen.append(list(prompts))
        return [reward_of(prompt, ids, graded) for prompt, ids in zip(prompts, completion_ids, strict=True)]

    settings: dict[str, Any] = {
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "seed": 3,
        "max_steps": STEPS,
        "per_device_train_batch_size": 16,
        "num_generations": 4,
        "max_completion_length": 6,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
    }
    settings.update(fields)
    if "compact_update" in settings and not hasattr(DataEfficientGRPOConfig, "compact_update"):
        settings["skip_zero_advantage"] = settings.pop("compact_update")  # its name in earlier commits
    tokenizer = character_tokenizer()
    return DataEfficientGRPOTrainer(
        small_model(tokenizer),
        reward,
        args=DataEfficientGRPOConfig(str(output), **settings),
        train_dataset=Dataset.from_dict({"prompt": [f"{i:02d}:{i % 7}+{i % 5}=" for i in range(36)]}),
        processing_class=tokenizer,
    )


def reward_of(prompt: str, completion: list[int], graded: bool) -> float:
    """A third of the prompts are too hard, a third are easy, and the others are solved about half of the time."""
    kind = int(prompt[:2]) % 3
    number = sum(completion)
    if kind == 0:
        return 0.0
    if kind == 2:
        return float(number % 7 > 0)
    if graded:
        return (number % 5) / 4
    return float(number % 2)


def character_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<pad>", "<eos>", *string.printable]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
    )


def small_model(tokenizer: Any) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    import torch

    name, folder = sys.argv[1:]
    torch.set_num_threads(1)
    recorded = train_case(name, Path(folder))
    (Path(folder) / "recorded.json").write_text(json.dumps(recorded), encoding="utf-8")


if __name__ == "__main__":
    main()
