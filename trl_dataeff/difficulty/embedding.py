"""`embed_dataset()`: embeds every prompt of a dataset, by the policy or by another model. `embed_for()`: does so once in a run."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
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
    Embed every prompt of a dataset: float16 `(N, h)`, row i is prompt i. It is the mean of the policy's last hidden states over the
    prompt's own tokens, or what `SentenceTransformer.encode` returns. A prompt that is longer than the model takes is cut. Restores
    torch's random state. A collective: each process embeds its share. Raises an [`EmbeddingError`] if there are no rows, a prompt
    cannot be rendered, the model cannot be loaded, or its values are not finite.

    Args:
        dataset ([`~datasets.Dataset`]): N rows with a `prompt`, a string or a conversation, of which the text parts are embedded.
        model ([`~transformers.PreTrainedModel`] or `str`): the policy, wrapped or not; or the id or path of a model for
            sentence-transformers, which embeds the contents of a conversation's messages, joined by newlines.
        tokenizer (tokenizer or processor, *optional*): of the policy; its chat template renders conversations.
        accelerator ([`~accelerate.Accelerator`], *optional*): of the run; by default all processes of this launch take part.
        template (`dict`, *optional*): keyword arguments of `apply_chat_template`, for the policy.
        progress (`bool`, *optional*, defaults to `True`): whether to show a progress bar, on the main process.
    """
    if not len(dataset):
        raise EmbeddingError("The dataset has no rows, so there is nothing to embed. Give one with prompts.")
    state: Any = PartialState() if accelerator is None else accelerator
    progress = progress and state.is_main_process
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        if isinstance(model, str):
            encoder, texts = load_pretrained(model, state), prompt_texts(dataset)
            ids = np.arange(len(texts))[state.process_index :: state.num_processes]
            values = encoder.encode([texts[i] for i in ids], show_progress_bar=progress)
        else:
            _check_whole(model, state)
            if state.distributed_type == DistributedType.DEEPSPEED:
                model.to(state.device)  # where its engine moves it later
            ids, values = embed_by_policy(model, prompt_tokens(dataset, tokenizer, template), state, progress)
    # In float16, whose largest number is 65,504. With NCCL, objects that processes exchange pass through the GPU's memory
    values = np.where(np.isfinite(values), values.clip(-65504, 65504), np.nan).astype(np.float16)
    pieces = [slice(i, i + 2**14) for i in range(0, len(dataset), 2**14)]
    parts = [part for piece in pieces for part in all_gather((ids[piece], values[piece])) if len(part[0])]
    out = np.empty((len(dataset), parts[0][1].shape[1]), np.float16)
    for ids, values in parts:
        out[ids] = values
    wrong = np.flatnonzero(np.isnan(out).any(axis=1))
    if len(wrong):
        raise EmbeddingError(
            f"The embeddings of {len(wrong)} rows, such as {wrong[0]}, are not finite. Set `prompt_embedding` to another model."
        )
    return out


def embed_for(trainer: Any, dataset: Dataset, embedding: str, *, resumed: bool) -> np.ndarray:
    """
    [`embed_dataset`] by the policy of a [`~trl.GRPOTrainer`] if `embedding` is `"policy"`, or by the model of this id or path. They are
    kept in the output folder, in a file that processes of one machine share, for a run that is `resumed`: by then the policy has changed.
    """
    name = f"_dataeff/embeddings-{hash_json(embedding, trainer.collector.dataset_hash)[:8]}.npy"  # `_`: not pushed to the Hub
    path = Path(trainer.args.output_dir, name)
    if resumed:
        stored = _read(path)
        hashes = set(all_gather(None if stored is None else hash_rows(stored)))
        if stored is not None and len(hashes) == 1 and len(stored) == len(dataset):
            return stored
    template = {"chat_template": trainer.chat_template, "tools": trainer.tools or None, **trainer.chat_template_kwargs}
    computed = embed_dataset(
        dataset,
        trainer.model if embedding == "policy" else embedding,
        trainer.processing_class,
        accelerator=trainer.accelerator,
        template=template,
        progress=not trainer.args.disable_tqdm,
    )
    if trainer.accelerator.is_main_process:
        try:
            write_atomically(path, partial(np.save, arr=computed))
        except OSError as error:
            logger.warning(f"The embeddings cannot be kept in {path} ({error}): a resumed run makes them again.")
    trainer.accelerator.wait_for_everyone()
    stored = _read(path)
    return stored if stored is not None and hash_rows(stored) == hash_rows(computed) else computed


