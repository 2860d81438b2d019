"""
The pictures of a healthy and of an unhealthy run on the page *Read a run*, two short runs of one model on one task;
and the ranges of metrics in the committed runs of the pretrained benchmark.

    python -m benchmarks.pictures        # half a minute on one core; needs matplotlib (extra `report`)

Prompts are a letter and two digits, and the answer is the second digit. Seven of ten letters have no right answer, as
questions that are far too hard. The healthy run's learning rate falls to 0; the unhealthy one's is twenty times as
high, and constant.
"""

from __future__ import annotations

import argparse
import json
import string
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback

from benchmarks.smollm2 import RUNS as COMMITTED_RUNS
from benchmarks.smollm2.__main__ import TRIAL
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer
from trl_dataeff.analysis.recorded import RecordedRun, read_run


IMAGES = Path(__file__).resolve().parents[1] / "docs" / "img"
RUNS: dict[str, dict[str, Any]] = {
    "healthy": {"learning_rate": 1e-3, "lr_scheduler_type": "linear"},
    "unhealthy": {"learning_rate": 2e-2, "lr_scheduler_type": "constant"},
}
#: Metrics of the committed runs, as means between two evaluations
RECORDED = ("entropy", "replay_ess", "replay_clipped")
STEPS = 120
SOLVABLE = "abc"
LETTERS = string.ascii_lowercase[:10]
#: Steps of the running mean of the shares: a step has 8 groups
WIDTH = 9
#: What is printed of a run, by names for it
METRICS = {
    "held-out reward": "eval_reward",
    "entropy": "entropy",
    "grad norm": "grad_norm",
    "pearson": "dataeff/selector/predictor/pearson",
    "ess": "dataeff/replay/ess",
    "clipped": "dataeff/replay/clipped_share",
}
#: Kinds of groups, from the bottom of a picture to its top, and their colours
KINDS = {"easy": "#56b4e9", "effective": "#009e73", "hard": "#b8b8b8"}


def reward(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    return [float(completion == gold) for completion, gold in zip(completions, answer, strict=True)]


def rows(letters: str, tens: range) -> Dataset:
    """Prompts and answers: ten letters with three tens and eight ones each."""
    prompts = [f"{letter}{i}{j}" for letter in letters for i in tens for j in range(8)]
    answers = [prompt[-1] if prompt[0] in SOLVABLE else "none" for prompt in prompts]
    return Dataset.from_dict({"prompt": prompts, "answer": answers})


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of single characters."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *LETTERS, *string.digits])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def make_model(tokenizer: PreTrainedTokenizerFast, prompts: list[str]) -> LlamaForCausalLM:
    """A Llama of 50,000 weights that answers with some digit, the right one in about a fifth of the cases."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    everything = tokenizer(prompts, return_tensors="pt").input_ids
    first_digit = tokenizer.convert_tokens_to_ids("0")
    for _ in range(200):
        digits = torch.randint(first_digit, first_digit + 8, (len(prompts),))
        digits = torch.where(torch.rand(len(prompts)) < 0.1, everything[:, -1], digits)
        torch.nn.functional.cross_entropy(model(everything).logits[:, -1], digits).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def train(folder: str, **options: Any) -> RecordedRun:
    """Train for `STEPS` steps, and return what the run has recorded."""
    tokenizer = make_tokenizer()
    dataset = rows(LETTERS, range(3))
    held_out = rows(SOLVABLE, range(3, 10))
    args = DataEfficientGRPOConfig(
        folder,
        selection="dots",
        replay="fill",
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=1,
        max_steps=STEPS,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=10,
        eval_on_start=True,
        num_generations_eval=1,
        per_device_eval_batch_size=len(held_out),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    trainer = DataEfficientGRPOTrainer(
        model=make_model(tokenizer, dataset["prompt"][:]),
        reward_funcs=reward,
        args=args,
        train_dataset=dataset,
        eval_dataset=held_out,
        processing_class=tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return read_run(folder)


def shares(groups: pd.DataFrame) -> pd.DataFrame:
    """
    Return the share of each kind among the groups that were generated, as running means over `WIDTH` steps.

    Args:
        groups (`pd.DataFrame`): a row for each group, with `step` and `kind`.

    Returns:
        `pd.DataFrame`: a row for each step, a column for each of `KINDS`; a row adds up to 1.
    """
    counts = pd.crosstab(groups["step"], groups["kind"]).reindex(columns=list(KINDS), fill_value=0)
    by_step = counts.div(counts.sum(axis=1), axis=0)
    return by_step.rolling(WIDTH, center=True, min_periods=1).mean()


def draw(run: RecordedRun, path: Path) -> None:
    """Draw the kinds of groups of a run, and its reward on held-out prompts, into one panel."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    assert run.groups is not None
    by_step = shares(run.groups)
    steps, rewards = run.series("eval_reward")
    with mpl.rc_context({"svg.hashsalt": path.stem, "font.size": 11}):
        figure = Figure(figsize=(5.6, 3.6), layout="constrained")
        axes = figure.add_subplot()
        axes.stackplot(by_step.index, by_step.T.to_numpy(), colors=list(KINDS.values()), labels=list(KINDS), lw=0)
        axes.plot(steps, rewards, color="black", marker="o", markersize=4, label="held-out reward")
        axes.set(xlabel="optimizer steps", ylabel="share of groups, reward", xlim=(0, STEPS - 1), ylim=(0, 1))
        axes.set_yticks(np.linspace(0, 1, 5))
        figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=10, columnspacing=1, handlelength=1)
        figure.savefig(path, metadata={"Date": None})


