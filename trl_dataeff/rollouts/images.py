"""
Images of prompts, as TRL puts them into messages and reads them out again.

What is deliberately not here: stored images. Those of a replayed group are read from the dataset again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trl.data_utils import is_conversational, prepare_multimodal_messages


def prompts_with_images(rows: Sequence[dict[str, Any]]) -> list[Any]:
    """
    The prompts of a dataset's rows, with the images of the columns `image` or `images` in their messages. Prompts that are no
    conversations stay as they are: TRL rejects them if there is such a column.
    """
    prompts = [row["prompt"] for row in rows]
    if not rows or not {"image", "images"} & rows[0].keys() or not is_conversational(rows[0]):
        return prompts
    images = [_row_images(row) for row in rows]
    if all(row_images == [] for row_images in images):
        return prompts
    return [
        prepare_multimodal_messages(prompt, row_images) for prompt, row_images in zip(prompts, images, strict=True)
    ]


def _row_images(row: dict[str, Any]) -> list[Any] | None:
    images: list[Any] | None = row["images"] if "images" in row else [row["image"]]
    return None if images == [None] else images


def images_of(prompts: Sequence[Any]) -> list[list[Any] | None] | None:
    """The images in the messages of each prompt, `None` for a prompt without; `None` if no prompt has any."""
    images = [_message_images(prompt) or None for prompt in prompts]
    return images if any(images) else None


def _message_images(prompt: Any) -> list[Any]:
    contents = [] if isinstance(prompt, str) else [message.get("content") for message in prompt]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part["image"] for part in parts if part.get("type") == "image"]
