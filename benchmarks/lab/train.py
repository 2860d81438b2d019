"""One run: one method, one seed, one pool, from the trained start; a row per evaluation."""

from __future__ import annotations

import hashlib
import json
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback

from .counting import counting
from .evaluate import Success, success
from .methods import find
from .pools import POOLS, cached_cell_success, classify, easy_tasks, held_out_tasks, pool_dataset
from .rewards import Tally
from .tasks import MAX_ANSWER, Task


LEARNING_RATE = 1e-4  # plain GRPO's best on seed 0; on other seeds and some pools 5e-5 is better: see `studies.HALF`
#: Longest answer, its end token, and one more, so that a completion that is cut off is never right.
MAX_COMPLETION = MAX_ANSWER + 2


#: Columns of what the trainer itself measures: means since the last evaluation, empty where a method has no such thing.
MEASURED = {
    "entropy": "entropy",  # of what is trained on, unsolvable prompts included
    "replay_age": "dataeff/replay/age_mean",
    "replay_clipped": "dataeff/replay/clipped_share",
    "replay_ess": "dataeff/replay/ess",
    "selection_s": "dataeff/time/selection_s",
    "generation_s": "dataeff/time/generation_s",
    "step_s": "step_time",
}


@dataclass(frozen=True)
class RunSpec:
    """What decides a run, apart from the code. Two runs of one spec are equal on one machine, times aside."""

    method: str
    seed: int
    pool: str
    start: str  # key of the trained start
    steps: int = 100
    learning_rate: float = 1e-4
    eval_every: int = 5  # steps
    prompts: int = 16  # groups per step
    group_size: int = 8
    max_rollouts: int | None = None  # stop here if it comes before `steps`

    @property
    def name(self) -> str:
        method = find(self.method)
        recipe = {**asdict(self), "settings": method.settings(), "only": method.only}
        key = hashlib.sha256(json.dumps(recipe, sort_keys=True, default=str).encode()).hexdigest()[:8]
        return f"{self.pool}-{self.method}-lr{self.learning_rate:g}-seed{self.seed}-{key}"