def sentence(run: RecordedRun, first: int, last: int) -> str:
    """Say what the steps from `first` to `last` were like: shares of groups, and means of some metrics."""
    assert run.groups is not None
    groups = run.groups[run.groups["step"].between(first - 1, last - 1)]  # counted before the step
    kinds = groups["kind"].value_counts(normalize=True)
    facts = [f"{kinds.get(kind, 0.0):.2f} {kind}" for kind in KINDS]
    logs = run.logs[run.logs["step"].between(first, last)].mean()
    for name, metric in METRICS.items():
        facts.append(f"{name} {logs.get(metric, np.nan):.2f}")
    return f"steps {first} to {last}: {', '.join(facts)}"


def ranges(lines: Iterable[str]) -> dict[str, tuple[float, float]]:
    """
    Return where nine of ten values of each metric lie, in runs with selection and replay. Runs that tried learning
    rates are left out.

    Args:
        lines (`Iterable[str]`): JSON objects, a run each; its `evaluations` have means since the one before.

    Returns:
        `dict[str, tuple[float, float]]`: 5 % and 95 % quantile by name; `effective` is the share of effective groups.
    """
    values: dict[str, list[float]] = {name: [] for name in ("effective", *RECORDED)}
    for line in lines:
        run = json.loads(line)
        if run["method"] != "fill" or run["seed"] in TRIAL:
            continue
        evaluations = run["evaluations"]
        for groups, effective in zip(evaluations["groups"], evaluations["effective_groups"], strict=True):
            if groups:
                values["effective"].append(effective / groups)
        for name in RECORDED:
            values[name] += [value for value in evaluations[name] if value is not None]
    return {name: (float(np.quantile(found, 0.05)), float(np.quantile(found, 0.95))) for name, found in values.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    torch.set_num_threads(1)
    with open(COMMITTED_RUNS, encoding="utf-8") as lines:
        for name, (low, high) in ranges(lines).items():
            print(f"pretrained benchmark: {name} {low:.2f} to {high:.2f}")
    for name, options in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            run = train(folder, **options)
        draw(run, IMAGES / f"{name}.svg")
        print(name)
        print(sentence(run, 1, 30))
        print(sentence(run, STEPS - 29, STEPS))


if __name__ == "__main__":
    main()
