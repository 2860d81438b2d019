"""
`embed_dataset()`: embeds every prompt of a dataset once and caches the embeddings on disk.

Prompts are sorted by length and cut into batches of about equal token counts, which the processes take in turn. What is
deliberately not here: models (`model.py`), text and tokens (`tokenize.py`), files (`cache.py`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tqdm import tqdm
from transformers.utils import logging

from trl_dataeff.checkpoint.hashing import hash_prompts
from trl_dataeff.difficulty.embedding.cache import (
    ENVIRONMENT,
    CachedEmbeddings,
    EmbeddingCache,
    default_folder,
    in_memory,
)
from trl_dataeff.difficulty.embedding.model import Embedder, Source, policy_source, pretrained_source
from trl_dataeff.difficulty.embedding.tokenize import EmbeddingError, TokenizedPrompts, read_prompts
from trl_dataeff.rollouts.distributed import all_gather


__all__ = ["EmbeddingError", "embed_dataset", "length_batches"]

logger = logging.get_logger(__name__)

_LARGEST = float(np.finfo(np.float16).max)


def embed_dataset(
    dataset: Dataset,
    embedding: str = "policy",
    *,
    policy: Any = None,
    tokenizer: Any = None,
    accelerator: Any = None,
    device: torch.device | str | None = None,
    batch_tokens: int = 8192,
    progress: bool = True,
    cache_dir: str | Path | None = None,
    fallback_dir: str | Path | None = None,
    column: str = "prompt",
    chat_template: str | None = None,
    tools: list[Any] | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> np.ndarray:
    """
    Embed every prompt of a dataset: the mean of the model's last hidden states over the prompt's own tokens. The
    result is cached on disk, and found there by a run with the same prompts, model and pooling.

    Random states, parameters, and the modes of the policy's modules are left as they are. With several processes this
    is a collective: each embeds its share, and the first of each node writes the node's cache.

    Args:
        dataset ([`~datasets.Dataset`]):
            N prompts: strings or conversations, of which the text parts are embedded.
        embedding (`str`, *optional*, defaults to `"policy"`):
            `"policy"`, or the id or path of a Hugging Face encoder or decoder or of a sentence-transformers model,
            whose own pooling (mean, first or last token) is used.
        policy ([`~transformers.PreTrainedModel`], *optional*):
            The model that is trained, wrapped or not; for `"policy"`. It runs where it is.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`] or [`~transformers.ProcessorMixin`], *optional*):
            The policy's; for `"policy"`.
        accelerator ([`~accelerate.Accelerator`], *optional*):
            Of the run. Without it, this process embeds all prompts.
        device (`torch.device` or `str`, *optional*):
            Where a pretrained model runs. Unset: the accelerator's device, else a GPU if there is one.
        batch_tokens (`int`, *optional*, defaults to `8192`):
            Tokens per forward, padding included; a longer prompt is a batch of its own.
        progress (`bool`, *optional*, defaults to `True`):
            Whether to show a progress bar, on the main process.
        cache_dir (`str` or `Path`, *optional*):
            Folder of the caches. Unset: `$TRL_DATAEFF_CACHE/embeddings`, or `~/.cache/trl_dataeff/embeddings`.
        fallback_dir (`str` or `Path`, *optional*):
            Folder that is used in its place if it cannot be written or is full. If neither can be used, or this is unset,
            each process keeps the embeddings in memory (`2 N h` bytes). A warning says so.
        column (`str`, *optional*, defaults to `"prompt"`):
            Column of the prompts.
        chat_template (`str`, *optional*), tools (`list`, *optional*), chat_template_kwargs (`dict`, *optional*):
            With `"policy"`: how conversations are rendered, as in [`~trl.GRPOTrainer`].

    Returns:
        `np.ndarray` of shape `(N, h)`, float16: row i is prompt i. A read-only memory map, unless it is kept in memory.

    Raises:
        `EmbeddingError`: if the dataset has no prompts, the model cannot be loaded or is sharded, or its values are not
        finite.
    """
    if not len(dataset):
        raise EmbeddingError("The dataset has no rows, so there is nothing to embed. Give one with prompts.")
    with _random_state_kept():
        if embedding == "policy":
            options = {"chat_template": chat_template, "tools": tools, "template_kwargs": chat_template_kwargs or {}}
            source = policy_source(policy, tokenizer, accelerator, **options)
        else:
            source = pretrained_source(embedding, _device(device, accelerator), accelerator)
        next(read_prompts(dataset.select(range(1)), column))  # a missing column is an error before a model is loaded
        fingerprint = hash_prompts(dataset, column, transformed=True)
        identity = {"prompts_of": fingerprint, "rows": len(dataset), **source.identity}
        folders = [default_folder() if cache_dir is None else Path(cache_dir), fallback_dir and Path(fallback_dir)]
        caches = [EmbeddingCache(folder, identity) for folder in folders if folder]
        found = (_agreed(cache.read(), fingerprint, accelerator) for cache in caches)
        cached = next((each for each in found if each is not None), None)
        if cached is None:
            cached = _embed(dataset, column, source, caches, accelerator, batch_tokens, progress)
    if cached.truncated and (accelerator is None or accelerator.is_main_process):
        logger.warning(
            f"{cached.truncated} of {len(dataset)} prompts are longer than the {cached.limit} tokens that the embedding "
            f"model ({embedding!r}) takes: they are embedded by their first {cached.limit} tokens."
        )
    return cached.embeddings


def _device(device: torch.device | str | None, accelerator: Any) -> torch.device:
    if device is None and accelerator is not None:
        return torch.device(accelerator.device)
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _agreed(cached: CachedEmbeddings | None, fingerprint: str, accelerator: Any) -> CachedEmbeddings | None:
    """The cache, if all processes found one and the same: ranks that see other values would decide otherwise."""
    if accelerator is None or accelerator.num_processes == 1:
        return cached
    found = all_gather((fingerprint, cached.checksum if cached is not None else None))
    if len({prompts for prompts, _ in found}) > 1:
        raise EmbeddingError(
            "The processes of this run see different prompts in the dataset. Load the same dataset in the same order on "
            "each, without a transform that draws at random."
        )
    return cached if len({checksum for _, checksum in found}) == 1 else None


def _embed(
    dataset: Dataset,
    column: str,
    source: Source,
    caches: list[EmbeddingCache],
    accelerator: Any,
    batch_tokens: int,
    progress: bool,
) -> CachedEmbeddings:
    embedder = source.load()
    cache = _writable(caches, 2 * len(dataset) * embedder.width, accelerator)
    tokenized = embedder.prompts.tokenize_dataset(dataset, column)
    results = embed_batches(embedder, tokenized, accelerator, batch_tokens, progress)
    about: dict[str, Any] = {"truncated": tokenized.truncated, "limit": embedder.prompts.limit}
    with embedder.inference():
        if cache is None:
            return in_memory(results, len(dataset), **about)
        if accelerator is None or accelerator.is_local_main_process:
            cache.write(results, len(dataset), **about)
        else:
            for _ in results:
                pass
    if accelerator is not None:
        accelerator.wait_for_everyone()
    cached = cache.read()
    if cached is None:
        raise EmbeddingError(f"The embeddings just written to {cache.path} are not there any more, or were changed.")
    return cached


def _writable(caches: list[EmbeddingCache], size: int, accelerator: Any) -> EmbeddingCache | None:
    """
    The first cache that every process can write, or `None`. The main process warns if that is not the first one.

    Args:
        caches (`list[EmbeddingCache]`): in order of preference.
        size (`int`): bytes of the embeddings; 0 if unknown.
        accelerator ([`~accelerate.Accelerator`], *optional*): of the run.
    """
    several = accelerator is not None and accelerator.num_processes > 1
    problems: list[str] = []
    chosen: EmbeddingCache | None = None
    for cache in caches:
        own = cache.why_not_writable(size)
        met = [problem for problem in (all_gather(own) if several else [own]) if problem is not None]
        if not met:
            chosen = cache
            break
        problems.append(met[0])
    if (problems or chosen is None) and (accelerator is None or accelerator.is_main_process):
        memory = f"in the memory of each process ({size / 1e9:.2g} GB)" if size else "in the memory of each process"
        place = memory if chosen is None else f"in {chosen.folder}"
        logger.warning(
            f"The prompts' embeddings cannot be cached ({'; '.join(problems) or 'there is no home folder'}). They are kept "
            f"{place}. Set the environment variable {ENVIRONMENT} to a folder with room, and later runs find them there."
        )
    return chosen


def length_batches(lengths: np.ndarray, batch_tokens: int) -> list[np.ndarray]:
    """
    Cut prompts, the longest first, into batches of at most `batch_tokens` tokens, padding included.

    Args:
        lengths (`np.ndarray` of shape `(N,)`): token counts, each at least 1.
        batch_tokens (`int`): a single longer prompt is a batch of its own.

    Returns:
        `list[np.ndarray]`: the prompt ids of each batch.
    """
    order = np.argsort(-lengths, kind="stable")  # the largest batch first: what does not fit shows at once
    batches, start = [], 0
    while start < len(order):
        rows = max(1, batch_tokens // int(lengths[order[start]]))
        batches.append(order[start : start + rows])
        start += rows
    return batches


def embed_batches(
    embedder: Embedder, tokenized: TokenizedPrompts, accelerator: Any, batch_tokens: int, progress: bool
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """
    Embeddings as they come: prompt ids `(b,)` and float16 `(b, h)`, the same on every process. Each process makes the
    same number of forwards. To be run under `embedder.inference()`.
    """
    world_size = 1 if accelerator is None else accelerator.num_processes
    rank = 0 if accelerator is None else accelerator.process_index
    batches = length_batches(tokenized.lengths, batch_tokens)
    shown = progress and (accelerator is None or accelerator.is_main_process)
    with tqdm(total=len(tokenized.lengths), desc="Embedding prompts", unit="prompt", disable=not shown) as bar:
        for first in range(0, len(batches), world_size):
            dealt = batches[first : first + world_size]
            mine = dealt[min(rank, len(dealt) - 1)]
            values = embedder.embed([tokenized[i] for i in mine])
            for ids, rows in zip(dealt, _gathered(values, dealt, accelerator), strict=True):
                yield ids, _to_float16(rows, ids)
                bar.update(len(ids))


def _gathered(values: torch.Tensor, dealt: list[np.ndarray], accelerator: Any) -> list[np.ndarray]:
    """The values of each dealt batch, from the process that has it."""
    if accelerator is None or accelerator.num_processes == 1:
        return [values.cpu().numpy()]
    rows = max(map(len, dealt))
    padded = torch.zeros(rows, values.shape[1], device=accelerator.device)
    padded[: len(values)] = values
    gathered = accelerator.gather(padded).view(-1, rows, values.shape[1]).cpu().numpy()
    return [part[: len(ids)] for ids, part in zip(dealt, gathered, strict=False)]  # the last round may be short


def _to_float16(values: np.ndarray, ids: np.ndarray) -> np.ndarray:
    wrong = ~np.isfinite(values).all(axis=1)
    if wrong.any():
        raise EmbeddingError(
            f"The embedding model gives values that are not finite, for row {ids[wrong][0]} of the dataset among others. "
            "Use another model: set `dots_embedding` to its id or path."
        )
    return values.clip(-_LARGEST, _LARGEST).astype(np.float16)


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Python's, NumPy's and torch's random states are afterwards what they were: the run draws as if nothing was."""
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)  # noqa: NPY002
