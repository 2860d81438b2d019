"""The success rate of a model on held-out questions: one sampled answer each, scored as in training."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from trl_dataeff.rewards import exact_answer_reward


BATCH = 32


def load_model(folder: str | Path, adapter: str | Path | None = None) -> PreTrainedModel:
    """Load a model from its folder, with a LoRA adapter merged in if one is given."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return model.eval()


def success_rates(
    model: PreTrainedModel,
    tokenizer: Any,
    rows: list[dict[str, Any]],
    max_completion_length: int,
    temperature: float = 1.0,
    seed: int = 0,
    description: str = "measuring",
) -> dict[str, float]:
    """
    Sample one completion of each prompt, as in training, and score it with `exact_answer_reward`.

    Args:
        model (`PreTrainedModel`), tokenizer: with the chat template and `padding_side="left"`.
        rows (`list[dict]`): with the columns `prompt` (a conversation), `answer` and `task`.
        max_completion_length (`int`): tokens of a completion.
        temperature (`float`, *optional*, defaults to `1.0`): of the sampling.
        seed (`int`, *optional*, defaults to `0`): of the sampling; torch's own random state is left as it was.
        description (`str`, *optional*): stands before the progress bar.

    Returns:
        `dict[str, float]`: the share of right answers by task, and of all of them under `"all"`.
    """
    if not rows:
        raise ValueError("There are no questions to measure with; `rows` is empty.")
    scores: dict[str, list[float]] = defaultdict(list)
    rows = sorted(rows, key=lambda row: row["task"])  # prompts of similar length together, for little padding
    with torch.random.fork_rng(devices=[]), torch.no_grad(), tqdm(total=len(rows), desc=description) as bar:
        torch.manual_seed(seed)
        for start in range(0, len(rows), BATCH):
            batch = rows[start : start + BATCH]
            inputs = tokenizer.apply_chat_template(
                [row["prompt"] for row in batch],
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
                padding=True,
            )
            # (batch, prompt + completion) -> (batch, completion)
            output = model.generate(
                **inputs, max_new_tokens=max_completion_length, do_sample=True, temperature=temperature, top_k=0
            )[:, inputs["input_ids"].shape[1] :]
            texts = tokenizer.batch_decode(output, skip_special_tokens=True)
            for row, score in zip(
                batch, exact_answer_reward(texts, answer=[row["answer"] for row in batch]), strict=True
            ):
                scores[row["task"]].append(score or 0.0)
            bar.update(len(batch))
    everything = [score for task in scores.values() for score in task]
    return {**{task: sum(s) / len(s) for task, s in scores.items()}, "all": sum(everything) / len(everything)}


def measure(
    model: str | Path, adapter: str | Path | None, questions: Path, description: str, **sampling: Any
) -> dict[str, float]:
    """Load a model, perhaps with an adapter, and return its success rates on a file of questions."""
    rows = [json.loads(line) for line in questions.read_text(encoding="utf-8").splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(model)
    return success_rates(load_model(model, adapter), tokenizer, rows, description=description, **sampling)
