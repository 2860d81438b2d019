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

import torch
from transformers import AttentionInterface, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


#: Of attention implementations, in front of the name of the model's own one
PREFIX = "trl_dataeff|"
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


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
class Packing:
    """
    Where the tokens of a micro-batch are in one sequence of N tokens: m different prompts, and completions of R rows.

    Attributes:
        ids: token ids, int64 `(1, N)`.
        positions: of each token, those that it has in the micro-batch, int64 `(1, N)`.
        prompts: places of each prompt's tokens, int64 `(m, P)`; 0 behind its end.
        completions: places of each completion's tokens, int64 `(R, T)`; 0 behind its end.
        prompt_lengths: int64 `(m,)`.
        prompt_of_row: which prompt each row has, int64 `(R,)`.
        attended_prompts: which tokens of prompts are attended to, bool `(m, P)`.
        attended_completions: likewise, bool `(R, T)`.
        tokens_of_prompts: which of the m x P places hold tokens, flat int64.
        tokens_of_completions: which of the R x T places do, likewise.
        states: places of the hidden states from which a completion's tokens are predicted, and of its last token,
            int64 `(R, columns of completions + 1)`.
        num_calls: layers that have computed attention so far.
        num_windows: of these, layers with a sliding window.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    prompts: torch.Tensor
    completions: torch.Tensor
    prompt_lengths: torch.Tensor
    prompt_of_row: torch.Tensor
    attended_prompts: torch.Tensor
    attended_completions: torch.Tensor
    tokens_of_prompts: torch.Tensor
    tokens_of_completions: torch.Tensor
    states: torch.Tensor
    num_calls: int = 0
    num_windows: int = 0
    _masks: dict[Any, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

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
        of_prompts = attended[first_rows, :width]
        of_completions = attended[:, width:]
        # From the first token that is attended to, and up to the last one
        are_prompts = of_prompts.cumsum(1) > 0
        are_completions = of_completions.flip(1).cumsum(1).flip(1) > 0
        prompt_lengths = are_prompts.sum(1)
        completion_lengths = are_completions.sum(1)
        columns = torch.arange(input_ids.size(1), device=input_ids.device)
        positions = torch.cat(
            [
                columns[:width].expand_as(are_prompts)[are_prompts],
                columns[width:].expand_as(are_completions)[are_completions],
            ]
        )
        ids = torch.cat(
            [input_ids[first_rows, :width][are_prompts], input_ids[:, width:][are_completions]],
        )
        if multiple is not None:
            missing = (0, -len(ids) % multiple)
            ids = torch.nn.functional.pad(ids, missing)
            positions = torch.nn.functional.pad(positions, missing)
        lengths = torch.cat([prompt_lengths, completion_lengths])
        starts = lengths.cumsum(0) - lengths
        prompts, tokens_of_prompts = _places(starts[: len(first_rows)], prompt_lengths)
        completions, tokens_of_completions = _places(starts[len(first_rows) :], completion_lengths)
        last_of_prompt = (starts[: len(first_rows)] + prompt_lengths - 1)[prompt_of_row]
        states = torch.zeros(len(input_ids), completion_width + 1, dtype=torch.int64, device=input_ids.device)
        states[:, 0] = last_of_prompt
        states[:, 1 : 1 + completions.size(1)] = completions[:, :completion_width]
        attended_flat = torch.cat([of_prompts[are_prompts], of_completions[are_completions]])
        return cls(
            ids=ids.unsqueeze(0),
            positions=positions.unsqueeze(0),
            prompts=prompts,
            completions=completions,
            prompt_lengths=prompt_lengths,
            prompt_of_row=prompt_of_row,
            attended_prompts=attended_flat[prompts],
            attended_completions=attended_flat[completions],
            tokens_of_prompts=tokens_of_prompts,
            tokens_of_completions=tokens_of_completions,
            states=states,
        )

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.ids.size(1)

    def masks(self, window: int | None, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        What tokens attend to, made once for all layers: 0, and the least number of the dtype where they do not.

        Args:
            window (`int`, *optional*): sliding window of the layer.
            like (`torch.Tensor`): has the dtype and the device of the masks.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: prompts over themselves, `(m, 1, P, P)`; completions over their prompt
                and themselves, `(R, 1, T, P + T)`.
        """
        key = (window, like.dtype)
        if key not in self._masks:
            sees = (self._seen_by_prompts(window), self._seen_by_completions(window))
            self._masks[key] = (_additive(sees[0], like), _additive(sees[1], like))
        return self._masks[key]

    def _seen_by_prompts(self, window: int | None) -> torch.Tensor:
        """Bool `(m, P, P)`."""
        places = torch.arange(self.prompts.size(1), device=self.ids.device)
        distance = places[:, None] - places
        sees = (distance >= 0) & self.attended_prompts[:, None, :]
        return sees if window is None else sees & (distance < window)

    def _seen_by_completions(self, window: int | None) -> torch.Tensor:
        """Bool `(R, T, P + T)`."""
        places = torch.arange(self.completions.size(1), device=self.ids.device)
        places_of_prompt = torch.arange(self.prompts.size(1), device=self.ids.device)
        lengths = self.prompt_lengths[self.prompt_of_row]  # (R,)
        own_distance = (places[:, None] - places).expand(len(lengths), -1, -1)
        prompt_distance = lengths[:, None, None] + places[:, None] - places_of_prompt
        is_of_prompt = (places_of_prompt < lengths[:, None]) & self.attended_prompts[self.prompt_of_row]
        sees_prompt = is_of_prompt[:, None, :].expand_as(prompt_distance)
        sees_own = (own_distance >= 0) & self.attended_completions[:, None, :]
        sees = torch.cat([sees_prompt, sees_own], dim=2)
        distance = torch.cat([prompt_distance, own_distance], dim=2)
        return sees if window is None else sees & (distance < window)


