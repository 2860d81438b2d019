"""Small local models, tokenizers and datasets in place of the Hub ids that TRL's own GRPO tests use: the architecture
that an id names, random weights, and the chat template of its family. Only for tests that write out token ids of Qwen
the vocabulary has Qwen's size: training with a small one takes a fifth of the time.
"""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch
from datasets import Dataset, DatasetDict
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode


# Special tokens follow the ordinary ones. The smaller number still makes an end-of-sequence token rare: one test
# relies on a random model not to end its completions.
FULL_VOCABULARY, SMALL_VOCABULARY = 151_643, 16_384
# Tests make the model "generate" tool calls by token id. These ids decode as in Qwen's vocabulary; all others except
# single bytes decode to made-up words.
_PIECES = {
    293: " b", 314: " {", 330: ' "', 397: ">\n", 411: "out", 450: "de", 497: '",', 522: "</", 606: "name", 788: '":',
    894: " any", 927: "sh", 944: "'t", 1318: "text", 1414: " know", 1513: " don", 2765: " won", 4913: '{"',
    5212: ' {"', 5392: " tool", 6023: "hi", 6659: "call", 7692: "async", 9520: "step", 11248: "}}\n", 13477: "crement",
    14172: "tool", 16252: " increment", 16370: "arguments", 17453: "Done", 22785: "_tool", 35744: "increment",
    64648: "multiply", 93054: "_multiply", 95642: '"}}\n',
}  # fmt: skip
_SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>",
    "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>",
    "</think>", "<|finetune_right_pad_id|>",
]  # fmt: skip
_PAD, _EOS = _SPECIAL.index("<|endoftext|>"), _SPECIAL.index("<|im_end|>")
# Tokens that are text for the tokenizer's user: `decode(..., skip_special_tokens=True)` keeps them, as for Qwen
_KEPT = {"<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"}


def _word(number: int) -> str:
    """A word of its own for each number, of different lengths: tests reward long completions and many letters."""
    letters, rest = "", number
    while rest:
        rest, digit = divmod(rest, 25)
        letters += chr(ord("a") + digit)
    return "Ġ" + letters + "z" * (number % 7)


@cache
def _vocabulary(ordinary: int) -> dict[str, int]:
    symbols = bytes_to_unicode()
    pieces = {i: "".join(symbols[byte] for byte in text.encode()) for i, text in _PIECES.items()}
    words = (pieces.get(i) or _word(i) for i in range(256, ordinary))
    return {token: i for i, token in enumerate([*symbols.values(), *words])}


