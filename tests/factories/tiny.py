"""Very small models, tokenizers, datasets and rewards, made in code: nothing is downloaded."""

import string
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback
from trl import GRPOConfig

from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer


CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_tokenizer(chat_template: str | None = CHAT_TEMPLATE, extra_tokens: tuple[str, ...] = ()):
    """A tokenizer of single characters, with `<pad>`, `<eos>` and the roles of a chat as special tokens."""
    special = ["<pad>", "<eos>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", *extra_tokens]
    vocabulary = {token: i for i, token in enumerate([*special, *string.printable])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=special[2:],
        padding_side="left",
        chat_template=chat_template,
    )


def tiny_model(tokenizer=None, seed: int = 0, hidden: int = 32, **fields) -> LlamaForCausalLM:
    """A Llama of two layers and about 30,000 parameters, the same for equal seeds.

    `fields` go into its configuration.
    """
    tokenizer = tokenizer or tiny_tokenizer()
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    defaults = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model = LlamaForCausalLM(LlamaConfig(**defaults | fields))
    torch.set_rng_state(state)
    return model


def save_tiny(path: str | Path, **kwargs) -> str:
    """Save model and tokenizer as an ordinary Hugging Face folder; returns its path."""
    tokenizer = tiny_tokenizer(**kwargs)
    tiny_model(tokenizer).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def plain_dataset(n: int = 24) -> Dataset:
    """Prompts `"0+3="` with the column `answer`."""
    rows = [(i % 7, i % 5) for i in range(n)]
    return Dataset.from_dict(
        {"prompt": [f"{i:02d}:{a}+{b}=" for i, (a, b) in enumerate(rows)], "answer": [str(a + b) for a, b in rows]}
    )


def chat_dataset(n: int = 24) -> Dataset:
    """The prompts of `plain_dataset` as conversations."""
    plain = plain_dataset(n)
    return Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": prompt}] for prompt in plain["prompt"]],
            "answer": list(plain["answer"]),
        }
    )


def text_of(completion) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


def letter_share_reward(completions, **kwargs) -> list[float]:
    """A reward that differs between completions: the share of letters among the first characters."""
    return [sum(c.isalpha() for c in text_of(completion)) / 8 for completion in completions]


def even_length_reward(completion_ids, **kwargs) -> list[float]:
    """0 or 1, each common, for the completions of a random model."""
    return [float(sum(ids) % 2 == 0) for ids in completion_ids]


#: Fields of a short run on the CPU
SMALL = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 8,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


def run(
    output_dir,
    trainer_class=DataEfficientGRPOTrainer,
    *,
    rewards=even_length_reward,
    train=True,
    resume=None,
    trainer=None,
    **fields,
):
    """A short training run on the CPU, from the checkpoint `resume` if given. `fields` go into the config, whose own
    features are off unless they are given; `trainer` are further arguments of the trainer, such as `train_dataset` or
    `model`.
    """
    defaults = {**SMALL, "output_dir": str(output_dir), "learning_rate": 1e-2, "max_steps": 12}
    # By the name: a test may import our trainer once more
    ours = DataEfficientGRPOTrainer.__name__ in [parent.__name__ for parent in trainer_class.__mro__]
    config_class = DataEfficientGRPOConfig if ours else GRPOConfig
    if ours:
        defaults |= {"selection": "uniform", "replay": "off", "compact_update": False}
    arguments = {"train_dataset": plain_dataset(), **(trainer or {})}
    tokenizer = arguments.setdefault("processing_class", tiny_tokenizer())
    if "model" not in arguments:
        by_path = fields.get("beta") and "peft_config" not in arguments  # as TRL loads the reference model
        arguments["model"] = save_tiny(Path(output_dir) / "model") if by_path else tiny_model(tokenizer)
    torch.manual_seed(42)  # before 1.15 TRL made the adapters of LoRA first, and set the seed later
    instance = trainer_class(reward_funcs=rewards, args=config_class(**{**defaults, **fields}), **arguments)
    instance.remove_callback(PrinterCallback)
    if train:
        instance.train(resume_from_checkpoint=resume)
    return instance


def logged(trainer, *names: str) -> list[tuple]:
    """The values of `names` in each of the trainer's logs that has the first one."""
    return [tuple(log.get(name) for name in names) for log in trainer.state.log_history if names[0] in log]
