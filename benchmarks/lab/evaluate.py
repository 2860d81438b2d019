"""Accuracy without sampling: with one right answer, the chance of a right completion is a product of probabilities.

The chance that a completion sampled at temperature 1 is right is `prod_t p(a_t | prompt, a_<t)` over the answer and its
end token; greedy decoding is right exactly if every one of these tokens is the likeliest. One forward pass over
prompt and answer gives both, free of sampling noise and of generation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .tasks import Task


def encode(tokenizer, tasks: Sequence[Task], answers: Sequence[str] | None = None):
    """Token ids of prompt + answer + end, right-padded, and where the answer's tokens are.

    Returns `ids` (N, T) int64 and `is_answer` (N, T) bool, True on the answer's characters and its end token. `answers`
    replaces the tasks' own (noisy demonstrations).
    """
    answers = [task.answer for task in tasks] if answers is None else answers
    prompts = tokenizer([task.prompt for task in tasks])["input_ids"]
    targets = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(list(answers))["input_ids"]]
    width = max(len(p) + len(t) for p, t in zip(prompts, targets, strict=True))
    ids = torch.full((len(tasks), width), tokenizer.pad_token_id)
    is_answer = torch.zeros((len(tasks), width), dtype=torch.bool)
    for row, (prompt, target) in enumerate(zip(prompts, targets, strict=True)):
        end = len(prompt) + len(target)
        ids[row, :end] = torch.tensor(prompt + target)
        is_answer[row, len(prompt) : end] = True
    return ids, is_answer


@torch.no_grad()
def success(model, tokenizer, tasks: Sequence[Task], batch_size: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    """Chance of a right completion at temperature 1, (N,) float32, and whether greedy decoding is right, (N,) bool."""
    sampled, greedy = [], []
    for start in range(0, len(tasks), batch_size):
        ids, is_answer = encode(tokenizer, tasks[start : start + batch_size])
        logits = model(input_ids=ids[:, :-1]).logits.float()  # (n, T-1, V)
        target, counted = ids[:, 1:], is_answer[:, 1:]  # (n, T-1)
        logps = logits.log_softmax(-1).gather(-1, target[..., None])[..., 0]
        sampled.append((logps * counted).sum(-1).exp())
        greedy.append(((logits.argmax(-1) == target) | ~counted).all(-1))
    return torch.cat(sampled), torch.cat(greedy)
