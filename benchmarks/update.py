"""
What an update costs, TRL's own and ours, interleaved in one process.

    python -m benchmarks.update
    python -m benchmarks.update --device cuda

An update is the forward and backward pass of one generation batch, without its generation and without the optimizer.
The product's own trainer makes it, twice: once with `compact_update=False`, which is TRL's update, and once with
`compact_update=True`. A `rollout_func` returns made-up tokens whose lengths are those of real completions
(`benchmarks/lengths.py`); rewards give a chosen share of the groups a gradient. So what is measured depends on the
model's size and on lengths, and weights may be random.

On a CPU the model is SmolLM2-135M with LoRA, in float32, with CPU time of one thread. It has a part of its layers, and
the same part of its vocabulary, so that layers and logits take the same shares of the time as in the whole model, and
both updates the same part of its time. `--layers 30` measures the whole one. On a GPU the models are those of
Qwen2.5-0.5B and 1.5B with LoRA, in bfloat16, with elapsed time and the peak memory of the update, beyond what was
allocated before it. Nothing is downloaded.

Prints a Markdown table. Each row is appended to `benchmarks/results/update/<device>.jsonl`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import os
import platform
import statistics
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import trl.trainer.utils
from datasets import Dataset
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PrinterCallback,
    Qwen2Config,
    TrainerCallback,
)

from benchmarks.lab.model import make_tokenizer
from benchmarks.lengths import at_cap
from benchmarks.lengths import read as read_lengths
from benchmarks.provenance import provenance
from benchmarks.tables import markdown
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer


RESULTS = Path(__file__).resolve().parent / "results" / "update"

#: The field that chooses the update
FIELD = "compact_update"
TRL = "trl_update"
COMPACT = "compact_update"
WAYS = {TRL: False, COMPACT: True}  # its values

GROUPS = 6  # of a generation batch
GROUP_SIZE = 8
PROMPTS = 48  # in the dataset: more than the generation batches of a turn
SEED = 0
#: Lengths of an unmeasured update are this part of the others
WARM_UP_PART = 1 / 16
#: A row is repeated so often even if it takes long
FEWEST = 2
LONG_ENOUGH = 60.0  # seconds


# What is measured


@dataclass(frozen=True)
class Row:
    """The conditions of one row of the table."""

    name: str
    prompt: int = 0
    """Mean tokens of a prompt; 0: prompts as long as recorded."""
    one_in: int = 1
    """One in so many generated groups is effective."""
    micro_batch: int = 8
    """Rows."""
    checkpointing: bool = False
    replay: bool = False
    """Whether stored groups fill the places of zero-variance ones."""
    cap: int = 512
    """Most tokens of a completion."""
    every_position: bool = False
    """Whether logits are computed for prompts and padding too, as TRL does where there is no Triton."""
    at_most: float = 1.0
    """What the ratio should not exceed."""


#: Those that matter most come first; then one thing at a time differs from the first row
ROWS = (
    Row("all effective", at_most=0.48),
    Row("half effective", one_in=2, at_most=0.28),
    Row("prompts of 1,500", prompt=1500, at_most=0.30),
    Row("half replayed", one_in=2, replay=True, at_most=0.48),
    Row("a third effective", one_in=3),
    Row("prompts of 500", prompt=500),
    Row("micro-batches of 2", micro_batch=2),
    Row("micro-batches of 16", micro_batch=16),
    Row("cap 256", cap=256),
    Row("cap 1,024", cap=1024),
    Row("checkpointing", checkpointing=True),
    Row("checkpointing, half effective", one_in=2, checkpointing=True),
    Row("checkpointing, prompts of 1,500", prompt=1500, checkpointing=True),
    Row("checkpointing, prompts of 1,500, half effective", prompt=1500, one_in=2, checkpointing=True),
    Row("checkpointing, half replayed", one_in=2, replay=True, checkpointing=True),
    Row("prompts of 500, half effective", prompt=500, one_in=2),
    Row("prompts of 1,500, half effective", prompt=1500, one_in=2),
    Row("logits of every position", every_position=True),
)
CUDA_ROWS = (
    "all effective",
    "half effective",
    "prompts of 1,500",
    "half replayed",
    "checkpointing",
    "checkpointing, half effective",
    "checkpointing, prompts of 1,500",
    "checkpointing, half replayed",
)


@dataclass(frozen=True)
class Size:
    """A model by configuration."""

    name: str
    config: PretrainedConfig
    dtype: torch.dtype


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


def smollm2(layers: int, **options: Any) -> Size:
    """SmolLM2-135M with so many of its 30 layers, and as large a part of its vocabulary."""
    values = {
        "vocab_size": 49152 * layers // 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": layers,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        "tie_word_embeddings": True,
    }
    return Size(f"SmolLM2-135M, {layers} of 30 layers", LlamaConfig(**{**values, **options}), torch.float32)


def qwen2_5(name: str, hidden: int, intermediate: int, layers: int, heads: int) -> Size:
    """A Qwen2.5 with two key-value heads and tied embeddings, as its 0.5B and its 1.5B have."""
    config = Qwen2Config(
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
    )
    return Size(name, config, torch.bfloat16)


def cuda_sizes() -> list[Size]:
    return [
        qwen2_5("Qwen2.5-0.5B", hidden=896, intermediate=4864, layers=24, heads=14),
        qwen2_5("Qwen2.5-1.5B", hidden=1536, intermediate=8960, layers=28, heads=12),
    ]


# Rollouts of given lengths


class Rollouts:
    """TRL's `rollout_func` and reward function: made-up tokens of recorded lengths.

    The rewards of an effective group alternate between 0 and 1.

    Args:
        groups (`Sequence[dict]`): The recorded lengths, see [`read_lengths`].
        row ([`Row`]): The conditions.
        tokenizer: Its vocabulary is what tokens are drawn from.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], row: Row, tokenizer: Any):
        self.row = row
        recorded = np.array([group["prompt_tokens"] for group in groups])
        # A longer prompt has more text before its question: all are longer by the same number of tokens
        shift = row.prompt - round(recorded.mean()) if row.prompt else 0
        self.prompt_lengths = (recorded + shift).tolist()
        self.completion_lengths = at_cap(groups, row.cap)
        self.end = tokenizer.eos_token_id
        self.first_token = max(tokenizer.all_special_ids) + 1
        self.last_token = len(tokenizer) - 1
        self.turn = 0

    def generate(self, prompts: list[Any], trainer: Any) -> dict[str, list]:
        """Rollouts of the trainer's present step; both trainers get the same in the same turn."""
        step = trainer.state.global_step
        is_only_step = trainer.args.max_steps == 1
        if len(prompts) != GROUPS * GROUP_SIZE:
            raise RuntimeError(f"{len(prompts)} rollouts are asked for; this benchmark has {GROUPS * GROUP_SIZE}.")
        number = 2 * self.turn + step
        rng = np.random.default_rng((SEED, number))
        # The first step of a turn is not measured, but what it generates is replayed
        is_small = step == 0 and not (self.row.replay or is_only_step)
        prompt_ids: list[list[int]] = []
        completion_ids: list[list[int]] = []
        scores: list[float] = []
        for place in range(GROUPS):
            recorded = (number * GROUPS + place) % len(self.prompt_lengths)
            prompt = self._tokens(rng, self.prompt_lengths[recorded], is_small)
            is_effective = place % self.row.one_in == 0
            for i, length in enumerate(self.completion_lengths[recorded]):
                completion = self._tokens(rng, length, is_small)
                if length < self.row.cap:
                    completion[-1] = self.end
                prompt_ids.append(prompt)
                completion_ids.append(completion)
                scores.append(float(is_effective and i % 2 == 1))
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None, "score": scores}

    def reward(self, completions: list[Any], score: list[float], **columns: Any) -> list[float]:
        return score

    def _tokens(self, rng: np.random.Generator, length: int, is_small: bool) -> list[int]:
        if is_small:
            length = max(round(length * WARM_UP_PART), 1)
        return rng.integers(self.first_token, self.last_token, length, endpoint=True).tolist()


