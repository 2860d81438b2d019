"""Prompts as they are embedded: read in chunks, reduced to text, and tokenized into one flat array."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from datasets import Dataset
from transformers.utils import get_json_schema
from trl.data_utils import prepare_multimodal_messages

from trl_dataeff.checkpoint.hashing import hash_json


CHUNK = 1024
_CHUNK_WITH_IMAGES = 16  # each image is decoded with its row


class EmbeddingError(ValueError):
    """Prompts cannot be embedded: the dataset, the model or the cache folder does not allow it."""


def read_prompts(dataset: Dataset, column: str = "prompt") -> Iterator[list[str | list[dict[str, Any]]]]:
    """
    The dataset's prompts in order, in chunks, reduced to their text: strings as they are, conversations as messages
    whose content is a string (or `None`).

    Args:
        dataset ([`~datasets.Dataset`]): rows; a transform that makes the prompts is run.
        column (`str`, *optional*, defaults to `"prompt"`): column of the prompts.

    Raises:
        `EmbeddingError`: if there is no such column, or a prompt is neither a string nor a list of messages.
    """
    size = CHUNK
    if column in dataset.column_names and dataset.format["type"] != "custom":
        size = _CHUNK_WITH_IMAGES if "Image(" in repr(dataset.features[column]) else CHUNK
        dataset = dataset.with_format(None).select_columns([column])
    for start in range(0, len(dataset), size):
        rows = dataset[start : start + size]
        if column not in rows:
            raise EmbeddingError(
                f"The dataset has no column {column!r} to embed; its columns are {sorted(rows)}. Rename the column that "
                f"holds the prompts: `dataset.rename_column('question', {column!r})`."
            )
        yield [_text_only(prompt, start + i) for i, prompt in enumerate(rows[column])]


def _text_only(prompt: Any, row: int) -> str | list[dict[str, Any]]:
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
class TokenizedPrompts:
    """
    Token ids of N prompts, 4 bytes a token.

    Attributes:
        tokens: int32 `(total,)`, those of prompt i at `starts[i]:starts[i + 1]`.
        starts: int64 `(N + 1,)`.
        truncated: how many prompts were cut.
    """

    tokens: np.ndarray
    starts: np.ndarray
    truncated: int

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.starts)

    def __getitem__(self, i: int) -> np.ndarray:
        return self.tokens[self.starts[i] : self.starts[i + 1]]


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
        if backend is not None:  # set anew at each call
            vocabulary.pop("truncation", None)
            vocabulary.pop("padding", None)
        schemas = [get_json_schema(tool) if callable(tool) else tool for tool in self.tools or []]
        parts = [
            vocabulary,
            self.tokenizer.special_tokens_map,
            self.tokenizer.truncation_side,
            self.processor is not self.tokenizer,
            self.template,
            schemas,
            self.template_kwargs,
            self.limit,
        ]
        return hash_json(parts)

    def tokenize_dataset(self, dataset: Dataset, column: str = "prompt") -> TokenizedPrompts:
        """Tokenize all prompts, a chunk at a time."""
        tokens, truncated, rows = [], 0, 0
        lengths = np.zeros(len(dataset), dtype=np.int64)
        for prompts in read_prompts(dataset, column):
            ids, cut = self(prompts, rows)
            tokens.append(np.concatenate(ids))
            lengths[rows : rows + len(ids)] = [len(i) for i in ids]
            truncated += cut
            rows += len(ids)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        return TokenizedPrompts(np.concatenate(tokens), starts, truncated)

    def __call__(
        self, prompts: Sequence[str | list[dict[str, Any]]], first_row: int = 0
    ) -> tuple[list[np.ndarray], int]:
        """Token ids of each prompt, int32 `(T_i,)` with T_i >= 1, and how many prompts were cut."""
        texts = [self._render(prompt, first_row + i) for i, prompt in enumerate(prompts)]
        ids: list[np.ndarray] = [np.array([self.stand_in], dtype=np.int32)] * len(prompts)
        truncated = 0
        for special in (True, False):  # a chat template writes special tokens itself
            which = [
                i for i, prompt in enumerate(prompts) if special is (isinstance(prompt, str) or not self.template)
            ]
            encoded = self._encode([texts[i] for i in which], special)
            long = [j for j, tokens in enumerate(encoded) if self.limit is not None and len(tokens) > self.limit]
            cut = self._encode([texts[which[j]] for j in long], special, truncation=True, max_length=self.limit)
            for j, tokens in zip(long, cut, strict=True):
                encoded[j] = tokens
            truncated += len(long)
            for i, tokens in zip(which, encoded, strict=True):
                if tokens:
                    ids[i] = np.array(tokens, dtype=np.int32)
        return ids, truncated

    def _encode(self, texts: list[str], special: bool, **options: Any) -> list[list[int]]:
        if not texts:
            return []
        ids: list[list[int]] = self.tokenizer(texts, add_special_tokens=special, verbose=False, **options)["input_ids"]
        return ids

    def _render(self, prompt: str | list[dict[str, Any]], row: int) -> str:
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
