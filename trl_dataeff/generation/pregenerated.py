"""Groups that were generated and scored before, handed to TRL's pass over a batch as if it had made them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from trl import GRPOTrainer

from trl_dataeff.generation.recorder import TrlGeneration
from trl_dataeff.generation.trl_state import temporarily
from trl_dataeff.rollouts.group import RolloutGroup


class PregeneratedGroups:
    """
    Groups that exist already, in the form in which TRL's pass asks for completions and rewards.

    Args:
        groups (`Sequence[RolloutGroup]`): the groups that this process trains on, with their rollouts.
        rewards (`np.ndarray` of shape `(all groups * G, F)`): rewards of all processes' groups, in the order of ranks.
    """

    def __init__(self, groups: Sequence[RolloutGroup], rewards: np.ndarray):
        self.rollouts = [group.held_rollouts for group in groups]
        self.rewards = rewards

    def methods(
        self, trainer: GRPOTrainer, trls_generate: Callable[[list[Any]], tuple[Any, ...]]
    ) -> dict[str, Callable[..., Any]]:
        """
        What takes the place of a trainer's methods while TRL's pass runs. A subclass's own methods have run when the
        groups were generated; they do not run again.

        Args:
            trainer ([`~trl.GRPOTrainer`]): the trainer.
            trls_generate (`Callable`): TRL's `_generate`.
        """
        rewards = torch.from_numpy(self.rewards).to(trainer.accelerator.device)
        return {
            "_generate": partial(self.generate, trainer, trls_generate),
            "_calculate_rewards": lambda *args: rewards,
        }

    def generate(
        self, trainer: GRPOTrainer, trls_generate: Callable[[list[Any]], tuple[Any, ...]], prompts: list[Any]
    ) -> TrlGeneration:
        """
        Let TRL's `_generate` return these completions: they enter through its `rollout_func` slot.

        Args:
            trainer ([`~trl.GRPOTrainer`]): whose method it is.
            trls_generate (`Callable`): TRL's `_generate`.
            prompts (`list`): prompts of this process's rows, of which only the images are read.
        """
        # Nothing is generated: no tool is called, and vLLM needs no new weights
        state: dict[str, Any] = {"rollout_func": self.rollout_func, "tools": []}
        if trainer.use_vllm:
            state["_last_loaded_step"] = trainer.state.global_step
        completions = self.completions
        # The prompts are tokenized already. As plain text they need no parsing of messages
        placeholders = [""] * len(completions)
        with temporarily(trainer, **state):
            generated = TrlGeneration(*trls_generate(placeholders))
        # For prompts of plain text TRL returns completions as text, and no images: the stored ones may be messages
        return generated._replace(
            completions=completions, images=images_of(prompts), extra_fields=self._columns("extra_fields")
        )

    @property
    def completions(self) -> list[Any]:
        return [completion for rollouts in self.rollouts for completion in rollouts.completions]

    def rollout_func(self, prompts: list[Any], trainer: Any = None) -> dict[str, Any]:
        """
        What TRL's `rollout_func` returns: token ids, and the sampler's log-probs and tool masks, where there are any.
        """
        prompt_ids = [rollouts.prompt_tokens.tolist() for rollouts in self.rollouts for _ in range(len(rollouts))]
        completion_ids = [tokens.tolist() for rollouts in self.rollouts for tokens in rollouts.completion_tokens]
        output: dict[str, Any] = {
            "prompt_ids": prompt_ids,
            "completion_ids": completion_ids,
            "logprobs": self._by_completion("sampling_logps", default=float("nan")),
        }
        tool_masks = self._by_completion("tool_masks", default=1)
        if tool_masks is not None:
            output["env_mask"] = tool_masks
        return output

    def _by_completion(self, name: str, default: float) -> list[list[Any]] | None:
        """
        The arrays of one field as lists, one per completion; `default` for groups that lack it; `None` if all do.
        """
        if all(getattr(rollouts, name) is None for rollouts in self.rollouts):
            return None
        lists = []
        for rollouts in self.rollouts:
            arrays = getattr(rollouts, name)
            if arrays is None:
                lists += [[default] * len(tokens) for tokens in rollouts.completion_tokens]
            else:
                lists += [array.tolist() for array in arrays]
        return lists

    @property
    def logged(self) -> dict[str, list[Any]]:
        """
        The columns that reward functions logged, one entry per completion; `None` where a group lacks the column.
        """
        return self._columns("logged")

    def _columns(self, field: str) -> dict[str, list[Any]]:
        """
        The columns of one field, one entry per completion; `None` where a group lacks the column.
        """
        of_groups: list[dict[str, list[Any]]] = [getattr(rollouts, field) for rollouts in self.rollouts]
        columns: dict[str, list[Any]] = {}
        for name in dict.fromkeys(name for own in of_groups for name in own):
            values: list[Any] = []
            for rollouts, own in zip(self.rollouts, of_groups, strict=True):
                values += own.get(name, [None] * len(rollouts))
            columns[name] = values
        return columns


def images_of(prompts: Sequence[Any]) -> list[list[Any] | None] | None:
    """The images in the messages of each prompt, `None` for a prompt without; `None` if no prompt has any."""
    images = [_images_in(prompt) or None for prompt in prompts]
    return images if any(images) else None


def _images_in(prompt: Any) -> list[Any]:
    """The images in a prompt's messages; none in a text."""
    if isinstance(prompt, str):
        return []
    images = []
    for message in prompt:
        content = message.get("content")
        if isinstance(content, list):
            images += [part["image"] for part in content if part.get("type") == "image"]
    return images