def _read(path: Path) -> np.ndarray | None:
    """Stored embeddings as a read-only memory map; `None` if there are none that can be read."""
    try:
        return cast(np.ndarray, np.load(path, mmap_mode="r"))
    except (OSError, ValueError, EOFError):
        return None


def prompt_tokens(dataset: Dataset, processor: Any, template: dict[str, Any] | None) -> list[np.ndarray]:
    """Token ids of every prompt, as TRL feeds them to the policy; an empty prompt is one end token."""
    texts = prompt_texts(dataset, processor, template)
    plain = isinstance(dataset[0]["prompt"], str)  # a chat template writes special tokens itself
    tokenizer = getattr(processor, "tokenizer", processor)
    encode = partial(tokenizer, add_special_tokens=plain, verbose=False)
    parts = (encode(texts[i : i + 1024]) for i in range(0, len(texts), 1024))  # lists of Python's numbers are large
    return [np.array(ids or [tokenizer.eos_token_id or 0], np.int32) for part in parts for ids in part["input_ids"]]


def prompt_texts(dataset: Dataset, processor: Any = None, template: dict[str, Any] | None = None) -> list[str]:
    """
    The dataset's prompts as text: strings as they are, conversations by the processor's chat template with the generation
    prompt, as in TRL. Without a processor, the contents of the messages are joined by newlines.
    """
    options = {"add_generation_prompt": True, **(template or {}), "tokenize": False}

    def render(prompt: Any) -> str:
        if isinstance(prompt, str):
            return prompt
        messages = [{**message, "content": _text_of(message.get("content"))} for message in prompt]
        if processor is None:
            return "\n".join(message["content"] or "" for message in messages)
        if hasattr(processor, "tokenizer"):  # templates of such processors expect contents in parts
            messages = prepare_multimodal_messages(messages)
        return str(processor.apply_chat_template(messages, **options))

    if "prompt" in dataset.column_names and dataset.format["type"] != "custom":
        dataset = dataset.with_format(None).select_columns(["prompt"])  # no image is decoded
    texts: list[str] = []
    try:
        for prompt in (prompt for rows in dataset.iter(64) for prompt in rows["prompt"]):
            texts.append(render(prompt))  # its length is the row of an error
    except Exception as error:  # templates and transforms raise what they like
        raise EmbeddingError(
            f"The prompt of row {len(texts)} cannot be rendered ({type(error).__name__}: {error}). It takes a string or a list of "
            f"messages in the column `prompt` of {dataset.column_names}, and a chat template that fits."
        ) from error
    return texts


def _text_of(content: Any) -> Any:
    """The text parts of a message's content, which may be text itself."""
    if not isinstance(content, list):
        return content
    return "\n".join(p["text"] for p in content if p.get("type", "text") == "text" and p.get("text"))


def _check_whole(policy: Any, state: Any) -> None:
    """Raise an [`EmbeddingError`] if a forward pass of the policy on a single process would lack parameters."""
    parameters = list(policy.parameters())
    fsdp1 = state.distributed_type == DistributedType.FSDP and not any(isinstance(p, DTensor) for p in parameters)
    if fsdp1 or is_deepspeed_zero3_enabled() or any(p.is_meta or hasattr(p, "ds_id") for p in parameters):
        raise EmbeddingError(
            "The policy cannot embed prompts under FSDP of version 1 or DeepSpeed ZeRO-3. Use FSDP2, or set `prompt_embedding` to "
            "another model, such as 'sentence-transformers/all-MiniLM-L6-v2'."
        )


