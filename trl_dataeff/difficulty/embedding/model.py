"""The models that embed: the policy, or a pretrained encoder or decoder; how they are loaded, and one forward."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import DistributedType, extract_model_from_parallel
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from peft import PeftModel
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

from trl_dataeff.difficulty.embedding.cache import folder_identity, weights_identity
from trl_dataeff.difficulty.embedding.tokenize import EmbeddingError, PromptTokenizer


logger = logging.get_logger(__name__)

POOLINGS = ("mean", "cls", "last")
_NO_LIMIT = 10**9  # tokenizers without a limit give a huge number


@dataclass
class Embedder:
    """
    A model in memory that embeds token ids.

    Args:
        body (`nn.Module`): gives last hidden states `(b, T, h)`; without language-model head.
        prompts ([`PromptTokenizer`]): makes its token ids.
        pooling (`str`): `"mean"`, `"cls"` (first token) or `"last"` (last token).
        normalize (`bool`): whether embeddings are scaled to length 1.
    """

    body: nn.Module
    prompts: PromptTokenizer
    pooling: str = "mean"
    normalize: bool = False

    def __post_init__(self) -> None:
        self.device = next(self.body.parameters()).device
        padding = self.prompts.tokenizer.pad_token_id
        self.padding = self.prompts.stand_in if padding is None else padding
        self._options = {"use_cache": False} if "use_cache" in inspect.signature(self.body.forward).parameters else {}

    @property
    def width(self) -> int:
        """Width h of embeddings, by the model's configuration; 0 if that does not say."""
        config = getattr(self.body, "config", None)
        return getattr(config.get_text_config(), "hidden_size", 0) if config is not None else 0

    @contextmanager
    def inference(self) -> Iterator[None]:
        """No gradients, no dropout, and on a GPU half precision. Each module gets its former mode back."""
        training = [module for module in self.body.modules() if module.training]
        self.body.eval()
        cuda = self.device.type == "cuda"
        dtype = torch.bfloat16 if cuda and torch.cuda.is_bf16_supported() else torch.float16
        try:
            with torch.no_grad(), torch.autocast(self.device.type, dtype=dtype, enabled=cuda):
                yield
        finally:
            for module in training:
                module.training = True

    def embed(self, prompts: list[np.ndarray]) -> torch.Tensor:
        """Embeddings float32 `(b, h)` of prompts given as token ids `(T_i,)`."""
        lengths = torch.tensor([len(tokens) for tokens in prompts], device=self.device)
        # Padding goes to the right, whatever the tokenizer does: there, positions need no correction
        ids = np.full((len(prompts), max(map(len, prompts))), self.padding, dtype=np.int64)
        for row, tokens in zip(ids, prompts, strict=True):
            row[: len(tokens)] = tokens
        mask = torch.arange(ids.shape[1], device=self.device) < lengths[:, None]  # (b, T)
        outputs = self.body(
            input_ids=torch.from_numpy(ids).to(self.device), attention_mask=mask.long(), **self._options
        )
        return self._pool(outputs[0], mask, lengths)

    def _pool(self, hidden: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        hidden, mask, lengths = hidden.float(), mask.to(hidden.device), lengths.to(hidden.device)
        if self.pooling == "cls":
            pooled = hidden[:, 0]
        elif self.pooling == "last":
            pooled = hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1]
        else:  # (b, T, h) -> (b, h); hidden states of padding may be anything, NaN included
            pooled = hidden.masked_fill(~mask[..., None], 0.0).sum(dim=1) / lengths[:, None]
        return nn.functional.normalize(pooled, dim=-1) if self.normalize else pooled


@dataclass
class Source:
    """An embedding model that need not be in memory yet: what identifies it, and how to get it."""

    identity: dict[str, Any]
    load: Callable[[], Embedder]


def policy_source(policy: Any, processor: Any, accelerator: Any = None, **prompt_options: Any) -> Source:
    """
    The policy as it is now, adapters included, with mean pooling.

    Args:
        policy: the model that is trained; wrappers (DDP, compiled, PEFT) are looked through.
        processor: its tokenizer or processor.
        accelerator ([`~accelerate.Accelerator`], *optional*): tells whether parameters are sharded.
        prompt_options: `chat_template`, `tools`, `template_kwargs` of [`PromptTokenizer`].

    Raises:
        `EmbeddingError`: without policy or tokenizer, or if the policy's parameters are sharded.
    """
    if policy is None or processor is None:
        raise EmbeddingError(
            "Embedding by 'policy' needs the arguments `policy` and `tokenizer`. Without them, set the embedding to the "
            "id or path of a model."
        )
    _check_whole(policy, accelerator)
    model = extract_model_from_parallel(policy)
    model = model.get_base_model() if isinstance(model, PeftModel) else model
    body = _body(model)
    prompts = PromptTokenizer(processor, **prompt_options)
    prompts.limit = _limit(body, prompts.tokenizer)
    identity = {"model": "policy", "weights": weights_identity(body), "prompts": prompts.identity(), "pooling": "mean"}
    return Source(identity, lambda: Embedder(body, prompts))


def _check_whole(policy: nn.Module, accelerator: Any) -> None:
    plugin = getattr(accelerator.state, "deepspeed_plugin", None) if accelerator is not None else None
    fsdp = accelerator is not None and accelerator.distributed_type == DistributedType.FSDP
    fsdp = fsdp or any(isinstance(module, FullyShardedDataParallel) for module in policy.modules())
    parameters = list(policy.parameters())
    if (plugin is not None and plugin.zero_stage == 3) or any(hasattr(p, "ds_id") for p in parameters):
        how = "DeepSpeed ZeRO-3"
    elif fsdp or any(isinstance(p, DTensor) or p.is_meta for p in parameters):
        how = "FSDP or tensor parallelism"
    else:
        return
    raise EmbeddingError(
        f"The policy cannot embed the prompts: under {how} no process holds all of its parameters. Set "
        "`dots_embedding` to the id or path of a model, such as 'sentence-transformers/all-MiniLM-L6-v2'."
    )


def _body(model: Any) -> Any:
    """The part of a Hugging Face model that turns text tokens into hidden states."""
    return model.get_encoder() if getattr(model.config, "is_encoder_decoder", False) else model.get_decoder()


def _limit(body: Any, tokenizer: Any, stated: int | None = None) -> int | None:
    """Tokens that a model takes, or `None`."""
    limits = [tokenizer.model_max_length, getattr(body.config.get_text_config(), "max_position_embeddings", None)]
    for name, module in body.named_modules():
        # RoBERTa and its kin count positions from the padding index on
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            limits.append(module.num_embeddings - module.padding_idx - 1)
    known = [limit for limit in [*limits, stated] if limit is not None and 0 < limit < _NO_LIMIT]
    return min(known, default=None)


def pretrained_source(name: str, device: torch.device, accelerator: Any = None) -> Source:
    """
    A Hugging Face encoder or decoder, or a sentence-transformers model, by id or path. The pooling that a
    sentence-transformers model states is used, else the mean.

    Args:
        name (`str`): id on the Hub, or a folder.
        device (`torch.device`): where it is to run.
        accelerator ([`~accelerate.Accelerator`], *optional*): under DeepSpeed ZeRO-3 or FSDP, models are loaded in
            parts; this one is loaded whole.

    Raises:
        `EmbeddingError`: if it cannot be found or loaded, lacks weights, or pools in another way.
    """
    try:
        modules = _sentence_modules(name)
        config = _locate(name, modules["subfolder"], "config.json")
    except Exception as error:
        raise _cannot_load(name, error) from error
    if config is None:
        raise _cannot_load(name, "no config.json was found; is it a folder of a model, or an id on the Hub?")
    if modules["pooling"] not in POOLINGS:
        raise EmbeddingError(
            f"The embedding model {name!r} pools its hidden states by {modules['pooling']!r}; known are "
            f"{', '.join(POOLINGS)}. Use another model."
        )
    if Path(name).is_dir():
        revision, identity = None, {"files": folder_identity(config.parent)}
    else:
        revision = config.parents[1 if modules["subfolder"] else 0].name
        identity = {"id": name, "revision": revision}

    def load() -> Embedder:
        where = {"subfolder": modules["subfolder"]} if modules["subfolder"] else {}
        try:
            model, tokenizer = _load(name, device, accelerator, revision=revision, **where)
        except EmbeddingError:
            raise
        except Exception as error:
            raise _cannot_load(name, error) from error
        prompts = PromptTokenizer(tokenizer)
        prompts.limit = _limit(model, tokenizer, modules["limit"])
        return Embedder(model, prompts, modules["pooling"], modules["normalize"])

    return Source({"model": "pretrained", **identity, **modules}, load)


