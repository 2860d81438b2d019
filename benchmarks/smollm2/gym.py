"""Tasks of reasoning-gym, as that library makes and scores them at its default difficulty: some with partial credit,
some beyond the model.

A prompt is a question of the library with its answer, always the same for a task, and then the question that is asked:

    Spell this word backward (example: sun -> nus): Project
    Answer: tcejorP

    Spell this word backward (example: sun -> nus): shall
    Answer:
"""

from __future__ import annotations

import copy
import importlib
import random
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from transformers import Cache

from benchmarks.smollm2.questions import END_OF_LINE, reasoning_gym


TASKS = (
    "calendar_arithmetic",
    "chain_sum",
    "family_relationships",
    "fraction_simplification",
    "gcd",
    "lcm",
    "letter_counting",
    "number_sequence",
    "products",
    "simple_equations",
    "spell_backward",
    "syllogism",
)
OF_A_TASK = 32
HELD_OUT_OF_A_TASK = 10
HELD_OUT_SEED = 10_000


class Asked(NamedTuple):
    """A prompt, its task, and the library's entry, by which a completion is scored."""

    prompt: str
    kind: str
    entry: dict[str, Any]


class Computed(NamedTuple):
    """Prompts that the model has read, padded on the left."""

    ids: torch.Tensor  # (N, P)
    mask: torch.Tensor  # (N, P)
    cache: Cache | None  # of all but the last position; `None`: they were not read yet


