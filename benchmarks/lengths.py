"""
How long real completions are: those of SmolLM2-135M-Instruct to reasoning-gym's `gsm_symbolic`, at temperature 1.

    python -m benchmarks.lengths

Writes one JSON line per prompt, as soon as its completions are there, and no texts. The first line says what code and
settings made them. A run that was cut off goes on where it ended.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.provenance import provenance
from benchmarks.smollm2.questions import reasoning_gym
from benchmarks.smollm2.train import load


ROOT = Path(__file__).resolve().parents[1]
WEIGHTS = ROOT / "quickstart"  # shared with the quickstart
RESULTS = ROOT / "benchmarks" / "results" / "update" / "lengths.jsonl"

TASK = "gsm_symbolic"
END_OF_TURN = "<|im_end|>"
SEED = 0
CAP = 1024
CAPS = (256, 512, 1024)
PROMPTS_AT_ONCE = 25
ROWS_AT_ONCE = 50
# A completion that has ended leaves its batch at the next of these numbers of tokens; there the others' tokens are
# computed again, which costs less than to carry ended ones along
STAGES = (*range(96, CAP, 96), CAP)


@dataclass
class Completion:
    """A completion that is being generated."""

    prompt: int
    """Place of its prompt."""
    ids: list[int]
    """Tokens of the prompt and of the completion so far."""
    prompt_length: int
    ended: bool = field(default=False)

    @property
    def length(self) -> int:
        """Tokens of the completion, its end included."""
        return len(self.ids) - self.prompt_length


def prompts_of(tokenizer: Any, count: int) -> list[list[int]]:
    """Token ids of the first `count` questions, by the model's chat template."""
    entries = reasoning_gym(TASK, SEED)
    prompts = []
    for _ in range(count):
        message = {"role": "user", "content": next(entries)["question"]}
        text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    return prompts


@torch.no_grad()
def extend(model: Any, tokenizer: Any, completions: list[Completion], limit: int) -> None:
    """
    Generate until each completion has ended or has `limit` tokens. Each next token depends on the tokens before it
    alone, so that it does not matter how often a completion was interrupted.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        completions (`list[Completion]`): Have equally many tokens so far. They are changed in place.
        limit (`int`): Most tokens of a completion.
    """
    inputs = tokenizer.pad(
        {"input_ids": [completion.ids for completion in completions]},
        padding_side="left",
        return_tensors="pt",
    )
    sequences = model.generate(
        **inputs,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=limit - completions[0].length,
    )
    new_tokens = sequences[:, inputs["input_ids"].shape[1] :].tolist()
    for completion, ids in zip(completions, new_tokens, strict=True):
        if tokenizer.eos_token_id in ids:
            ids = ids[: ids.index(tokenizer.eos_token_id) + 1]
            completion.ended = True
        completion.ids += ids


def complete(
    model: Any, tokenizer: Any, prompts: list[list[int]], group_size: int, stages: Sequence[int] = STAGES
) -> list[list[Completion]]:
    """Generate completions.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        prompts (`list[list[int]]`): Token ids of each prompt.
        group_size (`int`): Completions of each prompt.
        stages (`Sequence[int]`, *optional*): See `STAGES`. The last one is the most tokens of a completion.

    Returns:
        The completions of each prompt.
    """
    groups = []
    for prompt, ids in enumerate(prompts):
        groups.append([Completion(prompt, list(ids), len(ids)) for _ in range(group_size)])
    for limit in stages:
        going_on = []
        for group in groups:
            going_on += [row for row in group if not row.ended and row.length < limit]
        # Rows of similar length together, for less padding; a sort keeps equal prompts together
        going_on.sort(key=lambda row: (len(row.ids), row.prompt))
        for start in range(0, len(going_on), ROWS_AT_ONCE):
            extend(model, tokenizer, going_on[start : start + ROWS_AT_ONCE], limit)
    return groups


def read(path: Path = RESULTS) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read recorded lengths.

    Args:
        path (`Path`, *optional*): The file.

    Returns:
        What made them; and for each prompt its `prompt_tokens` and the `completion_tokens` of its completions.
    """
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return lines[0], lines[1:]


def at_cap(groups: list[dict[str, Any]], cap: int) -> list[list[int]]:
    """The completion lengths of each prompt, had generation ended at `cap` tokens."""
    return [[min(length, cap) for length in group["completion_tokens"]] for group in groups]


def summary(groups: list[dict[str, Any]]) -> Iterator[str]:
    """Lines on the recorded lengths."""
    prompts = [group["prompt_tokens"] for group in groups]
    yield f"{len(groups)} prompts of {min(prompts)} to {max(prompts)} tokens, mean {statistics.mean(prompts):.0f}"
    for cap in CAPS:
        lengths = [length for group in at_cap(groups, cap) for length in group]
        deciles = statistics.quantiles(lengths, n=10)
        truncated = sum(length == cap for length in lengths) / len(lengths)
        yield (
            f"cap {cap}: {len(lengths)} completions, mean {statistics.mean(lengths):.0f}, median "
            f"{statistics.median(lengths):.0f}, 10 % below {deciles[0]:.0f}, 10 % above {deciles[-1]:.0f}, "
            f"{truncated:.0%} at the cap"
        )


def record(path: Path, prompts: int, group_size: int) -> None:
    """Append the lengths of what is missing in a file.

    Args:
        path (`Path`): The file.
        prompts (`int`): How many there are to be.
        group_size (`int`): Completions of each.
    """
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    model, tokenizer = load(WEIGHTS, END_OF_TURN)
    # As inference engines compute; the weights come from 4 bits
    model.to(torch.bfloat16)
    settings = {
        "task": TASK,
        "model": "SmolLM2-135M-Instruct",
        "seed": SEED,
        "temperature": 1.0,
        "dtype": "bfloat16",
        "cap": CAP,
        "group_size": group_size,
        **provenance(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_text(json.dumps(settings) + "\n")
    done = len(read(path)[1])
    asked = prompts_of(tokenizer, prompts)
    for start in range(done, prompts, PROMPTS_AT_ONCE):
        began = time.perf_counter()
        torch.manual_seed(SEED + start)
        batch = asked[start : start + PROMPTS_AT_ONCE]
        groups = complete(model, tokenizer, batch, group_size)
        with path.open("a") as file:
            for ids, group in zip(batch, groups, strict=True):
                line = {"prompt_tokens": len(ids), "completion_tokens": [row.length for row in group]}
                file.write(json.dumps(line) + "\n")
        tokens = sum(row.length for group in groups for row in group)
        print(f"{start + len(batch)} prompts, {tokens} tokens in {time.perf_counter() - began:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--file", type=Path, default=RESULTS)
    parser.add_argument("--summary", action="store_true", help="only print statistics of what is recorded")
    arguments = parser.parse_args()
    if not arguments.summary:
        record(arguments.file, arguments.prompts, arguments.group_size)
    for line in summary(read(arguments.file)[1]):
        print(line)


if __name__ == "__main__":
    main()
