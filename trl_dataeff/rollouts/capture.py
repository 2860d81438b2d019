"""
What passes through TRL's methods while rollouts are generated, and what else is needed of its trainer's private parts. Only this
file and `trainer.py` use TRL's private names; `compat.py` checks that they are there.
"""

from __future__ import annotations

import copy
import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from transformers import PreTrainedModel
from trl import GRPOConfig, GRPOTrainer
from trl.data_utils import is_conversational, prepare_multimodal_messages
from trl.models.utils import disable_gradient_checkpointing

from trl_dataeff.rollouts.distributed import Processes, all_gather
from trl_dataeff.rollouts.group import RolloutGroup, Rollouts
from trl_dataeff.rollouts.playback import Playback
from trl_dataeff.rollouts.skipping import OVER_BATCH, OVER_ROWS, OVER_TOKENS


class Generated(NamedTuple):
    """What TRL's `_generate` returns, in its order (`compat.RETURNED` has their number). One entry per completion."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    tool_mask: list[list[int]] | None
    completions: list[Any]
    logprobs: list[list[float | None]] | None
    extra_fields: dict[str, Any]
    images: list[Any] | None
    tool_images: list[Any]


@dataclass
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


@dataclass
class Recording:
    """
    What passes through TRL's `_generate` and `_calculate_rewards` on this process while a round is generated: see
    [`GeneratedRound`]. A completion whose last token is not in `ends` was cut off.
    """

    ends: set[int]
    lengths: list[int] = field(default_factory=list)
    truncated: list[bool] = field(default_factory=list)
    rewards: torch.Tensor | None = None
    seconds: float = 0.0

    def generate(self, generate: Callable[[list[Any]], tuple[Any, ...]], prompts: list[Any]) -> Generated:
        started = time.perf_counter()
        generated = Generated(*generate(prompts))
        completions, tool_mask = generated.completion_ids, generated.tool_mask
        self.lengths = [len(ids) for ids in completions] if tool_mask is None else [sum(mask) for mask in tool_mask]
        self.truncated = [int(ids[-1]) not in self.ends for ids in completions]
        self.seconds += time.perf_counter() - started
        return generated

    def score(self, calculate_rewards: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        started = time.perf_counter()
        try:
            self.rewards = calculate_rewards(*args)
        except (TypeError, ValueError) as error:
            error.add_note("A reward function must return a list with a number or None for each completion.")
            raise
        self.seconds += time.perf_counter() - started
        return self.rewards

    def complete(self, processes: Processes, rollouts: Sequence[Rollouts] = ()) -> GeneratedRound:
        """The round of all processes, with this process's `rollouts`, one per prompt, if they are kept. A collective."""
        if self.rewards is None or (rollouts and not self.lengths):
            raise RuntimeError("A subclass has to call `super()` in its `_generate` and in its `_calculate_rewards`.")
        own = torch.tensor([self.lengths, self.truncated], device=processes.device)
        lengths, truncated = processes.gather(own.T.contiguous()).cpu().numpy().T
        rewards = self.rewards.float().cpu().numpy()
        return GeneratedRound(rewards, lengths.astype(np.int32), truncated.astype(bool), self.seconds, rollouts)


def split_rollouts(generated: Generated, group_size: int, logged: dict[str, list[Any]]) -> list[Rollouts]:
    """
    Cut what TRL's `_generate` returned (G completions in a row per prompt) into groups. `logged` has the columns that reward
    functions logged. Raises a `ValueError` if the completions of a group do not answer one and the same prompt.
    """
    prompt_ids, completion_ids, logprobs = generated.prompt_ids, generated.completion_ids, generated.logprobs
    tool_mask, completions = generated.tool_mask, generated.completions
    n = len(completion_ids)
    result = []
    for start in range(0, n, group_size):
        rows = range(start, start + group_size)
        if any(list(prompt_ids[i]) != list(prompt_ids[start]) for i in rows):
            raise ValueError(
                "The completions of a group have different `prompt_ids`: let `rollout_func` return the same ones, or set "
                "`selection='uniform'`, `replay='off'`, `max_rollout_rounds=1` and `skip_zero_advantage=False`."
            )
        result.append(
            Rollouts(
                prompt_tokens=np.array(prompt_ids[start], dtype=np.int32),
                completion_tokens=[np.array(completion_ids[i], dtype=np.int32) for i in rows],
                completions=[completions[i] for i in rows],
                tool_masks=None if tool_mask is None else [np.array(tool_mask[i], dtype=np.int8) for i in rows],
                sampling_logps=None
                if logprobs is None
                else [np.array([np.nan if p is None else p for p in logprobs[i]], dtype=np.float32) for i in rows],
                # Of a column that several functions logged, the last values, as in TRL; without one for each completion, none
                logged={name: [v[i - n] for i in rows] for name, v in logged.items() if v and not len(v) % n},
            )
        )
    return result


