"""
`embed_dataset()`: embeds every prompt of a dataset once and caches the embeddings on disk.

Prompts are sorted by length and cut into batches of about equal token counts, which the processes take in turn. What is
deliberately not here: models (`model.py`), text and tokens (`tokenize.py`), files (`cache.py`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from datasets import Dataset
from tqdm import tqdm
from transformers.utils import logging

from trl_dataeff.difficulty.embedding.cache import ENVIRONMENT, EmbeddingCache, default_folder
from trl_dataeff.difficulty.embedding.model import Embedder, policy_source, pretrained_source
from trl_dataeff.difficulty.embedding.tokenize import EmbeddingError, read_prompts
from trl_dataeff.rollouts.distributed import Processes, all_gather
from trl_dataeff.utils import hash_each, hash_rows


if TYPE_CHECKING:
    from trl import GRPOTrainer

__all__ = ["EmbeddingError", "embed_dataset", "embed_for", "length_batches"]

logger = logging.get_logger(__name__)

_LARGEST = float(np.finfo(np.float16).max)


def embed_dataset(
    dataset: Dataset,
    embedding: str = "policy",
    *,
    policy: Any = None,
    tokenizer: Any = None,
    accelerator: Any = None,
    batch_tokens: int = 8192,
    progress: bool = True,
    cache_dir: str | Path | None = None,
    fallback_dir: str | Path | None = None,
    chat_template: str | None = None,
    tools: list[Any] | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> np.ndarray:
    """
    Embed every prompt of a dataset: the mean of the model's last hidden states over the prompt's own tokens, or what
    a sentence-transformers model makes of them. The result is cached on disk for runs with the same prompts and model.

    Random states, parameters, and the modes of the policy's modules are left as they are. With several processes this
    is a collective: each embeds its share, and the first of each node writes the node's cache.

    Args:
        dataset ([`~datasets.Dataset`]):
            N rows with a `prompt`: a string, or a conversation, of which the text parts are embedded.
        embedding (`str`, *optional*, defaults to `"policy"`):
            `"policy"`, or the id or path of a sentence-transformers model, or of another Hugging Face encoder or decoder,
            whose last hidden states are averaged. These need sentence-transformers.
        policy ([`~transformers.PreTrainedModel`]), tokenizer (tokenizer or processor):
            For `"policy"`: the model that is trained, wrapped or not, which runs where it is, and its tokenizer.
        accelerator ([`~accelerate.Accelerator`], *optional*):
            Of the run. Without it, this process embeds all prompts, on a GPU if there is one.
        batch_tokens (`int`, *optional*, defaults to `8192`):
            Tokens per forward, padding included; a longer prompt is a batch of its own.
        progress (`bool`, *optional*, defaults to `True`):
            Whether to show a progress bar, on the main process.
        cache_dir (`str` or `Path`, *optional*, defaults to `$TRL_DATAEFF_CACHE/embeddings` or `~/.cache/trl_dataeff/embeddings`):
            Folder of the caches.
        fallback_dir (`str` or `Path`, *optional*):
            Folder that is used in its place if it cannot be written or is full. If neither can be used, or this is unset,
            each process keeps the embeddings in memory (`2 N h` bytes), and a warning says so.
        chat_template (`str`), tools (`list`), chat_template_kwargs (`dict`), all *optional*:
            With `"policy"`: how conversations are rendered, as in [`~trl.GRPOTrainer`].

    Returns:
        `np.ndarray` of shape `(N, h)`, float16: row i is prompt i. A read-only memory map, unless it is kept in memory.

    Raises:
        `EmbeddingError`: if the dataset has no prompts, the model cannot be loaded, or its values are not
        finite.
    """
    if not len(dataset):
        raise EmbeddingError("The dataset has no rows, so there is nothing to embed. Give one with prompts.")
    processes = Processes() if accelerator is None else Processes.of(accelerator)
    with _random_state_kept():
        if embedding == "policy":
            options = {"chat_template": chat_template, "tools": tools, "template_kwargs": chat_template_kwargs or {}}
            source = policy_source(policy, tokenizer, accelerator, **options)
        else:
            source = pretrained_source(embedding, accelerator)
        fingerprint = hash_each(read_prompts(dataset))
        identity = {"prompts_of": fingerprint, "rows": len(dataset), **source.identity}
        folders = [default_folder() if cache_dir is None else Path(cache_dir), fallback_dir and Path(fallback_dir)]
        caches = [EmbeddingCache(folder, identity) for folder in folders if folder]
        found = (_agreed(cache.read(), fingerprint, processes) for cache in caches)
        if (stored := next((values for values in found if values is not None), None)) is not None:
            return stored
        embedder = source.load()
        tokens, truncated = embedder.prompts.tokenize(dataset)
        if truncated and processes.is_main:
            limit = embedder.prompts.limit
            logger.warning(
                f"{truncated} of {len(dataset)} prompts are longer than the {limit} tokens that the embedding model "
                f"({embedding!r}) takes: they are embedded by their first {limit} tokens."
            )
        computed = _embed_tokens(embedder, tokens, processes, batch_tokens, progress)
    if accelerator is None or accelerator.is_local_main_process:
        _store(computed, caches, processes)
    processes.wait()
    return _memory_map(computed, caches)


def embed_for(trainer: GRPOTrainer, dataset: Dataset, embedding: str) -> np.ndarray:
    """[`embed_dataset`] with a trainer's policy, tokenizer and chat template. A collective if there are several processes."""
    return embed_dataset(
        dataset,
        embedding,
        policy=trainer.model,
        tokenizer=trainer.processing_class,
        accelerator=trainer.accelerator,
        progress=not trainer.args.disable_tqdm,
        # What begins with "_" is not pushed to the Hub
        fallback_dir=Path(cast(str, trainer.args.output_dir), "_embeddings"),
        chat_template=trainer.chat_template,
        tools=trainer.tools or None,
        chat_template_kwargs=cast(dict[str, Any], trainer.chat_template_kwargs),
    )


