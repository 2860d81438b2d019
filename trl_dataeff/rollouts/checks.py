"""What is most likely a mistake: rows of a dataset without a prompt, and arguments of reward functions."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset
from numpy.typing import NDArray

from trl_dataeff.utils import UserError, listed


PASSED_BY_TRL = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
NOT_PASSED_BY_TRL = ("prompt", "completion", "completion_ids")  # of the dataset's columns


def check_prompts(dataset: Dataset, given: str = "`train_dataset`") -> None:
    """
    Raise a [`UserError`] that names rows without a prompt: `None`, `""`, or a conversation whose last message is empty.
    Tokenization would fail on them in the middle of a run, or the model would answer nothing. Datasets with images are not
    checked, because an image needs no text.
    """
    if "prompt" not in dataset.column_names or {"image", "images"}.intersection(dataset.column_names):
        return  # a transform makes the prompts, or images may be all of them
    if not without_prompt(dataset.data.column("prompt")).any():
        return  # fast; the stored rows include those that a selection left out
    prompts = dataset.with_format("arrow", columns=["prompt"])[:]["prompt"]
    rows = np.flatnonzero(without_prompt(prompts))
    if len(rows) == 0:
        return
    shown = ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")
    text = "row['prompt']" if _is_text(prompts.type) else "row['prompt'] and row['prompt'][-1]['content']"
    raise UserError(
        f'{given} has {len(rows)} rows without a prompt (None, "", or a conversation whose last message is empty): '
        f"{shown}. Remove them: `dataset.filter(lambda row: {text})`."
    )


def without_prompt(column: pa.ChunkedArray) -> NDArray[np.bool_]:
    """Which prompts of a column of texts or conversations are missing or empty, `(n,)`."""
    return np.concatenate([np.zeros(0, dtype=bool), *map(_is_empty, column.chunks)])


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_empty(values: pa.Array) -> NDArray[np.bool_]:
    """Null, an empty text or list, or a conversation whose last message is empty and comes from neither tool nor assistant."""
    kind = values.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if is_list or _is_text(kind):
        length = pc.list_value_length(values) if is_list else pc.binary_length(values)
        found = pc.fill_null(pc.equal(length, 0), True)
    else:
        found = values.is_null()
    empty: NDArray[np.bool_] = found.to_numpy(zero_copy_only=False)
    is_chat = is_list and pa.types.is_struct(kind.value_type) and kind.value_type.get_field_index("content") >= 0
    if is_chat and not empty.all():
        last = values.values.take(pa.array(values.offsets.to_numpy()[1:][~empty] - 1))
        without_content = _is_empty(pc.struct_field(last, "content"))
        if kind.value_type.get_field_index("role") >= 0:  # a tool may answer nothing; an answer may begin with nothing
            continued = pc.is_in(pc.struct_field(last, "role"), pa.array(["tool", "assistant"]))
            without_content &= ~continued.to_numpy(zero_copy_only=False)
        empty[~empty] = without_content
    return empty


def check_reward_arguments(reward_funcs: Sequence[Any], row: Mapping[str, Any]) -> None:
    """Raise a [`UserError`] that names a reward function that does not take what TRL passes: its own arguments, and columns of `row`."""
    columns = dict.fromkeys(name for name in row if name not in NOT_PASSED_BY_TRL)
    for function in reward_funcs:
        if isinstance(function, torch.nn.Module):
            continue
        try:
            inspect.signature(function).bind(**dict.fromkeys(PASSED_BY_TRL), **columns)
        except ValueError:  # a callable without a signature
            continue
        except TypeError as error:
            raise UserError(
                f"The reward function `{getattr(function, '__name__', type(function).__name__)}` cannot be called: {error}. "
                f"TRL passes {listed([*PASSED_BY_TRL, *columns])}. Rename a column or the argument, and let the function take `**kwargs`."
            ) from error
