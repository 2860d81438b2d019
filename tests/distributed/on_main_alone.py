"""Run by `torch.distributed.run` on two processes: what a script does on the main process alone.

See `test_processes.py`.
"""

import faulthandler
import json
import os
import sys
from pathlib import Path

import torch


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from transformers import TrainerCallback
from trl import GRPOTrainer

from tests.factories.tiny import logged, run
from tests.factories.training import mixed_reward
from trl_dataeff import DataEfficientGRPOTrainer


torch.set_num_threads(1)
FOLDER = Path(sys.argv[1]) if __name__ == "__main__" else Path()
SECONDS = 900  # more than all runs take


class Hooks(TrainerCallback):
    """As that of Weights & Biases with `WANDB_WATCH=gradients`."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: None)


class Between(TrainerCallback):
    """Acts between the micro-batches of an optimizer step."""

    def on_substep_end(self, *args, **kwargs):
        self.steps = getattr(self, "steps", 0) + 1


RUNS = {
    "hooks": (Hooks, {"compact_update": True}),
    "between": (Between, {"compact_update": True}),
    # Groups move between processes
    "between, rounds": (Between, {"selection": "greso", "max_rollout_rounds": 3, "num_generations": 2}),
}


def logs_of(name: str, trainer_class: type, rank: int) -> list:
    callback, fields = RUNS[name]
    fields = fields if trainer_class is not GRPOTrainer else {}
    trainer = run(
        FOLDER / name.replace(", ", "_"),
        trainer_class,
        rewards=mixed_reward,
        trainer={"callbacks": [callback()] if rank == 0 else []},
        **{
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "max_steps": 8 if "rounds" in name else 3,
            **fields,
        },
    )
    return logged(trainer, "loss", "grad_norm")


def main() -> None:
    rank = int(os.environ["RANK"])
    faulthandler.dump_traceback_later(SECONDS, exit=True)  # in the place of half an hour
    report = {name: {"ours": logs_of(name, DataEfficientGRPOTrainer, rank)} for name in RUNS}
    for name in ("hooks", "between"):
        report[name]["trl"] = logs_of(name, GRPOTrainer, rank)
    (FOLDER / f"rank-{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
