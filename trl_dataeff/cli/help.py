"""The help of `trl-dataeff grpo`: the fields of this package first, then those of TRL, as plain text."""

from __future__ import annotations

import argparse
import re
import textwrap
from dataclasses import fields

from trl import GRPOConfig, TrlParser
from trl.scripts.grpo import GRPOScriptArguments

from trl_dataeff.cli.data import DataEfficientGRPOScriptArguments
from trl_dataeff.cli.main import ParagraphHelpFormatter
from trl_dataeff.config import DataEfficientGRPOConfig


DESCRIPTION = """\
Train a language model with GRPO (TRL's GRPOTrainer) and a faster update; with prompt selection and rollout replay,
if they are switched on.

A recipe is a YAML file of the fields below; a field on the command line overrides the recipe. RECIPE is a file, or a
name from `trl-dataeff recipes list`. `--num_processes 4`, `--accelerate_config multi_gpu` and every other option
of `accelerate launch` are passed on. `dataset_name` also takes a local .parquet, .jsonl, .json or .csv file, or a
folder from `save_to_disk`. `reward_funcs` also takes `exact_answer_reward`, `numeric_answer_reward` and
`math_verify_reward`.

examples:
  # a recipe that comes with the package, for 20 steps
  trl-dataeff grpo --config Qwen2.5-0.5B-Instruct/gsm8k/uniform --max_steps 20

  # your own data, without a recipe: a file with the columns `prompt` and `answer`
  trl-dataeff grpo --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \\
      --dataset_name train.jsonl --prompt_as_chat --reward_funcs numeric_answer_reward \\
      --use_peft --lora_dropout 0 --output_dir out
"""
_OPTIONS = ("help", "config")

# Markup of help texts that are written for documentation pages
_LINK = re.compile(r"\[([^\[\]]+)\]\((\S+?)\)")  # Markdown: [text](address)
_REFERENCE = re.compile(r"\[`~?([\w.]+)`\]")  # Hugging Face's doc-builder: [`~trl.GRPOTrainer`]
_ROLE = re.compile(r":(?:py:)?\w+:`~?([\w.]+)`")  # Sphinx: :class:`~trl.GRPOTrainer`


def plain_text(text: str) -> str:
    """
    Return a help text without the markup of documentation pages. Names in backquotes stay as they are.

    Args:
        text (`str`):
            Help of a field, in the Markdown of Hugging Face's documentation.

    Returns:
        `str`: The text, in which a link is its text and its address, and a reference the last part of the name.
    """
    text = _LINK.sub(r"\1 (\2)", text)
    text = _REFERENCE.sub(_last_name, text)
    return _ROLE.sub(_last_name, text)


def _last_name(reference: re.Match[str]) -> str:
    _, _, name = reference[1].rpartition(".")
    return f"`{name}`"


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, ParagraphHelpFormatter):
    """Shows help texts as plain text, with their defaults."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = super()._get_help_string(action)
        return None if text is None else plain_text(text)

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Break lines between words only, so that addresses can be copied."""
        return textwrap.wrap(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False)


class GRPOParser(TrlParser):
    """TRL's parser, whose help is in groups: general options, the fields of this package, and all others."""

    def format_help(self) -> str:
        own_names = names_of_own_fields()
        options = [action for action in self._actions if action.dest in _OPTIONS]
        own = [action for action in self._actions if action.dest in own_names]
        others = [action for action in self._actions if action not in (*options, *own)]
        groups = {
            "options": options,
            "fields of this package": own,
            "fields of TRL and Transformers": others,
        }
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, [])
        formatter.add_text(self.description)
        for title, actions in groups.items():
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        return formatter.format_help()


def names_of_own_fields() -> set[str]:
    names = set()
    for own, parent in [
        (DataEfficientGRPOConfig, GRPOConfig),
        (DataEfficientGRPOScriptArguments, GRPOScriptArguments),
    ]:
        names |= {field.name for field in fields(own)} - {field.name for field in fields(parent)}
    return names
