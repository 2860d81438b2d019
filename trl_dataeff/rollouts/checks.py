"""What is most likely a mistake: rows of a dataset without a prompt, arguments of reward functions, and rewards."""

from __future__ import annotations

import inspect
import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset
from numpy.typing import NDArray
from transformers.utils import logging
from trl.data_utils import is_conversational

from trl_dataeff.utils import UserError, listed


logger = logging.get_logger(__name__)
# What TRL's `_calculate_rewards` passes to a reward function: these arguments, and the dataset's columns but these
# three. The last three arguments take the place of columns with their names.
PASSED_BY_TRL = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
NOT_PASSED_BY_TRL = ("prompt", "completion", "completion_ids")
REPLACED_BY_TRL = ("trainer_state", "log_extra", "log_metric")
FEWEST_BATCHES = 20  # generation batches before a run without any effective group is warned of
ADVICE = (
    "Check that the columns it reads hold what it expects. It may return None for completions that it does not apply "
    "to."
)


# Prompts


def first_row(dataset: Dataset) -> dict[str, Any]:
    """
    The first row of a dataset, with the columns that a transform makes. A transform that draws at random leaves the
    random states of Python, NumPy and torch as they were, so that a run reads the rows that it reads without this.
    """
    python_state = random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=()):
        row: dict[str, Any] = dataset[0]
    random.setstate(python_state)
    np.random.set_state(numpy_state)  # noqa: NPY002
    return row


def check_prompts(dataset: Dataset, given: str = "`train_dataset`") -> None:
    """
    Reject rows without a prompt: `None`, `""`, or a conversation whose last message is empty. Tokenization would fail
    on them in the middle of a run, or the model would answer nothing. Datasets with images are not checked, because an
    image needs no text.

    Args:
        dataset ([`~datasets.Dataset`]): its column `prompt` is checked, if it has one.
        given (`str`, *optional*): the dataset's name in the message.

    Raises:
        `UserError`: names the rows.
    """
    if "prompt" not in dataset.column_names:
        return  # a transform makes the prompts
    if {"image", "images"}.intersection(dataset.column_names):
        return  # images may be all of a prompt
    stored = dataset.data.column("prompt")
    if not without_prompt(stored).any():
        return  # fast; the stored rows include those that a selection left out
    prompts = dataset.with_format("arrow", columns=["prompt"])[:]["prompt"]
    rows = np.flatnonzero(without_prompt(prompts))
    if len(rows) == 0:
        return
    shown = ", ".join(map(str, rows[:5]))
    if len(rows) > 5:
        shown += ", ..."
    condition = "row['prompt']" if _is_text(prompts.type) else "row['prompt'] and row['prompt'][-1]['content']"
    raise UserError(
        f'{given} has {len(rows)} rows without a prompt (None, "", or a conversation whose last message is empty): '
        f"{shown}. Remove them: `dataset.filter(lambda row: {condition})`."
    )


def check_images(rows: Sequence[dict[str, Any]]) -> None:
    """
    Reject images beside prompts of plain text: TRL puts them into the messages of a conversation.

    Args:
        rows (`Sequence[dict]`): rows of a dataset whose prompts are all of one kind.

    Raises:
        `UserError`: names the column of the images.
    """
    columns = [name for name in ("images", "image") if name in rows[0]]
    if not columns or is_conversational(dict(rows[0])):
        return
    column = columns[0]
    # As in TRL, whose batch has no images only if each list of them is empty
    if column == "images" and all(row["images"] is not None and len(row["images"]) == 0 for row in rows):
        return
    raise UserError(
        f"The dataset has images (column `{column}`) beside prompts of plain text, such as {rows[0]['prompt']!r:.80}. "
        "TRL puts images into conversations: give each prompt as messages, `[{'role': 'user', 'content': ...}]`, "
        f"without applying the chat template, or remove the images: `dataset.remove_columns('{column}')`."
    )


