"""The tokenizer (one token a character) and the untrained model (a Llama of about a million parameters)."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .tasks import DIGITS, LETTERS


PAD = "<pad>"
EOS = "<eos>"
NAMES_OF_TASKS = "RVISMA"
SEPARATORS = ":=,*+"
CHARACTERS = LETTERS + DIGITS + NAMES_OF_TASKS + SEPARATORS


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of single characters. Unknown characters become `<pad>`."""
    tokens = [PAD, EOS, *CHARACTERS]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, padding_side="left")


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int, hidden: int = 128, layers: int = 4) -> LlamaForCausalLM:
    """An untrained Llama, the same for equal arguments; the global random state is left as it was."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)