def _agreed(cached: np.ndarray | None, fingerprint: str, processes: Processes) -> np.ndarray | None:
    """The cache, if all processes found one and the same: ranks that see other values would decide otherwise."""
    if processes.world_size == 1:
        return cached
    found = all_gather((fingerprint, None if cached is None else hash_rows(cached)))
    if len({prompts for prompts, _ in found}) > 1:
        raise EmbeddingError(
            "The processes of this run see different prompts in the dataset. Load the same dataset in the same order on "
            "each, without a transform that draws at random."
        )
    return cached if len({checksum for _, checksum in found}) == 1 else None


def _store(computed: np.ndarray, caches: list[EmbeddingCache], processes: Processes) -> None:
    """Write the first cache that can be written. The main process warns if that is not the first one."""
    problems = list(takewhile(bool, (cache.write(computed) for cache in caches)))  # up to the one that is written
    if (problems or not caches) and processes.is_main:
        place = f"in the memory of each process ({computed.nbytes / 1e9:.2g} GB)"
        if len(problems) < len(caches):
            place = f"in {caches[len(problems)].folder}"
        logger.warning(
            f"The prompts' embeddings cannot be cached ({'; '.join(map(str, problems)) or 'there is no home folder'}). They "
            f"are kept {place}. Set the environment variable {ENVIRONMENT} to a folder with room, and later runs find "
            "them there."
        )


def _memory_map(computed: np.ndarray, caches: list[EmbeddingCache]) -> np.ndarray:
    """The same embeddings as a memory map of the cache that has them; as they are, if none has."""
    computed.setflags(write=False)
    written = (cache.read() for cache in caches)
    return next((each for each in written if each is not None and hash_rows(each) == hash_rows(computed)), computed)


def length_batches(lengths: np.ndarray, batch_tokens: int) -> list[np.ndarray]:
    """
    Cut prompts of `lengths` `(N,)` >= 1, the longest first, into batches of at most `batch_tokens` tokens, padding included;
    a longer prompt is a batch of its own. Returns the prompt ids of each batch.
    """
    order = np.argsort(-lengths, kind="stable")  # the largest batch first: what does not fit shows at once
    batches, start = [], 0
    while start < len(order):
        rows = max(1, batch_tokens // int(lengths[order[start]]))
        batches.append(order[start : start + rows])
        start += rows
    return batches


def _embed_tokens(
    embedder: Embedder, tokens: list[np.ndarray], processes: Processes, batch_tokens: int, progress: bool
) -> np.ndarray:
    """Embeddings, float16 `(N, h)`, the same on every process. Each process makes the same number of forwards."""
    batches = length_batches(np.array([len(ids) for ids in tokens]), batch_tokens)
    out = np.empty((len(tokens), 0), np.float16)
    bar = tqdm(
        total=len(tokens), desc="Embedding prompts", unit="prompt", disable=not (progress and processes.is_main)
    )
    with bar, embedder.inference():
        for first in range(0, len(batches), processes.world_size):
            dealt = batches[first : first + processes.world_size]  # one for each process; the last round may be short
            values = embedder.embed([tokens[i] for i in dealt[min(processes.rank, len(dealt) - 1)]]).cpu().numpy()
            out = out if out.size else np.empty((len(tokens), values.shape[1]), np.float16)
            gathered = all_gather(values) if processes.world_size > 1 else [values]
            for ids, part in zip(dealt, gathered, strict=False):
                out[ids] = _to_float16(part, ids)
                bar.update(len(ids))
    return out


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