def warn_of_raw_text(prompt: Any, tokenizer: Any, end_tokens: Sequence[int]) -> None:
    """
    Warn if an instruct model gets plain text: it would continue the text, and not answer as it does in a chat.

    A tokenizer of a base model may have a chat template too, but its texts do not end as the turns of a chat do.

    Args:
        prompt (`Any`): a prompt of the training dataset: text or a conversation.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): of the policy.
        end_tokens (`Sequence[int]`): tokens that end a completion.
    """
    template = str(tokenizer.chat_template or "")
    if not isinstance(prompt, str) or not template:
        return
    known_ends = [token for token in end_tokens if token is not None]
    ends = filter(None, tokenizer.convert_ids_to_tokens(known_ends))
    is_instruct = "eos_token" in template or any(end in template for end in ends)
    special_tokens = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    has_template_applied = any(token in prompt for token in special_tokens)
    if is_instruct and not has_template_applied:
        logger.warning(
            f"Prompts are plain text such as {prompt[:40]!r}, although the tokenizer has the chat template of an "
            "instruct model, which is not applied to text. Make prompts conversations, "
            "`[{'role': 'user', 'content': text}]` (`prompt_as_chat` of the command), if the model is to answer as "
            "in a chat."
        )


def without_prompt(column: pa.ChunkedArray) -> NDArray[np.bool_]:
    """Which prompts of a column of texts or conversations are missing or empty, `(n,)`."""
    chunks = [_is_empty(chunk) for chunk in column.chunks]
    return np.concatenate([np.zeros(0, dtype=bool), *chunks])


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _is_conversation(kind: pa.DataType) -> bool:
    if not _is_list(kind) or not pa.types.is_struct(kind.value_type):
        return False
    return bool(kind.value_type.get_field_index("content") >= 0)


def _is_empty(values: pa.Array) -> NDArray[np.bool_]:
    """Which values are null, an empty text or list, or a conversation whose last message is empty, `(n,)`."""
    if _is_list(values.type):
        found = pc.fill_null(pc.equal(pc.list_value_length(values), 0), True)
    elif _is_text(values.type):
        found = pc.fill_null(pc.equal(pc.binary_length(values), 0), True)
    else:
        found = values.is_null()
    empty: NDArray[np.bool_] = found.to_numpy(zero_copy_only=False)
    if _is_conversation(values.type) and not empty.all():
        ends = values.offsets.to_numpy()[1:]
        last_messages = values.values.take(pa.array(ends[~empty] - 1))
        empty[~empty] = _is_empty_message(last_messages)
    return empty


def _is_empty_message(messages: pa.Array) -> NDArray[np.bool_]:
    """Which messages have no content and come from neither tool nor assistant, `(n,)`."""
    empty = _is_empty(pc.struct_field(messages, "content"))
    if messages.type.get_field_index("role") < 0:
        return empty
    # A tool may answer nothing, and an answer may begin with nothing
    roles = pc.struct_field(messages, "role")
    may_be_empty = pc.is_in(roles, pa.array(["tool", "assistant"])).to_numpy(zero_copy_only=False)
    return empty & ~may_be_empty


# Reward functions


def check_reward_arguments(reward_funcs: Sequence[Any], row: Mapping[str, Any]) -> None:
    """
    Reject a reward function that does not take what TRL passes: its own arguments, and the columns of the dataset.

    Args:
        reward_funcs (`Sequence`): reward functions, and reward models, which are not checked.
        row (`Mapping`): a row of the training dataset.

    Raises:
        `UserError`: names the function.
    """
    columns = [name for name in row if name not in (*NOT_PASSED_BY_TRL, *REPLACED_BY_TRL)]
    arguments = dict.fromkeys([*PASSED_BY_TRL, *columns])
    given_twice = [name for name in columns if name in PASSED_BY_TRL]
    for function in reward_funcs:
        if isinstance(function, torch.nn.Module):
            continue
        try:
            # Of what TRL calls: a decorator may take more than the function that it wraps
            signature = inspect.signature(function, follow_wrapped=False)
        except ValueError:  # a callable without a signature
            continue
        try:
            if given_twice:
                raise TypeError(f"it would get two values for `{given_twice[0]}`, of TRL and of the dataset's column")
            signature.bind(**arguments)
        except TypeError as error:
            raise UserError(
                f"The reward function `{_name_of(function)}` cannot be called: {error}. TRL passes "
                f"{listed([*PASSED_BY_TRL, *columns])}. Rename a column or the argument, and let the function take "
                "`**kwargs`."
            ) from error


def warn_of_changing_rewards(reward_funcs: Sequence[Any]) -> None:
    """
    Warn of reward functions that take `trainer_state`, in a run that trains on groups of earlier batches: rewards that
    depend on the step would not be those of these groups any more.

    Args:
        reward_funcs (`Sequence`): reward functions, and reward models, which do not take it.
    """
    names = [_name_of(function) for function in reward_funcs if "trainer_state" in _parameters_of(function)]
    if names:
        verb = "takes" if len(names) == 1 else "take"
        logger.warning(
            f"{listed(names)} {verb} `trainer_state`. Groups of earlier batches keep the rewards that they got: if "
            "rewards change during the run, call `trainer.clear_replay_buffer()` when they do, or set `replay='off'` "
            "and `max_rollout_rounds=1`."
        )


