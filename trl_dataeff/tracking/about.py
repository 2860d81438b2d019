"""What `run.json` says of how a run was started."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import TrainingArguments


_SECRET = re.compile(r"token|secret|password|api[-_]?key", re.IGNORECASE)
HIDDEN = "<hidden>"
_DERIVED = {"accelerator_config", "activation_checkpointing", "logging_dir"}  # by the Trainer, from other arguments


def command(argv: Sequence[str] | None = None) -> str:
    """
    The command line of this process, for a shell; values of options whose name says that they are secret are hidden.

    Args:
        argv (`Sequence[str]`, *optional*): by default that of the process.
    """
    program, *words = list(sys.argv if argv is None else argv) or [""]
    shown, hides = [Path(program).name if os.path.isabs(program) else program], False
    for word in words:
        name, equals, _ = word.partition("=")
        if hides and not word.startswith("--"):
            word = HIDDEN
        elif equals and _names_secret(name):
            word = f"{name}={HIDDEN}"
        hides = not equals and word.startswith("--") and _names_secret(word)
        shown.append(word)
    return shlex.join(shown)


def _names_secret(option: str) -> bool:
    return bool(_SECRET.search(option)) and "tokens" not in option.lower() and "tokenizer" not in option.lower()


def about_run(model: str, args: TrainingArguments) -> dict[str, Any]:
    """
    What is noted of a run in `run.json`: JSON values.

    Args:
        model (`str`): name or path of the model.
        args ([`~transformers.TrainingArguments`]): the configuration. Tokens and other secrets in it are hidden.
    """
    arguments = {name: plain(value) for name, value in args.to_dict().items()}
    arguments |= {name: HIDDEN for name, value in arguments.items() if value and _names_secret(name)}
    defaults = {field.name: plain(field.default) for field in fields(args)}
    changed = [
        name
        for name, value in arguments.items()
        if value not in (defaults.get(name), None, [], HIDDEN) and name not in _DERIVED
    ]
    return {"command": command(), "model": model, "arguments": arguments, "changed": changed}


def plain(value: Any) -> Any:
    """`value` of JSON's types; anything else as its text."""
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(part) for part in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
