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


#: Plain GRPO's best on seed 0; on other seeds and some pools 5e-5 is better: see `studies.PLAIN_RATE`
LEARNING_RATE = 1e-4
#: Longest answer, its end token, and one more, so that a completion that is cut off is never right
MAX_COMPLETION = MAX_ANSWER + 2
#: Of what is recorded beside accuracies, costs and counts
DECIMALS = 6
#: Columns of what the trainer itself measures: means since the last evaluation, empty where a method has no such thing
MEASURED = {
    "entropy": "entropy",  # of what is trained on, unsolvable prompts included
    "replay_age": "dataeff/replay/age_mean",
    "replay_clipped": "dataeff/replay/clipped_share",
    "replay_ess": "dataeff/replay/ess",
    "selection_s": "dataeff/time/selection_s",
    "generation_s": "dataeff/time/generation_s",
    "update_s": "dataeff/update/seconds",
}
#: Columns of the latest value, empty where a method has no such thing
LATEST = {"uniform_effective": "dataeff/selector/uniform_effective_ratio"}


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
        """Names the run, and has a hash of everything that decides it, the package's defaults included."""
        method = find(self.method)
        recipe = {**asdict(self), "settings": method.settings(), "only": method.only}
        text = json.dumps(recipe, sort_keys=True, default=str)
        key = hashlib.sha256(text.encode()).hexdigest()[:8]
        return f"{self.pool}-{self.method}-lr{self.learning_rate:g}-seed{self.seed}-{key}"