def _cannot_load(name: str, cause: Any) -> EmbeddingError:
    cause = f"{type(cause).__name__}: {cause}" if isinstance(cause, Exception) else cause
    return EmbeddingError(
        f"The embedding model {name!r} cannot be loaded ({cause}). Give the id of a model on the Hugging Face Hub, the "
        "path of a folder that `save_pretrained` wrote, or 'policy'."
    )


def _load(name: str, device: torch.device, accelerator: Any, **where: Any) -> tuple[nn.Module, Any]:
    bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
    with _loaded_whole(accelerator):
        tokenizer = AutoTokenizer.from_pretrained(name, **where)
        model, report = AutoModel.from_pretrained(
            name, dtype=torch.bfloat16 if bf16 else torch.float32, output_loading_info=True, **where
        )
    missing = sorted(key for key in report["missing_keys"] if "pooler" not in key)
    if missing:
        raise EmbeddingError(
            f"The weights of the embedding model {name!r} lack {len(missing)} tensors, such as {missing[0]!r}: its "
            "embeddings would be random. Use a folder or an id with all weights."
        )
    return _body(model).to(device).requires_grad_(False), tokenizer


@contextmanager
def _loaded_whole(accelerator: Any) -> Iterator[None]:
    """Models are loaded with all their weights on each process, also where those that are trained are not."""
    variable = "FSDP_CPU_RAM_EFFICIENT_LOADING"
    former = os.environ.get(variable)
    plugin = getattr(accelerator.state, "deepspeed_plugin", None) if accelerator is not None else None
    try:
        if former is not None:
            os.environ[variable] = "false"
        if plugin is None:
            yield
        else:
            with plugin.zero3_init_context_manager(enable=False):
                yield
    finally:
        if former is not None:
            os.environ[variable] = former


def _locate(name: str, *parts: str) -> Path | None:
    """A file of a model folder or of a repository on the Hub, or `None` if it has no such file."""
    filename = "/".join(part for part in parts if part)
    if Path(name).is_dir():
        path = Path(name) / filename
        return path if path.is_file() else None
    try:
        return Path(hf_hub_download(name, filename))
    except EntryNotFoundError:
        return None


def _read_json(path: Path | None) -> Any:
    return {} if path is None else json.loads(path.read_text())


def _sentence_modules(name: str) -> dict[str, Any]:
    """What the files of sentence-transformers say of a model: subfolder, pooling, normalize, limit."""
    listed = {module["type"].split(".")[-1]: module["path"] for module in _read_json(_locate(name, "modules.json"))}
    subfolder = listed.get("Transformer", "")
    found = {"subfolder": subfolder, "pooling": "mean", "normalize": "Normalize" in listed}
    if "Pooling" in listed:
        found["pooling"] = _pooling_name(_read_json(_locate(name, listed["Pooling"], "config.json")))
    if "Dense" in listed:
        logger.warning(f"The dense layer on top of the embedding model {name!r} is left out.")
    stated = _read_json(_locate(name, subfolder, "sentence_bert_config.json")) if listed else {}
    return {**found, "limit": stated.get("max_seq_length")}


def _pooling_name(config: dict[str, Any]) -> str:
    if "pooling_mode" in config:
        mode: str = config["pooling_mode"]
        return {"lasttoken": "last"}.get(mode, mode)
    prefix, short = "pooling_mode_", {"mean_tokens": "mean", "cls_token": "cls", "lasttoken": "last"}
    chosen = [key.removeprefix(prefix) for key, value in config.items() if key.startswith(prefix) and value is True]
    return "+".join(short.get(mode, mode) for mode in chosen) or "mean"
