"""The start of every run: a model taught the tasks from noisy demonstrations, cached under a key of its recipe.

The noise is systematic: in each family a fixed set of characters is confusable, and wherever one of them stands in a
demonstrated answer, it is replaced, with probability `confusion`, by its fixed wrong partner. Short tasks are
demonstrated without noise. The trained model has the skill and copies the mistakes, so its success falls with length,
and GRPO has one mistake after another to remove. (Noise that is the same for every character is removed by making the
distribution sharper: a single direction, learnt from anything within twenty steps.)
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM

from .evaluate import encode
from .model import make_model, make_tokenizer
from .tasks import ARITHMETIC, DIGITS, LEARNABLE_FAMILIES, LETTERS, Task, lengths_of, make_task


@dataclass(frozen=True)
class StartRecipe:
    """Everything that decides the trained start. Two recipes with equal fields give equal weights on one machine."""

    seed: int = 0
    hidden: int = 128
    layers: int = 4
    steps: int = 1600
    batch_size: int = 128
    learning_rate: float = 2e-3
    confusable: float = 0.4  # share of characters that have a wrong partner, by family
    confusion: float = 0.5  # probability that such a character is demonstrated wrongly
    noise_from: float = 0.65  # share of the steps that come before the noise: the skill is learnt sooner without
    clean_up_to: int = 3  # lengths up to this one are demonstrated without noise: the easy part
    arithmetic_share: float = 0.1  # of the demonstrations
    version: int = 1  # raise it when this module or the tasks change what a recipe gives

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]


def partners(recipe: StartRecipe) -> dict[str, dict[str, str]]:
    """By family, the confusable characters and the wrong partner of each: letters for letters, digits for digits."""
    rng = np.random.default_rng([recipe.seed, 3])
    tables = {}
    for family in (*LEARNABLE_FAMILIES, *ARITHMETIC):
        characters = DIGITS if family in ARITHMETIC else LETTERS
        n = len(characters)
        confusable = rng.permutation(n)[: round(recipe.confusable * n)]
        partner_of = {}
        for i in confusable:
            distance = int(rng.integers(1, n))  # never 0: a partner is another character
            partner_of[characters[i]] = characters[(i + distance) % n]
        tables[family] = partner_of
    return tables


def corrupt(rng: np.random.Generator, answer: str, partner: dict[str, str], probability: float) -> str:
    """`answer` with each confusable character replaced, with `probability`, by its partner."""
    characters = []
    for character in answer:
        if character in partner and rng.random() < probability:
            character = partner[character]
        characters.append(character)
    return "".join(characters)


def demonstration(rng: np.random.Generator, recipe: StartRecipe, tables, noisy: bool) -> tuple[Task, str]:
    """A random task and the answer that is demonstrated for it."""
    families = ARITHMETIC if rng.random() < recipe.arithmetic_share else LEARNABLE_FAMILIES
    family = families[int(rng.integers(len(families)))]
    task = make_task(rng, family, int(rng.choice(lengths_of(family))))
    is_short = family not in ARITHMETIC and task.length <= recipe.clean_up_to
    if is_short or not noisy:
        return task, task.answer
    return task, corrupt(rng, task.answer, tables[family], recipe.confusion)


def learning_rate_at(step: int, recipe: StartRecipe) -> float:
    """Warm-up over a twentieth of the steps, then a half cosine down to 1 % of the peak."""
    warmup = max(1, recipe.steps // 20)
    if step < warmup:
        return recipe.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, recipe.steps - warmup)
    cosine = 1 + np.cos(np.pi * progress)  # from 2 to 0
    return recipe.learning_rate * (0.01 + 0.99 * 0.5 * cosine)


def backward(model, tokenizer, demonstrations: list[tuple[Task, str]], parts: int = 4) -> float:
    """Add the gradients of the mean loss of an answer's token.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        demonstrations (`list[tuple[Task, str]]`): Tasks and the answers that are demonstrated for them.
        parts (`int`, *optional*, defaults to `4`): The batch goes through in so many parts of similar length, which
            saves a third of the padding's work and changes nothing else.

    Returns:
        `float`: That loss.
    """
    ordered = sorted(demonstrations, key=lambda pair: len(pair[0].prompt) + len(pair[1]))
    tokens = sum(len(answer) + 1 for _, answer in ordered)  # with the end token
    size = math.ceil(len(ordered) / parts)
    total = 0.0
    for begin in range(0, len(ordered), size):
        tasks, answers = zip(*ordered[begin : begin + size], strict=True)
        ids, is_answer = encode(tokenizer, tasks, answers)
        logits = model(input_ids=ids[:, :-1]).logits
        targets = ids[:, 1:]
        is_target = is_answer[:, 1:]
        losses = torch.nn.functional.cross_entropy(logits[is_target], targets[is_target], reduction="sum")
        loss = losses / tokens
        loss.backward()
        total += loss.item()
    return total


def train_start(recipe: StartRecipe, tokenizer, progress=lambda step, loss: None) -> LlamaForCausalLM:
    """Supervised fine-tuning on fresh demonstrations each step; the loss is on answers alone."""
    model = make_model(tokenizer, recipe.seed, recipe.hidden, recipe.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    rng = np.random.default_rng([recipe.seed, 1])
    tables = partners(recipe)
    for step in range(recipe.steps):
        noisy = step >= recipe.noise_from * recipe.steps
        demonstrations = [demonstration(rng, recipe, tables, noisy) for _ in range(recipe.batch_size)]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, recipe)
        loss = backward(model, tokenizer, demonstrations)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress(step, loss)
    return model.eval()


def start_folder(recipe: StartRecipe, cache: Path, progress=lambda step, loss: None) -> Path:
    """The folder of the trained start, trained now if the cache lacks it."""
    folder = cache / f"start-{recipe.key}"
    if (folder / "recipe.json").exists():
        return folder
    tokenizer = make_tokenizer()
    model = train_start(recipe, tokenizer, progress)
    # Other processes see the folder only when it is complete
    partial = cache / f"start-{recipe.key}.{os.getpid()}"
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    (partial / "recipe.json").write_text(json.dumps(asdict(recipe), indent=1))
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder
