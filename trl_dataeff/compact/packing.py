"""
All tokens of a micro-batch in one sequence: each different prompt once, then the completions, without padding. A
completion attends to its prompt and to itself. (Prefix Grouper, arXiv 2506.05433, shares prompts by a mask; tree
packing puts a group into one sequence.)

Layers see an ordinary sequence of one row, so that gradient checkpointing, PEFT and hooks find what they know. The
positions of each completion go on from its prompt. Attention alone is computed by row, by the model's own function: of
prompts over themselves, and of completions over their prompt and themselves. No mask over all tokens is made.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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
    return holds_attention and takes_positions and bool(config._attn_implementation)


@dataclass
class Pieces:
    """
    Pieces of a sequence of N tokens, each in a row: prompts, or completions.

    Attributes:
        places: of each piece's tokens in the sequence, int64 `(n, longest)`; 0 behind its end.
        lengths: tokens of each piece, int64 `(n,)`.
        attended: which of them are attended to, bool `(n, longest)`; `False` behind the end.
        tokens: which of the n x longest places hold tokens, flat int64.
    """

    places: torch.Tensor
    lengths: torch.Tensor
    attended: torch.Tensor
    tokens: torch.Tensor

    @classmethod
    def of(cls, starts: torch.Tensor, lengths: torch.Tensor, is_attended: torch.Tensor) -> Pieces:
        """
        Args:
            starts (`torch.Tensor` of shape `(n,)`): place of each piece's first token.
            lengths (`torch.Tensor` of shape `(n,)`): tokens of each.
            is_attended (`torch.Tensor` of shape `(N,)`): which tokens of the sequence are attended to, bool.
        """
        columns = torch.arange(max(int(lengths.max()), 1), device=lengths.device)
        is_token = columns < lengths[:, None]
        places = torch.where(is_token, starts[:, None] + columns, 0)
        return cls(places, lengths, is_attended[places] & is_token, is_token.flatten().nonzero().squeeze(1))

    @property
    def longest(self) -> int:
        """Columns."""
        return self.places.size(1)

    def rows_of(self, states: torch.Tensor) -> torch.Tensor:
        """Tokens of the sequence by row: `(1, heads, N, d)` to `(n, heads, longest, d)`."""
        taken = states[0].index_select(1, self.places.flatten())  # (heads, n x longest, d)
        return taken.unflatten(1, self.places.shape).transpose(0, 1)

    def tokens_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows without padding: `(n, longest, heads, d)` to `(tokens, heads, d)`."""
        return rows.flatten(0, 1).index_select(0, self.tokens)

    def sees(self, window: int | None) -> torch.Tensor:
        """What the tokens of each piece see of it, bool `(n, longest, longest)`."""
        columns = torch.arange(self.longest, device=self.places.device)
        distance = columns[:, None] - columns
        sees = (distance >= 0) & self.attended[:, None, :]
        return sees if window is None else sees & (distance < window)


@dataclass
class Block:
    """
    Rows whose completions have similar lengths.

    Attributes:
        completions: of r rows.
        prompt_of_row: which prompt each row has, int64 `(r,)`.
    """

    completions: Pieces
    prompt_of_row: torch.Tensor

    def sees(self, prompts: Pieces, window: int | None) -> torch.Tensor:
        """What the tokens of each completion see of its prompt and of itself, bool `(r, T, P + T)`."""
        sees_prompt = prompts.attended[self.prompt_of_row][:, None, :].expand(-1, self.completions.longest, -1)
        if window is not None:
            places = torch.arange(self.completions.longest, device=sees_prompt.device)
            places_of_prompt = torch.arange(prompts.longest, device=sees_prompt.device)
            ends = prompts.lengths[self.prompt_of_row]
            distance = ends[:, None, None] + places[:, None] - places_of_prompt
            sees_prompt = sees_prompt & (distance < window)
        return torch.cat([sees_prompt, self.completions.sees(window)], dim=2)