def _parameters_of(function: Any) -> Collection[str]:
    """The names of a function's parameters; none if it has no signature."""
    try:
        return inspect.signature(function).parameters
    except ValueError:
        return ()


def _name_of(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


class NothingScoredError(ValueError):
    """No completion of a run has got a score, so none of its checkpoints has learned anything."""


class RewardChecks:
    """
    Finds rewards that are most likely a mistake, and warns of them once, on the main process.

    Args:
        names (`Sequence[str]`): names of the reward functions.
        max_unscored (`int`, *optional*): so many completions without any score, from the start of training, are an
            error; `None`: never.
        is_main_process (`bool`, *optional*, defaults to `True`): whether this process warns.
    """

    def __init__(self, names: Sequence[str], *, max_unscored: int | None = None, is_main_process: bool = True):
        self.names = list(names)
        self.max_unscored = max_unscored
        self.is_main_process = is_main_process
        self.scores = np.zeros(len(self.names), dtype=bool)  # functions that gave a score so far
        self.completions = 0  # checked so far
        self.batches = 0  # generation batches so far
        self.effective = False  # whether any group so far was effective
        self._warned: set[str] = set()

    def check(self, rewards: np.ndarray, weights: np.ndarray) -> None:
        """
        Check the rewards of a round.

        Args:
            rewards (`np.ndarray` of shape `(n, G, F)`): NaN where a function gave no score.
            weights (`np.ndarray` of shape `(F,)`): weights of the functions. An infinite reward with weight 0 is only
                logged.

        Raises:
            [`NothingScoredError`]: `max_unscored` completions have no score, and none before them has one.
        """
        infinite = np.isinf(rewards).any(axis=(0, 1)) & (weights != 0)
        if infinite.any():
            self._warn_once(
                "infinite",
                f"{self._listed(infinite)} returned an infinite reward. TRL gives its group no gradient, "
                "`scale_rewards='batch'` gives the whole batch none, and 'none' ruins the model. Return a finite "
                "number, or None for no score.",
            )
        self.completions += rewards.shape[0] * rewards.shape[1]
        self.scores |= ~np.isnan(rewards).all(axis=(0, 1))
        if self.scores.all():
            return
        names = self._listed(~self.scores)
        nothing_scored = not self.scores.any()
        if nothing_scored and self.max_unscored is not None and self.completions >= self.max_unscored:
            raise NothingScoredError(
                f"No reward function gave a score for any of the first {self.completions} completions: {names} "
                f"returned only None or NaN. {ADVICE} Then start the run again: nothing has been learned. If rewards "
                "begin later on purpose, set `max_unscored_completions=None`."
            )
        self._warn_once(
            names, f"{names} returned only None or NaN for the first {self.completions} completions. {ADVICE}"
        )

    def check_gradient(self, effective: bool, progress: float) -> None:
        """
        Enter a generation batch. Warns once if a tenth of the run has passed, and no group has carried a gradient.

        Args:
            effective (`bool`): whether a group of the batch was effective.
            progress (`float`): the share of the run that has passed, in [0, 1].
        """
        self.batches += 1
        self.effective |= effective
        if not self.effective and self.batches >= FEWEST_BATCHES and progress >= 0.1:
            self._warn_once(
                "gradient",
                f"No group of the first {self.batches} generation batches has carried a gradient: the rewards of each "
                "were equal. Look at completions (`log_completions=True`): the reward may reject right answers, or "
                "the prompts be too hard or too easy.",
            )

    def state_dict(self) -> list[Any]:
        """What was seen, for JSON."""
        return [self.scores.tolist(), self.completions, self.batches, self.effective]

    def load_state_dict(self, state: list[Any]) -> None:
        """Restore what [`state_dict`] returned; with another number of functions, their completions count anew."""
        scores, completions, self.batches, self.effective = state
        if len(scores) == len(self.names):
            self.scores = np.array(scores, dtype=bool)
            self.completions = completions

    def _listed(self, chosen: np.ndarray) -> str:
        names = [name for name, is_chosen in zip(self.names, chosen, strict=True) if is_chosen]
        return listed(names)

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self._warned and self.is_main_process:
            logger.warning(message)
        self._warned.add(key)
