"""
What the model computes of a micro-batch: hidden states of completions alone reach the head, and where prompts are
shared, all tokens are one sequence (see `packing.py`), in which the prompt of a group is once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from trl_dataeff.compact.packing import Packing, forward_packed


@dataclass(frozen=True)
class SharedPrompts:
    """
    Which rows of a micro-batch have the same prompt.

    Attributes:
        first_rows: a row with each of the m different prompts, int64 of shape `(m,)`.
        prompt_of_row: which of these prompts each row has, int64 of shape `(rows,)`.
        multiple: TRL's `pad_to_multiple_of`, a multiple of which the sequence of all tokens is.
    """

    first_rows: torch.Tensor
    prompt_of_row: torch.Tensor
    multiple: int | None = None

    @classmethod
    def of(cls, prompt_numbers: list[int], device: torch.device, multiple: int | None = None) -> SharedPrompts:
        """The shared prompts of rows whose prompts have these numbers."""
        first_rows: list[int] = []
        place: dict[int, int] = {}
        for row, number in enumerate(prompt_numbers):
            if number not in place:
                place[number] = len(first_rows)
                first_rows.append(row)
        prompt_of_row = [place[number] for number in prompt_numbers]
        return cls(
            first_rows=torch.tensor(first_rows, dtype=torch.int64, device=device),
            prompt_of_row=torch.tensor(prompt_of_row, dtype=torch.int64, device=device),
            multiple=multiple,
        )


@dataclass(frozen=True)
class Expected:
    """
    What the model is expected to get.

    Attributes:
        input_ids: prompts and completions, `(rows, P + T)`.
        attention_mask: 0 for padding, `(rows, P + T)`.
        completion_width: T, columns of the completions.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    completion_width: int

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> Expected:
        """What TRL's loss passes on of a micro-batch."""
        return cls(
            input_ids=torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            attention_mask=torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
            completion_width=batch["completion_ids"].size(1),
        )

    def difference(self, arguments: Mapping[str, Any]) -> str | None:
        """
        What among the arguments of a call is not as expected, in words; `None` if all is. Neither positions nor
        embeddings are expected.
        """
        for name, expected in (("input_ids", self.input_ids), ("attention_mask", self.attention_mask)):
            value = arguments.get(name)
            if not isinstance(value, torch.Tensor):
                return f"no `{name}`"
            if value is not expected and (value.shape != expected.shape or not torch.equal(value, expected)):
                return f"another `{name}` than the micro-batch has"
        for name, value in arguments.items():
            if name not in _EXPECTED_ARGUMENTS and not (value is None or isinstance(value, bool | int | float | str)):
                return f"`{name}`"
        return None


_EXPECTED_ARGUMENTS = ("input_ids", "attention_mask", "labels")
_OF_SEQUENCE = ("input_ids", "attention_mask", "position_ids")


@contextmanager
def completions_alone(
    model: PreTrainedModel,
    expected: Expected,
    shared: SharedPrompts | None = None,
    on_other: Callable[[str], None] = lambda what: None,
) -> Iterator[None]:
    """
    Within this context, a model with TRL's fused head scores completions alone: its log-probs are `(rows, T)` instead
    of `(rows, P + T - 1)`. A call that is not as expected computes what was asked.

    Args:
        model ([`~transformers.PreTrainedModel`]): the policy, without PEFT's or accelerate's wrapping.
        expected ([`Expected`]): the ids and masks of the micro-batch.
        shared ([`SharedPrompts`], *optional*): rows with equal prompts. All tokens are then computed in one
            sequence (see `packing.py`), until [`packing.end`]. There must be no dropout. By default each row is a
            sequence of its own.
        on_other (`Callable`): is called with what is not as expected.
    """
    backbone: Any = model.base_model
    forward = backbone.forward
    forward_with_head = model.forward
    # A replaced `forward` is an attribute of the instance, in the place of the one of the class
    own_attributes = [(backbone, vars(backbone).get("forward")), (model, vars(model).get("forward"))]
    last_columns = slice(-(expected.completion_width + 1), None)
    arrived: Expected | None = None  # what the present call of the model got; `None`: it computes what was asked

    def completions_of_labels(*args: Any, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        nonlocal arrived
        arguments = _by_name(forward_with_head, args, kwargs)
        what = expected.difference(arguments)
        arrived = None
        if what is not None:
            on_other(what)
        elif labels is not None:
            labels = labels[:, last_columns]
            arrived = replace(expected, input_ids=arguments["input_ids"], attention_mask=arguments["attention_mask"])
        return forward_with_head(*args, labels=labels, **kwargs)

    def states_of_completions(*args: Any, **kwargs: Any) -> Any:
        if arrived is None:
            return forward(*args, **kwargs)
        if shared is not None:
            arguments = _by_name(forward, args, kwargs)
            what = arrived.difference(arguments)  # a hook may have come between
            if what is None:
                packing = Packing.of(
                    arrived.input_ids,
                    arrived.attention_mask,
                    expected.completion_width,
                    shared.first_rows,
                    shared.prompt_of_row,
                    shared.multiple,
                )
                others = {name: value for name, value in arguments.items() if name not in _OF_SEQUENCE}
                return forward_packed(forward, model, packing, **others)
            on_other(what)
        outputs = forward(*args, **kwargs)
        outputs.last_hidden_state = outputs.last_hidden_state[:, last_columns]
        return outputs

    backbone.forward = states_of_completions
    model.forward = completions_of_labels
    try:
        yield
    finally:
        for module, attribute in own_attributes:
            if attribute is None:
                del module.forward
            else:
                module.forward = attribute


def _by_name(forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names."""
    names = list(inspect.signature(forward).parameters)[: len(args)]
    return {**dict(zip(names, args, strict=True)), **kwargs}


@contextmanager
def with_positions(model: PreTrainedModel, positions: torch.Tensor) -> Iterator[None]:
    """
    Within this context, a model gets positions with its tokens, as the argument `position_ids`.

    Args:
        model ([`~transformers.PreTrainedModel`]): the policy, without PEFT's or accelerate's wrapping.
        positions (`torch.Tensor` of shape `(1, columns)`): of all rows.
    """

    def give_positions(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        input_ids = kwargs.get("input_ids")
        if kwargs.get("position_ids") is None and input_ids is not None and input_ids.size(1) == positions.size(1):
            kwargs["position_ids"] = positions.expand(len(input_ids), -1)
        return args, kwargs

    hook = model.register_forward_pre_hook(give_positions, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def takes_positions(model: Any) -> bool:
    """Whether a model takes the positions of its tokens."""
    return "position_ids" in inspect.signature(type(model).forward).parameters


def takes_columns(model: Any) -> bool:
    """Whether a model takes the columns of its tokens beside their positions, as many do in Transformers 5.3."""
    return "cache_position" in inspect.signature(type(model).forward).parameters