def _additive(sees: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What is added to scores of attention, `(rows, queries, keys)` to `(rows, 1, queries, keys)`."""
    mask = torch.zeros(sees.shape, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(~sees, torch.finfo(like.dtype).min).unsqueeze(1)


def _places(starts: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Places of sequences in one, one row for each, and which of these places hold tokens.

    Args:
        starts (`torch.Tensor` of shape `(n,)`): place of each sequence's first token.
        lengths (`torch.Tensor` of shape `(n,)`): tokens of each.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: int64 `(n, longest)`, and flat int64 indices into it.
    """
    columns = torch.arange(max(int(lengths.max()), 1), device=lengths.device)
    is_token = columns < lengths[:, None]
    places = torch.where(is_token, starts[:, None] + columns, 0)
    return places, is_token.flatten().nonzero().squeeze(1)


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
    prompt_mask, completion_mask = packing.masks(window, query)
    of_rows = packing.prompt_of_row
    prompt_keys = _by_row(key, packing.prompts)
    prompt_values = _by_row(value, packing.prompts)
    of_prompts, _ = function(
        module,
        _by_row(query, packing.prompts),
        prompt_keys,
        prompt_values,
        prompt_mask,
        **kwargs,
    )
    of_completions, _ = function(
        module,
        _by_row(query, packing.completions),
        torch.cat([prompt_keys[of_rows], _by_row(key, packing.completions)], dim=2),
        torch.cat([prompt_values[of_rows], _by_row(value, packing.completions)], dim=2),
        completion_mask,
        **kwargs,
    )
    prompts = of_prompts.flatten(0, 1).index_select(0, packing.tokens_of_prompts)
    completions = of_completions.flatten(0, 1).index_select(0, packing.tokens_of_completions)
    padding = prompts.new_zeros(packing.num_tokens - len(prompts) - len(completions), *prompts.shape[1:])
    return torch.cat([prompts, completions, padding]).unsqueeze(0), None


def _by_row(states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Tokens of a sequence by row: `(1, heads, N, d)` to `(rows, heads, columns, d)`."""
    rows, columns = places.shape
    taken = states[0].index_select(1, places.flatten())  # (heads, rows x columns, d)
    return taken.unflatten(1, (rows, columns)).transpose(0, 1)


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
