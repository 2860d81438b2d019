"""Tasks of reasoning-gym whose answer is a number, with worked solutions: completions as long as the model makes them.

A prompt is a question by the model's chat template. A completion is right if its last number is the answer.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

from benchmarks.smollm2.gym import Asked, Gym


END_OF_TURN = "<|im_end|>"
INSTRUCTION = 'Solve it step by step, and end with "Answer: " and the number.'
#: With commas as in `1,000`. A minus after a digit is an operator
NUMBER = re.compile(r"(?:(?<!\d)-)?\d+(?:,\d{3})*(?:\.\d+)?")


class Worked(Gym):
    """Questions with worked solutions of up to 256 tokens."""

    tasks: ClassVar[dict[str, dict[str, Any]]] = {
        "gsm_symbolic": {},
    }
    of_a_task = 64
    held_out_of_a_task = 10
    samples = 2
    max_completion = 256
    end = END_OF_TURN
    micro_batch = 8  # 64 rows of this length need more memory than most machines have

    def prompt_of(self, kind: str, entry: dict[str, Any]) -> str:
        return f"{entry['question'].strip()}\n{INSTRUCTION}"

    def text_of(self, prompt: str, tokenizer) -> str:
        message = {"role": "user", "content": prompt}
        return tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)

    def score(self, completion: str, asked: Asked) -> float:
        """1 if the last number is the answer, else 0."""
        number = last_number(completion)
        return float(number is not None and number == float(asked.entry["answer"]))


def last_number(text: str) -> float | None:
    """The last number of a text, if it has one."""
    numbers = NUMBER.findall(text)
    if not numbers:
        return None
    return float(numbers[-1].replace(",", ""))
