"""Prompts that leave no room for a completion in the model's context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from transformers.utils import logging

from trl_dataeff.rollouts.distributed import all_gather


if TYPE_CHECKING:
    from trl import GRPOConfig

logger = logging.get_logger(__name__)


class ContextCheck:
    """
    Finds prompts that leave no room for a completion in the model's context. Warns once.

    Args:
        limits (`list`): tokens that the model takes, by several settings; `None` where that is not known.
        max_completion_length (`int`): tokens that a completion may take.
        rejects (`bool`, *optional*, defaults to `False`): whether generation fails if there is no room for a single token.
    """

    def __init__(self, limits: Sequence[int | None], max_completion_length: int, rejects: bool = False):
        self.context = min((limit for limit in limits if limit is not None), default=None)
        self.max_completion_length = max_completion_length
        self.rejects = rejects
        self._warned = False

    @classmethod
    def of(cls, model_config: Any, args: GRPOConfig, vllm: Any = None) -> ContextCheck:
        """The check for a model's configuration and TRL's, and for TRL's `vllm_generation` if there is one."""
        length = cast(int, args.max_completion_length)
        # With scaled positions (YaRN) vLLM takes more than the model's configuration says
        if vllm is not None and args.vllm_mode == "colocate":
            return cls([vllm.llm.llm_engine.model_config.max_model_len], length, rejects=True)
        context = getattr(model_config.get_text_config(), "max_position_embeddings", None)
        return cls([context, args.vllm_max_model_length], length)

    def overlong(self, prompt_lengths: Sequence[int]) -> list[bool]:
        """For prompts of so many tokens, whether each leaves too little room."""
        if self.context is None:
            return [False] * len(prompt_lengths)
        overlong = [length + self.max_completion_length > self.context for length in prompt_lengths]
        if any(overlong) and not self._warned:
            self._warned = True
            logger.warning(
                f"A prompt of {max(prompt_lengths)} tokens leaves no room for `max_completion_length` "
                f"({self.max_completion_length}) in the model's context of {self.context} tokens: its completions are cut "
                "off or meaningless. Remove such prompts from the dataset. This warning is shown once; "
                "`dataeff/overlong_prompts` counts all."
            )
        return overlong

    def check_room(self, prompts: Sequence[Any], prompt_lengths: Sequence[int], world_size: int = 1) -> None:
        """
        Raise a `ValueError` if prompts of so many tokens leave no room for a single one, and the engine `rejects` these. All
        processes raise that of the first that has one: else they would wait for it.
        """
        if not self.rejects:
            return
        problem = self._room_problem(prompts, prompt_lengths)
        for found in all_gather(problem) if world_size > 1 else [problem]:
            if found is not None:
                raise ValueError(found)

    def _room_problem(self, prompts: Sequence[Any], prompt_lengths: Sequence[int]) -> str | None:
        limit = self.context
        too_long = [i for i, length in enumerate(prompt_lengths) if limit is not None and length >= limit]
        if not too_long:
            return None
        first = too_long[0]
        return (
            f"{len(too_long)} of {len(prompts)} prompts are too long for vLLM: the first has {prompt_lengths[first]} tokens, "
            f"and the model takes {limit}, completion included (`vllm_max_model_length`, or else the model's own limit). "
            "Remove such prompts from the dataset, or raise `vllm_max_model_length`. It begins: "
            f"{str(prompts[first])[:80]!r}"
        )
