"""What the trainer is given: its configuration resolved, and datasets refused that a run cannot use."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset
from transformers.utils import logging
from trl import GRPOConfig
from trl.trainer.utils import get_config_model_id

from trl_dataeff.config import AUTO_SELECTION, DataEfficientGRPOConfig
from trl_dataeff.difficulty.loading import check_predictor
from trl_dataeff.replay.buffer import replay_groups


logger = logging.get_logger(__name__)


def resolve_config(args: Any, model: Any) -> DataEfficientGRPOConfig:
    """The trainer's configuration from what it was given: ours, a plain `GRPOConfig`, or nothing for the defaults."""
    if args is None:
        name = model if isinstance(model, str) else get_config_model_id(model.config)
        return DataEfficientGRPOConfig(f"{name.split('/')[-1]}-GRPO")
    if not isinstance(args, GRPOConfig):
        raise TypeError(f"`args` must be a DataEfficientGRPOConfig or a GRPOConfig, got {type(args).__name__}.")
    return DataEfficientGRPOConfig.from_grpo_config(args)


def check_dataset(args: DataEfficientGRPOConfig, dataset: Any, environment_factory: Any) -> None:
    """Raise a `ValueError` that says what is wrong with the training dataset and what would do."""
    if dataset is None and environment_factory is None:
        raise ValueError("`train_dataset` is required, unless an `environment_factory` provides the prompts.")
    chooses = args.selection not in ("auto", "uniform")
    if (dataset is None or isinstance(dataset, IterableDataset)) and (chooses or args.dynamic_sampling):
        wanted = f"selection={args.selection!r}" if chooses else "dynamic_sampling=True"
        lacks = "prompts that an environment makes up" if dataset is None else "a streaming (iterable) dataset"
        raise ValueError(
            f"`{wanted}` needs a dataset whose rows can be taken in any order, which {lacks} cannot give. Use a "
            "dataset that is loaded without streaming, or `selection='uniform'` without `dynamic_sampling`."
        )
    if not isinstance(dataset, Dataset):
        return  # TRL refuses other types
    if len(dataset) and environment_factory is None and "prompt" not in dataset[0]:  # a transform may make it
        raise ValueError(
            f"`train_dataset` has no column `prompt`; its columns are {dataset.column_names}. Rename the column that "
            "holds the prompts: `dataset.rename_column('question', 'prompt')`."
        )
    check_prompts(dataset)
    prompts = args.generation_batch_size // args.num_generations
    if len(dataset) < prompts:
        raise ValueError(
            f"`train_dataset` has {len(dataset)} prompts, and each batch takes {prompts} different ones "
            f"(`generation_batch_size` {args.generation_batch_size} / `num_generations` {args.num_generations}). Use "
            "a larger dataset, or a smaller `per_device_train_batch_size` x `steps_per_generation`."
        )


def resolve_selection(
    args: DataEfficientGRPOConfig, obstacle: str | None, *, sharded: bool, processes: int = 1
) -> str:
    """
    The selection of a run: what "auto" stands for, and a `ValueError` for what cannot be had with this dataset or
    these files.

    Args:
        args ([`DataEfficientGRPOConfig`]): the configuration.
        obstacle (`str`, *optional*): that of [`rounds_obstacle`].
        sharded (`bool`): whether the policy's weights are spread over processes, so that it cannot embed prompts.
        processes (`int`, *optional*, defaults to `1`): how many there are.
    """
    selection = args.selection
    if selection == "auto":
        selection = "uniform" if obstacle is not None else AUTO_SELECTION
        if "dots" in selection and sharded and args.dots_embedding == "policy":
            selection = "greso"
            logger.warning(
                "`selection='auto'` is 'greso' here: a policy whose weights are sharded cannot embed the prompts for DOTS. "
                "Set `dots_embedding` to a model id to have it."
            )
    if "dots" in selection:
        check_predictor(args.dots_predictor)  # a mistake in it shows before anything is embedded
        if args.dots_reference == "paper" and args.dots_reference_size < processes:
            raise ValueError(
                f"`dots_reference_size` is {args.dots_reference_size}, and each of {processes} processes rolls out at least "
                "one reference prompt. Set it to at least that."
            )
        if args.dots_reference == "paper" and obstacle is not None:
            raise ValueError(
                f"`dots_reference='paper'` rolls out its reference prompts apart from TRL's pass over a batch, which "
                f"{obstacle} do not allow. Use `dots_reference='rolling'`, which needs no rollouts of its own."
            )
    return selection


