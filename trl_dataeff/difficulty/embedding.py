"""Embeddings of prompts, by the policy or by another model: of a dataset, and of a run, which makes them once."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, extract_model_from_parallel, patch_environment
from datasets import Dataset
from peft import PeftModel
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import logging
from trl.data_utils import prepare_multimodal_messages

from trl_dataeff.rollouts.distributed import all_gather
from trl_dataeff.utils import UserError, hash_json, hash_rows, write_atomically


logger = logging.get_logger(__name__)
BATCH_TOKENS = 8192  # of a forward pass of the policy, padding included
LARGEST_FLOAT16 = 65504
GATHERED_ROWS = 2**14  # rows of each process that are exchanged at a time
TOKENIZED_PROMPTS = 1024  # prompts that are tokenized at a time


class EmbeddingError(UserError):
    """Prompts cannot be embedded: the dataset or the model does not allow it."""


def embed_dataset(
    dataset: Dataset,
    model: Any,
    tokenizer: Any = None,
    *,
    accelerator: Any = None,
    template: dict[str, Any] | None = None,
    progress: bool = True,
) -> np.ndarray:
    """
    Embed every prompt of a dataset. The embedding is the mean of the policy's last hidden states over the prompt's own
    tokens, or what `SentenceTransformer.encode` returns. A prompt that is longer than the model takes is cut. Restores
    torch's random state. A collective: each process embeds its share.

    Args:
        dataset ([`~datasets.Dataset`]): N rows with a `prompt`, a string or a conversation, of which the text parts
            are embedded.
        model ([`~transformers.PreTrainedModel`] or `str`): the policy, wrapped or not; or the id or path of a model
            for sentence-transformers, which embeds the contents of a conversation's messages, joined by newlines.
        tokenizer (tokenizer or processor, *optional*): of the policy; its chat template renders conversations.
        accelerator ([`~accelerate.Accelerator`], *optional*): of the run; by default all processes of this launch take
            part.
        template (`dict`, *optional*): keyword arguments of `apply_chat_template`, for the policy.
        progress (`bool`, *optional*, defaults to `True`): whether to show a progress bar, on the main process.

    Returns:
        `np.ndarray` of shape `(N, h)`: float16, row i is prompt i.

    Raises:
        EmbeddingError: there are no rows, a prompt cannot be rendered, the model cannot be loaded, or its values are
            not finite.
    """
    if not len(dataset):
        raise EmbeddingError("The dataset has no rows, so there is nothing to embed. Give one with prompts.")
    state: Any = PartialState() if accelerator is None else accelerator
    progress = progress and state.is_main_process
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        if isinstance(model, str):
            ids, values = _embed_by_pretrained(model, dataset, state, progress)
        else:
            _check_whole(model, state)
            if state.distributed_type == DistributedType.DEEPSPEED:
                model.to(state.device)  # where its engine moves it later
            ids, values = embed_by_policy(model, prompt_tokens(dataset, tokenizer, template), state, progress)
    embeddings = _gather_rows(ids, _as_float16(values), len(dataset))
    not_finite = np.flatnonzero(np.isnan(embeddings).any(axis=1))
    if len(not_finite):
        raise EmbeddingError(
            f"The embeddings of {len(not_finite)} rows, such as {not_finite[0]}, are not finite. Set "
            "`prompt_embedding` to another model."
        )
    return embeddings


def _as_float16(values: np.ndarray) -> np.ndarray:
    """Values in float16, of any shape: too large ones are cut, and those that are not finite become NaN."""
    is_finite = np.isfinite(values)
    within_range = values.clip(-LARGEST_FLOAT16, LARGEST_FLOAT16)
    return np.where(is_finite, within_range, np.nan).astype(np.float16)


def _gather_rows(ids: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """
    Put together the rows that processes have made. A collective.

    Args:
        ids (`np.ndarray` of shape `(n,)`): rows of this process.
        values (`np.ndarray` of shape `(n, h)`): float16, their values.
        size (`int`): N, rows of all processes.

    Returns:
        `np.ndarray` of shape `(N, h)`: float16.
    """
    parts = []
    # With NCCL, objects that processes exchange pass through the GPU's memory: send a limited number of rows at a time
    for start in range(0, size, GATHERED_ROWS):
        piece = slice(start, start + GATHERED_ROWS)
        for part_ids, part_values in all_gather((ids[piece], values[piece])):
            if len(part_ids):
                parts.append((part_ids, part_values))
    _, first_values = parts[0]
    gathered = np.empty((size, first_values.shape[1]), np.float16)
    for part_ids, part_values in parts:
        gathered[part_ids] = part_values
    return gathered


def embed_for(
    trainer: Any, dataset: Dataset, embedding: str | None, *, dataset_hash: str, resumed: bool
) -> np.ndarray:
    """
    Embed the prompts of a run. Embeddings are kept in the output folder, in a file that processes of one machine
    share, and a resumed run reads them again, because the policy has changed by then. A collective.

    Args:
        trainer ([`~trl.GRPOTrainer`]): the trainer.
        dataset ([`~datasets.Dataset`]): its training dataset, N rows.
        embedding (`str`, *optional*): `"policy"`, or the id or path of a model, see [`embed_dataset`]. `None` for one
            value for all prompts, which says nothing about them.
        dataset_hash (`str`): content hash of the dataset's prompts, which names the file.
        resumed (`bool`): whether the run is resumed.

    Returns:
        `np.ndarray` of shape `(N, h)`: float16; a read-only memory map where the file can be read.

    Raises:
        EmbeddingError: see [`embed_dataset`].
    """
    if embedding is None:
        return np.zeros((len(dataset), 1), np.float16)
    # The underscore keeps the folder from being pushed to the Hub
    name = f"_dataeff/embeddings-{hash_json(embedding, dataset_hash)[:8]}.npy"
    path = Path(trainer.args.output_dir, name)
    if resumed:
        kept = _read(path)
        own_hash = None if kept is None else hash_rows(kept)
        is_same_everywhere = len(set(all_gather(own_hash))) == 1
        if kept is not None and is_same_everywhere and len(kept) == len(dataset):
            return kept
    computed = embed_dataset(
        dataset,
        trainer.model if embedding == "policy" else embedding,
        trainer.processing_class,
        accelerator=trainer.accelerator,
        template={
            "chat_template": trainer.chat_template,
            "tools": trainer.tools or None,
            **trainer.chat_template_kwargs,
        },
        progress=not trainer.args.disable_tqdm,
    )
    if trainer.accelerator.is_main_process:
        try:
            write_atomically(path, partial(np.save, arr=computed))
        except OSError as error:
            logger.warning(f"The embeddings cannot be kept in {path} ({error}): a resumed run makes them again.")
    trainer.accelerator.wait_for_everyone()
    written = _read(path)
    if written is not None and hash_rows(written) == hash_rows(computed):
        return written
    return computed


def _read(path: Path) -> np.ndarray | None:
    """Stored embeddings as a read-only memory map; `None` if there are none that can be read."""
    try:
        return cast(np.ndarray, np.load(path, mmap_mode="r"))
    except (OSError, ValueError, EOFError):
        return None


def prompt_tokens(dataset: Dataset, processor: Any, template: dict[str, Any] | None) -> list[np.ndarray]:
    """
    Token ids of every prompt, as TRL feeds them to the policy.

    Args:
        dataset ([`~datasets.Dataset`]): N rows with a `prompt`.
        processor (tokenizer or processor): of the policy.
        template (`dict`, *optional*): keyword arguments of `apply_chat_template`.

    Returns:
        `list[np.ndarray]`: int32 `(T_i,)` for each prompt; an empty prompt is one end token.

    Raises:
        EmbeddingError: a prompt cannot be rendered.
    """
    texts = prompt_texts(dataset, processor, template)
    is_plain_text = isinstance(dataset[0]["prompt"], str)  # a chat template writes special tokens itself
    tokenizer = getattr(processor, "tokenizer", processor)
    if_empty = [tokenizer.eos_token_id or 0]
    prompts = []
    # In parts, each converted to arrays: lists of Python's numbers are large
    for start in range(0, len(texts), TOKENIZED_PROMPTS):
        part = texts[start : start + TOKENIZED_PROMPTS]
        tokenized = tokenizer(part, add_special_tokens=is_plain_text, verbose=False)
        prompts += [np.array(ids or if_empty, np.int32) for ids in tokenized["input_ids"]]
    return prompts


def prompt_texts(dataset: Dataset, processor: Any = None, template: dict[str, Any] | None = None) -> list[str]:
    """
    The dataset's prompts as text: strings as they are, conversations by the processor's chat template with the
    generation prompt, as in TRL.

    Args:
        dataset ([`~datasets.Dataset`]): N rows with a `prompt`.
        processor (tokenizer or processor, *optional*): without it, the contents of the messages are joined by
            newlines.
        template (`dict`, *optional*): keyword arguments of `apply_chat_template`.

    Returns:
        `list[str]`: N texts.

    Raises:
        EmbeddingError: a prompt cannot be rendered.
    """
    options = {"add_generation_prompt": True, **(template or {}), "tokenize": False}
    if "prompt" in dataset.column_names and dataset.format["type"] != "custom":
        dataset = dataset.with_format(None).select_columns(["prompt"])  # no image is decoded
    texts: list[str] = []
    try:
        for rows in dataset.iter(64):
            for prompt in rows["prompt"]:
                texts.append(_render(prompt, processor, options))
    except Exception as error:  # templates and transforms raise what they like
        failed_row = len(texts)
        raise EmbeddingError(
            f"The prompt of row {failed_row} cannot be rendered ({type(error).__name__}: {error}). It takes a string "
            f"or a list of messages in the column `prompt` of {dataset.column_names}, and a chat template that fits."
        ) from error
    return texts


def _render(prompt: Any, processor: Any, options: dict[str, Any]) -> str:
    """A prompt, text or messages, as text; `options` are those of `apply_chat_template`."""
    if isinstance(prompt, str):
        return prompt
    messages = [{**message, "content": _text_of(message.get("content"))} for message in prompt]
    if processor is None:
        return "\n".join(message["content"] or "" for message in messages)
    if hasattr(processor, "tokenizer"):  # templates of such processors expect contents in parts
        messages = prepare_multimodal_messages(messages)
    return str(processor.apply_chat_template(messages, **options))


def _text_of(content: Any) -> Any:
    """The text parts of a message's content, joined by newlines; other content than a list of parts as it is."""
    if not isinstance(content, list):
        return content
    texts = [part["text"] for part in content if part.get("type", "text") == "text" and part.get("text")]
    return "\n".join(texts)


