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
    """Sample one completion of each prompt, as in training, and score it with `exact_answer_reward`.

    Args:
        model (`PreTrainedModel`): The model.
        tokenizer: Its tokenizer, with the chat template and `padding_side="left"`.
        rows (`list[dict]`): Questions with the columns `prompt` (a conversation), `answer` and `task`.
        max_completion_length (`int`): Tokens of a completion.
        temperature (`float`, *optional*, defaults to `1.0`): Of the sampling.
        seed (`int`, *optional*, defaults to `0`): Of the sampling; torch's own random state is left as it was.
        description (`str`, *optional*): Stands before the progress bar.

    Returns:
        `dict[str, float]`: The share of right answers by task, and of all of them under `"all"`.

    Raises:
        ValueError: If there are no rows.
    """
    if not rows:
        raise ValueError("There are no questions to measure with; `rows` is empty.")
    # Prompts of similar length together, for little padding
    rows = sorted(rows, key=lambda row: row["task"])
    scores_by_task: dict[str, list[float]] = defaultdict(list)
    all_scores: list[float] = []
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
            output = model.generate(
                **inputs,
                max_new_tokens=max_completion_length,
                do_sample=True,
                temperature=temperature,
                top_k=0,
            )
            prompt_width = inputs["input_ids"].shape[1]
            completions = output[:, prompt_width:]  # (batch, prompt + completion) -> (batch, completion)
            texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
            scores = exact_answer_reward(texts, answer=[row["answer"] for row in batch])
            for row, score in zip(batch, scores, strict=True):
                scores_by_task[row["task"]].append(score or 0.0)
                all_scores.append(score or 0.0)
            bar.update(len(batch))
    rates = {task: sum(scores) / len(scores) for task, scores in scores_by_task.items()}
    rates["all"] = sum(all_scores) / len(all_scores)
    return rates


def measure(
    model: str | Path,
    adapter: str | Path | None,
    questions: Path,
    description: str,
    **sampling: Any,
) -> dict[str, float]:
    """Load a model, perhaps with an adapter, and return its success rates on a file of questions."""
    rows = [json.loads(line) for line in questions.read_text(encoding="utf-8").splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(model)
    return success_rates(load_model(model, adapter), tokenizer, rows, description=description, **sampling)
