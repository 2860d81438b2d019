"""Rounds of rollouts: what TRL generates and scores for a trainer is recorded, and cut into groups."""

from __future__ import annotations

import copy
import inspect
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from trl import GRPOTrainer
from trl.data_utils import is_conversational, prepare_multimodal_messages

from trl_dataeff.generation.trl_state import shadowed
from trl_dataeff.rollouts.checks import check_images
from trl_dataeff.rollouts.distributed import Processes
from trl_dataeff.rollouts.group import Rollouts


class TrlGeneration(NamedTuple):
    """What TRL's `_generate` returns, in its order. One entry per completion."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    tool_mask: list[list[int]] | None
    completions: list[Any]
    logprobs: list[list[float | None]] | None
    extra_fields: dict[str, Any]
    images: list[Any] | None
    tool_images: list[Any]


@dataclass(frozen=True)
class GeneratedRound:
    """
    What one round of rollouts gave, with the rewards of all processes in the order of ranks.

    Attributes:
        rewards: float32 of shape `(n * G, F)`, one column per reward function, NaN where it gave no score.
        lengths: tokens of the model in each completion, int32 of shape `(n * G,)`.
        truncated: whether each completion was cut off, bool of shape `(n * G,)`.
        seconds: that generation and scoring took, on this process.
        rollouts: those that this process holds, one per prompt; empty if they are not kept.
    """

    rewards: np.ndarray
    lengths: np.ndarray
    truncated: np.ndarray
    seconds: float = 0.0
    rollouts: Sequence[Rollouts] = ()


class RoundRecorder:
    """
    Records what a trainer generates and scores: lengths, rewards, and the time that they took. What passes through it
    stays as it is.

    Args:
        end_tokens (`set[int]`): tokens that end a completion; one whose last token is another was cut off.
    """

    def __init__(self, end_tokens: set[int]):
        self.end_tokens = end_tokens
        self.lengths: list[int] = []
        self.truncated: list[bool] = []
        self.rewards: torch.Tensor | None = None
        self.seconds = 0.0
        self.rollouts: Sequence[Rollouts] = ()  # of this process, one per prompt, if they are kept

    @contextmanager
    def recording(self, trainer: GRPOTrainer) -> Iterator[None]:
        """Within this context, what a trainer's methods return is recorded, those of subclasses included."""
        generate = partial(self._generate, trainer._generate)
        calculate_rewards = partial(self._calculate_rewards, trainer._calculate_rewards)
        with shadowed(trainer, _generate=generate, _calculate_rewards=calculate_rewards):
            yield

    def _generate(self, generate: Callable[..., tuple[Any, ...]], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        started = time.perf_counter()
        generated = generate(*args, **kwargs)
        _, completion_ids, tool_mask, *_ = generated
        if tool_mask is None:
            self.lengths = [len(ids) for ids in completion_ids]
        else:
            self.lengths = [sum(mask) for mask in tool_mask]
        self.truncated = [len(ids) == 0 or int(ids[-1]) not in self.end_tokens for ids in completion_ids]
        self.seconds += time.perf_counter() - started
        return generated

    def _calculate_rewards(self, calculate: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        started = time.perf_counter()
        try:
            self.rewards = calculate(*args, **kwargs)
        except Exception as error:
            if _is_about_returned_rewards(error):
                error.add_note("A reward function must return a list with a number or None for each completion.")
            raise
        self.seconds += time.perf_counter() - started
        return self.rewards

    def complete(self, processes: Processes) -> GeneratedRound | None:
        """
        The round of all processes. A collective.

        Args:
            processes ([`Processes`]): of the run.

        Returns:
            [`GeneratedRound`], *optional*: `None` if a subclass generates and scores without these methods.
        """
        if self.rewards is None or not self.lengths:
            return None
        own = torch.tensor([self.lengths, self.truncated], dtype=torch.int64, device=processes.device).T.contiguous()
        lengths, truncated = processes.gather(own).cpu().numpy().T
        return GeneratedRound(
            rewards=self.rewards.float().cpu().numpy(),
            lengths=lengths.astype(np.int32),
            truncated=truncated.astype(bool),
            seconds=self.seconds,
            rollouts=self.rollouts,
        )


def _is_about_returned_rewards(error: Exception) -> bool:
    """
    Whether an error is raised by TRL's own lines over what a reward function returned: not within that function, and
    not by its call, whose errors speak of arguments.
    """
    innermost_frame, _ = list(traceback.walk_tb(error.__traceback__))[-1]
    is_in_trl = innermost_frame.f_code.co_filename == inspect.getfile(GRPOTrainer)
    return is_in_trl and "argument" not in str(error)


def generate_rollouts(trainer: GRPOTrainer, rows: list[dict[str, Any]]) -> list[Rollouts]:
    """
    Generate and score rollouts outside of TRL's pass over a batch, as that pass does.

    Args:
        trainer ([`~trl.GRPOTrainer`]): whose `_generate` and `_calculate_rewards` are called.
        rows (`list[dict]`): rows of the dataset, G in succession for each prompt. They get the fields that a
            `rollout_func` returns.

    Returns:
        `list[Rollouts]`: one per prompt.
    """
    prompts = prompts_with_images(rows)
    if trainer.tools:
        _offer_tools(trainer, len(rows))
    generated = TrlGeneration(*trainer._generate(prompts))
    corrects_sampler = trainer.use_vllm and trainer.vllm_importance_sampling_correction
    masks_off_policy = trainer.off_policy_mask_threshold is not None
    if not (corrects_sampler or masks_off_policy):
        # Only these two options make TRL's loss read the sampler's log-probs. Without them its ratio divides by the
        # policy's own log-probs, and so does the correction of rollouts that are used again
        generated = generated._replace(logprobs=None)
    extra_fields = {name: _by_row(values, len(rows)) for name, values in generated.extra_fields.items()}
    for i, row in enumerate(rows):
        row.update({name: values[i] for name, values in extra_fields.items() if i < len(values)})
    # A reward function may change the ids that it gets, but not those that are trained on
    completion_ids = copy.deepcopy(generated.completion_ids)
    trainer._calculate_rewards(rows, prompts, generated.completions, completion_ids)
    logged = dict(trainer._pending_extra_logs)
    trainer._pending_extra_logs.clear()
    by_completion = {name: values for name, values in extra_fields.items() if len(values) >= len(rows)}
    generated = generated._replace(extra_fields=by_completion)
    return split_rollouts(generated, cast(int, trainer.num_generations), logged)


def _offer_tools(trainer: GRPOTrainer, num_rows: int) -> None:
    """Give each completion the trainer's tools, as TRL does for the rows of its pass."""
    synchronous = {}
    asynchronous = {}
    for tool in trainer._standalone_tools:
        if inspect.iscoroutinefunction(tool):
            asynchronous[tool.__name__] = tool
        else:
            synchronous[tool.__name__] = tool
    trainer._sync_tool_dicts = [synchronous] * num_rows
    trainer._async_tool_dicts = [asynchronous] * num_rows


def _by_row(values: Any, num_rows: int) -> list[Any]:
    """A field that a `rollout_func` returned beside completions: a list is by row, anything else is for all rows."""
    return values if isinstance(values, list) else [values] * num_rows


def split_rollouts(generated: TrlGeneration, group_size: int, logged: dict[str, list[Any]]) -> list[Rollouts]:
    """
    Cut what TRL's `_generate` returned into groups.

    Args:
        generated ([`TrlGeneration`]): `group_size` completions in a row for each prompt.
        group_size (`int`): G, completions per group.
        logged (`dict[str, list]`): columns that reward functions logged.

    Returns:
        `list[Rollouts]`: one per prompt.

    Raises:
        `ValueError`: the completions of a group do not answer one and the same prompt.
    """
    n = len(generated.completion_ids)
    # Of a column that several functions logged, the last n values count, as in TRL; others are not by completion
    columns = {name: values[-n:] for name, values in logged.items() if values and len(values) % n == 0}
    return [_rollouts_of(generated, slice(start, start + group_size), columns) for start in range(0, n, group_size)]


def _rollouts_of(generated: TrlGeneration, rows: slice, columns: dict[str, list[Any]]) -> Rollouts:
    """Those completions of one group."""
    prompts = [list(ids) for ids in generated.prompt_ids[rows]]
    if any(prompt != prompts[0] for prompt in prompts):
        raise ValueError(
            "The completions of a group have different `prompt_ids`: let `rollout_func` return the same ones, or set "
            "`selection='uniform'`, `replay='off'` and `max_rollout_rounds=1`."
        )
    tool_masks = None
    if generated.tool_mask is not None:
        tool_masks = [np.array(mask, dtype=np.int8) for mask in generated.tool_mask[rows]]
    sampling_logps = None
    if generated.logprobs is not None:
        sampling_logps = [_with_nan(logps) for logps in generated.logprobs[rows]]
    return Rollouts(
        prompt_tokens=np.array(prompts[0], dtype=np.int32),
        completion_tokens=[np.array(ids, dtype=np.int32) for ids in generated.completion_ids[rows]],
        completions=generated.completions[rows],
        tool_masks=tool_masks,
        sampling_logps=sampling_logps,
        logged={name: values[rows] for name, values in columns.items()},
        extra_fields={name: values[rows] for name, values in generated.extra_fields.items()},
    )


def _with_nan(logps: list[float | None]) -> np.ndarray:
    """A sampler's log-probs, float32 `(T,)`, NaN where it gave none."""
    return np.array([np.nan if logp is None else logp for logp in logps], dtype=np.float32)


def prompts_with_images(rows: Sequence[dict[str, Any]]) -> list[Any]:
    """
    The prompts of a dataset's rows, with the images of the columns `image` or `images` in the messages of
    conversations.

    Raises:
        `UserError`: there are images, and prompts are plain text.
    """
    prompts = [row["prompt"] for row in rows]
    if not rows:
        return prompts
    check_images(rows)
    if not is_conversational(rows[0]):
        return prompts
    if "images" in rows[0]:
        images = [row["images"] for row in rows]
    elif "image" in rows[0]:
        images = [None if row["image"] is None else [row["image"]] for row in rows]
    else:
        return prompts
    if all(own == [] for own in images):
        return prompts
    return [prepare_multimodal_messages(prompt, own) for prompt, own in zip(prompts, images, strict=True)]
