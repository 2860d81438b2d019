"""What can be wrong before a run starts: configuration, dataset and selector, and the rewards of the first batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers.utils import logging
from trl import GRPOConfig

from trl_dataeff.config import AUTO_SELECTION, DataEfficientGRPOConfig
from trl_dataeff.difficulty.loading import check_predictor, is_predictor, load_predictor
from trl_dataeff.selection import Selector, make_selector
from trl_dataeff.utils import UserError


if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.get_logger(__name__)


def resolve_config(args: Any, model: Any) -> DataEfficientGRPOConfig:
    """
    The trainer's configuration from what it was given: ours, a plain `GRPOConfig`, which becomes ours, or nothing for the
    defaults. Checked again, since its owner may have changed it.
    """
    if args is None:
        from trl.trainer.utils import get_config_model_id

        name = model if isinstance(model, str) else get_config_model_id(model.config)
        return DataEfficientGRPOConfig(f"{name.split('/')[-1]}-GRPO")
    if not isinstance(args, GRPOConfig):
        raise TypeError(f"`args` must be a DataEfficientGRPOConfig or a GRPOConfig, got {type(args).__name__}.")
    return DataEfficientGRPOConfig.upgrade(args)


def check_dataset(
    args: DataEfficientGRPOConfig, dataset: Any, environment_factory: Any, selector: Selector | None = None
) -> None:
    """Raise a [`UserError`] that says what is wrong with the training dataset, and how to fix it."""
    from datasets import Dataset, IterableDataset

    if dataset is None and environment_factory is None:
        raise UserError("`train_dataset` is required, unless an `environment_factory` provides the prompts.")
    selects = selector is not None or args.selection not in ("auto", "uniform")
    in_rounds = args.dynamic_sampling or args.sequential_rollouts
    if (dataset is None or isinstance(dataset, IterableDataset)) and (selects or in_rounds):
        wanted = "dynamic_sampling=True" if args.dynamic_sampling else "sequential_rollouts=True"
        if selects:
            wanted = (
                f"selection={args.selection!r}" if selector is None else f"selector={type(selector).__name__}(...)"
            )
        given = "an environment provides the prompts" if dataset is None else "this one is streamed (iterable)"
        raise UserError(
            f"`{wanted}` needs a map-style dataset, and {given}. Use a dataset that is loaded without streaming, or "
            "`selection='uniform'` without `dynamic_sampling`, `sequential_rollouts` and `selector`."
        )
    if not isinstance(dataset, Dataset):
        return  # TRL rejects other types
    if len(dataset) and environment_factory is None and "prompt" not in dataset[0]:  # a transform may make it
        raise UserError(
            f"`train_dataset` has no column `prompt`; its columns are {dataset.column_names}. Rename the column that "
            "holds the prompts: `dataset.rename_column('question', 'prompt')`."
        )
    if environment_factory is None:  # which may make prompts of empty ones
        check_prompts(dataset)
    prompts = args.generation_batch_size // args.num_generations
    if len(dataset) < prompts:
        raise UserError(
            f"`train_dataset` has {len(dataset)} prompts, and each batch takes {prompts} different ones "
            f"(`generation_batch_size` {args.generation_batch_size} / `num_generations` {args.num_generations}). Use "
            "a larger dataset, or a smaller `per_device_train_batch_size` x `steps_per_generation`."
        )


def check_selection(args: DataEfficientGRPOConfig, selector: Selector | None) -> None:
    """
    Raise an error for a selector that cannot be made: both `selector=` and `selection=`, an unknown name, a wrong
    argument, or a predictor that cannot be read.
    """
    if selector is not None and not isinstance(selector, Selector):
        given = f"the class {selector.__name__}" if isinstance(selector, type) else f"a {type(selector).__name__}"
        raise TypeError(
            f"`selector` is {given}; it takes an instance of `trl_dataeff.Selector`, or use "
            "`selection='name'` with a registered name."
        )
    if selector is not None and args.selection != "auto":
        raise ValueError(
            f"Both `selector={type(selector).__name__}(...)` and `selection={args.selection!r}` are given. Leave "
            "`selection` at 'auto' to use the instance, or drop `selector`."
        )
    if selector is not None and args.selector_args:
        raise ValueError(
            f"`selector_args` ({args.selector_args}) are for a selector that is made by its name; give them to "
            f"{type(selector).__name__} instead."
        )
    if selector is not None:
        return
    check_selector(args)
    if "dots" in args.selection or args.selection == "auto":
        check_dots_predictor(args)


def check_selector(args: DataEfficientGRPOConfig) -> None:
    """Raise a `ValueError` if there is no selector of the name `selection`, or if it does not take its arguments."""
    name = AUTO_SELECTION if args.selection == "auto" else args.selection
    try:
        make_selector(name, args.selector_arguments(name))
    except ValueError as error:
        raise ValueError(f"`selection` is {args.selection!r}. {error}") from error


def check_dots_predictor(args: DataEfficientGRPOConfig) -> None:
    """Raise a `ValueError` if `dots_predictor` cannot be made or read; warn if it is for other embeddings."""
    assert not isinstance(args.dots_predictor_args, str)  # TrainingArguments parses JSON text
    check_predictor(args.dots_predictor, **(args.dots_predictor_args or {}))
    if not is_predictor(args.dots_predictor):
        predictor = load_predictor(args.dots_predictor)
        if predictor.embedding and predictor.embedding != args.dots_embedding:
            logger.warning(
                f"The predictor in {args.dots_predictor!r} was fitted to embeddings of {predictor.embedding!r}, and "
                f"`dots_embedding` is {args.dots_embedding!r}. Unless these are the same model, set it to the former."
            )


def resolve_selector(
    args: DataEfficientGRPOConfig,
    selector: Selector | None,
    unsupported_reason: str | None,
    sharded: bool,
    processes: int = 1,
) -> Selector:
    """
    The selector of a run, not bound yet: the instance that was given, or the one that `selection` names.

    Args:
        args ([`DataEfficientGRPOConfig`]): the configuration.
        selector ([`Selector`], *optional*): instance given to the trainer.
        unsupported_reason (`str`, *optional*): see [`unsupported_reason`].
        sharded (`bool`): whether the policy's weights are spread over processes in a way in which it cannot embed prompts.
        processes (`int`, *optional*, defaults to `1`): how many there are.

    Raises:
        `ValueError`: the selector needs reference rollouts, which this dataset does not allow.
    """
    if selector is None:
        name = _selection(args, unsupported_reason, sharded)
        selector = make_selector(name, args.selector_arguments(name))
    if not selector.uses_references:
        return selector
    size = getattr(selector, "reference_size", processes)
    if size < processes:
        raise ValueError(
            f"`dots_reference_size` is {size}, and each of {processes} processes generates rollouts for at least one "
            f"reference prompt. Set it to at least {processes}."
        )
    if unsupported_reason is not None:
        raise ValueError(
            f"{type(selector).__name__} generates reference rollouts outside of TRL's pass over a batch, which is not "
            f"possible with {unsupported_reason}. Use a selector without them (DOTS with `dots_reference='rolling'`)."
        )
    return selector


def _selection(args: DataEfficientGRPOConfig, unsupported_reason: str | None, sharded: bool) -> str:
    if args.selection != "auto":
        return args.selection
    if unsupported_reason is not None:
        return "uniform"
    if sharded and args.dots_embedding == "policy":
        logger.warning(
            "`selection='auto'` is 'greso' here: a policy that DeepSpeed ZeRO-3 or FSDP of version 1 shards cannot embed the "
            "prompts for DOTS. Use FSDP2, or set `dots_embedding` to a model id, for DOTS."
        )
        return "greso"
    return AUTO_SELECTION


def check_prompts(dataset: Dataset, given: str = "`train_dataset`") -> None:
    """
    Raise a [`UserError`] that names rows without a prompt: `None`, `""`, or a conversation whose last message is empty.
    Tokenization would fail on them in the middle of a run, or the model would answer nothing.
    """
    # Imports pyarrow, which checks of recipes do not need
    from trl_dataeff.rollouts.prompts import is_text, without_prompt

    if "prompt" not in dataset.column_names:
        return  # a transform makes it
    if not without_prompt(dataset.data.column("prompt")).any():
        return  # rows that a selection left out were looked at too
    prompts = dataset.with_format("arrow").select_columns(["prompt"])[:]["prompt"]
    rows = np.flatnonzero(without_prompt(prompts))
    if len(rows) == 0:
        return
    shown = ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")
    text = "row['prompt']" if is_text(prompts.type) else "row['prompt'] and row['prompt'][-1]['content']"
    raise UserError(
        f'{given} has {len(rows)} rows without a prompt (None, "", or a conversation whose last message is empty): '
        f"{shown}. Remove them: `dataset.filter(lambda row: {text})`."
    )


def check_no_tool_images(tool_images: Sequence[Any]) -> None:
    """Raise a `ValueError` if tools answered with images in a round of rollouts, which would be lost to the loss."""
    if any(tool_images):
        raise ValueError(
            "`dynamic_sampling`, `sequential_rollouts` and `replay_fraction` cannot be used with tools that answer with images, "
            "and one did. Switch them off."
        )


def unsupported_reason(dataset: Any, environments: bool, tool_images: bool) -> str | None:
    """
    Why rounds of rollouts cannot be generated, and replayed, outside of TRL's pass over a batch; `None` if they can. TRL
    prepares environments in that pass, and neither the images of tools nor the rows of a stream can be read again.

    Args:
        dataset: the training dataset.
        environments (`bool`): whether an environment prepares the prompts.
        tool_images (`bool`): whether tools may answer with images.
    """
    from datasets import Dataset

    if environments:
        return "prompts that are prepared by an environment"
    if not isinstance(dataset, Dataset):
        return "a streaming (iterable) dataset"
    return "tools that may answer with images" if tool_images else None


class RewardChecks:
    """
    Finds rewards that are most likely a mistake.

    Args:
        names (`list[str]`): the reward functions.
        most_unscored (`int`, *optional*): completions without any score, from the start of training, after which it is an
            error; `None`: never.
        is_main_process (`bool`, *optional*, defaults to `True`): whether this process warns.
    """

    def __init__(self, names: Sequence[str], *, most_unscored: int | None = None, is_main_process: bool = True):
        self.names = list(names)
        self.most_unscored = most_unscored
        self.is_main_process = is_main_process
        self.scores = np.zeros(len(self.names), dtype=bool)  # functions that gave a score so far
        self.completions = 0  # checked so far
        self._warned: set[str] = set()

    def check(self, rewards: np.ndarray) -> None:
        """
        Check the rewards of a round.

        Args:
            rewards (`np.ndarray` of shape `(n, G, F)`): NaN where a function gave no score.

        Raises:
            `ValueError`: `most_unscored` completions have no score, and none before them has one.
        """
        infinite = np.isinf(rewards).any(axis=(0, 1))
        if infinite.any():
            self._warn_once(
                "infinite",
                f"{self._listed(infinite)} returned an infinite reward. TRL gives no gradient to a group that holds one, "
                "so it counts as a zero-variance group; with `scale_rewards='batch'` it gives none to the whole batch, and with "
                "'none' it ruins the model: the group's other completions get an advantage of -3.4e38. Return finite numbers, or "
                "None for a completion without a score.",
            )
        self.completions += rewards.shape[0] * rewards.shape[1]
        self.scores |= ~np.isnan(rewards).all(axis=(0, 1))
        if self.scores.all():
            return
        names = self._listed(~self.scores)
        advice = (
            "Check that the columns it reads are in the dataset and hold what it expects. A function may return None for "
            "completions that it does not apply to."
        )
        if not self.scores.any() and self.most_unscored is not None and self.completions >= self.most_unscored:
            raise ValueError(
                f"No reward function gave a score for any of the first {self.completions} completions: {names} returned only "
                f"None or NaN. {advice} Each completion needs a score from one function to be trained on."
            )
        self._warn_once(
            names, f"{names} returned only None or NaN for the first {self.completions} completions. {advice}"
        )

    def _listed(self, chosen: np.ndarray) -> str:
        return ", ".join(f"`{name}`" for name, c in zip(self.names, chosen, strict=True) if c)

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self._warned and self.is_main_process:
            logger.warning(message)
        self._warned.add(key)
