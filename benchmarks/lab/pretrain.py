"""The start of every run: a model taught the tasks from noisy demonstrations, cached under a key of its recipe.

Each character of a demonstrated answer is replaced, with probability `noise`, by a random other one; short tasks are
demonstrated without noise. The trained model has the skill and copies the noise: it gets a character right about four
times in five, so its success falls with length, and GRPO has noise to remove.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM

from .evaluate import encode
from .model import make_model, make_tokenizer
from .tasks import ARITHMETIC, LEARNABLE_FAMILIES, LETTERS, Task, lengths_of, make_task


@dataclass(frozen=True)
class StartRecipe:
    """Everything that decides the trained start. Two recipes with equal fields give equal weights on one machine."""

    seed: int = 0
    hidden: int = 128
    layers: int = 4
    steps: int = 2500
    batch_size: int = 128
    learning_rate: float = 2e-3
    noise: float = 0.2  # probability that a demonstrated character is wrong
    noise_from: float = 0.6  # share of the steps that are demonstrated without noise first: skill is learnt sooner
    clean_up_to: int = 3  # lengths up to this one are demonstrated without noise: the easy part
    arithmetic_share: float = 0.1  # of the demonstrations
    version: int = 1  # raise it when this module or the tasks change what a recipe gives

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]


def corrupt(rng: np.random.Generator, answer: str, noise: float) -> str:
    """`answer` with each character replaced, with probability `noise`, by another of its kind (letter or digit)."""
    characters = list(answer)
    for i in np.flatnonzero(rng.random(len(characters)) < noise):
        kind = LETTERS if characters[i] in LETTERS else "0123456789"
        characters[i] = kind[(kind.index(characters[i]) + int(rng.integers(1, len(kind)))) % len(kind)]
    return "".join(characters)


def demonstration(rng: np.random.Generator, recipe: StartRecipe, noise: float) -> tuple[Task, str]:
    """A random task and the answer that is demonstrated for it."""
    families = ARITHMETIC if rng.random() < recipe.arithmetic_share else LEARNABLE_FAMILIES
    family = families[int(rng.integers(len(families)))]
    task = make_task(rng, family, int(rng.choice(lengths_of(family))))
    clean = family not in ARITHMETIC and task.length <= recipe.clean_up_to
    return task, task.answer if clean else corrupt(rng, task.answer, noise)


def learning_rate_at(step: int, recipe: StartRecipe) -> float:
    """Warm-up over a twentieth of the steps, then a half cosine down to 1 % of the peak."""
    warmup = max(1, recipe.steps // 20)
    if step < warmup:
        return recipe.learning_rate * (step + 1) / warmup
    along = (step - warmup) / max(1, recipe.steps - warmup)
    return recipe.learning_rate * (0.01 + 0.99 * 0.5 * (1 + np.cos(np.pi * along)))


def train_start(recipe: StartRecipe, tokenizer, progress=lambda step, loss: None) -> LlamaForCausalLM:
    """Supervised fine-tuning on fresh demonstrations each step; the loss is on answers alone."""
    model = make_model(tokenizer, recipe.seed, recipe.hidden, recipe.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    rng = np.random.default_rng([recipe.seed, 1])
    for step in range(recipe.steps):
        noise = recipe.noise if step >= recipe.noise_from * recipe.steps else 0.0
        tasks, answers = zip(*(demonstration(rng, recipe, noise) for _ in range(recipe.batch_size)), strict=True)
        ids, is_answer = encode(tokenizer, tasks, answers)
        logits = model(input_ids=ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits[is_answer[:, 1:]], ids[:, 1:][is_answer[:, 1:]])
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, recipe)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress(step, loss.item())
    return model.eval()


def start_folder(recipe: StartRecipe, cache: Path, progress=lambda step, loss: None) -> Path:
    """The folder of the trained start, trained now if the cache lacks it."""
    folder = cache / f"start-{recipe.key}"
    if not (folder / "recipe.json").exists():
        tokenizer = make_tokenizer()
        model = train_start(recipe, tokenizer, progress)
        partial = cache / f"start-{recipe.key}.{os.getpid()}"
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / "recipe.json").write_text(json.dumps(asdict(recipe), indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    return folder
