"""
`embed_dataset()`: embeds every prompt of a dataset once, by the policy or by another model.

Prompts are sorted by length and cut into batches of about equal token counts, which the processes take in turn. The
embeddings are kept in the run's output folder, where a resumed run finds them: by then the policy has changed.
"""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from accelerate.utils import DistributedType, extract_model_from_parallel, patch_environment
from datasets import Dataset
from peft import PeftModel
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import logging
from trl.data_utils import prepare_multimodal_messages

from trl_dataeff.rollouts.distributed import Processes, all_gather
from trl_dataeff.utils import UserError, hash_json, hash_rows, write_atomically


if TYPE_CHECKING:
    from trl import GRPOTrainer

logger = logging.get_logger(__name__)

_CHUNK = 64  # rows that are read and tokenized at a time; images are read with their rows
_LARGEST = float(np.finfo(np.float16).max)
_NO_LIMIT = 10**9  # tokenizers without a limit give a huge number

Prompt = str | list[dict[str, Any]]


class EmbeddingError(UserError):
    """Prompts cannot be embedded: the dataset or the model does not allow it."""


def embed_dataset(
    dataset: Dataset,
    embedding: str = "policy",
    *,
    policy: Any = None,
    tokenizer: Any = None,
    accelerator: Any = None,
    batch_tokens: int = 8192,
    progress: bool = True,
    chat_template: str | None = None,
    tools: list[Any] | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> np.ndarray:
    """
    Embed every prompt of a dataset: the mean of the model's last hidden states over the prompt's own tokens, or what
    a sentence-transformers model makes of them.

    Random states, parameters, and the modes of the policy's modules are left as they are. With several processes this
    is a collective: each embeds its share.

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
        chat_template (`str`), tools (`list`), chat_template_kwargs (`dict`), all *optional*:
            With `"policy"`: how conversations are rendered, as in [`~trl.GRPOTrainer`].

    Returns:
        `np.ndarray` of shape `(N, h)`, float16: row i is prompt i.

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
            embedder = policy_embedder(policy, tokenizer, accelerator, **options)
        else:
            embedder = pretrained_embedder(embedding, accelerator)
        tokens, truncated = embedder.prompts.tokenize(dataset)
        if truncated and processes.is_main:
            limit = embedder.prompts.limit
            logger.warning(
                f"{truncated} of {len(dataset)} prompts are longer than the {limit} tokens that the embedding model "
                f"({embedding!r}) takes: they are embedded by their first {limit} tokens."
            )
        return _embed_tokens(embedder, tokens, processes, batch_tokens, progress)


def embed_for(trainer: GRPOTrainer, dataset: Dataset, embedding: str, *, resumed: bool) -> np.ndarray:
    """
    [`embed_dataset`] with a trainer's policy, tokenizer and chat template, kept in its output folder. A collective if there
    are several processes.

    Args:
        trainer ([`~trl.GRPOTrainer`]): of the run.
        dataset ([`~datasets.Dataset`]): its prompts.
        embedding (`str`): `prompt_embedding`.
        resumed (`bool`): whether the run is resumed, and takes the embeddings that it began with.
    """
    processes = Processes.of(trainer.accelerator)
    path = Path(
        cast(str, trainer.args.output_dir), "dataeff", f"embeddings-{hash_json(embedding, len(dataset))[:8]}.npy"
    )
    if resumed:
        stored = _read(path)
        checksum = None if stored is None else hash_rows(stored)
        everywhere = {checksum} if processes.world_size == 1 else set(all_gather(checksum))
        if stored is not None and everywhere == {checksum} and len(stored) == len(dataset):
            return stored
    computed = embed_dataset(
        dataset,
        embedding,
        policy=trainer.model,
        tokenizer=trainer.processing_class,
        accelerator=trainer.accelerator,
        progress=not trainer.args.disable_tqdm,
        chat_template=trainer.chat_template,
        tools=trainer.tools or None,
        chat_template_kwargs=cast(dict[str, Any], trainer.chat_template_kwargs),
    )
    if processes.is_main:
        try:
            write_atomically(path, lambda temporary: _save(temporary, computed))
        except OSError as error:
            logger.warning(
                f"The prompts' embeddings cannot be kept in {path} ({error}): a resumed run makes them again."
            )
    processes.wait()
    stored = _read(path)  # a memory map, which processes of one machine share
    return stored if stored is not None and hash_rows(stored) == hash_rows(computed) else computed


def _save(path: Path, values: np.ndarray) -> None:
    with open(path, "wb") as file:  # `np.save` would give the file another name
        np.save(file, values)


def _read(path: Path) -> np.ndarray | None:
    """Stored embeddings as a read-only memory map; `None` if there are none that can be read."""
    try:
        values: np.ndarray = np.load(path, mmap_mode="r")
        return values
    except (OSError, ValueError, EOFError):
        return None


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
            "Use another model: set `prompt_embedding` to its id or path."
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


@dataclass
class Embedder:
    """
    A model in memory that embeds token ids.

    Args:
        model (`nn.Module`): what `forward` runs.
        prompts ([`PromptTokenizer`]): makes its token ids.
        forward (`Callable`): token ids and mask `(b, T)`, padded on the right -> embeddings `(b, h)`.
    """

    model: nn.Module
    prompts: PromptTokenizer
    forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def __post_init__(self) -> None:
        self.device = next(self.model.parameters()).device
        padding = self.prompts.tokenizer.pad_token_id
        self.padding = self.prompts.stand_in if padding is None else padding

    @contextmanager
    def inference(self) -> Iterator[None]:
        """No gradients, no dropout, and on a GPU half precision. Each module gets its former mode back."""
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
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
        return self.forward(torch.from_numpy(ids).to(self.device), mask.long()).float()


def policy_embedder(policy: Any, processor: Any, accelerator: Any = None, **prompt_options: Any) -> Embedder:
    """
    The policy as it is now, adapters included, with mean pooling.

    Args:
        policy: the model that is trained; wrappers (DDP, compiled, PEFT) are looked through. With weights sharded by FSDP2
            this and each embedding is a collective.
        processor: its tokenizer or processor.
        accelerator ([`~accelerate.Accelerator`], *optional*): tells whether parameters are sharded.
        prompt_options: `chat_template`, `tools`, `template_kwargs` of [`PromptTokenizer`].

    Raises:
        `EmbeddingError`: without policy or tokenizer, or if the policy's parameters are sharded in another way.
    """
    if policy is None or processor is None:
        raise EmbeddingError(
            "Embedding by 'policy' needs the arguments `policy` and `tokenizer`. Without them, set the embedding to the "
            "id or path of a model."
        )
    _check_usable(policy, accelerator)
    model: Any = extract_model_from_parallel(policy)
    model = model.get_base_model() if isinstance(model, PeftModel) else model
    # The part that turns text tokens into hidden states
    body = model.get_encoder() if getattr(model.config, "is_encoder_decoder", False) else model.get_decoder()
    prompts = PromptTokenizer(processor, **prompt_options)
    prompts.limit = _limit(body, prompts.tokenizer)
    # FSDP2 gathers its shards only in a forward pass of the whole model
    run = policy if any(isinstance(p, DTensor) for p in policy.parameters()) else body
    last_states = _last_states(run, body)

    def mean_state(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        states = last_states(ids, mask).float()  # (b, T, h)
        mask = mask.to(states.device)[..., None]  # states of padding may be anything, NaN included
        return states.masked_fill(mask == 0, 0.0).sum(dim=1) / mask.sum(dim=1)

    return Embedder(run, prompts, mean_state)


def _last_states(model: Any, body: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Token ids and mask -> the last hidden states of `body`, `(b, T, h)`, in a forward pass of `model`, which contains it."""
    root = extract_model_from_parallel(model)
    root = root.get_base_model() if isinstance(root, PeftModel) else root
    taken = inspect.signature(root.forward).parameters
    options = {name: value for name, value in (("use_cache", False), ("logits_to_keep", 1)) if name in taken}

    def states(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        hook = body.register_forward_hook(lambda module, args, output: seen.append(output[0]))
        try:
            model(input_ids=ids, attention_mask=mask, **options)
        finally:
            hook.remove()
        return seen[0]

    return states


def _check_usable(policy: nn.Module, accelerator: Any) -> None:
    parameters = list(policy.parameters())
    fsdp = any(isinstance(module, FullyShardedDataParallel) for module in policy.modules())
    if accelerator is not None and accelerator.distributed_type == DistributedType.FSDP:
        fsdp = fsdp or not any(isinstance(p, DTensor) for p in parameters)  # version 1, or not sharded yet
    if is_deepspeed_zero3_enabled() or fsdp or any(p.is_meta or hasattr(p, "ds_id") for p in parameters):
        raise EmbeddingError(
            "The policy cannot embed the prompts: under FSDP of version 1 or DeepSpeed ZeRO-3 no process holds all of its "
            "parameters. Use FSDP2, or set `prompt_embedding` to the id or path of a model, such as "
            "'sentence-transformers/all-MiniLM-L6-v2'."
        )


def _limit(model: Any, tokenizer: Any) -> int | None:
    """Tokens that a model takes, or `None`."""
    limits = [tokenizer.model_max_length, getattr(model.config.get_text_config(), "max_position_embeddings", None)]
    for name, module in model.named_modules():
        # RoBERTa and its kin count positions from the padding index on
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            limits.append(module.num_embeddings - module.padding_idx - 1)
    return min((limit for limit in limits if limit is not None and 0 < limit < _NO_LIMIT), default=None)


def pretrained_embedder(name: str, accelerator: Any = None) -> Embedder:
    """
    A sentence-transformers model, or another Hugging Face encoder or decoder with mean pooling, by id or path.

    Args:
        name (`str`): id on the Hub, or a folder.
        accelerator ([`~accelerate.Accelerator`], *optional*): says where the model runs. Under DeepSpeed ZeRO-3 or FSDP,
            models are loaded in parts; this one is loaded whole.

    Raises:
        `EmbeddingError`: if it cannot be found or loaded, or sentence-transformers is not installed.
    """
    try:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import Pooling
        from sentence_transformers.util import is_sentence_transformer_model
    except ImportError as error:
        raise EmbeddingError(
            f"The embedding model {name!r} needs sentence-transformers, which cannot be imported ({error}). Install it: "
            "pip install sentence-transformers. Or embed with the policy."
        ) from error
    gpu = torch.cuda.is_available() if accelerator is None else accelerator.device.type == "cuda"
    bf16 = gpu and torch.cuda.is_bf16_supported()
    plugin = getattr(accelerator.state, "deepspeed_plugin", None) if accelerator is not None else None
    whole = nullcontext() if plugin is None else plugin.zero3_init_context_manager(enable=False)
    try:
        with whole, patch_environment(fsdp_cpu_ram_efficient_loading="false"):
            model = SentenceTransformer(
                name,
                device=("cuda" if gpu else "cpu") if accelerator is None else str(accelerator.device),
                model_kwargs={"dtype": torch.bfloat16 if bf16 else torch.float32},
            )
        if not is_sentence_transformer_model(name):  # the default pooling depends on the architecture
            encoder: Any = model[0]
            model = SentenceTransformer(modules=[encoder, Pooling(encoder.get_embedding_dimension(), "mean")])
        if model.transformers_model is None:
            raise ValueError("it has no Transformer that takes token ids")
    except Exception as error:  # libraries raise what they like
        raise EmbeddingError(
            f"The embedding model {name!r} cannot be loaded ({type(error).__name__}: {error}). Give the id of a model on "
            "the Hugging Face Hub or the path of a folder that `save_pretrained` wrote. In training, 'policy' is the trained model."
        ) from error
    model.requires_grad_(False)
    prompts = PromptTokenizer(model.tokenizer)
    prompts.limit = _limit(model.transformers_model, prompts.tokenizer)
    return Embedder(
        model, prompts, lambda ids, mask: model({"input_ids": ids, "attention_mask": mask})["sentence_embedding"]
    )


def read_prompts(dataset: Dataset) -> Iterator[Prompt]:
    """
    The dataset's prompts in order, reduced to their text: strings as they are, conversations as messages whose content
    is a string (or `None`). A transform that makes the prompts is run.

    Raises:
        `EmbeddingError`: if there is no column `prompt`, or a prompt is neither a string nor a list of messages.
    """
    if "prompt" in dataset.column_names and dataset.format["type"] != "custom":
        dataset = dataset.with_format(None).select_columns(["prompt"])
    row = itertools.count()
    for rows in dataset.iter(_CHUNK):
        if "prompt" not in rows:
            raise EmbeddingError(
                f"The dataset has no column 'prompt' to embed; its columns are {sorted(rows)}. Rename the column that "
                "holds the prompts: `dataset.rename_column('question', 'prompt')`."
            )
        yield from map(_text_only, rows["prompt"], row)


def _text_only(prompt: Any, row: int) -> Prompt:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt):
        return [{**message, "content": _text_of(message.get("content"))} for message in prompt]
    raise EmbeddingError(
        f"The prompt of row {row} is of type {type(prompt).__name__}; a prompt is a string or a list of messages "
        "({'role': ..., 'content': ...}). Remove the row or correct it."
    )


def _text_of(content: Any) -> Any:
    """The text parts of a message's content. What is not a list of parts is content already."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") for part in content if part.get("type", "text") == "text"]
    return "\n".join(text for text in texts if text)


@dataclass
class PromptTokenizer:
    """
    Prompts to token ids, as TRL does it: conversations through the chat template with the generation prompt, strings
    with the tokenizer's special tokens. Without a chat template, a conversation is its contents joined by newlines.

    Args:
        processor: a tokenizer, or a processor that has one; its templates expect the content of a message in parts.
        chat_template (`str`, *optional*): instead of the processor's own.
        tools (`list`, *optional*), template_kwargs (`dict`, *optional*): further arguments of the template.
        limit (`int`, *optional*): tokens that the model takes; longer prompts are cut. Unset: no limit.
    """

    processor: Any
    chat_template: str | None = None
    tools: list[Any] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    limit: int | None = None

    def __post_init__(self) -> None:
        self.tokenizer = getattr(self.processor, "tokenizer", self.processor)
        if self.processor is not self.tokenizer:
            self.chat_template = self.chat_template or getattr(self.processor, "chat_template", None)
        self.template = self.chat_template or self.tokenizer.chat_template
        ids = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id, self.tokenizer.pad_token_id)
        self.stand_in = next((i for i in ids if i is not None), 0)  # for a prompt without any token

    def tokenize(self, dataset: Dataset) -> tuple[list[np.ndarray], int]:
        """Token ids of each prompt, int32 `(T_i,)` with T_i >= 1, and how many prompts were cut."""
        tokens: list[np.ndarray] = []
        truncated = 0
        chunks = itertools.groupby(enumerate(read_prompts(dataset)), lambda item: (item[0] // _CHUNK, type(item[1])))
        for (_, kind), chunk in chunks:
            encoded = self.tokenizer(
                [self._render(prompt, row) for row, prompt in chunk],
                add_special_tokens=kind is str or not self.template,  # a chat template writes special tokens itself
                truncation=self.limit is not None,
                max_length=self.limit,
                verbose=False,
            )
            tokens += [np.array(ids or [self.stand_in], dtype=np.int32) for ids in encoded["input_ids"]]
            truncated += sum(bool(each.overflowing) for each in encoded.encodings or ())
        return tokens, truncated

    def _render(self, prompt: Prompt, row: int) -> str:
        if isinstance(prompt, str):
            return prompt
        if not prompt:
            return ""
        if not self.template:
            return "\n".join(message["content"] or "" for message in prompt)
        try:
            text: str = self.tokenizer.apply_chat_template(
                prepare_multimodal_messages(prompt) if self.processor is not self.tokenizer else prompt,
                tools=self.tools or None,
                chat_template=self.chat_template,
                add_generation_prompt=True,
                tokenize=False,
                **self.template_kwargs,
            )
            return text
        except Exception as error:  # templates raise what they like
            raise EmbeddingError(
                f"The chat template cannot render the prompt of row {row} ({type(error).__name__}: {error}). Correct "
                "the prompt's messages, or the template."
            ) from error
