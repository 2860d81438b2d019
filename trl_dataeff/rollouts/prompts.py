"""Which prompts of a dataset are empty, from its Arrow column."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray


def without_prompt(column: pa.ChunkedArray) -> NDArray[np.bool_]:
    """Which prompts of a column of texts or conversations are missing or empty, `(n,)`, without a loop over rows."""
    return np.concatenate([np.zeros(0, dtype=bool), *(_is_empty(chunk) for chunk in column.chunks)])


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _is_empty(values: pa.Array) -> NDArray[np.bool_]:
    """Null, an empty text or list, or a conversation whose last message is empty and comes from neither tool nor assistant."""
    missing: NDArray[np.bool_] = values.is_null().to_numpy(zero_copy_only=False)
    if is_text(values.type):
        return missing | _flags(pc.equal(pc.binary_length(values), 0))
    if not _is_list(values.type):
        return missing
    empty = missing | _flags(pc.equal(pc.list_value_length(values), 0))
    kind = values.type.value_type
    if not pa.types.is_struct(kind) or kind.get_field_index("content") < 0 or empty.all():
        return empty
    last = values.values.take(pa.array(values.offsets.to_numpy()[1:][~empty] - 1))
    without_content = _is_empty(pc.struct_field(last, "content"))
    if kind.get_field_index("role") >= 0:  # a tool may answer nothing, and an answer may begin with nothing
        continued = pc.is_in(pc.struct_field(last, "role"), pa.array(["tool", "assistant"]))
        without_content &= ~_flags(continued)
    empty[~empty] = without_content
    return empty


def _flags(values: pa.Array) -> NDArray[np.bool_]:
    """Null counts as false."""
    flags: NDArray[np.bool_] = pc.fill_null(values, False).to_numpy(zero_copy_only=False)
    return flags
