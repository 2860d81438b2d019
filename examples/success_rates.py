r"""
Makes a column of success rates: a model answers every prompt of GSM8K a few times, with vLLM. For another dataset,
change `make_conversation` and the reward.

    python examples/success_rates.py \
        --model_name_or_path Qwen/Qwen2.5-1.5B-Instruct --dataset_name openai/gsm8k --dataset_config main \
        --samples 4 --max_completion_length 512 --output gsm8k_rates

Then set `dataset_name: gsm8k_rates`, `selection: dots` and `success_rate_column: success_rate` in a recipe.

What it costs: 4 completions of each prompt, which are not trained on. For 7,500 prompts these are 30,000, as many as
a run of 234 steps of 128 completions generates. A run that selects learns the same from its own first pass, and trains
meanwhile. So make the column where it serves several runs (other rates, other models), or where it is generated on
other hardware. If your dataset has such a column already, of any model, use that one.

Without vLLM, the completions come from Transformers, which is far slower.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.import_utils import is_vllm_available

from trl_dataeff.rewards import numeric_answer_reward


SYSTEM_PROMPT = r"Please reason step by step, and put your final answer within \boxed{}."
BATCH = 32  # prompts that Transformers answers at a time

#: Answers conversations: for each, the texts of all samples
Generate = Callable[[Sequence[list[dict[str, str]]]], list[list[str]]]


def make_conversation(example: dict[str, Any]) -> dict[str, Any]:
    """The prompt as the run will have it."""
    question = {"role": "user", "content": example["question"]}
    return {"prompt": [{"role": "system", "content": SYSTEM_PROMPT}, question]}


def with_vllm(options: argparse.Namespace) -> Generate:
    from vllm import LLM, SamplingParams

    model = LLM(options.model_name_or_path, dtype=options.dtype)
    sampling = SamplingParams(
        n=options.samples, temperature=options.temperature, max_tokens=options.max_completion_length
    )

    def generate(prompts: Sequence[list[dict[str, str]]]) -> list[list[str]]:
        answers = model.chat(list(prompts), sampling)
        return [[completion.text for completion in answer.outputs] for answer in answers]

    return generate


def with_transformers(options: argparse.Namespace) -> Generate:
    tokenizer = AutoTokenizer.from_pretrained(options.model_name_or_path, padding_side="left")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(options.model_name_or_path, dtype=options.dtype).to(device)

    def generate(prompts: Sequence[list[dict[str, str]]]) -> list[list[str]]:
        texts = []
        for start in range(0, len(prompts), BATCH):
            inputs = tokenizer.apply_chat_template(
                list(prompts[start : start + BATCH]),
                add_generation_prompt=True,
                padding=True,
                return_dict=True,
                return_tensors="pt",
            ).to(device)
            ids = model.generate(
                **inputs,
                do_sample=True,
                temperature=options.temperature,
                top_k=0,  # as in a run, whatever the model's own settings are
                top_p=1.0,
                repetition_penalty=1.0,
                max_new_tokens=options.max_completion_length,
                num_return_sequences=options.samples,
                pad_token_id=tokenizer.pad_token_id,
            )
            completions = ids[:, inputs["input_ids"].shape[1] :]
            texts += tokenizer.batch_decode(completions, skip_special_tokens=True)
        return [texts[start : start + options.samples] for start in range(0, len(texts), options.samples)]

    return generate


def success_rates(dataset: Dataset, texts: list[list[str]], reward: Callable[..., list[float | None]]) -> list:
    """
    The share of each prompt's completions that the reward function calls right.

    Args:
        dataset ([`~datasets.Dataset`]): N rows, whose columns the reward function gets.
        texts (`list[list[str]]`): completions of each.
        reward (`Callable`): a reward function of TRL, with rewards in [0, 1].

    Returns:
        `list`: N rates, `None` where no completion got a reward.
    """
    rates = []
    for row, completions in zip(dataset, texts, strict=True):
        messages = [[{"role": "assistant", "content": text}] for text in completions]
        columns = {name: [value] * len(messages) for name, value in row.items() if name != "prompt"}
        rewards = reward(prompts=[row["prompt"]] * len(messages), completions=messages, **columns)
        known = [value for value in rewards if value is not None]
        rates.append(sum(known) / len(known) if known else None)
    return rates


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--dataset_name", required=True)
    parser.add_argument("--dataset_config")
    parser.add_argument("--dataset_split", default="train")
    parser.add_argument("--samples", type=int, default=4, help="completions of each prompt (default: 4)")
    parser.add_argument("--temperature", type=float, default=1.0, help="that of the run (default: 1)")
    parser.add_argument("--max_completion_length", type=int, default=512, help="that of the run (default: 512)")
    parser.add_argument("--output", required=True, help="folder of the dataset with the column")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = parse()
    dataset = load_dataset(options.dataset_name, options.dataset_config, split=options.dataset_split)
    dataset = dataset.map(make_conversation)
    generate = with_vllm(options) if is_vllm_available() else with_transformers(options)
    texts = generate(dataset["prompt"])
    # It compares with the number after #### in the column `answer`
    rates = success_rates(dataset, texts, numeric_answer_reward)
    known = [rate for rate in rates if rate is not None]
    if not known:
        raise SystemExit("No completion got a reward: the reward function does not find what it compares with.")
    dataset.add_column("success_rate", rates).to_parquet(f"{options.output}/train.parquet")
    effective = sum(0 < rate < 1 for rate in known)
    print(
        f"{options.output}/train.parquet: success rates of {len(known)} prompts, mean {sum(known) / len(known):.2f}; "
        f"{effective} prompts had both right and wrong completions."
    )