def check_prompts(dataset: Dataset) -> None:
    """Raise a `ValueError` that names rows without a prompt, on which tokenization would fail in the middle of a run."""
    if "prompt" not in dataset.column_names:
        return  # a transform makes it
    column = dataset.data.column("prompt")
    lengths = pc.list_value_length(column) if pa.types.is_list(column.type) else None
    empty = column.null_count or (lengths is not None and pc.any(pc.equal(lengths, 0)).as_py())
    if not empty:
        return  # without looking at a row; those that a selection left out count too
    rows = dataset.with_format("arrow").select_columns(["prompt"])[:]["prompt"].to_pylist()
    bad = [i for i, prompt in enumerate(rows) if prompt is None or prompt == []]
    if bad:
        shown = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
        raise ValueError(
            f"`train_dataset` has {len(bad)} rows without a prompt (None, or a conversation of no messages): {shown}. "
            "Remove them: `dataset.filter(lambda row: row['prompt'])`."
        )


def check_no_images(images: Any, tool_images: Any) -> None:
    """Raise a `ValueError` if a round that was rolled out on its own has images, which would be lost to the loss."""
    if images is not None or any(tool_images):
        raise ValueError(
            "`dynamic_sampling` and `replay_fraction` cannot be used with prompts that carry images, and one of these "
            "prompts does while the dataset's first does not. Put such images into a column `images`, or switch both off."
        )


def _has_image(prompt: Any) -> bool:
    """Whether the messages of a conversational prompt carry an image."""
    contents = [message["content"] for message in prompt] if isinstance(prompt, list) else []
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(part.get("type") == "image" for part in parts)


def rounds_obstacle(dataset: Any, *, environments: bool, tool_images: bool) -> str | None:
    """
    What keeps rounds of rollouts from being made, and replayed, apart from TRL's one pass over a batch; `None` if
    nothing does. TRL prepares images and environments in that pass, and a stream's rows cannot be had again.

    Args:
        dataset: the training dataset.
        environments (`bool`): whether prompts are prepared by an environment.
        tool_images (`bool`): whether tools may answer with images.
    """
    if environments:
        return "prompts that are prepared by an environment"
    if not isinstance(dataset, Dataset):
        return "a streaming (iterable) dataset"
    columns = dataset.column_names or []
    if "image" in columns or "images" in columns or tool_images or _has_image(dataset[0].get("prompt")):
        return "prompts or tools with images"
    return None


def warn_of_idle_options(args: DataEfficientGRPOConfig, obstacle: str | None) -> None:
    """Say which options of `args` are without effect in this run; `obstacle` is that of [`rounds_obstacle`]."""
    if args.dynamic_sampling and obstacle is not None:
        logger.warning(
            f"`dynamic_sampling=True` does not refill batches for {obstacle}: each batch takes a single round of "
            "rollouts, and its zero-variance groups stay in it."
        )
    groups = args.per_device_train_batch_size * args.steps_per_generation // args.num_generations
    if args.replay_fraction > 0 and obstacle is not None:
        logger.warning(
            f"`replay_fraction={args.replay_fraction}` does not replay {obstacle}: each batch is rolled out afresh."
        )
    elif args.replay_fraction > 0 and not replay_groups(args.replay_fraction, groups, world_size=1):
        logger.warning(
            f"`replay_fraction={args.replay_fraction}` of {groups} groups per process rounds to no group: nothing is "
            "replayed. A larger `per_device_train_batch_size` x `steps_per_generation` makes room for it."
        )