# One update


@dataclass(frozen=True)
class Update:
    """What an update took."""

    seconds: float
    tokens: int
    peak_bytes: int
    """The most memory beyond what was allocated before it; on a CPU of the first update, as [`LiveBytes`] sees it."""


class Meter:
    """The time, tokens and memory of an update.

    Args:
        device (`str`): `cpu` or `cuda`.
    """

    def __init__(self, device: str):
        self.is_cuda = device == "cuda"
        self.measures_memory = False  # on a CPU, which takes time
        self.is_running = False
        self.seconds = 0.0
        self.tokens = 0
        self.peak_bytes = 0
        self._started = 0.0
        self._bytes_before = 0
        self._live: LiveBytes | None = None

    def begin_update(self) -> None:
        """Forget the last update, and start."""
        self.tokens = 0
        self.peak_bytes = 0
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()
            self._bytes_before = torch.cuda.memory_allocated()
        elif self.measures_memory:
            self._live = LiveBytes()
            self._live.__enter__()
        self._started = self._now()
        self.is_running = True

    def stop(self) -> None:
        """The update has ended."""
        self.seconds = self._now() - self._started
        self.is_running = False
        if self.is_cuda:
            self.peak_bytes = torch.cuda.max_memory_allocated() - self._bytes_before
        if self._live is not None:
            self._live.__exit__(None, None, None)
            self.peak_bytes = self._live.peak
            self._live = None

    def count(self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        """A hook of the input embeddings: the layers compute what is embedded."""
        if self.is_running:
            self.tokens += inputs[0].numel()

    def _now(self) -> float:
        """Seconds that passed on a GPU, or that a CPU spent on this process."""
        if not self.is_cuda:
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()


class LiveBytes(TorchDispatchMode):
    """The memory of the tensors that operations make within this context, and the largest sum of those that are alive
    at a time. Memory that an operation uses within itself is not seen.

    Attributes:
        peak (`int`): that sum, in bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._now = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage_of(tensor)._cdata for tensor in _tensors_in((args, kwargs))}
        outputs = func(*args, **(kwargs or {}))
        for tensor in _tensors_in(outputs):
            storage = _storage_of(tensor)
            # A view, or a tensor that is changed in place
            if storage._cdata in self._alive or storage._cdata in given:
                continue
            self._alive.add(storage._cdata)
            self._now += storage.nbytes()
            self.peak = max(self.peak, self._now)
            weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return outputs

    def _free(self, address: int, size: int) -> None:
        self._alive.remove(address)
        self._now -= size


def _tensors_in(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _storage_of(tensor: torch.Tensor) -> Any:
    return tensor.untyped_storage()


class MeasuredTrainer(DataEfficientGRPOTrainer):
    """Has a meter that measures the update of each generation batch: from when the batch is made to the optimizer."""

    meter: Meter

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(*args, **kwargs)
        self.meter.begin_update()
        return batch


class StopsMeter(TrainerCallback):
    """Ends the measurement of an update."""

    def __init__(self, meter: Meter):
        self.meter = meter

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.meter.stop()


class Side:
    """One of the two ways to update, with a trainer and a model of its own.

    Args:
        way (`bool`): The value of `FIELD`.
        row ([`Row`]): The conditions.
        size ([`Size`]): The model.
        groups (`Sequence[dict]`): The recorded lengths.
        device (`str`): `cpu` or `cuda`.
        folder (`str`): The trainer's output folder.
    """

    def __init__(self, way: bool, row: Row, size: Size, groups: Sequence[dict[str, Any]], device: str, folder: str):
        tokenizer = make_tokenizer()
        self.rollouts = Rollouts(groups, row, tokenizer)
        self.meter = Meter(device)
        self.trainer = MeasuredTrainer(
            model=make_model(size, device),
            reward_funcs=self.rollouts.reward,
            rollout_func=self.rollouts.generate,
            args=make_config(way, row, device, folder),
            train_dataset=Dataset.from_list([{"prompt": f"{i}"} for i in range(PROMPTS)]),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        )
        self.trainer.meter = self.meter
        self.trainer.add_callback(StopsMeter(self.meter))
        self.trainer.remove_callback(PrinterCallback)
        self.trainer.model.get_input_embeddings().register_forward_pre_hook(self.meter.count)

    def update(self, turn: int) -> Update:
        """Train for two steps, of which the second one counts.

        The first one fills the replay buffer, and has whatever is done once in a run.

        Args:
            turn (`int`): Decides the lengths.
        """
        self.rollouts.turn = turn
        self.trainer.train()
        return Update(self.meter.seconds, self.meter.tokens, self.meter.peak_bytes)

    def first_update(self) -> float:
        """Seconds of the first update of all, which also has what is done once in a run."""
        self.trainer.args.max_steps = 1
        seconds = self.update(turn=0).seconds
        self.trainer.args.max_steps = 2
        return seconds


def make_model(size: Size, device: str) -> Any:
    """The model with random weights, equal ones for equal arguments."""
    config = copy.deepcopy(size.config)
    torch.manual_seed(SEED)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=size.dtype, attn_implementation="sdpa")


def make_config(way: bool, row: Row, device: str, folder: str) -> DataEfficientGRPOConfig:
    options: dict[str, Any] = {
        FIELD: way,
        "selection": "uniform",
        "replay": "fill" if row.replay else "off",
        "output_dir": folder,
        "seed": SEED,
        "max_steps": 2,
        # Every turn starts with the same weights
        "learning_rate": 0.0,
        "per_device_train_batch_size": row.micro_batch,
        "gradient_accumulation_steps": GROUPS * GROUP_SIZE // row.micro_batch,
        "num_generations": GROUP_SIZE,
        "max_completion_length": row.cap,
        "gradient_checkpointing": row.checkpointing,
        "bf16": device == "cuda",
        "use_cpu": device == "cpu",
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
    }
    return DataEfficientGRPOConfig(**options)


# A row


def measure(
    row: Row, size: Size, groups: Sequence[dict[str, Any]], device: str, repetitions: int
) -> tuple[dict[str, list[Update]], dict[str, float]]:
    """Update both ways in turns.

    Args:
        row ([`Row`]): The conditions.
        size ([`Size`]): The model.
        groups (`Sequence[dict]`): The recorded lengths.
        device (`str`): `cpu` or `cuda`.
        repetitions (`int`): Most updates of each way, of other lengths each. There are fewer, but at least `FEWEST`,
            if they take long.

    Returns:
        The updates of each name in `WAYS`, and the seconds of its first one, which is none of them.
    """
    updates: dict[str, list[Update]] = {name: [] for name in WAYS}
    seconds = 0.0
    with tempfile.TemporaryDirectory() as folder, logits_of_completions_alone(not row.every_position):
        sides = {name: Side(way, row, size, groups, device, folder) for name, way in WAYS.items()}
        # They compute a few rows both ways; on a GPU they allocate memory and compile kernels
        first_seconds = {name: side.first_update() for name, side in sides.items()}
        peak_bytes = {}
        for name, side in sides.items():
            side.meter.measures_memory = device == "cpu"
            peak_bytes[name] = side.update(turn=0).peak_bytes
            side.meter.measures_memory = False
        for turn in range(repetitions):
            if turn >= FEWEST and seconds > LONG_ENOUGH:
                break
            for name, side in sides.items():
                update = side.update(turn)
                if device == "cpu":
                    update = replace(update, peak_bytes=peak_bytes[name])
                updates[name].append(update)
                seconds += update.seconds
    return updates, first_seconds


def free_memory() -> None:
    """Free that of a row's trainers, which hold one another."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def logits_of_completions_alone(alone: bool) -> Iterator[None]:
    """Have TRL compute them as on a GPU, if `alone`, also on a CPU."""
    before = trl.trainer.utils._use_triton
    if alone:
        score_completions_alone()
    try:
        yield
    finally:
        trl.trainer.utils._use_triton = before


def result_of(
    row: Row, size: Size, device: str, updates: dict[str, list[Update]], first_seconds: dict[str, float]
) -> dict[str, Any]:
    """The line of the results."""
    result = {**asdict(row), "model": size.name, "device": device_name(device)}
    for name, of_way in updates.items():
        result[name] = {
            "seconds": [round(update.seconds, 4) for update in of_way],
            "first_seconds": round(first_seconds[name], 4),
            "tokens": [update.tokens for update in of_way],
            "peak_bytes": max(update.peak_bytes for update in of_way),
        }
    return {**result, **provenance()}


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def measure_and_record(
    row: Row, size: Size, groups: Sequence[dict[str, Any]], device: str, repetitions: int, path: Path | None
) -> dict[str, Any] | None:
    """Measure a row, print its ratio of times, and append it to a file.

    Args:
        row ([`Row`]): See [`measure`].
        size ([`Size`]): See [`measure`].
        groups (`Sequence[dict]`): See [`measure`].
        device (`str`): See [`measure`].
        repetitions (`int`): See [`measure`].
        path (`Path`, *optional*): The file; without it, nothing is recorded.

    Returns:
        The line of the results; nothing if the GPU has too little memory.
    """
    try:
        updates, first_seconds = measure(row, size, groups, device, repetitions)
    except torch.cuda.OutOfMemoryError:
        print(f"\n{size.name}, {row.name}: out of memory", flush=True)
        return None
    finally:
        free_memory()
    result = result_of(row, size, device, updates, first_seconds)
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(result) + "\n")
    print(f"{size.name}, {row.name}: {time_ratio(result)}, the first {first_ratio(result)}", flush=True)
    return result


