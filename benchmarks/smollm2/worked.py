"""Tasks of reasoning-gym whose answer is a number, with worked solutions: completions are as long as the model makes
them.

A prompt is a conversation by the model's chat template: a question with a worked solution, always the same for a task,
and then the question that is asked. A completion is right if its last number is the answer.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, NamedTuple

from transformers import GenerationConfig

from benchmarks.smollm2.generation import generate
from benchmarks.smollm2.gym import Asked, Computed, Gym


END_OF_TURN = "<|im_end|>"
#: With commas as in `1,000`. A minus after a digit is an operator
NUMBER = re.compile(r"(?:(?<!\d)-)?\d+(?:,\d{3})*(?:\.\d+)?")


class Example(NamedTuple):
    """What is shown before each question of a task."""

    question: str
    solution: str


class Worked(Gym):
    """
    Questions with worked solutions of about 50 tokens, at most 96. The initial model solves about a tenth of them, and
    hardly any of `leg_counting`.
    """

    examples: ClassVar[dict[str, Example]] = {
        "aiw": Example(
            "Emma has 4 brothers and she also has 2 sisters. How many sisters does Emma's brother have?",
            "Emma's brother has the sisters that Emma has, and Emma herself. Emma has 2 sisters. 2 + 1 = 3. "
            "The answer is 3.",
        ),
        "chain_sum": Example(
            "State the final answer to the following arithmetic problem: 8 + 7 - 4 + 9 + 3 =",
            "8 + 7 = 15. 15 - 4 = 11. 11 + 9 = 20. 20 + 3 = 23. The answer is 23.",
        ),
        "gcd": Example(
            "Find the Greatest Common Divisor (GCD) of these numbers: 12, 18. Give only the GCD as your final answer.",
            "The divisors of 12 are 1, 2, 3, 4, 6, 12. The divisors of 18 are 1, 2, 3, 6, 9, 18. "
            "Both have 1, 2, 3, 6. The greatest is 6. The answer is 6.",
        ),
        "lcm": Example(
            "Find the Least Common Multiple (LCM) of these numbers: 6, 8",
            "The multiples of 8 are 8, 16, 24. 8 / 6 leaves 2. 16 / 6 leaves 4. 24 / 6 = 4. The answer is 24.",
        ),
        "leg_counting": Example(
            "Now, how many legs are there in total if you have 3 cats, 2 ducks?",
            "A cat has 4 legs. 3 * 4 = 12. A duck has 2 legs. 2 * 2 = 4. 12 + 4 = 16. The answer is 16.",
        ),
        "number_sequence": Example(
            "4, 7, 10, 13, ?",
            "7 - 4 = 3. 10 - 7 = 3. 13 - 10 = 3. The next number is 13 + 3 = 16. The answer is 16.",
        ),
        "products": Example(
            "Solve the following multiplication: 6 * 4. Give only the result as your final answer.",
            "6 * 4 = 6 + 6 + 6 + 6. 6 + 6 = 12. 12 + 6 = 18. 18 + 6 = 24. The answer is 24.",
        ),
        "simple_equations": Example(
            "Solve for x: 3*x + 4 = 19",
            "3*x = 19 - 4. 19 - 4 = 15. x = 15 / 3. 15 / 3 = 5. The answer is 5.",
        ),
    }
    tasks: ClassVar[dict[str, dict[str, Any]]] = {
        "aiw": {},
        "chain_sum": {"min_terms": 4, "max_terms": 6, "max_digits": 1},
        "gcd": {"max_value": 50},
        "lcm": {"max_value": 12},
        "leg_counting": {"min_animals": 2, "max_animals": 3, "max_instances": 5},
        "number_sequence": {},
        "products": {"max_digits": 2},
        "simple_equations": {"max_terms": 2, "max_value": 10},
    }
    of_a_task = 48
    held_out_of_a_task = 12
    samples = 2
    measures_greedy = False  # it would take a third of an evaluation
    temperature = 0.7
    max_completion = 96
    end = END_OF_TURN
    micro_batch = 8  # TRL's loss of more rows of this length needs more memory than most machines have

    def prompt_of(self, kind: str, entry: dict[str, Any]) -> str:
        """Without what comes before the question: of `leg_counting`, the same two lines each time."""
        return entry["question"].strip().splitlines()[-1]

    def text_of(self, asked: Asked, tokenizer) -> str:
        example = self.examples[asked.kind]
        conversation = [
            {"role": "user", "content": example.question},
            {"role": "assistant", "content": example.solution},
            {"role": "user", "content": asked.prompt},
        ]
        return tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)

    def score(self, completion: str, asked: Asked) -> float:
        """1 if the last number is the answer, else 0."""
        number = last_number(completion)
        return float(number is not None and number == float(asked.entry["answer"]))


class SeveralWorked(Worked):
    """A quarter as many questions, for several passes, a finer measurement, and generation that takes less time."""

    of_a_task = 12
    held_out_of_a_task = 15
    samples = 4
    generates = staticmethod(generate)
    rows_at_once = 240

    def compute_prompts(self, model, tokenizer, questions: list[Asked]) -> Computed:
        texts = [self.text_of(asked, tokenizer) for asked in questions]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
        return Computed(inputs["input_ids"], inputs["attention_mask"], cache=None)

    def completions(self, model, tokenizer, prompts: Computed, samples: int, **sampling: Any) -> list[str]:
        config = GenerationConfig(
            max_new_tokens=self.max_completion,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            **sampling,
        )
        ids = prompts.ids.repeat_interleave(samples, dim=0)
        mask = prompts.mask.repeat_interleave(samples, dim=0)
        generated = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        return tokenizer.batch_decode(generated[:, ids.shape[1] :], skip_special_tokens=True)


def last_number(text: str) -> float | None:
    """The last number of a text, if it has one."""
    numbers = NUMBER.findall(text)
    if not numbers:
        return None
    return float(numbers[-1].replace(",", ""))
