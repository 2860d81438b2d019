"""What can be wrong before a run starts, the rewards of the first batches, and the notice of what is on."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.utils import logging
from trl import GRPOConfig

from trl_dataeff.config import AUTO_SELECTION, DataEfficientGRPOConfig, own_copy
from trl_dataeff.replay.buffer import replay_groups
from trl_dataeff.rollouts.distributed import Processes
from trl_dataeff.selection import Selector, UniformSelector, make_selector
from trl_dataeff.selection.base import uses_references
from trl_dataeff.tracking.card import selection_title
from trl_dataeff.utils import UserError, closest, listed


if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.get_logger(__name__)
PASSED_BY_TRL = (
    "prompts",
    "completions",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
    "environments",
)
NOT_PASSED_BY_TRL = ("prompt", "completion", "completion_ids")  # of the dataset's columns
FEWEST_BATCHES = 20  # generation batches before a run without any effective group is warned of


def resolve_config(args: Any, model: Any) -> DataEfficientGRPOConfig:
    """The trainer's configuration: a copy of what it was given, with our fields, or the defaults if it was given nothing."""
    if args is None:
        from trl.trainer.utils import get_config_model_id

        name = model if isinstance(model, str) else get_config_model_id(model.config)
        return DataEfficientGRPOConfig(f"{name.split('/')[-1]}-GRPO")
    if not isinstance(args, GRPOConfig):
        raise TypeError(f"`args` must be a DataEfficientGRPOConfig or a GRPOConfig, got {type(args).__name__}.")
    return own_copy(args)


