"""
All tokens of a micro-batch in one sequence: each different prompt once, then the completions, without padding. A
completion attends to its prompt and to itself. (Prefix Grouper, arXiv 2506.05433, shares prompts by a mask; tree
packing puts a group into one sequence.)

Layers see an ordinary sequence of one row, so that gradient checkpointing, PEFT and hooks find what they know. The
positions of each completion go on from its prompt. Attention alone is computed by row, by the model's own function: of
prompts over themselves, and of completions over their prompt and themselves. No mask over all tokens is made, and none
at all where SDPA computes whole rows.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from transformers import AttentionInterface, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


#: Of attention implementations, in front of the name of the model's own one
PREFIX = "trl_dataeff|"
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
#: What the calls of a further block take, in pairs of a query and a key: by device, where it is known
PRICE_OF_A_BLOCK = {"cpu": 2**15}
PRICE_ON_AN_ACCELERATOR = 2**20


def can_pack(model: torch.nn.Module) -> bool:
    """
    Whether a model's layers mix tokens by attention alone, which it computes by the function that is registered with
    Transformers, and whether it takes positions. Whether the result is the same is for the check of gradients.
    """
    if not isinstance(model, PreTrainedModel) or model.config.is_encoder_decoder:
        return False
    if getattr(model, "_is_stateful", False):  # a state-space model
        return False
    config = model.config.get_text_config()
    if not set(getattr(config, "layer_types", None) or ()) <= _KNOWN_LAYERS:
        return False
    holds_attention = all(hasattr(layer, "batch_select_indices") for layer in DynamicCache(config=config).layers)
    takes_positions = "position_ids" in inspect.signature(type(model.base_model).forward).parameters
    return holds_attention and takes_positions


def knows_attention(model: torch.nn.Module) -> bool:
    """Whether a model's attention implementation is one of Transformers' own, which compute the same."""
    if not isinstance(model, PreTrainedModel):
        return True
    name = str(model.config.get_text_config()._attn_implementation).removeprefix(PREFIX)
    return name in ("sdpa", "eager", "flex_attention", "None") or "flash" in name


@dataclass
class Block:
    """
    Sequences that attend to themselves: prompts, or rows of a prompt and its completion, of similar length.

    Attributes:
        keys: places of each one's tokens in the packing, int64 `(n, K)`; 0 behind its end.
        is_key: which of them are attended to, bool `(n, K)`; `False` behind the end.
        queries: places of the tokens that attend, int64 `(n, Q)`: all of `keys`, or of rows those of completions.
        first: column of `keys` in which the first of `queries` is, int64 `(n,)`.
        tokens: which of the n x Q results are taken, flat int64.
        is_whole: whether `queries` are all of `keys`.
    """

    keys: torch.Tensor
    is_key: torch.Tensor
    queries: torch.Tensor
    first: torch.Tensor
    tokens: torch.Tensor
    is_whole: bool

    @classmethod
    def of(cls, prompts: Spans, completions: Spans, is_attended: torch.Tensor) -> Block:
        """
        Rows, whose results are those of their completions.

        Args:
            prompts (`Spans`): of each row.
            completions (`Spans`): likewise.
            is_attended (`torch.Tensor` of shape `(N,)`): which tokens of the packing are attended to, bool.
        """
        lengths = prompts.lengths + completions.lengths
        columns = torch.arange(max(int(lengths.max()), 1), device=lengths.device)
        ends = prompts.lengths[:, None]
        is_token = columns < lengths[:, None]
        is_completion = is_token & (columns >= ends)
        of_completions = completions.starts[:, None] + columns - ends
        keys = torch.where(is_completion, of_completions, torch.where(is_token, prompts.starts[:, None] + columns, 0))
        is_key = is_attended[keys] & is_token
        if completions.longest >= prompts.longest:
            first = torch.zeros_like(lengths)
            return cls(keys, is_key, keys, first, _flat(is_completion), is_whole=True)
        columns = columns[: completions.longest]
        is_query = columns < completions.lengths[:, None]
        queries = torch.where(is_query, completions.starts[:, None] + columns, 0)
        return cls(keys, is_key, queries, prompts.lengths, _flat(is_query), is_whole=False)

    def mask(self, window: int | None, like: torch.Tensor) -> torch.Tensor:
        """What is added to scores of attention, `(n, 1, Q, K)`: 0, or the least number where a token is not seen."""
        device = self.keys.device
        keys = torch.arange(self.keys.size(1), device=device)
        own_columns = self.first[:, None, None] + torch.arange(self.queries.size(1), device=device)[:, None]
        sees = (keys <= own_columns) & self.is_key[:, None, :]
        if window is not None:
            sees &= keys > own_columns - window
        mask = torch.zeros(sees.shape, dtype=like.dtype, device=device)
        return mask.masked_fill_(~sees, torch.finfo(like.dtype).min).unsqueeze(1)


class Spans(NamedTuple):
    """Parts of the packing: the place of the first token of each, and how many there are, int64 `(n,)`."""

    starts: torch.Tensor
    lengths: torch.Tensor

    @property
    def longest(self) -> int:
        return max(int(self.lengths.max()), 1)

    def of(self, which: Any) -> Spans:
        """Some of them."""
        return Spans(self.starts[which], self.lengths[which])


@dataclass
class Packing:
    """
    Where the tokens of a micro-batch are in one sequence of N tokens: different prompts, and then the completions of R
    rows, the longest first.

    Attributes:
        ids: token ids, int64 `(1, N)`.
        positions: of each token, those that it has in the micro-batch, int64 `(1, N)`.
        blocks: the prompts, and then the rows; what they take is in the order of the sequence.
        states: places of the hidden states from which a completion's tokens are predicted, and of its last token,
            int64 `(R, columns of completions + 1)`, in the micro-batch's order of rows.
        has_holes: whether a token within a prompt or a completion is not attended to.
        num_calls: layers that have computed attention so far.
        num_windows: of these, layers with a sliding window.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    blocks: list[Block]
    states: torch.Tensor
    has_holes: bool
    num_calls: int = 0
    num_windows: int = 0
    _masks: dict[Any, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        completion_width: int,
        first_rows: torch.Tensor,
        prompt_of_row: torch.Tensor,
        multiple: int | None = None,
    ) -> Packing:
        """
        Pack a micro-batch.

        Args:
            input_ids (`torch.Tensor` of shape `(R, P + T)`): prompts, padded on the left, and completions, on the
                right.
            attention_mask (`torch.Tensor` of shape `(R, P + T)`): 0 for tokens that are not attended to.
            completion_width (`int`): T.
            first_rows (`torch.Tensor` of shape `(m,)`): a row with each of the different prompts.
            prompt_of_row (`torch.Tensor` of shape `(R,)`): which of these each row has.
            multiple (`int`, *optional*): N is a multiple of it; the last tokens may be padding then.
        """
        width = input_ids.size(1) - completion_width
        attended = attention_mask.bool()
        # From the first token that is attended to, and up to the last one
        are_prompts = attended[first_rows, :width].cumsum(1) > 0
        are_completions = attended[:, width:].flip(1).cumsum(1).flip(1) > 0
        order = torch.argsort(are_completions.sum(1), descending=True, stable=True)

        def in_sequence(values: torch.Tensor) -> torch.Tensor:
            of_prompts = values[first_rows, :width][are_prompts]
            return torch.cat([of_prompts, values[order, width:][are_completions[order]]])

        lengths = torch.cat([are_prompts.sum(1), are_completions[order].sum(1)])
        spans = Spans(lengths.cumsum(0) - lengths, lengths)
        prompts = spans.of(slice(len(first_rows)))
        completions = spans.of(slice(len(first_rows), None))
        is_attended = in_sequence(attended)
        nothing = Spans(prompts.starts, torch.zeros_like(prompts.lengths))
        blocks = [Block.of(nothing, prompts, is_attended)]
        for rows in _blocks(completions.lengths, prompts.longest):
            own_prompts = prompts.of(prompt_of_row[order[rows]])
            blocks.append(Block.of(own_prompts, completions.of(rows), is_attended))
        columns = torch.arange(completion_width, device=lengths.device)
        states = torch.zeros(len(input_ids), completion_width + 1, dtype=torch.int64, device=lengths.device)
        states[:, 0] = (prompts.starts + prompts.lengths - 1)[prompt_of_row]
        is_token = columns < completions.lengths[:, None]
        states[order, 1:] = torch.where(is_token, completions.starts[:, None] + columns, 0)
        ids = in_sequence(input_ids)
        positions = in_sequence(torch.arange(input_ids.size(1), device=ids.device).expand_as(input_ids))
        if multiple is not None:
            missing = (0, -len(ids) % multiple)
            ids = torch.nn.functional.pad(ids, missing)
            positions = torch.nn.functional.pad(positions, missing)
        has_holes = not bool(is_attended.all())
        return cls(ids.unsqueeze(0), positions.unsqueeze(0), blocks, states, has_holes)

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.ids.size(1)

    def mask(self, number: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
        """
        The mask of a block (see [`Block.mask`]), made once for all layers.

        Args:
            number (`int`): place of the block.
            window (`int`, *optional*): sliding window of the layer.
            like (`torch.Tensor`): has the dtype of the mask.
        """
        key = (number, window, like.dtype)
        if key not in self._masks:
            self._masks[key] = self.blocks[number].mask(window, like)
        return self._masks[key]

    def is_causal(self, number: int, window: int | None) -> bool:
        """Whether each token of a block sees all before it and itself, and nothing else."""
        block = self.blocks[number]
        return block.is_whole and not self.has_holes and (window is None or window >= block.keys.size(1))


def _flat(selected: torch.Tensor) -> torch.Tensor:
    return selected.flatten().nonzero().squeeze(1)


def _blocks(lengths: torch.Tensor, prompt_width: int) -> list[slice]:
    """
    Rows in blocks, so that attention computes little padding. Found by dynamic programming.

    Args:
        lengths (`torch.Tensor` of shape `(R,)`): of completions, the longest first.
        prompt_width (`int`): P, columns of prompts.

    Returns:
        `list[slice]`: of the rows.
    """
    price = PRICE_OF_A_BLOCK.get(lengths.device.type, PRICE_ON_AN_ACCELERATOR)
    longest = lengths.cpu().numpy()
    pairs = longest * (prompt_width + longest)  # of a row, in a block that begins with this one
    costs = [0]
    starts: list[int] = []
    for end in range(1, len(longest) + 1):
        of_starts = np.array(costs) + price + np.arange(end, 0, -1) * pairs[:end]
        starts.append(int(of_starts.argmin()))
        costs.append(int(of_starts.min()))
    blocks: list[slice] = []
    end = len(longest)
    while end > 0:
        blocks.insert(0, slice(starts[end - 1], end))
        end = starts[end - 1]
    return blocks


#: Packings that are computed, by where the memory of their mask is. A checkpointed layer keeps the mask, and so the
#: packing, until it was computed again in the backward pass
_packings: WeakValueDictionary[int, Packing] = WeakValueDictionary()
#: Attention implementations that configs had before [`begin`]
_former: list[tuple[PretrainedConfig, str]] = []


def begin(model: PreTrainedModel) -> None:
    """
    Let a model's attention compute packings, until [`end`]. Passes over other sequences are computed as before.
    """
    configs: dict[int, PretrainedConfig] = {id(model.config): model.config}
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig):
            configs.setdefault(id(config), config)
    for config in configs.values():
        name = config._attn_implementation
        if name is not None and not name.startswith(PREFIX):
            _former.append((config, name))
            config._attn_implementation_internal = _registered(name)


