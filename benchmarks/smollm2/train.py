"""One run: one method, one seed and one pool, from the pretrained weights; a row per evaluation."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.lab.methods import find
from benchmarks.lab.rewards import Tally
from benchmarks.lab.train import Evaluations, train_counted
from benchmarks.smollm2.pools import POOLS
from benchmarks.smollm2.questions import END_OF_LINE
from examples.quickstart.weights import convert, find_gguf


#: Part of the name of a run: runs of different harnesses are not comparable. That of the first one computed equal
#: prompts of a batch once, for every method; the second one computed in float32; the third one evaluated by rollouts
HARNESS = 4
#: What a process has measured of the initial model, from which every run starts, by pool
AT_START: dict[str, dict[str, Any]] = {}


@dataclass(frozen=True)
class Spec:
    """What decides a run, apart from the code and the machine."""

    method: str  # see `find`
    seed: int  # of the questions and of the run
    pool: str  # one of `POOLS`
    learning_rate: float = 3e-4
    steps: int = 100
    prompts: int = 8  # groups a step
    group_size: int = 8
    eval_every: int = 10  # steps; and at the end
    start: str = "SmolLM2-135M-Instruct"
    schedule: str = "linear"  # of the learning rate, to 0 at the last step: TRL's default

    @property
    def name(self) -> str:
        """Names the run, and has a hash of everything that decides it, apart from the defaults of the package."""
        recipe = [asdict(self), dict(find(self.method).options), HARNESS]
        text = json.dumps(recipe, sort_keys=True, default=str)
        key = hashlib.sha256(text.encode()).hexdigest()[:8]
        method = self.method.replace(",", "+").replace("/", "_")[:80]
        return f"{self.pool}-{method}-seed{self.seed}-{key}"


def micro_batch_of(spec: Spec) -> int:
    """Rows of a micro-batch: those of a step, unless they are too long for that."""
    return POOLS[spec.pool].micro_batch or spec.prompts * spec.group_size


def load(folder: Path, end: str = END_OF_LINE) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model, of which the weights are converted once.

    Args:
        folder (`Path`): Where the converted weights are or come to be.
        end (`str`, *optional*, defaults to `END_OF_LINE`): The token that ends a completion.

    Returns:
        The model and its tokenizer.
    """
    weights = folder / "SmolLM2-135M-Instruct"
    if not weights.exists():
        convert(find_gguf(), weights)
    tokenizer = AutoTokenizer.from_pretrained(weights)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.eos_token = end
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.bfloat16)
    model.config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    # The head gets the last positions alone. In bfloat16 on a CPU, PyTorch copies its weights once for each row where
    # these are not contiguous, which takes more than half of the generation of a short answer
    model.get_output_embeddings().register_forward_pre_hook(lambda head, inputs: (inputs[0].contiguous(),))
    return model, tokenizer


def config_options(spec: Spec, folder: str) -> dict[str, Any]:
    """Arguments of the config that all methods share."""
    micro_batch = micro_batch_of(spec)
    return {
        "output_dir": folder,
        "seed": spec.seed,
        "max_steps": spec.steps,
        "learning_rate": spec.learning_rate,
        "lr_scheduler_type": spec.schedule,
        "max_grad_norm": 0.5,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": spec.prompts * spec.group_size // micro_batch,
        "num_generations": spec.group_size,
        "max_completion_length": POOLS[spec.pool].max_completion,
        "temperature": POOLS[spec.pool].temperature,
        "beta": 0.0,
        "bf16": True,
        "use_cpu": not torch.cuda.is_available(),
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
    }


class PretrainedEvaluations(Evaluations):
    """Measures the success of a pool. That of the initial model is measured once in a process."""

    def __init__(self, spec: Spec, tokenizer: Any, tally: Tally, sink: Callable[[dict], None]):
        super().__init__(spec, tokenizer, tasks=[], easy=[], tally=tally, sink=sink)

    def quality(self, model) -> dict[str, Any]:
        pool = self.spec.pool
        if self.trainer.state.global_step > 0:
            return POOLS[pool].quality(model, self.tokenizer)
        if pool not in AT_START:
            AT_START[pool] = POOLS[pool].quality(model, self.tokenizer)
        return AT_START[pool]


def run(spec: Spec, weights: Path, sink: Callable[[dict], None]) -> None:
    """Train a spec.

    Args:
        spec (`Spec`): What to train.
        weights (`Path`): The folder of the pretrained weights, see [`load`].
        sink (`Callable`): Receives a row per evaluation.
    """
    torch.set_num_threads(1)
    pool = POOLS[spec.pool]
    model, tokenizer = load(weights, pool.end)
    if pool.generates is not None:
        model.generate = partial(pool.generates, model)
    method = find(spec.method)
    trainer_class, config_class = method.classes()
    tally = Tally(pool.reward, spec.group_size)
    evaluations = PretrainedEvaluations(spec, tokenizer, tally, sink)
    with tempfile.TemporaryDirectory() as folder:
        train_counted(
            trainer_class,
            evaluations,
            model=model,
            reward_funcs=tally,
            args=config_class(**{**config_options(spec, folder), **method.options}),
            train_dataset=Dataset.from_list(pool.rows(spec.seed, tokenizer)),
            processing_class=tokenizer,
            # The upper 10 of 30 layers, as in the quickstart's recipe: the backward pass is confined to them
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=r".*\.layers\.2\d\..*_proj"),
        )
