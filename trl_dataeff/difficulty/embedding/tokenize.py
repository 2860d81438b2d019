"""Prompts as they are embedded: read in chunks, reduced to text, and tokenized."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from datasets import Dataset
from transformers.utils import get_json_schema
from trl.data_utils import prepare_multimodal_messages

from trl_dataeff.utils import UserError, hash_json


_CHUNK = 64  # rows that are read and tokenized at a time; images are read with their rows

Prompt = str | list[dict[str, Any]]


class EmbeddingError(UserError):
    """Prompts cannot be embedded: the dataset or the model does not allow it."""


def read_prompts(dataset: Dataset) -> Iterator[Prompt]:
    """
    The dataset's prompts in order, reduced to their text: strings as they are, conversations as messages whose content
    is a string (or `None`). A transform that makes the prompts is run.

    Raises:
        `EmbeddingError`: if there is no column `prompt`, or a prompt is neither a string nor a list of messages.
    """
    if "prompt" in dataset.column_names and dataset.format["type"] != "custom":
        dataset = dataset.with_format(None).select_columns(["prompt"])
    row = itertools.count()
    for rows in dataset.iter(_CHUNK):
        if "prompt" not in rows:
            raise EmbeddingError(
                f"The dataset has no column 'prompt' to embed; its columns are {sorted(rows)}. Rename the column that "
                "holds the prompts: `dataset.rename_column('question', 'prompt')`."
            )
        yield from map(_text_only, rows["prompt"], row)


def _text_only(prompt: Any, row: int) -> Prompt:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt):
        return [{**message, "content": _text_of(message.get("content"))} for message in prompt]
    raise EmbeddingError(
        f"The prompt of row {row} is of type {type(prompt).__name__}; a prompt is a string or a list of messages "
        "({'role': ..., 'content': ...}). Remove the row or correct it."
    )


def _text_of(content: Any) -> Any:
    """The text parts of a message's content. What is not a list of parts is content already."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") for part in content if part.get("type", "text") == "text"]
    return "\n".join(text for text in texts if text)


@dataclass
class PromptTokenizer:
    """
    Prompts to token ids, as TRL does it: conversations through the chat template with the generation prompt, strings
    with the tokenizer's special tokens. Without a chat template, a conversation is its contents joined by newlines.

    Args:
        processor: a tokenizer, or a processor that has one; its templates expect the content of a message in parts.
        chat_template (`str`, *optional*): instead of the processor's own.
        tools (`list`, *optional*), template_kwargs (`dict`, *optional*): further arguments of the template.
        limit (`int`, *optional*): tokens that the model takes; longer prompts are cut. Unset: no limit.
    """

    processor: Any
    chat_template: str | None = None
    tools: list[Any] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    limit: int | None = None

    def __post_init__(self) -> None:
        self.tokenizer = getattr(self.processor, "tokenizer", self.processor)
        if self.processor is not self.tokenizer:
            self.chat_template = self.chat_template or getattr(self.processor, "chat_template", None)
        self.template = self.chat_template or self.tokenizer.chat_template
        ids = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id, self.tokenizer.pad_token_id)
        self.stand_in = next((i for i in ids if i is not None), 0)  # for a prompt without any token

    def identity(self) -> str:
        """A hash of all that decides which tokens a prompt becomes."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        vocabulary = json.loads(backend.to_str()) if backend is not None else self.tokenizer.get_vocab()
        return hash_json(
            {**vocabulary, "truncation": None, "padding": None},  # these two are set anew at each call
            self.tokenizer.special_tokens_map,
            self.tokenizer.truncation_side,
            self.processor is not self.tokenizer,
            self.template,
            [get_json_schema(tool) if callable(tool) else tool for tool in self.tools or []],
            self.template_kwargs,
            self.limit,
        )

    def tokenize(self, dataset: Dataset) -> tuple[list[np.ndarray], int]:
        """Token ids of each prompt, int32 `(T_i,)` with T_i >= 1, and how many prompts were cut."""
        tokens: list[np.ndarray] = []
        truncated = 0
        chunks = itertools.groupby(enumerate(read_prompts(dataset)), lambda item: (item[0] // _CHUNK, type(item[1])))
        for (_, kind), chunk in chunks:
            encoded = self.tokenizer(
                [self._render(prompt, row) for row, prompt in chunk],
                add_special_tokens=kind is str or not self.template,  # a chat template writes special tokens itself
                truncation=self.limit is not None,
                max_length=self.limit,
                verbose=False,
            )
            tokens += [np.array(ids or [self.stand_in], dtype=np.int32) for ids in encoded["input_ids"]]
            truncated += sum(bool(each.overflowing) for each in encoded.encodings or ())
        return tokens, truncated

    def _render(self, prompt: Prompt, row: int) -> str:
        if isinstance(prompt, str):
            return prompt
        if not prompt:
            return ""
        if not self.template:
            return "\n".join(message["content"] or "" for message in prompt)
        try:
            text: str = self.tokenizer.apply_chat_template(
                prepare_multimodal_messages(prompt) if self.processor is not self.tokenizer else prompt,
                tools=self.tools or None,
                chat_template=self.chat_template,
                add_generation_prompt=True,
                tokenize=False,
                **self.template_kwargs,
            )
            return text
        except Exception as error:  # templates raise what they like
            raise EmbeddingError(
                f"The chat template cannot render the prompt of row {row} ({type(error).__name__}: {error}). Correct "
                "the prompt's messages, or the template."
            ) from error
