"""The rewards, and the tally of effective groups that is kept where they are computed."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable


#: Below this share of right characters a completion is worth nothing, so that groups can be all zero
SHARE_FROM = 0.7
NOISE = 0.1  # share of rewards that are wrong


def exact_match(completions: list[str], answer: list[str], **columns) -> list[float]:
    """1 for the right answer, else 0."""
    return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]


def right_characters(completions: list[str], answer: list[str], **columns) -> list[float]:
    """Share of characters that are right and in their place, in [0, 1]; 0 below `SHARE_FROM`."""
    rewards = []
    for completion, right in zip(completions, answer, strict=True):
        hits = sum(a == b for a, b in zip(completion, right, strict=False))
        share = hits / max(len(completion), len(right))
        rewards.append(share if share >= SHARE_FROM else 0.0)
    return rewards


def answer_and_length(completions: list[str], answer: list[str], **columns) -> list[float]:
    """Correctness and format: 0.5 for as many characters as the right answer has, and 0.5 more if they are right."""
    rewards = []
    for completion, right in zip(completions, answer, strict=True):
        has_length = len(completion) == len(right)
        is_right = completion == right
        rewards.append(0.5 * has_length + 0.5 * is_right)
    return rewards


def noisy_match(completions: list[str], answer: list[str], **columns) -> list[float]:
    """The opposite of [`exact_match`] with probability `NOISE`, else the same. Drawn from the run's random state."""
    rewards = []
    for reward in exact_match(completions=completions, answer=answer):
        is_wrong = random.random() < NOISE
        rewards.append(1 - reward if is_wrong else reward)
    return rewards


class Tally:
    """Calls a reward, and counts the groups of equal prompts and the effective ones among them.

    It sees every group that is *generated*, whatever the trainer does with it afterwards.

    Args:
        reward (`Callable`): A reward function in TRL's form.
        group_size (`int`): Completions of a group.
    """

    def __init__(self, reward: Callable[..., list[float]], group_size: int):
        self.reward = reward
        self.group_size = group_size
        self.groups = 0
        self.effective = 0  # of which the rewards differ
        self.__name__ = reward.__name__  # TRL logs a reward under it

    def __call__(self, prompts, completions, **columns) -> list[float]:
        rewards = self.reward(completions=completions, **columns)
        by_prompt = defaultdict(list)
        for prompt, reward in zip(prompts, rewards, strict=True):
            by_prompt[prompt].append(reward)
        for values in by_prompt.values():
            # A prompt may have several groups
            for start in range(0, len(values), self.group_size):
                group = values[start : start + self.group_size]
                self.groups += 1
                if min(group) != max(group):
                    self.effective += 1
        return rewards