def embed_by_policy(
    policy: Any, prompts: list[np.ndarray], state: Any, progress: bool
) -> tuple[np.ndarray, np.ndarray]:
    """
    This process's share of prompts, given as token ids, and their embeddings, float32 `(n, h)`, by the policy with its adapters. The
    whole model runs, so that FSDP2 gathers its shards. All processes make as many passes, and may embed the last batch again.
    """
    model: Any = extract_model_from_parallel(policy)
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    body, device, training = base.get_decoder(), next(policy.parameters()).device, model.training
    takes_logits = "logits_to_keep" in inspect.signature(base.forward).parameters
    options = {"use_cache": False} | ({"logits_to_keep": 1} if takes_logits else {})
    limit = getattr(body.config.get_text_config(), "max_position_embeddings", None)
    batches = length_batches(np.array([len(ids[:limit]) for ids in prompts]))
    rounds = -(-len(batches) // state.num_processes)
    own = [*batches[state.process_index :: state.num_processes], batches[-1]][:rounds]
    seen: list[torch.Tensor] = []  # last hidden states, before the head
    values = []
    model.eval()
    try:
        with (
            torch.no_grad(),
            torch.autocast("cuda", torch.bfloat16, enabled=torch.cuda.is_bf16_supported(), cache_enabled=False),
            body.register_forward_hook(lambda module, args, output: seen.append(output[0])),
        ):
            for batch in tqdm(own, "Embedding prompts", unit="batch", disable=not progress):
                rows = [torch.tensor(prompts[i][:limit], dtype=torch.long, device=device) for i in batch]
                ids = pad_sequence(rows, batch_first=True)  # (b, T), on the right: positions need no correction
                mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
                model(input_ids=ids, attention_mask=mask, **options)
                states = seen.pop()[:, -ids.shape[1] :].float()  # (b, T, h), behind virtual tokens of prompt tuning
                mask = mask.to(states.device)[..., None]  # states of padding may be anything, NaN included
                values.append((states.masked_fill(mask == 0, 0.0).sum(dim=1) / mask.sum(dim=1)).cpu().numpy())
    finally:
        # FSDP2 leaves the head and the root whole after a pass without a backward one; weights go to vLLM from shards
        model.train(training).apply(lambda module: module.reshard() if hasattr(module, "reshard") else None)
    return np.concatenate(own), np.concatenate(values)


def length_batches(lengths: np.ndarray) -> list[np.ndarray]:
    """Prompt ids, the longest of `lengths` `(N,)` first, in batches of at most `BATCH_TOKENS` tokens, or of one prompt."""
    order = np.argsort(-lengths, kind="stable")  # the largest batch first: what does not fit shows at once
    batches = []
    while len(order):
        rows = max(1, BATCH_TOKENS // int(lengths[order[0]]))
        batches.append(order[:rows])
        order = order[rows:]
    return batches


def load_pretrained(name: str, state: Any) -> Any:
    """A model of sentence-transformers, or another encoder or decoder with mean pooling; whole, also under DeepSpeed ZeRO-3 or FSDP."""
    try:
        from sentence_transformers import SentenceTransformer, util

        plugin = getattr(state, "deepspeed_plugin", None)
        whole = nullcontext() if plugin is None else plugin.zero3_init_context_manager(enable=False)
        dtype = torch.bfloat16 if state.device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
        with whole, patch_environment(fsdp_cpu_ram_efficient_loading="false"):
            model: Any = SentenceTransformer(name, device=str(state.device), model_kwargs={"dtype": dtype})
        if not util.is_sentence_transformer_model(name):
            model[1].pooling_mode = "mean"  # the default depends on the architecture
        return model
    except Exception as error:  # libraries raise what they like
        raise EmbeddingError(
            f"The embedding model {name!r} cannot be loaded ({type(error).__name__}: {error}). It takes 'policy', or the id or path of "
            "a model for sentence-transformers (pip install sentence-transformers)."
        ) from error