# The table


def time_ratio(result: dict[str, Any]) -> str:
    """The median of the ratios of our update's time to TRL's, by repetition, with the least and the largest."""
    pairs = zip(result[COMPACT]["seconds"], result[TRL]["seconds"], strict=True)
    ratios = [ours / theirs for ours, theirs in pairs]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def first_ratio(result: dict[str, Any]) -> str:
    """The time of our first update, as a share of TRL's first."""
    return f"{result[COMPACT]['first_seconds'] / result[TRL]['first_seconds']:.2f}"


def table(results: Sequence[dict[str, Any]]) -> str:
    """Results as Markdown. Tokens are those of the mean update, seconds those of the median one."""
    shows_memory = any(result[TRL]["peak_bytes"] for result in results)
    header = [
        "update",
        "prompts",
        "effective",
        "micro-batch",
        "checkpointing",
        "replay",
        "cap",
        "tokens, TRL's",
        "tokens, compact",
        "ratio of tokens",
        "seconds, TRL's",
        "seconds, compact",
        "ratio of time",
        "ratio of the first",
        "at most",
    ]
    if shows_memory:
        header += ["peak memory, TRL's", "peak memory, compact"]
    rows = []
    for result in results:
        cells = _cells(result)
        if shows_memory:
            cells += [f"{result[name]['peak_bytes'] / 2**30:.2f} GiB" for name in WAYS]
        rows.append(cells)
    return markdown(header, rows)