class Gym:
    """
    Questions of tasks: `of_a_task` of each to train on for a seed, and held-out ones, the same for all seeds.
    """

    tasks: ClassVar[dict[str, dict[str, Any]]] = {kind: {} for kind in TASKS}  # names, and settings of the library
    of_a_task = OF_A_TASK
    held_out_of_a_task = HELD_OUT_OF_A_TASK
    samples = 4  # of each held-out question
    measures_greedy = True  # whether greedy decoding is measured, too
    temperature = 1.0
    max_completion = 8  # tokens
    end = END_OF_LINE  # the token that ends a completion
    micro_batch: int | None = 32  # rows; None: those of a step. TRL's loss of all 64 needs 16 GiB on a CPU
    rows_at_once = 160  # of completions in an evaluation
    generates: Callable[..., torch.Tensor] | None = None  # in the place of the model's `generate`

    def __init__(self) -> None:
        self.asked: list[Asked] = []  # what is trained on, once `rows` has been called

    @cached_property
    def held_out(self) -> list[Asked]:
        return self._questions(HELD_OUT_SEED, self.held_out_of_a_task, without=set())

    def training(self, seed: int) -> list[Asked]:
        """In random order, none of them held out."""
        held_out_prompts = {question.prompt for question in self.held_out}
        asked = self._questions(seed, self.of_a_task, held_out_prompts)
        random.Random(seed).shuffle(asked)
        return asked

    def rows(self, seed: int, tokenizer) -> list[dict]:
        """The dataset to train on; `place` is the row's place in [`Gym.training`]."""
        self.asked = self.training(seed)
        rows = []
        for place, question in enumerate(self.asked):
            prompt = self.text_of(question, tokenizer)
            rows.append({"prompt": prompt, "kind": question.kind, "place": place})
        return rows

    def reward(self, completions: list[str], place: list[int], **columns: Any) -> list[float]:
        """The score of each completion, as a reward function of TRL."""
        return [self.score(text, self.asked[i]) for text, i in zip(completions, place, strict=True)]

    def prompt_of(self, kind: str, entry: dict[str, Any]) -> str:
        """The prompt for an entry of the library."""
        return f"{example(kind)}\n\n{question(entry)}"

    def text_of(self, asked: Asked, tokenizer) -> str:
        """The text that the model continues."""
        return asked.prompt

    def score(self, completion: str, asked: Asked) -> float:
        """In [0, 1]."""
        return score(completion, asked)

    @torch.no_grad()
    def quality(self, model, tokenizer) -> dict[str, Any]:
        """
        Mean score on the held-out questions: of samples, which are drawn alike each time, and greedy, if that is
        measured.
        """
        with torch.random.fork_rng():
            torch.manual_seed(HELD_OUT_SEED)
            sampled, greedy = self._scores(model, tokenizer)
        by_kind: dict[str, list[float]] = {kind: [] for kind in self.tasks}
        for question, value in zip(self.held_out, sampled, strict=True):
            by_kind[question.kind].append(value)
        return {
            "accuracy_sampled": sum(sampled) / len(sampled),
            "accuracy_greedy": sum(greedy) / len(greedy) if self.measures_greedy else None,
            "accuracy_by_kind": {kind: sum(scores) / len(scores) for kind, scores in by_kind.items()},
        }

    def _scores(self, model, tokenizer) -> tuple[list[float], list[float]]:
        """
        Of each held-out question, the mean score of its samples, and the score of its greedy completion, if that is
        measured.
        """
        sampled = [0.0] * len(self.held_out)
        greedy = [0.0] * len(self.held_out)
        # Prompts of similar length together, for less padding
        by_length = sorted(range(len(self.held_out)), key=lambda i: len(self.held_out[i].prompt))
        questions_at_once = self.rows_at_once // self.samples
        for start in range(0, len(by_length), questions_at_once):
            chosen = by_length[start : start + questions_at_once]
            questions = [self.held_out[i] for i in chosen]
            computed = self.compute_prompts(model, tokenizer, questions)
            texts = self.completions(
                model,
                tokenizer,
                computed,
                self.samples,
                do_sample=True,
                temperature=self.temperature,
                top_k=0,
                top_p=1.0,
            )
            for place, text in enumerate(texts):
                i = chosen[place // self.samples]
                sampled[i] += self.score(text, self.held_out[i]) / self.samples
            if not self.measures_greedy:
                continue
            texts = self.completions(model, tokenizer, computed, 1, do_sample=False)
            for i, text in zip(chosen, texts, strict=True):
                greedy[i] = self.score(text, self.held_out[i])
        return sampled, greedy

    def compute_prompts(self, model, tokenizer, questions: list[Asked]) -> Computed:
        """What is computed once for all completions of these questions."""
        texts = [self.text_of(asked, tokenizer) for asked in questions]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
        ids = inputs["input_ids"]
        mask = inputs["attention_mask"]
        # All but the last token: `generate` computes that itself
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, :-1]
        known = model(
            ids[:, :-1],
            attention_mask=mask[:, :-1],
            position_ids=positions,
            logits_to_keep=1,
            use_cache=True,  # the trainer turns it off
        )
        return Computed(ids, mask, known.past_key_values)

    def completions(self, model, tokenizer, prompts: Computed, samples: int, **sampling: Any) -> list[str]:
        """So many completions of each prompt, those of a prompt in a row."""
        cache = copy.deepcopy(prompts.cache)
        cache.batch_repeat_interleave(samples)
        generated = model.generate(
            input_ids=prompts.ids.repeat_interleave(samples, dim=0),
            attention_mask=prompts.mask.repeat_interleave(samples, dim=0),
            past_key_values=cache,
            max_new_tokens=self.max_completion,
            **sampling,
        )
        return tokenizer.batch_decode(generated[:, prompts.ids.shape[1] :], skip_special_tokens=True)

    def _questions(self, seed: int, of_a_task: int, without: set[str]) -> list[Asked]:
        """So many different questions of each task, none of them with a prompt in `without`."""
        asked: list[Asked] = []
        seen = set(without)
        for kind, options in self.tasks.items():
            own: list[Asked] = []
            entries = reasoning_gym(kind, 1_000_000 * (seed + 1), **options)  # neighbouring seeds share questions
            while len(own) < of_a_task:
                entry = next(entries)
                prompt = self.prompt_of(kind, entry)
                if prompt not in seen:
                    seen.add(prompt)
                    own.append(Asked(prompt, kind, entry))
            asked += own
        return asked


def question(entry: dict[str, Any]) -> str:
    return f"{entry['question']}\nAnswer:"


@cache
def example(kind: str) -> str:
    entry = next(reasoning_gym(kind, 0))
    return f"{question(entry)} {entry['answer']}"


@cache
def scorer(kind: str) -> Any:
    return importlib.import_module("reasoning_gym").create_dataset(kind, size=1)


def score(completion: str, asked: Asked) -> float:
    """The library's score, in [0, 1]."""
    return float(scorer(asked.kind).score_answer(completion.strip(), asked.entry))
