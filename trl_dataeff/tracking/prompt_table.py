"""`PromptTable`: what a report needs to know of prompts, in `<output_dir>/dataeff/prompts.parquet`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import ClassLabel, Dataset, Value
from transformers.utils import logging

from trl_dataeff.utils import write_atomically


logger = logging.get_logger(__name__)
LONGEST_PROMPT, LONGEST_TEXT = 2000, 200  # characters


class PromptTable:
    """
    A row for each prompt that was rolled out: its id, the beginning of its text, and the dataset's columns of numbers and
    short texts. Written at every checkpoint and at the end.

    Args:
        path (`Path`): the file.
        rows (`Callable`, *optional*): prompt ids `(k,)` -> a table with one row for each; `None`: nothing is written.
    """

    def __init__(self, path: Path, rows: Callable[[np.ndarray], pa.Table] | None):
        self.path, self._rows = path, rows
        self._known = np.empty(0, dtype=np.int64)
        self._tables: list[pa.Table] = []

    def write(self, prompt_ids: np.ndarray) -> None:
        """
        Write the table of these prompts.

        Args:
            prompt_ids (`np.ndarray` of shape `(k,)`): without repetition; those of an earlier call among them.
        """
        new = np.setdiff1d(prompt_ids[prompt_ids >= 0], self._known)
        if self._rows is None or not len(new):
            return
        try:
            rows = self._rows(new).add_column(0, "prompt_id", pa.array(new))
            table = pa.concat_tables([*self._tables, rows])
            write_atomically(self.path, partial(pq.write_table, table, write_page_checksum=True))
        except (OSError, ValueError, pa.ArrowException) as error:
            logger.warning(f"{self.path} could not be written ({type(error).__name__}: {error}). Training continues.")
        else:
            self._tables, self._known = [table], np.union1d(self._known, new)


def prompt_rows(dataset: Dataset, ids: np.ndarray) -> pa.Table:
    """
    The columns of these rows that are numbers, labels or texts, texts cut to `LONGEST_TEXT` characters; `prompt` as text,
    cut to `LONGEST_PROMPT`.
    """
    kept = [name for name, feature in dataset.features.items() if _is_plain(feature) or name == "prompt"]
    columns = dataset.with_format(None).select_columns(kept)[ids.tolist()]
    types = {}  # the dataset's own: a column may be null in all of these rows
    for name, values in columns.items():
        feature = dataset.features[name]
        is_text = isinstance(feature, ClassLabel) or name == "prompt"
        types[name] = pa.string() if is_text else feature.pa_type
        if isinstance(feature, ClassLabel):
            columns[name] = [None if value is None else feature.int2str(value) for value in values]
        elif name == "prompt":
            columns[name] = [prompt_text(value) for value in values]
        elif feature.dtype in ("string", "large_string"):
            columns[name] = [None if value is None else value[:LONGEST_TEXT] for value in values]
    return pa.table({name: pa.array(values, types[name]) for name, values in columns.items() if name != "prompt_id"})


def _is_plain(feature: Any) -> bool:
    plain = ("string", "large_string", "bool", "int", "uint", "float")
    return isinstance(feature, ClassLabel) or (isinstance(feature, Value) and feature.dtype.startswith(plain))


def prompt_text(prompt: Any) -> str:
    """The beginning of a prompt as text: of a conversation, the contents of its messages, a line each."""
    if isinstance(prompt, (list, tuple, np.ndarray)):
        contents = [message.get("content") if isinstance(message, dict) else message for message in prompt]
        prompt = "\n".join(content if isinstance(content, str) else str(content) for content in contents)
    return str(prompt)[:LONGEST_PROMPT]