def roll_out(trainer: GRPOTrainer, rows: list[dict[str, Any]]) -> list[Rollouts]:
    """Generate and score a completion for each of the dataset's `rows` (G in a row of a prompt), outside of TRL's pass."""
    prompts = prompts_with_images(rows)
    if trainer.tools:  # TRL prepares these for the rows of its pass
        tools = {tool.__name__: tool for tool in trainer._standalone_tools}
        asynchronous = {name: tool for name, tool in tools.items() if inspect.iscoroutinefunction(tool)}
        synchronous = {name: tool for name, tool in tools.items() if name not in asynchronous}
        trainer._sync_tool_dicts, trainer._async_tool_dicts = [synchronous] * len(rows), [asynchronous] * len(rows)
    generated = Generated(*trainer._generate(prompts))
    corrects = trainer.use_vllm and trainer.vllm_importance_sampling_correction
    if not corrects and trainer.off_policy_mask_threshold is None:
        generated = generated._replace(logprobs=None)  # TRL's loss takes the policy as the sampler, too
    # Of a `rollout_func`: a list is by row, anything else is for all
    for name, values in generated.extra_fields.items():
        for row, value in zip(rows, values if isinstance(values, list) else [values] * len(rows), strict=False):
            row[name] = value
    # A reward function may change the ids that it gets, but not those that are trained on
    trainer._calculate_rewards(rows, prompts, generated.completions, copy.deepcopy(generated.completion_ids))
    logged = dict(trainer._pending_extra_logs)
    trainer._pending_extra_logs.clear()
    return split_rollouts(generated, cast(int, trainer.num_generations), logged)


def play_back(
    trainer: GRPOTrainer, playback: Playback, generate: Callable[[list[Any]], tuple[Any, ...]], prompts: list[Any]
) -> Generated:
    """TRL's own `_generate` on completions that exist already: they enter through its `rollout_func` slot."""
    # Nothing is generated: no tool is called, and vLLM needs no new weights
    fields: dict[str, Any] = {"rollout_func": playback.rollout_func, "tools": []}
    fields |= {"_last_loaded_step": trainer.state.global_step} if trainer.use_vllm else {}
    with temporarily(trainer, **fields):
        # The prompts are tokenized already. As plain text they need no parsing of messages
        generated = Generated(*generate([""] * len(playback.completions)))
    return generated._replace(completions=playback.completions, images=images_of(prompts))


@contextmanager
def temporarily(obj: Any, **attributes: Any) -> Iterator[None]:
    """Sets attributes of an object within this context."""
    former = {name: getattr(obj, name) for name in attributes}
    obj.__dict__.update(attributes)
    try:
        yield
    finally:
        obj.__dict__.update(former)


def prompts_with_images(rows: Sequence[dict[str, Any]]) -> list[Any]:
    """The prompts of a dataset's rows, with the images of the columns `image` or `images` in the messages of conversations."""
    prompts = [row["prompt"] for row in rows]
    if not rows or not {"image", "images"} & rows[0].keys() or not is_conversational(rows[0]):
        return prompts
    images = [row["images"] if "images" in row else None if row["image"] is None else [row["image"]] for row in rows]
    if all(own == [] for own in images):
        return prompts
    return [prepare_multimodal_messages(p, own) for p, own in zip(prompts, images, strict=True)]


def images_of(prompts: Sequence[Any]) -> list[list[Any] | None] | None:
    """The images in the messages of each prompt, `None` for a prompt without; `None` if no prompt has any."""
    images = []
    for prompt in prompts:
        contents = [] if isinstance(prompt, str) else [message.get("content") for message in prompt]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        images.append([part["image"] for part in parts if part.get("type") == "image"] or None)
    return images if any(images) else None


