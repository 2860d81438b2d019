"""When two models embed alike: hashes of weights in memory, and of a model's folder."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch


_OTHER_SETTINGS = ("_name_or_path", "transformers_version", "use_cache")
_LORA_FACTOR = re.compile(r"(lora_(?:embedding_)?)([AB])(?=\.|$)")
_SAMPLED_VALUES = 64
_SAMPLED_BLOCKS, _BLOCK = 256, 4096
_MODEL_FILES = {".json", ".txt", ".model", ".jinja", ".safetensors", ".bin", ".py"}


def weights_identity(model: Any) -> str:
    """
    A hash of a model's configuration and weights: of each tensor the sum of all its bits, so that no value can change
    unseen, and 64 values spread over it. A LoRA pair of which one factor is zero changes nothing and is left out, so
    that runs whose adapters start from another seed have one identity.
    """
    digest = hashlib.sha256(type(model).__name__.encode())
    config = {key: value for key, value in model.config.to_dict().items() if key not in _OTHER_SETTINGS}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    tensors = {k: v.detach() for k, v in model.state_dict().items() if isinstance(v, torch.Tensor)}
    adapted = False
    for name, tensor in tensors.items():
        partner = tensors.get(_LORA_FACTOR.sub(lambda m: m[1] + {"A": "B", "B": "A"}[m[2]], name))
        if partner is not None and partner is not tensor:
            if not (tensor.any() and partner.any()):
                continue
            adapted = True
        digest.update(f"{name.replace('.base_layer', '')} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(_tensor_identity(tensor))
    if adapted:
        layers = {n: m for n, m in model.named_modules() if isinstance(getattr(m, "scaling", None), dict)}
        digest.update(
            repr([(n, m.scaling, m.active_adapters, m.disable_adapters) for n, m in layers.items()]).encode()
        )
    return digest.hexdigest()


def _tensor_identity(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32}.get(tensor.element_size(), torch.int64)
    bits = tensor.contiguous().view(-1).view(width)
    samples = torch.linspace(0, bits.numel() - 1, min(bits.numel(), _SAMPLED_VALUES), dtype=torch.float64).long()
    values = bits[samples.to(bits.device)].long().cpu().numpy()
    return bits.sum(dtype=torch.int64).cpu().numpy().tobytes() + values.tobytes()


def folder_identity(folder: Path) -> str:
    """A hash of a model folder's files: name, size, time of change, and up to 256 blocks of 4 KiB of each."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in _MODEL_FILES and path.is_file():
            stat = path.stat()
            digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}".encode())
            with open(path, "rb") as file:
                for start in np.linspace(0, max(0, stat.st_size - _BLOCK), _SAMPLED_BLOCKS).astype(int):
                    file.seek(start)
                    digest.update(file.read(_BLOCK))
    return digest.hexdigest()
