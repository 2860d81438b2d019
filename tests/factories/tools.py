"""For tests with tools: a chat template that supports them, and a policy that calls one."""

import random

from datasets import Dataset
from trl.chat_template_utils import qwen3_chat_template

from tests.factories.tiny import tiny_tokenizer


TAGS = ("tool_call", "tool_response", "think")
TOOL_TEMPLATE_TOKENS = ("<|im_start|>", "<|im_end|>", *(f"<{end}{tag}>" for tag in TAGS for end in ("", "/")))


def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def tool_tokenizer():
    return tiny_tokenizer(chat_template=qwen3_chat_template, extra_tokens=TOOL_TEMPLATE_TOKENS)


def tool_arguments(n: int = 24, tool=add) -> dict:
    """Arguments of a trainer whose policy may call `tool`."""
    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"{i:02d}"}] for i in range(n)]})
    return {"train_dataset": dataset, "processing_class": tool_tokenizer(), "tools": [tool]}


def scripted_tool_calls(trainer_class):
    """A subclass whose policy calls `add` in two of three completions and then says something of its own."""

    class Scripted(trainer_class):
        def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
            completions, logprobs = super()._generate_single_turn(
                prompt_ids, images, multimodal_fields, num_generations, has_tool_images
            )
            generator = random.Random(sum(map(sum, prompt_ids)) + self.state.global_step)
            answered = self._tokenizer("</tool_response>")["input_ids"][0]
            for i, ids in enumerate(prompt_ids):
                if answered not in ids and generator.random() < 2 / 3:
                    a, b = generator.randrange(9), generator.randrange(9)
                    text = f'<tool_call>{{"name":"add","arguments":{{"a":{a},"b":{b}}}}}</tool_call>'
                    completions[i] = self._tokenizer(text)["input_ids"]
                    if logprobs is not None:  # the sampler's
                        logprobs[i] = [-1.0] * len(completions[i])
            return completions, logprobs

    Scripted.__name__ = trainer_class.__name__
    return Scripted
