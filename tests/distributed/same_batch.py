"""Run by `torch.distributed.run`: one global batch on any number of processes; more on two.

See `test_processes.py`.
"""

import json
import os
import random
import signal
import sys
from functools import partial
from pathlib import Path

import torch
import transformers
from packaging.version import Version


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from peft import LoraConfig
from transformers import TrainerCallback
from trl import GRPOTrainer

from tests.factories import configurations
from tests.factories.configurations import FILL
from tests.factories.tiny import logged, plain_dataset, run
from tests.factories.training import Watched, before_reward, mixed_reward
from trl_dataeff import DataEfficientGRPOTrainer
from trl_dataeff.collector import rounds


if Version(transformers.__version__) < Version("5.18"):
    # It resumed on one CPU alone: torch knows no location "cpu:0"
    torch.load = partial(lambda load, *args, **options: load(*args, **options | {"map_location": "cpu"}), torch.load)
torch.set_num_threads(1)
FOLDER = Path(sys.argv[1]) if __name__ == "__main__" else Path()
ROWS, GROUP = 24, 2  # of a generation batch: 12 groups, for 1, 2 or 3 processes
STEPS = 4
DYNAMIC = {"max_rollout_rounds": 2}
SKIP = {"compact_update": True}
LORA = {"trainer": {"peft_config": LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.0)}}
RUNS = {
    "uniform": {"loss_type": "grpo"},
    "greso, dynamic, lora": {"selection": "greso", **DYNAMIC, **LORA},
    "uniform, skip": {**SKIP, "loss_type": "grpo", "gradient_accumulation_steps": 2},  # rows change their micro-batch
    "dots, fill": {"selection": "dots", **FILL},
    "dots, dynamic, fill, lora": {"selection": "dots", **DYNAMIC, **FILL, **LORA},
    "greso, share": {"selection": "greso", "replay": "share"},
}


def fixed_rollouts(prompts, trainer):
    """Completions that depend on nothing but the prompt, the step, and the place in the group."""
    tokenizer, step = trainer.processing_class, trainer.state.global_step
    completions = []
    for i, prompt in enumerate(prompts):
        rng = random.Random(f"{prompt} {step} {i % GROUP}")
        completions.append([rng.randrange(10, 100) for _ in range(rng.randint(3, 8))])
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}


def reward(prompts, completion_ids, **kwargs):
    """One prompt of three has zero variance."""
    return [0.0 if int(p[:2]) % 3 == 0 else sum(ids) % 97 / 97 for p, ids in zip(prompts, completion_ids)]


def make(name: str, world_size: int, trainer_class=Watched, train=False, folder=None, **fields):
    rounds.SMALLEST = rounds.LARGEST = 1.0  # a round is else rounded up to a multiple of the number of processes
    options = {**RUNS[name], **fields}
    arguments = {"rollout_func": fixed_rollouts, "train_dataset": plain_dataset(36), **options.pop("trainer", {})}
    rows = ROWS // world_size // options.get("gradient_accumulation_steps", 1)
    defaults = {"per_device_train_batch_size": rows, "num_generations": GROUP, "max_steps": STEPS}
    defaults |= {"optim": "sgd", "learning_rate": 0.5, "reward_range": (0.0, 1.0)}
    return run(
        options.pop("output_dir", (folder or FOLDER) / name.replace(", ", "_")),
        trainer_class,
        rewards=reward,
        train=train,
        trainer=arguments,
        **{**defaults, **options},
    )


def seen(trainer) -> dict:
    """What the run generated and trained on, by batch, and what it logged."""
    return {
        "generated": [[group.prompt_id for group in batch.generated] for batch in trainer.batches],
        "trained": [sorted(group.prompt_id for group in batch.trained) for batch in trainer.batches],
        "logs": logged(trainer, "loss", "grad_norm", "reward"),
        "tokens": logged(trainer, "dataeff/update/tokens"),
    }


def failure(call, *errors) -> str:
    try:
        call()
    except errors as error:
        return str(error)
    return ""