def make_tokenizer(template: str, ordinary: int) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of `ordinary` tokens and the special ones, with the chat template `template` of the
    installed TRL, such as `"qwen3"`.
    """
    from trl import chat_template_utils

    backend = Tokenizer(models.BPE(vocab=_vocabulary(ordinary), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(token, special=token not in _KEPT, normalized=False) for token in _SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=_SPECIAL[_PAD],
        eos_token=_SPECIAL[_EOS],
        chat_template=getattr(chat_template_utils, f"{template}_chat_template"),
    )


Maker = Callable[[Path, int], None]  # saves a model with its tokenizer: folder, number of ordinary tokens


def _maker(auto_class, model_type: str, template: str, **fields) -> Maker:
    def make(folder: Path, ordinary: int) -> None:
        sizes = {"hidden_size": 8, "intermediate_size": 32, "num_hidden_layers": 2} | fields
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": ordinary + len(_SPECIAL)}
        ids = {"bos_token_id": None, "eos_token_id": ordinary + _EOS, "pad_token_id": ordinary + _PAD}
        config = AutoConfig.for_model(model_type, **sizes, **heads, **ids)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            auto_class.from_config(config).save_pretrained(folder)
        make_tokenizer(template, ordinary).save_pretrained(folder)

    return make


_causal = partial(_maker, AutoModelForCausalLM)
_classifier = partial(_maker, AutoModelForSequenceClassification, num_labels=1)


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SMALL = {"hidden_size": 128, "intermediate_size": 32}

_MODELS: dict[str, Maker] = {
    "trl-internal-testing/tiny-Cohere2ForCausalLM": _causal("cohere2", "cohere2"),
    "trl-internal-testing/tiny-Gemma2ForCausalLM": _causal("gemma2", "gemma", head_dim=8),
    "trl-internal-testing/tiny-Glm4MoeForCausalLM": _causal(
        "glm4_moe", "glm4moe", n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2, head_dim=8,
        moe_intermediate_size=32, first_k_dense_replace=1,
    ),
    "trl-internal-testing/tiny-GptOssForCausalLM": _causal(
        "gpt_oss", "gptoss", num_local_experts=4, num_experts_per_tok=2, head_dim=8
    ),
    "trl-internal-testing/tiny-LlamaForCausalLM-3.2": _causal("llama", "llama3_2"),
    "trl-internal-testing/tiny-LlamaForSequenceClassification-3.2": _classifier("llama", "llama3_2"),
    "trl-internal-testing/tiny-MistralForCausalLM-0.2": _causal("mistral", "qwen2_5"),
    "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5": _causal("qwen2", "qwen2_5"),
    "trl-internal-testing/tiny-Qwen2ForSequenceClassification-2.5": _classifier("qwen2", "qwen2_5"),
    "trl-internal-testing/tiny-Qwen3ForCausalLM": _causal("qwen3", "qwen3", head_dim=8),
    "trl-internal-testing/tiny-Qwen3ForSequenceClassification": _classifier("qwen3", "qwen3", head_dim=8),
    "trl-internal-testing/tiny-Qwen3MoeForCausalLM": _causal("qwen3_moe", "qwen3", head_dim=8, **_EXPERTS),
    "trl-internal-testing/small-Qwen2ForCausalLM-2.5": _causal("qwen2", "qwen2_5", **_SMALL),
    "trl-internal-testing/small-Qwen3ForCausalLM": _causal("qwen3", "qwen3", head_dim=128, **_SMALL),
}  # fmt: skip


# One of TRL's tests writes the first twelve out.
_PROMPTS = [
    "Beautiful is better than", "Explicit is", "Simple is better", "Complex", "Flat is better than",
    "Sparse is better", "Readability", "Special cases aren't special", "Although practicality beats",
    "Errors should never", "Unless explicitly", "In the face of ambiguity, refuse",
    "If it is easy to explain", "Namespaces are",
]  # fmt: skip
_CONVERSATIONS = [[{"role": "user", "content": f"How does this go on: {prompt}"}] for prompt in _PROMPTS]


_DATASETS = {
    "standard_prompt_only": (_PROMPTS[:12], _PROMPTS[12:]),
    # Fewer rows: tests with tools train on these, on long sequences and the full vocabulary
    "conversational_prompt_only": (_CONVERSATIONS[:2], _CONVERSATIONS[12:]),
}


class NoStandInError(LookupError):
    """An id of the Hub that has no local stand-in."""


def load_dataset(path: str, name: str | None = None, split: str | None = None, streaming: bool = False):
    if path != "trl-internal-testing/zen" or name not in _DATASETS:
        raise NoStandInError(path if name is None else f"{path} ({name})")
    splits = {key: Dataset.from_dict({"prompt": rows}) for key, rows in zip(("train", "test"), _DATASETS[name])}
    if streaming:
        splits = {key: part.to_iterable_dataset() for key, part in splits.items()}
    return splits[split] if split else DatasetDict(splits)


class StandIns:
    """Makes the stand-in of a model when its id is first asked for, and keeps it in `folder`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.vocabulary = SMALL_VOCABULARY

    def model_path(self, model_id: str) -> Path:
        if model_id not in _MODELS:
            raise NoStandInError(model_id)
        path = self.folder / str(self.vocabulary) / model_id
        if not path.exists():
            path.mkdir(parents=True)
            _MODELS[model_id](path, self.vocabulary)
        return path
