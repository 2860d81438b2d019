"""Run by `torch.distributed.run`: trains on each process and reports what it saw. See `test_two_processes.py`."""

import json
import signal
import sys
from pathlib import Path

import numpy as np
import torch


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from trl import GRPOConfig, GRPOTrainer

from tests.factories import CountedRows, even_length_reward, logged, partly_learnable_reward, run
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer
from trl_dataeff.collector import collector as collector_module


torch.set_num_threads(1)
FOLDER = Path(sys.argv[1])
BATCH = {"per_device_train_batch_size": 4, "steps_per_generation": 2}


def often_unsolvable_reward(prompts, completion_ids, **kwargs):
    """Two of three prompts never succeed."""
    return [float(sum(ids) % 2 == 0) if int(p[:2]) % 3 == 0 else 0.0 for p, ids in zip(prompts, completion_ids)]


class Watched(DataEfficientGRPOTrainer):
    """Notes the decisions of each generation batch, and what this process trains on."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.decisions, self.trained_on = [], []

    def _train_on_rounds(self):
        moved = []
        plain = collector_module.redistribute

        def redistribute(groups, destinations, rank):
            moved.extend(i for i, g in enumerate(groups) if g.owner != destinations[i])
            plain(groups, destinations, rank)

        collector_module.redistribute = redistribute
        tensors = super()._train_on_rounds()
        collector_module.redistribute = plain
        self.decisions[-1]["moved"] = moved
        ids = [row[mask.bool()].tolist() for row, mask in zip(tensors["completion_ids"], tensors["completion_mask"])]
        prompts = self.processing_class.batch_decode(tensors["prompt_ids"], skip_special_tokens=True)
        self.trained_on.append(
            {
                "prompts": prompts,
                "advantages": tensors["advantages"].tolist(),
                "rewards": often_unsolvable_reward(prompts, ids),
                "replayed": tensors["replayed"].tolist() if "replayed" in tensors else [],
            }
        )
        return tensors

    def _log(self, batch):
        names = [self.train_dataset[group.prompt_id]["prompt"] for group in batch.trained]
        self.decisions.append(
            {
                "rounds": batch.rounds,
                "trained": names,
                "leftover": [group.prompt_id for group in batch.leftover],
                "replayed": [group.prompt_id for group in batch.replayed],
                "dropped": [group.prompt_id for group in batch.dropped],
                "generated": [group.prompt_id for group in batch.generated],
                "rates": np.round([group.success_rate for group in batch.generated], 9).tolist(),
            }
        )
        super()._log(batch)


def skipping() -> dict:
    """Plain TRL and a run that skips rows: how far their weights are apart, and the rows of the latter's passes."""
    options = {**BATCH, "rewards": partly_learnable_reward, "optim": "sgd", "learning_rate": 0.5, "max_steps": 9}
    options |= {"gradient_accumulation_steps": 2, "num_iterations": 2, "loss_type": "grpo"}
    plain = run(GRPOTrainer, GRPOConfig, FOLDER / "plain", **options)
    own = {"skip_zero_advantage": True, "replay": "off"}
    ours = run(CountedRows, DataEfficientGRPOConfig, FOLDER / "skipping", **options, **own)
    pairs = zip(plain.model.parameters(), ours.model.parameters(), strict=True)
    return {
        "apart": max((a - b).abs().max().item() for a, b in pairs),
        "grad_norms": [logged(trainer, "grad_norm") for trainer in (plain, ours)],
        "rows": ours.in_loss,
        "active": [int((tensors["advantages"] != 0).sum()) for tensors in ours.tensors],
    }


def stop_one_of_two(options) -> tuple:
    """Only process 1 receives a signal, in step 4. Where each stops; and the whole run's logs, once it has gone on."""
    options = {**options, "save_steps": 100, "save_on_signal": True}
    trainer = run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, FOLDER / "stopped", train=False, **options)
    plain, pending = trainer.reward_funcs[0], [signal.SIGTERM]

    def reward(*args, **kwargs):
        if trainer.accelerator.process_index == 1 and trainer.state.global_step >= 3 and pending:
            signal.raise_signal(pending.pop())
        return plain(*args, **kwargs)

    trainer.reward_funcs = [reward, *trainer.reward_funcs[1:]]  # not in place: the list is the caller's own
    code = None
    try:
        trainer.train()
    except SystemExit as error:
        code = error.code
    stopped = (trainer.state.global_step, trainer.stopped_by.name, trainer._step, code)
    trainer = run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, FOLDER / "stopped", train=False, **options)
    trainer.train(resume_from_checkpoint=True)
    return stopped, logged(trainer, "loss", "grad_norm", "reward", "num_tokens")


def main() -> None:
    report = {}
    for name, trainer_class, config_class in (
        ("grpo", GRPOTrainer, GRPOConfig),
        ("off", DataEfficientGRPOTrainer, DataEfficientGRPOConfig),
    ):
        trainer = run(trainer_class, config_class, FOLDER / name, **BATCH)
        report[name] = logged(trainer, "loss", "grad_norm", "reward", "completions/mean_length", "num_tokens")
    dynamic = {"selection": "greso", "max_rollout_rounds": 4, "rewards": often_unsolvable_reward, **BATCH}
    trainer = run(Watched, DataEfficientGRPOConfig, FOLDER / "dynamic", **dynamic)
    report["dynamic"] = {
        "decisions": trainer.decisions,
        "trained_on": trainer.trained_on,
        "logs": [{k: v for k, v in log.items() if k.startswith("dataeff/")} for log in trainer.state.log_history],
    }
    report["skipping"] = skipping()
    saving = {
        **dynamic,
        "save_strategy": "steps",
        "save_steps": 5,
        "rewards": [often_unsolvable_reward, even_length_reward],
    }
    whole = run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, FOLDER / "whole", **saving)
    resumed = run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, FOLDER / "resumed", train=False, **saving)
    resumed.train(resume_from_checkpoint=str(FOLDER / "whole" / "checkpoint-5"))
    replay = {
        **saving,
        "selection": "greso",
        "max_rollout_rounds": 1,
        "replay": "share",
        "per_device_train_batch_size": 8,
    }
    replayed = run(Watched, DataEfficientGRPOConfig, FOLDER / "replay", **replay)
    again = run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, FOLDER / "again", train=False, **replay)
    again.train(resume_from_checkpoint=str(FOLDER / "replay" / "checkpoint-5"))
    names = ("loss", "grad_norm", "reward", "dataeff/replay/ess", "dataeff/rollouts_replayed")
    report["replay"] = {
        "decisions": replayed.decisions,
        "trained_on": replayed.trained_on,
        "stored": [[g.prompt_id, g.owner, g.rollouts is not None] for g in replayed.collector.buffer.groups],
        "logs": logged(replayed, *names),
        "resumed": logged(again, *names),
    }
    report["uninterrupted"] = logged(whole, "loss", "grad_norm", "reward", "num_tokens")
    report["resumed"] = logged(resumed, "loss", "grad_norm", "reward", "num_tokens")
    report["stopped"], report["after_stop"] = stop_one_of_two(saving)
    rank = trainer.accelerator.process_index
    (FOLDER / f"rank-{rank}.json").write_text(json.dumps(report))
    trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