@torch.no_grad()
def forward(trainer: GRPOTrainer, input_ids: torch.Tensor, attention_mask: torch.Tensor, length: int) -> torch.Tensor:
    """Log-probs of the last tokens, `(B, length)`, under the present policy, by TRL's forward pass over `(B, P + length)`."""
    options = cast("dict[str, Any] | None", trainer.args.gradient_checkpointing_kwargs)
    with disable_gradient_checkpointing(cast("PreTrainedModel", trainer.model), options):
        logps: torch.Tensor = trainer._get_per_token_logps_and_entropies(
            trainer.model, input_ids, attention_mask, length, batch_size=trainer.args.per_device_train_batch_size
        )[0]
    return logps


def logps_of_pass(
    trainer: GRPOTrainer, group: RolloutGroup, make_batch: Callable[[], dict[str, Any]], world_size: int
) -> list[np.ndarray]:
    """
    Log-probs of the completions of a group of this process under the present policy, `(T_i,)` each, where TRL prepares
    prompts in its pass over a batch, as it does with images. `make_batch` makes such a pass; it leaves no logs. A collective.
    """
    assert group.rollouts is not None
    rewards = np.zeros((world_size * len(group.rewards), group.rewards.shape[1]), dtype=np.float32)
    # TRL computes old log-probs if a generation batch serves more than one optimizer step
    fields: dict[str, Any] = {"num_iterations": trainer.args.gradient_accumulation_steps + 1, "beta": 0.0}
    fields |= {"_metrics": {"train": defaultdict(list)}, "_logs": copy.deepcopy(trainer._logs)}
    tokens_seen = trainer.state.num_input_tokens_seen
    with temporarily(trainer, _playback=Playback([group], rewards), **fields):
        logps = make_batch()["old_per_token_logps"].float().cpu().numpy()
    trainer.state.num_input_tokens_seen = tokens_seen
    return [row[: len(tokens)].copy() for row, tokens in zip(logps, group.rollouts.completion_tokens, strict=True)]


# The state of TRL's training loop


def forget_last_run(trainer: GRPOTrainer) -> None:
    """Clear what TRL's trainer keeps from one call of `train` to the next."""
    trainer._step, trainer._buffered_inputs = 0, None  # it would continue within the last run's generation batch
    for kept in (trainer._metrics["train"], trainer._pending_metrics, trainer._pending_extra_logs):
        kept.clear()
    if trainer.use_vllm:
        trainer._last_loaded_step = -1  # it would take the weights of the last run for those of its first step


def loop_state(trainer: GRPOTrainer) -> dict[str, Any]:
    """TRL's micro-step, and what was summed up since the last log, for JSON. A collective."""
    return {
        "micro_step": trainer._step,
        "last_logged": trainer._globalstep_last_logged,
        "loss": all_gather(float(trainer._tr_loss)),
        "metrics": {name: list(map(float, values)) for name, values in trainer._metrics["train"].items()},
    }


def unused_batch(trainer: GRPOTrainer) -> list[dict[str, Any]] | None:
    """The micro-batches of the present generation batch; `None` if all of them have been trained on."""
    steps = cast(int, cast("GRPOConfig", trainer.args).steps_per_generation)  # the config fills it in
    used_up = trainer._step % (steps * trainer.num_iterations) == 0
    return None if used_up else trainer._buffered_inputs


def continue_interval(trainer: GRPOTrainer, loop: dict[str, Any], processes: Processes) -> None:
    """Continue the logging interval of [`loop_state`]. Call it when the Trainer has begun training: it begins one of its own."""
    losses, mean = loop["loss"], sum(loop["loss"]) / len(loop["loss"])
    own = losses[processes.rank] if len(losses) == processes.world_size else mean
    trainer._tr_loss = torch.tensor(own, device=trainer.args.device)
    trainer._total_loss_scalar = -mean  # `train_loss` is about the steps of this call of `train` alone
    trainer._globalstep_last_logged = loop["last_logged"]
    trainer._metrics["train"].update(loop["metrics"])


def has_tool_images(trainer: GRPOTrainer) -> bool:
    """Whether tools may answer a trainer's model with images."""
    return trainer._is_vlm and bool(trainer.tools)


def can_skip_rows(trainer: GRPOTrainer) -> bool:
    """Whether rows with an advantage of 0 have no gradient in a trainer's loss, so that skipping them is exact."""
    return (
        trainer.beta == 0.0
        and not trainer._entropy_bonus_enabled
        and not trainer.aux_loss_enabled  # of the router of a mixture of experts
        and trainer.top_entropy_quantile == 1.0
        and trainer.loss_type in OVER_ROWS + OVER_TOKENS + OVER_BATCH
    )