def check_dataset(
    args: DataEfficientGRPOConfig, dataset: Any, environment_factory: Any, selector: Selector | None = None
) -> None:
    """Raise a [`UserError`] that says what is wrong with the training dataset, and how to fix it."""
    from datasets import Dataset, IterableDataset

    if dataset is None and environment_factory is None:
        raise UserError("`train_dataset` is required, unless an `environment_factory` provides the prompts.")
    selects = selector is not None or args.selection not in ("auto", "uniform")
    refills = args.max_rollout_rounds > 1
    if (dataset is None or isinstance(dataset, IterableDataset)) and (selects or refills):
        wanted = f"max_rollout_rounds={args.max_rollout_rounds}"
        if selects:
            wanted = (
                f"selection={args.selection!r}" if selector is None else f"selector={type(selector).__name__}(...)"
            )
        given = "an environment provides the prompts" if dataset is None else "this one is streamed (iterable)"
        raise UserError(
            f"`{wanted}` needs a map-style dataset, and {given}. Use a dataset that is loaded without streaming, or "
            "`selection='uniform'` and `max_rollout_rounds=1` without `selector`."
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
    """Raise an error for a selector that cannot be made: both `selector=` and `selection=`, an unknown name or argument."""
    if selector is None:
        selector_of(args, AUTO_SELECTION if args.selection == "auto" else args.selection)
        return
    if not isinstance(selector, Selector):
        given = f"the class {selector.__name__}" if isinstance(selector, type) else f"a {type(selector).__name__}"
        raise TypeError(
            f"`selector` is {given}; it takes an instance of `trl_dataeff.Selector`. `selection` takes names."
        )
    if args.selection != "auto" or args.selector_args:
        raise ValueError(
            f"`selector={type(selector).__name__}(...)` is given beside `selection={args.selection!r}` and "
            f"`selector_args={args.selector_args!r}`, which make a selector by its name. Leave these two out, or `selector`."
        )


def selector_of(args: DataEfficientGRPOConfig, name: str) -> Selector:
    """The selector `name`, not bound yet, with `selector_args` and TRL's `shuffle_dataset`. Raises a `ValueError`."""
    # `check_fields` has seen that it is a mapping. What "auto" falls back to does not take the arguments of DOTS
    takes = args.selection != "auto" or name == AUTO_SELECTION
    arguments = dict(args.selector_args or {}) if takes else {}  # type: ignore[arg-type]
    if name == "uniform":
        arguments.setdefault("shuffle", args.shuffle_dataset)
    try:
        return make_selector(name, arguments)
    except ValueError as error:
        raise ValueError(
            f"`selection` is {args.selection!r}, `selector_args` {args.selector_args!r}. {error}"
        ) from error


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
        selector = selector_of(args, name)
    if not uses_references(selector):
        return selector
    size = getattr(selector, "reference_size", processes)
    if size < processes:
        raise ValueError(
            f"`reference_size` is {size}, and each of {processes} processes generates rollouts for at least one "
            f"reference prompt. Set it to at least {processes}."
        )
    if unsupported_reason is not None:
        raise ValueError(
            f"{type(selector).__name__} generates reference rollouts outside of TRL's pass over a batch, which is not "
            f"possible with {unsupported_reason}. Use a selector without them (`selection='dots'`)."
        )
    return selector


def _selection(args: DataEfficientGRPOConfig, unsupported_reason: str | None, sharded: bool) -> str:
    if args.selection != "auto":
        return args.selection
    if unsupported_reason is not None:
        return "uniform"
    if sharded and args.prompt_embedding == "policy":
        logger.warning(
            "`selection='auto'` is 'greso' here: a policy that DeepSpeed ZeRO-3 or FSDP of version 1 shards cannot embed the "
            "prompts for DOTS. Use FSDP2, or set `prompt_embedding` to a model id, for DOTS."
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


def check_reward_arguments(reward_funcs: Sequence[Any], dataset: Dataset) -> None:
    """
    Raise a [`UserError`] that names a reward function, if it has a required argument that is neither a column of the dataset
    nor one of those that TRL passes. Of a dataset with a transform nothing is checked: it may make columns.
    """
    if dataset.format["type"] == "custom":
        return
    passed = [*PASSED_BY_TRL, *(name for name in dataset.column_names if name not in NOT_PASSED_BY_TRL)]
    for function in reward_funcs:
        if isinstance(function, torch.nn.Module):
            continue
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # a callable without a signature
            continue
        for parameter in parameters:
            required = parameter.default is parameter.empty and parameter.kind not in (
                parameter.VAR_POSITIONAL,
                parameter.VAR_KEYWORD,
            )
            if required and parameter.name not in passed:
                raise UserError(
                    f"The reward function `{getattr(function, '__name__', type(function).__name__)}` has the argument "
                    f"`{parameter.name}`, which TRL does not pass; it passes {listed(passed)} (columns of the "
                    f"dataset among them).{closest(parameter.name, passed)} Rename a column, or the argument."
                )


def check_no_tool_images(tool_images: Sequence[Any]) -> None:
    """Raise a `ValueError` if tools answered with images in a round of rollouts, which would be lost to the loss."""
    if any(tool_images):
        raise ValueError(
            "Rollouts of tools that answer with images cannot be kept, and one did. Set `replay='off'`, `max_rollout_rounds=1`, "
            "`skip_zero_advantage=False` and a selection without reference rollouts."
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
        self.batches = 0  # generation batches so far
        self.effective = False  # whether any group so far was effective
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

    def check_gradient(self, effective: bool, progress: float) -> None:
        """
        Enter a generation batch. Warns once if a tenth of the run has passed, and no group has carried a gradient.

        Args:
            effective (`bool`): whether a group of the batch was effective.
            progress (`float`): share of the run that has passed.
        """
        self.batches += 1
        self.effective |= effective
        if not self.effective and self.batches >= FEWEST_BATCHES and progress >= 0.1:
            self._warn_once(
                "gradient",
                f"No group of the first {self.batches} generation batches has carried a gradient: the completions of every "
                "prompt got equal rewards, so the model learned nothing from them. Look at completions (`log_completions=True`): the "
                "reward function may reject right answers, or the prompts may be too hard or too easy for this model.",
            )

    def state_dict(self) -> list[Any]:
        """What was seen, for JSON."""
        return [self.scores.tolist(), self.completions, self.batches, self.effective]

    def load_state_dict(self, state: list[Any]) -> None:
        """Restore what [`state_dict`] returned; scores only if the functions are as many as then."""
        scores, self.completions, self.batches, self.effective = state
        if len(scores) == len(self.names):
            self.scores = np.array(scores, dtype=bool)

    def _listed(self, chosen: np.ndarray) -> str:
        return ", ".join(f"`{name}`" for name, c in zip(self.names, chosen, strict=True) if c)

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self._warned and self.is_main_process:
            logger.warning(message)
        self._warned.add(key)


def replays(args: DataEfficientGRPOConfig, world_size: int) -> bool:
    """Whether groups can be replayed: not with a share that rounds to no group."""
    return args.replay == "fill" or reserved_places(args, world_size) > 0


def reserved_places(args: DataEfficientGRPOConfig, world_size: int) -> int:
    """Places of a generation batch that `replay="share"` keeps for stored groups; 0 with other values."""
    groups = args.generation_batch_size // args.num_generations
    return replay_groups(args.replay_fraction, groups, world_size) if args.replay == "share" else 0


def announce(
    args: DataEfficientGRPOConfig,
    selector: Selector,
    unsupported_reason: str | None,
    processes: Processes,
    num_prompts: int | None,
    model: torch.nn.Module | None = None,
) -> None:
    """
    Log, on the main process, what is on in a run, and warn of options that have no effect in it. Nothing is logged if
    everything is off. The level is that of warnings: a script shows no lower one.

    Args:
        args ([`DataEfficientGRPOConfig`]): the configuration.
        selector ([`Selector`]): the one that is used.
        unsupported_reason (`str`, *optional*): see [`unsupported_reason`].
        processes ([`Processes`]): of the run.
        num_prompts (`int`, *optional*): prompts of the dataset.
        model (`torch.nn.Module`, *optional*): the policy, whose dropout is looked at.
    """
    if not processes.is_main:
        return
    replay, reserved = replays(args, processes.world_size), reserved_places(args, processes.world_size)
    on = [] if isinstance(selector, UniformSelector) else [selection_title(type(selector).__name__)]
    if unsupported_reason is None:
        on += [f"up to {args.max_rollout_rounds} rounds of rollouts a batch"] if args.max_rollout_rounds > 1 else []
        on += (
            [f"replay has {reserved} places of each batch" if reserved else "replay fills the batch"] if replay else []
        )
    if on:
        size = "" if num_prompts is None else f"; {num_prompts:,} prompts"
        logger.warning(f"{', '.join(on)}{size}.")
    if unsupported_reason is not None:
        _warn_unsupported(args, unsupported_reason)
        return
    _warn_ignored_options(args, replay, processes.world_size)
    if model is not None and not args.use_vllm and (replay or args.max_rollout_rounds > 1):
        _warn_dropout(active_dropout(model))


def _warn_ignored_options(args: DataEfficientGRPOConfig, replay: bool, world_size: int) -> None:
    groups = args.generation_batch_size // args.num_generations
    if args.replay == "share" and not replay:
        logger.warning(
            f"`replay_fraction={args.replay_fraction}` of {groups // world_size} groups per process rounds to no group: "
            "nothing is replayed. Raise `per_device_train_batch_size` or `gradient_accumulation_steps`, or use `replay='fill'`."
        )
    defaults = {field.name: field.default for field in fields(DataEfficientGRPOConfig)}
    needs = {"replay_fraction": ("replay", "share"), "rollout_margin": ("max_rollout_rounds", "2 or more")}
    works = {"replay_fraction": args.replay == "share", "rollout_margin": args.max_rollout_rounds > 1}
    for name, (other, value) in needs.items():
        if getattr(args, name) != defaults[name] and not works[name]:
            logger.warning(f"`{name}={getattr(args, name)}` has no effect: it needs `{other}` to be {value}.")


def _warn_unsupported(args: DataEfficientGRPOConfig, unsupported_reason: str) -> None:
    ignored = {
        "`selection='auto'` is 'uniform'": args.selection == "auto",
        f"`replay={args.replay!r}` does not replay": args.replay != "off",
        f"`max_rollout_rounds={args.max_rollout_rounds}` does not refill batches": args.max_rollout_rounds > 1,
    }
    listed = [text for text, applies in ignored.items() if applies]
    if listed:
        logger.warning(f"With {unsupported_reason}, {', '.join(listed)}: each batch is one round of rollouts.")


def active_dropout(model: torch.nn.Module) -> dict[str, float]:
    """The kinds of dropout that a model has in training, by the names of their modules or attributes: `{"lora_dropout": 0.05}`."""
    found: dict[str, float] = {}
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            # peft has a module for each adapter: `....lora_dropout.default`
            name = "lora_dropout" if ".lora_dropout." in path else path.split(".")[-1]
            found[name] = max(found.get(name, 0.0), module.p)
        value = getattr(module, "attention_dropout", None)  # of attention that calls a function
        if isinstance(value, float):
            found["attention_dropout"] = max(found.get("attention_dropout", 0.0), value)
    return {name: p for name, p in found.items() if p > 0}


def _warn_dropout(dropout: dict[str, float]) -> None:
    """Warn if the log-probs that are recorded of rollouts will contain dropout noise, and say how to switch it off."""
    if not dropout:
        return
    remedies = []
    if set(dropout) - {"attention_dropout", "lora_dropout"}:
        remedies.append("`disable_dropout=True`")
    elif "lora_dropout" in dropout:
        remedies.append("`lora_dropout` to 0 (in peft's `LoraConfig`, or in the recipe)")
    if "attention_dropout" in dropout:
        remedies.append("`model_init_kwargs={'attention_dropout': 0.0}`")
    listed = ", ".join(f"{name}={p:g}" for name, p in dropout.items())
    logger.warning(
        f"The model has dropout in training ({listed}). Log-probs of rollouts that are trained on again come from forward "
        "passes in training, so the ratio to the policy that sampled them, which corrects and clips their loss, contains "
        f"its noise. Set {' and '.join(remedies)}."
    )