def _check_whole(policy: Any, state: Any) -> None:
    """Raise an [`EmbeddingError`] if a forward pass of the policy on a single process would lack parameters."""
    parameters = list(policy.parameters())
    is_fsdp2 = any(isinstance(parameter, DTensor) for parameter in parameters)
    is_fsdp1 = state.distributed_type == DistributedType.FSDP and not is_fsdp2
    is_elsewhere = any(parameter.is_meta or hasattr(parameter, "ds_id") for parameter in parameters)
    if is_fsdp1 or is_deepspeed_zero3_enabled() or is_elsewhere:
        raise EmbeddingError(
            "The policy cannot embed prompts under FSDP of version 1 or DeepSpeed ZeRO-3. Use FSDP2, set "
            "`prompt_embedding` to another model, such as 'sentence-transformers/all-MiniLM-L6-v2', or to `None`: "
            "DOTS then knows prompts by `success_rate_column` and their own groups."
        )


def embed_by_policy(
    policy: Any, prompts: list[np.ndarray], state: Any, progress: bool
) -> tuple[np.ndarray, np.ndarray]:
    """
    Embed this process's share of prompts by the policy with its adapters. The whole model runs, so that FSDP2 gathers
    its shards. All processes make as many passes, and may embed the last batch again. A collective under FSDP2.

    Args:
        policy ([`~transformers.PreTrainedModel`]): the policy, wrapped or not.
        prompts (`list[np.ndarray]`): token ids of all prompts.
        state ([`~accelerate.PartialState`]): number and index of the processes.
        progress (`bool`): whether to show a progress bar.

    Returns:
        `tuple[np.ndarray, np.ndarray]`: n prompt ids, int64 `(n,)`, and their embeddings, float32 `(n, h)`.
    """
    model: Any = extract_model_from_parallel(policy)
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    body = base.get_decoder()
    device = next(policy.parameters()).device
    options: dict[str, Any] = {"use_cache": False}
    if "logits_to_keep" in inspect.signature(base.forward).parameters:
        options["logits_to_keep"] = 1
    longest = getattr(body.config.get_text_config(), "max_position_embeddings", None)
    prompts = [tokens[:longest] for tokens in prompts]
    batches = _share_of_batches(prompts, state)
    values = []
    with _inference(model), _last_hidden_states(body) as outputs:
        for batch in tqdm(batches, "Embedding prompts", unit="batch", disable=not progress):
            rows = [torch.tensor(prompts[i], dtype=torch.long, device=device) for i in batch]
            ids = pad_sequence(rows, batch_first=True)  # (b, T), on the right: positions need no correction
            mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)  # (b, T)
            model(input_ids=ids, attention_mask=mask, **options)
            hidden = outputs.pop()[:, -ids.shape[1] :].float()  # (b, T, h), behind virtual tokens of prompt tuning
            values.append(_mean_over_tokens(hidden, mask))
    return np.concatenate(batches), np.concatenate(values)


