"""Accuracy without sampling: with one right answer, the chance of a right completion is a product of probabilities.

The chance that a completion sampled at temperature 1 is right is `prod_t p(a_t | prompt, a_<t)` over the answer and
its end token; greedy decoding is right exactly if every one of these tokens is the likeliest. One forward pass over
prompt and answer gives both, free of sampling noise and of generation, and the policy's entropy along the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .tasks import Task


def encode(
    tokenizer, tasks: Sequence[Task], answers: Sequence[str] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids of prompt, answer and end token, padded on the right.

    Args:
        tokenizer: That of the model.
        tasks (`Sequence[Task]`): N tasks.
        answers (`Sequence[str]`, *optional*): Replace the tasks' own answers (noisy demonstrations).

    Returns:
        `ids` (N, T) int64, and `is_answer` (N, T) bool, True on the answer's characters and its end token.
    """
    if answers is None:
        answers = [task.answer for task in tasks]
    prompts = tokenizer([task.prompt for task in tasks])["input_ids"]
    targets = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(list(answers))["input_ids"]]
    width = max(len(prompt) + len(target) for prompt, target in zip(prompts, targets, strict=True))
    ids = torch.full((len(tasks), width), tokenizer.pad_token_id)
    is_answer = torch.zeros((len(tasks), width), dtype=torch.bool)
    for row, (prompt, target) in enumerate(zip(prompts, targets, strict=True)):
        end = len(prompt) + len(target)
        ids[row, :end] = torch.tensor(prompt + target)
        is_answer[row, len(prompt) : end] = True
    return ids, is_answer


class Success(NamedTuple):
    """How well a policy does on N tasks.

    Args:
        sampled (`torch.Tensor`): The chance of a right completion at temperature 1, (N,) float32.
        greedy (`torch.Tensor`): Whether greedy decoding is right, (N,) bool.
        entropy (`torch.Tensor`): The mean entropy over the tokens of the right answer, in nats, (N,) float32.
    """

    sampled: torch.Tensor
    greedy: torch.Tensor
    entropy: torch.Tensor


@torch.no_grad()
def success(model, tokenizer, tasks: Sequence[Task], batch_size: int = 64) -> Success:
    """How well the policy does on `tasks`, exactly."""
    sampled = torch.empty(len(tasks))
    greedy = torch.empty(len(tasks), dtype=torch.bool)
    entropy = torch.empty(len(tasks))
    # Prompts of similar length together, for less padding
    ordered = sorted(range(len(tasks)), key=lambda i: len(tasks[i].prompt))
    for start in range(0, len(tasks), batch_size):
        rows = ordered[start : start + batch_size]
        ids, is_answer = encode(tokenizer, [tasks[i] for i in rows])
        ids = ids.to(model.device)
        is_answer = is_answer.to(model.device)
        first_answer = int(is_answer.any(0).int().argmax())
        kept = ids.shape[1] - first_answer  # K positions, from the first answer on
        logits = model(input_ids=ids[:, :-1], logits_to_keep=kept).logits.float()  # (n, K, V)
        target = ids[:, -kept:]  # (n, K)
        counted = is_answer[:, -kept:]  # (n, K)

        all_logps = logits.log_softmax(-1)  # (n, K, V)
        logps = all_logps.gather(-1, target[..., None])[..., 0]  # (n, K)
        sampled[rows] = (logps * counted).sum(-1).exp().cpu()
        entropies = -(all_logps.exp() * all_logps).sum(-1)  # (n, K)
        entropy[rows] = ((entropies * counted).sum(-1) / counted.sum(-1)).cpu()
        is_likeliest = logits.argmax(-1) == target  # (n, K)
        greedy[rows] = (is_likeliest | ~counted).all(-1).cpu()
    return Success(sampled, greedy, entropy)