def differing(rank: int, world_size: int) -> dict:
    """
    What is said if processes disagree: on the dataset, on settings, and on the selection state when a checkpoint is
    saved.
    """
    other = {"trainer": {"train_dataset": plain_dataset(36).select(range(rank, 36))}}
    report = {"dataset": failure(lambda: make("dots, fill", world_size, train=True, **other), ValueError)}
    by_rank = {
        "replay": {"replay": ["fill", "off"][rank]},
        "max_rollout_rounds": {"max_rollout_rounds": 1 + rank},
        "save_steps": {"save_strategy": "steps", "save_steps": 1 + rank},
        "selection": {"selection": ["greso", "uniform"][rank]},
        "resume_from_checkpoint": {"resume": [None, True][rank]},
    }
    for name, options in by_rank.items():
        options["output_dir"] = str(FOLDER / "differing")
        base = "dots, fill" if name in ("save_steps", "resume_from_checkpoint") else "uniform"
        report[name] = failure(partial(make, base, world_size, train=True, **options), ValueError)

    class Tampering(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            tampered.collector.batches += rank

    saving = {"save_strategy": "steps", "save_steps": 2, "output_dir": str(FOLDER / "tampered")}
    tampered = make("dots, fill", world_size, trainer={"callbacks": [Tampering()]}, **saving)
    report["state"] = failure(tampered.train, RuntimeError)
    report["checkpoints"] = [path.name for path in (FOLDER / "tampered").glob("checkpoint-*")]
    return report


def stop_one_of_two(rank: int, options: dict) -> tuple:
    """Only process 1 receives a signal, after step 4.

    Where each stops; and the whole run's logs, once it has gone on.
    """
    options = {**options, "save_steps": 100, "save_on_signal": True}
    trainer = run(FOLDER / "stopped", train=False, **options)
    if rank == 1:
        before_reward(trainer, 4, partial(signal.raise_signal, signal.SIGTERM))
    code = None
    try:
        trainer.train()
    except SystemExit as error:
        code = error.code
    stopped = (trainer.state.global_step, trainer.stopped_by.name, code)
    trainer = run(FOLDER / "stopped", resume=True, **options)
    return stopped, logged(trainer, "loss", "grad_norm", "reward", "num_tokens")


def by_loss_type() -> dict:
    """By loss type, how far weights are from TRL's at most, with the faster update and with everything off."""
    report = {}
    batch = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 2}
    exact = {"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 1e9, "max_steps": 4}
    arguments = {"rollout_func": fixed_rollouts, "train_dataset": plain_dataset(36)}
    for loss_type in ("dapo", "grpo", "bnpo", "dr_grpo", "cispo"):
        trainers = {}
        for name, own in {"trl": None, "default": {"compact_update": True}, "off": {}}.items():
            trainer_class = GRPOTrainer if own is None else DataEfficientGRPOTrainer
            options = {**batch, **exact, **(own or {}), "loss_type": loss_type}
            folder = FOLDER / "losses" / f"{loss_type}-{name}"
            trainers[name] = run(folder, trainer_class, rewards=reward, trainer=arguments, **options)
        weights = {name: list(trainer.model.parameters()) for name, trainer in trainers.items()}
        for name in ("default", "off"):
            pairs = zip(weights["trl"], weights[name], strict=True)
            report[f"{loss_type}, {name}"] = max((a - b).abs().max().item() for a, b in pairs)
    return report


def two_processes(rank: int) -> dict:
    """
    A run of TRL and one with everything off; the same with groups that processes share, and the default; one run that
    is never stopped, and one that is.
    """
    report, batch = {}, {"per_device_train_batch_size": 4, "steps_per_generation": 2}
    for name, trainer_class in {"grpo": GRPOTrainer, "off": DataEfficientGRPOTrainer}.items():
        trainer = run(FOLDER / name, trainer_class, **batch)
        report[name] = logged(trainer, "loss", "grad_norm", "reward", "completions/mean_length", "num_tokens")
    shared = {"per_device_train_batch_size": 6, "learning_rate": 1e-3}  # three groups of 4 on two processes
    for name, trainer_class in {"grpo": GRPOTrainer, "default": DataEfficientGRPOTrainer}.items():
        own = {} if name == "grpo" else {"compact_update": True}
        trainer = run(FOLDER / "shared" / name, trainer_class, **shared, **own)
        report[f"shared, {name}"] = logged(trainer, "reward", "num_tokens", "loss", "grad_norm")
        report[f"shared, {name}, saved"] = logged(trainer, "dataeff/update/tokens_saved") if own else []
    saving = {
        "selection": "greso",
        **configurations.DYNAMIC,
        **batch,
        "rewards": mixed_reward,
        "save_strategy": "steps",
    }
    whole = run(FOLDER / "whole", **saving)
    report["uninterrupted"] = logged(whole, "loss", "grad_norm", "reward", "num_tokens")
    report["stopped"], report["after_stop"] = stop_one_of_two(rank, saving)
    return report


def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    report = {}
    for name in RUNS:
        saving = {"save_strategy": "steps", "save_steps": 2}
        whole = make(name, world_size, train=True, **saving)
        folder, checkpoint = FOLDER / "resumed", str(Path(whole.args.output_dir) / "checkpoint-2")
        resumed = make(name, world_size, folder=folder, train=True, resume=checkpoint)
        report[name] = {"whole": seen(whole), "resumed": seen(resumed)}
    if world_size == 2:
        report |= two_processes(rank) | {"losses": by_loss_type()} | {"differing": differing(rank, world_size)}
    (FOLDER / f"rank-{rank}.json").write_text(json.dumps(report))
    whole.accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
