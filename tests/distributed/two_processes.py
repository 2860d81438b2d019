"""Run by `torch.distributed.run`: trains on each process and reports what it saw. See `test_processes.py`."""

import json
import signal
import sys
from functools import partial
from pathlib import Path

import torch
import transformers
from packaging.version import Version


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from trl import GRPOTrainer

from tests.factories.configurations import DYNAMIC
from tests.factories.tiny import logged, run
from tests.factories.training import mixed_reward
from trl_dataeff import DataEfficientGRPOTrainer


if Version(transformers.__version__) < Version(
    "5.18"
):  # which resumed on one CPU alone: torch knows no location "cpu:0"
    torch.load = partial(lambda load, *args, **options: load(*args, **options | {"map_location": "cpu"}), torch.load)
torch.set_num_threads(1)
FOLDER = Path(sys.argv[1])
BATCH = {"per_device_train_batch_size": 4, "steps_per_generation": 2}


def stop_one_of_two(options) -> tuple:
    """Only process 1 receives a signal, in step 4. Where each stops; and the whole run's logs, once it has gone on."""
    options = {**options, "save_steps": 100, "save_on_signal": True}
    trainer = run(FOLDER / "stopped", train=False, **options)
    (plain,), pending = trainer.reward_funcs, [signal.SIGTERM]

    def reward(*args, **kwargs):
        if trainer.accelerator.process_index == 1 and trainer.state.global_step >= 3 and pending:
            signal.raise_signal(pending.pop())
        return plain(*args, **kwargs)

    trainer.reward_funcs = [reward]
    code = None
    try:
        trainer.train()
    except SystemExit as error:
        code = error.code
    stopped = (trainer.state.global_step, trainer.stopped_by.name, code)
    trainer = run(FOLDER / "stopped", resume=True, **options)
    return stopped, logged(trainer, "loss", "grad_norm", "reward", "num_tokens")


def main() -> None:
    report = {}
    for name, trainer_class in {"grpo": GRPOTrainer, "off": DataEfficientGRPOTrainer}.items():
        trainer = run(FOLDER / name, trainer_class, **BATCH)
        report[name] = logged(trainer, "loss", "grad_norm", "reward", "completions/mean_length", "num_tokens")
    saving = {"selection": "greso", **DYNAMIC, **BATCH, "rewards": mixed_reward, "save_strategy": "steps"}
    whole = run(FOLDER / "whole", **saving)
    report["uninterrupted"] = logged(whole, "loss", "grad_norm", "reward", "num_tokens")
    report["stopped"], report["after_stop"] = stop_one_of_two(saving)
    rank = trainer.accelerator.process_index
    (FOLDER / f"rank-{rank}.json").write_text(json.dumps(report))
    trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