class Evaluations(TrainerCallback):
    """Evaluates at the start, every `eval_every` steps and at the end.

    Args:
        spec (`RunSpec`): The run.
        tokenizer: That of the model.
        tasks (`Sequence[Task]`): Held-out tasks of the learnable kind.
        easy (`Sequence[Task]`): Easy tasks, on which it shows what is forgotten.
        tally (`Tally`): The reward that is trained on, which counts effective groups.
        sink (`Callable`): Receives the row of each evaluation. Its `wall_s` and `cpu_s` are the time of `train()`,
            embedding of the prompts included and evaluation left out.
        max_rollouts (`int`, *optional*): The run ends with the step that reaches them.
    """

    def __init__(
        self,
        spec: Any,
        tokenizer: Any,
        tasks: Sequence[Task],
        easy: Sequence[Task],
        tally: Tally,
        sink: Callable[[dict], None],
        max_rollouts: int | None = None,
    ):
        self.spec = spec
        self.max_rollouts = max_rollouts
        self.tokenizer = tokenizer
        self.tasks = tasks
        self.easy = easy
        self.tally = tally
        self.sink = sink
        self.trainer: Any = None  # set once the trainer exists
        self.wall_s = 0.0
        self.cpu_s = 0.0
        self.wall_start = 0.0
        self.cpu_start = 0.0
        self.counts = dict.fromkeys(("groups", "effective", "trained", "effective_trained"), 0)
        self.measured = dict.fromkeys(MEASURED, 0)  # how many values of each there were

    def start_clock(self) -> None:
        """Call it right before `train()`."""
        self.wall_start = time.perf_counter()
        self.cpu_start = time.process_time()

    def _stop_clock(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.wall_s += time.perf_counter() - self.wall_start
        self.cpu_s += time.process_time() - self.cpu_start

    def on_train_begin(self, args, state, control, **kwargs):
        self._stop_clock()
        self._evaluate(0)

    def on_step_end(self, args, state, control, **kwargs):
        if self.max_rollouts is not None and self.trainer.rollouts_generated >= self.max_rollouts:
            control.should_training_stop = True
        is_last = state.global_step == self.spec.steps or control.should_training_stop
        if is_last or self.due(state.global_step):
            self._stop_clock()
            self._evaluate(state.global_step)
        return control

    def due(self, step: int) -> bool:
        """Whether to evaluate after this step."""
        return step % self.spec.eval_every == 0

    def quality(self, model) -> dict[str, Any]:
        """What is measured of the policy."""
        held_out = success(model, self.tokenizer, self.tasks)
        accuracy_easy = None
        if len(self.easy):
            easy = success(model, self.tokenizer, self.easy)
            accuracy_easy = round(easy.sampled.mean().item(), DECIMALS)
        return {**columns(self.tasks, held_out), "accuracy_easy": accuracy_easy}

    def _evaluate(self, step: int) -> None:
        model = self.trainer.model
        training = model.training
        model.eval()
        quality = self.quality(model)
        model.train(training)
        counts = self._new_counts()
        self.sink(
            {
                "pool": self.spec.pool,
                "method": self.spec.method,
                "seed": self.spec.seed,
                "learning_rate": self.spec.learning_rate,
                "prompts": self.spec.prompts,
                "group_size": self.spec.group_size,
                "step": step,
                "rollouts": self.trainer.rollouts_generated,
                "tokens": self.trainer.tokens_generated,
                "wall_s": round(self.wall_s, 2),
                "cpu_s": round(self.cpu_s, 2),
                **quality,
                "groups": counts["groups"],
                "effective_groups": counts["effective"],
                "groups_trained": counts["trained"],
                "effective_groups_trained": counts["effective_trained"],
                "start": self.spec.start,
                "run": self.spec.name,
                "machine": machine(),
                **self._new_measurements(),
            }
        )
        self.start_clock()

    def _new_counts(self) -> dict[str, int]:
        """Groups generated and trained on, and the effective ones of both, since the last evaluation."""
        counts = {
            "groups": self.tally.groups,
            "effective": self.tally.effective,
            "trained": self.trainer.groups_trained,
            "effective_trained": self.trainer.effective_trained,
        }
        new = {name: count - self.counts[name] for name, count in counts.items()}
        self.counts = counts
        return new

    def _new_measurements(self) -> dict[str, float | None]:
        """Means of `MEASURED` since the last evaluation, and the values of `LATEST`.

        Nothing is logged, so TRL's store holds every value since the start.
        """
        means: dict[str, float | None] = {}
        for column, name in MEASURED.items():
            values = self.trainer._metrics["train"].get(name, [])
            new = [value for value in values[self.measured[column] :] if not np.isnan(value)]
            self.measured[column] = len(values)
            means[column] = sum(new) / len(new) if new else None
        for column, name in LATEST.items():
            latest = self.trainer._metrics["train"].get(name, [])
            means[column] = latest[-1] if latest else None
        return {column: None if mean is None else round(mean, DECIMALS) for column, mean in means.items()}


def machine() -> str:
    """This machine, since it was started: times of runs on others are not comparable."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")  # Linux
    if boot_id.exists():
        return boot_id.read_text()[:8]
    return platform.node()


def columns(tasks: Sequence[Task], measured: Success) -> dict[str, Any]:
    """What a row says of the success on `tasks`: means over all of them, and of those of each family."""
    families = np.array([task.family for task in tasks])
    sampled = measured.sampled.numpy()
    by_kind = {}
    for family in np.unique(families).tolist():
        by_kind[family] = round(sampled[families == family].mean().item(), DECIMALS)
    return {
        "accuracy_sampled": measured.sampled.mean().item(),
        "accuracy_greedy": measured.greedy.float().mean().item(),
        "accuracy_by_kind": by_kind,
        "entropy_held_out": round(measured.entropy.mean().item(), DECIMALS),
    }


def config_options(spec: RunSpec, output_dir: str) -> dict[str, Any]:
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


def train_counted(trainer_class: type, evaluations: Evaluations, **arguments: Any) -> Any:
    """Make a trainer that counts its rollouts, train it under `evaluations`, and return it."""
    trainer = counting(trainer_class)(callbacks=[evaluations], **arguments)
    trainer.remove_callback(PrinterCallback)
    evaluations.trainer = trainer
    evaluations.start_clock()
    trainer.train()
    return trainer


def run(spec: RunSpec, start: Path, sink: Callable[[dict], None]) -> None:
    """Train a spec.

    Args:
        spec (`RunSpec`): What to train.
        start (`Path`): The folder of the trained start.
        sink (`Callable`): Receives a row per evaluation.

    Raises:
        RuntimeError: If the training ended before its last step.
    """
    torch.set_num_threads(1)
    method = find(spec.method)
    pool = POOLS[spec.pool]
    trainer_class, config_class = method.classes()
    tokenizer = AutoTokenizer.from_pretrained(start)
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)

    kinds = classify(cached_cell_success(start, model, tokenizer))
    pool_prompts = set(pool_dataset(pool, kinds, spec.seed)["prompt"])
    tally = Tally(pool.reward, method.options.get("num_generations", spec.group_size))
    evaluations = Evaluations(
        spec,
        tokenizer,
        tasks=held_out_tasks(kinds),
        easy=easy_tasks(kinds, pool_prompts),
        tally=tally,
        sink=sink,
        max_rollouts=spec.max_rollouts,
    )
    with tempfile.TemporaryDirectory() as folder:
        options = {**config_options(spec, folder), **method.options}
        trainer = train_counted(
            trainer_class,
            evaluations,
            model=model,
            reward_funcs=tally,
            args=config_class(**options),
            train_dataset=pool_dataset(pool, kinds, spec.seed, method.only),
            processing_class=tokenizer,
        )
    step = trainer.state.global_step
    has_enough_rollouts = spec.max_rollouts is not None and trainer.rollouts_generated >= spec.max_rollouts
    if step < spec.steps and not has_enough_rollouts:
        raise RuntimeError(f"{spec.name} was stopped at step {step}; it is run again next time")