def _share_of_batches(prompts: list[np.ndarray], state: Any) -> list[np.ndarray]:
    """Batches of prompt ids that this process embeds: as many on every process, with the last one again if need be."""
    batches = length_batches(np.array([len(tokens) for tokens in prompts]))
    per_process = -(-len(batches) // state.num_processes)  # rounded up
    share = batches[state.process_index :: state.num_processes]
    return [*share, batches[-1]][:per_process]


@contextmanager
def _inference(model: Any) -> Iterator[None]:
    """Without gradients, in evaluation mode and, where a GPU has it, bfloat16; the model is left as it was."""
    training = model.training
    model.eval()
    try:
        with (
            torch.no_grad(),
            torch.autocast("cuda", torch.bfloat16, enabled=torch.cuda.is_bf16_supported(), cache_enabled=False),
        ):
            yield
    finally:
        model.train(training)
        # FSDP2 leaves the head and the root whole after a pass without a backward one; weights go to vLLM from shards
        model.apply(_reshard)


def _reshard(module: Any) -> None:
    if hasattr(module, "reshard"):
        module.reshard()


@contextmanager
def _last_hidden_states(body: Any) -> Iterator[list[torch.Tensor]]:
    """A list that gets the last hidden states `(b, T, h)` of each forward pass of a model's body, before its head."""
    outputs: list[torch.Tensor] = []

    def keep(module: Any, arguments: Any, output: Any) -> None:
        outputs.append(output[0])

    with body.register_forward_hook(keep):
        yield outputs


def _mean_over_tokens(hidden: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
    """
    Mean of hidden states over the tokens of each prompt.

    Args:
        hidden (`torch.Tensor` of shape `(b, T, h)`): float32; those of padding may be anything, NaN included.
        mask (`torch.Tensor` of shape `(b, T)`): 1 for tokens, 0 for padding.

    Returns:
        `np.ndarray` of shape `(b, h)`: float32.
    """
    mask = mask.to(hidden.device)[..., None]  # (b, T, 1)
    total = hidden.masked_fill(mask == 0, 0.0).sum(dim=1)  # (b, h)
    count = mask.sum(dim=1)  # (b, 1)
    return (total / count).cpu().numpy()


def length_batches(lengths: np.ndarray) -> list[np.ndarray]:
    """
    Batches of prompts of similar length, the longest first.

    Args:
        lengths (`np.ndarray` of shape `(N,)`): tokens of each prompt.

    Returns:
        `list[np.ndarray]`: int64 prompt ids; at most `BATCH_TOKENS` tokens each, padding included, or one prompt.
    """
    order = np.argsort(-lengths, kind="stable")  # the largest batch first: what does not fit shows at once
    batches = []
    while len(order):
        longest = int(lengths[order[0]])
        size = max(1, BATCH_TOKENS // longest)
        batches.append(order[:size])
        order = order[size:]
    return batches


def _embed_by_pretrained(name: str, dataset: Dataset, state: Any, progress: bool) -> tuple[np.ndarray, np.ndarray]:
    """This process's share of the prompts, int64 ids `(n,)`, and their embeddings `(n, h)`, by a pretrained model."""
    encoder = load_pretrained(name, state)
    texts = prompt_texts(dataset)
    ids = np.arange(len(texts))[state.process_index :: state.num_processes]
    values = encoder.encode([texts[i] for i in ids], show_progress_bar=progress)
    return ids, values


def load_pretrained(name: str, state: Any) -> Any:
    """
    Load a model of sentence-transformers, or another encoder or decoder with mean pooling; whole, also under DeepSpeed
    ZeRO-3 or FSDP.

    Args:
        name (`str`): its id or path.
        state ([`~accelerate.PartialState`]): the device, and DeepSpeed's plugin.

    Returns:
        `SentenceTransformer`: the model.

    Raises:
        EmbeddingError: it cannot be loaded, or sentence-transformers is not installed.
    """
    try:
        from sentence_transformers import SentenceTransformer, util

        plugin = getattr(state, "deepspeed_plugin", None)
        whole = nullcontext() if plugin is None else plugin.zero3_init_context_manager(enable=False)
        has_bfloat16 = state.device.type == "cuda" and torch.cuda.is_bf16_supported()
        dtype = torch.bfloat16 if has_bfloat16 else torch.float32
        with whole, patch_environment(fsdp_cpu_ram_efficient_loading="false"):
            model: Any = SentenceTransformer(name, device=str(state.device), model_kwargs={"dtype": dtype})
        if not util.is_sentence_transformer_model(name):
            model[1].pooling_mode = "mean"  # the default depends on the architecture
        return model
    except Exception as error:  # libraries raise what they like
        raise EmbeddingError(
            f"The embedding model {name!r} cannot be loaded ({type(error).__name__}: {error}). It takes 'policy', or "
            "the id or path of a model for sentence-transformers (pip install sentence-transformers)."
        ) from error