def end() -> None:
    """Let attention be as before [`begin`], where it was not changed since."""
    for config, name in _former:
        if config._attn_implementation == _registered(name):
            config._attn_implementation_internal = name
    _former.clear()


def _end_after_backward(gradient: torch.Tensor) -> None:
    """A hook within a backward pass: [`end`] follows it."""
    torch.autograd.Variable._execution_engine.queue_callback(end)


def _registered(name: str) -> str:
    """The name of an implementation that computes packings, and everything else by the one of this name."""
    own_name = PREFIX + name
    if own_name not in ALL_ATTENTION_FUNCTIONS:

        def attention(module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
            return _attention(name, module, *args, **kwargs)

        AttentionInterface.register(own_name, attention)
        if name in ALL_MASK_ATTENTION_FUNCTIONS:
            AttentionMaskInterface.register(own_name, ALL_MASK_ATTENTION_FUNCTIONS[name])
    return own_name


def _attention(
    name: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any]:
    """
    Attention of a packing: query `(1, heads, N, d)`, key and value `(1, key heads, N, d)`, to `(1, N, heads, d)`.
    Everything else is computed by the model's own function.
    """
    packing = None
    if isinstance(attention_mask, torch.Tensor):
        packing = _packings.get(attention_mask.untyped_storage().data_ptr())
    if packing is None:
        with _named(module, name):
            return _function_of(name, module)(module, query, key, value, attention_mask, **kwargs)
    function = _function_of(name, module, kwargs)
    window = kwargs.get("sliding_window", getattr(module, "sliding_window", None))
    packing.num_calls += 1
    packing.num_windows += window is not None
    results = []
    for number, block in enumerate(packing.blocks):
        options = kwargs
        mask = None
        if function is sdpa_attention_forward and packing.is_causal(number, window):
            options = {**kwargs, "is_causal": True}
        else:
            mask = packing.mask(number, window, query)
        queries = _rows_of(query, block.queries)
        outputs, _ = function(module, queries, _rows_of(key, block.keys), _rows_of(value, block.keys), mask, **options)
        results.append(outputs.flatten(0, 1).index_select(0, block.tokens))
    padding = packing.num_tokens - sum(map(len, results))
    results.append(outputs.new_zeros(padding, *outputs.shape[2:]))
    return torch.cat(results).unsqueeze(0), None


def _rows_of(states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Tokens of a packing by row: `(1, heads, N, d)` to `(rows, heads, columns, d)`."""
    taken = states[0].index_select(1, places.flatten())  # (heads, rows x columns, d)
    return taken.unflatten(1, places.shape).transpose(0, 1)


@contextmanager
def _named(module: torch.nn.Module, name: str) -> Iterator[None]:
    """Within this context, a module's config has the implementation that is called, which may look for its name."""
    config: Any = getattr(module, "config", None)
    if config is None or config._attn_implementation == name:
        yield
        return
    present = config._attn_implementation
    config._attn_implementation_internal = name
    try:
        yield
    finally:
        config._attn_implementation_internal = present


def _function_of(
    name: str, module: torch.nn.Module, options: dict[str, Any] | None = None
) -> Callable[..., tuple[torch.Tensor, Any]]:
    """
    The attention function that a model has under a name. With `options`, that of a packing, which has a mask by row:
    those that take none leave it to SDPA, or to the model's eager one where that alone has what the options ask for.
    """
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if options is None:
        if name == "eager" and eager is not None:
            return eager
        return ALL_ATTENTION_FUNCTIONS[name]
    needs_eager = any(options.get(option) is not None for option in ("softcap", "s_aux", "position_bias"))
    if name == "eager" or needs_eager:
        if eager is None:
            raise RuntimeError(f"{type(module).__name__} has no eager attention for sequences of several rows")
        return eager
    return sdpa_attention_forward


def forward_packed(
    forward: Callable[..., Any],
    model: PreTrainedModel,
    packing: Packing,
    **options: Any,
) -> Any:
    """
    The backbone's outputs for the last T + 1 tokens of each row, `(R, T + 1, h)`, from one sequence of all tokens.

    Raises:
        RuntimeError: the model computes attention in another way than by the registered function.
    """
    begin(model)
    size = packing.num_tokens
    # It keeps the model from making one, and tells which packing a layer computes. Any other attention fails on it
    mask = torch.full((1, 1, 1, 1), torch.nan, device=packing.ids.device).expand(1, 1, size, size + 1)
    mask.packing = packing  # type: ignore[attr-defined]  # which lives as long as the mask
    _packings[mask.untyped_storage().data_ptr()] = packing
    outputs = forward(
        input_ids=packing.ids,
        attention_mask=mask,
        position_ids=packing.positions,
        **{**options, "use_cache": False},
    )
    config = model.config.get_text_config()
    if packing.num_calls == 0 or packing.num_windows < _layers_with_window(config):
        raise RuntimeError("the model computes attention in a way of its own")
    states = outputs.last_hidden_state[0][packing.states]
    if states.requires_grad:
        states.register_hook(_end_after_backward)
    outputs.last_hidden_state = states
    return outputs


def _layers_with_window(config: Any) -> int:
    """How many layers of a model have a sliding window."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        return sum(layer == "sliding_attention" for layer in layer_types)
    has_window = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    return int(has_window)
