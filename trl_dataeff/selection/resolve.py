"""The selector that a configuration and a trainer's arguments ask for."""

from __future__ import annotations

from typing import Any

from trl_dataeff.config import DataEfficientGRPOConfig
from trl_dataeff.selection.base import Selector, make_selector, uses_references
from trl_dataeff.selection.dots import PaperDotsSelector


def resolve_selector(
    args: DataEfficientGRPOConfig,
    selector: Selector | None = None,
    reason: str | None = None,
    world_size: int = 1,
) -> Selector:
    """
    The selector of a run, not bound yet: the instance that was given, or the one that `selection` names. A first call,
    before the model is loaded, does without the last two arguments.

    Args:
        args ([`DataEfficientGRPOConfig`]): the configuration.
        selector ([`Selector`], *optional*): that was given to the trainer.
        reason (`str`, *optional*): why rounds cannot be generated outside of TRL's pass over a batch, if they cannot.
        world_size (`int`, *optional*, defaults to `1`): number of processes.

    Raises:
        `TypeError` or `ValueError`: the selector cannot be made or used.
    """
    if selector is None:
        selector = _named_selector(args)
    elif not isinstance(selector, Selector):
        raise TypeError(f"`selector` is {selector!r}; it takes an instance of `trl_dataeff.Selector`.")
    elif args.selection != "uniform" or args.selector_args:
        raise ValueError(
            f"`selector={type(selector).__name__}(...)` is given beside `selection={args.selection!r}` and "
            f"`selector_args={args.selector_args!r}`, which make a selector by its name. Leave these two out, or "
            "`selector`."
        )
    if uses_references(selector) and reason is not None:
        raise ValueError(
            f"{type(selector).__name__} needs reference rollouts, not possible with {reason}. Use "
            "`selection='uniform'` or `'dots'`."
        )
    if isinstance(selector, PaperDotsSelector) and args.prompt_embedding is None:
        raise ValueError(
            "`prompt_embedding` is None, and DOTS as published predicts from embeddings alone. Name a model, or use "
            "`selection='dots'`."
        )
    reference_size = getattr(selector, "reference_size", world_size)
    if reference_size < world_size:
        raise ValueError(
            f"`reference_size` is {reference_size}; give at least one prompt for each of {world_size} processes."
        )
    return selector


def _named_selector(args: DataEfficientGRPOConfig) -> Selector:
    arguments: dict[str, Any] = dict(args.selector_args or {})  # type: ignore[arg-type]  # no text any more
    if args.selection == "uniform":
        arguments.setdefault("shuffle", args.shuffle_dataset)
    return make_selector(args.selection, arguments)
