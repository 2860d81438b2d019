"""The models that embed: the policy, or a pretrained model by sentence-transformers; and one forward."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import DistributedType, extract_model_from_parallel, patch_environment
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from peft import PeftModel
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers.integrations import is_deepspeed_zero3_enabled

from trl_dataeff.difficulty.embedding.tokenize import EmbeddingError, PromptTokenizer
from trl_dataeff.utils import hash_array, hash_file, hash_json


_NO_LIMIT = 10**9  # tokenizers without a limit give a huge number
_OTHER_SETTINGS = ("_name_or_path", "transformers_version", "use_cache")
_LORA_FACTOR = re.compile(r"(lora_(?:embedding_)?)([AB])(?=\.|$)")


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


@dataclass
class Source:
    """An embedding model that need not be in memory yet: what identifies it, and how to get it."""

    identity: dict[str, Any]
    load: Callable[[], Embedder]


def policy_source(policy: Any, processor: Any, accelerator: Any = None, **prompt_options: Any) -> Source:
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

    identity = {"model": "policy", "weights": weights_identity(body), "prompts": prompts.identity()}
    return Source(identity, lambda: Embedder(run, prompts, mean_state))


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
            "parameters. Use FSDP2, or set `dots_embedding` to the id or path of a model, such as "
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


def weights_identity(model: Any) -> str:
    """
    Hash of a Transformers model's configuration and weights. A LoRA pair of which one factor is zero changes nothing and is
    left out, so that adapters that start from different seeds have the same identity. A collective if weights are `DTensor`s.
    """
    tensors = {k: v.detach() for k, v in model.state_dict().items() if isinstance(v, torch.Tensor)}
    hashes, adapted = {}, False
    for name, tensor in tensors.items():
        partner = tensors.get(_LORA_FACTOR.sub(lambda m: m[1] + {"A": "B", "B": "A"}[m[2]], name))
        if partner is not None and partner is not tensor:
            if not (_whole(tensor).any() and _whole(partner).any()):
                continue
            adapted = True
        hashes[name.replace(".base_layer", "")] = hash_array(_bytes(_whole(tensor)))
    layers = {n: m for n, m in model.named_modules() if adapted and isinstance(getattr(m, "scaling", None), dict)}
    adapters = {n: [m.scaling, m.active_adapters, m.disable_adapters] for n, m in layers.items()}
    config = {key: value for key, value in model.config.to_dict().items() if key not in _OTHER_SETTINGS}
    return hash_json(type(model).__name__, config, hashes, adapters)


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    flat: np.ndarray = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def pretrained_source(name: str, accelerator: Any = None) -> Source:
    """
    A sentence-transformers model, or another Hugging Face encoder or decoder with mean pooling, by id or path.

    Args:
        name (`str`): id on the Hub, or a folder.
        accelerator ([`~accelerate.Accelerator`], *optional*): says where the model runs. Under DeepSpeed ZeRO-3 or FSDP,
            models are loaded in parts; this one is loaded whole.

    Raises:
        `EmbeddingError`: if it cannot be found or loaded, or sentence-transformers is not installed.
    """
    with _loading(name):
        sentence, revision, identity = _identity(name)

    def load() -> Embedder:
        with _loading(name):
            model = _load(name, accelerator, revision, sentence)
            if model.transformers_model is None:
                raise ValueError("it has no Transformer that takes token ids")
        prompts = PromptTokenizer(model.tokenizer)
        prompts.limit = _limit(model.transformers_model, prompts.tokenizer)
        return Embedder(
            model, prompts, lambda ids, mask: model({"input_ids": ids, "attention_mask": mask})["sentence_embedding"]
        )

    return Source(identity, load)


@contextmanager
def _loading(name: str) -> Iterator[None]:
    """Within this context, whatever goes wrong is an [`EmbeddingError`] that names the model."""
    try:
        yield
    except EmbeddingError:
        raise
    except Exception as error:
        raise EmbeddingError(
            f"The embedding model {name!r} cannot be loaded ({type(error).__name__}: {error}). Give the id of a model on "
            "the Hugging Face Hub or the path of a folder that `save_pretrained` wrote. In training, 'policy' is the trained model."
        ) from error


def _identity(name: str) -> tuple[bool, str | None, dict[str, Any]]:
    """Whether sentence-transformers made a model, its revision on the Hub (a folder has none), and what identifies it."""
    folder = Path(name)
    if folder.is_dir():
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        if not any(path.name == "config.json" for path in files):
            raise FileNotFoundError("no config.json was found; is it a folder of a model, or an id on the Hub?")
        identity = {str(path.relative_to(folder)): hash_file(path) for path in files}
        return folder / "modules.json" in files, None, {"files": identity}
    try:
        sentence, path = True, hf_hub_download(name, "modules.json")
    except EntryNotFoundError:
        sentence, path = False, hf_hub_download(name, "config.json")
    revision = Path(path).parent.name
    return sentence, revision, {"id": name, "revision": revision}


def _load(name: str, accelerator: Any, revision: str | None, sentence: bool) -> Any:
    try:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import Pooling
    except ImportError as error:
        raise EmbeddingError(
            f"The embedding model {name!r} needs sentence-transformers, which cannot be imported ({error}). Install it: "
            "pip install sentence-transformers. Or embed with the policy."
        ) from error
    gpu = torch.cuda.is_available() if accelerator is None else accelerator.device.type == "cuda"
    bf16 = gpu and torch.cuda.is_bf16_supported()
    plugin = getattr(accelerator.state, "deepspeed_plugin", None) if accelerator is not None else None
    whole = nullcontext() if plugin is None else plugin.zero3_init_context_manager(enable=False)
    with whole, patch_environment(fsdp_cpu_ram_efficient_loading="false"):
        model = SentenceTransformer(
            name,
            device=("cuda" if gpu else "cpu") if accelerator is None else str(accelerator.device),
            revision=revision,
            model_kwargs={"dtype": torch.bfloat16 if bf16 else torch.float32},
        )
    if not sentence:  # the default depends on the architecture
        encoder: Any = model[0]
        model = SentenceTransformer(modules=[encoder, Pooling(encoder.get_embedding_dimension(), "mean")])
    return model.requires_grad_(False)
