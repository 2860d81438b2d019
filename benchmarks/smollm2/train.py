"""One run: one method, one seed and one pool, from the pretrained weights; a row per evaluation."""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import trl.trainer.utils
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.lab.methods import find
from benchmarks.lab.rewards import Tally
from benchmarks.lab.train import Evaluations, train_counted
from benchmarks.smollm2.pools import POOLS
from benchmarks.smollm2.prefix import share_prompts
from examples.quickstart.weights import convert, find_gguf
from trl_dataeff.collector.rounds import LARGEST


END_OF_LINE = "Ċ"  # the tokenizer's name for "\n"


@dataclass(frozen=True)
class Spec:
    """What decides a run, apart from the code and the machine. [`planned`] makes one."""

    method: str
    seed: int
    pool: str
    learning_rate: float
    steps: int
    max_rollouts: int  # or `steps`, whichever comes first
    prompts: int = 8  # groups a step
    group_size: int = 8
    eval_every: int = 1024  # rollouts; and at the end
    start: str = "SmolLM2-135M-Instruct"
    schedule: str = "linear"  # of the learning rate, to 0 at the last step: TRL's default

    @property
    def name(self) -> str:
        """Names the run, and has a hash of everything that decides it, the package's defaults included."""
        recipe = [asdict(self), find(self.method).settings()]
        text = json.dumps(recipe, sort_keys=True, default=str)
        key = hashlib.sha256(text.encode()).hexdigest()[:8]
        method = self.method.replace(",", "+").replace("/", "_")[:80]
        return f"{self.pool}-{method}-seed{self.seed}-{key}"


def planned(
    method: str, seed: int, pool: str, learning_rate: float = 2e-3, rollouts: int = 1024, prompts: int = 8
) -> Spec:
    """Plan a run for a number of rollouts.

    Args:
        method (`str`): See [`find`].
        seed (`int`): Of the questions and of the run.
        pool (`str`): One of `POOLS`.
        learning_rate (`float`, *optional*, defaults to `2e-3`): At the start; it falls linearly to 0.
        rollouts (`int`, *optional*, defaults to `1024`): How many to generate. Reference rollouts count.
        prompts (`int`, *optional*, defaults to `8`): Groups a step.

    Returns:
        [`Spec`]: The run with the steps that its method needs for so many rollouts, if it replays as large a share as
        it may, and its rounds are as large as they may be.
    """
    spec = Spec(method, seed, pool, learning_rate, steps=0, max_rollouts=rollouts, prompts=prompts)
    settings = find(method).settings()
    rollouts_of_step = settings.get("per_device_train_batch_size", prompts * spec.group_size)
    if settings.get("replay") == "share":
        rollouts_of_step *= 1 - settings["replay_fraction"]
    further_rounds = settings.get("max_rollout_rounds", 1) - 1
    rollouts_of_step *= 1 + LARGEST * further_rounds
    if settings.get("selection") == "dots_paper":
        arguments = settings["selector_args"]
        references = arguments["reference_size"] * spec.group_size
        rollouts_of_step += references / arguments.get("refresh_batches", 2)
    return replace(
        spec,
        steps=math.ceil(rollouts / rollouts_of_step),
        eval_every=max(spec.eval_every, rollouts // 5),
    )


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
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    # A slice of hidden states is not contiguous, and a CPU's matrix product then copies the vocabulary for every row
    model.lm_head.register_forward_pre_hook(lambda module, inputs: (inputs[0].contiguous(),))
    model.config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model, tokenizer


def score_completions_alone() -> None:
    """Have TRL's loss compute logits of completion tokens alone on a CPU too, as it does with Triton.

    Elsewhere it computes those of every position, which is more than half of a step here. The results are the same.

    Raises:
        RuntimeError: If this version of TRL chooses the positions in another way.
    """
    if not callable(getattr(trl.trainer.utils, "_use_triton", None)):
        raise RuntimeError("This version of TRL chooses the positions of its loss elsewhere; adapt this function.")

    def use_triton(device: Any) -> bool:
        return True

    trl.trainer.utils._use_triton = use_triton


def config_options(spec: Spec, folder: str) -> dict[str, Any]:
    """Arguments of the config that all methods share."""
    return {
        "output_dir": folder,
        "seed": spec.seed,
        "max_steps": spec.steps,
        "learning_rate": spec.learning_rate,
        "lr_scheduler_type": spec.schedule,
        "max_grad_norm": 0.5,
        "per_device_train_batch_size": spec.prompts * spec.group_size,
        "num_generations": spec.group_size,
        "max_completion_length": POOLS[spec.pool].max_completion,
        "temperature": 1.0,
        "beta": 0.0,
        "bf16": False,  # few CPUs compute in it: without, a run is the same, and as fast, on all of them
        "use_cpu": not torch.cuda.is_available(),
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
    }


class EvaluationsByRollouts(Evaluations):
    """Evaluates whenever `eval_every` further rollouts have been generated, and at the end.

    Not at the start, which is the same for all runs: `python -m benchmarks.smollm2 pools` prints it.
    """

    def __init__(self, spec: Spec, tokenizer: Any, tally: Tally, sink: Callable[[dict], None]):
        super().__init__(spec, tokenizer, tasks=[], easy=[], tally=tally, sink=sink)
        self.rollouts_at_last = 0

    def due(self, step: int) -> bool:
        return self.trainer.rollouts_generated >= self.rollouts_at_last + self.spec.eval_every

    def quality(self, model) -> dict[str, Any]:
        return POOLS[self.spec.pool].quality(model, self.tokenizer)

    def _evaluate(self, step: int) -> None:
        self.rollouts_at_last = self.trainer.rollouts_generated
        if step == 0:
            self.start_clock()
        else:
            super()._evaluate(step)


def run(spec: Spec, weights: Path, sink: Callable[[dict], None]) -> None:
    """Train a spec.

    Args:
        spec (`Spec`): What to train.
        weights (`Path`): The folder of the pretrained weights, see [`load`].
        sink (`Callable`): Receives a row per evaluation.
    """
    torch.set_num_threads(1)
    score_completions_alone()
    model, tokenizer = load(weights)
    method = find(spec.method)
    pool = POOLS[spec.pool]
    # The last token of a prompt too: its output is in the loss
    share_prompts(model, own=pool.max_completion + 1)
    tally = Tally(pool.reward, spec.group_size)
    trainer_class, config_class = method.classes()
    evaluations = EvaluationsByRollouts(spec, tokenizer, tally, sink)
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