@dataclass
class Packing:
    """
    Where the tokens of a micro-batch are in one sequence of N tokens: different prompts, and then the completions of R
    rows, the longest first.

    Attributes:
        ids: token ids, int64 `(1, N)`.
        positions: of each token, those that it has in the micro-batch, int64 `(1, N)`.
        prompts: the prompts.
        blocks: the completions.
        states: places of the hidden states from which a completion's tokens are predicted, and of its last token,
            int64 `(R, columns of completions + 1)`, in the micro-batch's order of rows.
        num_calls: layers that have computed attention so far.
        num_windows: of these, layers with a sliding window.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    prompts: Pieces
    blocks: list[Block]
    states: torch.Tensor
    num_calls: int = 0
    num_windows: int = 0
    _masks: dict[Any, list[torch.Tensor]] = field(default_factory=dict)

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
        starts = lengths.cumsum(0) - lengths
        is_attended = in_sequence(attended)
        num_prompts = len(first_rows)
        prompts = Pieces.of(starts[:num_prompts], lengths[:num_prompts], is_attended)
        states = torch.zeros(len(input_ids), completion_width + 1, dtype=torch.int64, device=input_ids.device)
        states[:, 0] = (starts[:num_prompts] + prompts.lengths - 1)[prompt_of_row]
        blocks = []
        for rows in _blocks(lengths[num_prompts:], prompts.longest):
            of_sequence = slice(num_prompts + rows.start, num_prompts + rows.stop)
            completions = Pieces.of(starts[of_sequence], lengths[of_sequence], is_attended)
            states[order[rows], 1 : 1 + completions.longest] = completions.places
            blocks.append(Block(completions, prompt_of_row[order[rows]]))
        ids = in_sequence(input_ids)
        positions = in_sequence(torch.arange(input_ids.size(1), device=ids.device).expand_as(input_ids))
        if multiple is not None:
            missing = (0, -len(ids) % multiple)
            ids = torch.nn.functional.pad(ids, missing)
            positions = torch.nn.functional.pad(positions, missing)
        return cls(ids.unsqueeze(0), positions.unsqueeze(0), prompts, blocks, states)

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.ids.size(1)

    def masks(self, window: int | None, like: torch.Tensor) -> list[torch.Tensor]:
        """
        What tokens attend to, made once for all layers: 0, and the least number of the dtype where they do not.

        Args:
            window (`int`, *optional*): sliding window of the layer.
            like (`torch.Tensor`): has the dtype and the device of the masks.

        Returns:
            `list[torch.Tensor]`: of prompts, `(m, 1, P, P)`; and of each block, `(r, 1, T, P + T)`.
        """
        key = (window, like.dtype)
        if key not in self._masks:
            seen = [self.prompts.sees(window), *(block.sees(self.prompts, window) for block in self.blocks)]
            self._masks[key] = [_additive(sees, like) for sees in seen]
        return self._masks[key]


def _blocks(lengths: torch.Tensor, prompt_width: int) -> list[slice]:
    """
    Completions in blocks, so that attention computes little padding. Found by dynamic programming.

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


def _additive(sees: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What is added to scores of attention, `(rows, queries, keys)` to `(rows, 1, queries, keys)`."""
    mask = torch.zeros(sees.shape, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(~sees, torch.finfo(like.dtype).min).unsqueeze(1)


class _Present:
    """The packing that a model's layers compute now, and the attention implementations that its configs had."""

    def __init__(self, packing: Packing, former: list[tuple[PretrainedConfig, str | None]]):
        self.packing = packing
        self.former = former


_present: _Present | None = None


def begin(model: PreTrainedModel, packing: Packing) -> None:
    """
    Let a model's attention compute a packing, until [`end`]: a layer that is checkpointed is computed again in the
    backward pass. Passes over other sequences are computed as before.
    """
    global _present
    if _present is not None:
        end()
    configs: dict[int, PretrainedConfig] = {id(model.config): model.config}
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig):
            configs.setdefault(id(config), config)
    former = [(config, config._attn_implementation) for config in configs.values()]
    _present = _Present(packing, former)
    for config, name in former:
        if name is not None:
            config._attn_implementation_internal = _registered(name)


def end() -> None:
    """Let attention be as before [`begin`]."""
    global _present
    if _present is None:
        return
    for config, name in _present.former:
        config._attn_implementation_internal = name
    _present = None


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
    packing = None if _present is None else _present.packing
    is_packed = packing is not None and query.size(0) == 1 and query.size(2) == packing.num_tokens
    if packing is None or not is_packed:
        return _function_of(name, module)(module, query, key, value, attention_mask, **kwargs)
    function = _function_of(name, module, kwargs)
    window = kwargs.get("sliding_window", getattr(module, "sliding_window", None))
    packing.num_calls += 1
    packing.num_windows += window is not None
    prompts = packing.prompts
    of_prompts, *of_blocks = packing.masks(window, query)
    prompt_keys = prompts.rows_of(key)
    prompt_values = prompts.rows_of(value)
    outputs, _ = function(module, prompts.rows_of(query), prompt_keys, prompt_values, of_prompts, **kwargs)
    results = [prompts.tokens_of(outputs)]
    for block, mask in zip(packing.blocks, of_blocks, strict=True):
        completions = block.completions
        outputs, _ = function(
            module,
            completions.rows_of(query),
            torch.cat([prompt_keys[block.prompt_of_row], completions.rows_of(key)], dim=2),
            torch.cat([prompt_values[block.prompt_of_row], completions.rows_of(value)], dim=2),
            mask,
            **kwargs,
        )
        results.append(completions.tokens_of(outputs))
    padding = packing.num_tokens - sum(map(len, results))
    results.append(outputs.new_zeros(padding, *outputs.shape[2:]))
    return torch.cat(results).unsqueeze(0), None


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
    begin(model, packing)
    size = packing.num_tokens
    # It keeps the model from making one. Any other attention than ours fails on it
    unusable = torch.full((1, 1, 1, 1), torch.nan, device=packing.ids.device).expand(1, 1, size, size + 1)
    outputs = forward(
        input_ids=packing.ids,
        attention_mask=unusable,
        position_ids=packing.positions,
        **{**options, "use_cache": False},
    )
    config = model.config.get_text_config()
    if packing.num_calls == 0 or packing.num_windows < _layers_with_window(config):
        raise RuntimeError("the model computes attention in a way of its own")
    outputs.last_hidden_state = outputs.last_hidden_state[0][packing.states]
    return outputs


def _layers_with_window(config: Any) -> int:
    """How many layers of a model have a sliding window."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        return sum(layer == "sliding_attention" for layer in layer_types)
    has_window = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    return int(has_window)