class Evaluations(TrainerCallback):
    """Evaluates at the start, every `eval_every` steps and at the end; hands each row to `sink`.

    `wall_s` and `cpu_s` are the time of `train()`, embedding of the prompts included and evaluation left out. `tasks` are
    held-out ones of the learnable kind; on `easy` ones shows what is forgotten.
    """

    def __init__(self, spec: RunSpec, tokenizer, tasks, easy, tally: Tally, sink: Callable[[dict], None]):
        self.spec, self.tokenizer, self.tasks, self.easy = spec, tokenizer, tasks, easy
        self.tally, self.sink = tally, sink
        self.trainer = None  # set once the trainer exists
        self.wall_s = self.cpu_s = 0.0
        self.since: tuple[float, float] = (0.0, 0.0)
        self.counted = (0, 0, 0, 0)
        self.measured = dict.fromkeys(MEASURED, 0)  # how many values of each there were

    def start_clock(self) -> None:
        """Call it right before `train()`."""
        self.since = (time.perf_counter(), time.process_time())

    def _stop_clock(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.wall_s += time.perf_counter() - self.since[0]
        self.cpu_s += time.process_time() - self.since[1]

    def on_train_begin(self, args, state, control, **kwargs):
        self._stop_clock()
        self._evaluate(0)

    def on_step_end(self, args, state, control, **kwargs):
        limit = self.spec.max_rollouts
        control.should_training_stop |= limit is not None and self.trainer.rollouts_generated >= limit
        last = state.global_step == self.spec.steps or control.should_training_stop
        if last or self.due(state.global_step):
            self._stop_clock()
            self._evaluate(state.global_step)
        return control

    def due(self, step: int) -> bool:
        """Whether to evaluate after this step."""
        return step % self.spec.eval_every == 0

    def quality(self, model) -> dict[str, Any]:
        """What is measured of the policy."""
        held_out, easy = (success(model, self.tokenizer, tasks) for tasks in (self.tasks, self.easy))
        return columns(self.tasks, held_out) | {
            "accuracy_easy": easy.sampled.mean().item() if len(self.easy) else None
        }

    def _evaluate(self, step: int) -> None:
        model, trainer = self.trainer.model, self.trainer
        training = model.training
        model.eval()
        quality = self.quality(model)
        model.train(training)
        now = (self.tally.groups, self.tally.effective, trainer.groups_trained, trainer.effective_trained)
        groups, effective, trained, trained_effective = (a - b for a, b in zip(now, self.counted, strict=True))
        self.counted = now
        self.sink(
            {
                "pool": self.spec.pool,
                "method": self.spec.method,
                "seed": self.spec.seed,
                "learning_rate": self.spec.learning_rate,
                "prompts": self.spec.prompts,
                "group_size": self.spec.group_size,
                "step": step,
                "rollouts": trainer.rollouts_generated,
                "tokens": trainer.tokens_generated,
                "wall_s": round(self.wall_s, 2),
                "cpu_s": round(self.cpu_s, 2),
                **quality,
                "groups": groups,
                "effective_groups": effective,
                "groups_trained": trained,
                "effective_groups_trained": trained_effective,
                "start": self.spec.start,
                "run": self.spec.name,
                "machine": machine(),
                **self._measured(),
            }
        )
        self.start_clock()

    def _measured(self) -> dict[str, float | None]:
        """Means since the last evaluation. Nothing is logged, so TRL's store holds every value since the start."""
        means: dict[str, float | None] = {}
        for column, name in MEASURED.items():
            values = self.trainer._metrics["train"].get(name, [])
            new = [value for value in values[self.measured[column] :] if value == value]
            self.measured[column] = len(values)
            means[column] = sum(new) / len(new) if new else None
        parts = [means.pop("step_s"), means["selection_s"], means["generation_s"]]
        means["training_s"] = None if None in parts else parts[0] - parts[1] - parts[2]
        return means


def machine() -> str:
    """This machine, since it was started: times of runs on others are not comparable."""
    booted = Path("/proc/sys/kernel/random/boot_id")  # Linux
    return booted.read_text()[:8] if booted.exists() else platform.node()


def columns(tasks: Sequence[Task], measured: Success) -> dict[str, Any]:
    """What a row says of the success on `tasks`: means over all of them, and of those of each family."""
    families = np.array([task.family for task in tasks])
    sampled = measured.sampled.numpy()
    return {
        "accuracy_sampled": measured.sampled.mean().item(),
        "accuracy_greedy": measured.greedy.float().mean().item(),
        "accuracy_by_kind": {name: sampled[families == name].mean().item() for name in np.unique(families).tolist()},
        "entropy_held_out": measured.entropy.mean().item(),
    }


def config_options(spec: RunSpec, output_dir: str) -> dict:
    """Arguments of the config that all methods share."""
    return {
        "output_dir": output_dir,
        "seed": spec.seed,
        "max_steps": spec.steps,
        "learning_rate": spec.learning_rate,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": spec.prompts * spec.group_size,
        "gradient_accumulation_steps": 1,
        "num_generations": spec.group_size,
        "max_completion_length": MAX_COMPLETION,
        "temperature": 1.0,
        "beta": 0.0,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
    }


def train_counted(trainer_class: type, evaluations: Evaluations, **arguments):
    """Make a trainer that counts its rollouts, train it under `evaluations`, and return it."""
    trainer = counting(trainer_class)(callbacks=[evaluations], **arguments)
    trainer.remove_callback(PrinterCallback)
    evaluations.trainer = trainer
    evaluations.start_clock()
    trainer.train()
    return trainer


def run(spec: RunSpec, start: Path, sink: Callable[[dict], None]) -> None:
    """Train `spec` from the start in the folder `start`; `sink` gets a row per evaluation."""
    torch.set_num_threads(1)
    method, pool = find(spec.method), POOLS[spec.pool]
    trainer_class, config_class = method.classes()
    tokenizer = AutoTokenizer.from_pretrained(start)
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    kinds = classify(cached_cell_success(start, model, tokenizer))
    tally = Tally(pool.reward, method.options.get("num_generations", spec.group_size))
    dataset = pool_dataset(pool, kinds, spec.seed, method.only)
    easy = easy_tasks(kinds, set(pool_dataset(pool, kinds, spec.seed)["prompt"]))
    evaluations = Evaluations(spec, tokenizer, held_out_tasks(kinds), easy, tally, sink)
    with tempfile.TemporaryDirectory() as folder:
        trainer = train_counted(
            trainer_class,
            evaluations,
            model=model,
            reward_funcs=tally,
            args=config_class(**config_options(spec, folder) | method.options),
            train_dataset=dataset,
            processing_class=tokenizer,
        )
    enough = spec.max_rollouts is not None and trainer.rollouts_generated >= spec.max_rollouts
    if trainer.state.global_step < spec.steps and not enough:
        raise RuntimeError(f"{spec.name} was stopped at step {trainer.state.global_step}; it is run again next time")