def _cells(result: dict[str, Any]) -> list[str]:
    trl_tokens = sum(result[TRL]["tokens"])
    compact_tokens = sum(result[COMPACT]["tokens"])
    repetitions = len(result[TRL]["tokens"])
    return [
        result["name"],
        f"{result['prompt']:,}" if result["prompt"] else "as recorded",
        "all" if result["one_in"] == 1 else f"1/{result['one_in']}",
        str(result["micro_batch"]),
        "yes" if result["checkpointing"] else "no",
        "yes" if result["replay"] else "no",
        f"{result['cap']:,}",
        f"{trl_tokens / repetitions:,.0f}",
        f"{compact_tokens / repetitions:,.0f}",
        f"{compact_tokens / trl_tokens:.3f}",
        f"{statistics.median(result[TRL]['seconds']):.2f}",
        f"{statistics.median(result[COMPACT]['seconds']):.2f}",
        time_ratio(result),
        first_ratio(result),
        f"{result['at_most']:.2f}",
    ]


def read_results(path: Path) -> list[dict[str, Any]]:
    """What is recorded: of a row that was measured again, the last line, in the order of `ROWS`."""
    latest: dict[tuple[str, str], dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        result = json.loads(line)
        latest[result["model"], result["name"]] = result
    places = {row.name: place for place, row in enumerate(ROWS)}
    return sorted(latest.values(), key=lambda result: (result["model"], places[result["name"]]))


def page_table(results: Sequence[dict[str, Any]], names: Sequence[str] | None = None) -> str:
    """
    Results for a page: the share of TRL's time, the peak memory, and the shares of the first update and of the tokens.

    Args:
        results (`Sequence[dict]`): see [`read_results`].
        names (`Sequence[str]`, *optional*): these rows alone, in their order, and of them time and memory.
    """
    by_name = {result["name"]: result for result in results}
    rows = []
    for result in results if names is None else [by_name[name] for name in names]:
        tokens = sum(result[COMPACT]["tokens"]) / sum(result[TRL]["tokens"])
        ours, theirs = (result[name]["peak_bytes"] / 2**30 for name in (COMPACT, TRL))
        cells = [row_in_words(result), time_ratio(result), f"{ours:.2f} of {theirs:.2f} GiB"]
        rows.append(cells if names is not None else [*cells, first_ratio(result), f"{tokens:.2f}"])
    header = ["groups with a gradient", "time", "memory", "first update", "tokens"]
    return markdown(header[: len(rows[0])], rows)


GROUPS_IN_WORDS = {1: "all", 2: "half", 3: "a third"}


def row_in_words(result: dict[str, Any]) -> str:
    """Which groups of a row have a gradient, and in what it differs from the first row otherwise."""
    words = [GROUPS_IN_WORDS[result["one_in"]]]
    if result["replay"]:
        words.append("stored groups in the places of the others")
    if result["prompt"]:
        words.append(f"prompts of {result['prompt']:,} tokens")
    if result["micro_batch"] != ROWS[0].micro_batch:
        words.append(f"micro-batches of {result['micro_batch']}")
    if result["cap"] != ROWS[0].cap:
        words.append(f"completions of at most {result['cap']:,} tokens")
    if result["every_position"]:
        words.append("TRL's loss scores prompts, too")
    if result["checkpointing"]:
        words.append("gradient checkpointing")
    return ", ".join(words)


#: Rows of the table for readers in a hurry
IN_SHORT = (
    "checkpointing",
    "checkpointing, half effective",
    "checkpointing, prompts of 1,500",
    "all effective",
)
#: Rows of the page on the update: also the one that needs more memory than TRL's, and the one that saves least time
ON_PAGE = (*IN_SHORT, "half effective", "prompts of 1,500", "checkpointing, half replayed", "cap 256")


def print_tables(results: Sequence[dict[str, Any]]) -> None:
    """A table of each model."""
    by_model: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        by_model.setdefault(f"{result['model']}, {result['device']}", []).append(result)
    for title, of_model in by_model.items():
        print(f"\n{title}\n\n{table(of_model)}", flush=True)


# The command


def smaller(rows: Sequence[Row], groups: Sequence[dict[str, Any]]) -> tuple[list[Row], list[dict[str, Any]]]:
    """Rows and recorded groups with an eighth of the lengths, to try this benchmark out."""
    small_rows = [replace(row, prompt=row.prompt // 8, cap=row.cap // 8) for row in rows]
    small_groups = []
    for group in groups:
        completions = [max(length // 8, 1) for length in group["completion_tokens"]]
        small_groups.append({"prompt_tokens": group["prompt_tokens"] // 8, "completion_tokens": completions})
    return small_rows, small_groups


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="tiny model and lengths; nothing is recorded")
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="only these rows, by their names")
    parser.add_argument("--layers", type=int, default=2, help="of the CPU's model (default: %(default)s of 30)")
    parser.add_argument("--repetitions", type=int, default=5, help="updates of each way, fewer if they take long")
    parser.add_argument("--recorded", action="store_true", help="measure nothing; print what is recorded")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.rows or ()) - {row.name for row in ROWS})
    if unknown:
        parser.error(f"unknown rows {unknown}; there are {[row.name for row in ROWS]}")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    path = RESULTS / f"{arguments.device}.jsonl"
    if arguments.recorded:
        print_tables(read_results(path))
        return

    torch.set_num_threads(1)
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # on `rollout_func`
    transformers.logging.set_verbosity_error()
    on_cuda = arguments.device == "cuda"
    sizes = cuda_sizes() if on_cuda else [smollm2(arguments.layers)]
    names = arguments.rows
    if names is None and on_cuda:
        names = CUDA_ROWS
    rows = [row for row in ROWS if names is None or row.name in names]
    groups = read_lengths()[1]
    if arguments.quick:
        sizes = [smollm2(2, hidden_size=72, intermediate_size=192)]
        rows, groups = smaller(rows, groups)
    results = []
    for size in sizes:
        for row in rows:
            result = measure_and_record(
                row, size, groups, arguments.device, arguments.repetitions, path=None if arguments.quick else path
            )
            if result is not None:
                results.append(result)
    print_tables(results)


if __name__ == "__main__":
    main()
